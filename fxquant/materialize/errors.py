"""Errors of quantized weights, measured while their tiles are in memory: no byte is read for them.

A sample of rows of each weight is compared with what was written of it. Sums are kept for each tile and
added in the order of tiles, so that they do not depend on threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxquant import numerics
from fxquant.graph import value
from fxquant.materialize.demand import find_ends
from fxquant.materialize.jobs import Batch, Job, Schedule
from fxquant.materialize.program import CODES, QUANTIZE
from fxquant.materialize.recipes import LoadGraph, Recipe
from fxquant.materialize.scattered import Scattered
from fxquant.scheme import QuantSpec

FIELDS = 4
"""What is kept of a tile: sums of squares of values and errors, the number of clipped values, a maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightError:
    """How far a quantized weight is from the values it was made of.

    ``relative`` is ``||w - dequantized|| / ||w||``, ``sqnr_db`` -20 log10 of it; ``clipped`` is the share
    of values that were clipped: rounding would give them a code out of the range. All three are over
    ``sampled_rows`` of the weight's ``rows`` (output features): clusters of 16, see
    ``numerics.sample_ranges``. ``maximum`` is the largest magnitude, of all rows if ``maximum_is_exact``
    (scales tell; of float32 weights but for the last bit), else of the sampled ones, or of all rows to the
    rounding of scales in half precision (2^-8). ``zero_rows`` counts rows that are all zero, of all rows;
    None where scales do not tell. Of experts, ``[E, N, K]``, it is over all: rows of each are sampled.
    """

    relative: float
    sampled_rows: int
    rows: int
    clipped: float
    maximum: float
    maximum_is_exact: bool
    zero_rows: int | None

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in dB, over the sampled rows; inf for no error."""
        return numerics.sqnr_db(1.0, self.relative**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """What is fixed of the weights of a template; the rows in ``ranges`` are compared."""

    spec: QuantSpec
    rows: int
    columns: int
    ranges: tuple[range, ...]
    dtype: torch.dtype

    @property
    def sampled(self) -> int:
        """Number of rows that are compared."""
        return sum(map(len, self.ranges))

    def within(self, start: int, count: int) -> Iterator[slice]:
        """Rows that are compared of ``count`` rows from ``start`` on, counted from there."""
        for rows in self.ranges:
            first = rows.start + max(0, -(-(start - rows.start) // rows.step)) * rows.step
            stop = min(rows.stop, start + count)
            if first < stop:
                yield slice(first - start, stop - start, rows.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What was found of a weight, or of one of its experts; ``maximum`` and ``zero_rows`` as scales tell."""

    weight: _Weight
    sums: Sequence[Sequence[float]]
    maximum: float | None
    zero_rows: int | None
    rounded: bool
    """Scales are in half precision, and do not tell the maximum exactly."""

    @property
    def largest(self) -> float:
        """The largest magnitude, of the sampled rows where scales do not tell."""
        if self.maximum is None:
            return max(row[3] for row in self.sums)
        # The scale was rounded: to more bits than the values have, unless they are float32.
        return float(torch.tensor(self.maximum, dtype=torch.float64).to(self.weight.dtype))


class Errors:
    """Follows the errors of a load's weights. Safe to use from several threads: each tile has its own sums.

    ``every``: all rows are compared, not a sample. On a device the sums stay there until they are asked for.
    """

    def __init__(
        self, graph: LoadGraph, schedule: Schedule, device: torch.device, *, every: bool = False
    ) -> None:
        self.recipes = graph.recipes
        self.weights = [_weight(gm, every=every) for gm in graph.templates]
        self.rows: dict[tuple[int, int, int], tuple[slice, ...]] = {}
        self.sums: dict[tuple[str, int], list[float]] = {}
        self.places: dict[tuple[str, int], int] = {}
        self.there: Tensor | None = None
        if device.type != "cpu":
            self.places = {place: at for at, place in enumerate(_places(schedule.batches))}
            self.there = torch.zeros((len(self.places), FIELDS), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 0 if self.there is None else self.there.nbytes

    def clear(self) -> None:
        """Give everything back."""
        self.sums.clear()
        self.there = None

    def compare(self, job: Job, source: Tensor, parts: Sequence[Any], scratch: Tensor) -> None:
        """Compare rows of what a tile was made of with what was written."""
        where = job.tile.outs[0][1]
        start = where.start if where is not None and where.axis == 0 else 0
        key = (job.recipe.template, start, source.shape[0])
        picked_rows = self.rows.get(key)
        if picked_rows is None:  # the same for the tiles of all weights of a template
            weight = self.weights[key[0]]
            picked_rows = self.rows[key] = () if weight is None else tuple(weight.within(*key[1:]))
        if not picked_rows:
            return
        weight = self.weights[key[0]]
        assert weight is not None
        codes, *others = parts
        for rows in picked_rows:
            picked = codes.take(rows) if isinstance(codes, Scattered) else codes[rows]
            for found in numerics.compare_rows(source, picked, others, weight.spec, rows, scratch):
                self._add(_place(job), found)

    def _add(self, place: tuple[str, int], found: Sequence[Tensor]) -> None:
        """Add to the sums of a tile, which one thread works on."""
        if self.there is None:
            mine = self.sums.setdefault(place, [0.0] * FIELDS)
            for i, scalar in enumerate(found):
                mine[i] = mine[i] + scalar.item() if i < FIELDS - 1 else max(mine[i], scalar.item())
            return
        there = self.there[self.places[place]]
        for i, scalar in enumerate(found):
            there[i].add_(scalar) if i < FIELDS - 1 else there[i].clamp_min_(scalar)

    def results(self, constants: Callable[[Recipe], Sequence[Tensor] | None]) -> dict[str, WeightError]:
        """The errors of the weights that were compared, experts of one weight together.

        ``constants``: what is beside the codes of a recipe's weight. Experts that are not made one by one
        are not compared.
        """
        sums: Mapping[tuple[str, int], Sequence[float]] = self.sums
        if self.there is not None:
            rows = self.there.tolist()
            sums = {place: rows[at] for place, at in self.places.items()}
        by_label: dict[str, list[Sequence[float]]] = {}
        for place in sorted(sums):
            by_label.setdefault(place[0], []).append(sums[place])
        measured: dict[str, list[_Measured]] = {}
        compared = {r.label: (r, w) for r in self.recipes if (w := self.weights[r.template])}
        compared = {label: found for label, found in compared.items() if label in by_label}
        told = _told({label: (weight.spec, constants(r)) for label, (r, weight) in compared.items()})
        for label, (recipe, weight) in compared.items():
            maximum, zeros = told.get(label, (None, None))
            part = _Measured(
                weight=weight,
                sums=by_label[label],
                maximum=maximum,
                zero_rows=zeros,
                rounded=weight.spec.half_scale or (recipe.held is not None and recipe.held.act is None),
            )
            measured.setdefault(recipe.fqn, []).append(part)
        return {fqn: _made(parts) for fqn, parts in measured.items()}


def _told(
    constants: Mapping[str, tuple[QuantSpec, Sequence[Tensor] | None]],
) -> dict[str, tuple[float | None, int | None]]:
    """The largest magnitude of weights and the number of rows of zeros, where scales tell."""
    known = {fqn: (spec, others) for fqn, (spec, others) in constants.items() if others is not None}
    scalars: dict[tuple[str, int], Tensor] = {}
    for fqn, (spec, others) in known.items():
        for i, scalar in enumerate(numerics.told_by(others, spec)):
            if scalar is not None:
                scalars[fqn, i] = scalar.to(torch.float32)
    values = dict(zip(scalars, torch.stack([*scalars.values()]).tolist() if scalars else [], strict=True))
    told: dict[str, tuple[float | None, int | None]] = {}
    for fqn, (spec, others) in known.items():
        smallest, largest = values.get((fqn, 0)), values.get((fqn, 1))
        zeros = None if smallest is None else 0
        if smallest is not None and smallest <= numerics.floor_of(spec):
            zeros = numerics.zero_rows(others, spec)
        told[fqn] = (None if largest is None else largest * numerics.unit_of_largest(spec), zeros)
    return told


def _weight(gm: fx.GraphModule, *, every: bool) -> _Weight | None:
    """What is compared of the weights of a template; None if it quantizes nothing."""
    end = next((end for end in find_ends(gm) if end.kind == QUANTIZE), None)
    if end is None or end.spec is None:
        return None
    source = value(end.source)
    rows, columns = (int(size) for size in source.shape)
    ranges = (range(rows),) if every else numerics.sample_ranges(rows, columns)
    return _Weight(spec=end.spec, rows=rows, columns=columns, ranges=ranges, dtype=source.dtype)


def sums_bytes(batches: Sequence[Batch]) -> int:
    """Bytes that the sums of a load take on a device."""
    return 4 * FIELDS * sum(1 for _ in _places(batches))


def _places(batches: Sequence[Batch]) -> Iterator[tuple[str, int]]:
    """One for each tile that writes codes."""
    for batch in batches:
        for job in batch.jobs:
            if any(end.kind in (QUANTIZE, CODES) for end in job.tile.program.ends):
                yield _place(job)


def _place(job: Job) -> tuple[str, int]:
    """A weight, or one expert, and where in it a tile is; tiles of one weight lie along one axis."""
    where = job.tile.outs[0][1]
    return job.recipe.label, 0 if where is None else where.start


def _made(parts: Sequence[_Measured]) -> WeightError:
    """The error of a weight, over all of its experts if it holds some."""
    sums = [row for part in parts for row in part.sums]
    square, error, clipped = (math.fsum(row[i] for row in sums) for i in range(3))
    zeros = [part.zero_rows for part in parts if part.zero_rows is not None]
    return WeightError(
        relative=math.sqrt(error / square) if square else (math.inf if error else 0.0),
        sampled_rows=sum(part.weight.sampled for part in parts),
        rows=sum(part.weight.rows for part in parts),
        clipped=clipped / sum(part.weight.sampled * part.weight.columns for part in parts),
        maximum=max(part.largest for part in parts),
        maximum_is_exact=all(part.maximum is not None and not part.rounded for part in parts),
        zero_rows=sum(zeros) if len(zeros) == len(parts) else None,
    )
