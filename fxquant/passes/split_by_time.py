"""Splits a rewritten graph by time: what depends on weights alone moves to the load graph.

Before: one graph over constants and inputs, with ``slice(codes)`` or ``to(norm, float32)`` in it.
After: a load tail ``constants -> derived constants``, and a run graph that takes those. A node moves
only where its result is no larger than what it is made of, so that nothing grows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxquant.graph import placeholders, value
from fxquant.pass_manager import clean
from fxquant.passes.aliasing import memory_roots, mutated_args


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitGraphs:
    """The load tail (its outputs are the run graph's first placeholders) and the run graph."""

    load: fx.GraphModule
    run: fx.GraphModule
    constants: tuple[str, ...]


def split_by_time(gm: fx.GraphModule, weights: Collection[str]) -> SplitGraphs:
    """Split ``gm``, whose placeholders named in ``weights`` are known at load time."""
    early = _early_nodes(gm, set(weights))
    output = gm.graph.output_node()
    frontier = [
        node for node in gm.graph.nodes if node in early and any(user not in early for user in node.users)
    ]
    names = tuple(str(node.target) if node.op == "placeholder" else node.name for node in frontier)
    return SplitGraphs(
        load=_load_part(gm, early, frontier),
        run=_run_part(gm, early, frontier, names, output),
        constants=names,
    )


def _early_nodes(gm: fx.GraphModule, weights: set[str]) -> set[fx.Node]:
    root = memory_roots(gm)
    changed = {root[arg] for node in gm.graph.nodes for arg in mutated_args(node)}
    written = {node for node in gm.graph.nodes if root[node] in changed}
    early: set[fx.Node] = set()
    for node in gm.graph.nodes:
        given = node.op == "placeholder" and str(node.target) in weights
        if given or (node.op == "call_function" and _moves(node, early, written)):
            early.add(node)
    return early


def _moves(node: fx.Node, early: set[fx.Node], written: set[fx.Node]) -> bool:
    inputs = node.all_input_nodes
    if not inputs or not all(arg in early for arg in inputs) or node.is_impure():
        return False
    if node in written or any(arg in written for arg in inputs):
        return False
    val = node.meta.get("val")
    if not isinstance(val, Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    given = sum(value(arg).nbytes for arg in inputs if isinstance(value(arg), Tensor))
    return bool(val.nbytes <= given)


def _load_part(gm: fx.GraphModule, early: set[fx.Node], frontier: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in early:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in frontier))
    return fx.GraphModule(gm, graph)


def _run_part(
    gm: fx.GraphModule,
    early: set[fx.Node],
    frontier: list[fx.Node],
    names: tuple[str, ...],
    output: fx.Node,
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node, name in zip(frontier, names, strict=True):
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node not in early and node is not output:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.node.map_arg(output.args[0], copies.__getitem__))
    run = fx.GraphModule(gm, graph)
    clean(run)
    assert len(placeholders(run)) >= len(frontier)
    return run
