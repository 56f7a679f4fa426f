"""The results as text: a table, then a verdict for each item."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.loading.records import Results
from benchmarks.loading.verdicts import FLOOR, Item

HEAD = (
    "model", "case", "load s (median; all)", "whole s", "plan s", "cpu s",
    "peak anon", "settled", "ideal", "file", f"x {FLOOR}", "codes",
)  # fmt: skip


def render_table(results: Results) -> str:
    """One line per row that has numbers, in MiB and seconds, then those that have none with the reason."""
    lines: list[tuple[str, ...]] = [HEAD]
    missing = []
    for model, case, cold in results.rows():
        name = f"{case} cold" if cold else case
        if results.of(model, case, cold=cold):
            lines.append((model, name, *_cells(results, model, case, cold=cold)))
        else:
            missing.append(f"not available: {model} {name}: {results.reason(model, case, cold=cold)}")
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([*text, *missing])


def _cells(results: Results, model: str, case: str, *, cold: bool) -> list[str]:
    def number(name: str, digits: int) -> str:
        value = results.median(model, case, name, cold=cold)
        return "" if value is None else f"{value:.{digits}f}"

    runs = ", ".join(f"{value:.2f}" for value in results.values(model, case, "load_s", cold=cold))
    load, floor = results.median(model, case, "load_s", cold=cold), results.median(model, FLOOR, "load_s")
    ratio = "" if load is None or not floor else f"{load / floor:.2f}"
    seconds = [
        f"{number('load_s', 2)} ({runs})",
        *(number(name, 2) for name in ("wall_s", "plan_s", "cpu_s")),
    ]
    memory = [number(name, 0) for name in ("peak_anon", "settled_anon", "ideal", "peak_file")]
    checked, wrong = (results.values(model, case, name, cold=cold) for name in ("checked", "wrong"))
    codes = "" if not checked else f"{sum(wrong):.0f} wrong" if any(wrong) else "equal"
    return [*seconds, *memory, ratio, codes]


def render_verdicts(items: Iterable[Item]) -> str:
    """One verdict line per item, with its checks below."""
    lines = []
    for item in items:
        lines.append(f"({item.number}) {item.title}: {item.status} ({item.counts})")
        lines += [f"      {check.status}: {check.text}" for check in item.checks]
    return "\n".join(lines)
