"""Rewrites matmuls with a quantized weight to integer ones.

Before: ``linear(x : bfloat16[..., K], dequantize_weight(codes, scale), bias)``, also through casts,
transposes and cuts of the weight, and as ``matmul``, ``mm`` or ``addmm``.
After: ``scaled_mm(x_codes, codes, x_scale, scale, bias, bfloat16)`` with
``x_codes, x_scale = quantize_act(x)``; cuts of the weight become cuts of codes and scale.
"""

from __future__ import annotations

import torch
from torch import fx

from fxquant import ops as _ops  # noqa: F401 - registers the dialect
from fxquant.graph import call, inserting_before, items, value
from fxquant.passes.weight_uses import Cut, LinearUse, matmul_operands, weight_uses

aten = torch.ops.aten
fxq = torch.ops.fxquant


def quantize_linear(gm: fx.GraphModule) -> int:
    """Rewrite every linear use of every expanded weight; the number of them."""
    count = 0
    for source in gm.graph.find_nodes(op="call_function", target=fxq.dequantize_weight.default):
        act_spec = str(source.args[0].meta["form"].act)
        for use in weight_uses(source):
            if isinstance(use, LinearUse) and use.k_axis == 1:
                _rewrite(gm, use, source, act_spec)
                count += 1
    return count


def _rewrite(gm: fx.GraphModule, use: LinearUse, source: fx.Node, act_spec: str) -> None:
    node = use.node
    operands = matmul_operands(node)
    assert operands is not None
    x, _, bias, _ = operands
    with inserting_before(gm, node):
        codes, scale = source.args[0], source.args[1]
        for cut in use.cuts:
            codes = _cut(gm, codes, cut)
            scale = _cut(gm, scale, cut) if cut.axis == 0 else scale
        x_codes, x_scale = items(gm, call(gm, fxq.quantize_act.default, (x, act_spec)))
        args = (x_codes, codes, x_scale, scale, bias, value(node).dtype)
        new = call(gm, fxq.scaled_mm.default, args)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def _cut(gm: fx.GraphModule, node: object, cut: Cut) -> fx.Node:
    return call(gm, aten.slice.Tensor, (node, cut.axis, cut.start, cut.stop, cut.step))  # type: ignore[arg-type]
