"""Constants held as the NPU's ops take them: sources, peaks, files, writes, parts, ways to use a weight."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from scheme_numbers import spec_for
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

import fxquant
from fxquant import numerics
from fxquant.fractal_nz import FRACTAL_NZ
from fxquant.runtime.quantized_weight import QuantizedWeight
from fxquant.scheme import find_scheme

HALF, BF16 = torch.float16, torch.bfloat16
A2 = "Ascend910B2,cann=9.0"
MIB = 1 << 20
SCHEMES = ["int8_weight_only", "int4_g32_asym", "int8_static"]


class Pair(nn.Module):
    """Two linears, one of them a fused one that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 3 * 64, dtype=BF16)
        self.second = nn.Linear(64, 48, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).chunk(3, -1)
        return self.second(torch.tanh(q * k) + v)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: value.detach() for name, value in Pair().state_dict().items()}


X = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(BF16)


def compiled(source: Any, scheme: str | None, make: Any = Pair, x: Tensor = X, **options: Any) -> nn.Module:
    with fxquant.meta_init():
        model = make().eval()
    if scheme == "int8_static":
        options["config"] = {"re:.*": {"scheme": scheme, "act_scale": 0.05}}
    options = {"backend": "npu", "target": A2, "progress": False, "example_inputs": (x,), **options}
    if options["backend"] == "cpu":
        options["target"] = None
    return fxquant.compile(model, source, scheme=scheme, **options)


def run(model: Any, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(x.npu()).cpu()
    return out


def weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedWeight)}


def held(model: nn.Module) -> dict[str, list[Tensor]]:
    return {name: [part.cpu() for part in weight.constants] for name, weight in weights(model).items()}


def same(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True)
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_source_gives_the_same_constants(npu, state, tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    model = compiled(path, scheme)
    expected = held(model)
    assert same(held(compiled(state, scheme)), expected)
    assert same(held(compiled(iter(state.items()), scheme)), expected)
    found, on_cpu = fxquant.report(model).errors, fxquant.report(compiled(path, scheme, backend="cpu")).errors
    for name, error in found.items():
        assert error.relative == pytest.approx(on_cpu[name].relative, rel=1e-5)
        assert error.maximum_is_exact == (on_cpu[name].maximum_is_exact and scheme == "int8_static")
    dummy = held(compiled(None, scheme, weights="dummy"))
    shapes = {name: [(p.shape, p.dtype) for p in parts] for name, parts in expected.items()}
    assert {name: [(p.shape, p.dtype) for p in parts] for name, parts in dummy.items()} == shapes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_constants_are_those_of_the_scheme(npu, state, tmp_path: Path, scheme: str) -> None:
    model = compiled(state, scheme)
    fxquant.save_checkpoint(model, tmp_path / "saved")
    again = compiled(tmp_path / "saved", None)
    assert same(held(again), held(model))
    assert torch.equal(run(again), run(model))
    on_cpu = compiled(tmp_path / "saved", None, backend="cpu")
    spec = find_scheme(scheme).weight
    assert spec is not None
    for name, weight in weights(on_cpu).items():
        codes, scale, *zero = numerics.quantize_weight(state[name], spec_for(spec, state[name]))
        rounded = scale if scheme == "int8_static" else scale.to(BF16).to(scale.dtype)
        assert torch.equal(weight.whole[0], codes)
        assert torch.equal(weight.whole[1], rounded)
        if zero:
            assert torch.equal(weight.whole[2], zero[0])
        assert torch.equal(weights(model)[name].dequantize().cpu(), weight.dequantize())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_new_values_into_the_same_constants(npu, state, tmp_path: Path, scheme: str) -> None:
    other = {name: value.flip(0) for name, value in state.items()}
    model, expected = compiled(state, scheme), compiled(other, scheme)
    where = {name: [part.data_ptr() for part in weight.constants] for name, weight in weights(model).items()}
    before = run(model)
    fxquant.reload(model, other)
    assert same(held(model), held(expected))
    fxquant.save_checkpoint(expected, tmp_path / "saved")
    fxquant.reload(model, state)
    assert torch.equal(run(model), before)
    fxquant.reload(model, tmp_path / "saved")
    assert same(held(model), held(expected))
    with torch.no_grad():
        for name, weight in weights(model).items():
            weight.copy_(state[name].npu())
    after = {name: [part.data_ptr() for part in weight.constants] for name, weight in weights(model).items()}
    assert after == where
    assert same(held(model), held(compiled(state, scheme)))


def test_a_weight_moved_to_the_cpu_is_the_schemes_own(npu, state) -> None:
    weight = weights(compiled(state, "int4_g32_asym"))["second.weight"]
    x = torch.randn(3, 64).to(BF16)
    out = torch.nn.functional.linear(x, weight.cpu())
    want = torch.nn.functional.linear(x, weight.dequantize().cpu())
    torch.testing.assert_close(out, want, rtol=2.0**-6, atol=2.0**-8)


class Wide(nn.Module):
    def __init__(self, n: int = 65536, k: int = 64, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.mod = nn.Linear(k, n, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.mod(x).chunk(4, -1)
        return a * b + c * d


class WideHalf(Wide):
    def __init__(self) -> None:
        super().__init__(dtype=HALF)


@pytest.mark.parametrize(
    ("scheme", "make"), [("int4_g32_asym", Wide), ("int8_weight_only", Wide), ("int8_static", WideHalf)]
)
def test_parts_give_the_numbers_of_rows(npu, scheme: str, make: Any) -> None:
    torch.manual_seed(0)
    whole = {name: value.detach() for name, value in make().state_dict().items()}
    x = torch.randn(3, 64).to(whole["mod.weight"].dtype)
    model = compiled(whole, scheme, make, x)
    form = model.fxquant_plan.weight("mod.weight").form
    assert form.endswith("/n:32768,32768")
    out = run(model.mod.forward, x)
    rows = torch.cat([torch.arange(0, 40), torch.arange(32760, 32780), torch.arange(65500, 65536)])
    small = {f"mod.{name}": whole[f"mod.{name}"][rows] for name in ("weight", "bias")}

    def few() -> nn.Module:
        part = Wide(len(rows), dtype=x.dtype)
        part.forward = part.mod.forward  # type: ignore[method-assign]
        return part

    assert torch.equal(out[:, rows], run(compiled(small, scheme, few, x), x))
    a, b, c, d = out.chunk(4, -1)
    assert torch.equal(run(model, x), a * b + c * d)


@pytest.mark.parametrize("scheme", ["int4_g32_asym", "int8_weight_only", "int8_static"])
def test_the_peak_is_predicted(npu, tmp_path: Path, scheme: str) -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False, dtype=BF16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    save_file({n: v.detach() for n, v in Big().state_dict().items()}, tmp_path / "model.safetensors")
    gc.collect()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    base = torch.npu.memory_allocated()
    x = torch.zeros(2, 4096, dtype=BF16)
    model = compiled(tmp_path / "model.safetensors", scheme, Big, x, load_workers=1)
    peak = torch.npu.max_memory_allocated() - base
    report = fxquant.report(model)
    predicted = report.plan.predicted_peak["npu"]
    assert report.measured_peak["npu"] <= predicted
    assert abs(peak - predicted) <= 0.03 * predicted + MIB


def test_static_codes_in_fractal_nz(npu, state) -> None:
    plain, cast = compiled(state, "int8_static"), compiled(state, "int8_static", weight_format="nz")
    layout = torch.ops.npu.get_npu_format
    assert {layout(part) for weight in weights(cast).values() for part in weight.parts} == {FRACTAL_NZ}
    assert torch.equal(run(cast), run(plain))
    fxquant.reload(cast, {name: value.flip(0) for name, value in state.items()})
    fxquant.reload(cast, state)
    assert torch.equal(run(cast), run(plain))


class Cut(nn.Module):
    """One weight, used in cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3 * 32, 64, dtype=HALF))

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.weight.split([32, 64])
        a, b = torch.nn.functional.linear(x, q), torch.nn.functional.linear(x, kv)
        return torch.cat([a, b], -1)


class Whole(Cut):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cuts_of_one_weight(npu, scheme: str) -> None:
    given = {"weight": torch.randn(96, 64).half()}
    x = torch.randn(4, 64).half()
    cut, whole = compiled(given, scheme, Cut, x), compiled(given, scheme, Whole, x)
    assert isinstance(cut.weight, QuantizedWeight)
    assert torch.equal(run(cut, x), run(whole, x))
    assert fxquant.report(cut).fallbacks == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_conv1d(npu, scheme: str) -> None:
    values = {"weight": torch.randn(64, 40).to(BF16) / 8, "bias": torch.randn(40).to(BF16)}
    x = torch.randn(2, 3, 64).to(BF16)
    model = compiled(values, scheme, lambda: Conv1D(40, 64).to(BF16), x)
    twin = compiled(
        {"weight": values["weight"].t().contiguous(), "bias": values["bias"]}, scheme,
        lambda: nn.Linear(64, 40, dtype=BF16), x,
    )  # fmt: skip
    assert torch.equal(run(model, x), run(twin, x))
    assert fxquant.report(model).fallbacks == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_second_start_reads_the_cache(npu, state, tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    first = compiled(path, scheme, cache_dir=tmp_path / "cache")
    second = compiled(path, scheme, cache_dir=tmp_path / "cache")
    assert "the cache" in fxquant.report(second).origin
    assert same(held(second), held(first))


@pytest.mark.parametrize("scheme", ["int8_weight_only", "int4_g32_asym"])
def test_a_transformers_model(npu, scheme: str) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, max_position_embeddings=64, dtype=BF16,
    )  # fmt: skip
    torch.manual_seed(0)
    twin = AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
    ids = torch.randint(0, 96, (2, 5), generator=torch.Generator().manual_seed(1))
    state = {name: value.detach() for name, value in twin.state_dict().items()}
    options = {"scheme": scheme, "example_inputs": {"input_ids": ids}, "progress": False}
    with fxquant.meta_init():
        model, on_cpu = (AutoModelForCausalLM.from_config(config, dtype=BF16).eval() for _ in range(2))
    model = fxquant.compile(model, state, backend="npu", target=A2, **options)
    on_cpu = fxquant.compile(on_cpu, state, backend="cpu", **options)
    with torch.no_grad():
        out, want = model(input_ids=ids.npu()).logits.cpu().float(), on_cpu(input_ids=ids).logits.float()
    assert (out - want).norm() <= 0.03 * want.norm()  # bfloat16: other roundings of scales and of sums
    tokens = model.generate(ids.npu(), max_new_tokens=4, do_sample=False)
    assert tokens.shape == (2, 9)
    report = fxquant.report(model)
    assert (report.fallbacks, report.unnormalized) == (0, ())
