"""Golden graphs of experts: each way to use them on the smallest model that shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn

import fxquant


class Holder(nn.Module):
    """A model that is one expression over experts."""

    def __init__(self, run: Callable[..., Tensor], shape: tuple[int, ...] = (2, 8, 16)) -> None:
        super().__init__()
        self.run = run
        self.w = nn.Parameter(torch.empty(shape, device="meta", dtype=torch.bfloat16))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.run(self.w, x, ids)


OPS = (
    "scaled_mm",
    "block_mm",
    "weight_only_mm",
    "grouped_scaled_mm",
    "grouped_block_mm",
    "grouped_weight_only_mm",
)
TARGET = fxquant.Target(
    name="cpu",
    device_type="cpu",
    kernels={f"fxquant::{op}": fxquant.Kernel(op=f"fxquant::{op}", reason="golden") for op in OPS},
)
X, IDS = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
OFFSETS = torch.zeros(2, dtype=torch.int32)


def run_graph(model: nn.Module, x: Tensor, ids: Tensor, **options: object) -> str:
    given = {"scheme": "int8", "target": TARGET, "dynamic": False, **options}
    low = fxquant.lower(model, example_inputs=(x, ids), **given)
    return low.dump().partition("\nrun:\n")[2]


class TestGoldens(TestCase):
    def test_grouped_static(self) -> None:
        model = Holder(lambda w, x, ends: torch._grouped_mm(x, w.transpose(-2, -1), ends))
        low = fxquant.lower(model, example_inputs=(X, OFFSETS), scheme="int8", target=TARGET, dynamic=False)
        self.assertExpectedInline(
            low.dump(),
            """\
load:
template 0:
  r0 : bfloat16[8, 16]
  %1 = aten.unsqueeze(r0, 0) : bfloat16[1, 8, 16]
  %2 = aten.select.int(%1, 0, 0) : bfloat16[8, 16]
  %3 = fxquant.quantize_weight(%2, int8[1,*]) : (int8[8, 16], float32[8, 1])
  %4 = getitem(%3, 0) : int8[8, 16]
  %5 = getitem(%3, 1) : float32[8, 1]
  return [%4, %5]
w[0].codes, w[0].scale = template 0(w[0])
w[1].codes, w[1].scale = template 0(w[1])
tail:
p_w_codes : int8[2, 8, 16]
p_w_scale : float32[2, 8, 1]
return [p_w_codes, p_w_scale]
run:
p_w_codes : int8[2, 8, 16]
p_w_scale : float32[2, 8, 1]
x : bfloat16[4, 16]
ids : int32[2]
%4 = fxquant.quantize_act(x, int8[1,*]dyn) : (int8[4, 16], float32[4, 1])
%5 = getitem(%4, 0) : int8[4, 16]
%6 = getitem(%4, 1) : float32[4, 1]
%7 = fxquant.grouped_scaled_mm(%5, p_w_codes, %6, p_w_scale, ids, bfloat16) : bfloat16[4, 8]
return [%7]""",
        )

    def test_grouped_dynamic_weight_only(self) -> None:
        model = Holder(lambda w, x, ends: torch._grouped_mm(x, w, ends), (2, 16, 8))
        self.assertExpectedInline(
            run_graph(model, X, OFFSETS, dynamic=True, scheme="int8_weight_only"),
            """\
p_w_codes : int8[2, 8, 16]
p_w_scale : float32[2, 8, 1]
x : bfloat16[s0, 16]
ids : int32[2]
%4 = fxquant.grouped_weight_only_mm(x, [p_w_codes, p_w_scale], int8[1,*], ids) : bfloat16[s0, 8]
return [%4]""",
        )

    def test_batched(self) -> None:
        model = Holder(lambda w, x, ids: torch.bmm(w[ids], x.unsqueeze(-1)).squeeze(-1))
        self.assertExpectedInline(
            run_graph(model, X, IDS),
            """\
p_w_codes : int8[2, 8, 16]
p_w_scale : float32[2, 8, 1]
x : bfloat16[4, 16]
ids : int64[4]
%4 = aten.arange(2, device=cpu, dtype=int64) : int64[2]
%5 = aten.index.Tensor(%4, [ids]) : int64[4]
%6 = aten.sort(%5) : (int64[4], int64[4])
%7 = getitem(%6, 0) : int64[4]
%8 = getitem(%6, 1) : int64[4]
%9 = aten.argsort(%8) : int64[4]
%10 = aten.searchsorted.Tensor(%7, %4, out_int32=True, right=True) : int32[2]
%11 = aten.unsqueeze(x, -1) : bfloat16[4, 16, 1]
%12 = aten.squeeze.dim(%11, 2) : bfloat16[4, 16]
%13 = aten.index.Tensor(%12, [%8]) : bfloat16[4, 16]
%14 = fxquant.quantize_act(%13, int8[1,*]dyn) : (int8[4, 16], float32[4, 1])
%15 = getitem(%14, 0) : int8[4, 16]
%16 = getitem(%14, 1) : float32[4, 1]
%17 = fxquant.grouped_scaled_mm(%15, p_w_codes, %16, p_w_scale, %10, bfloat16) : bfloat16[4, 8]
%18 = aten.index.Tensor(%17, [%9]) : bfloat16[4, 8]
%19 = aten.unsqueeze(%18, 2) : bfloat16[4, 8, 1]
%20 = aten.squeeze.dim(%19, -1) : bfloat16[4, 8]
return [%20]""",
        )

    def test_batched_turned(self) -> None:
        model = Holder(lambda w, x, ids: torch.bmm(x.unsqueeze(1), w[ids]).squeeze(1), (2, 16, 8))
        self.assertExpectedInline(
            run_graph(model, X, IDS, scheme="int4_g32"),
            """\
p_w_codes : uint8[2, 8, 8]
p_w_scale : bfloat16[2, 8, 1]
x : bfloat16[4, 16]
ids : int64[4]
%4 = aten.arange(2, device=cpu, dtype=int64) : int64[2]
%5 = aten.index.Tensor(%4, [ids]) : int64[4]
%6 = aten.sort(%5) : (int64[4], int64[4])
%7 = getitem(%6, 0) : int64[4]
%8 = getitem(%6, 1) : int64[4]
%9 = aten.argsort(%8) : int64[4]
%10 = aten.searchsorted.Tensor(%7, %4, out_int32=True, right=True) : int32[2]
%11 = aten.unsqueeze(x, 1) : bfloat16[4, 1, 16]
%12 = aten.squeeze.dim(%11, 1) : bfloat16[4, 16]
%13 = aten.index.Tensor(%12, [%8]) : bfloat16[4, 16]
%14 = fxquant.grouped_weight_only_mm(%13, [p_w_codes, p_w_scale], int4[1,32]bf16, %10) : bfloat16[4, 8]
%15 = aten.index.Tensor(%14, [%9]) : bfloat16[4, 8]
%16 = aten.unsqueeze(%15, 1) : bfloat16[4, 1, 8]
%17 = aten.squeeze.dim(%16, 1) : bfloat16[4, 8]
return [%17]""",
        )

    def test_one_by_one(self) -> None:
        model = Holder(lambda w, x, _: F.linear(x, w[1]) + F.linear(x, w[-2]))
        self.assertExpectedInline(
            run_graph(model, X, IDS),
            """\
select_int : int8[8, 16]
select_int_1 : float32[8, 1]
select_int_2 : int8[8, 16]
select_int_3 : float32[8, 1]
x : bfloat16[4, 16]
ids : int64[4]
%6 = fxquant.quantize_act(x, int8[1,*]dyn) : (int8[4, 16], float32[4, 1])
%7 = getitem(%6, 0) : int8[4, 16]
%8 = getitem(%6, 1) : float32[4, 1]
%9 = fxquant.scaled_mm(%7, select_int, %8, select_int_1, None, bfloat16) : bfloat16[4, 8]
%10 = getitem(%6, 0) : int8[4, 16]
%11 = getitem(%6, 1) : float32[4, 1]
%12 = fxquant.scaled_mm(%10, select_int_2, %11, select_int_3, None, bfloat16) : bfloat16[4, 8]
%13 = aten.add.Tensor(%9, %12) : bfloat16[4, 8]
return [%13]""",
        )

    def test_all_with_as_many_rows(self) -> None:
        model = Holder(lambda w, x, _: torch.bmm(x.view(2, 2, 16), w.transpose(1, 2)))
        self.assertExpectedInline(
            run_graph(model, X, IDS),
            """\
p_w_codes : int8[2, 8, 16]
p_w_scale : float32[2, 8, 1]
x : bfloat16[4, 16]
ids : int64[4]
%4 = aten.view(x, [2, 2, 16]) : bfloat16[2, 2, 16]
%5 = aten.sym_size.int(%4, 1) : int
%6 = aten.reshape(%4, [-1, 16]) : bfloat16[4, 16]
%7 = aten.arange.start(1, 3, device=cpu) : int64[2]
%8 = aten.mul.Tensor(%7, %5) : int64[2]
%9 = fxquant.quantize_act(%6, int8[1,*]dyn) : (int8[4, 16], float32[4, 1])
%10 = getitem(%9, 0) : int8[4, 16]
%11 = getitem(%9, 1) : float32[4, 1]
%12 = fxquant.grouped_scaled_mm(%10, p_w_codes, %11, p_w_scale, %8, bfloat16) : bfloat16[4, 8]
%13 = aten.view(%12, [2, %5, 8]) : bfloat16[2, 2, 8]
return [%13]""",
        )


REFUSED: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], str]] = {
    "added": (lambda w, x, _: x @ (w + 1)[0].t(), (2, 8, 16), "used by aten.add.Tensor"),
    "several rows": (
        lambda w, x, ids: torch.bmm(w[ids], torch.stack([x, x], -1)),
        (2, 8, 16),
        "used by aten.bmm with several rows for each index",
    ),
    "both axes": (
        lambda w, x, _: torch.bmm(torch.bmm(x.view(2, 2, 16), w), w.mT),
        (2, 16, 16),
        "contracted along both axes",
    ),
    "selected along N": (lambda w, x, _: x @ w[:, 1].t(), (2, 8, 16), "used by aten.select.int"),
    "some of the experts": (lambda w, x, _: F.linear(x, w[1:][0]), (3, 8, 16), "used by aten.slice.Tensor"),
    "mask": (lambda w, x, ids: x @ w[ids.bool()[:2]][0].t(), (2, 8, 16), "used by aten.index.Tensor"),
    "convolution": (lambda w, x, _: F.conv1d(x.view(1, 8, 8), w), (2, 8, 3), "convolution: stays float"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_have_their_reason(case: str) -> None:
    run, shape, reason = REFUSED[case]
    plan = fxquant.plan(Holder(run, shape), scheme="int8", example_inputs=(X, IDS))
    assert reason in plan.weight("w").reason
    assert not plan.quantized


def test_a_target_without_grouped_products_refuses() -> None:
    kernels = {"fxquant::scaled_mm": fxquant.Kernel(op="fxquant::scaled_mm", reason="test")}
    target = fxquant.Target(name="cpu", device_type="cpu", kernels=kernels)
    model = Holder(lambda w, x, ends: torch._grouped_mm(x, w.mT, ends))
    plan = fxquant.plan(model, scheme="int8", example_inputs=(X, OFFSETS), target=target)
    assert plan.weight("w").reason == "target cpu has no fxquant::grouped_scaled_mm"
    with pytest.raises(fxquant.errors.RefusedError, match="grouped_scaled_mm"):
        fxquant.plan(model, scheme="int8", example_inputs=(X, OFFSETS), target=target, strict=True)


def test_static_activations_are_refused() -> None:
    model = Holder(lambda w, x, ends: torch._grouped_mm(x, w.mT, ends))
    config = {"w": {"scheme": "int8_static", "act_scale": 0.1}}
    plan = fxquant.plan(model, scheme="int8", config=config, example_inputs=(X, OFFSETS))
    assert "one scale for all inputs of a layer, experts need one each" in plan.weight("w").reason
