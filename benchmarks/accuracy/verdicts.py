"""The bars, judged from records alone."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.accuracy.own import REFINED
from benchmarks.accuracy.peers import PEERS, Peer
from benchmarks.accuracy.records import FLOAT, MINILM, SMOLLM2, Results, ratio
from benchmarks.loading.verdicts import FAIL, OPEN, PASS, Check, at_most
from fxquant.scheme import find_scheme

__all__ = ["FAIL", "OPEN", "PASS", "Check", "against", "judge"]

WORSE = 1.005
"""Perplexity over a peer's with the same scheme, and of weight-only int8 over the float model's. Of int4 the
cosine of a peer over ours: SmolLM2's weights lie on a 4-bit grid of their own."""
PLAIN, ASYMMETRIC = "int4_g64", "int4_g64_asym"
BARS = ((ASYMMETRIC, 0.80), (PLAIN, 0.50))
"""Of the gap over float of an unrefined form, the most that the best refined one may leave."""


def against(results: Results, peer: Peer) -> Check:
    """Our scheme against a peer's: in perplexity, or in cosine where weights are int4."""
    weight = find_scheme(peer.beside).weight
    if weight is not None and weight.codes == "int4":
        value = ratio(results.mean(peer.name), results.mean(peer.beside))
        text = f"cosine of {peer.title} / {peer.beside}"
        why = _why(results, MINILM, peer.beside, peer.name)
    else:
        value = ratio(results.perplexity(peer.beside), results.perplexity(peer.name))
        text = f"{peer.beside} / {peer.title}"
        why = _why(results, SMOLLM2, peer.beside, peer.name)
    return at_most(text, value, WORSE, "x", why)


def judge(results: Results) -> list[Check]:
    """Every bar whose cases were asked for, in order."""
    asked = set(results.cases())
    return [
        *(_over_float(results, name) for name in ("none", "int8_weight_only") if name in asked),
        *(
            against(results, peer)
            for name, peer in PEERS.items()
            if name in asked and peer.beside in asked and not peer.unlike
        ),
        *_refined(results, asked),
    ]


def _over_float(results: Results, case: str) -> Check:
    value = ratio(results.perplexity(case), results.perplexity(FLOAT))
    return at_most(f"{case} / {FLOAT}", value, WORSE, "x", _why(results, SMOLLM2, case, FLOAT))


def _refined(results: Results, asked: Iterable[str]) -> Iterable[Check]:
    """What refined scales leave of the gap."""
    forms = [form for form in REFINED if form in asked]
    gaps = {form: gap for form in forms if (gap := _gap(results, form)) is not None}
    best = min(gaps, key=gaps.__getitem__, default=None)
    for base, bar in BARS if forms else ():
        value = ratio(None if best is None else gaps[best], _gap(results, base))
        text = f"gap of the best refined form of group 64 ({best}) / gap of {base}"
        yield at_most(text, value, bar, "x", _why(results, SMOLLM2, base, *forms))


def _gap(results: Results, case: str) -> float | None:
    """Perplexity over the float model's."""
    ours, exact = results.perplexity(case), results.perplexity(FLOAT)
    return None if ours is None or exact is None else ours - exact


def _why(results: Results, model: str, *cases: str) -> str:
    records = [results.get(case, model) for case in cases]
    missing = (record for record in records if record.perplexity is None and record.mean is None)
    return next((f"{record.case}: {record.reason}" for record in missing), "no number")
