"""Quantizes, and rotates, an activation once for all matmuls that read it (q, k, v; gate, up).

Before: two ``quantize_act(x, spec)``. After: one. Not merged where ``x`` is written in between.
"""

from __future__ import annotations

import torch
from torch import fx

from fxquant.graph import is_call
from fxquant.passes.aliasing import memory_root, mutated_args

SHARED = (
    torch.ops.fxquant.quantize_act.default,
    torch.ops.fxquant.quantize_act_static.default,
    torch.ops.fxquant.hadamard.default,
)


def share_quantize_act(gm: fx.GraphModule) -> int:
    """Merge equal activation quantizations; the number of those removed."""
    count = 0
    root: dict[fx.Node, fx.Node] = {}
    version: dict[fx.Node, int] = {}
    first: dict[tuple[object, ...], fx.Node] = {}
    for node in list(gm.graph.nodes):
        root[node] = memory_root(node, root)
        for written in mutated_args(node):
            version[root[written]] = version.get(root[written], 0) + 1
        if is_call(node, *SHARED):
            x = node.all_input_nodes[0]
            key = (node.target, node.args, version.get(root[x], 0))
            kept = first.setdefault(key, node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                gm.graph.erase_node(node)
                count += 1
    return count
