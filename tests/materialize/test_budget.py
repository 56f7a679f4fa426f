"""Budgets: kept or refused, with the smallest that can be kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from templates import INT8, graph_of, saved, values
from torch import Tensor, nn

import fxquant
from fxquant.errors import BudgetError, ConfigError
from fxquant.materialize.budget import Budgets, choose_schedule
from fxquant.materialize.execute import materialize
from fxquant.materialize.recipes import LoadGraph
from fxquant.materialize.schedule import Schedule, Scheduler, Settings
from fxquant.options import parse_bytes

WIDTH, LAYERS = 256, 6
X = torch.ones(1, WIDTH)
KIB = 1 << 10


class Stack(nn.Module):
    """Equal linears."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(torch.bfloat16))
        return x


def state(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {key: values(*t.shape, dtype=dtype) for key, t in Stack().state_dict().items()}


@pytest.fixture(params=["file", "dict", "mmap"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[object, dict[str, object]]:
    if request.param == "dict":
        return state(), {}
    save_file(state(), tmp_path / "model.safetensors")
    return tmp_path, {"reader": "mmap"} if request.param == "mmap" else {}


def compiled(ckpt: object, **options: object) -> nn.Module:
    with fxquant.meta_init():
        model = Stack().eval()
    given = {"scheme": "int8", "example_inputs": (X,), "load_workers": 4, **options}
    return fxquant.compile(model, ckpt, **given)


def smallest(ckpt: object, name: str = "host_budget", **options: object) -> int:
    with pytest.raises(BudgetError, match=name) as caught:
        compiled(ckpt, **{name: 1}, **options)
    assert caught.value.device == "cpu"
    assert str(caught.value.smallest) in str(caught.value)
    return caught.value.smallest


@pytest.mark.parametrize("scheme", ["int8", "none"])
def test_the_smallest_budget_is_kept_and_no_smaller_one(
    source: tuple[object, dict[str, object]], scheme: str
) -> None:
    ckpt, options = source
    options = {**options, "scheme": scheme}
    least = smallest(ckpt, **options)
    assert smallest(ckpt, **options) == least
    model = compiled(ckpt, host_budget=least, **options)
    report = fxquant.report(model)
    assert report.measured_peak["cpu"] <= report.plan.predicted_peak["cpu"] <= least
    assert report.plan.loading["host_budget"] == least
    with pytest.raises(BudgetError) as caught:
        compiled(ckpt, host_budget=least - 1, **options)
    assert caught.value.smallest == least


def test_a_refused_budget_changes_nothing(tmp_path: Path) -> None:
    with fxquant.meta_init():
        model = Stack().eval()
    with pytest.raises(BudgetError):
        fxquant.compile(model, state(), scheme="int8", example_inputs=(X,), host_budget="1KiB")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_large_budget_changes_no_plan(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "model.safetensors")
    free, bound = compiled(tmp_path), compiled(tmp_path, host_budget="2GiB", device_budget="1 GiB")
    assert free.fxquant_plan.predicted_peak == bound.fxquant_plan.predicted_peak
    assert bound.fxquant_plan.loading["host_budget"] == 2 << 30
    assert bound.fxquant_plan.loading["device_budget"] == 1 << 30


def test_on_the_cpu_both_budgets_bound_the_same_memory(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "model.safetensors")
    least = smallest(tmp_path)
    compiled(tmp_path, host_budget="1GiB", device_budget=least)
    with pytest.raises(BudgetError):
        compiled(tmp_path, host_budget="1GiB", device_budget=least - 1)


SIZES = {
    "2GiB": 2 << 30,
    "500MB": 500 * 10**6,
    "1.5 GiB": 3 << 29,
    " 7 kib ": 7 << 10,
    "12": 12,
    "12B": 12,
    "0": 0,
    "1tb": 10**12,
}


@pytest.mark.parametrize("text", SIZES)
def test_sizes_as_text(text: str) -> None:
    assert parse_bytes("host_budget", text) == SIZES[text]


@pytest.mark.parametrize("bad", ["", "GiB", "1 G", "-1", -1, "1,5GiB", "2 GiB each", True, 1.5, "nan", "1e9"])
def test_nonsense_sizes(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"host_budget=.*is not a size"):
        parse_bytes("host_budget", bad)


@pytest.mark.parametrize("name", ["host_budget", "device_budget", "read_bytes"])
def test_options_are_checked_before_anything_else(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        compiled(state(), **{name: "much"})


@pytest.mark.parametrize("bad", [0, -1, 1.0, "2", True, 257])
def test_numbers_of_workers(bad: object) -> None:
    with pytest.raises(ConfigError, match="load_workers"):
        compiled(state(), load_workers=bad)


def flipped(w: Tensor) -> Tensor:
    return w.flip(0)


def uneven() -> tuple[LoadGraph, dict[str, Tensor]]:
    """Many small weights, then a large one that cannot be cut."""
    tensors = {f"a{i}": values(256, 256) for i in range(16)} | {"large": values(4096, 256)}
    rows = [(key, [key], flipped if key == "large" else None, INT8) for key in tensors]
    return graph_of(*rows, **tensors), tensors


def budgeted(scheduler: Scheduler, bound: int, workers: int = 2) -> Schedule:
    settings = Settings(workers=workers, tile_bytes=128 * KIB)
    return choose_schedule(scheduler, settings, Budgets(host=bound))


def test_what_sets_the_peak_is_named(tmp_path: Path) -> None:
    graph, tensors = uneven()
    checkpoint = saved(tmp_path / "m.safetensors", tensors)
    with pytest.raises(BudgetError, match="while large is made") as caught:
        budgeted(Scheduler(graph, checkpoint.infos), 1)
    assert caught.value.smallest > 2 * tensors["large"].nbytes


def test_the_largest_first_where_it_helps(tmp_path: Path) -> None:
    """What is needed beside a weight comes before the constants of the others."""
    graph, tensors = uneven()
    checkpoint = saved(tmp_path / "m.safetensors", tensors)
    scheduler = Scheduler(graph, checkpoint.infos)
    with pytest.raises(BudgetError) as caught:
        budgeted(scheduler, 1)
    schedule = budgeted(scheduler, caught.value.smallest)
    assert schedule.order == "largest first"
    assert schedule.batches[0].jobs[0].recipe.fqn == "large"
    in_file_order = scheduler.make(Settings(workers=1, tile_bytes=128 * KIB))
    assert in_file_order.peak["cpu"] > caught.value.smallest
    loaded = materialize(graph, schedule, checkpoint)
    assert loaded.peak["cpu"] <= caught.value.smallest


def test_smaller_tiles_and_fewer_workers_in_their_turn(tmp_path: Path) -> None:
    """The first schedule that fits is taken: less speed is given up only for what it brings."""
    tensors = {f"a{i}": values(512, 1024) for i in range(8)}
    graph = graph_of(*((key, [key], None, INT8) for key in tensors), **tensors)
    scheduler = Scheduler(graph, saved(tmp_path / "m.safetensors", tensors).infos)
    settings = Settings(workers=4, tile_bytes=1 << 20)
    free = choose_schedule(scheduler, settings, Budgets())
    bounded = choose_schedule(scheduler, settings, Budgets(host=free.peak["cpu"] - 1))
    assert (free.workers, free.tile_bytes) == (4, 1 << 20)
    assert (bounded.workers, bounded.tile_bytes) == (4, 512 << 10)
    with pytest.raises(BudgetError) as caught:
        choose_schedule(scheduler, settings, Budgets(host=1))
    least = choose_schedule(scheduler, settings, Budgets(host=caught.value.smallest))
    assert (least.workers, least.tile_bytes) == (1, 512 << 10)


def test_the_plan_tells_how_it_loads(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "model.safetensors")
    with fxquant.meta_init():
        model = Stack().eval()
    options = {"scheme": "int8", "example_inputs": (X,)}
    loading = fxquant.plan(model, tmp_path, load_workers=2, read_bytes="64KiB", **options).loading
    assert loading["source"] == "positioned reads"
    assert (loading["workers"], loading["read_bytes"], loading["order"]) == (2, 64 << 10, "file")
    assert loading["reads"] == 3 * LAYERS  # two for each weight, one for its bias
    assert (loading["host_budget"], loading["device_budget"]) == (None, None)
    assert fxquant.plan(model, state(), **options).loading["reads"] == 0
    mapped = fxquant.plan(model, tmp_path, reader="mmap", **options).loading
    assert (mapped["source"], mapped["reads"]) == ("a mapping of the files", 0)


def in_rows(tensors: dict[str, Tensor], *, hostile: bool) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Parts of 32 rows, one weight after the other or all weights at once; parts are made as they go."""
    spans = [(key, start) for key, t in tensors.items() for start in range(0, t.shape[0], 32)]
    if hostile:  # columns: nothing can be made before the last part of a tensor is here
        for half in (0, 1):
            for key, tensor in tensors.items():
                width = tensor.shape[-1] // 2 if tensor.dim() == 2 else tensor.shape[0]
                if tensor.dim() == 2:
                    yield key, tensor[:, half * width : (half + 1) * width].clone(), (0, half * width)
                elif half:
                    yield key, tensor, (0,)
        return
    for key, start in spans:
        tensor = tensors[key]
        yield key, tensor[start : start + 32].clone(), (start,) + (0,) * (tensor.dim() - 1)


def test_a_stream_in_a_good_order_needs_little() -> None:
    tensors = state()
    resident = compiled(dict(tensors)).fxquant_plan.resident_bytes
    budget = resident + 100 * KIB
    model = compiled(in_rows(tensors, hostile=False), host_budget=budget, read_bytes="16KiB")
    assert fxquant.report(model).measured_peak["cpu"] <= budget


def test_a_stream_in_a_hostile_order_names_what_waits() -> None:
    tensors = state()
    budget = compiled(dict(tensors)).fxquant_plan.resident_bytes + 100 * KIB
    with pytest.raises(BudgetError, match=r"tensors wait for others, among them layers\.0\.weight") as caught:
        compiled(in_rows(tensors, hostile=True), host_budget=budget, read_bytes="16KiB")
    assert budget < caught.value.smallest < 2 * sum(t.nbytes for t in tensors.values())
    compiled(in_rows(tensors, hostile=True), host_budget="1GiB", read_bytes="16KiB")


@pytest.mark.parametrize("scheme", ["int8", "none"])
def test_a_stream_keeps_its_budget_or_is_refused(scheme: str) -> None:
    """Also while a weight is made, and where nothing waits: constants alone may be too much."""
    budgets = range(50 * KIB, 1200 * KIB, 50 * KIB)
    kept = [budget for budget in budgets if _is_kept(budget, scheme)]
    assert kept == [budget for budget in budgets if budget >= kept[0]]
    assert 0 < len(kept) < len(budgets)


def _is_kept(budget: int, scheme: str) -> bool:
    try:
        model = compiled(iter(state().items()), host_budget=budget, scheme=scheme)
    except BudgetError:
        return False
    assert fxquant.report(model).measured_peak["cpu"] <= budget
    return True


def test_budgets_of_a_device_and_of_its_host(tmp_path: Path) -> None:
    """The host holds buffers only; each refusal says which memory it is about."""
    graph, tensors = uneven()
    scheduler = Scheduler(graph, saved(tmp_path / "m.safetensors", tensors).infos)
    settings = Settings(workers=4, tile_bytes=64 * KIB, device="npu")
    free = scheduler.make(settings)
    assert free.peak["cpu"] == 4 * free.buffer_bytes
    assert free.peak["npu"] > sum(scheduler.resident(recipe) for recipe in graph.recipes)
    for name, device in (("host_budget", "cpu"), ("device_budget", "npu")):
        key = name.removesuffix("_budget")
        with pytest.raises(BudgetError, match=f"{name} of 1 bytes cannot be kept on {device}") as caught:
            choose_schedule(scheduler, settings, Budgets(**{key: 1}))
        least = caught.value.smallest
        assert choose_schedule(scheduler, settings, Budgets(**{key: least})).peak[device] <= least
        with pytest.raises(BudgetError):
            choose_schedule(scheduler, settings, Budgets(**{key: least - 1}))
