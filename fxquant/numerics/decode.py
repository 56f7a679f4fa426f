"""From constants back to floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fxquant.numerics.blocks import chunk_rows, regions
from fxquant.numerics.floats import e4m3_values, e8m0_values
from fxquant.numerics.packing import unpack
from fxquant.scheme import FULL, QuantSpec


def dequantize_weight(parts: Sequence[Tensor], spec: QuantSpec, k: int, dtype: torch.dtype) -> Tensor:
    """Float weight ``[N, k]``: codes times scale in float32 (``(code - zero) * scale``), then cast."""
    if spec.per_row and spec.codes == "int8":  # no loop, no writes: it is traced
        return parts[0].to(torch.float32).mul_(parts[1]).to(dtype).contiguous()
    n = parts[0].shape[0]
    out = torch.empty((n, k), dtype=dtype, device=parts[0].device)
    step = chunk_rows((n, k), spec)
    for start in range(0, n, step):
        stop = min(start + step, n)
        out[start:stop].copy_(float_rows(parts, spec, k, start, stop))
    return out


def embedding_rows(
    indices: Tensor, parts: Sequence[Tensor], spec: QuantSpec, k: int, dtype: torch.dtype
) -> Tensor:
    """Rows ``indices`` of the float weight ``[N, k]``: ``[..., k]``, without making the others.

    The same values as those of ``dequantize_weight``, row for row; IndexError past the last row.
    """
    rows = indices.reshape(-1)
    out = torch.empty((rows.numel(), k), dtype=dtype, device=parts[0].device)
    side = spec.block[0]
    single = spec if side == FULL else replace(spec, block=(1, spec.block[1]))
    step = chunk_rows((max(rows.numel(), 1), k), single)
    for start in range(0, rows.numel(), step):
        wanted = rows[start : start + step]
        taken = [
            part
            if name == "global_scale" or (side == FULL and name != "codes")
            else _rows(part, wanted, 1 if name == "codes" else side)
            for name, part in zip(spec.names, parts, strict=True)
        ]
        out[start : start + step].copy_(float_rows(taken, single, k, 0, wanted.numel()))
    return out.view(*indices.shape, k)


def _rows(part: Tensor, rows: Tensor, side: int) -> Tensor:
    """Rows of a constant, each of which is for ``side`` rows of the weight."""
    if side > 1:
        rows = rows // side
    bits = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
    return bits.index_select(0, rows).view(part.dtype)


def float_rows(parts: Sequence[Tensor], spec: QuantSpec, k: int, start: int, stop: int) -> Tensor:
    """Rows ``start`` to ``stop`` of a weight in float32; ``start`` is a multiple of a block's rows."""
    scale = float_scale(parts, spec, start, stop)
    zero = rows_of(parts[2], spec, start, stop).to(torch.float32) if spec.zero else None
    values = code_values(parts[0][start:stop], spec, k)
    apply_(values, spec, scale, zero)
    return values


def rows_of(grid: Tensor, spec: QuantSpec, start: int, stop: int) -> Tensor:
    """The rows of scales or zeros that rows ``start`` to ``stop`` of codes have."""
    side = spec.block[0]
    return grid if side == FULL else grid[start // side : -(-stop // side)]


def float_scale(parts: Sequence[Tensor], spec: QuantSpec, start: int, stop: int) -> Tensor:
    """Float32 scales of rows of a weight; of two levels, their product."""
    scale = rows_of(parts[1], spec, start, stop)
    if spec.two_level:
        return scale.to(torch.float32) * parts[2]
    return e8m0_values(scale) if spec.scale == "e8m0" else scale.to(torch.float32)


def code_values(codes: Tensor, spec: QuantSpec, k: int) -> Tensor:
    """What codes ``[..., k]`` stand for before the scale, a new float32 tensor."""
    if spec.packed:
        return unpack(codes, spec, k)
    return e4m3_values(codes) if spec.type.is_float else codes.to(torch.float32)


def apply_(values: Tensor, spec: QuantSpec, scale: Tensor, zero: Tensor | None = None) -> None:
    """``(values - zero) * scale`` in place, ``[r, K]`` with a scale for each block."""
    for grid, blocks in regions(values, spec):
        if zero is not None:
            blocks.sub_(zero[grid][:, None, :, None])
        blocks.mul_(scale[grid][:, None, :, None])
