"""Demands ranges backwards through a template, from its constants to its reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx

from fxquant import ops as _ops  # noqa: F401 - registers the dialect
from fxquant.graph import value
from fxquant.materialize.program import COPY, QUANTIZE, End
from fxquant.materialize.row_rules import RULES, SPLITS, WHOLE, NotSeparableError, Part, Range, split_part
from fxquant.scheme import QuantSpec

fxq = torch.ops.fxquant
aten = torch.ops.aten


def results_of(gm: fx.GraphModule) -> list[Any]:
    """The fake constants of a template."""
    return [value(node) for node in cast("Any", gm.graph.output_node().args[0])]


def demand(demands: dict[fx.Node, Range | None], node: fx.Node, wanted: Range | None) -> None:
    """Note what is needed of a node; a second, different range is refused."""
    if demands.setdefault(node, wanted) != wanted:
        raise NotSeparableError(f"{node.name} is needed in two different parts")


def walk(
    gm: fx.GraphModule, seeds: Mapping[fx.Node, Range | None]
) -> tuple[dict[fx.Node, Range | None], dict[fx.Node, Part]]:
    """Ranges of every value that the ``seeds`` take, and the op of each on its part."""
    checks = gm.graph.find_nodes(op="call_function", target=fxq.check_same.default)
    demands, parts = _walk_back(gm, seeds)
    if checks:
        more = dict(seeds)
        for check in checks:
            source, other, _ = cast("tuple[fx.Node, fx.Node, str]", check.args)
            demand(more, other, demands.get(source, WHOLE))
            demand(more, source, demands.get(source, WHOLE))
        demands, parts = _walk_back(gm, more)
        for check in checks:
            parts[check] = Part(ranges={}, target=fxq.check_same.default, args=check.args)
    return demands, parts


def _walk_back(
    gm: fx.GraphModule, seeds: Mapping[fx.Node, Range | None]
) -> tuple[dict[fx.Node, Range | None], dict[fx.Node, Part]]:
    demands = dict(seeds)
    parts: dict[fx.Node, Part] = {}
    for node in reversed(gm.graph.nodes):
        if node not in demands or node.op == "placeholder":
            continue
        wanted = demands[node]
        part = whole_part(gm, node) if wanted is WHOLE else _rule(node)(node, wanted)
        parts[node] = part
        for given, taken in part.ranges.items():
            demand(demands, given, taken)
    return demands, parts


def whole_part(gm: fx.GraphModule, node: fx.Node) -> Part:
    """A node on everything; a tensor that is part of the template stands for itself."""
    if node.op == "get_attr":
        return Part(ranges={}, target=_as_it_is, args=(getattr(gm, str(node.target)),))
    ranges = dict.fromkeys(node.all_input_nodes, WHOLE)
    if node.target is aten.view.default:  # tensors in memory may have strides that no view can take
        return Part(ranges=ranges, target=aten.reshape.default, args=node.args)
    return Part(ranges=ranges, target=node.target, args=node.args, kwargs=node.kwargs)  # type: ignore[arg-type]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _rule(node: fx.Node) -> Callable[[fx.Node, Range], Part]:
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and source.target in SPLITS:
        return split_part
    rule = RULES.get(node.target)
    if rule is None:
        op = node.target
        if op is operator.getitem and isinstance(source, fx.Node):
            op = source.target  # one of its several results
        raise NotSeparableError(f"{op} has no row rule")
    return rule


def find_ends(gm: fx.GraphModule) -> tuple[End, ...]:
    """Where the results of a template go."""
    results = cast("list[fx.Node]", list(cast("Any", gm.graph.output_node().args[0])))
    ends: list[End] = []
    for index, node in enumerate(results):
        source = _quantized(node, results)
        if source is None:
            ends.append(End(kind=COPY, source=_uncast(node), outs=(index,)))
        elif node.args[1] == 0:
            places = {
                cast("int", other.args[1]): i
                for i, other in enumerate(results)
                if other.args[:1] == (source,)
            }
            given = cast("fx.Node", source.args[0])
            spec = QuantSpec.parse(str(source.args[1]))
            outs = tuple(places[i] for i in range(len(places)))
            ends.append(End(kind=QUANTIZE, source=given, outs=outs, spec=spec))
    return tuple(ends)


def _quantized(node: fx.Node, results: list[fx.Node]) -> fx.Node | None:
    """The ``quantize_weight`` whose constants all are results and are used nowhere else."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.target is not fxq.quantize_weight.default:
        return None
    users = list(source.users)
    count = len(QuantSpec.parse(str(source.args[1])).names)
    whole = {user.args[1] for user in users} == set(range(count)) and all(user in results for user in users)
    return source if whole and all(len(user.users) == 1 for user in users) else None


def _uncast(node: fx.Node) -> fx.Node:
    """What a last cast is made from: writing into the constant casts anyway."""
    casts = node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype"} and len(node.users) == 1
    return node.all_input_nodes[0] if casts else node
