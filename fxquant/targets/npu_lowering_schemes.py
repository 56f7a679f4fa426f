"""Lowering of experts: builds the NPU's calls from nodes.

It inserts at the graph's insertion point and returns the result; constants are nodes that hold what load
time made. Rows that may be none are handled as in ``npu_lowering``. Other products: ``npu_products``.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import Argument

from fxquant.graph import items, value
from fxquant.targets.npu_fakes import dtype_code
from fxquant.targets.npu_lowering import Rows, cast_to, emit, zeros


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
