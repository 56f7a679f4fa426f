"""What one run measured, and the statistics over runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.measured import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Measured):
    """One run. Seconds and MiB; memory is over what the process held before the load.

    `load_s` is the load that is judged: for fxquant materialization, for all others the whole.
    `wall_s` is the whole call. `reason` says why there are no numbers.
    """

    model: str
    case: str
    cold: bool = False
    threads: int = 2
    repeat: int = 0
    reason: str | None = None
    ideal: float | None = None
    load_s: float | None = None
    wall_s: float | None = None
    cpu_s: float | None = None
    prepare_s: float | None = None
    plan_s: float | None = None
    plan_anon: float | None = None
    base_anon: float | None = None
    peak_anon: float | None = None
    settled_anon: float | None = None
    peak_file: float | None = None
    peak_rss: float | None = None
    predicted: float | None = None
    measured: float | None = None
    budget: float | None = None
    checked: int | None = None
    wrong: int | None = None
    samples: int | None = None


class Results:
    """All records of one run of the benchmark, asked by model and case."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = tuple(records)

    def of(self, model: str, case: str, *, cold: bool = False) -> tuple[Record, ...]:
        """The records of one row that have numbers."""
        return tuple(r for r in self._all(model, case, cold=cold) if r.reason is None)

    def rows(self) -> list[tuple[str, str, bool]]:
        """(model, case, cold) of every row, in the order of the first run."""
        return list(dict.fromkeys((r.model, r.case, r.cold) for r in self.records))

    def values(self, model: str, case: str, name: str, *, cold: bool = False) -> list[float]:
        """What every run of a row measured of `name`."""
        found = (getattr(record, name) for record in self.of(model, case, cold=cold))
        return [value for value in found if value is not None]

    def median(self, model: str, case: str, name: str, *, cold: bool = False) -> float | None:
        """The median over runs; None where nothing was measured."""
        values = self.values(model, case, name, cold=cold)
        return statistics.median(values) if values else None

    def largest(self, model: str, case: str, name: str) -> float | None:
        """The largest of all runs; None where nothing was measured."""
        return max(self.values(model, case, name), default=None)

    def spread(self, model: str, case: str, name: str) -> float | None:
        """(largest - smallest) / median; None below two runs."""
        values = self.values(model, case, name)
        if len(values) < 2 or not statistics.median(values):
            return None
        return (max(values) - min(values)) / statistics.median(values)

    def reason(self, model: str, case: str, *, cold: bool = False) -> str | None:
        """The error of a row that has no numbers, None if it was not run."""
        return next((r.reason for r in self._all(model, case, cold=cold) if r.reason), None)

    def why(self, model: str, case: str, *, cold: bool = False) -> str:
        """In short, why a row has no numbers."""
        name = f"{model} {case}{' cold' if cold else ''}"
        found = self.reason(model, case, cold=cold)
        return f"{name} was not run" if found is None else f"{name} is not available"

    def _all(self, model: str, case: str, *, cold: bool) -> list[Record]:
        return [r for r in self.records if (r.model, r.case, r.cold) == (model, case, cold)]
