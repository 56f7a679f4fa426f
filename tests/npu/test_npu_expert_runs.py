"""Experts on the simulated NPU: groups of rows, npu_grouped_matmul, equal to the arithmetic by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import moe

import fxquant

assert moe  # it registers the op
E, N, K = 3, 32, 64
IDS = torch.tensor([2, 0, 0, 2, 1, 2])


class Experts(nn.Module):
    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.w = nn.Parameter(torch.empty((E, K, N) if turned else (E, N, K)))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        order = ids.argsort(stable=True)
        counts = (ids[:, None] == torch.arange(E, device=ids.device)).sum(0)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weight_only(npu, dtype):
    """Float rows: values of the codes with scales of the rows' dtype."""
    x, rows = torch.randn(len(IDS), K).to(dtype), torch.randn(E, N, K).to(dtype)
    with fxquant.meta_init():
        model = Experts(turned=False).to(dtype).eval()
    given = {"scheme": "int8_weight_only", "example_inputs": (x, IDS), "dynamic": False, "strict": True}
    model = fxquant.compile(model, {"w": rows}, backend="npu", **given)
    assert model.fxquant_plan.kernels["fxquant::grouped_weight_only_mm"]["op"] == "npu::npu_grouped_matmul"
    with torch.no_grad():
        got = model(x.to(npu), IDS.to(npu)).cpu().float()
    assert fxquant.report(model).rewritten == 1
    scale = rows.float().abs().amax(-1, keepdim=True) / 127
    values = (rows.float() / scale).round() * scale.to(dtype).float()
    expected = torch.stack([values[e] @ x[i].float() for i, e in enumerate(IDS)])
    # Values and results are rounded to the dtype.
    assert (got - expected).norm() / expected.norm() < 2 * torch.finfo(dtype).eps
