"""How far the codes of a weight are from the values they were made of.

N output features, K input features, S rows that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fxquant.numerics.blocks import regions
from fxquant.numerics.decode import apply_
from fxquant.numerics.floats import E4M3_TOP, e8m0_values
from fxquant.numerics.integers import INT4_HIGHEST, INT4_OFFSET, INT4_STEPS, smallest_scale
from fxquant.numerics.packing import unpack
from fxquant.scheme import FULL, QuantSpec

SAMPLE_ROWS = 16
"""Rows of one cluster of a sample."""

SPAN = 1 << 20
"""Values over whose rows a cluster is spread: those of a tile, so that few tiles are compared with."""

PERIOD = 8
"""A cluster begins every so many spans. An op that runs once for a tile costs far more than one of many."""

PIECE = 1 << 16
"""Values that are compared at a time."""

_LIMITS = {"e4m3": 464.0, "e2m1": 7 - 2.0**-21}
"""Magnitudes above which float codes saturate: half-way to the next value, were there one; ties to even."""


def sample_ranges(rows: int, columns: int) -> tuple[range, ...]:
    """The rows of a weight that are its sample: clusters of evenly spaced rows, the first at row 0.

    Of a weight of at most 1M values one cluster over all rows. Steps are odd, so that they do not fall
    in with heads of 64 or 128 rows.
    """
    span = max(1, SPAN // max(columns, 1))
    step = max(1, (min(span, rows) // SAMPLE_ROWS - 1) | 1)
    width = min(SAMPLE_ROWS * step, span)
    return tuple(range(at, min(at + width, rows), step) for at in range(0, rows, PERIOD * span))


def can_clip(spec: QuantSpec) -> bool:
    """Whether finite values can round to a code out of the range: not if scales are float maxima."""
    return not spec.float_scale or spec.zero or bool(spec.refine)


def compare_rows(
    w_NK: Tensor, codes_S: Tensor, others: Sequence[Tensor], spec: QuantSpec, rows: slice, scratch: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """The deviation of ``rows`` of a weight, or of columns of it, from its constants.

    ``codes_S``: the codes of these rows; ``others``: the other constants, of all rows. ``scratch`` is flat
    float32 memory for two rows or more. Yields for pieces in order, as scalars, the sums of squares of the
    values and of the errors and, if ``can_clip``, the number of clipped values and the largest magnitude.
    """
    w_SK = w_NK[rows]
    count, k = w_SK.shape
    if not k or not count:
        return
    scale, zero = _scales(others, spec, rows, count)
    size = max(1, min(scratch.numel() // 2, PIECE) // k)
    for start in range(0, count, size):
        stop = min(start + size, count)
        here = _Scales(scale[start:stop], None if zero is None else zero[start:stop])
        codes, total = codes_S[start:stop], (stop - start) * k
        values, errors = scratch[:total], scratch[total : 2 * total]  # few ops: each is cold, and costs 10 us
        values_SK, errors_SK = values.view(-1, k), errors.view(-1, k)
        values_SK.copy_(w_SK[start:stop])
        _decode(codes, errors_SK, spec)
        _scale(errors_SK, spec, here)
        errors.sub_(values)
        sums = torch.dot(values, values), torch.dot(errors, errors)
        yield (*sums, *_clipped(values_SK, errors_SK, spec, here)) if can_clip(spec) else sums


def _decode(codes: Tensor, out_SK: Tensor, spec: QuantSpec) -> None:
    """What codes stand for before the scale; of int4 by fewer ops than ``unpack`` has."""
    if not spec.packed:
        out_SK.copy_(codes)
    elif spec.type.is_float:
        out_SK.copy_(unpack(codes, spec, out_SK.shape[1]))
    else:
        out_SK[:, 0::2].copy_(codes.bitwise_and(15))
        out_SK[:, 1::2].copy_(codes.bitwise_right_shift(4)[:, : out_SK.shape[1] // 2])
        out_SK.sub_(INT4_OFFSET)


def _scale(values_SK: Tensor, spec: QuantSpec, scales: _Scales) -> None:
    """``(values - zero) * scale`` in place."""
    k, side = values_SK.shape[1], spec.block[1] or values_SK.shape[1]
    if k % side:
        apply_(values_SK, replace(spec, block=(1, spec.block[1])), *scales)
        return
    if side == k:
        if scales.zero is not None:
            values_SK.sub_(scales.zero)
        values_SK.mul_(scales.scale)
        return
    blocks = values_SK.view(-1, k // side, side)
    if scales.zero is not None:
        blocks.sub_(scales.zero[:, :, None])
    blocks.mul_(scales.scale[:, :, None])


def temporary_bytes(shape: tuple[int, int], spec: QuantSpec) -> int:
    """At most so many bytes does ``compare_rows`` allocate beside ``scratch`` for so many rows of K."""
    rows, k = shape
    piece = min(rows * k, max(PIECE, k))
    size = 64
    if spec.scale != "f32" or spec.block[0] not in (1, FULL):  # scales are cast, or repeated for their rows
        size += rows * (8 + 8 * spec.grid(1, k)[1])
    if spec.packed:
        size += 7 * piece + (8 << 10) if spec.type.is_float else piece
    return size


class _Scales(NamedTuple):
    """Of rows: float32 ``[S, C]``."""

    scale: Tensor
    zero: Tensor | None


def _scales(others: Sequence[Tensor], spec: QuantSpec, rows: slice, count: int) -> _Scales:
    side = spec.block[0]
    picked = []
    for grid in others[: 2 if spec.zero else 1]:
        if side == 1:
            picked.append(grid[rows])
        elif side == FULL:
            picked.append(grid.expand(count, -1))
        else:
            place = torch.arange(rows.start, rows.stop, rows.step, device=grid.device)
            picked.append(grid.index_select(0, place.div_(side, rounding_mode="floor")))
    scale = picked[0]
    if spec.two_level:
        scale = scale.to(torch.float32).mul_(others[1])
    elif spec.scale == "e8m0":
        scale = e8m0_values(scale)
    return _Scales(scale.to(torch.float32), picked[1].to(torch.float32) if spec.zero else None)


def _clipped(values: Tensor, work: Tensor, spec: QuantSpec, scales: _Scales) -> tuple[Tensor, Tensor]:
    """How many values would round to a code out of the range, and the largest magnitude; changes both."""
    work.copy_(values)
    for grid, blocks in regions(work, replace(spec, block=(1, spec.block[1]))):
        blocks.div_(scales.scale[grid][:, None, :, None])
        if scales.zero is not None:
            blocks.add_(scales.zero[grid][:, None, :, None])
    limit = _LIMITS.get(spec.codes, spec.top)
    if not spec.type.is_float:
        work.round_()
    if spec.zero:
        limit = INT4_STEPS / 2
        work.sub_(INT4_HIGHEST - limit)
    return work.abs_().gt_(limit).sum(), values.abs_().amax()


class Told(NamedTuple):
    """What the scales of a weight tell, scalars: the smallest, and what gives the largest magnitude.

    ``smallest``, as bits unless scales are floats, is at most ``floor_of`` in rows of zeros; None where
    blocks span rows. ``largest`` times ``unit_of_largest`` is the largest magnitude of the weight, to the
    rounding of the scale's dtype; None where scales are no maxima.
    """

    smallest: Tensor | None
    largest: Tensor | None


def told_by(others: Sequence[Tensor], spec: QuantSpec) -> Told:
    """What the constants beside the codes of a weight tell."""
    by_row = spec.block[0] == 1
    if spec.float_scale:
        low, high = others[0].aminmax()
        return Told(low if by_row else None, None if can_clip(spec) else high)
    largest = others[1].view(()) if spec.two_level else None
    return Told(others[0].view(torch.uint8).amin() if by_row else None, largest)


def unit_of_largest(spec: QuantSpec) -> float:
    """See ``Told``."""
    return spec.top * E4M3_TOP if spec.two_level else spec.top


def floor_of(spec: QuantSpec) -> float:
    """The scale of a block of zeros, see ``Told``; values that cannot be told from zeros have it too."""
    return {"e8m0": 0, "e4m3": 1}.get(spec.scale, smallest_scale(spec.scale))


def zero_rows(others: Sequence[Tensor], spec: QuantSpec) -> int | None:
    """How many rows have no block but of zeros; None where values of other blocks have such scales."""
    scale = others[0] if spec.float_scale else others[0].view(torch.uint8)
    rows = int(scale.amax(1).le(floor_of(spec)).sum())
    return None if spec.two_level and rows else rows


def sqnr_db(square: float, error: float) -> float:
    """The ratio of a signal's square to that of its error, in dB; inf without an error."""
    if error == 0:
        return math.inf
    ratio = square / error
    return 10 * math.log10(ratio) if ratio else -math.inf
