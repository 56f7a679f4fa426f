"""Quantize weights: in chunks of rows through one small float32 scratch, straight into the constants.

N output features, K input features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fxquant.numerics.blocks import chunk_rows, float_chunks, regions, scan_shape, scratch_for
from fxquant.numerics.checks import check_weight_spec
from fxquant.numerics.floats import E4M3_TINY, PIECE_BYTES, e2m1_codes_
from fxquant.numerics.integers import (
    INT4_HIGHEST,
    INT4_LOWEST,
    INT4_OFFSET,
    TINY,
    scale_of,
    smallest_scale,
)
from fxquant.numerics.packing import pack_
from fxquant.numerics.scales import (
    Scales,
    absmax_of,
    known_constants,
    known_scales,
    scale_from_absmax,
    scales_of,
)
from fxquant.scheme import FULL, QuantSpec


class Writable(Protocol):
    """A matrix that codes are written to: a tensor, or one made of parts."""

    def __getitem__(self, rows: slice, /) -> Any:
        """Some rows."""

    def copy_(self, values: Tensor, /) -> object:
        """Write the whole of it."""


def quantize_weight(w_NK: Tensor, spec: QuantSpec) -> tuple[Tensor, ...]:
    """The constants of a float weight ``[N, K]`` in the order of ``spec.names``, new tensors.

    ``codes = round(w / scale)`` with a scale from the largest magnitude of each block, all in float32;
    with a zero point ``round(w / scale + zero)``. Ties go to even, codes saturate. Scales are never
    zero; a value that is not finite shows in the scale of its block (in the scale for the whole weight,
    where there is one) and has code 0. Dtypes and shapes are ``spec.constants(N, K)``.
    """
    n, k = w_NK.shape
    outs = tuple(
        torch.empty(shape, dtype=dtype, device=w_NK.device) for dtype, shape in spec.constants(n, k).values()
    )
    quantize_into(w_NK, spec, outs, scratch_for(w_NK, spec))
    return outs


def quantize_into(w_NK: Tensor, spec: QuantSpec, outs: Sequence[Writable], scratch: Tensor) -> None:
    """``quantize_weight`` into constants that exist, through ``scratch`` (see ``scratch_for``).

    ``outs[0]`` takes the codes (as they are held: two to a byte for 4 bits), the others are tensors. Few
    ops on a chunk that stays in the cache: loading is as fast as this function. Takes two passes over the
    weight where blocks span all rows, or scales have two levels.
    """
    check_weight_spec(spec)
    if w_NK.numel() == 0:
        _fill_empty(spec, outs)
        return
    if _needs_scan(tuple(w_NK.shape), spec):
        _two_passes(w_NK, spec, outs, scratch)
        return
    for start, chunk in float_chunks(w_NK, spec, scratch):
        _divide_chunk(chunk, start, spec, outs)
        outs[0][start : start + chunk.shape[0]].copy_(held_codes(chunk, spec, bounded=_bounded(spec)))
    # A finite scale bounds the quotients; others come from values that are not finite.
    if _bounded(spec) and not _is_finite(cast("Tensor", outs[1])):
        quantize_known_into(w_NK, spec, cast("Tensor", outs[1]), outs, scratch)


def absmax_into(w_NK: Tensor, spec: QuantSpec, absmax: Tensor, scratch: Tensor) -> None:
    """Raise ``absmax`` to the maxima (see ``scan_shape``) of a part of a weight.

    The largest magnitude of each block of ``spec``, or of all; with a zero point the largest values and
    the largest negated values. They start as zeros. Scales that are refined need whole blocks: refused.
    """
    check_weight_spec(spec)
    if spec.refine:
        raise NotImplementedError(f"{spec}: refined scales are chosen from whole blocks, not from maxima")
    for start, chunk in float_chunks(w_NK, spec, scratch):
        if spec.two_level:
            torch.maximum(absmax, absmax_of(chunk[None, :, None]), out=absmax)
            continue
        for grid, blocks in regions(chunk, spec, start):
            if spec.zero:
                high, low = absmax[0][grid], absmax[1][grid]
                torch.maximum(high, blocks.amax((1, 3)), out=high)
                torch.maximum(low, blocks.amin((1, 3)).neg_(), out=low)
            else:
                largest = absmax[grid]
                torch.maximum(largest, absmax_of(blocks), out=largest)


def quantize_known_into(
    w_NK: Tensor, spec: QuantSpec, known: Tensor, outs: Sequence[Writable], scratch: Tensor
) -> None:
    """Codes of a part of a weight, for what ``scale_from_absmax`` found in a first pass.

    ``known`` is of the blocks of this part (with two levels: of the whole weight). Writes ``outs[0]``,
    and ``outs[1]``, the scales of blocks, if there are two levels; the caller writes ``known`` itself. A
    value that is not finite has code 0.
    """
    check_weight_spec(spec)
    for start, chunk in float_chunks(w_NK, spec, scratch):
        _divide_chunk(chunk, start, spec, outs, known)
        outs[0][start : start + chunk.shape[0]].copy_(held_codes(chunk, spec))


def temporary_bytes(shape: tuple[int, ...], spec: QuantSpec) -> int:
    """At most so many bytes does ``quantize_into`` allocate beside ``scratch`` for a weight ``[N, K]``.

    Counted from the ops: 12 bytes for each scale of a chunk (the largest and smallest values of its block
    and what the scale is made of), 8 more where it is rounded to half precision, the buffers of e2m1
    rounding, the maxima of a first pass. Measured as the peak of the storages of all tensors made in the
    call (``materialize.meter.LiveBytes``), which a test holds it to. It bounds ``absmax_into`` and
    ``quantize_known_into`` for a part of that shape too.
    """
    n, k = shape
    if n == 0 or k == 0:
        return 0
    rows = min(chunk_rows((n, k), spec), n)
    size = 64 + (20 if spec.half_scale else 12) * math.prod(spec.grid(rows, k))
    if spec.codes == "e2m1":
        size += min(PIECE_BYTES, 12 * rows * k)
    if _needs_scan((n, k), spec):
        size += 12 * math.prod(scan_shape((n, k), spec))
    if spec.refine:
        size += _refine_bytes(rows, k, spec)
    return size


def _refine_bytes(rows: int, k: int, spec: QuantSpec) -> int:
    from fxquant.numerics import refine

    columns = spec.block[1] or k
    parts = ((k // columns, columns), (1, k % columns))
    return max(refine.temporary_bytes((rows, groups, size), spec) for groups, size in parts if groups * size)


def _needs_scan(shape: tuple[int, ...], spec: QuantSpec) -> bool:
    """Whether a scale depends on more than one chunk."""
    return spec.two_level or (spec.block[0] == FULL and shape[0] > chunk_rows(shape, spec))


def _two_passes(w_NK: Tensor, spec: QuantSpec, outs: Sequence[Writable], scratch: Tensor) -> None:
    absmax = torch.zeros(scan_shape(tuple(w_NK.shape), spec), dtype=torch.float32, device=w_NK.device)
    absmax_into(w_NK, spec, absmax, scratch)
    known = scale_from_absmax(absmax, spec)
    for name, values in known_constants(known, spec).items():
        _store(outs[spec.names.index(name)], values)
    quantize_known_into(w_NK, spec, known, outs, scratch)


def _bounded(spec: QuantSpec) -> bool:
    """Whether no quotient by a finite scale rounds to more than the largest code."""
    return spec.float_scale and not spec.zero and not spec.refine


def _is_finite(scales: Tensor) -> bool:
    return math.isfinite(scales.sum(dtype=torch.float32).item())


def _divide_chunk(
    chunk: Tensor, start: int, spec: QuantSpec, outs: Sequence[Writable], known: Tensor | None = None
) -> None:
    """Divide a chunk by its scales in place, and write the scales that are found."""
    in_place = _bounded(spec) and spec.scale == "f32"
    if known is None and in_place and spec.block == (1, FULL):
        scale = cast("Tensor", outs[1])[start : start + chunk.shape[0]]
        torch.maximum(chunk.amax(1, keepdim=True), chunk.amin(1, keepdim=True).neg_(), out=scale)
        chunk.div_(scale_of(scale, spec.top))
        return
    for grid, blocks in regions(chunk, spec, start):
        if known is not None and not spec.two_level:
            divide_(blocks, known_scales(known, spec, grid))
            continue
        if in_place:
            scale = absmax_of(blocks, cast("Tensor", outs[1])[grid])
            blocks.div_(scale_of(scale, spec.top)[:, None, :, None])
            continue
        scales = scales_of(blocks, spec, known)
        _store(cast("Tensor", outs[1])[grid], scales.stored)
        if scales.zero is not None:
            cast("Tensor", outs[2])[grid].copy_(scales.zero)
        divide_(blocks, scales)


def divide_(blocks: Tensor, scales: Scales) -> None:
    """``blocks / scale + zero`` in place."""
    blocks.div_(scales.values[:, None, :, None])
    if scales.zero is not None:
        blocks.add_(scales.zero[:, None, :, None])


def held_codes(chunk: Tensor, spec: QuantSpec, *, bounded: bool = False) -> Tensor:
    """Quotients ``[r, K]`` to codes as they are held, still floats, in place; ``copy_`` casts them.

    ``bounded``: the quotients are finite and in the range of codes.
    """
    if not spec.type.is_float:
        chunk.round_()
    if not bounded:
        low, high = (INT4_LOWEST, INT4_HIGHEST) if spec.zero else (-spec.top, spec.top)
        chunk.clamp_(low, high).nan_to_num_(0.0)
    if not spec.packed:
        return chunk
    if spec.type.is_float:
        e2m1_codes_(chunk)
    else:
        chunk.add_(INT4_OFFSET)
    return pack_(chunk, 0 if spec.type.is_float else INT4_OFFSET)


def _store(out: Any, values: Tensor) -> None:
    """Copy scales, to their bits if that is what ``out`` holds."""
    out.copy_(values.view(torch.uint8) if out.dtype == torch.uint8 else values)


def _fill_empty(spec: QuantSpec, outs: Sequence[Writable]) -> None:
    """Scales of a weight without values: the smallest ones."""
    smallest = {"e8m0": 2.0**-127, "e4m3": E4M3_TINY}.get(spec.scale, smallest_scale(spec.scale))
    for name, out in zip(spec.names[1:], outs[1:], strict=True):
        value = {"scale": smallest, "zero": 0.0, "global_scale": TINY}[name]
        scale = cast("Tensor", out)
        stored = torch.full_like(scale, value, dtype=spec.constants(0, 0)[name][0])
        _store(scale, stored)
