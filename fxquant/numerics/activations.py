"""Quantize activations ``[..., K]``: per token, per tensor, in groups along K."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxquant.numerics.blocks import float_chunks, regions, scratch_for
from fxquant.numerics.checks import check_act_spec
from fxquant.numerics.integers import TINY, scale_of
from fxquant.numerics.scales import absmax_of, scales_of, unit_of
from fxquant.numerics.weights import divide_, held_codes
from fxquant.scheme import FULL, SCALES, QuantSpec


def quantize_act(x_MK: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Codes ``[..., K]`` (``[..., ceil(K / 2)]`` bytes for 4 bits) and scale of an activation.

    The scale is float32 ``[..., 1]`` per token, ``[1, ..., 1]`` per tensor; for groups of g along K it is
    ``[..., ceil(K / g)]``, e8m0 for MX formats, else float32. Scales of two levels come as their product:
    of the e4m3 scale of a group and the float32 scale of its token.

    NaN and Inf end up in the scale, so they reach the output and are not hidden; their codes are 0.
    """
    check_act_spec(spec)
    if spec.per_row:
        return _per_row(x_MK, spec)
    shape = x_MK.shape[:-1]
    k = x_MK.shape[-1]
    x = x_MK.reshape(math.prod(shape), k)
    m = x.shape[0]
    groups = spec.grid(1, k)[1]
    codes = torch.empty((m, spec.columns(k)), dtype=spec.type.dtype, device=x.device)
    dtype = torch.float32 if spec.two_level else SCALES[spec.scale]
    scale = torch.empty((m, groups), dtype=dtype, device=x.device)
    if k == 0:
        scale.fill_(2.0**-127 if spec.scale == "e8m0" else TINY)
    for start, chunk in float_chunks(x, spec, scratch_for(x, spec)):
        rows = slice(start, start + chunk.shape[0])
        unit = unit_of(absmax_of(chunk[:, None, None, :]), spec) if spec.two_level else None
        for grid, blocks in regions(chunk, spec, start):
            scales = scales_of(blocks, spec, unit)
            scale[grid].copy_(scales.values if spec.two_level else scales.stored)
            divide_(blocks, scales)
        codes[rows].copy_(held_codes(chunk, spec))
    return codes.view(*shape, codes.shape[1]), scale.view(*shape, groups)


def _per_row(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """One float32 scale for each token, or one for all."""
    x = x.to(torch.float32)
    whole = spec.block[0] == FULL
    shape = (1,) * x.dim() if whole else (*x.shape[:-1], 1)
    if x.shape[-1] == 0 or (whole and x.numel() == 0):
        scale = torch.full(shape, TINY, dtype=torch.float32, device=x.device)
        return x.to(spec.type.dtype), scale
    absmax = x.abs().amax().view(shape) if whole else x.abs().amax(-1, keepdim=True)
    scale = scale_of(absmax, spec.top)
    return _codes_of(x, scale, spec).contiguous(), scale.contiguous()


def _codes_of(x: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Codes of float32 ``x``; a non-finite quotient gives 0 (its scale tells)."""
    codes = torch.div(x, scale)
    if not spec.type.is_float:
        codes.round_()
    return codes.clamp_(-spec.top, spec.top).nan_to_num_(0.0).to(spec.type.dtype)


def quantize_act_static(x_MK: Tensor, act_scale: Tensor, spec: QuantSpec) -> Tensor:
    """Codes ``[..., K]`` of an activation for a given float32 scale of one element.

    Ties go to even, codes saturate at the largest (127 for int8). No scale can tell of values that are
    not finite: Inf saturates, NaN gives 0.
    """
    if not spec.per_row or spec.codes not in ("int8", "e4m3"):
        raise NotImplementedError(f"no reference numerics for an activation of {spec} with a given scale")
    scale = act_scale.to(torch.float32).reshape((1,) * x_MK.dim())
    return _codes_of(x_MK.to(torch.float32), scale, spec).contiguous()
