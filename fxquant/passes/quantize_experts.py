"""Rewrites products with several quantized experts to grouped ops on their codes.

Before: ``_grouped_mm(x : bfloat16[S, K], transpose(dequantize_weight([codes, scale], ...)), offsets)`` with
codes ``[E, N, K]``, transformers' ``grouped_mm_fallback``, ``bmm`` with the experts that an index gives for
each row, or ``bmm`` of ``[E, S, K]`` with all of them.
After: ``grouped_scaled_mm(x_codes, codes, x_scale, scale, offsets, bfloat16)``, or the grouped form of the
scheme's other op. Rows with an index are sorted by it first, and put back in order afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxquant import grouped_ops as _ops  # noqa: F401 - registers the ops
from fxquant.graph import call, inserting_before, items, value
from fxquant.passes.quantize_linear import constants_of, cut_constants, product, uses_of_codes
from fxquant.passes.uses import ExpertUse

aten = torch.ops.aten
fxq = torch.ops.fxquant


def quantize_experts(gm: fx.GraphModule) -> int:
    """Rewrite every use of every expanded weight that multiplies with several experts; their number."""
    count = 0
    sorts: dict[tuple[fx.Node, int], _Sort] = {}
    for source, use in uses_of_codes(gm, ExpertUse):
        _rewrite(gm, use, source, sorts)
        count += 1
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sort:
    """Rows in the order of their experts: where each comes from, where each goes to, ends of groups."""

    order: fx.Node
    inverse: fx.Node
    offsets: fx.Node


def _rewrite(
    gm: fx.GraphModule, use: ExpertUse, source: fx.Node, sorts: dict[tuple[fx.Node, int], _Sort]
) -> None:
    node, experts = use.node, int(value(source).shape[0])
    if use.ids is not None and (use.ids, experts) not in sorts:
        with inserting_before(gm, _first_after(use.ids)):
            sorts[use.ids, experts] = _sorted(gm, use.ids, experts)
    with inserting_before(gm, node):
        constants = cut_constants(gm, constants_of(source), source.meta["form"].weight, use.cuts)
        x, dtype = use.x, value(node).dtype
        if use.offsets is not None:
            new = product(gm, x, constants, source, dtype, use.offsets, grouped=True)
        elif use.ids is not None:
            sort, axis = sorts[use.ids, experts], 2 if use.swapped else 1
            rows = call(gm, aten.index.Tensor, (call(gm, aten.squeeze.dim, (x, axis)), [sort.order]))
            out = product(gm, rows, constants, source, dtype, sort.offsets, grouped=True)
            new = call(gm, aten.unsqueeze.default, (call(gm, aten.index.Tensor, (out, [sort.inverse])), axis))
        else:
            new = _with_all(gm, use, constants, source)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def _first_after(node: fx.Node) -> fx.Node:
    """The first node behind ``node`` and behind all inputs of the graph."""
    after = node.next
    while after.op == "placeholder":
        after = after.next
    return after


def _sorted(gm: fx.GraphModule, ids: fx.Node, experts: int) -> _Sort:
    device = value(ids).device
    each = call(gm, aten.arange.default, (experts,), {"device": device, "dtype": value(ids).dtype})
    # As in the model's own index: negative ones count from the end, others beyond the experts are an error.
    known = call(gm, aten.index.Tensor, (each, [ids]))
    ordered, order = items(gm, call(gm, aten.sort.default, (known,)))
    ends = {"out_int32": True, "right": True}
    return _Sort(
        order=order,
        inverse=call(gm, aten.argsort.default, (order,)),
        offsets=call(gm, aten.searchsorted.Tensor, (ordered, each), ends),  # type: ignore[arg-type]
    )


def _with_all(gm: fx.GraphModule, use: ExpertUse, constants: list[fx.Node], source: fx.Node) -> fx.Node:
    """``x [E, S, K]``: as many rows for each expert."""
    x, val = use.x, value(use.node)
    experts, rows = int(val.shape[0]), call(gm, aten.sym_size.int, (use.x, 1))
    flat = call(gm, aten.reshape.default, (x, [-1, int(value(x).shape[2])]))
    each = call(gm, aten.arange.start, (1, experts + 1), {"device": val.device})
    offsets = call(gm, aten.mul.Tensor, (each, rows))
    out = product(gm, flat, constants, source, val.dtype, offsets, grouped=True)
    return call(gm, aten.view.default, (out, [experts, rows, int(val.shape[2])]))
