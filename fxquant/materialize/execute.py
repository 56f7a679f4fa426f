"""Runs the load graph: reads, computes and frees, unit by unit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxquant.checkpoint import Checkpoint
from fxquant.errors import FxquantError, MissingWeightError, WeightMismatchError
from fxquant.materialize.meter import LiveBytes
from fxquant.materialize.progress import Progress, Report
from fxquant.materialize.recipes import LoadGraph, Recipe
from fxquant.materialize.schedule import Unit

Constants = dict[str, tuple[Tensor, ...]]
"""FQN -> the constants of its weight, in the order of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The constants of every weight, and what loading them took."""

    constants: Constants
    peak: Mapping[str, int]
    seconds: float
    read_bytes: int


def materialize(
    graph: LoadGraph,
    units: tuple[Unit, ...],
    checkpoint: Checkpoint,
    *,
    report: Report | None = None,
) -> Loaded:
    """Make every constant. On an error nothing is kept, and the text names the weight and its keys."""
    constants: Constants = {}
    started = time.perf_counter()
    wanted = {key for unit in units for key in unit.keys}
    total = sum(info.nbytes for key, info in checkpoint.infos.items() if key in wanted)
    done = 0
    with _one_thread(), LiveBytes() as meter, torch.no_grad():
        for unit, tensors in _supplies(units, checkpoint):
            for tensor in tensors.values():
                meter.track(tensor)
                done += tensor.nbytes
            del tensor
            for recipe in unit.recipes:
                given = [tensors[key] for key in recipe.keys]
                if recipe is unit.recipes[-1]:
                    tensors.clear()
                constants[recipe.fqn] = _run(graph.templates[recipe.template], given, recipe)
            if report is not None:
                report(_step(unit, done, max(total, done), started, meter))
    seconds = time.perf_counter() - started
    return Loaded(constants=constants, peak=dict(meter.peak), seconds=seconds, read_bytes=done)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch ops on one thread: tiles are small, and idle OpenMP threads spin (measured: 0.25 s
    against 0.5 to 6 s for the same load on two busy cores).
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


def _supplies(
    units: tuple[Unit, ...], checkpoint: Checkpoint
) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
    """Each unit with its tensors: read in order, or as a stream delivers them."""
    if not checkpoint.streaming:
        for unit in units:
            yield unit, {key: checkpoint.read(key) for key in unit.keys}
        return
    waiting = {key: unit for unit in units for key in unit.keys}
    held: dict[str, Tensor] = {}
    for key, tensor in checkpoint:  # type: ignore[attr-defined]
        unit = waiting.pop(key, None)
        if unit is None:
            continue
        held[key] = tensor
        if all(key in held for key in unit.keys):
            yield unit, {key: held.pop(key) for key in unit.keys}
    if waiting:
        missing = ", ".join(list(waiting)[:10])
        raise MissingWeightError(f"{checkpoint.location}: the stream ended without {missing}")


def _run(gm: fx.GraphModule, reads: list[Tensor], recipe: Recipe) -> tuple[Tensor, ...]:
    """Run a template node by node, freeing each value after its last use."""
    last = {arg: node for node in gm.graph.nodes for arg in node.all_input_nodes}
    values: dict[fx.Node, object] = {}
    reads.reverse()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = _checked(reads.pop(), node, recipe)
        elif node.op == "output":
            return tuple(fx.node.map_arg(node.args[0], values.__getitem__))  # type: ignore[arg-type]
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[misc]
            try:
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            except FxquantError:
                raise
            except Exception as error:
                keys = ", ".join(recipe.keys)
                raise WeightMismatchError(f"{recipe.fqn} from {keys}: {node.name}: {error}") from error
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
