"""The reference of ``npu_dynamic_mx_quant``: blocks with a power of two for a scale.

Formulas: ops-nn, quant/dynamic_mx_quant/docs/aclnnDynamicMxQuantV3.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.testing.npu_sim.kernels.codes import (
    E1M2,
    E2M1,
    FP4_VALUES,
    ROUND_MODES,
    dtype_of,
    fp4_codes,
    pack_fp4,
)
from fxquant.testing.npu_sim.kernels.quantize import to_codes
from fxquant.testing.npu_sim.kernels.registry import Call, reference
from fxquant.testing.npu_sim.refusals import refuse

_EMAX = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15, E2M1: 2, E1M2: 0}


def _shared_exponents(absmax: Tensor, kind: torch.dtype | int, scale_alg: int) -> Tensor:
    """Biased exponents (e8m0) of blocks with these largest magnitudes, as int64."""
    if scale_alg == 0:  # OCP: floor(log2(absmax)) - emax
        _, exponent = torch.frexp(absmax.double())
        shared = exponent.long() - 1 - _EMAX[kind]
    else:  # of absmax / top, rounded up
        assert isinstance(kind, torch.dtype)
        mantissa, exponent = torch.frexp((absmax / torch.finfo(kind).max).double())
        shared = exponent.long() - (mantissa == 0.5).long()
    biased = (shared + 127).clamp(0, 254)
    biased = torch.where(absmax == 0, 0, biased)
    return torch.where(absmax.isfinite(), biased, 255)


def _check(call: Call, kind: torch.dtype | int) -> None:
    op = "npu_dynamic_mx_quant"
    allowed = ROUND_MODES if isinstance(kind, int) else ("rint",)
    if call.round_mode not in allowed:
        refuse(op, f"round_mode {call.round_mode!r} for this dst_type, expected one of {allowed}")
    if call.scale_alg == 2 or call.dst_type_max or (call.scale_alg == 1 and isinstance(kind, int)):
        raise NotImplementedError(
            f"{op}: the simulated NPU has scale_alg 0, and 1 for fp8, without dst_type_max; "
            f"got scale_alg {call.scale_alg}, dst_type_max {call.dst_type_max}"
        )


@reference("npu_dynamic_mx_quant")
def dynamic_mx_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Codes, and exponents uint8 with pairs of blocks in the last dimension."""
    kind = call.dst_type if call.dst_type in FP4_VALUES else dtype_of(call.dst_type, torch.float8_e5m2)
    _check(call, kind)
    x = call.input.float().movedim(call.axis, -1)
    size, block = x.shape[-1], call.block_size
    blocks = torch.nn.functional.pad(x, (0, -size % block)).unflatten(-1, (-1, block))
    absmax = blocks.abs().amax(-1)
    if call.scale_alg == 1:
        absmax = absmax.clamp(min=call.max_low_bound)
    exponents = _shared_exponents(absmax, kind, call.scale_alg)
    scaled = blocks.double() * torch.exp2(127.0 - exponents.double()).unsqueeze(-1)
    scaled = scaled.flatten(-2)[..., :size].movedim(-1, call.axis)
    codes = (
        pack_fp4(fp4_codes(scaled, kind, call.round_mode))
        if isinstance(kind, int)
        else to_codes(scaled.float(), kind)
    )
    pairs = torch.nn.functional.pad(exponents, (0, exponents.shape[-1] % 2)).unflatten(-1, (-1, 2))
    axis = call.axis % call.input.dim()
    return codes, pairs.movedim(-2, axis).to(torch.uint8)
