"""Experts on the simulated NPU: groups of rows, npu_grouped_matmul, equal to the arithmetic by hand."""

from __future__ import annotations

import gc

import pytest
import torch
from safetensors.torch import load_file, save_file
from scheme_numbers import BF16, HALF, ULP, reference, spec_for, weight_only
from torch import Tensor, nn
from transformers.integrations import moe

import fxquant
from fxquant.scheme import find_scheme

assert moe  # it registers the op
A2, A3, A950 = "Ascend910B2", "Ascend910_9391", "Ascend950PR_9579"
E, N, K = 3, 32, 128
MIB = 1 << 20
IDS = torch.tensor([2, 0, 0, 2, 1, 2])


class Experts(nn.Module):
    def __init__(self, *, turned: bool, shape: tuple[int, int, int] | None = None) -> None:
        super().__init__()
        self.turned = turned
        experts, n, k = shape or (E, N, K)
        self.w = nn.Parameter(torch.empty((experts, k, n) if turned else (experts, n, k)))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        order = ids.argsort(stable=True)
        counts = (ids[:, None] == torch.arange(len(self.w), device=ids.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        w = self.w if self.turned else self.w.transpose(-2, -1)
        # Torch's own op traces for bfloat16 alone, and transformers has one for the other dtypes.
        own = x.dtype == torch.bfloat16
        product = torch._grouped_mm if own else torch.ops.transformers.grouped_mm_fallback
        out = product(x[order], w, ends)
        return out[order.argsort()]


def by_hand(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of each row of each expert; their scales in bfloat16 for a bfloat16 result."""
    scale = rows.float().abs().amax(-1, keepdim=True) / 127
    codes = (rows.float() / scale).round().double()
    token = x.float().abs().amax(-1, keepdim=True) / 127
    x_codes = (x.float() / token).round().double()
    scale = scale.bfloat16().float() if dtype == torch.bfloat16 else scale
    out = torch.stack([x_codes[i] @ codes[e].t() for i, e in enumerate(IDS)]).float()
    return (out * scale[IDS].squeeze(-1) * token).to(dtype)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_groups_of_rows(npu, dtype, turned):
    x, rows = torch.randn(len(IDS), K).to(dtype), torch.randn(E, N, K).to(dtype)
    with fxquant.meta_init():
        model = Experts(turned=turned).to(dtype).eval()
    state = {"w": rows.mT.contiguous() if turned else rows}
    model = fxquant.compile(
        model, state, backend="npu", scheme="int8", example_inputs=(x, IDS), dynamic=False, strict=True
    )
    with torch.no_grad():
        got = model(x.to(npu), IDS.to(npu))
    report = fxquant.report(model)
    assert (report.rewritten, report.fallbacks, report.unnormalized) == (1, 0, ())
    assert torch.equal(got.cpu(), by_hand(x, rows, dtype))


def compiled(
    source: object, x: Tensor, scheme: str, chip: str = A2, model: nn.Module | None = None, **options: object
) -> nn.Module:
    with fxquant.meta_init():
        model = model or Experts(turned=False).to(x.dtype).eval()
    given = {"scheme": scheme, "example_inputs": (x, IDS), "dynamic": False, "strict": True, **options}
    return fxquant.compile(model, source, backend="npu", target=f"{chip},cann=9.0", progress=False, **given)


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x.npu(), IDS.npu()).cpu()


def of_each(x: Tensor, rows: Tensor, scheme: str) -> Tensor:
    """Each row with the weight of its expert."""
    spec = find_scheme(scheme)
    assert spec.weight is not None
    if spec.act is None:
        return torch.cat([weight_only(x[i : i + 1], rows[e], None, spec.weight) for i, e in enumerate(IDS)])
    return torch.cat([reference(scheme, x[i : i + 1], rows[e]) for i, e in enumerate(IDS)])


WEIGHT_ONLY = [
    *((A2, "int8_weight_only", dtype) for dtype in (HALF, BF16)),
    (A2, "int4_g32", BF16), (A2, "int4_g32", HALF), (A3, "int4_g64", BF16), (A2, "int4_g128", HALF),
    (A2, "int4_channel", BF16), (A3, "int4_channel_asym", HALF), (A950, "int8_weight_only", BF16),
    (A950, "int4_g32_asym", BF16), (A950, "int4_g32(refine=clip)", HALF),
]  # fmt: skip


@pytest.mark.parametrize(("chip", "scheme", "dtype"), WEIGHT_ONLY, ids=str)
def test_weight_only(simulate, npu, chip, scheme, dtype):
    """Float rows: values of the codes with scales and zero points of the rows' dtype."""
    simulate(chip)
    x, rows = torch.randn(len(IDS), K).to(dtype), torch.randn(E, N, K).to(dtype)
    model = compiled({"w": rows}, x, scheme, chip)
    assert model.fxquant_plan.kernels["fxquant::grouped_weight_only_mm"]["op"] == "npu::npu_grouped_matmul"
    assert torch.equal(run(model, x), of_each(x, rows, scheme))
    report = fxquant.report(model)
    assert (report.rewritten, report.fallbacks, report.unnormalized) == (1, 0, ())


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8_block", "mxfp8", "mxfp4"])
def test_quantized_rows_on_950(simulate, npu, scheme, dtype):
    simulate(A950)
    x, rows = torch.randn(len(IDS), K).to(dtype), torch.randn(E, N, K).to(dtype)
    model = compiled({"w": rows}, x, scheme, A950)
    want = of_each(x, rows, scheme)
    torch.testing.assert_close(run(model, x), want, rtol=ULP[dtype], atol=ULP[dtype] / 8)
    assert fxquant.report(model).fallbacks == 0


@pytest.mark.parametrize("scheme", ["int4_g32", "int4_channel_asym"])
def test_saved_and_loaded(simulate, npu, tmp_path, scheme):
    """Constants as the op takes them go to files as the scheme has them, and come back; a reload too."""
    simulate(A2)
    x, rows = torch.randn(len(IDS), K).bfloat16(), torch.randn(2, E, N, K).bfloat16()
    model = compiled({"w": rows[0]}, x, scheme)
    want = run(model, x)
    fxquant.save_checkpoint(model, tmp_path / "saved")
    again = compiled(tmp_path / "saved", x, scheme)
    assert torch.equal(run(again, x), want)
    codes = load_file(next((tmp_path / "saved").glob("*.safetensors")))["w.codes"]
    spec = str(spec_for(find_scheme(scheme).weight, rows))
    assert torch.equal(codes[1], torch.ops.fxquant.quantize_weight(rows[0, 1], spec)[0])
    fxquant.reload(again, {"w": rows[1]})
    assert torch.equal(run(again, x), of_each(x, rows[1], scheme))


class Halves(Experts):
    """Products with each half of an expert's rows, of the same activations."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        order = ids.argsort(stable=True)
        ends = (ids[:, None] <= torch.arange(E, device=ids.device)).sum(0).to(torch.int32)
        first, second = self.w.transpose(-2, -1).chunk(2, -1)
        out = torch._grouped_mm(x[order], first, ends) - torch._grouped_mm(x[order], second, ends)
        return out[order.argsort()]


@pytest.mark.parametrize("scheme", ["int8", "int8_weight_only", "int4_g32", "int4_channel_asym"])
def test_cuts_of_experts(simulate, npu, scheme):
    simulate(A2)
    x, rows = torch.randn(len(IDS), K).bfloat16(), torch.randn(E, N, K).bfloat16()
    with fxquant.meta_init():
        model = Halves(turned=False).to(BF16).eval()
    model = compiled({"w": rows}, x, scheme, model=model)
    whole = by_hand(x, rows, BF16) if scheme == "int8" else of_each(x, rows, scheme)
    first, second = whole.chunk(2, -1)
    assert torch.equal(run(model, x), first - second)
    assert fxquant.report(model).rewritten == 2


def test_outside_of_graphs(simulate, npu):
    """Calls of the weight itself run the reference, on constants as the scheme has them."""
    simulate(A2)
    x, rows = torch.randn(len(IDS), K).bfloat16(), torch.randn(E, N, K).bfloat16()
    model = compiled({"w": rows}, x, "int4_g32")
    with torch.no_grad():
        got = model.forward(x.npu(), IDS.npu()).cpu()
    torch.testing.assert_close(got, of_each(x, rows, "int4_g32"), rtol=2**-6, atol=2**-3)


@pytest.mark.parametrize("scheme", ["int4_g32", "int8_weight_only"])
def test_the_peak_is_predicted(simulate, npu, tmp_path, scheme):
    """Scales of all experts are cast once the last is there: they lie there twice."""
    simulate(A2)

    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Experts(turned=False, shape=(16, 512, 1024)) for _ in range(4))

        def forward(self, x: Tensor, ids: Tensor) -> list[Tensor]:
            return [layer(x, ids) for layer in self.layers]

    x = torch.zeros(len(IDS), 1024, dtype=BF16)
    rows = {f"layers.{i}.w": torch.randn(16, 512, 1024, dtype=BF16) for i in range(4)}
    save_file(rows, tmp_path / "model.safetensors")
    with fxquant.meta_init():
        model = Big().to(BF16).eval()
    gc.collect()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    base = torch.npu.memory_allocated()
    given = {"scheme": scheme, "example_inputs": (x, IDS), "dynamic": False, "load_workers": 1}
    model = fxquant.compile(model, tmp_path / "model.safetensors", backend="npu", progress=False, **given)
    peak = torch.npu.max_memory_allocated() - base
    report = fxquant.report(model)
    predicted = report.plan.predicted_peak["npu"]
    assert len(report.plan.quantized) == 4
    assert report.measured_peak["npu"] <= predicted
    assert abs(peak - predicted) <= 0.03 * predicted + MIB
