"""Where the tensors of a batch come from: read into buffers, or in memory already."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fxquant.checkpoint import Checkpoint, FileCheckpoint, Piece, bytes_of
from fxquant.errors import WeightMismatchError
from fxquant.graph import placeholders, value
from fxquant.materialize.jobs import Batch, Job, Schedule
from fxquant.materialize.meter import Account
from fxquant.materialize.recipes import LoadGraph, Recipe
from fxquant.materialize.schedule import ALIGNMENT
from fxquant.materialize.store import Store
from fxquant.materialize.tiles import ReadPart


class Buffer:
    """Page-aligned memory that reads go through, used again for each batch.

    ``pinned``: memory that a device can copy from at once.
    """

    def __init__(self, size: int, account: Account, *, pinned: bool = False) -> None:
        self.size = size
        self.account = account
        if pinned:
            self.bytes = torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)
            self.view = bytes_of(self.bytes)
        else:
            memory = _private_pages(max(size, 1))
            self.view = memoryview(memory)
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._taken: dict[tuple[object, ...], tuple[memoryview, Tensor]] = {}
        account.add("cpu", size)

    def take(self, start: int, part: ReadPart) -> tuple[memoryview, Tensor]:
        """Memory for a part from ``start``, as bytes and as the tensor."""
        key = (start, part.dtype, part.shape)  # of which there are few: tiles of equal weights are equal
        found = self._taken.get(key)
        if found is None:
            stop = start + part.nbytes
            found = self.view[start:stop], self.bytes[start:stop].view(part.dtype).view(part.shape)
            self._taken[key] = found
        return found

    def close(self) -> None:
        """Give the memory back, once no tensor looks at it."""
        self.account.add("cpu", -self.size)
        self._taken.clear()
        del self.bytes, self.view


def _private_pages(size: int) -> mmap.mmap:
    """Zeroed pages that count as anonymous memory of this process; shared ones, the default, would not."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@dataclass(slots=True, kw_only=True)
class Worker:
    """What one worker has of its own. ``landing``: where what it reads lies on a device."""

    schedule: Schedule
    account: Account
    device: torch.device
    buffer: Buffer | None = None
    scratch: Tensor = field(default_factory=lambda: torch.empty(0))
    landing: Tensor = field(default_factory=lambda: torch.empty(0))

    def begin(self) -> None:
        """Allocate the buffers and the scratch."""
        if self.schedule.buffer_bytes:
            self.buffer = self.make_buffer(self.schedule.buffer_bytes)
            if self.device.type != "cpu":
                size = self.schedule.buffer_bytes
                self.landing = torch.empty(size, dtype=torch.uint8, device=self.device)
                self.account.add(self.schedule.device, size)
        size = self.schedule.scratch_bytes // 4
        self.scratch = torch.empty(size, dtype=torch.float32, device=self.device)
        self.account.add(self.schedule.device, self.scratch.nbytes)

    def make_buffer(self, size: int) -> Buffer:
        """A buffer that the device can copy from."""
        return Buffer(size, self.account, pinned=self.device.type != "cpu")

    def end(self) -> None:
        """Give them back."""
        self.account.add(self.schedule.device, -self.scratch.nbytes - self.landing.nbytes)
        self.scratch = self.landing = torch.empty(0)
        if self.buffer is not None:
            self.buffer.close()
            self.buffer = None


def land(reads: Sequence[Tensor], device: torch.device, landing: Tensor) -> tuple[list[Tensor], int]:
    """What one job reads, on ``device``: in ``landing``, else in memory of its own, of so many bytes.

    Tensors that come and go between the constants would leave holes, which constants do not fill well.
    """
    landed = []
    at = more = 0
    for read in reads:
        stop = at + read.nbytes
        if stop > landing.nbytes:
            landed.append(read.to(device))
            more += read.nbytes
            continue
        # A plain copy: it is done when it returns, so that the buffer can be read into again.
        landed.append(landing[at:stop].view(read.dtype).view(read.shape).copy_(read))
        at = -(-stop // ALIGNMENT) * ALIGNMENT
    return landed, more


def read_batch(
    batch: Batch, checkpoint: FileCheckpoint, store: Store, buffer: Buffer | None
) -> list[list[Tensor]]:
    """The tensors of each job, read into ``buffer`` or straight into the constants."""
    pieces: list[Piece] = []
    tensors: list[list[Tensor]] = []
    shared: dict[tuple[str, int], Tensor] = {}
    at = 0
    for job in batch.jobs:
        if job.tile.direct is not None and store.device_of(job.recipe).type == "cpu":
            (part,) = job.tile.reads
            (index, _), start = job.tile.outs[0], job.tile.direct
            target = bytes_of(store.allocate(job.recipe)[index])[start : start + part.nbytes]
            pieces.append(Piece(job.key(part), job.start(part), target))
            tensors.append([])
            continue
        given: list[Tensor] = []
        for part in job.tile.reads:
            place = job.key(part), job.start(part)
            if part.held:
                given.append(_held(job, part, checkpoint, store))
            elif batch.shared and place in shared:
                given.append(shared[place])
            else:
                assert buffer is not None
                view, tensor = buffer.take(at, part if job.tile.direct is None else _as_bytes(part))
                at += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
                pieces.append(Piece(*place, view))
                given.append(tensor)
                shared[place] = tensor
        tensors.append(given)
    checkpoint.fill(pieces)
    return tensors


def _as_bytes(part: ReadPart) -> ReadPart:
    """The bytes of a part, which go on to a device as they are."""
    return replace(part, dtype=torch.uint8, shape=(part.nbytes,))


def _held(job: Job, part: ReadPart, checkpoint: Checkpoint, store: Store) -> Tensor:
    """A read that the tiles of a weight share, read by the first of them."""
    with store.lock:
        held = store.held(job.recipe)
        if part.index not in held:
            held[part.index] = job.recipe.taken(part.index, checkpoint.read(job.key(part)))
            store.account.add("cpu", held[part.index].nbytes)
        return held[part.index]


def view_job(job: Job, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The parts that a job reads, as views of tensors in memory."""
    parts = []
    for part in job.tile.reads:
        tensor = job.recipe.taken(part.index, tensors[job.key(part)])
        where = part.range
        parts.append(
            tensor if where is None else tensor.narrow(where.axis, where.start, where.stop - where.start)
        )
    return parts


def copy_direct(job: Job, tensor: Tensor, store: Store) -> None:
    """What a direct tile reads, from a tensor in memory into the constant."""
    (part,) = job.tile.reads
    assert job.tile.direct is not None
    index, _ = job.tile.outs[0]
    whole = store.allocate(job.recipe)[index]
    size = part.dtype.itemsize
    first, count = job.tile.direct // size, part.nbytes // size
    out = whole.view(-1)[first : first + count]
    if tensor.is_contiguous():
        out.copy_(tensor.view(-1)[part.start // size : part.start // size + count])
    elif part.range is not None:
        out.view(part.shape).copy_(view_job(job, {job.recipe.keys[part.index]: tensor})[0])
    elif part.start == 0:  # once for all tiles of this tensor: it cannot be cut without a copy
        whole.view(-1)[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)


def check_source(graph: LoadGraph, checkpoint: Checkpoint) -> None:
    """Refuse a source that does not hold what the plan expects."""
    for recipe in graph.recipes:
        check_recipe(graph, recipe, [(i.dtype, i.shape) for i in map(checkpoint.info, recipe.keys)])


def check_recipe(
    graph: LoadGraph, recipe: Recipe, given: Sequence[tuple[torch.dtype, Sequence[int]]]
) -> None:
    """Refuse tensors of other dtypes or shapes than were planned."""
    inputs = placeholders(graph.templates[recipe.template])
    for i, (key, node, (dtype, shape)) in enumerate(zip(recipe.keys, inputs, given, strict=True)):
        expected = value(node)
        wanted = recipe.stored_shape(i, expected.shape)
        if tuple(shape) != wanted or dtype != expected.dtype:
            raise WeightMismatchError(
                f"{recipe.label}: expected {expected.dtype} {list(wanted)}, "
                f"got {dtype} {list(shape)} from {key}"
            )
