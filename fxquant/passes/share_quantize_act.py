"""Quantizes an activation once for all matmuls that read it (q, k, v; gate, up).

Before: two ``quantize_act(x, spec)``. After: one. Not merged where ``x`` is written in between.
"""

from __future__ import annotations

import torch
from torch import fx

from fxquant.graph import is_call
from fxquant.passes.weight_uses import mutated_args


def share_quantize_act(gm: fx.GraphModule) -> int:
    """Merge equal activation quantizations; the number of those removed."""
    count = 0
    root: dict[fx.Node, fx.Node] = {}
    version: dict[fx.Node, int] = {}
    first: dict[tuple[object, ...], fx.Node] = {}
    for node in list(gm.graph.nodes):
        root[node] = _root(node, root)
        for written in mutated_args(node):
            version[root[written]] = version.get(root[written], 0) + 1
        if is_call(node, torch.ops.fxquant.quantize_act.default):
            x, spec = node.all_input_nodes[0], node.args[1]
            key = (x, spec, version.get(root[x], 0))
            kept = first.setdefault(key, node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                gm.graph.erase_node(node)
                count += 1
    return count


def _root(node: fx.Node, root: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node whose memory ``node`` may share, after the schema of its op."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return root[node.args[0]] if _is_getitem(node) else node  # type: ignore[index]
    schema = node.target._schema
    shares = any(returned.alias_info is not None for returned in schema.returns)
    first = node.args[0] if node.args else None
    return root[first] if shares and isinstance(first, fx.Node) else node


def _is_getitem(node: fx.Node) -> bool:
    import operator

    return is_call(node, operator.getitem) and isinstance(node.args[0], fx.Node)
