"""What linears of a scheme give on an NPU, by arithmetic of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fxquant import numerics
from fxquant.scheme import QuantSpec, find_scheme

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32

# Float sums in another order, then one rounding: an ulp of the result's dtype.
ULP = {BF16: 2.0**-7, HALF: 2.0**-9, FULL: 2.0**-7}


def computed(dtype: torch.dtype) -> torch.dtype:
    return HALF if dtype == HALF else BF16


def spec_for(spec: QuantSpec, weight: Tensor) -> QuantSpec:
    """The spec that a weight of this dtype has in a scheme."""
    return replace(spec, scale=spec.half_scales(weight.dtype) or spec.scale)


def weight_only(x: Tensor, weight: Tensor, bias: Tensor | None, spec: QuantSpec) -> Tensor:
    """Scales and offsets rounded to the dtype of the op, values too, then a product in float64."""
    dtype, spec = computed(x.dtype), spec_for(spec, weight)
    codes, *beside = numerics.quantize_weight(weight, spec)
    rounded = tuple(part.to(dtype).to(part.dtype) for part in beside)
    values = numerics.dequantize_weight((codes, *rounded), spec, weight.shape[1], dtype)
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
