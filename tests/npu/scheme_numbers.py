"""What linears of a scheme give on an NPU, by arithmetic of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant import numerics
from fxquant.scheme import QuantSpec, find_scheme

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32

# Float sums in another order, then one rounding: an ulp of the result's dtype.
ULP = {BF16: 2.0**-7, HALF: 2.0**-9, FULL: 2.0**-7}


def computed(dtype: torch.dtype) -> torch.dtype:
    return HALF if dtype == HALF else BF16


def weight_only(x: Tensor, weight: Tensor, bias: Tensor | None, spec: QuantSpec) -> Tensor:
    """Scales and offsets rounded to the dtype of the op, values too, then a product in float64."""
    dtype = computed(x.dtype)
    codes, scale, *zero = numerics.quantize_weight(weight, spec)
    ones = torch.ones_like(scale)
    floats = numerics.dequantize_weight((codes, ones, *zero), spec, weight.shape[1], FULL)  # u - zero
    columns = spec.block[1] or weight.shape[1]
    wide = scale.to(dtype).float().repeat_interleave(columns, 1)[:, : weight.shape[1]]
    if zero:
        plain = numerics.dequantize_weight((codes, ones, zero[0] * 0), spec, weight.shape[1], FULL)
        offset = (8 - zero[0]).to(dtype).float().repeat_interleave(columns, 1)[:, : weight.shape[1]]
        floats = plain - 8 + offset
    values = (floats * wide).to(dtype)
    out = (x.to(dtype).double() @ values.double().t()).float()
    out = out if bias is None else out + bias.float()
    return out.to(dtype).to(x.dtype)


def reference(scheme: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The dialect's own arithmetic on the CPU, from what the op is given."""
    found = find_scheme(scheme)
    given = x if scheme.startswith("mx") else x.to(computed(x.dtype))
    fxq = torch.ops.fxquant
    constants = list(fxq.quantize_weight(weight, str(found.weight)))
    codes, scale = fxq.quantize_act(given, str(found.act))
    dtype = computed(x.dtype)
    if found.op == "fxquant::scaled_mm":
        out = fxq.scaled_mm(codes, constants[0], scale, constants[1], bias, dtype)
    else:
        spec = str(found.weight)
        out = fxq.block_mm(codes, scale, str(found.act), constants, spec, x.shape[-1], bias, dtype)
    return out.to(x.dtype)
