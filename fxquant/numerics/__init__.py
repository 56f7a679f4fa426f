"""Reference numerics on tensors: quantize, dequantize, multiply. No FX, no registration.

Shape suffixes: M tokens (any leading dimensions), N output features, K input features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from fxquant.scheme import FULL, QuantSpec

TILE_BYTES = 2 << 20
"""Float32 bytes of a weight that are worked on at a time."""

EXACT_K = 1024
"""Products of int8 codes summed in float32 are exact up to this K: 1024 * 127^2 < 2^24."""

INT32_K = (2**31 - 1) // 127**2
"""The largest K whose sums of int8 products fit int32."""

_TINY = torch.finfo(torch.float32).tiny


def scale_of(absmax: torch.Tensor, top: int) -> torch.Tensor:
    """Float32 scale, never zero: a zero row has the smallest normal scale and zero codes."""
    return absmax.div_(top).clamp_min_(_TINY)


def _codes_of(x: torch.Tensor, scale: torch.Tensor, top: int) -> torch.Tensor:
    """Int8 codes of float32 ``x``, ties to even; a non-finite quotient gives 0 (its scale tells)."""
    return torch.div(x, scale).round_().clamp_(-top, top).nan_to_num_(0.0).to(torch.int8)


def check_per_row(spec: QuantSpec) -> None:
    """Refuse a spec that there are no numerics for yet."""
    if spec.bits != 8 or spec.block != (1, FULL):
        raise NotImplementedError(f"no reference numerics for {spec}")


def check_weight_spec(spec: QuantSpec) -> None:
    """Refuse a spec of a weight that there are no numerics for yet."""
    if spec.bits != 8:
        raise NotImplementedError(f"no reference numerics for {spec}")


def block_of(shape: tuple[int, ...], spec: QuantSpec) -> tuple[int, int]:
    """Rows and columns of a block of ``spec`` in a weight ``[N, K]``; sides must divide the shape."""
    rows, columns = (
        (size or 1) if side == FULL else side for size, side in zip(shape, spec.block, strict=True)
    )
    if shape[0] % rows or shape[1] % columns:
        raise ValueError(f"blocks of {rows} x {columns} do not divide the shape {list(shape)}")
    return rows, columns


def scale_shape(shape: tuple[int, ...], spec: QuantSpec) -> tuple[int, int]:
    """Shape of the scale of a weight ``[N, K]``; an empty weight still has one scale per row."""
    rows, columns = block_of(shape, spec)
    return shape[0] // rows, max(1, shape[1] // columns)


def quantize_weight(w_NK: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 ``[N, K]`` and scale float32 of a float weight, a scale for each block of ``spec``.

    ``codes = round(w / scale)`` with ``scale = absmax(block) / 127``, all in float32. Per channel the
    scale is ``[N, 1]``, for blocks of ``(r, k)`` it is ``[N / r, K / k]``. Works in tiles of rows.
    """
    check_weight_spec(spec)
    shape = tuple(w_NK.shape)
    codes = torch.empty(shape, dtype=torch.int8, device=w_NK.device)
    scale = torch.empty(scale_shape(shape, spec), dtype=torch.float32, device=w_NK.device)
    quantize_into(w_NK, spec, codes, scale, scratch_for(w_NK, spec))
    return codes, scale


def chunk_rows(shape: tuple[int, ...], spec: QuantSpec) -> int:
    """Rows of a weight that are worked on at a time: whole blocks of at most ``TILE_BYTES`` in float32."""
    rows, _ = block_of(shape, spec)
    return max(rows, TILE_BYTES // (4 * max(shape[1], 1)) // rows * rows)


def scratch_for(w_NK: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Flat float32 memory for ``quantize_into``."""
    rows = min(chunk_rows(tuple(w_NK.shape), spec), w_NK.shape[0])
    return torch.empty(rows * w_NK.shape[1], dtype=torch.float32, device=w_NK.device)


class Writable(Protocol):
    """A matrix that codes are written to: a tensor, or one made of parts."""

    def __getitem__(self, rows: slice, /) -> Any:
        """Some rows."""

    def copy_(self, values: torch.Tensor, /) -> object:
        """Write the whole of it."""


def quantize_into(
    w_NK: torch.Tensor, spec: QuantSpec, codes: Writable, scale: torch.Tensor, scratch: torch.Tensor
) -> None:
    """``quantize_weight`` into ``codes`` and ``scale``, through ``scratch`` (see ``scratch_for``).

    Few ops on a chunk that stays in the cache: loading is as fast as this function.
    """
    n, k = w_NK.shape
    if n == 0 or k == 0:
        scale.fill_(_TINY)
        return
    rows, columns = block_of((n, k), spec)
    step = chunk_rows((n, k), spec)
    whole = scratch[: step * k].view(step, k) if n >= step else None
    for start in range(0, n, step):
        stop = min(start + step, n)
        chunk = whole if whole is not None and stop - start == step else _chunk(scratch, stop - start, k)
        chunk.copy_(w_NK[start:stop])
        part = scale[start // rows : stop // rows]
        if rows == 1 and columns == k:
            _quantize_rows(chunk, part, spec.top)
        else:
            _quantize_blocks(chunk.view(-1, rows, k // columns, columns), part, spec.top)
        codes[start:stop].copy_(chunk)
    # A finite scale bounds the quotients by ``top``; others come from values that are not finite.
    if not math.isfinite(scale.sum().item()):
        quantize_with_scale(w_NK, scale, spec, codes, scratch)


def _chunk(scratch: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    return scratch[: rows * k].view(rows, k)


def _quantize_rows(chunk: torch.Tensor, scale: torch.Tensor, top: int) -> None:
    """Float32 rows ``[r, K]`` to rounded quotients in place, their scales into ``scale`` ``[r, 1]``."""
    # amax and amin along a dim are vectorized; aminmax, norm and abs().amax are many times slower.
    torch.maximum(chunk.amax(1, keepdim=True), chunk.amin(1, keepdim=True).neg_(), out=scale)
    chunk.div_(scale_of(scale, top)).round_()


def _quantize_blocks(blocks: torch.Tensor, scale: torch.Tensor, top: int) -> None:
    """The same for blocks ``[R, r, C, c]`` with scales ``[R, C]``."""
    torch.maximum(blocks.amax((1, 3)), blocks.amin((1, 3)).neg_(), out=scale)
    blocks.div_(scale_of(scale, top)[:, None, :, None]).round_()


def absmax_into(w_NK: torch.Tensor, spec: QuantSpec, absmax: torch.Tensor, scratch: torch.Tensor) -> None:
    """Raise ``absmax`` to the largest magnitudes of each block of ``spec`` in a part of a weight."""
    for start, stop, blocks in _float_blocks(w_NK, spec, scratch):
        largest = absmax[start:stop]
        torch.maximum(largest, blocks.amax((1, 3)), out=largest)
        torch.maximum(largest, blocks.amin((1, 3)).neg_(), out=largest)


def quantize_with_scale(
    w_NK: torch.Tensor, scale: torch.Tensor, spec: QuantSpec, codes: Writable, scratch: torch.Tensor
) -> None:
    """Codes of a part of a weight whose scales are known; a value that is not finite gives 0."""
    rows, _ = block_of((w_NK.shape[0], w_NK.shape[1]), spec)
    for start, stop, blocks in _float_blocks(w_NK, spec, scratch):
        blocks.div_(scale[start:stop, None, :, None]).round_().clamp_(-spec.top, spec.top).nan_to_num_(0.0)
        codes[start * rows : stop * rows].copy_(blocks.view(-1, w_NK.shape[1]))


def _float_blocks(
    w_NK: torch.Tensor, spec: QuantSpec, scratch: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Chunks of a weight in float32, as blocks ``[R, r, C, c]`` in ``scratch``, and which rows of scales."""
    n, k = w_NK.shape
    rows, columns = block_of((n, k), spec)
    step = chunk_rows((n, k), spec)
    for start in range(0, n, step):
        stop = min(start + step, n)
        chunk = _chunk(scratch, stop - start, k)
        chunk.copy_(w_NK[start:stop])
        yield start // rows, stop // rows, chunk.view(-1, rows, k // columns, columns)


def dequantize_weight(codes_NK: torch.Tensor, scale_N1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float weight ``[N, K]``: codes times scale in float32, then cast."""
    return codes_NK.to(torch.float32).mul_(scale_N1).to(dtype).contiguous()


def quantize_act(x_MK: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 ``[..., K]`` and scale float32 ``[..., 1]``, one scale for each token.

    NaN and Inf of a token end up in its scale, so they reach the output and are not hidden.
    """
    check_per_row(spec)
    x = x_MK.to(torch.float32)
    if x.shape[-1] == 0:
        scale = torch.full((*x.shape[:-1], 1), _TINY, dtype=torch.float32, device=x.device)
        return x.to(torch.int8), scale
    scale = scale_of(x.abs().amax(-1, keepdim=True), spec.top)
    return _codes_of(x, scale, spec.top).contiguous(), scale.contiguous()


def int_matmul(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """Exact int32 ``a @ b.t()`` of int8 codes on any device, through float32 pieces of K.

    Products are written to ``out``, which autocast leaves alone: it would round them to bfloat16.
    """
    m, k = a_MK.shape
    piece = torch.empty((m, b_NK.shape[0]), dtype=torch.float32, device=a_MK.device)
    total = torch.zeros((m, b_NK.shape[0]), dtype=torch.int32, device=a_MK.device)
    for start in range(0, k, EXACT_K):
        a = a_MK[:, start : start + EXACT_K].to(torch.float32)
        b = b_NK[:, start : start + EXACT_K].to(torch.float32)
        total += torch.mm(a, b.t(), out=piece).to(torch.int32)
    return total


def apply_scales(
    sums_MN: torch.Tensor,
    x_scale_M1: torch.Tensor,
    w_scale_N1: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``sums * x_scale * w_scale + bias`` in float32, then cast to ``out_dtype``."""
    out = sums_MN.to(torch.float32).mul_(x_scale_M1).mul_(w_scale_N1.reshape(-1))
    if bias_N is not None:
        out += bias_N.to(torch.float32)
    return out.to(out_dtype)


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold equal values, a NaN being equal to a NaN; ``b`` in the dtype of ``a``."""
    if a.shape != b.shape:
        return False
    b = b.to(a.dtype)
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
