"""References of weight-only and of grouped matmuls.

Legend: M rows of x, N output features, K input features, E experts, G groups along K.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.testing.npu_sim.kernels.codes import E1M2, E2M1, INT4, dtype_of, unpack_fp4, unpack_int4_matrix
from fxquant.testing.npu_sim.kernels.exact import float_matmul, int_matmul
from fxquant.testing.npu_sim.kernels.quantize import scale_and_offset, to_codes
from fxquant.testing.npu_sim.kernels.registry import Call, reference
from fxquant.testing.npu_sim.refusals import refuse


def _codes(weight: Tensor, k: int, weight_dtype: int | None) -> Tensor:
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
    codes = _codes(call.weight, x.shape[-1], call.weight_dtype)
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


_ACTIVATIONS = {
    1: torch.relu,
    2: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    4: lambda x: x * torch.sigmoid(1.702 * x),
    5: torch.nn.functional.silu,
}


def _item(values: Sequence[Tensor] | None, index: int, experts: int) -> Any:
    """The parameter of a group: one of a list, or a row of a single tensor for all experts."""
    if not values:
        return None
    if len(values) == 1 and experts > 1:
        return values[0][index]
    if len(values) == 1 and values[0].dim() > 1 and values[0].shape[0] == 1:
        return values[0][0]
    return values[index]


def _group(call: Call, index: int, x: Tensor, weight: Tensor, token_scale: Tensor | None) -> Tensor:
    """The product of one group, before the cast."""
    experts = call.experts
    scale = _item(call.scale, index, experts)
    bias = _item(call.bias, index, experts)
    antiquant = _item(call.antiquant_scale, index, experts)
    if x.dtype == torch.int8:
        sums = int_matmul(x, _codes(weight, x.shape[-1], call.weight_dtype))
        if bias is not None:
            sums = sums + bias.to(torch.int32)
        if scale is None:
            return sums
        values, packed_offset = scale_and_offset(scale)
        out = sums.float() * values
        if token_scale is not None:
            out = out * token_scale.float().unsqueeze(-1)
        return out if packed_offset is None else out + packed_offset
    codes = _codes(weight, x.shape[-1], call.weight_dtype)
    if antiquant is not None:
        offset = _item(call.antiquant_offset, index, experts)
        codes = dequantized(codes, antiquant, offset, 0, x.dtype)
    out = float_matmul(x.float(), codes.float())
    return out if bias is None else out + bias.float()


def _sizes(call: Call) -> list[int] | None:
    """Rows of each group, from cumulative ends or counts; None without a list."""
    if call.group_list is None:
        return None
    values = call.group_list if isinstance(call.group_list, list) else call.group_list.tolist()
    if call.group_list_type == 1 and not isinstance(call.group_list, list):
        return [int(v) for v in values]
    ends = [0, *(int(v) for v in values)]
    return [b - a for a, b in itertools.pairwise(ends)]


def _split_rows(call: Call, parts: Sequence[Tensor] | None, sizes: list[int] | None) -> list[Any]:
    """Rows of x, or their scales, by group."""
    if parts is None:
        return [None] * call.experts
    if len(parts) == call.experts and (sizes is None or len(parts) > 1):
        return list(parts)
    if len(parts) != 1 or sizes is None or len(sizes) != call.experts:
        refuse("npu_grouped_matmul", f"{len(parts)} x for {call.experts} weights and a group_list of {sizes}")
    rows = parts[0].shape[0]
    if min(sizes) < 0 or sum(sizes) > rows:
        refuse("npu_grouped_matmul", f"group_list {sizes} does not fit the {rows} rows of x")
    return list(parts[0][: sum(sizes)].split(sizes))


@reference("npu_grouped_matmul", "npu_grouped_matmul.List")
def grouped_matmul(call: Call) -> list[Tensor]:
    """A matmul for each group of rows; rows after the last group are 0 here, garbage on a device."""
    if call.group_type == 2 or getattr(call, "x_dtype", None) or getattr(call, "scale_dtype", None):
        raise NotImplementedError("npu_grouped_matmul: the simulated NPU splits M only, without mx")
    for name in ("x_dtype", "weight_dtype"):
        setattr(call, name, getattr(call, name, None))
    single = len(call.weight) == 1 and call.weight[0].dim() == 3
    weights = list(call.weight[0]) if single else list(call.weight)
    call.experts = len(weights)
    sizes = _sizes(call)
    xs = _split_rows(call, call.x, sizes)
    token_scales = _split_rows(call, call.per_token_scale or None, sizes)
    outs = [
        _group(call, i, x, w, s) for i, (x, w, s) in enumerate(zip(xs, weights, token_scales, strict=True))
    ]
    if call.act_type:
        outs = [_ACTIVATIONS[call.act_type](out) for out in outs]
    dtype = dtype_of(call.output_dtype, call.x[0].dtype)
    outs = [to_codes(o.float(), dtype) if dtype == torch.int8 else o.to(dtype) for o in outs]
    if call.split_item in {0, 1}:
        return outs
    out = torch.cat(outs)
    missing = sum(x.shape[0] for x in call.x) - out.shape[0]
    return [torch.nn.functional.pad(out, (0, 0, 0, missing))]
