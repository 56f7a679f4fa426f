"""Experts planned and lowered for an NPU, without one: npu_grouped_matmul, and what it does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn

import fxquant
from fxquant.errors import RefusedError

A2, A3, P310 = "Ascend910B2,cann=9.0", "Ascend910_9391,cann=9.0", "Ascend310P3,cann=9.0"


class Experts(nn.Module):
    """Groups of rows, or single experts."""

    def __init__(self, shape: tuple[int, ...], *, single: bool = False) -> None:
        super().__init__()
        self.single = single
        self.w = nn.Parameter(torch.empty(shape, device="meta", dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        if self.single:
            return F.linear(x, self.w[1])
        return torch._grouped_mm(x, self.w.transpose(-2, -1), ends)


def inputs(k: int, experts: int = 2) -> tuple[Tensor, Tensor]:
    return torch.zeros(4, k, dtype=torch.bfloat16), torch.zeros(experts, dtype=torch.int32)


def plan(model: nn.Module, k: int = 32, **options: Any) -> fxquant.Plan:
    given = {"scheme": "int8", "backend": "npu", "target": A2, **options}
    return fxquant.plan(model, example_inputs=inputs(k, len(model.get_parameter("w"))), **given)


class TestGolden(TestCase):
    def test_grouped_matmul(self) -> None:
        low = fxquant.lower(
            Experts((2, 16, 32)),
            example_inputs=inputs(32),
            scheme="int8",
            backend="npu",
            target=A2,
            dynamic=False,
        )
        self.assertExpectedInline(
            low.dump().partition("\ntail:\n")[2],
            """\
p_w_codes : int8[2, 16, 32]
p_w_scale : float32[2, 16, 1]
%2 = aten.squeeze.dim(p_w_scale, -1) : float32[2, 16]
%3 = aten.to.dtype(%2, bfloat16) : bfloat16[2, 16]
%4 = aten.transpose.int(p_w_codes, 1, 2) : int8[2, 32, 16]
return [%3, %4]
run:
to_dtype : bfloat16[2, 16]
transpose_int : int8[2, 32, 16]
x : bfloat16[4, 32]
ends : int32[2]
%4 = npu.npu_dynamic_quant(x) : (int8[4, 32], float32[4])
%5 = getitem(%4, 0) : int8[4, 32]
%6 = getitem(%4, 1) : float32[4]
%7 = aten.unsqueeze(%6, -1) : float32[4, 1]
%8 = aten.reshape(%7, [-1]) : float32[4]
%9 = aten.to.dtype(ends, int64) : int64[2]
%10 = npu.npu_grouped_matmul([%5], [transpose_int], scale=[to_dtype], per_token_scale=[%8], group_list=%9, split_item=3, group_type=0, group_list_type=0, output_dtype=15) : (bfloat16[4, 16])
%11 = getitem(%10, 0) : bfloat16[4, 16]
return [%11]""",  # noqa: E501
        )


def test_plan() -> None:
    made = plan(Experts((2, 16, 32)), strict=True)
    assert made.weight("w").form == "int8"
    assert made.kernels["fxquant::grouped_scaled_mm"]["op"] == "npu::npu_grouped_matmul"


@pytest.mark.parametrize(
    ("shape", "single", "options", "reason"),
    [
        ((2, 16, 65536), False, {}, "takes K <= 65535"),
        ((2, 16, 32), True, {}, "single experts"),
        ((1025, 16, 32), False, {}, "takes E <= 1024, got E = 1025"),
        ((2, 16, 32), False, {"target": P310}, "documented for A2 alone"),
        ((2, 16, 32), False, {"target": A3}, "documented for A2 alone"),
        ((2, 16, 32), False, {"scheme": "int8_static"}, "one scale for all inputs of a layer"),
        (
            (2, 16, 32),
            False,
            {"config": {"w": {"scheme": "int8_static", "act_scale": 0.1}}},
            "give them a scheme with dynamic activations",
        ),
        ((2, 16, 32), False, {"scheme": "fp8"}, "needs 950"),
        ((2, 16, 32), False, {"scheme": "int4_g32"}, "take int8 and int8_weight_only, not int4_g32"),
    ],
)
def test_refusals(shape: tuple[int, ...], single: bool, options: dict[str, Any], reason: str) -> None:
    """Seen when planning: in the plan, and under ``strict`` as an error that names the weight."""
    model = Experts(shape, single=single)
    made = plan(model, shape[2], **options)
    assert not made.quantized
    assert reason in made.weight("w").reason
    with pytest.raises(RefusedError, match=f"w: .*{reason}"):
        plan(model, shape[2], **options, strict=True)


def test_weight_only() -> None:
    made = plan(Experts((2, 16, 32)), scheme="int8_weight_only", strict=True)
    assert made.kernels["fxquant::grouped_weight_only_mm"]["op"] == "npu::npu_grouped_matmul"


def test_most_experts() -> None:
    assert plan(Experts((1024, 16, 32)), strict=True).weight("w").form == "int8"


def test_what_is_not_as_asked_is_told() -> None:
    model = Experts((2, 16, 32))
    assert plan(model).weight("w").reason == "default scheme, experts apart"
    assert "not in FRACTAL_NZ" in plan(model, weight_format="nz").weight("w").reason


class ByIndex(nn.Module):
    """An expert for each row, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(2, 16, 32, device="meta"))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm(self.w[ids], x.unsqueeze(-1)).squeeze(-1)


def test_float32_is_computed_in_bfloat16() -> None:
    made = fxquant.plan(
        ByIndex(),
        example_inputs=(torch.zeros(4, 32), torch.zeros(4, dtype=torch.int64)),
        scheme="int8",
        backend="npu",
        target=A2,
    )
    assert "computed in bfloat16" in made.weight("w").reason


def test_no_rows() -> None:
    """The NPU's op takes at least one; a graph for none gives none."""
    given = (torch.zeros(0, 32, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32))
    low = fxquant.lower(
        Experts((2, 16, 32)), example_inputs=given, scheme="int8", backend="npu", target=A2, dynamic=False
    )
    text = low.dump()
    assert "aten.new_zeros" in text
    assert "npu_grouped_matmul" not in text


def test_stored_experts_are_refused_too(tmp_path: Path) -> None:
    """Constants that were saved on the CPU, of which an NPU would need another layout."""
    x, ends = inputs(32)
    model = Experts((2, 16, 32), single=True)
    state = {"w": torch.randn(2, 16, 32, dtype=torch.bfloat16)}
    model = fxquant.compile(model, state, scheme="int8", example_inputs=(x, ends))
    fxquant.save_checkpoint(model, tmp_path / "saved")
    with pytest.raises(RefusedError, match=r"w is stored as int8.*single experts"):
        fxquant.plan(
            Experts((2, 16, 32), single=True),
            tmp_path / "saved",
            example_inputs=(x, ends),
            backend="npu",
            target=A2,
        )
