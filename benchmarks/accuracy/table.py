"""The results as markdown: a table with footnotes, then the verdicts."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.accuracy.peers import PEERS
from benchmarks.accuracy.records import FLOAT, MINILM, SMOLLM2, Record, Results, ratio
from benchmarks.accuracy.verdicts import FAIL, OPEN, Check, against

HEAD = (
    "scheme", "library", "perplexity", "/ bf16", "ours / theirs", "bar", "cosine: mean", "worst",
    "1 - mean: ours / theirs", "SQNR of SmolLM2, dB", "of MiniLM, dB",
)  # fmt: skip

TEXT = """\
SmolLM2's stored weights already lie on a Q4_1 grid: blocks of 32 along K, 16 levels, a scale and a float
minimum. Groups of 32 with a float zero point find that grid again, so they are all but lossless there and say
nothing; the other int4 rows of SmolLM2 measure how its grid falls on theirs. MiniLM was never quantized: its
columns carry the comparison of int4. SQNR: mean over the quantized layers of
10 log10(sum w^2 / sum (w - w')^2), w' in the model's dtype; a layer counts with at most 100 dB.
Bar, where both are the same scheme: ours / theirs <= 1.005 in perplexity; of int4, theirs / ours <= 1.005 in
mean cosine. Symmetric int4, where the rules for scales differ, is shown and not judged."""


class Notes:
    """Footnotes; equal texts share a number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str | None) -> str:
        """The mark of a text; nothing for none."""
        if not text:
            return ""
        if text not in self.texts:
            self.texts.append(text)
        return f" [{self.texts.index(text) + 1}]"


def render_table(results: Results) -> str:
    """One line per case: ours, then the peers beside it. What has no number has a footnote that says why."""
    notes = Notes()
    lines = [HEAD, ("---",) * len(HEAD)]
    lines += [_line(results, case, notes) for case in results.cases()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    footnotes = "\n".join(f"- [{i}] {text}" for i, text in enumerate(notes.texts, 1))
    return f"{table}\n\n{footnotes}\n\n{TEXT}" if footnotes else f"{table}\n\n{TEXT}"


def _line(results: Results, case: str, notes: Notes) -> tuple[str, ...]:
    peer = PEERS.get(case)
    language, sentences = results.get(case, SMOLLM2), results.get(case, MINILM)
    mark = "".join(dict.fromkeys(notes.mark(text) for text in (language.note, sentences.note)))
    scheme = f"`{case}`" if peer is None else f"`{peer.beside}`"
    library = "fxquant" if peer is None else peer.title
    if case == FLOAT:
        scheme, library = "bf16, float32", "transformers, eager"
    over = loss = bar = ""
    if peer is not None:
        over = _number(ratio(results.perplexity(peer.beside), results.perplexity(case)), 4)
        loss = _number(ratio(results.loss(peer.beside), results.loss(case)), 2)
        bar = _bar(against(results, peer), peer.unlike, notes)
    return (
        scheme, library + mark,
        _value(language, "perplexity", 4, notes),
        _number(ratio(results.perplexity(case), results.perplexity(FLOAT)), 4),
        over, bar,
        _value(sentences, "mean", 5, notes),
        _number(sentences.minimum, 5),
        loss, _number(language.sqnr, 2), _number(sentences.sqnr, 2),
    )  # fmt: skip


def _bar(check: Check, unlike: str, notes: Notes) -> str:
    """The verdict, or the reason for none."""
    if unlike:
        return f"not judged{notes.mark(unlike)}"
    return "" if check.status == OPEN else check.status


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _value(record: Record, name: str, digits: int, notes: Notes) -> str:
    if record.reason is not None:
        return f"-{notes.mark(record.reason)}"
    return _number(getattr(record, name), digits)


def render_verdicts(checks: Iterable[Check]) -> str:
    """One line per bar, those that failed first."""
    ordered = sorted(checks, key=lambda check: check.status != FAIL)
    return "\n".join(f"- {check.status}: {check.text}" for check in ordered)
