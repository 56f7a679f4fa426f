"""The acceptance items, judged from records alone. The numbering is that of the project's list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.loading.records import Results

PASS, FAIL, OPEN = "PASS", "FAIL", "not measured"

INT8, SMALLEST, FLOOR = "fxquant:int8", "fxquant:int8@smallest", "floor_tile:t2e"
TILE_MIB = 4.0
"""Per thread: 2 MiB of float32 and 2 MiB that are read."""
FILE_MIB = 16.0
"""Pages of libraries that the first use of an op brings in; the floors show as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Which model stands for what: the main one, the wide ones, and the one whose codes are all checked."""

    main: str
    wide: tuple[str, ...]
    small: str


BIG = Models(main="llama2b", wide=("widedit", "one_big"), small="llama_small")
SMALL = Models(main="llama_small", wide=("wide_small",), small="llama_small")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison: its status, and a text with the numbers or the reason."""

    status: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One acceptance item. It passes when every check does, and fails when one does."""

    number: int
    title: str
    checks: tuple[Check, ...]

    @property
    def status(self) -> str:
        """FAIL before not measured before PASS."""
        found = {check.status for check in self.checks}
        return next((status for status in (FAIL, OPEN) if status in found), PASS if found else OPEN)

    @property
    def counts(self) -> str:
        """How many checks passed, failed and were not measured."""
        statuses = [check.status for check in self.checks]
        return ", ".join(f"{statuses.count(s)} {s}" for s in (PASS, FAIL, OPEN) if s in statuses)


def at_most(what: str, value: float | None, bar: float | None, unit: str, why: str) -> Check:
    """PASS if `value <= bar`; not measured, because of `why`, if one of them is missing."""
    if value is None or bar is None:
        return Check(status=OPEN, text=f"{what} ({why})")
    status = PASS if value <= bar else FAIL
    return Check(status=status, text=f"{what}: {value:.4g}{unit} (bar {bar:.4g}{unit})")


def at_least(what: str, value: float | None, bar: float, unit: str, why: str) -> Check:
    """PASS if `value >= bar`; not measured, because of `why`, if the value is missing."""
    if value is None:
        return Check(status=OPEN, text=f"{what} ({why})")
    status = PASS if value >= bar else FAIL
    return Check(status=status, text=f"{what}: {value:.4g}{unit} (bar {bar:.4g}{unit})")


def judge(results: Results, models: Models) -> list[Item]:
    """Every item, in order."""
    return [
        Item(number=number, title=title, checks=tuple(checks(results, models)))
        for number, title, checks in ITEMS
    ]


def _why(results: Results, model: str, *cases: str) -> str:
    """The reason of the first case that has no numbers."""
    return next((results.why(model, case) for case in cases if not results.of(model, case)), "no number")


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _load_ratio(results: Results, model: str, case: str, floor: str, bar: float) -> Check:
    """The load of `case` against that of `floor`, with the whole call beside it."""
    value = _ratio(results.median(model, case, "load_s"), results.median(model, floor, "load_s"))
    check = at_most(f"{model} {case} / {floor}", value, bar, "x", _why(results, model, case, floor))
    whole = _ratio(results.median(model, case, "wall_s"), results.median(model, floor, "load_s"))
    if value is None or whole is None:
        return check
    return Check(status=check.status, text=f"{check.text}, whole call {whole:.4g}x")


def _faster(results: Results, model: str, peer: str, bar: float) -> Check:
    """How many times faster than a peer's whole load; the whole call is told beside it."""
    theirs = results.median(model, peer, "wall_s")
    value = _ratio(theirs, results.median(model, INT8, "load_s"))
    check = at_least(f"{model} {INT8} faster than {peer}", value, bar, "x", _why(results, model, INT8, peer))
    whole = _ratio(theirs, results.median(model, INT8, "wall_s"))
    if value is None or whole is None:
        return check
    return Check(status=check.status, text=f"{check.text}, whole call {whole:.4g}x")


def _codes(results: Results, model: str, case: str) -> Check:
    checked = results.values(model, case, "checked")
    wrong = results.values(model, case, "wrong")
    if not checked or not wrong:
        return Check(status=OPEN, text=f"{model} {case} codes ({_why(results, model, case)})")
    status = PASS if sum(wrong) == 0 and sum(checked) > 0 else FAIL
    text = f"{model} {case} codes: {sum(wrong):.0f} wrong values in {sum(checked):.0f} weights"
    return Check(status=status, text=text)


def speed(results: Results, models: Models) -> Iterable[Check]:
    """Item 1."""
    main = models.main
    yield _load_ratio(results, main, INT8, FLOOR, 1.15)
    yield _faster(results, main, "quanto:qint8", 3.5)
    yield _faster(results, main, "hf:ao_w8a8", 6.0)
    why = _why(results, main, INT8)
    yield at_most(f"{main} plan", results.median(main, INT8, "plan_s"), 10.0, " s", why)
    for model in dict.fromkeys((models.small, main)):
        yield _codes(results, model, INT8)


def memory(results: Results, models: Models) -> Iterable[Check]:
    """Item 2."""
    main, why = models.main, _why(results, models.main, INT8)
    rows = results.of(main, INT8)
    ideal = results.median(main, INT8, "ideal")
    bar = None if ideal is None else 1.02 * ideal + rows[0].threads * TILE_MIB
    for name, what in (("peak_anon", "peak"), ("settled_anon", "settled")):
        yield at_most(f"{main} {what} anon", results.largest(main, INT8, name), bar, " MiB", why)
    spread = results.spread(main, INT8, "peak_anon")
    yield at_most(f"{main} variation of the peak", spread, 0.01, "", why if not rows else "one run")
    yield at_most(f"{main} file pages", results.largest(main, INT8, "peak_file"), FILE_MIB, " MiB", why)
    yield at_most(f"{main} left by plan", results.largest(main, INT8, "plan_anon"), 120.0, " MiB", why)


def wide_peaks(results: Results, models: Models) -> Iterable[Check]:
    """Item 3."""
    for model in models.wide:
        ideal = results.median(model, INT8, "ideal")
        bar = None if ideal is None else ideal + 32.0
        peak = results.largest(model, INT8, "peak_anon")
        yield at_most(f"{model} peak anon", peak, bar, " MiB", _why(results, model, INT8))


def predictions(results: Results, models: Models) -> Iterable[Check]:
    """Item 4."""
    for model in (models.main, *models.wide):
        for case in (INT8, SMALLEST):
            predicted = results.median(model, case, "predicted")
            for name, what in (("measured", "measured_peak"), ("peak_anon", "peak anon")):
                value = results.median(model, case, name)
                text = f"{model} {case} predicted against {what}"
                if value is None or predicted is None:
                    yield Check(status=OPEN, text=f"{text} ({_why(results, model, case)})")
                    continue
                off = abs(predicted - value)
                check = at_most(text, off, max(0.03 * value, 16.0), " MiB", "")
                yield Check(status=check.status, text=f"{check.text}, {predicted:.1f} and {value:.1f}")
        yield _codes(results, model, SMALLEST)


def reload(results: Results, models: Models) -> Iterable[Check]:
    """Item 5."""
    for case in ("fxquant:saved", "fxquant:cache"):
        yield _load_ratio(results, models.main, case, "read_fresh", 1.25)
        yield _codes(results, models.main, case)


def cold(results: Results, models: Models) -> Iterable[Check]:
    """Item 6."""
    main = models.main
    value = results.median(main, INT8, "load_s", cold=True)
    reading = results.median(main, "read", "load_s", cold=True)
    quantizing = results.median(main, FLOOR, "load_s")
    missing = [
        results.why(main, case, cold=True) for case in (INT8, "read") if not results.of(main, case, cold=True)
    ]
    missing += [results.why(main, FLOOR)] if quantizing is None else []
    bar = None if reading is None or quantizing is None else max(reading, quantizing)
    why = missing[0] if missing else "no number"
    yield at_most(f"{main} cold {INT8} / max(read, {FLOOR})", _ratio(value, bar), 1.15, "x", why)


def stretch(results: Results, models: Models) -> Iterable[Check]:
    """Item 9."""
    yield _load_ratio(results, models.main, INT8, "floor_tile:t2", 1.1)


ITEMS: tuple[tuple[int, str, Callable[[Results, Models], Iterable[Check]]], ...] = (
    (1, "warm load", speed),
    (2, "memory of the load", memory),
    (3, "peak with very large weights", wide_peaks),
    (4, "predicted peak", predictions),
    (5, "saved constants", reload),
    (6, "cold load", cold),
    (9, "stretch: the compiled floor", stretch),
)
