"""Schedules: order, one read of every byte, equal runs, workers that neither wait for ever nor differ."""

from __future__ import annotations

import faulthandler
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import INT8, INT8_T, TABLE, TABLE_T, graph_of, hold_bytes, saved, values
from torch import Tensor

from fxquant.checkpoint import DictCheckpoint, FileCheckpoint, Piece
from fxquant.checkpoint.files import Files
from fxquant.materialize.execute import Load, Loaded, materialize
from fxquant.materialize.jobs import Schedule, Settings
from fxquant.materialize.recipes import LoadGraph
from fxquant.materialize.schedule import Scheduler
from fxquant.numerics import same_values

SECONDS = 60


class Counting(Files):
    """Counts what is read of the data of files."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = super().preadv(descriptor, buffers, offset)
        self.reads.append((offset, got))
        return got


def scheduled(graph: LoadGraph, checkpoint: FileCheckpoint | DictCheckpoint, **settings: object) -> Schedule:
    given = {"workers": 1, "tile_bytes": 1024, **settings}
    return Scheduler(graph, checkpoint.infos).make(Settings(**given))


def load(graph: LoadGraph, checkpoint: FileCheckpoint | DictCheckpoint, **settings: object) -> Loaded:
    """Load in another thread, which must come to an end."""
    schedule = scheduled(graph, checkpoint, **settings)
    done: list[Loaded | BaseException] = []

    def work() -> None:
        try:
            done.append(materialize(graph, schedule, checkpoint))
        except BaseException as error:  # noqa: BLE001 - raised below
            done.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if not done:
        faulthandler.dump_traceback()
        pytest.fail("the load hangs")
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def expected(graph: LoadGraph, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    return {r.fqn: graph.templates[r.template](*(tensors[key] for key in r.keys)) for r in graph.recipes}


def check(loaded: Loaded, graph: LoadGraph, tensors: Mapping[str, Tensor]) -> None:
    for fqn, parts in expected(graph, tensors).items():
        for one, two in zip(parts, loaded.constants[fqn], strict=True):
            assert same_values(one, two), fqn


def rows(start: int, stop: int) -> Callable[[Tensor], Tensor]:
    def cut(w: Tensor) -> Tensor:
        return w[start:stop]

    cut.template = f"rows {start}:{stop}"
    return cut


def model() -> tuple[LoadGraph, dict[str, Tensor]]:
    """Weights of every kind: one and two passes, merged, held, tied, small, fused into one tensor."""
    tensors = {
        "norm": values(64),
        "conv": values(128, 96),
        "up": values(96, 64),
        "wide": values(40, 64, dtype=torch.float32),
        "qkv": values(120, 64),
        "a": values(4, 64).sign(),  # products of which are exact in any order
        "b": values(96, 4).sign(),
        "e0": values(32, 64),
        "e1": values(32, 64, seed=1),
        "scalar": values(),
    }
    graph = graph_of(
        ("norm", ["norm"], None, None),
        ("conv", ["conv"], None, TABLE_T),
        ("lora", ["up", "b", "a"], lambda w, b, a: w + (b.float() * 2).to(w.dtype) @ a, INT8),
        ("wide", ["wide"], None, INT8),
        ("q", ["qkv"], rows(0, 64), INT8),
        ("k", ["qkv"], rows(64, 100), None),
        ("v", ["qkv"], rows(100, 120), TABLE),
        ("experts", ["e0", "e1"], lambda *e: torch.stack(e), None),
        ("scalar", ["scalar"], None, None),
        **tensors,
    )
    return graph, tensors


@pytest.fixture
def twice() -> Iterator[None]:
    with hold_bytes(0):
        yield


@pytest.mark.usefixtures("twice")
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("order", ["file", "largest first"])
def test_workers_and_order_change_nothing(workers: int, order: str, tmp_path: Path) -> None:
    graph, tensors = model()
    checkpoint = saved(tmp_path / "m.safetensors", tensors)
    for tile_bytes in (512, 4096):
        check(load(graph, checkpoint, workers=workers, order=order, tile_bytes=tile_bytes), graph, tensors)
    in_memory = load(graph, DictCheckpoint(tensors), workers=workers, order=order, in_memory=True)
    check(in_memory, graph, tensors)


@pytest.mark.usefixtures("twice")
def test_two_runs_plan_the_same(tmp_path: Path) -> None:
    graph, tensors = model()
    checkpoint = saved(tmp_path / "m.safetensors", tensors)
    one, two = (_told(scheduled(graph, checkpoint, workers=3)) for _ in range(2))
    assert one == two
    again = _told(scheduled(model()[0], checkpoint, workers=3))
    assert again == one


def _told(schedule: Schedule) -> object:
    jobs = [
        [(job.recipe.fqn, job.tile.phase, job.tile.outs, list(job.tile.reads)) for job in batch.jobs]
        for batch in schedule.batches
    ]
    return jobs, schedule.timeline, schedule.reads, schedule.buffer_bytes, schedule.scratch_bytes


def read_counts(graph: LoadGraph, schedule: Schedule, tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """How often the bytes of each key are read: all counts that occur."""
    counts = {key: torch.zeros(tensor.nbytes, dtype=torch.int32) for key, tensor in tensors.items()}
    held = set()
    for batch in schedule.batches:
        seen = set()
        for job in batch.jobs:
            for part in job.tile.reads:
                key = job.recipe.keys[part.index]
                if (part.held and (job.recipe.fqn, key) in held) or (batch.shared and key in seen):
                    continue
                seen.add(key)
                held.update([(job.recipe.fqn, key)] if part.held else [])
                counts[key][part.start : part.stop] += 1
    return {key: count.unique().tolist() for key, count in counts.items()}


@pytest.mark.usefixtures("twice")
def test_each_byte_is_read_once(tmp_path: Path) -> None:
    graph, tensors = model()
    schedule = scheduled(graph, saved(tmp_path / "m.safetensors", tensors))
    assert read_counts(graph, schedule, tensors) == {key: [2 if key == "conv" else 1] for key in tensors}


@settings(max_examples=30)
@given(cuts=st.lists(st.tuples(st.integers(0, 59), st.integers(1, 60)), min_size=1, max_size=4))
def test_weights_that_share_a_tensor(cuts: list[tuple[int, int]]) -> None:
    """Disjoint rows are read by tiles, overlapping ones at once for all of them."""
    cuts = [(start, min(start + size, 60)) for start, size in cuts]
    tensors = {"w": values(60, 16)}
    forms = [INT8, None, TABLE, INT8]
    graph = graph_of(*((f"w{i}", ["w"], rows(*cut), forms[i]) for i, cut in enumerate(cuts)), **tensors)
    checkpoint = DictCheckpoint(tensors)
    schedule = scheduled(graph, checkpoint, tile_bytes=256)
    ordered = sorted(cuts)
    overlap = any(b > c for (_, b), (c, _) in itertools.pairwise(ordered))
    assert [batch.shared for batch in schedule.batches].count(True) == overlap
    assert max(read_counts(graph, schedule, tensors)["w"]) == 1
    check(load(graph, checkpoint, tile_bytes=256, in_memory=True), graph, tensors)


def test_tensors_in_memory_may_have_any_strides() -> None:
    tensors = {"w": values(16, 60).t(), "x": values(40, 32)[:, ::2]}
    graph = graph_of(
        ("a", ["w"], rows(0, 20), None),
        ("b", ["w"], rows(20, 60), None),
        ("c", ["x"], None, None),
        ("d", ["x"], None, INT8_T),
        **tensors,
    )
    check(load(graph, DictCheckpoint(tensors), tile_bytes=256, in_memory=True), graph, tensors)


@pytest.mark.parametrize("tile_bytes", [256, 1024, 1 << 20])
def test_as_many_reads_as_were_planned(tile_bytes: int, tmp_path: Path) -> None:
    graph, tensors = model()
    files = Counting()
    checkpoint = saved(tmp_path / "m.safetensors", tensors, files=files)
    planned = scheduled(graph, checkpoint, tile_bytes=tile_bytes).reads
    files.reads.clear()
    with hold_bytes(0):
        load(graph, checkpoint, tile_bytes=tile_bytes)
        planned = scheduled(graph, checkpoint, tile_bytes=tile_bytes).reads
    assert len(files.reads) == planned


def test_few_large_reads(tmp_path: Path) -> None:
    """Neighbours are read together, up to the size that was asked for."""
    tensors = {f"w{i:02}": values(256, 1024) for i in range(16)}
    graph = graph_of(
        *((key, [key], None, INT8 if i % 2 else None) for i, key in enumerate(tensors)), **tensors
    )
    files = Counting()
    checkpoint = saved(tmp_path / "m.safetensors", tensors, files=files)
    for tile_bytes, most in ((64 << 20, 1), (1 << 20, 8), (64 << 10, 8 * 16)):
        files.reads.clear()
        check(load(graph, checkpoint, tile_bytes=tile_bytes), graph, tensors)
        assert len(files.reads) <= most
        assert sum(size for _, size in files.reads) == sum(t.nbytes for t in tensors.values())


def test_file_order(tmp_path: Path) -> None:
    """Reads go forward through the files, whatever the order of the recipes."""
    tensors = {name: values(64, 64, seed=i) for i, name in enumerate("edcba")}
    graph = graph_of(*((key, [key], None, INT8) for key in "cebda"), **tensors)
    files = Counting()
    checkpoint = saved(tmp_path / "m.safetensors", tensors, files=files)
    files.reads.clear()
    load(graph, checkpoint)
    assert files.reads == sorted(files.reads)


@pytest.mark.usefixtures("twice")
@pytest.mark.parametrize("order", ["file", "largest first"])
@pytest.mark.parametrize("workers", [1, 8])
def test_codes_wait_for_all_maxima(
    workers: int, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"w{i}": values(50 + 3 * i, 64) for i in range(4)}
    graph = graph_of(*((key, [key], None, INT8_T) for key in tensors), **tensors)
    done: list[tuple[str, int]] = []
    compute = Load._compute

    def noted(self: Load, job: object, *rest: object) -> None:
        compute(self, job, *rest)
        done.append((job.recipe.fqn, job.tile.phase))

    monkeypatch.setattr(Load, "_compute", noted)
    checkpoint = saved(tmp_path / "m.safetensors", tensors)
    check(load(graph, checkpoint, workers=workers, order=order, tile_bytes=1000), graph, tensors)
    for key in tensors:
        phases = [phase for fqn, phase in done if fqn == key]
        assert phases == sorted(phases)
        assert len(set(phases)) == 2


@pytest.mark.usefixtures("twice")
@settings(max_examples=20)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 40)), min_size=1, max_size=5),
    forms=st.lists(st.sampled_from([None, INT8, INT8_T, TABLE, TABLE_T]), min_size=5, max_size=5),
    workers=st.sampled_from([1, 2, 8]),
    order=st.sampled_from(["file", "largest first"]),
    tile_bytes=st.sampled_from([64, 300, 1000, 5000]),
)
def test_any_model(
    shapes: list[tuple[int, int]], forms: list[object], workers: int, order: str, tile_bytes: int
) -> None:
    tensors = {f"w{i}": values(*shape, seed=i) for i, shape in enumerate(shapes)}
    graph = graph_of(*((key, [key], None, forms[i]) for i, key in enumerate(tensors)), **tensors)
    checkpoint = DictCheckpoint(tensors)
    given = {"workers": workers, "order": order, "tile_bytes": tile_bytes, "in_memory": True}
    loaded = load(graph, checkpoint, **given)
    check(loaded, graph, tensors)
    assert loaded.peak["cpu"] <= scheduled(graph, checkpoint, **given).peak["cpu"]


@pytest.mark.usefixtures("twice")
def test_done_bytes_are_those_that_were_read(tmp_path: Path) -> None:
    """Also what tiles share, and both passes."""
    graph, tensors = model()
    files = Counting()
    checkpoint = saved(tmp_path / "m.safetensors", tensors, files=files)
    files.reads.clear()
    loaded = load(graph, checkpoint, workers=2)
    assert loaded.read_bytes == sum(size for _, size in files.reads)
    assert loaded.read_bytes == sum(t.nbytes for t in tensors.values()) + tensors["conv"].nbytes


@pytest.mark.parametrize("workers", [1, 8])
def test_an_error_in_a_worker_ends_the_load(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, tensors = model()
    checkpoint = saved(tmp_path / "m.safetensors", tensors)
    fill = FileCheckpoint.fill

    def failing(self: FileCheckpoint, pieces: Sequence[Piece]) -> int:
        if any(piece.key == "wide" for piece in pieces):
            raise OSError("on purpose")
        return fill(self, pieces)

    monkeypatch.setattr(FileCheckpoint, "fill", failing)
    with pytest.raises(OSError, match="on purpose"):
        load(graph, checkpoint, workers=workers)


def test_timeline_reaches_the_end(tmp_path: Path) -> None:
    graph, tensors = model()
    schedule = scheduled(graph, saved(tmp_path / "m.safetensors", tensors), tile_bytes=64)
    conv = tensors["conv"].nbytes  # read twice
    assert schedule.timeline[-1].read_bytes == sum(t.nbytes for t in tensors.values()) + conv
    resident = sum(
        math.prod(p.shape) * p.dtype.itemsize for w in expected(graph, tensors).values() for p in w
    )
    assert schedule.timeline[-1].memory["cpu"] >= resident
    assert len(schedule.timeline) <= 513
