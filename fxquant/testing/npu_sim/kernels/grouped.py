"""The reference of grouped matmuls: each group of rows times the matrix of its expert.

Legend: M rows of x, N output features, K input features, E experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.testing.npu_sim.kernels.codes import E8M0, dtype_of
from fxquant.testing.npu_sim.kernels.exact import float_matmul, int_matmul
from fxquant.testing.npu_sim.kernels.matmul import quant_matmul
from fxquant.testing.npu_sim.kernels.quantize import scale_and_offset, to_codes
from fxquant.testing.npu_sim.kernels.registry import Call, reference
from fxquant.testing.npu_sim.kernels.weight_only import codes_of, dequantized
from fxquant.testing.npu_sim.refusals import refuse

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


_FLOAT_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)


def _float_codes(
    call: Call, x: Tensor, weight: Tensor, scale: Tensor, token_scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    """What ``npu_quant_matmul`` gives for one group; a matrix of scales is of blocks of 128 x 128."""
    mx, blocks = call.scale_dtype == E8M0, scale.dim() == 2
    one = Call(
        x1=x, x2=weight, scale=scale, offset=None, pertoken_scale=token_scale, bias=bias, y_scale=None,
        output_dtype=call.output_dtype, x1_dtype=call.x_dtype, x2_dtype=call.weight_dtype,
        scale_dtype=call.scale_dtype, pertoken_scale_dtype=call.per_token_scale_dtype,
        group_sizes=[1, 1, 32] if mx else [1, 128, 128] if blocks else None,
    )  # fmt: skip
    return quant_matmul(one)


def _group(call: Call, index: int, x: Tensor, weight: Tensor, token_scale: Tensor | None) -> Tensor:
    """The product of one group, before the cast."""
    experts = call.experts
    scale = _item(call.scale, index, experts)
    bias = _item(call.bias, index, experts)
    antiquant = _item(call.antiquant_scale, index, experts)
    if x.dtype in _FLOAT_CODES:
        return _float_codes(call, x, weight, scale, token_scale, bias)
    if x.dtype == torch.int8:
        sums = int_matmul(x, codes_of(weight, x.shape[-1], call.weight_dtype))
        if bias is not None:
            sums = sums + bias.to(torch.int32)
        if scale is None:
            return sums
        values, packed_offset = scale_and_offset(scale)
        out = sums.float() * values
        if token_scale is not None:
            out = out * token_scale.float().unsqueeze(-1)
        return out if packed_offset is None else out + packed_offset
    codes = codes_of(weight, x.shape[-1], call.weight_dtype)
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
    if call.group_type == 2:
        raise NotImplementedError("npu_grouped_matmul: the simulated NPU splits M only")
    for name in ("x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype"):
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
