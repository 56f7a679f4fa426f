"""Cuts the recipe of a stack of experts into the recipes of the single ones.

A parameter ``[E, N, K]`` is E matrices. The row rules tell what each of them takes of the stored tensors:
some of the tensors (one for each expert, stacked while loading), or one index of a tensor ``[E, ...]``.
All experts are mostly made alike, so they share one template, and are loaded one by one, in tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, fx

from fxquant.graph import placeholders, value
from fxquant.materialize.demand import walk
from fxquant.materialize.row_rules import WHOLE, NotSeparableError, Part, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One index of ``count`` along the first axis of a stored tensor, each of ``nbytes`` bytes."""

    index: int
    count: int
    nbytes: int

    @property
    def start(self) -> int:
        """The first byte."""
        return self.index * self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """How one matrix of the stack is made.

    ``reads``: positions among the reads of the stack, and what of each is taken (None: all of it);
    ``vals`` are fakes of that. ``make`` gives the matrix of what was read. ``structure`` is equal for
    experts that are made alike.
    """

    reads: tuple[tuple[int, Slice | None], ...]
    vals: tuple[Tensor, ...]
    make: Callable[..., Tensor]
    structure: tuple[object, ...]


def cut_experts(whole: fx.GraphModule) -> tuple[Expert, ...]:
    """The experts of a graph that gives a tensor ``[E, N, K]``; NotSeparableError if they are mixed."""
    (result,) = cast("tuple[fx.Node]", whole.graph.output_node().args[0])
    return tuple(_expert(whole, result, i) for i in range(int(value(result).shape[0])))


def _expert(whole: fx.GraphModule, result: fx.Node, index: int) -> Expert:
    demands, parts = walk(whole, {result: Range(0, index, index + 1)})
    reads: list[tuple[int, Slice | None]] = []
    names: dict[fx.Node, str] = {}
    inputs: list[tuple[fx.Node, bool]] = []
    facts: list[object] = []
    for position, node in enumerate(placeholders(whole)):
        if node in demands:
            taken = _taken(node, demands[node])
            names[node] = f"r{len(reads)}"
            reads.append((position, taken))
            inputs.append((node, taken is not None))
            facts.append((value(node).dtype, tuple(value(node).shape), taken is not None))
    calls = [(node, parts[node]) for node in whole.graph.nodes if node in parts]
    for node, part in calls:
        if part.target is None:
            (given,) = part.ranges
            names[node] = names[given]
            continue
        names[node] = f"%{len(facts)}"
        args = fx.node.map_arg((part.args, dict(part.kwargs)), lambda n: names[n])
        facts.append((part.target, repr(args)))
    facts.append(names[result])
    vals = [value(node)[0] if sliced else value(node) for node, sliced in inputs]
    make = _Make(inputs, calls, result)
    return Expert(reads=tuple(reads), vals=tuple(vals), make=make, structure=tuple(facts))


def _taken(node: fx.Node, wanted: Range | None) -> Slice | None:
    """What of a stored tensor is read: all of it, or one index of its first axis."""
    if wanted is WHOLE:
        return None
    if wanted.axis != 0 or wanted.stop - wanted.start != 1:
        raise NotSeparableError(f"one expert takes more than one index of {list(value(node).shape)}")
    stored = cast("Tensor", value(node))
    nbytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    return Slice(index=wanted.start, count=int(stored.shape[0]), nbytes=nbytes)


class _Make:
    """Runs the calls of one expert."""

    def __init__(
        self, inputs: list[tuple[fx.Node, bool]], calls: list[tuple[fx.Node, Part]], result: fx.Node
    ) -> None:
        self.inputs, self.calls, self.result = inputs, calls, result

    def __call__(self, *tensors: Tensor) -> Tensor:
        values: dict[fx.Node, Any] = {
            node: tensor.unsqueeze(0) if sliced else tensor
            for (node, sliced), tensor in zip(self.inputs, tensors, strict=True)
        }
        for node, part in self.calls:
            if part.target is None:
                (given,) = part.ranges
                values[node] = values[given]
                continue
            args, kwargs = _given(part.args, part.kwargs, values)
            values[node] = part.target(*args, **kwargs)
        return cast("Tensor", values[self.result]).select(0, 0)


def _given(args: Any, kwargs: Mapping[str, Any], values: Mapping[fx.Node, Any]) -> Any:
    return fx.node.map_arg((args, dict(kwargs)), values.__getitem__)
