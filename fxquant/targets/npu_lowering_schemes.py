"""Lowering rules of schemes other than dynamic int8: each builds the NPU's calls from nodes.

They insert at the graph's insertion point and return the result; constants are nodes that hold what load
time made. Rows that may be none are handled as in ``npu_lowering``.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx
from torch.fx.node import Argument

from fxquant.graph import call, items, value
from fxquant.targets.npu_fakes import E8M0, dtype_code
from fxquant.targets.npu_lowering import Rows, cast_to, emit, flatten, unflatten, zeros

aten = torch.ops.aten
npu = torch.ops.npu

QINT8 = 12
MX_GROUPS = (1, 1, 32)


def weight_only_mm(
    gm: fx.GraphModule,
    x: fx.Node,
    weight: fx.Node,
    scale: fx.Node,
    *,
    n: int,
    k: int,
    offset: fx.Node | None = None,
    group: int = 0,
    bias: fx.Node | None = None,
    rows: Rows,
) -> fx.Node:
    """``x [..., k]`` times int8 ``[k, n]``, or int4 in int32 ``[k, n / 8]``, -> ``[..., n]`` in x's dtype.

    ``scale`` and ``offset``: ``[n]``, or ``[ceil(k / group), n]``, in x's dtype; a bias is float16 for a
    float16 x and float32 for a bfloat16 one (D:5452).
    """
    dtype = value(x).dtype
    if rows.none(x):
        return zeros(gm, x, [n], dtype)
    kwargs: dict[str, Argument] = {}
    if offset is not None:
        kwargs["antiquant_offset"] = offset
    if bias is not None:
        kwargs["bias"] = cast_to(gm, bias, torch.float32 if dtype == torch.bfloat16 else torch.float16)
    if group:
        kwargs["antiquant_group_size"] = group
    args = (flatten(gm, x, k), weight, scale)
    out = emit(gm, rows.op("npu_weight_quant_batchmatmul", x), args, kwargs)
    return unflatten(gm, out, x)


def static_quantize(
    gm: fx.GraphModule, x: fx.Node, scales: fx.Node, zero_points: fx.Node | None, *, k: int, rows: Rows
) -> fx.Node:
    """Codes int8 ``[M, k]`` of ``x [..., k]`` by calibrated float32 scales ``[k]``.

    ``npu_quantize`` wants as many scales as its axis has entries, so a scale per tensor is expanded at
    load time, and ``x`` is a matrix, whose axis 1 is the op's default (D:11342).
    """
    matrix = flatten(gm, x, k)
    if rows.none(x):
        return zeros(gm, matrix, [k], torch.int8)
    return emit(gm, rows.op("npu_quantize", x), (matrix, scales, zero_points, QINT8, 1))


def static_scale(gm: fx.GraphModule, x_scale: fx.Node, w_scale: fx.Node, dtype: torch.dtype) -> fx.Node:
    """At load time, the scale ``[n]`` of ``static_mm``: the product of both, packed into int64 for float16.

    A float16 result without ``pertoken_scale`` takes a float32 scale only outside of graph mode (D:5002).
    """
    scale = call(gm, aten.mul.Tensor, (x_scale, w_scale))
    return scale if dtype == torch.bfloat16 else emit(gm, npu.npu_trans_quant_param.default, (scale,))


def static_mm(
    gm: fx.GraphModule,
    codes: fx.Node,
    weight: fx.Node,
    scale: fx.Node,
    *,
    like: fx.Node,
    dtype: torch.dtype,
    bias: fx.Node | None = None,
    rows: Rows,
) -> fx.Node:
    """Codes int8 ``[M, k]`` times int8 ``[k, n]`` -> ``[..., n]`` with the leading dims of ``like``.

    ``scale``: see ``static_scale``. A bias is int32, in units of the scale; for bfloat16 also float.
    """
    if rows.none(like):
        return zeros(gm, like, [value(weight).shape[1]], dtype)
    kwargs: dict[str, Argument] = {} if bias is None else {"bias": bias}
    kwargs["output_dtype"] = dtype_code(dtype)
    out = emit(gm, rows.op("npu_quant_matmul", like), (codes, weight, scale), kwargs)
    return unflatten(gm, out, like)


def grouped_mm(
    gm: fx.GraphModule,
    x: fx.Node,
    weight: fx.Node,
    scale: fx.Node,
    counts: fx.Node,
    *,
    dtype: torch.dtype,
    rows: Rows,
) -> fx.Node:
    """Experts: rows ``x [M, k]`` sorted by expert times int8 ``[E, k, n]`` -> ``[M, n]``.

    ``counts``: int64 ``[E]`` rows of each expert. ``scale [E, n]``: bfloat16 for a bfloat16 result,
    float32 for a float16 one (D:5906-6017).
    """
    if rows.none(x):
        return zeros(gm, x, [value(weight).shape[2]], dtype)
    x = cast_to(gm, x, dtype)
    codes, token = items(gm, emit(gm, rows.op("npu_dynamic_quant", x), (x,)))
    kwargs: dict[str, Argument] = {
        "scale": [scale],
        "per_token_scale": [token],
        "group_list": counts,
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
        "output_dtype": dtype_code(dtype),
    }
    (out,) = items(gm, emit(gm, rows.op("npu_grouped_matmul", x), ([codes], [weight]), kwargs))
    return out


def mx_mm(
    gm: fx.GraphModule,
    x: fx.Node,
    weight: fx.Node,
    scale: fx.Node,
    *,
    k: int,
    dtype: torch.dtype,
    bias: fx.Node | None = None,
    rows: Rows,
) -> fx.Node:
    """MX fp8 (950): ``x [..., k]`` times e4m3 ``[k, n]``, exponents ``[ceil(k / 64), n, 2]`` -> ``[..., n]``.

    The activation is quantized in blocks of 32 along K at run time; a bias is float32 ``[n]``.
    """
    if rows.none(x):
        return zeros(gm, x, [value(weight).shape[1]], dtype)
    matrix = flatten(gm, x, k)
    kind = dtype_code(cast("torch.dtype", value(weight).dtype))
    quantized = emit(gm, rows.op("npu_dynamic_mx_quant", x), (matrix,), {"dst_type": kind})
    codes, exponents = items(gm, quantized)
    kwargs: dict[str, Argument] = {"pertoken_scale": exponents}
    if bias is not None:
        kwargs["bias"] = cast_to(gm, bias, torch.float32)
    kwargs |= {
        "output_dtype": dtype_code(dtype),
        "pertoken_scale_dtype": E8M0,
        "scale_dtype": E8M0,
        "group_sizes": list(MX_GROUPS),
    }
    out = emit(gm, rows.op("npu_quant_matmul", x), (codes, weight, scale), kwargs)
    return unflatten(gm, out, x)
