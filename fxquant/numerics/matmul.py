"""Products of codes. M tokens, N output features, K input features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fxquant.numerics import blocks
from fxquant.numerics.decode import apply_, code_values, float_rows, float_scale
from fxquant.numerics.floats import e4m3_values, e8m0_values
from fxquant.numerics.packing import unpack
from fxquant.scheme import FULL, QuantSpec

EXACT_K = 1024
"""Products of int8 codes summed in float32 are exact up to this K: 1024 * 127^2 < 2^24."""

INT32_K = (2**31 - 1) // 127**2
"""The largest K whose sums of int8 products fit int32."""

TOKENS = 512
"""Tokens whose codes are floats at a time in ``block_mm``."""


def int_matmul(a_MK: Tensor, b_NK: Tensor) -> Tensor:
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


def scaled_sums(a_codes_MK: Tensor, b_codes_NK: Tensor) -> Tensor:
    """``a @ b.t()`` of codes before their scales: int32, exact, of int8; float32 of e4m3.

    Products of e4m3 are exact in float32, their sums are rounded.
    """
    if a_codes_MK.dtype == torch.int8:
        return int_matmul(a_codes_MK, b_codes_NK)
    a = e4m3_values(a_codes_MK)
    out = torch.empty((a.shape[0], b_codes_NK.shape[0]), dtype=torch.float32, device=a.device)
    for start, stop in _pieces(b_codes_NK.shape[0], _rows_at_a_time(a.shape[1])):
        out[:, start:stop] = _mm(a, e4m3_values(b_codes_NK[start:stop]))
    return out


def apply_scales(
    sums_MN: Tensor, x_scale_M1: Tensor, w_scale_N1: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``sums * x_scale * w_scale + bias`` in float32, then cast to ``out_dtype``.

    Scales ``[M, 1]`` and ``[N, 1]``, or ``[1, 1]``.
    """
    out = torch.mul(sums_MN.to(torch.float32), x_scale_M1).mul_(w_scale_N1.reshape(-1))
    if bias_N is not None:
        out += bias_N.to(torch.float32)
    return out.to(out_dtype)


def block_mm(
    x_codes: Tensor,
    x_scale: Tensor,
    x_spec: QuantSpec,
    parts: Sequence[Tensor],
    w_spec: QuantSpec,
    k: int,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``x @ w.t() + bias`` for codes with scales for blocks along K: ``[..., N]`` in ``out_dtype``.

    ``x_codes`` and ``x_scale`` are as ``quantize_act`` gives them, ``parts`` the constants of a weight
    ``[N, k]``. Integer codes are summed exactly within the groups of K that have one scale; the sums are
    multiplied by their scales and added in float32. Float codes are multiplied by their scales in float32
    (exact for powers of two) and summed in float32. The bias is added in float32, then comes one cast.
    """
    integers = not x_spec.type.is_float and not w_spec.type.is_float
    if x_spec.type.is_float != w_spec.type.is_float or (integers and w_spec.zero):
        raise NotImplementedError(f"no reference product of {x_spec} and {w_spec}")
    shape = x_codes.shape[:-1]
    m, n = math.prod(shape), parts[0].shape[0]
    x = x_codes.reshape(m, x_codes.shape[-1])
    scale = e8m0_values(x_scale) if x_spec.scale == "e8m0" else x_scale
    scale = scale.expand(*shape, scale.shape[-1]).reshape(m, scale.shape[-1])
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    for low, high in _pieces(m, TOKENS):
        tokens, of_tokens = x[low:high], scale[low:high]
        if not integers:
            tokens = code_values(tokens, x_spec, k)
            apply_(tokens, replace(x_spec, block=(1, x_spec.block[1])), of_tokens)
        for start, stop in _pieces(n, blocks.chunk_rows((n, k), w_spec)):
            if integers:
                sums = _integer_product(tokens, of_tokens, x_spec, (parts, w_spec, k), (start, stop))
            else:
                sums = _mm(tokens, float_rows(parts, w_spec, k, start, stop))
            if bias_N is not None:
                sums += bias_N[start:stop].to(torch.float32)
            out[low:high, start:stop] = sums
    return out.view(*shape, n)


def weight_only_mm(
    x: Tensor, parts: Sequence[Tensor], spec: QuantSpec, k: int, bias_N: Tensor | None
) -> Tensor:
    """``F.linear(x, w, bias)`` in x's dtype for the constants of a weight ``[N, k]``: ``[..., N]``.

    Values of the weight are computed in float32 and rounded to x's dtype, a few MiB of rows at a time;
    the product and the bias are as in ``F.linear`` of that dtype, whatever autocast says.
    """
    n = parts[0].shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        for start, stop in _pieces(n, blocks.chunk_rows((n, k), spec)):
            w = float_rows(parts, spec, k, start, stop).to(x.dtype)
            bias = None if bias_N is None else bias_N[start:stop].to(x.dtype)
            out[..., start:stop] = F.linear(x, w, bias)
    return out


def _integer_product(
    x: Tensor,
    x_scale: Tensor,
    x_spec: QuantSpec,
    weight: tuple[Sequence[Tensor], QuantSpec, int],
    rows: tuple[int, int],
) -> Tensor:
    """Float32 ``[m, n]``: exact sums for each group of K, times the scales of both sides."""
    parts, spec, k = weight
    w = parts[0][rows[0] : rows[1]]
    w = unpack(w, spec, k, torch.int8) if spec.packed else w
    height, width = blocks.block_of((parts[0].shape[0], k), spec)
    of_row = torch.arange(w.shape[0], device=w.device) // height
    w_scale = float_scale(parts, spec, *rows)[of_row]
    x_width = x_spec.block[1]
    total = torch.zeros((x.shape[0], w.shape[0]), dtype=torch.float32, device=x.device)
    for start, stop in _pieces(k, math.gcd(width, x_width)):
        sums = int_matmul(x[:, start:stop], w[:, start:stop]).to(torch.float32)
        sums.mul_(w_scale[:, start // width])
        if x_width != FULL:
            sums.mul_(x_scale[:, start // x_width, None])
        total += sums
    return total.mul_(x_scale) if x_width == FULL else total


def _mm(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Float32 ``a @ b.t()``, out of the reach of autocast."""
    out = torch.empty((a_MK.shape[0], b_NK.shape[0]), dtype=torch.float32, device=a_MK.device)
    return torch.mm(a_MK, b_NK.t(), out=out)


def _rows_at_a_time(k: int) -> int:
    return max(1, blocks.TILE_BYTES // (4 * max(k, 1)))


def _pieces(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Ranges of ``step`` that cover ``size``."""
    for start in range(0, size, step):
        yield start, min(start + step, size)
