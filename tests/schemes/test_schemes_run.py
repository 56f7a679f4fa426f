"""Every scheme through the whole product: numbers, tiles, sources, and what happens to a model later."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fxquant
from fxquant import numerics
from fxquant.materialize import tiling
from tests.materialize.faulty_files import constants, same
from tests.schemes.models import (
    ALL,
    LIMITS,
    NAMES,
    Net,
    X,
    compiled,
    error,
    find_scheme,
    options_of,
    reference,
    run,
    state,
    weights,
)
from tests.specs import spec_of


@pytest.fixture(scope="module", params=ALL)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(scheme: str) -> nn.Module:
    return compiled(scheme)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """The float weights that the codes of a model stand for."""
    held = weights(model)
    return {name: (held[name].dequantize() if name in held else t) for name, t in state().items()}


def test_outputs_are_near_the_floats(scheme: str, model: nn.Module) -> None:
    spec = find_scheme(scheme).weight
    assert spec is not None
    assert error(run(model), reference(state())) < LIMITS[spec.codes]
    report = fxquant.report(model)
    # The fused one is used twice; blocks of 128 rows do not end where it is cut, so it stays float.
    assert (report.quantized, report.rewritten) == ((3, 3) if spec.block[0] == 128 else (4, 5))
    assert report.fallbacks == 0


def test_single_layers_outside_of_graphs(model: nn.Module) -> None:
    x = torch.randn(3, 160)
    with torch.no_grad():
        alone = model.first(x)
        want = x @ model.first.weight.dequantize().t() + model.first.bias
    assert error(alone, want) < 0.35


def test_weight_only_is_a_float_model_of_the_values(scheme: str, model: nn.Module) -> None:
    if find_scheme(scheme).act is None:
        torch.testing.assert_close(run(model), reference(values_of(model)), rtol=1e-4, atol=1e-5)
    else:  # activations are rounded too
        assert 1e-4 < error(run(model), reference(values_of(model))) < 0.35


def test_constants_are_those_of_the_numerics(scheme: str, model: nn.Module) -> None:
    spec = find_scheme(scheme).weight
    assert spec is not None
    for name, weight in weights(model).items():
        value = state()[name]
        rows = value.t() if weight.form.transposed else value
        made = numerics.quantize_weight(rows.contiguous(), spec)
        assert all(numerics.same_values(a, b) for a, b in zip(weight.whole, made, strict=True)), name


@pytest.mark.parametrize("hold", [0, tiling.HOLD_BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_files_give_the_same(
    scheme: str, hold: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tiles, two workers, with and without second passes."""
    monkeypatch.setattr(tiling, "HOLD_BYTES", hold)
    save_file(state(dtype), tmp_path / "model.safetensors")
    by_tiles = compiled(scheme, tmp_path, dtype, read_bytes=4096, load_workers=2)
    assert same(by_tiles, compiled(scheme, dtype=dtype))
    report = fxquant.report(by_tiles)
    assert report.measured_peak["cpu"] <= report.plan.predicted_peak["cpu"]


def test_life_of_a_model(scheme: str, model: nn.Module, tmp_path: Path) -> None:
    want = run(model)
    fxquant.save_checkpoint(model, tmp_path / "saved")
    stored = compiled("int8", tmp_path / "saved", scheme=None, config=None)
    assert same(stored, model)
    assert torch.equal(run(stored), want)

    copied = copy.deepcopy(model)
    assert torch.equal(run(copied), want)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = compiled(scheme, state(seed=7))
    assert not torch.equal(run(other), want)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(run(other), want)

    fxquant.reload(other, state(seed=7))
    fresh = compiled(scheme, state(seed=7))
    assert same(other, fresh)
    other.load_state_dict(state())  # floats are quantized
    assert same(other, model)


def test_made_up_constants_have_the_planned_sizes(scheme: str, model: nn.Module) -> None:
    with fxquant.meta_init():
        dummy = Net().eval()
    dummy = fxquant.compile(dummy, None, weights="dummy", example_inputs=(X,), **options_of(scheme))
    sizes = [(part.shape, part.dtype) for part in constants(model)]
    assert [(part.shape, part.dtype) for part in constants(dummy)] == sizes
    assert run(dummy).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """Scales of int4 are in the weight's dtype, those of the others as in float32."""
    spec = spec_of(name, dtype)
    model = compiled(name, dtype=dtype)
    out = run(model, X.to(dtype))
    assert out.dtype == dtype
    assert error(out, reference(state())) < LIMITS[spec.codes] + 0.01
    for fqn, weight in weights(model).items():
        value = state(dtype)[fqn]
        rows = value.t() if weight.form.transposed else value
        made = numerics.quantize_weight(rows.contiguous(), spec)
        assert (made[1].dtype == dtype) == (spec.codes == "int4")
        assert all(numerics.same_values(a, b) for a, b in zip(weight.whole, made, strict=True)), fqn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int4_g32", "int4_g64_asym(refine=hqq)"])
def test_half_scales_stay_when_a_model_is_cast(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = compiled(name, dtype=dtype)
    before = values_of(model)
    model = model.float()
    for fqn, weight in weights(model).items():
        assert (weight.dtype, weight.scale.dtype) == (torch.float32, dtype)
        assert torch.equal(weight.dequantize().to(dtype), before[fqn])
    fxquant.save_checkpoint(model, tmp_path / "saved")
    stored = compiled("int8", tmp_path / "saved", scheme=None, config=None)
    assert same(stored, model)
    assert torch.equal(run(stored), run(model))
