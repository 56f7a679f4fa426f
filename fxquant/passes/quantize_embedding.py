"""Rewrites look-ups in a quantized embedding, so that only the rows that are asked for are made.

Before: ``embedding(dequantize_weight([codes, scale], spec, K, bfloat16), ids)``, also through casts.
After: ``embedding_dequant(ids, [codes, scale], spec, K, bfloat16) : bfloat16[..., K]``.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from fxquant import embedding_op as _embedding_op  # noqa: F401 - registers the op
from fxquant.graph import call, inserting_before, value
from fxquant.passes.uses import OtherUse
from fxquant.passes.weight_uses import weight_uses

aten = torch.ops.aten
fxq = torch.ops.fxquant


def quantize_embedding(gm: fx.GraphModule) -> int:
    """Rewrite every look-up in the values of an expanded weight; the number of them."""
    count = 0
    for source in gm.graph.find_nodes(op="call_function", target=fxq.dequantize_weight.default):
        for use in weight_uses(source):
            if isinstance(use, OtherUse) and use.lookup:
                _rewrite(gm, use.node, source)
                count += 1
    return count


def _rewrite(gm: fx.GraphModule, node: fx.Node, source: fx.Node) -> None:
    constants, spec, k, dtype = source.args
    with inserting_before(gm, node):
        indices = cast("fx.Node", node.args[1])
        new = call(gm, fxq.embedding_dequant.default, (indices, constants, spec, k, dtype))
        if value(new).dtype != value(node).dtype:
            new = call(gm, aten.to.dtype, (new, value(node).dtype))
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
