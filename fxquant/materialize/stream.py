"""Weights that arrive as a stream: ``(name, tensor)``, or ``(name, tensor, offsets)`` for a part.

Each job runs as soon as what it reads has come. What waits is counted, and dropped after its last
job.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxquant.checkpoint import StreamItem
from fxquant.checkpoint.keymap_rules import transparent
from fxquant.errors import BudgetError, MissingWeightError, TiedWeightError, WeightMismatchError
from fxquant.graph import placeholders, value
from fxquant.held import hold
from fxquant.materialize.jobs import Job, Schedule
from fxquant.materialize.recipes import LoadGraph, Recipe, result_vals
from fxquant.materialize.scattered import in_parts
from fxquant.materialize.store import Store
from fxquant.materialize.tiles import ReadPart, whole_tile
from fxquant.numerics import same_values
from fxquant.numerics.experts import expert_of

log = logging.getLogger("fxquant.materialize")

FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
"""Dtypes that are cast to each other. Narrower floats are codes, which mean nothing without their scales."""

Region = tuple[tuple[int, int], ...]
"""Start and stop for each axis."""


@dataclass(slots=True, kw_only=True)
class Arriving:
    """One tensor of the checkpoint on its way. ``rows`` are the parts that wait, by first row."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    jobs: list[tuple[Job, ReadPart]] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    rows: list[tuple[int, int, Tensor]] = field(default_factory=list)
    assembled: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it has come."""
        came = sum(math.prod(stop - start for start, stop in region) for region in self.regions)
        return bool(self.regions) and came == math.prod(self.shape)

    def needed(self, job: Job, part: ReadPart) -> tuple[int, int]:
        """The rows that a part needs."""
        where, taken = part.range, job.recipe.slice(part.index)
        if taken is not None:
            return taken.index, taken.index + 1
        if where is None or where.axis:
            return 0, self.shape[0] if self.shape else 1
        return where.start, where.stop

    def has(self, job: Job, part: ReadPart) -> bool:
        """Whether the rows of a part have come."""
        sliced = job.recipe.slice(part.index) is not None
        if not sliced and (part.range is None or not self.shape):
            return self.complete and self.assembled is None
        at, stop = self.needed(job, part)
        for first, last, _ in sorted(self.rows, key=lambda row: row[0]):
            if first <= at < last:
                at = last
        return at >= stop

    def take(self, job: Job, part: ReadPart) -> Tensor:
        """The tensor of a part that has come."""
        start, stop = self.needed(job, part)
        pieces = [
            tensor.narrow(0, max(start, first) - first, min(stop, last) - max(start, first))
            if self.shape
            else tensor
            for first, last, tensor in sorted(self.rows, key=lambda row: row[0])
            if max(start, first) < min(stop, last) or not self.shape
        ]
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else self.empty()
        where = part.range
        if job.recipe.slice(part.index) is not None:
            (rows,) = rows
        elif where is not None and not where.axis:
            return rows
        if where is not None:
            return rows.narrow(where.axis, where.start, where.stop - where.start)
        return rows

    def copied(self, job: Job, part: ReadPart) -> int:
        """Bytes that ``take`` copies, to join rows that came in several parts."""
        start, stop = self.needed(job, part)
        pieces = sum(max(start, first) < min(stop, last) for first, last, _ in self.rows)
        rows = math.prod(self.shape[1:]) * self.dtype.itemsize
        return (stop - start) * rows if self.shape and pieces > 1 else 0

    def empty(self) -> Tensor:
        """The tensor, if it has no elements."""
        return torch.empty(self.shape, dtype=self.dtype)


class Arrivals:
    """Follows what has come, and says which jobs can run.

    ``names`` maps every name under which a key may come to the key. A float tensor of another dtype
    than planned is cast. Recipes in ``optional`` may stay out. ``budget`` bounds the bytes of
    constants, of tensors that wait, and of values in between, together.
    """

    def __init__(
        self,
        graph: LoadGraph,
        schedule: Schedule,
        store: Store,
        *,
        names: Mapping[str, str],
        optional: Collection[str],
        budget: int | None,
    ) -> None:
        self.graph, self.names, self.optional, self.budget = graph, names, optional, budget
        self.store, self.account = store, store.account
        self.done_bytes = 0
        self.last = ""
        self.keys: dict[str, Arriving] = {}
        self.left: dict[str, set[int]] = {}
        self.first_pass: dict[str, set[int]] = {}
        self.by_key: dict[str, list[tuple[int, Job]]] = {}
        self.fqns: dict[str, str] = {}
        jobs = (job for batch in schedule.batches for job in batch.jobs)
        for number, job in enumerate(jobs):
            self.left.setdefault(job.recipe.label, set()).add(number)
            self.fqns[job.recipe.label] = job.recipe.fqn
            if job.tile.program.scans:
                self.first_pass.setdefault(job.recipe.label, set()).add(number)
            for part in job.tile.reads:
                key = job.recipe.keys[part.index]
                self._arriving(job.recipe, part.index, key).jobs.append((job, part))
                self.by_key.setdefault(key, []).append((number, job))

    def _arriving(self, recipe: Recipe, index: int, key: str) -> Arriving:
        if key not in self.keys:
            planned = value(placeholders(self.graph.templates[recipe.template])[index])
            shape = recipe.stored_shape(index, planned.shape)
            self.keys[key] = Arriving(key=key, shape=shape, dtype=planned.dtype)
        return self.keys[key]

    @property
    def last_key(self) -> str:
        """The key of what came last."""
        name = transparent(self.last)
        return self.names.get(name, name)

    def take(self, item: StreamItem) -> None:
        """Note what has come; direct reads go into their constants at once."""
        self.last = item.name
        found = self.keys.get(self.last_key)
        if found is None:
            log.info("the stream's tensor %s is not used", item.name)
            return
        tensor, region = _as_planned(item, found)
        self.done_bytes += tensor.nbytes
        if found.regions and not tensor.numel():
            return  # an empty shard
        if found.complete:
            self._take_again(found, tensor, region)
            return
        _check_new(item.name, found, region)
        found.regions.append(region)
        direct = [(job, part) for job, part in found.jobs if job.tile.direct is not None]
        _write_through(direct, found, tensor, region, self.store)
        if len(direct) < len(found.jobs):
            self._keep(found, tensor, region)
        self._check_budget(0)

    def _keep(self, found: Arriving, tensor: Tensor, region: Region) -> None:
        """Hold a part back until the jobs that need it can run."""
        if all((0, size) == span for size, span in zip(found.shape[1:], region[1:], strict=True)):
            start, stop = region[0] if region else (0, 1)
            found.rows.append((start, stop, tensor))
            self.account.add("cpu", tensor.nbytes)
        else:
            if found.assembled is None:
                found.assembled = torch.empty(found.shape, dtype=found.dtype)
                self.account.add("cpu", found.assembled.nbytes)
            found.assembled[tuple(slice(*span) for span in region)] = tensor
        if found.assembled is not None and found.complete:
            for start, stop, rows in found.rows:
                found.assembled[start:stop] = rows
                self.account.add("cpu", -rows.nbytes)
            found.rows = [(0, found.shape[0], found.assembled)]
            found.assembled = None

    def _check_budget(self, more: int) -> None:
        """Refuse to hold ``more`` bytes than now if the budget does not allow it."""
        now = sum(self.account.now.values()) + more
        if self.budget is not None and now > self.budget:
            waiting = [
                key for key, arriving in self.keys.items() if arriving.rows or arriving.assembled is not None
            ]
            raise BudgetError(
                f"the stream needs {now} bytes at {self.last}, over the budget of {self.budget}: "
                f"{len(waiting)} tensors wait for others, among them {', '.join(waiting[:5])}. Send what "
                "belongs together one after the other, or whole rows, or allow more",
                smallest=now,
                device="cpu",
            )

    def ready(self) -> Iterator[tuple[Job, list[Tensor]]]:
        """Jobs that can run now with what they read; to be run before the next is asked for."""
        for number, job in self.by_key.get(self.last_key, ()):
            if number not in self.left[job.recipe.label]:
                continue
            arriving = [(self.keys[job.recipe.keys[part.index]], part) for part in job.tile.reads]
            if job.tile.direct is not None:
                if arriving[0][0].complete:
                    self._mark(number, job)
                continue
            waits = job.tile.phase and self.left[job.recipe.label] & self.first_pass[job.recipe.label]
            if waits or not all(found.has(job, part) for found, part in arriving):
                continue
            self.store.allocate(job.recipe)
            copied = sum(found.copied(job, part) for found, part in arriving)
            self._check_budget(copied + job.tile.transient)
            self.account.add("cpu", copied)
            yield job, [found.take(job, part) for found, part in arriving]
            self.account.add("cpu", -copied)
            self._mark(number, job)

    def _mark(self, number: int, job: Job) -> None:
        """A job is done."""
        left = self.left[job.recipe.label]
        left.discard(number)
        if not left:
            self.store.done(job.recipe)

    def drop(self) -> None:
        """Let go of parts whose jobs have all run."""
        for found in self._touched():
            undone = [
                found.needed(job, part)
                for (job, part), (number, _) in zip(found.jobs, self.by_key[found.key], strict=True)
                if number in self.left[job.recipe.label] and job.tile.direct is None
            ]
            for row in list(found.rows):
                if not any(max(row[0], start) < min(row[1], stop) for start, stop in undone):
                    found.rows.remove(row)
                    self.account.add("cpu", -row[2].nbytes)

    def _touched(self) -> list[Arriving]:
        """The tensors that jobs on the last one read."""
        jobs = [job for _, job in self.by_key.get(self.last_key, ())]
        keys = {job.recipe.keys[part.index]: None for job in jobs for part in job.tile.reads}
        return [self.keys[key] for key in keys]

    def _take_again(self, found: Arriving, tensor: Tensor, region: Region) -> None:
        """A tied weight may come under each of its names; the values must be the same."""
        whole = tuple((0, size) for size in found.shape)
        recipes = {job.recipe.label: job.recipe for job, _ in found.jobs}
        if region != whole or any(recipe.keys != (found.key,) for recipe in recipes.values()):
            raise WeightMismatchError(f"the stream brings {self.last!r} a second time")
        for recipe in recipes.values():
            check_again(self.graph, recipe, tensor, self.store)

    def finish(self) -> None:
        """Refuse a stream that ended too early."""
        begun = {job.recipe.fqn for found in self.keys.values() if found.regions for job, _ in found.jobs}
        lost = [fqn for fqn in self.missing() if fqn not in self.optional or fqn in begun]
        if lost:
            raise MissingWeightError(
                f"the stream of tensors ended without what {len(lost)} weights need: {', '.join(lost[:10])}"
            )

    def missing(self) -> list[str]:
        """Weights that did not come."""
        return list(dict.fromkeys(self.fqns[label] for label, numbers in self.left.items() if numbers))


def check_again(graph: LoadGraph, recipe: Recipe, tensor: Tensor, store: Store) -> None:
    """Refuse other values for a weight that is made already."""
    template = graph.templates[recipe.template]
    results = [torch.empty(val.shape, dtype=val.dtype) for val in result_vals(template)]
    tile = whole_tile(template)
    given = recipe.taken(0, tensor)
    tile.program.run([given], dict(enumerate(results)), torch.empty(tile.scratch // 4))
    made = in_parts(recipe.laid_out, results)
    if recipe.held is not None and store.is_whole(recipe):
        names = recipe.constants
        made = tuple(hold(recipe.held, name, part) for name, part in zip(names, made, strict=False))
    kept = store.constants[recipe.fqn]
    kept = kept if recipe.expert is None else expert_of(kept, recipe.expert)
    before = [part.cpu() for part in kept[: len(made)]]
    if not all(same_values(a, b) for a, b in zip(before, made, strict=True)):
        raise TiedWeightError(
            f"{recipe.fqn}: the model ties its names together, the stream brings different values for them"
        )


def _as_planned(item: StreamItem, found: Arriving) -> tuple[Tensor, Region]:
    """The tensor in the dtype that was planned, and its place; shape and place must fit the plan."""
    tensor, offsets = item.tensor, item.offsets or (0,) * len(found.shape)
    fits = tensor.dim() == len(found.shape) == len(offsets) and not tensor.is_meta
    fits = fits and (tensor.dtype == found.dtype or {tensor.dtype, found.dtype} <= FLOATS)
    region = tuple((start, start + size) for start, size in zip(offsets, tensor.shape, strict=False))
    if item.offsets is None:
        fits = fits and tuple(tensor.shape) == found.shape
    fits = fits and all(0 <= a <= b <= size for (a, b), size in zip(region, found.shape, strict=True))
    if not fits:
        where = f" at {list(item.offsets)}" if item.offsets is not None else ""
        raise WeightMismatchError(
            f"the stream's tensor {item.name!r} is {tensor.dtype} {list(tensor.shape)}{where} on "
            f"{tensor.device}, "
            f"expected {found.dtype} {list(found.shape)}"
        )
    return tensor.detach().to(found.dtype), region


def _check_new(name: str, found: Arriving, region: Region) -> None:
    """Refuse a part that overlaps one that has come."""
    for other in found.regions:
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(region, other, strict=True)) and region:
            raise WeightMismatchError(
                f"the stream brings {name!r} {list(region)} twice: {list(other)} came before"
            )


def _write_through(
    direct: Sequence[tuple[Job, ReadPart]], found: Arriving, tensor: Tensor, region: Region, store: Store
) -> None:
    """Copy a part straight into the constants that it is a part of."""
    done = set()
    for job, part in direct:
        assert job.tile.direct is not None
        index, _ = job.tile.outs[0]
        flat = store.allocate(job.recipe)[index].view(-1)
        where = part.range
        if where is None:  # tiles of one tensor: all of them at once
            first = (job.tile.direct - part.start) // found.dtype.itemsize
            if (job.recipe.fqn, index, first) not in done:
                done.add((job.recipe.fqn, index, first))
                whole = flat[first : first + math.prod(found.shape)].view(found.shape)
                whole[tuple(slice(*span) for span in region)] = tensor
            continue
        start, stop = (max(where.start, region[where.axis][0]), min(where.stop, region[where.axis][1]))
        if start < stop:
            first = job.tile.direct // found.dtype.itemsize
            rows = flat[first : first + math.prod(part.shape)].view(part.shape)
            spans = list(region)
            spans[where.axis] = (start - where.start, stop - where.start)
            begin = start - region[where.axis][0]
            rows[tuple(slice(*span) for span in spans)] = tensor.narrow(where.axis, begin, stop - start)
