"""Streams of tensors and of parts: any order, any cut, and what is refused."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import INT8, INT8_T, TABLE, graph_of, hold_bytes, values
from torch import Tensor, nn

import fxquant
from fxquant.checkpoint import StreamCheckpoint
from fxquant.errors import ConfigError, MissingWeightError, TiedWeightError, WeightMismatchError
from fxquant.materialize.execute import Loaded, materialize
from fxquant.materialize.jobs import Settings
from fxquant.materialize.recipes import LoadGraph
from fxquant.materialize.schedule import Scheduler
from fxquant.numerics import same_values

Part = tuple[str, Tensor, tuple[int, ...]]


def model() -> tuple[LoadGraph, dict[str, Tensor]]:
    """One weight of each kind of tiles."""
    tensors = {
        "direct": values(40, 16),
        "rows": values(40, 16),
        "columns": values(24, 20),
        "table": values(30, 8),
        "norm": values(16),
        "scalar": values(),
        "empty": values(0, 4),
        "deep": values(3, 4, 5),
    }
    forms = {"rows": INT8, "columns": INT8_T, "table": TABLE}
    return graph_of(*((key, [key], None, forms.get(key)) for key in tensors), **tensors), tensors


GRAPH, TENSORS = model()


def stream(items: Sequence[object] | Iterator[object], graph: LoadGraph = GRAPH, **options: object) -> Loaded:
    with hold_bytes(0):
        schedule = Scheduler(graph, {}).make(Settings(workers=1, tile_bytes=128, in_memory=True))
    return materialize(graph, schedule, StreamCheckpoint(items), **options)


def check(loaded: Loaded, graph: LoadGraph = GRAPH, tensors: dict[str, Tensor] | None = None) -> None:
    tensors = tensors or TENSORS
    for recipe in graph.recipes:
        parts = graph.templates[recipe.template](*(tensors[key] for key in recipe.keys))
        for one, two in zip(parts, loaded.constants[recipe.fqn], strict=True):
            assert same_values(one, two), recipe.fqn


def cut(name: str, tensor: Tensor, rng: random.Random) -> list[Part]:
    """A tensor in random boxes: each axis is cut by itself."""
    spans = []
    for size in tensor.shape:
        points = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 2)))})
        spans.append(list(itertools.pairwise(points)) or [(0, 0)])
    return [
        (name, tensor[tuple(slice(*span) for span in box)], tuple(start for start, _ in box))
        for box in itertools.product(*spans)
    ]


@given(order=st.permutations(sorted(TENSORS)))
@settings(max_examples=15)
def test_whole_tensors_in_any_order(order: list[str]) -> None:
    check(stream([(key, TENSORS[key]) for key in order]))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40)
def test_parts_in_any_order(seed: int) -> None:
    """Rows, columns and boxes, of all tensors mixed."""
    rng = random.Random(seed)
    parts = [part for key, tensor in TENSORS.items() for part in cut(key, tensor, rng)]
    rng.shuffle(parts)
    check(stream(parts))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20)
def test_merged_weights_in_parts(seed: int) -> None:
    """What is read from several keys: joined, stacked, multiplied, cut out of one."""
    tensors = {
        "a": values(12, 8),
        "b": values(20, 8),
        "up": values(32, 3).sign(),
        "down": values(3, 8).sign(),
    }
    graph = graph_of(
        ("joined", ["a", "b"], lambda a, b: torch.cat([a, b]), None),
        ("twice", ["a"], lambda a: torch.cat([a, a]), None),
        ("lora", ["b", "a", "up", "down"], lambda b, a, u, d: torch.cat([a, b]) + u @ d, INT8),
        **tensors,
    )
    rng = random.Random(seed)
    parts = [part for key, tensor in tensors.items() for part in cut(key, tensor, rng)]
    rng.shuffle(parts)
    check(stream(parts, graph), graph, tensors)


def test_weights_cut_out_of_one_tensor() -> None:
    tensors = {"qkv": values(48, 8)}
    graph = graph_of(
        ("q", ["qkv"], lambda w: w[:30], None),
        ("k", ["qkv"], lambda w: w[30:40], INT8),
        ("v", ["qkv"], lambda w: w[40:], None),
        **tensors,
    )
    for size in (48, 16, 7):
        starts = list(range(0, 48, size))
        parts = [("qkv", tensors["qkv"][start : start + size], (start, 0)) for start in reversed(starts)]
        check(stream(parts, graph), graph, tensors)


def test_other_floats_are_cast_as_files_are() -> None:
    items = [(key, tensor.to(torch.float64 if i % 2 else torch.float32)) for i, (key, tensor) in _items()]
    check(stream(items))


def _items() -> Iterator[tuple[int, tuple[str, Tensor]]]:
    return enumerate(TENSORS.items())


ROWS = TENSORS["rows"]
REFUSED: dict[str, list[object]] = {
    "shape": [("rows", ROWS[:, :8])],
    "rank": [("rows", ROWS[None])],
    "integers": [("rows", ROWS.to(torch.int32))],
    "codes": [("rows", ROWS.to(torch.float8_e4m3fn))],
    "complex": [("rows", ROWS.to(torch.complex64))],
    "meta": [("rows", ROWS.to("meta"))],
    "offset beyond the end": [("rows", ROWS[:8], (40, 0))],
    "part across the end": [("rows", ROWS[:8], (36, 0))],
    "too few offsets": [("rows", ROWS[:8], (0,))],
    "too many offsets": [("rows", ROWS[:8], (0, 0, 0))],
    "the same twice": [("rows", ROWS[:8], (0, 0)), ("rows", ROWS[:8], (0, 0))],
    "overlap of rows": [("rows", ROWS[:8], (0, 0)), ("rows", ROWS[:8], (7, 0))],
    "overlap of boxes": [("rows", ROWS[:8, :8], (0, 0)), ("rows", ROWS[4:8], (4, 0))],
    "whole after a part": [("rows", ROWS[:8], (0, 0)), ("rows", ROWS)],
    "part after the whole": [("rows", ROWS), ("rows", ROWS[:8], (0, 0))],
    "direct overlap": [("direct", ROWS[:8], (0, 0)), ("direct", ROWS[:1], (7, 0))],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_names_the_tensor(name: str) -> None:
    items = REFUSED[name]
    with pytest.raises(WeightMismatchError, match=str(items[0][0])):
        stream(items)


def test_integers_of_another_size_are_refused() -> None:
    """A cast could wrap, and files refuse it as well."""
    graph = LoadGraph()
    from fxquant.materialize.recipes import Reads

    reads = Reads(keys=("ids",), dtypes=(torch.int32,), shapes=((4,),))
    graph.add("ids", reads, dtype=torch.int32, form=None)
    with pytest.raises(WeightMismatchError, match="ids"):
        stream([("ids", torch.arange(4))], graph)
    assert torch.equal(
        stream([("ids", torch.arange(4).int())], graph).constants["ids"][0], torch.arange(4).int()
    )


@pytest.mark.parametrize(
    "item",
    [
        ("rows",),
        ("rows", "text"),
        ("rows", ROWS, (-1, 0)),
        ("rows", ROWS, (0.0, 0)),
        ("rows", ROWS, 0),
        (1, ROWS),
        None,
    ],
    ids=repr,
)
def test_malformed_items(item: object) -> None:
    with pytest.raises(ConfigError, match="item 0"):
        stream([item])


def test_empty_shards_change_nothing() -> None:
    """More ranks than rows: some of them bring nothing."""
    empty = ROWS[:0]
    check(stream([("rows", empty, (0, 0)), *TENSORS.items(), ("rows", empty, (40, 0))]))


def test_parts_that_do_not_come_are_named() -> None:
    for key in ("direct", "rows", "columns"):
        items = [item for item in TENSORS.items() if item[0] != key]
        with pytest.raises(MissingWeightError, match=key):
            stream([*items, (key, TENSORS[key][:20], (0, 0))])
        with pytest.raises(MissingWeightError, match=key):
            stream(items)


def test_optional_tensors_may_stay_out_but_not_in_part() -> None:
    items = [item for item in TENSORS.items() if item[0] != "direct"]
    assert "direct" not in stream(items, optional={"direct"}).constants
    with pytest.raises(MissingWeightError, match="direct"):
        stream([*items, ("direct", TENSORS["direct"][:20], (0, 0))], optional={"direct"})


def test_unused_tensors_are_passed_over() -> None:
    check(stream([("other", torch.ones(3)), *TENSORS.items(), ("other", torch.ones(3))]))


def test_parts_are_dropped_once_they_are_used() -> None:
    """Of whole rows, at most one tile's worth waits."""
    alive: list[weakref.ref[Tensor]] = []

    def parts() -> Iterator[object]:
        for key, tensor in TENSORS.items():
            if key != "rows":
                yield key, tensor
        for start in range(0, 40, 2):
            part = ROWS[start : start + 2].clone()
            assert sum(ref() is not None for ref in alive) <= 3
            alive.append(weakref.ref(part))
            yield "rows", part, (start, 0)
            del part

    check(stream(parts()))
    assert len(alive) == 20
    assert not any(ref() for ref in alive)


def test_what_waits_is_counted() -> None:
    """Two passes need the whole, parts by columns are put together: each shows in the peak."""
    items = [item for item in TENSORS.items() if item[0] != "columns"]
    least = stream([*items, ("columns", TENSORS["columns"])]).peak["cpu"]
    columns = [("columns", TENSORS["columns"][:, i : i + 5].clone(), (0, i)) for i in range(0, 20, 5)]
    early = stream([*columns[:3], *items, *columns[3:]])
    check(early)
    assert early.peak["cpu"] >= least


def test_an_error_keeps_no_tensors() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def parts() -> Iterator[object]:
        for start in (0, 1):
            part = ROWS[start : start + 8].clone()
            alive.append(weakref.ref(part))
            yield "rows", part, (start, 0)

    with pytest.raises(WeightMismatchError):
        stream(parts())
    assert not any(ref() for ref in alive)


@pytest.mark.parametrize("cuts", [1, 4])
def test_progress_sums(cuts: int) -> None:
    steps: list[object] = []
    parts = [
        (key, piece, (start, *[0] * (tensor.dim() - 1)))
        for key, tensor in TENSORS.items()
        if tensor.dim() and tensor.numel()
        for piece, start in zip(
            tensor.chunk(cuts),
            itertools.accumulate([0, *(c.shape[0] for c in tensor.chunk(cuts))]),
            strict=False,
        )
    ]
    loaded = stream([*parts, ("scalar", TENSORS["scalar"]), ("empty", TENSORS["empty"])], report=steps.append)
    done = [step.done_bytes for step in steps]
    assert done == sorted(done)
    assert done[-1] == loaded.read_bytes == sum(t.nbytes for t in TENSORS.values())
    assert len(steps) == len(parts) + 2


class Tied(nn.Module):
    """Two names of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


@pytest.mark.parametrize("config", [None, {"head": "int8"}], ids=["float", "table"])
def test_tied_names_may_both_come(config: object) -> None:
    w = values(24, 16, dtype=torch.float32)
    options = {"scheme": "int8", "config": config, "example_inputs": (torch.tensor([[1, 2]]),)}

    def compiled(items: list[object]) -> nn.Module:
        with fxquant.meta_init():
            tied = Tied().eval()
        return fxquant.compile(tied, iter(items), **options)

    parts = [("head.weight", w[:10], (0, 0)), ("embed.weight", w[10:], (10, 0))]
    expected = compiled([("embed.weight", w)])(torch.tensor([[3]]))
    assert torch.equal(compiled(parts)(torch.tensor([[3]])), expected)
    both = [*parts, ("head.weight", w.clone())]
    assert torch.equal(compiled(both)(torch.tensor([[3]])), expected)
    with pytest.raises(TiedWeightError, match=r"embed\.weight"):
        compiled([("embed.weight", w), ("head.weight", w + 1)])
