"""The program ahead of time: a run graph, its load graph, and the two put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxquant.capture import Captured, tracing_alone
from fxquant.checkpoint import Checkpoint, open_checkpoint
from fxquant.errors import ConfigError, NotMaterializedError
from fxquant.graph import dump, placeholders, value
from fxquant.materialize.recipes import LoadGraph
from fxquant.passes import rewrite
from fxquant.passes.split_by_time import SplitGraphs, split_by_time
from fxquant.plan import Plan
from fxquant.planner import Planned, Request


class Lowered:
    """A rewritten program, the result of ``fxquant.lower``.

    ``run_graph`` is a GraphModule over constants, buffers and inputs; ``load_graph`` the recipes of
    the weights; ``load_tail`` derives the run graph's constants from theirs (cuts, casts). Call
    ``materialize()``, then the object itself like the model.
    """

    def __init__(
        self,
        planned: Planned,
        captured: Captured,
        split: SplitGraphs,
        sources: tuple[tuple[str, str], ...],
        buffers: Mapping[str, Tensor],
        checkpoint: Checkpoint | None,
    ) -> None:
        self.plan: Plan = planned.plan
        self.run_graph: fx.GraphModule = split.run
        self.load_graph: LoadGraph = planned.graph
        self.load_tail: fx.GraphModule = split.load
        self._planned = planned
        self._captured = captured
        self._sources = sources
        self._buffers = buffers
        self._checkpoint = checkpoint
        self._bound: tuple[Tensor, ...] | None = None

    def print_readable(self) -> str:
        """Both graphs as code."""
        run = self.run_graph.print_readable(print_output=False)
        return (
            f"{self.load_graph.print_readable()}\n{self.load_tail.print_readable(print_output=False)}\n{run}"
        )

    def dump(self) -> str:
        """Both graphs as stable text, for golden tests."""
        tail = dump(self.load_tail)
        return f"load:\n{self.load_graph.dump()}\ntail:\n{tail}\nrun:\n{dump(self.run_graph)}"

    def materialize(self, ckpt: object = None, *, progress: Callable[..., None] | None = None) -> Lowered:
        """Load the constants from ``ckpt``, by default the checkpoint that was planned with.

        ``ckpt`` may be all that ``fxquant.compile`` takes; its keys must be those of the plan.
        """
        source = self._checkpoint if ckpt is None else open_checkpoint(ckpt)
        if source is None:
            raise ConfigError("lower() was given no checkpoint: call materialize(ckpt)")
        loaded = self._planned.load(source, report=progress)
        parts = {
            (recipe.fqn, name): tensor
            for recipe in self.load_graph.recipes
            for name, tensor in zip(recipe.constants, loaded.constants[recipe.fqn], strict=True)
        }
        with torch.no_grad():
            self._bound = tuple(self.load_tail(*(parts[source] for source in self._sources)))
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program on inputs of the structure that it was lowered with."""
        if self._bound is None:
            raise NotMaterializedError("call materialize() before running the lowered program")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._captured.in_spec:
            raise ConfigError(
                f"the program was lowered for inputs of the structure {self._captured.in_spec}, got {spec}"
            )
        given = self._checked_inputs(leaves)
        buffers = [self._buffers[str(node.target)] for node in self._buffer_nodes()]
        flat = self.run_graph(*self._bound, *buffers, *given)
        return pytree.tree_unflatten(list(flat), self._captured.out_spec)

    def _checked_inputs(self, leaves: list[Any]) -> list[Any]:
        """The tensor leaves, if all leaves are what the program was lowered for."""
        captured = self._captured
        expected = {str(node.target): value(node) for node in placeholders(self.run_graph)}
        sizes: dict[str, int] = {}
        given = []
        for leaf, name, constant in zip(leaves, captured.inputs, captured.leaves, strict=True):
            if name is None:
                if leaf != constant:
                    raise ConfigError(f"the program was lowered with the argument {constant!r}, got {leaf!r}")
                continue
            if name in expected:
                _check_input(name, leaf, expected[name], sizes)
            given.append(leaf)
        return given

    def _buffer_nodes(self) -> list[fx.Node]:
        return [node for node in placeholders(self.run_graph) if str(node.target) in self._buffers]


def _check_input(name: str, leaf: Any, expected: Any, sizes: dict[str, int]) -> None:
    """A tensor input must have the dtype, rank and fixed sizes that were traced; equal symbols agree."""
    if not isinstance(expected, Tensor):
        return
    fits = isinstance(leaf, Tensor) and leaf.dtype == expected.dtype and leaf.dim() == expected.dim()
    if fits:
        for size, traced in zip(leaf.shape, expected.shape, strict=True):
            known = traced if isinstance(traced, int) else sizes.setdefault(str(traced), size)
            fits = fits and (size == known or not str(traced).isalnum())
    if not fits:
        got = f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        raise ConfigError(
            f"input {name}: the program was lowered for {expected.dtype} {list(expected.shape)}, got {got}. "
            "Lower with dynamic=True and example sizes >= 2, or for these sizes."
        )


def lower_model(
    model: nn.Module, checkpoint: Checkpoint | None, planned: Planned, request: Request
) -> Lowered:
    """Rewrite the whole captured graph after the plan's forms and split it by time."""
    (captured,) = planned.capture.graphs
    gm = captured.gm
    canonical = {name: group.fqn for group in planned.groups for name in group.fqns}
    loaded = {str(n.target): canonical.get(captured.tensors.get(str(n.target), "")) for n in placeholders(gm)}
    forms = {name: planned.forms[fqn] for name, fqn in loaded.items() if fqn and fqn in planned.forms}
    with tracing_alone():  # passes compute on fakes
        rewrite(gm, forms, request.target, disable=request.disable_passes)
    sources: dict[str, tuple[str, str]] = {}
    for name, fqn in loaded.items():
        if fqn is not None:
            parts = forms[name].constants if name in forms else ("value",)
            sources.update({f"{name}_{p}" if name in forms else name: (fqn, p) for p in parts})
    split = split_by_time(gm, sources)
    live = [str(node.target) for node in placeholders(split.load)]
    buffers = {
        str(node.target): model.get_buffer(captured.tensors[str(node.target)])
        for node in placeholders(split.run)
        if captured.tensors.get(str(node.target)) is not None and str(node.target) not in sources
    }
    return Lowered(planned, captured, split, tuple(sources[name] for name in live), buffers, checkpoint)
