"""Which nodes share memory, and which a call writes to, after the schemas of the ops."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxquant.graph import is_call


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Those of the arguments of a call of ``op`` that it writes to, after its schema."""
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[i] if i < len(args) else kwargs.get(argument.name)


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """The nodes that a call writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[fx.Node] = []
    fx.node.map_arg(list(written_arguments(node.target, node.args, node.kwargs)), found.append)
    return found


def memory_root(node: fx.Node, root: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node whose memory ``node`` may share; ``root`` holds the answers for the nodes before it."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return node
    if isinstance(node.target, torch._ops.OpOverload):
        shares = any(returned.alias_info is not None for returned in node.target._schema.returns)
    else:
        shares = is_call(node, operator.getitem)
    return root[first] if shares else node


def memory_roots(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """``memory_root`` of every node."""
    root: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        root[node] = memory_root(node, root)
    return root
