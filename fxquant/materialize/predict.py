"""The memory of a load over time, by liveness, before a byte is read."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from fxquant.form import Form
from fxquant.fractal_nz import padded_bytes
from fxquant.materialize.blocks import Blocks
from fxquant.materialize.errors import sums_bytes
from fxquant.materialize.jobs import LOOKAHEAD, Schedule
from fxquant.materialize.recipes import LoadGraph, Recipe, Shapes, held_shapes, result_vals
from fxquant.timeline import Moment

MAX_MOMENTS = 512


class _Resident:
    """Bytes of the constants so far; on a device, those of the allocator's blocks."""

    def __init__(self, graph: LoadGraph, schedule: Schedule) -> None:
        self.graph = graph
        self.blocks: Blocks | None = None
        if schedule.device != "cpu":
            self.blocks = Blocks(schedule.device)
            for size in (schedule.buffer_bytes, schedule.scratch_bytes) * schedule.workers:
                self.blocks.take(size)  # the workers' own come first
        self.device = self.host = 0
        if self.blocks is not None:
            self.device = self.blocks.take(sums_bytes(schedule.batches))
        self._to_change: dict[str, list[tuple[int, int]]] = {}

    def begin(self, recipe: Recipe) -> None:
        """The constants of a weight are allocated."""
        shapes = tuple((val.shape, val.dtype) for val in result_vals(self.graph.templates[recipe.template]))
        shapes = recipe.shapes(shapes)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes] + [4] * len(recipe.given)
        if recipe.host:
            self.host += sum(sizes)
            return
        taken = sizes if self.blocks is None else [self.blocks.take(size) for size in sizes]
        self.device += sum(taken)
        if self.blocks is not None and recipe.held is not None:
            self._to_change[recipe.fqn] = _held(recipe.held, shapes, taken)
        if self.blocks is not None and recipe.nz:
            padded = [padded_bytes(shape, dtype.itemsize) for shape, dtype in shapes[: recipe.nz]]
            self._to_change.setdefault(recipe.fqn, []).extend(zip(taken, padded, strict=False))

    def end(self, recipe: Recipe) -> int:
        """A weight is whole; what is made of its constants gets blocks of its own.

        The most bytes meanwhile beyond those after it: while a constant is changed it lies there twice.
        """
        if self.blocks is None:
            return 0
        most = self.device
        for old, size in self._to_change.pop(recipe.fqn, ()):
            new = self.blocks.take(size)
            self.blocks.give_back(old)
            most = max(most, self.device + new)
            self.device += new - old
        return most - self.device


def _held(form: Form, shapes: Shapes, taken: Sequence[int]) -> list[tuple[int, int]]:
    """For each constant that ``form`` holds otherwise, its block so far, if any, and its bytes."""
    final = held_shapes(form, shapes)
    made = {name: (shapes[i], taken[i]) for i, name in enumerate(form.constants[: len(shapes)])}
    found = []
    for name, (dtype, size) in list(final.items())[len(form.codes) :]:
        (_, before), block = made.get(name, ((None, None), 0))
        if name in form.derived or (name in made and name != "table" and before != dtype):
            found.append((block, math.prod(size) * dtype.itemsize))
    return found


def predict(schedule: Schedule, graph: LoadGraph, held_bytes: Mapping[str, int]) -> list[Moment]:
    """Memory after each batch has begun: constants so far, buffers, and values in flight.

    ``held_bytes``: by the recipe's label, bytes of reads that all its tiles share.
    """
    last = {job.recipe.label: i for i, batch in enumerate(schedule.batches) for job in batch.jobs}
    whole = {job.recipe.fqn: i for i, batch in enumerate(schedule.batches) for job in batch.jobs}
    resident = _Resident(graph, schedule)
    allocated: set[str] = set()
    seen: set[str] = set()
    held = done = 0
    releases: dict[int, int] = {}
    window: list[int] = []
    casts: list[int] = []
    moments = []
    for i, batch in enumerate(schedule.batches):
        held -= releases.pop(i, 0)
        for job in batch.jobs:
            fqn, label = job.recipe.fqn, job.recipe.label
            if fqn not in allocated:
                allocated.add(fqn)
                resident.begin(job.recipe)
            if label not in seen:
                seen.add(label)
                size = held_bytes.get(label, 0)
                held += size
                end = last[label] + schedule.workers * LOOKAHEAD
                releases[end] = releases.get(end, 0) + size
        window = [*window[-schedule.workers * LOOKAHEAD :], batch.transient]
        flight = sum(heapq.nlargest(schedule.workers, window))
        done += batch.read_bytes
        ended = [resident.end(job.recipe) for job in batch.jobs if whole[job.recipe.fqn] == i]
        casts = [*casts[-schedule.workers * LOOKAHEAD :], max(ended, default=0)]
        transient = held + flight + max(casts)  # a part that is cast lies there twice
        moments.append(Moment(read_bytes=done, memory=_by_device(schedule, resident, transient)))
    return moments or [Moment(read_bytes=0, memory={schedule.device: 0})]


def _by_device(schedule: Schedule, resident: _Resident, transient: int) -> dict[str, int]:
    buffers = schedule.workers * schedule.buffer_bytes
    scratch = schedule.workers * schedule.scratch_bytes
    total = resident.device + transient + buffers + scratch
    if schedule.device == "cpu":
        return {"cpu": total + resident.host}
    # A tile lies in the buffer and, while it is worked on, on the device too.
    return {schedule.device: total, "cpu": resident.host + buffers}


def thin(moments: Sequence[Moment], limit: int = MAX_MOMENTS) -> tuple[Moment, ...]:
    """At most about ``limit`` moments: of each stretch, the one with the most memory, and the last."""
    if len(moments) <= limit:
        return tuple(moments)
    step = -(-len(moments) // limit)
    groups = [moments[i : i + step] for i in range(0, len(moments), step)]
    kept = [max(group, key=lambda moment: sum(moment.memory.values())) for group in groups]
    return tuple(kept) if kept[-1] is moments[-1] else (*kept, moments[-1])
