"""Runs the load graph: reads, computes and frees, unit by unit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxquant.checkpoint import Checkpoint, DictCheckpoint, StreamCheckpoint
from fxquant.errors import FxquantError, TiedWeightError, WeightMismatchError
from fxquant.materialize.meter import LiveBytes
from fxquant.materialize.progress import Progress, Report
from fxquant.materialize.recipes import LoadGraph, Recipe
from fxquant.materialize.schedule import Unit
from fxquant.materialize.stream import stream_units
from fxquant.numerics import same_values
from fxquant.timeline import Moment

Constants = dict[str, tuple[Tensor, ...]]
"""FQN -> the constants of its weight, in the order of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The constants of every weight, and what loading them took."""

    constants: Constants
    peak: Mapping[str, int]
    seconds: float
    read_bytes: int
    timeline: tuple[Moment, ...] = ()


def materialize(
    graph: LoadGraph,
    units: tuple[Unit, ...],
    checkpoint: Checkpoint,
    *,
    names: Mapping[str, str] | None = None,
    optional: Collection[str] = (),
    report: Report | None = None,
) -> Loaded:
    """Make every constant. On an error nothing is kept, and the text names the weight and its keys.

    ``names`` and ``optional`` are for streams: see ``stream_units``.
    """
    constants: Constants = {}
    started = time.perf_counter()
    wanted = {key for unit in units for key in unit.keys}
    total = sum(info.nbytes for key, info in checkpoint.infos.items() if key in wanted)
    done = 0
    with _one_thread(), LiveBytes() as meter, torch.no_grad():
        if isinstance(checkpoint, StreamCheckpoint):
            supplies = stream_units(graph, units, checkpoint, names or {}, optional)
        else:
            supplies = _read_units(units, checkpoint)
        for unit, tensors in supplies:
            done += sum(tensor.nbytes for tensor in tensors.values())
            if not isinstance(checkpoint, DictCheckpoint):  # whose tensors are in memory anyway
                pytree.tree_map_(meter.track, tensors)
            for recipe in unit.recipes:
                given = [tensors[key] for key in recipe.keys]
                if recipe is unit.recipes[-1]:
                    tensors.clear()
                theirs = _storages(given) if isinstance(checkpoint, DictCheckpoint) else set()
                made = _run(graph.templates[recipe.template], given, recipe)
                made = tuple(part.clone() if _storages([part]) & theirs else part for part in made)
                _check_repeated(recipe, constants.get(recipe.fqn), made)
                constants[recipe.fqn] = made
                pytree.tree_map_(meter.track, made)
            if report is not None:
                report(_step(unit, done, max(total, done), started, meter))
    seconds = time.perf_counter() - started
    return Loaded(constants=constants, peak=dict(meter.peak), seconds=seconds, read_bytes=done)


def _read_units(units: tuple[Unit, ...], checkpoint: Checkpoint) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
    for unit in units:
        yield unit, {key: checkpoint.read(key) for key in unit.keys}


def _storages(tensors: Sequence[Tensor]) -> set[int]:
    """Identities of the tensors' memory; a constant must not share that of the caller's dict."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _check_repeated(recipe: Recipe, before: tuple[Tensor, ...] | None, made: tuple[Tensor, ...]) -> None:
    """A stream may bring a tied weight under each of its names; the values must be the same."""
    if before is not None and not all(same_values(a, b) for a, b in zip(before, made, strict=True)):
        raise TiedWeightError(
            f"{recipe.fqn}: the model ties its names together, the stream brings different values for them"
        )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch ops on one thread.

    Tiles are small, and idle OpenMP threads spin: SmolLM2 on two busy cores took 36 s with two
    threads and 1.2 s with one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _step(unit: Unit, done: int, total: int, started: float, meter: LiveBytes) -> Progress:
    return Progress(
        tensor=unit.recipes[-1].fqn,
        done_bytes=done,
        total_bytes=total,
        seconds=time.perf_counter() - started,
        memory_now=sum(meter.now.values()),
        memory_peak=sum(meter.peak.values()),
    )


def _run(gm: fx.GraphModule, reads: list[Tensor], recipe: Recipe) -> tuple[Tensor, ...]:
    """Run a template node by node, freeing each value after its last use."""
    last = {arg: node for node in gm.graph.nodes for arg in node.all_input_nodes}
    values: dict[fx.Node, Any] = {}
    reads.reverse()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = _checked(reads.pop(), node, recipe)
        elif node.op == "output":
            return tuple(fx.node.map_arg(node.args[0], values.__getitem__))
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            try:
                values[node] = node.target(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                keys = ", ".join(recipe.keys)
                raise FxquantError(f"while making {recipe.fqn} from {keys}: {node.name}: {error}") from error
            del args, kwargs
            for arg in node.all_input_nodes:
                if last[arg] is node:
                    del values[arg]
    raise AssertionError("a template has an output")


def _checked(tensor: Tensor, node: fx.Node, recipe: Recipe) -> Tensor:
    """The read tensor, if it is what the plan expects."""
    expected = node.meta["val"]
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        raise WeightMismatchError(
            f"{recipe.fqn}: expected {expected.dtype} {list(expected.shape)}, "
            f"got {tensor.dtype} {list(tensor.shape)} from {', '.join(recipe.keys)}"
        )
    return tensor
