"""Reference numerics on tensors: quantize, dequantize, multiply. No FX, no registration.

Shape suffixes: M tokens (any leading dimensions), N output features, K input features.
"""

from __future__ import annotations

import torch

from fxquant.scheme import FULL, QuantSpec

TILE_BYTES = 2 << 20
"""Float32 bytes of a weight that are worked on at a time."""

EXACT_K = 1024
"""Products of int8 codes summed in float32 are exact up to this K: 1024 * 127^2 < 2^24."""

INT32_K = (2**31 - 1) // 127**2
"""The largest K whose sums of int8 products fit int32."""

_TINY = torch.finfo(torch.float32).tiny


def _scale_of(absmax: torch.Tensor, top: int) -> torch.Tensor:
    """Float32 scale, never zero: a zero row has the smallest normal scale and zero codes."""
    return (absmax / top).clamp_min_(_TINY)


def _codes_of(x: torch.Tensor, scale: torch.Tensor, top: int) -> torch.Tensor:
    """Int8 codes of float32 ``x``, ties to even; a non-finite quotient gives 0 (its scale tells)."""
    return torch.div(x, scale).round_().clamp_(-top, top).nan_to_num_(0.0).to(torch.int8)


def check_per_row(spec: QuantSpec) -> None:
    """Refuse a spec that there are no numerics for yet."""
    if spec.bits != 8 or spec.block != (1, FULL):
        raise NotImplementedError(f"no reference numerics for {spec}")


def quantize_weight(w_NK: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 ``[N, K]`` and scale float32 ``[N, 1]`` of a float weight, in row tiles.

    ``codes = round(w / scale)`` with ``scale = absmax(row) / 127``, all in float32.
    """
    check_per_row(spec)
    n, k = w_NK.shape
    codes = torch.empty((n, k), dtype=torch.int8, device=w_NK.device)
    scale = torch.empty((n, 1), dtype=torch.float32, device=w_NK.device)
    if k == 0:
        return codes, scale.fill_(_TINY)
    rows = max(1, TILE_BYTES // (4 * k))
    for start in range(0, n, rows):
        tile = w_NK[start : start + rows].to(torch.float32)
        tile_scale = _scale_of(tile.abs().amax(-1, keepdim=True), spec.top)
        scale[start : start + rows] = tile_scale
        codes[start : start + rows] = _codes_of(tile, tile_scale, spec.top)
    return codes, scale


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
    scale = _scale_of(x.abs().amax(-1, keepdim=True), spec.top)
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
