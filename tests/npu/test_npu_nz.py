"""Codes in FRACTAL_NZ: cast part by part while they are loaded, with the numbers of ND."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fxquant
from fxquant.fractal_nz import FRACTAL_NZ, padded_bytes
from fxquant.runtime.quantized_weight import QuantizedWeight

WIDE = 65536 + 100
MIB = 1 << 20


class Wide(nn.Module):
    """One linear over the limit, one below it, one of a single feature, which FRACTAL_NZ does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, WIDE, dtype=torch.float16)
        self.second = nn.Linear(WIDE, 40, bias=False, dtype=torch.float16)
        self.small = nn.Linear(40, 24, dtype=torch.float16)
        self.one = nn.Linear(24, 1, dtype=torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.small(self.second(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: value.detach() for name, value in Wide().state_dict().items()}


X = torch.randn(3, 48, generator=torch.Generator().manual_seed(1)).half()


def compiled(source: Any, weight_format: str, **options: Any) -> nn.Module:
    with fxquant.meta_init():
        model = Wide().eval()
    options = {"scheme": "int8", "example_inputs": (X,), "target": "Ascend910B2,cann=9.0", **options}
    return fxquant.compile(model, source, backend="npu", weight_format=weight_format, **options)


def weights(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedWeight):
            yield name, parameter


def formats(model: nn.Module) -> dict[str, set[int]]:
    layout = torch.ops.npu.get_npu_format
    return {name: {layout(part) for part in weight.parts} for name, weight in weights(model)}


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(X.npu()).cpu()
    return out


EXPECTED = {
    "first.weight": {FRACTAL_NZ},
    "second.weight": {FRACTAL_NZ},
    "small.weight": {FRACTAL_NZ},
    "one.weight": {2},
}
PLAIN: dict[str, set[int]] = {name: {2} for name in EXPECTED}


def test_codes_are_cast_and_give_the_same_numbers(state, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    plain, cast = compiled(path, "nd"), compiled(path, "nz")
    assert formats(cast) == EXPECTED
    assert formats(plain) == PLAIN
    assert torch.equal(run(cast), run(plain))
    with torch.no_grad():
        assert torch.equal(cast.forward(X.npu()).cpu(), run(plain))  # outside of the compiled graph
    values = dict(weights(plain))
    for name, weight in weights(cast):
        assert torch.equal(weight.dequantize().cpu(), values[name].dequantize().cpu())
    forms = {weight.fqn: weight for weight in cast.fxquant_plan.weights}
    assert forms["first.weight"].form == "int8.kn.nz/n:32832,32804"
    assert "cast to FRACTAL_NZ" in forms["first.weight"].reason
    assert "not in FRACTAL_NZ: npu_quant_matmul" in forms["one.weight"].reason


def test_other_layouts_stay_as_they_are(state) -> None:
    model = compiled(state, "nz", wide="transpose", config={"first": "int8"}, ignore=["second"])
    assert formats(model)["first.weight"] == {2}
    reasons = {weight.fqn: weight.reason for weight in model.fxquant_plan.weights}
    assert "not in FRACTAL_NZ: npu_quant_matmul of nk.t codes" in reasons["first.weight"]


@pytest.mark.parametrize("stream", [False, True])
def test_every_source_casts(state, stream: bool) -> None:
    source = ((name, value) for name, value in state.items()) if stream else state
    assert formats(compiled(source, "nz")) == EXPECTED


def test_dummy_constants_are_cast() -> None:
    assert formats(compiled(None, "nz", weights="dummy")) == EXPECTED


def test_a_reload_keeps_addresses_and_layout(state) -> None:
    model, other = compiled(state, "nz"), {name: value.flip(0) for name, value in state.items()}
    where = {name: [part.data_ptr() for part in weight.parts] for name, weight in weights(model)}
    before = run(model)
    fxquant.reload(model, other)
    assert {name: [part.data_ptr() for part in weight.parts] for name, weight in weights(model)} == where
    assert formats(model) == EXPECTED
    assert torch.equal(run(model), run(compiled(other, "nd")))
    assert not torch.equal(run(model), before)


def test_saved_constants_hold_no_layout(state, tmp_path: Path) -> None:
    model = compiled(state, "nz")
    fxquant.save_checkpoint(model, tmp_path / "saved")
    again = compiled(tmp_path / "saved", "nz", scheme=None)
    assert formats(again) == EXPECTED
    plain = compiled(tmp_path / "saved", "nd", scheme=None)
    assert formats(plain) == PLAIN
    assert torch.equal(run(again), run(model))
    assert torch.equal(run(plain), run(model))


def test_the_cast_is_in_the_predicted_peak(state, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    found = {}
    for layout in ("nd", "nz"):
        gc.collect()
        torch.npu.empty_cache()
        torch.npu.reset_peak_memory_stats()
        base = torch.npu.memory_allocated()
        model = compiled(path, layout, load_workers=1)
        peak = torch.npu.max_memory_allocated() - base
        report = fxquant.report(model)
        predicted = report.plan.predicted_peak["npu"]
        assert report.measured_peak["npu"] <= predicted
        assert abs(peak - predicted) <= 0.03 * predicted + MIB
        found[layout] = predicted
        del model, report
    part = padded_bytes((48, 32832), 1)
    assert part == 48 * 32832
    assert part - MIB <= found["nz"] - found["nd"] <= part + 3 * MIB
