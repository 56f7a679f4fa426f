"""Features together on the simulated NPU: layouts of the device with reloads, copies, files and budgets."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import fxquant
from fxquant.errors import BudgetError
from fxquant.fractal_nz import FRACTAL_NZ

BF16 = torch.bfloat16
A2 = "Ascend910B2,cann=9.0"
MIB = 1 << 20


class HostFirst(nn.Module):
    """The first weight stays in main memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a_wide = nn.Linear(64, 66000, bias=False, dtype=BF16)
        self.c = nn.Linear(64, 128, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.a_wide(x)[..., :128] + self.c(x)  # type: ignore[no-any-return]


def small() -> nn.Module:
    return nn.Linear(128, 64, dtype=BF16)


def state_of(make: Any, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(value.shape).to(value.dtype) / 8 for name, value in make().state_dict().items()}


def compiled(make: Any, source: Any, scheme: str, **options: Any) -> nn.Module:
    with fxquant.meta_init():
        model = make().eval()
    k = next(iter(model.parameters())).shape[-1]
    if scheme == "int8_static":
        options["config"] = {"*": {"scheme": scheme, "act_scale": 0.03}}
    given = {"example_inputs": (torch.zeros(2, k, dtype=BF16),), "target": A2, "progress": False, **options}
    return fxquant.compile(model, source, backend="npu", scheme=scheme, **given)


def run(model: nn.Module) -> Tensor:
    k = next(iter(model.parameters())).shape[-1]
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(5)).to(BF16)
    with torch.no_grad():
        return model(x.npu()).cpu()  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", ["int8", "int4_g32"])
def test_a_reload_with_a_host_weight_in_front(npu, scheme: str) -> None:
    """Constants are made on the device, wherever the first weight is."""
    model = compiled(HostFirst, state_of(HostFirst), scheme, wide="host")
    fxquant.reload(model, state_of(HostFirst, 7))
    fresh = compiled(HostFirst, state_of(HostFirst, 7), scheme, wide="host")
    assert torch.equal(run(model), run(fresh))


@pytest.mark.parametrize("scheme", ["int8", "int8_static"])
def test_torch_save_of_fractal_nz(npu, scheme: str) -> None:
    """Files have the values in order; what is loaded onto the device lies in blocks again."""
    model = compiled(small, state_of(small), scheme, weight_format="nz")
    expected = run(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = compiled(small, state_of(small, 9), scheme, weight_format="nz")
    loaded = torch.load(buffer, weights_only=False)
    assert torch.ops.npu.get_npu_format(loaded["weight"].parts[0]) == FRACTAL_NZ
    other.load_state_dict(loaded)
    assert torch.equal(run(other), expected)


def test_floats_of_the_cpu_into_a_static_weight(npu) -> None:
    model = compiled(small, state_of(small), "int8_static")
    model.load_state_dict(state_of(small, 9))
    assert torch.equal(run(model), run(compiled(small, state_of(small, 9), "int8_static")))


@pytest.mark.parametrize("scheme", ["int8", "int8_weight_only", "int4_g32"])
def test_the_largest_magnitude_is_reported(npu, scheme: str) -> None:
    """Also where scales are held rounded, and do not tell it exactly."""
    state = state_of(small)
    error = fxquant.report(compiled(small, state, scheme)).errors["weight"]
    assert error.maximum == pytest.approx(state["weight"].abs().max().item(), rel=2**-7)
    assert error.maximum_is_exact == (scheme == "int8")


@pytest.mark.parametrize("scheme", ["int8_weight_only", "int4_g32", "int4_g32_asym", "int4_g64(refine=clip)"])
def test_one_weight_is_made_within_the_budget(npu, tmp_path: Path, scheme: str) -> None:
    """Scales lie there twice while they are cast; with one weight nothing else is larger."""

    def make() -> nn.Module:
        return nn.Linear(1024, 8192, bias=False, dtype=BF16)

    save_file(state_of(make), tmp_path / "model.safetensors")
    with pytest.raises(BudgetError) as caught:
        compiled(make, tmp_path / "model.safetensors", scheme, device_budget=1000, load_workers=1)
    for budget in (None, caught.value.smallest):
        gc.collect()
        torch.npu.empty_cache()
        torch.npu.reset_peak_memory_stats()
        base = torch.npu.memory_allocated()
        model = compiled(make, tmp_path / "model.safetensors", scheme, device_budget=budget, load_workers=1)
        report, peak = fxquant.report(model), torch.npu.max_memory_allocated() - base
        predicted = report.plan.predicted_peak["npu"]
        assert report.measured_peak["npu"] <= predicted <= (budget or predicted)
        assert abs(peak - predicted) <= 0.03 * predicted + MIB / 2
        del model, report


def test_grouped_experts_of_transformers(npu) -> None:
    """The implementation that transformers takes by itself counts tokens with an integer histogram."""
    config = MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, vocab_size=96, torch_dtype=BF16,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = MixtralForCausalLM(config).to(BF16).eval()
    tokens = torch.randint(0, 96, (2, 7))
    with fxquant.meta_init():
        model = MixtralForCausalLM(config).to(BF16).eval()
    options = {"scheme": "int4_g32", "example_inputs": {"input_ids": tokens}, "target": A2}
    model = fxquant.compile(model, plain.state_dict(), backend="npu", progress=False, **options)
    assert "experts apart" in model.fxquant_plan.weight("model.layers.0.mlp.experts.gate_up_proj").reason
    with torch.no_grad():
        got, want = model(input_ids=tokens.npu()).logits.cpu().float(), plain(input_ids=tokens).logits.float()
    assert (got - want).norm() / want.norm() < 0.2
    assert fxquant.report(model).fallbacks == 0
