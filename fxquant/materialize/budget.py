"""Chooses a schedule that keeps the memory budgets, or says what the smallest ones are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fxquant.errors import BudgetError
from fxquant.materialize.jobs import Schedule, Settings
from fxquant.materialize.schedule import Scheduler

MIB = 1 << 20
READ_BYTES = 2 << 20
"""Bytes of a tile's reads: with its float32 chunk it stays in a core's cache."""

SMALL_TILES = (512 << 10,)
"""Smaller ones save less than it takes to keep account of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """The most bytes that loading may hold: ``host`` in main memory, ``device`` on the device."""

    host: int | None = None
    device: int | None = None

    def by_device(self, device: str) -> dict[str, int]:
        """Bounds by device type; on the CPU both bound the same memory."""
        if device == "cpu":
            known = [size for size in (self.host, self.device) if size is not None]
            return {"cpu": min(known)} if known else {}
        bounds = {"cpu": self.host, device: self.device}
        return {name: size for name, size in bounds.items() if size is not None}


def choose_schedule(scheduler: Scheduler, settings: Settings, budgets: Budgets) -> Schedule:
    """The first of the schedules, from fast to small, that keeps the budgets; else a BudgetError."""
    bounds = budgets.by_device(settings.device)
    tried = []
    for candidate in _candidates(settings, bounds):
        schedule = scheduler.make(candidate)
        if not _excess(schedule, bounds):
            return schedule
        tried.append(schedule)
    smallest = min(tried, key=lambda schedule: sum(_excess(schedule, bounds).values()))
    device = next(iter(_excess(smallest, bounds)))
    raise _refusal(scheduler, smallest, device, bounds[device])


def _excess(schedule: Schedule, bounds: Mapping[str, int]) -> dict[str, int]:
    """Bytes by which the schedule's peaks are over their bounds."""
    peak = schedule.peak
    return {d: peak[d] - bound for d, bound in bounds.items() if peak.get(d, 0) > bound}


def _candidates(settings: Settings, bounds: Mapping[str, int]) -> Iterator[Settings]:
    yield settings
    if not bounds:
        return
    tiles = [settings.tile_bytes, *(size for size in SMALL_TILES if size < settings.tile_bytes)]
    counts = dict.fromkeys((settings.workers, *((1,) if settings.workers > 1 else ())))
    for workers, order, tile_bytes in itertools.product(counts, ("file", "largest first"), tiles):
        candidate = replace(settings, workers=workers, order=order, tile_bytes=tile_bytes)
        if candidate != settings:
            yield candidate


def _refusal(scheduler: Scheduler, schedule: Schedule, device: str, bound: int) -> BudgetError:
    """What the smallest budget is, and what sets it."""
    smallest = schedule.peak[device]
    constants = sum(scheduler.resident(recipe) for recipe in scheduler.graph.recipes)
    held = constants if device == schedule.device else 0
    buffers = schedule.workers * schedule.buffer_bytes
    scratch = schedule.workers * schedule.scratch_bytes
    largest = max(schedule.batches, key=lambda batch: batch.transient, default=None)
    parts = [f"{held / MIB:.2f} MiB of constants", f"{(buffers + scratch) / MIB:.2f} MiB of buffers"]
    if largest is not None and largest.transient:
        fqn = largest.jobs[0].recipe.fqn
        parts.append(f"up to {largest.transient / MIB:.2f} MiB more while {fqn} is made")
    kind = "host_budget" if device == "cpu" else "device_budget"
    return BudgetError(
        f"{kind} of {bound} bytes cannot be kept on {device}: the smallest that can is {smallest} bytes "
        f"({smallest / MIB:.2f} MiB), set by {', '.join(parts)} (workers: {schedule.workers}, order: "
        f"{schedule.order}, tiles of {schedule.tile_bytes} bytes). Allow that much, or quantize more",
        smallest=smallest,
        device=device,
    )
