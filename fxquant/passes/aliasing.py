"""Which nodes share memory, and which a call writes to, after the schemas of the ops."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxquant.graph import is_call


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes to, after its schema."""
    target: Callable[..., Any] | str = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    found: list[fx.Node] = []
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        fx.node.map_arg(given, found.append)
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
