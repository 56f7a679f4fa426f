"""Lowering of products with experts to ``npu_grouped_matmul``.

Before: ``grouped_scaled_mm(x_codes [S, K], w_codes [E, N, K], x_scale, w_scale, offsets, dtype)``, or
``grouped_weight_only_mm(x [S, K], [w_codes, w_scale], spec, offsets)``.
After: ``npu_grouped_matmul`` on the transposed view ``[E, K, N]`` of the codes, with cumulative groups. With
codes of rows its scales are bfloat16 for a bfloat16 result and float32 for a float16 one, else of the
dtype of the rows (D:5906-6017). Rows behind the last group are not written by a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import fx
from torch.fx.node import Argument

from fxquant.graph import call, inserting_before, items, value
from fxquant.scheme import SCHEMES
from fxquant.target import Layout, Limit
from fxquant.targets.npu_eager import AS_BF16
from fxquant.targets.npu_fakes import dtype_code
from fxquant.targets.npu_lowering import Rows, cast_to, emit, zeros

aten = torch.ops.aten

GROUPED = ("int8", "int8_weight_only")
"""Schemes of experts that are lowered."""

LIMITS = tuple(
    Limit(op=SCHEMES[name].grouped_op, axis=axis, maximum=maximum, source=source)
    for name in GROUPED
    # K is the inner axis of both operands, for codes [E, N, K].
    for axis, maximum, source in (("K", 65535, "D:5906"), ("E", 1024, "D:6017"))
)


def arrange_experts(dtype: object, *, nz: bool) -> Layout:
    """Codes of experts are ``[E, N, K]``, whatever was asked."""
    notes = [AS_BF16] if dtype is torch.float32 else []
    notes += ["not in FRACTAL_NZ: npu_grouped_matmul is used with ND alone"] if nz else []
    return Layout(reason="; ".join(["experts apart", *notes]))


def lower_grouped_mm(gm: fx.GraphModule, node: fx.Node, dtype: torch.dtype, rows: Rows) -> None:
    """Replace a ``fxquant.grouped_scaled_mm``; ``dtype``: float16 or bfloat16, in which it computes."""
    x, codes, x_scale, scale, offsets = cast("tuple[fx.Node, ...]", node.args[:5])
    with inserting_before(gm, node):
        factors = {
            "scale": [_flat(gm, scale, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)],
            "per_token_scale": [call(gm, aten.reshape.default, (x_scale, [-1]))],
        }
        out = _grouped(gm, x, codes, factors, offsets, dtype, rows)
        out = cast_to(gm, out, value(node).dtype)
    node.replace_all_uses_with(out)
    gm.graph.erase_node(node)


def lower_grouped_weight_only(gm: fx.GraphModule, node: fx.Node, dtype: torch.dtype, rows: Rows) -> None:
    """Replace a ``fxquant.grouped_weight_only_mm`` with int8 codes; scales are of ``dtype``, as rows are."""
    x, (codes, scale), _, offsets = cast("tuple[fx.Node, list[fx.Node], str, fx.Node]", node.args)
    with inserting_before(gm, node):
        factors = {"antiquant_scale": [_flat(gm, scale, dtype)]}
        out = _grouped(gm, cast_to(gm, x, dtype), codes, factors, offsets, dtype, rows)
        out = cast_to(gm, out, value(node).dtype)
    node.replace_all_uses_with(out)
    gm.graph.erase_node(node)


def _flat(gm: fx.GraphModule, scale: fx.Node, dtype: torch.dtype) -> fx.Node:
    return cast_to(gm, call(gm, aten.squeeze.dim, (scale, -1)), dtype)


def _grouped(
    gm: fx.GraphModule,
    x: fx.Node,
    codes: fx.Node,
    factors: Mapping[str, list[fx.Node]],
    offsets: fx.Node,
    dtype: torch.dtype,
    rows: Rows,
) -> fx.Node:
    """``x [S, K]`` times codes ``[E, N, K]`` in ``dtype``, scaled by ``factors``."""
    if rows.none(x):
        return zeros(gm, x, [int(value(codes).shape[1])], dtype)
    weight = call(gm, aten.transpose.int, (codes, 1, 2))
    kwargs: dict[str, Argument] = {
        **factors,
        "group_list": cast_to(gm, offsets, torch.int64),
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 0,
        "output_dtype": dtype_code(dtype),
    }
    (out,) = items(gm, emit(gm, rows.op("npu_grouped_matmul", x), ([x], [weight]), kwargs))
    return out
