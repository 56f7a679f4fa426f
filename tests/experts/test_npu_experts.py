"""Experts planned and lowered for an NPU, without one: npu_grouped_matmul, and what it does not take."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn

import fxquant
from fxquant.errors import RefusedError
from fxquant.graph import count_calls, dump
from fxquant.targets.support import SHOWN, support_table

A2, A3, P310 = "Ascend910B2,cann=9.0", "Ascend910_9391,cann=9.0", "Ascend310P3,cann=9.0"
A950 = "Ascend950PR_9579,cann=9.1"
GOLDEN = Path(__file__).parent / "npu_schemes.txt"


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


def tail_and_run(scheme: str, target: str, k: int = 32) -> str:
    low = fxquant.lower(
        Experts((2, 16, k)),
        example_inputs=inputs(k),
        scheme=scheme,
        backend="npu",
        target=target,
        dynamic=False,
    )
    return low.dump().partition("\ntail:\n")[2]


class TestGolden(TestCase):
    def test_int4(self) -> None:
        """Held as the op takes them: only views, and the zeros that it wants beside symmetric codes."""
        self.assertExpectedInline(
            tail_and_run("int4_g32", A2, 64),
            """\
p_w_codes : uint8[2, 16, 32]
p_w_scale : bfloat16[2, 16, 2]
%2 = aten.view.dtype(p_w_codes, int32) : int32[2, 16, 8]
%3 = aten.transpose.int(p_w_scale, 1, 2) : bfloat16[2, 2, 16]
%4 = aten.new_zeros(%3, [2, 2, 16]) : bfloat16[2, 2, 16]
%5 = aten.transpose.int(%2, 1, 2) : int32[2, 8, 16]
return [%3, %4, %5]
run:
transpose_int : bfloat16[2, 2, 16]
new_zeros_default : bfloat16[2, 2, 16]
transpose_int_1 : int32[2, 8, 16]
x : bfloat16[4, 64]
ends : int32[2]
%5 = aten.to.dtype(ends, int64) : int64[2]
%6 = npu.npu_grouped_matmul([x], [transpose_int_1], antiquant_scale=[transpose_int], antiquant_offset=[new_zeros_default], group_list=%5, split_item=3, group_type=0, group_list_type=0, output_dtype=15) : (bfloat16[4, 16])
%7 = getitem(%6, 0) : bfloat16[4, 16]
return [%7]""",  # noqa: E501
        )

    def test_int4_with_zero_points(self) -> None:
        self.assertExpectedInline(
            tail_and_run("int4_channel_asym", A2),
            """\
p_w_codes : uint8[2, 16, 16]
p_w_scale : bfloat16[2, 16, 1]
p_w_zero : bfloat16[2, 16, 1]
%3 = aten.view.dtype(p_w_codes, int32) : int32[2, 16, 4]
%4 = aten.squeeze.dim(p_w_scale, -1) : bfloat16[2, 16]
%5 = aten.squeeze.dim(p_w_zero, -1) : bfloat16[2, 16]
%6 = aten.transpose.int(%3, 1, 2) : int32[2, 4, 16]
return [%4, %5, %6]
run:
squeeze_dim : bfloat16[2, 16]
squeeze_dim_1 : bfloat16[2, 16]
transpose_int : int32[2, 4, 16]
x : bfloat16[4, 32]
ends : int32[2]
%5 = aten.to.dtype(ends, int64) : int64[2]
%6 = npu.npu_grouped_matmul([x], [transpose_int], antiquant_scale=[squeeze_dim], antiquant_offset=[squeeze_dim_1], group_list=%5, split_item=3, group_type=0, group_list_type=0, output_dtype=15) : (bfloat16[4, 16])
%7 = getitem(%6, 0) : bfloat16[4, 16]
return [%7]""",  # noqa: E501
        )

    def test_int4_on_950(self) -> None:
        self.assertExpectedInline(
            tail_and_run("int4_g32_asym", A950, 64),
            """\
p_w_codes : uint8[2, 16, 32]
p_w_scale : bfloat16[2, 16, 2]
p_w_zero : bfloat16[2, 16, 2]
%3 = aten.view.dtype(p_w_codes, int32) : int32[2, 16, 8]
%4 = aten.transpose.int(p_w_scale, 1, 2) : bfloat16[2, 2, 16]
%5 = aten.transpose.int(p_w_zero, 1, 2) : bfloat16[2, 2, 16]
%6 = aten.transpose.int(%3, 1, 2) : int32[2, 8, 16]
return [%4, %5, %6]
run:
transpose_int : bfloat16[2, 2, 16]
transpose_int_1 : bfloat16[2, 2, 16]
transpose_int_2 : int32[2, 8, 16]
x : bfloat16[4, 64]
ends : int32[2]
%5 = aten.to.dtype(ends, int64) : int64[2]
%6 = npu.npu_grouped_matmul([x], [transpose_int_2], antiquant_scale=[transpose_int], antiquant_offset=[transpose_int_1], group_list=%5, split_item=3, group_type=0, group_list_type=0, output_dtype=15) : (bfloat16[4, 16])
%7 = getitem(%6, 0) : bfloat16[4, 16]
return [%7]""",  # noqa: E501
        )

    def test_mxfp4(self) -> None:
        self.assertExpectedInline(
            tail_and_run("mxfp4", A950, 64),
            """\
p_w_codes : uint8[2, 16, 32]
p_w_scale : float8_e8m0fnu[2, 16, 2]
%2 = aten.view(p_w_scale, [2, 16, 1, 2]) : float8_e8m0fnu[2, 16, 1, 2]
%3 = aten.transpose.int(%2, 1, 2) : float8_e8m0fnu[2, 1, 16, 2]
%4 = aten.transpose.int(p_w_codes, 1, 2) : uint8[2, 32, 16]
return [%3, %4]
run:
transpose_int : float8_e8m0fnu[2, 1, 16, 2]
transpose_int_1 : uint8[2, 32, 16]
x : bfloat16[4, 64]
ends : int32[2]
%4 = npu.npu_dynamic_mx_quant(x, dst_type=296) : (uint8[4, 32], uint8[4, 1, 2])
%5 = getitem(%4, 0) : uint8[4, 32]
%6 = getitem(%4, 1) : uint8[4, 1, 2]
%7 = aten.to.dtype(ends, int64) : int64[2]
%8 = npu.npu_grouped_matmul([%5], [transpose_int_1], per_token_scale=[%6], scale=[transpose_int], group_list=%7, split_item=3, group_type=0, group_list_type=0, output_dtype=15, scale_dtype=293, per_token_scale_dtype=293, x_dtype=296, weight_dtype=296) : (bfloat16[4, 16])
%9 = getitem(%8, 0) : bfloat16[4, 16]
return [%9]""",  # noqa: E501
        )

    def test_fp8_block(self) -> None:
        self.assertExpectedInline(
            tail_and_run("fp8_block", A950),
            """\
p_w_codes : float8_e4m3fn[2, 16, 32]
p_w_scale : float32[2, 1, 1]
%2 = aten.transpose.int(p_w_scale, 1, 2) : float32[2, 1, 1]
%3 = aten.transpose.int(p_w_codes, 1, 2) : float8_e4m3fn[2, 32, 16]
return [%2, %3]
run:
transpose_int : float32[2, 1, 1]
transpose_int_1 : float8_e4m3fn[2, 32, 16]
x : bfloat16[4, 32]
ends : int32[2]
%4 = npu.npu_dynamic_block_quant(x, dst_type=24) : (float8_e4m3fn[4, 32], float32[4, 1])
%5 = getitem(%4, 0) : float8_e4m3fn[4, 32]
%6 = getitem(%4, 1) : float32[4, 1]
%7 = aten.to.dtype(ends, int64) : int64[2]
%8 = npu.npu_grouped_matmul([%5], [transpose_int_1], per_token_scale=[%6], scale=[transpose_int], group_list=%7, split_item=3, group_type=0, group_list_type=0, output_dtype=15) : (bfloat16[4, 16])
%9 = getitem(%8, 0) : bfloat16[4, 16]
return [%9]""",  # noqa: E501
        )

    def test_grouped_matmul(self) -> None:
        self.assertExpectedInline(
            tail_and_run("int8", A2),
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
        ((2, 16, 65536), False, {}, "axis K, the innermost of x in memory, is 65536, limit 65535"),
        ((2, 16, 65536), False, {"target": A3}, "limit 65535"),
        ((2, 16, 262144), False, {"target": A950}, "overflows int32 sums"),
        ((2, 16, 32), True, {}, "single experts"),
        ((1025, 16, 32), False, {}, "axis E is 1025, limit 1024"),
        ((2, 16, 32), False, {"target": P310}, "only on A2, A3, 950"),
        ((2, 16, 32), False, {"scheme": "int8_static"}, "one scale for all inputs of a layer"),
        (
            (2, 16, 32),
            False,
            {"config": {"w": {"scheme": "int8_static", "act_scale": 0.1}}},
            "give them a scheme with dynamic activations",
        ),
        ((2, 16, 32), False, {"scheme": "fp8"}, "dst_type is float8_e4m3fn, taken: None, int8"),
        ((2, 16, 32), False, {"scheme": "int4_g32_asym"}, "a zero point per channel, not per group"),
        ((2, 16, 96), False, {"scheme": "int4_g64"}, "K = 96 is not a multiple of 64"),
        ((2, 1, 32), False, {"scheme": "int4_channel"}, "not taken transposed"),
        ((2, 16, 96), False, {"scheme": "mxfp8", "target": A950}, "an odd number of blocks of 32"),
    ],
)
def test_refusals(shape: tuple[int, ...], single: bool, options: dict[str, Any], reason: str) -> None:
    """Seen when planning: in the plan, and under ``strict`` as an error that names the weight."""
    model = Experts(shape, single=single)
    made = plan(model, shape[2], **options)
    assert not made.quantized
    assert re.search(reason, made.weight("w").reason)
    with pytest.raises(RefusedError, match=f"w: .*{reason}"):
        plan(model, shape[2], **options, strict=True)


@pytest.mark.parametrize("scheme", ["int8_weight_only", "int4_g32", "int4_g64", "int4_channel_asym"])
def test_weight_only(scheme: str) -> None:
    """Also a group that is as wide as K or wider, which is a channel."""
    made = plan(Experts((2, 16, 32)), scheme=scheme, strict=True)
    assert made.weight("w").form == (
        f"{scheme}.s_bf16.bf16" if scheme.startswith("int4") else f"{scheme}.bf16"
    )
    assert made.kernels["fxquant::grouped_weight_only_mm"]["op"] == "npu::npu_grouped_matmul"


def test_which_chip_takes_experts_of_which_scheme() -> None:
    """Every scheme and chip: the op, or a refusal with its source."""
    text = support_table([name for name in SHOWN if name != "cpu"], experts=True) + "\n"
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_most_experts() -> None:
    assert plan(Experts((1024, 16, 32)), strict=True).weight("w").form == "int8"


def test_what_is_not_as_asked_is_told() -> None:
    model = Experts((2, 16, 32))
    assert plan(model).weight("w").reason == "default scheme, experts apart"
    assert "not in FRACTAL_NZ" in plan(model, weight_format="nz").weight("w").reason


class ByIndex(nn.Module):
    """An expert for each row."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(shape, device="meta", dtype=dtype))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm(self.w[ids], x.unsqueeze(-1)).squeeze(-1)


def test_float32_is_computed_in_bfloat16() -> None:
    made = fxquant.plan(
        ByIndex((2, 16, 32), torch.float32),
        example_inputs=(torch.zeros(4, 32), torch.zeros(4, dtype=torch.int64)),
        scheme="int8",
        backend="npu",
        target=A2,
    )
    assert "computed in bfloat16" in made.weight("w").reason


class Cut(Experts):
    """The two halves of each expert, times the same rows; then another weight."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__(shape)
        self.other = nn.Parameter(torch.empty(shape, device="meta", dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        first, second = self.w.transpose(-2, -1).chunk(2, -1)
        gated = torch._grouped_mm(x, first, ends) * torch._grouped_mm(x, second, ends)
        return gated + torch._grouped_mm(x, self.other.transpose(-2, -1), ends).chunk(2, -1)[0]


@pytest.mark.parametrize("scheme", ["int8", "int8_weight_only", "int4_g32", "int4_channel_asym"])
@pytest.mark.parametrize("other", ["int8", "int4_g32"])
def test_cuts_and_mixed_schemes(scheme: str, other: str) -> None:
    """Cut codes are contiguous again; what products share is made before the first of them."""
    low = fxquant.lower(
        Cut((2, 32, 64)),
        example_inputs=inputs(64),
        config={"w": scheme, "other": other},
        scheme="none",
        backend="npu",
        target=A2,
        dynamic=False,
    )
    low.run_graph.graph.lint()
    counts = count_calls(low.run_graph)
    assert counts["npu.npu_grouped_matmul"] == 3
    assert sum("ends, int64" in line for line in dump(low.run_graph).splitlines()) == 1


class Halves(nn.Module):
    """Products with the halves of each expert, along N or K."""

    def __init__(self, shape: tuple[int, int, int], axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.w = nn.Parameter(torch.empty(shape, device="meta", dtype=torch.bfloat16))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        first, second = self.w[ids].chunk(2, self.axis)
        a, b = (x, x) if self.axis == 1 else x.chunk(2, -1)
        return torch.bmm(first, a.unsqueeze(-1)) + torch.bmm(second, b.unsqueeze(-1))


@pytest.mark.parametrize(
    ("scheme", "target", "shape", "axis", "reason"),
    [
        ("mxfp8", A950, (3, 32, 192), 2, "a cut of it, 32 x 96: .*an odd number of blocks"),
        ("int4_channel", A2, (3, 16, 24), 2, "a cut of it, 16 x 12: .*not a multiple of 8"),
        ("int4_channel", A2, (3, 16, 16), 2, "a cut of it, 16 x 8: .*not taken transposed"),
        ("int4_channel", A2, (3, 2, 64), 1, "a cut of it, 1 x 64: .*not taken transposed"),
        ("mxfp4", A950, (3, 1, 64), 0, "1 x 64 fp4 codes"),
    ],
)
def test_what_no_cut_of_may_be_multiplied_stays_float(
    scheme: str, target: str, shape: tuple[int, int, int], axis: int, reason: str
) -> None:
    """Seen when planning, not when lowering."""
    model = Halves(shape, axis) if axis else ByIndex(shape)
    x, ids = torch.zeros(4, shape[2], dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    given = {"example_inputs": (x, ids), "scheme": scheme, "backend": "npu", "target": target}
    made = fxquant.plan(model, **given)
    assert made.weight("w").form == "float"
    assert re.search(reason, made.weight("w").reason)


@pytest.mark.parametrize("bound", [0.5, 0.02])
def test_max_error(bound: float) -> None:
    """Measured on constants as the scheme has them, whatever the target wants."""
    state = {"w": torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()}
    model = Experts((2, 32, 64))
    made = fxquant.plan(
        model, state, example_inputs=inputs(64), scheme="int4_g32", backend="npu", target=A2, max_error=bound
    )
    assert made.weight("w").form == ("int4_g32.s_bf16.bf16" if bound == 0.5 else "int8_weight_only.bf16")


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
