"""What one case measured on one model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.measured import Measured

FLOAT = "float"
"""The case that everything is compared with."""
SMOLLM2, MINILM = "smollm2", "minilm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Measured):
    """One case on one model. `reason` says why there are no numbers, `note` what to know about them.

    `sqnr` in decibels is the mean over the `quantized` of all `layers`.
    """

    case: str
    model: str
    reason: str | None = None
    note: str | None = None
    perplexity: float | None = None
    mean: float | None = None
    minimum: float | None = None
    sqnr: float | None = None
    quantized: int | None = None
    layers: int | None = None
    build_s: float | None = None
    score_s: float | None = None


class Results:
    """All records of one run, asked by case and model."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = tuple(records)
        self._by_key = {(record.case, record.model): record for record in self.records}

    def cases(self) -> list[str]:
        """Every case, in the order of the run."""
        return list(dict.fromkeys(record.case for record in self.records))

    def get(self, case: str, model: str) -> Record:
        """The record of a case, or one that says that it was not run."""
        missing = Record(case=case, model=model, reason=f"{case} was not run")
        return self._by_key.get((case, model), missing)

    def perplexity(self, case: str) -> float | None:
        """Perplexity of a case, None if there is none."""
        return self.get(case, SMOLLM2).perplexity

    def mean(self, case: str) -> float | None:
        """The mean cosine of a case, None if there is none."""
        return self.get(case, MINILM).mean

    def loss(self, case: str) -> float | None:
        """1 - the mean cosine of a case, None if there is none."""
        mean = self.mean(case)
        return None if mean is None else 1 - mean


def ratio(a: float | None, b: float | None) -> float | None:
    """`a / b`, None where one is missing or `b` is 0."""
    return a / b if a is not None and b else None
