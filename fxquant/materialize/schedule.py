"""What is read when, by how many workers, and the memory that it takes: fixed before loading."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fxquant.checkpoint import TensorInfo
from fxquant.materialize.jobs import Batch, Job, Schedule, Settings
from fxquant.materialize.predict import predict, thin
from fxquant.materialize.recipes import LoadGraph, Recipe, held_shapes, laid_out_shapes, result_vals
from fxquant.materialize.tiles import Tiling, whole_tile
from fxquant.materialize.tiling import make_tiling
from fxquant.timeline import Moment

ALIGNMENT = 64
PAGE_BYTES = 4096


class Scheduler:
    """Makes schedules of one load graph; tilings are made once for each size of tiles."""

    def __init__(self, graph: LoadGraph, infos: Mapping[str, TensorInfo]) -> None:
        self.graph = graph
        self.place = {key: i for i, key in enumerate(infos)}
        self.where = {key: (info.file or "", info.offset or 0) for key, info in infos.items()}
        self.units = _units(graph)
        self._resident = [sum(val.nbytes for val in result_vals(gm)) for gm in graph.templates]
        self._tilings: dict[tuple[int, int], Tiling] = {}

    def resident(self, recipe: Recipe) -> int:
        """Bytes of a weight's constants."""
        if recipe.held is None:
            return self._resident[recipe.template] + 4 * len(recipe.given)
        shapes = tuple((v.shape, v.dtype) for v in result_vals(self.graph.templates[recipe.template]))
        if recipe.laid_out is not None:
            shapes = laid_out_shapes(recipe.laid_out, shapes)
        final = held_shapes(recipe.held, shapes).values()
        return sum(math.prod(size) * dtype.itemsize for dtype, size in final)

    def tiling(self, template: int, tile_bytes: int) -> Tiling:
        """The tiles of a template."""
        key = (template, tile_bytes)
        if key not in self._tilings:
            self._tilings[key] = make_tiling(self.graph.templates[template], tile_bytes)
        return self._tilings[key]

    def make(self, settings: Settings) -> Schedule:
        """The schedule under ``settings``, with its predicted memory."""
        batches = self._batches(settings)
        workers = max(1, min(settings.workers, len(batches)))
        common = [batch.buffer_bytes for batch in batches if not batch.own]
        buffer_bytes = 0 if settings.in_memory else _pages(max(common, default=0))
        scratch = max((job.tile.scratch for b in batches for job in b.jobs), default=0)
        draft = Schedule(
            batches=batches,
            workers=workers,
            tile_bytes=settings.tile_bytes,
            buffer_bytes=buffer_bytes,
            scratch_bytes=scratch,
            order=settings.order,
            reads=0 if settings.in_memory else sum(1 for _ in self._runs(batches)),
            device=settings.device,
        )
        return replace(draft, timeline=thin(self._predict(draft, in_memory=settings.in_memory)))

    def _predict(self, draft: Schedule, *, in_memory: bool) -> list[Moment]:
        held = {}
        for batch in draft.batches:
            for job in batch.jobs:
                if not in_memory and not batch.shared:
                    tiling = self.tiling(job.recipe.template, draft.tile_bytes)
                    held[job.recipe.label] = tiling.held_bytes
        return predict(draft, self.graph, held)

    def _batches(self, settings: Settings) -> tuple[Batch, ...]:
        placed: list[tuple[tuple[int, int, int], Job | Batch]] = []
        for recipes in self.units:
            tilings = [self.tiling(recipe.template, settings.tile_bytes) for recipe in recipes]
            if _overlap(recipes, tilings):
                batch = self._shared(recipes)
                placed.append((self._key(batch.jobs[0], 0), batch))
                continue
            for recipe, tiling in zip(recipes, tilings, strict=True):
                jobs = [Job(recipe=recipe, tile=tile) for tile in tiling.tiles]
                end = max((self._key(job, 0) for job in jobs), default=(0, 0, 0))
                placed += [(self._key(job, 0) if not job.tile.phase else (*end[:2], 1), job) for job in jobs]
        placed.sort(key=lambda item: item[0])
        ordered = [item for _, item in placed]
        if settings.order != "file":  # by weight, each weight's tiles in their order
            ordered = _largest_first(ordered)
        batches = _gathered(ordered, settings)
        return tuple(_owning(batch, settings) for batch in _with_held(batches))

    def _key(self, job: Job, phase: int) -> tuple[int, int, int]:
        """Where a job's first own read is: the place of its tensor in the files, and the byte in it."""
        own = [part for part in job.tile.reads if not part.held]
        if not own:
            return (0, 0, phase)
        return (*min((self.place.get(job.key(p), 0), job.start(p)) for p in own), phase)

    def _shared(self, recipes: Sequence[Recipe]) -> Batch:
        """All of a unit's recipes at once, on the whole of what they read."""
        jobs = tuple(Job(recipe=r, tile=whole_tile(self.graph.templates[r.template])) for r in recipes)
        sizes = {(job.key(part), job.start(part)): part.nbytes for job in jobs for part in job.tile.reads}
        total = sum(_aligned(size) for size in sizes.values())
        transient = max(job.tile.transient for job in jobs)
        return Batch(
            jobs=jobs, read_bytes=sum(sizes.values()), buffer_bytes=total, transient=transient, shared=True
        )

    def _runs(self, batches: Sequence[Batch]) -> Iterator[None]:
        """One item for each read: bytes that lie together within a batch."""
        held: set[tuple[str, int]] = set()
        for batch in batches:
            end = None
            seen: set[tuple[str, int]] = set()
            for job in batch.jobs:
                for part in job.tile.reads:
                    key = job.key(part)
                    if part.held:
                        if part.nbytes and (job.recipe.label, part.index) not in held:
                            held.add((job.recipe.label, part.index))
                            yield
                        continue
                    if (batch.shared and (key, job.start(part)) in seen) or not part.nbytes:
                        continue
                    seen.add((key, job.start(part)))
                    file, offset = self.where.get(key, ("", 0))
                    if (file, offset + job.start(part)) != end:
                        yield
                    end = (file, offset + job.start(part) + part.nbytes)


def _units(graph: LoadGraph) -> list[list[Recipe]]:
    """Recipes that share tensors of the checkpoint, together."""
    parent: dict[str, str] = {}

    def find(key: str) -> str:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for recipe in graph.recipes:
        for key in recipe.keys:
            parent[find(key)] = find(recipe.keys[0])
    grouped: dict[str, list[Recipe]] = {}
    for recipe in graph.recipes:
        grouped.setdefault(find(recipe.keys[0]), []).append(recipe)
    return list(grouped.values())


def _overlap(recipes: Sequence[Recipe], tilings: Sequence[Tiling]) -> bool:
    """Whether two recipes need the same bytes."""
    if len(recipes) == 1:
        return False
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for i, (recipe, tiling) in enumerate(zip(recipes, tilings, strict=True)):
        for key, ranges in _spans(recipe, tiling).items():
            spans.setdefault(key, []).extend((start, stop, i) for start, stop in ranges)
    for claims in spans.values():
        claims.sort()
        if any(start < stop for (_, stop, _), (start, _, _) in itertools.pairwise(claims)):
            return True
    return False


def _spans(recipe: Recipe, tiling: Tiling) -> dict[str, list[tuple[int, int]]]:
    """The bytes of each key that a recipe needs, as disjoint ranges."""
    found: dict[str, list[tuple[int, int]]] = {}
    for tile in tiling.tiles:
        for part in tile.reads:
            first = recipe.start(part.index)
            found.setdefault(recipe.keys[part.index], []).append((first + part.start, first + part.stop))
    merged: dict[str, list[tuple[int, int]]] = {}
    for key, ranges in found.items():
        done = merged.setdefault(key, [])
        for start, stop in sorted(ranges):
            if done and start <= done[-1][1]:
                done[-1] = (done[-1][0], max(done[-1][1], stop))
            else:
                done.append((start, stop))
    return merged


def _gathered(items: Sequence[Job | Batch], settings: Settings) -> Iterator[Batch]:
    """Batches of neighbours that are small enough to be read together."""
    jobs: list[Job] = []
    total = 0
    for item in items:
        size = item.tile.read_bytes if isinstance(item, Job) else 0
        if jobs and (isinstance(item, Batch) or total + size > settings.tile_bytes or item.tile.phase):
            yield _batch(jobs, settings.device)
            jobs, total = [], 0
        if isinstance(item, Batch):
            yield item
            continue
        jobs.append(item)
        total += size
    if jobs:
        yield _batch(jobs, settings.device)


def _with_held(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches, with the bytes of what tiles share counted where it is read first."""
    held: set[tuple[str, int]] = set()
    for batch in batches:
        more = 0
        for job in batch.jobs:
            for part in job.tile.reads:
                if part.held and (job.recipe.label, part.index) not in held:
                    held.add((job.recipe.label, part.index))
                    more += part.nbytes
        yield replace(batch, read_bytes=batch.read_bytes + more) if more else batch


def _owning(batch: Batch, settings: Settings) -> Batch:
    """The batch with a buffer of its own, if it needs more than tiles do."""
    if settings.in_memory or batch.buffer_bytes <= 2 * settings.tile_bytes:
        return batch
    return replace(batch, own=True, transient=batch.transient + _pages(batch.buffer_bytes))


def _batch(jobs: Sequence[Job], device: str) -> Batch:
    through = [job for job in jobs if job.tile.direct is None or (device != "cpu" and not job.recipe.host)]
    buffered = [part.nbytes for job in through for part in job.tile.reads if not part.held]
    return Batch(
        jobs=tuple(jobs),
        read_bytes=sum(job.tile.read_bytes for job in jobs),
        buffer_bytes=sum(_aligned(size) for size in buffered),
        transient=max(job.tile.transient for job in jobs),
    )


def _largest_first(items: Sequence[Job | Batch]) -> list[Job | Batch]:
    """The weight whose largest tile needs most first; a second pass stays behind the first."""
    largest: dict[str, int] = {}
    for item in items:
        fqn = _fqn_of(item)
        largest[fqn] = max(largest.get(fqn, 0), _weight_of(item))
    return sorted(items, key=lambda item: -largest[_fqn_of(item)])


def _fqn_of(item: Job | Batch) -> str:
    return item.recipe.fqn if isinstance(item, Job) else item.jobs[0].recipe.fqn


def _weight_of(item: Job | Batch) -> int:
    """Bytes that are needed only while an item is worked on."""
    if isinstance(item, Batch):
        return item.buffer_bytes + item.transient
    return 0 if item.tile.direct is not None else item.tile.read_bytes + item.tile.transient


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def usable_workers() -> int:
    """Workers that a load uses by default: torch's threads, at most eight."""
    return max(1, min(torch.get_num_threads(), 8))
