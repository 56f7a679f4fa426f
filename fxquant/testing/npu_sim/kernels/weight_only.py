"""The reference of weight-only matmuls.

Legend: M rows of x, N output features, K input features, G groups along K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.testing.npu_sim.kernels.codes import E1M2, E2M1, INT4, unpack_fp4, unpack_int4_matrix
from fxquant.testing.npu_sim.kernels.exact import float_matmul
from fxquant.testing.npu_sim.kernels.quantize import scale_and_offset, to_codes
from fxquant.testing.npu_sim.kernels.registry import Call, reference


def codes_of(weight: Tensor, k: int, weight_dtype: int | None) -> Tensor:
    """Codes ``[..., K, N]`` of a weight that may be packed along N, or along K if transposed."""
    if weight_dtype in {INT4, E2M1, E1M2}:
        if weight_dtype == INT4:
            raise NotImplementedError("the simulated NPU takes int4 packed into int32 only")
        packed = weight.view(torch.uint8)
        if packed.shape[-2] == k:
            return unpack_fp4(packed, int(weight_dtype))
        return unpack_fp4(packed.transpose(-1, -2), int(weight_dtype)).transpose(-1, -2)
    if weight.dtype == torch.int32:
        return unpack_int4_matrix(weight, k=k)
    return weight


def _by_element(parameter: Tensor, k: int, group: int) -> Tensor:
    """Scales or offsets ``[G, N]``, ``[N]``, ``[1, N]``, ``[1]`` as what broadcasts against ``[K, N]``."""
    if parameter.dim() < 2 or parameter.shape[-2] == 1:
        return parameter
    return parameter.repeat_interleave(group or -(-k // parameter.shape[-2]), -2)[..., :k, :]


def dequantized(
    codes: Tensor, scale: Tensor, offset: Tensor | None, group: int, dtype: torch.dtype
) -> Tensor:
    """``(codes + offset) * scale``, rounded to the dtype of x, as float32.

    The rounding is what the device does in its vector units before its matmul; not checked on one.
    """
    k = codes.shape[-2]
    values = codes.float()
    if offset is not None:
        values = values + _by_element(offset.float(), k, group)
    return (values * _by_element(scale.float(), k, group)).to(dtype).float()


@reference("npu_weight_quant_batchmatmul")
def weight_quant_batchmatmul(call: Call) -> Tensor:
    """``x @ ((weight + offset) * scale) + bias``: x ``[M, K]``, weight ``[K, N]``."""
    x = call.x
    codes = codes_of(call.weight, x.shape[-1], call.weight_dtype)
    scale, _ = scale_and_offset(call.antiquant_scale)
    weight = dequantized(codes, scale, call.antiquant_offset, call.antiquant_group_size, x.dtype)
    out = float_matmul(x.float(), weight)
    if call.bias is not None:
        out = out + call.bias.float()
    if call.quant_scale is None:
        return out.to(x.dtype)
    quant_scale, quant_offset = scale_and_offset(call.quant_scale)
    out = out * quant_scale
    offset = call.quant_offset.float() if call.quant_offset is not None else quant_offset
    return to_codes(out if offset is None else out + offset, torch.int8)
