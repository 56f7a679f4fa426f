"""The life of a model on the simulated NPU: copies, moves, files, budgets, calls outside of graphs."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fxquant
from fxquant.errors import BudgetError
from fxquant.runtime.quantized_weight import QuantizedWeight

MIB = 1 << 20
WIDE = 65552
FORMS = {
    "wide.weight": "int8.kn/n:32784,32768",
    "deep.weight": "int8.kn/k:32784,32768",
    "last.weight": "int8.kn",
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # torch_npu's deepcopy
    pytest.mark.filterwarnings("ignore:.*torch.load. with .weights_only=False.*"),
]


class Net(nn.Module):
    """Codes in parts of N, in parts of K and in one piece; floats; a table that no checkpoint holds."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.wide = nn.Linear(32, WIDE, dtype=dtype)
        self.deep = nn.Linear(WIDE, 16, bias=False, dtype=dtype)
        self.last = nn.Linear(16, 24, dtype=dtype)
        self.norm = nn.LayerNorm(24, dtype=dtype)
        self.register_buffer("rotary", torch.linspace(0.5, 2, 24).to(dtype), persistent=False)
        self.register_buffer("count", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.deep(torch.relu(self.wide(x))))
        return self.norm(x) * self.rotary * self.count


def values(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: (torch.randn(t.shape, generator=generator) / max(t.shape[-1:], default=1) ** 0.5).to(dtype)
        for name, t in Net(dtype).state_dict().items()
    }
    return {**state, "count": torch.tensor(2)}


def compiled(ckpt: object = None, dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    with fxquant.meta_init():
        model = Net(dtype).eval()
    options = {
        "backend": "npu",
        "scheme": "int8",
        "target": "Ascend910B2,cann=9.0.0",
        "progress": False,
        "example_inputs": (torch.zeros(2, 32, dtype=dtype),),
        **options,
    }
    return fxquant.compile(model, values(dtype) if ckpt is None else ckpt, **options)


def inputs(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(5, 32, generator=torch.Generator().manual_seed(9)).to(dtype)


def run(model: nn.Module, device: str = "npu", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with torch.no_grad():
        return model(inputs(dtype).to(device)).cpu()


def held(model: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {n: t.constants if isinstance(t, QuantizedWeight) else (t,) for n, t in named}


def devices(model: nn.Module) -> set[str]:
    return {str(part.device) for parts in held(model).values() for part in parts}


def same(one: nn.Module, two: nn.Module) -> bool:
    mine, theirs = held(one), held(two)
    return mine.keys() == theirs.keys() and all(
        torch.equal(a.cpu(), b.cpu()) for n in mine for a, b in zip(mine[n], theirs[n], strict=True)
    )


@pytest.fixture
def model(simulate: Callable[..., None]) -> nn.Module:
    simulate("Ascend910B2", "9.0.0")
    return compiled()


@pytest.fixture
def expected(model: nn.Module) -> Tensor:
    return run(model)


def test_forms_devices_and_numbers(model: nn.Module, expected: Tensor) -> None:
    assert {n: str(p.form) for n, p in model.named_parameters() if isinstance(p, QuantizedWeight)} == FORMS
    assert devices(model) == {"npu:0"}
    twin = Net()
    twin.load_state_dict(values())
    with torch.no_grad():
        floats = twin(inputs())
    assert (expected.float() - floats.float()).norm() < 0.03 * floats.float().norm()
    report = fxquant.report(model)
    assert (report.quantized, report.rewritten, report.fallbacks, report.eager_linears) == (3, 3, 0, 0)
    assert report.plan.backend == "npu"
    assert "npu" in report.measured_peak
    assert "on npu" in str(report)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_submodules_outside_of_graphs_give_the_same_bits(simulate, dtype: torch.dtype) -> None:
    simulate("Ascend910B2", "9.0.0")
    model = compiled(dtype=dtype)
    whole = run(model, dtype=dtype)
    with torch.no_grad():
        x = model.last(model.deep(torch.relu(model.wide(inputs(dtype).npu()))))
        parts = model.norm(x) * model.rotary * model.count
        assert model.wide(inputs(dtype)[:0].npu()).shape == (0, WIDE)
        assert model.wide(inputs(dtype)[0].npu()).shape == (WIDE,)
    assert torch.equal(parts.cpu(), whole)
    assert fxquant.report(model).eager_linears == 5
    assert fxquant.report(model).fallbacks == 0


def test_dequantize_is_counted_and_close(model: nn.Module) -> None:
    for name in ("wide", "deep"):
        weight, floats = getattr(model, name).weight, values()[f"{name}.weight"].float()
        assert (weight.dequantize().cpu().float() - floats).norm() < 0.015 * floats.norm()
        with torch.no_grad():
            assert (weight + 0).shape == floats.shape  # another use computes with the floats
    assert fxquant.report(model).fallbacks == 2


def test_deepcopy(model: nn.Module, expected: Tensor) -> None:
    twin = copy.deepcopy(model)
    assert same(model, twin)
    assert twin.wide.weight.codes_0.data_ptr() != model.wide.weight.codes_0.data_ptr()
    assert torch.equal(run(twin), expected)
    assert fxquant.report(twin).rewritten == 3


def test_pickle_and_torch_save(model: nn.Module, expected: Tensor) -> None:
    assert torch.equal(run(pickle.loads(pickle.dumps(model))), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(run(torch.load(file, weights_only=False)), expected)


def test_state_dict_round_trip(model: nn.Module, expected: Tensor) -> None:
    state = model.state_dict()
    assert {name for name, value in state.items() if isinstance(value, QuantizedWeight)} == set(FORMS)
    other = compiled(weights="dummy")
    assert not torch.equal(run(other), expected)
    other.load_state_dict(state)
    assert same(model, other)
    assert torch.equal(run(other), expected)
    third = compiled(weights="dummy")
    third.load_state_dict(values())  # floats are quantized into the parts
    assert torch.equal(run(third), expected)


def test_to_the_cpu_and_back(model: nn.Module, expected: Tensor) -> None:
    """The codes keep their parts; the CPU's own ops run, and the scales in their order of rounding."""
    assert model.to("cpu") is model
    assert devices(model) == {"cpu"}
    out = run(model, "cpu")
    assert (out.float() - expected.float()).norm() < 0.005 * expected.float().norm()
    with torch.no_grad():
        assert model.wide(inputs()).shape == (5, WIDE)
    report = fxquant.report(model)
    assert (report.fallbacks, report.eager_linears) == (0, 1)
    model.to("npu")
    assert devices(model) == {"npu:0"}
    assert torch.equal(run(model), expected)


def test_to_the_second_device_and_to_another_dtype(model: nn.Module, expected: Tensor) -> None:
    twin = copy.deepcopy(model).to("npu:1")
    assert devices(twin) == {"npu:1"}
    assert torch.equal(run(twin, "npu:1"), expected)
    half = run(model.half(), dtype=torch.float16)
    assert half.dtype == torch.float16
    assert (half.float() - expected.float()).norm() < 0.03 * expected.float().norm()


def test_reload_into_the_same_memory(model: nn.Module, expected: Tensor) -> None:
    places = {name: [part.data_ptr() for part in parts] for name, parts in held(model).items()}
    fxquant.reload(model, values(seed=5))
    assert not torch.equal(run(model), expected)
    assert same(model, compiled(values(seed=5)))
    fxquant.reload(model, values())
    assert torch.equal(run(model), expected)
    assert places == {name: [part.data_ptr() for part in parts] for name, parts in held(model).items()}


def test_save_and_load_again(model: nn.Module, expected: Tensor, tmp_path: Path) -> None:
    fxquant.save_checkpoint(model, tmp_path / "saved")
    again = compiled(tmp_path / "saved", scheme=None)
    assert same(model, again)
    assert devices(again) == {"npu:0"}
    assert torch.equal(run(again), expected)
    elsewhere = compiled(tmp_path / "saved", scheme=None, backend="cpu", target=None)
    assert same(model, elsewhere)  # the parts stay; slower there, and right
    out = run(elsewhere, "cpu")
    assert (out.float() - expected.float()).norm() < 0.005 * expected.float().norm()


@pytest.mark.parametrize("reader", ["pread", "mmap"])
@pytest.mark.parametrize("workers", [1, 3])
def test_files_readers_and_cache(
    model: nn.Module, expected: Tensor, tmp_path: Path, reader: str, workers: int
) -> None:
    save_file(values(), tmp_path / "model.safetensors")
    options = {"reader": reader, "load_workers": workers, "cache_dir": tmp_path / "cache"}
    first = compiled(tmp_path, **options)
    second = compiled(tmp_path, **options)
    assert fxquant.report(first).origin.startswith("the checkpoint; cached")
    assert fxquant.report(second).origin.startswith("the cache")
    assert same(model, first)
    assert same(model, second)
    assert torch.equal(run(second), expected)


def test_a_stream(model: nn.Module) -> None:
    assert same(model, compiled(iter(values().items())))


def test_a_file_changed_to_another_size_leaves_the_model_as_it_was(simulate, tmp_path: Path) -> None:
    simulate("Ascend910B2", "9.0.0")
    before = torch.npu.memory_allocated()
    save_file(values(), tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-64])
    with fxquant.meta_init():
        model = Net().eval()
    with pytest.raises(fxquant.errors.FxquantError):
        fxquant.compile(model, tmp_path, backend="npu", scheme="int8", target="Ascend910B2,cann=9.0.0")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.npu.memory_allocated() == before


class Big(nn.Module):
    """Linears of 24 MiB each, as floats."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(3072, 4096, dtype=torch.bfloat16) for _ in range(4)))


def big(folder: Path, **options: Any) -> nn.Module:
    if not (folder / "model.safetensors").exists():
        with fxquant.meta_init():
            names = Big().state_dict()
        save_file(
            {n: torch.full(t.shape, 0.5, dtype=t.dtype) for n, t in names.items()},
            folder / "model.safetensors",
        )
    with fxquant.meta_init():
        model = Big().eval()
    return fxquant.compile(
        model, folder, backend="npu", scheme="int8", progress=False, load_workers=2, **options
    )


def test_prediction_and_allocator_agree(npu, tmp_path: Path) -> None:
    model = big(tmp_path)
    measured, kept = torch.npu.max_memory_allocated(), torch.npu.memory_allocated()
    predicted = model.fxquant_plan.predicted_peak["npu"]
    assert abs(predicted - measured) <= max(0.03 * measured, 16 * MIB)
    assert measured <= kept + 64 * MIB
    assert measured < sum(w.float_bytes for w in model.fxquant_plan.weights)
    assert abs(fxquant.report(model).measured_peak["npu"] - measured) <= 4 * MIB
    assert model.fxquant_plan.predicted_peak["cpu"] <= 16 * MIB


def test_budgets_are_kept_or_refused(npu, tmp_path: Path) -> None:
    roomy = big(tmp_path).fxquant_plan
    gc.collect()  # a compiled module is part of a cycle
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    least = roomy.resident_bytes + 2 * MIB
    model = big(tmp_path, device_budget=least, host_budget="1MiB")
    assert model.fxquant_plan.predicted_peak["npu"] <= least
    assert torch.npu.max_memory_allocated() <= least + MIB
    assert fxquant.report(model).measured_peak["cpu"] <= MIB
    del model
    for budget in ({"device_budget": roomy.resident_bytes // 2}, {"host_budget": 1024}):
        with pytest.raises(BudgetError, match=r"smallest|at least"):
            big(tmp_path, **budget)


def test_too_little_memory_is_an_error_that_leaves_nothing(npu, npu_capacity, tmp_path: Path) -> None:
    before = torch.npu.memory_allocated()
    npu_capacity(32)
    with pytest.raises(torch.OutOfMemoryError):
        big(tmp_path)
    assert torch.npu.memory_allocated() == before
