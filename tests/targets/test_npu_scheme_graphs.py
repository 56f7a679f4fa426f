# ruff: noqa: E501 - golden graphs
"""Schemes other than dynamic int8 on the NPU: graphs, layouts, refusals, and which chip takes which."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn

import fxquant
from fxquant.errors import RefusedError
from fxquant.form import Form
from fxquant.graph import count_calls, dump
from fxquant.scheme import SCHEMES
from fxquant.targets.support import SHOWN, support_table

A2, A950, A310P = "Ascend910B2,cann=9.0", "Ascend950PR_9579,cann=9.0", "Ascend310P3,cann=9.0"
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
GOLDEN = Path(__file__).parent / "schemes.txt"


class Linear(nn.Module):
    """One linear; ``parts``: into how many its output is cut."""

    def __init__(self, n: int, k: int, *, bias: bool, dtype: torch.dtype, parts: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(n, k, dtype=dtype, device="meta"))
        self.b = nn.Parameter(torch.empty(n, dtype=dtype, device="meta")) if bias else None
        self.parts = parts

    def forward(self, x: Tensor) -> Any:
        out = torch.nn.functional.linear(x, self.w, self.b)
        return out if self.parts == 1 else out.chunk(self.parts, -1)


class Shared(nn.Module):
    """Two linears of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(128, 128, dtype=BF16, device="meta")
        self.k = nn.Linear(128, 128, dtype=BF16, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x)


def lowered(
    scheme: str, n: int, k: int, *, target: str = A2, dtype: torch.dtype = BF16, bias: bool = False,
    shape: tuple[int, ...] = (3,), dynamic: bool = False, parts: int = 1, **more: Any,
) -> fxquant.Lowered:  # fmt: skip
    model = Linear(n, k, bias=bias, dtype=dtype, parts=parts)
    return fxquant.lower(
        model, **options(scheme, target, torch.zeros(*shape, k, dtype=dtype)), dynamic=dynamic, **more
    )


def options(scheme: str, target: str, x: Tensor) -> dict[str, Any]:
    config = {"re:.*": {"scheme": scheme, "act_scale": 0.05}} if scheme == "int8_static" else None
    return {"backend": "npu", "target": target, "scheme": scheme, "config": config, "example_inputs": (x,)}


class TestGoldens(TestCase):
    maxDiff = None

    def check(self, low: fxquant.Lowered, expected: str) -> None:
        self.assertExpectedInline(dump(low.run_graph), expected, skip=1)

    def test_weight_only(self) -> None:
        self.check(
            lowered("int8_weight_only", 32, 64, bias=True, shape=(2, 3)),
            """\
p_b : bfloat16[32]
t_default : int8[64, 32]
reshape_default_1 : bfloat16[32]
x : bfloat16[2, 3, 64]
%4 = aten.reshape(x, [-1, 64]) : bfloat16[6, 64]
%5 = aten.to.dtype(p_b, float32) : float32[32]
%6 = npu.npu_weight_quant_batchmatmul(%4, t_default, reshape_default_1, bias=%5) : bfloat16[6, 32]
%7 = aten.reshape(%6, [2, 3, 32]) : bfloat16[2, 3, 32]
return [%7]""",
        )

    def test_weight_only_dynamic_of_float32(self) -> None:
        self.check(
            lowered("int8_weight_only", 32, 64, dtype=FULL, dynamic=True),
            """\
t_default : int8[64, 32]
reshape_default : bfloat16[32]
x : float32[s0, 64]
%3 = aten.to.dtype(x, bfloat16) : bfloat16[s0, 64]
%4 = fxquant_npu.npu_weight_quant_batchmatmul(%3, t_default, reshape_default) : bfloat16[s0, 32]
%5 = aten.to.dtype(%4, float32) : float32[s0, 32]
return [%5]""",
        )

    def test_int4(self) -> None:
        self.check(
            lowered("int4_g32_asym", 32, 64, dtype=HALF, bias=True),
            """\
p_b : float16[32]
t_default : float16[2, 32]
t_default_1 : int32[8, 32]
t_default_2 : float16[2, 32]
x : float16[3, 64]
%5 = npu.npu_weight_quant_batchmatmul(x, t_default_1, t_default_2, antiquant_offset=t_default, bias=p_b, antiquant_group_size=32) : float16[3, 32]
return [%5]""",
        )

    def test_one_group_is_a_channel(self) -> None:
        self.check(
            lowered("int4_g128", 32, 64),
            """\
t_default : int32[8, 32]
reshape_default : bfloat16[32]
x : bfloat16[3, 64]
%3 = npu.npu_weight_quant_batchmatmul(x, t_default, reshape_default) : bfloat16[3, 32]
return [%3]""",
        )

    def test_parts_of_int4(self) -> None:
        self.check(
            lowered("int4_g32", 65540, 64, bias=True),
            """\
slice_tensor_1 : bfloat16[32784]
t_default : int32[8, 32784]
t_default_1 : bfloat16[2, 32784]
slice_tensor_3 : bfloat16[32756]
t_default_2 : int32[8, 32756]
t_default_3 : bfloat16[2, 32756]
x : bfloat16[3, 64]
%7 = aten.to.dtype(slice_tensor_1, float32) : float32[32784]
%8 = npu.npu_weight_quant_batchmatmul(x, t_default, t_default_1, bias=%7, antiquant_group_size=32) : bfloat16[3, 32784]
%9 = aten.to.dtype(slice_tensor_3, float32) : float32[32756]
%10 = npu.npu_weight_quant_batchmatmul(x, t_default_2, t_default_3, bias=%9, antiquant_group_size=32) : bfloat16[3, 32756]
%11 = aten.cat([%8, %10], -1) : bfloat16[3, 65540]
return [%11]""",
        )

    def test_parts_at_cuts(self) -> None:
        self.check(
            lowered("int4_g32", 4 * 16384, 64, parts=4),
            """\
t_default : int32[8, 32768]
t_default_1 : bfloat16[2, 32768]
t_default_2 : int32[8, 32768]
t_default_3 : bfloat16[2, 32768]
x : bfloat16[3, 64]
%5 = npu.npu_weight_quant_batchmatmul(x, t_default, t_default_1, antiquant_group_size=32) : bfloat16[3, 32768]
%6 = npu.npu_weight_quant_batchmatmul(x, t_default_2, t_default_3, antiquant_group_size=32) : bfloat16[3, 32768]
%7 = aten.slice.Tensor(%5, -1, 0, 16384) : bfloat16[3, 16384]
%8 = aten.slice.Tensor(%5, -1, 16384, 32768) : bfloat16[3, 16384]
%9 = aten.slice.Tensor(%6, -1, 0, 16384) : bfloat16[3, 16384]
%10 = aten.slice.Tensor(%6, -1, 16384, 32768) : bfloat16[3, 16384]
return [%7, %8, %9, %10]""",
        )

    def test_static(self) -> None:
        self.check(
            lowered("int8_static", 32, 64, bias=True, shape=(2, 3)),
            """\
p_w_codes : int8[64, 32]
p_w_act_scales : float32[64]
p_w_deq_scale : float32[32]
p_b : bfloat16[32]
x : bfloat16[2, 3, 64]
%5 = aten.reshape(x, [-1, 64]) : bfloat16[6, 64]
%6 = npu.npu_quantize(%5, p_w_act_scales, None, 12, 1) : int8[6, 64]
%7 = npu.npu_quant_matmul(%6, p_w_codes, p_w_deq_scale, bias=p_b, output_dtype=15) : bfloat16[6, 32]
%8 = aten.reshape(%7, [2, 3, 32]) : bfloat16[2, 3, 32]
return [%8]""",
        )

    def test_static_float16(self) -> None:
        self.check(
            lowered("int8_static", 32, 64, dtype=HALF, dynamic=True),
            """\
p_w_codes : int8[64, 32]
p_w_act_scales : float32[64]
p_w_deq_scale : int64[32]
x : float16[s0, 64]
%4 = fxquant_npu.npu_quantize(x, p_w_act_scales, None, 12, 1) : int8[s0, 64]
%5 = fxquant_npu.npu_quant_matmul(%4, p_w_codes, p_w_deq_scale, output_dtype=5) : float16[s0, 32]
return [%5]""",
        )

    def test_static_float16_with_bias(self) -> None:
        self.check(
            lowered("int8_static", 32, 64, dtype=HALF, bias=True, dynamic=True),
            """\
p_w_codes : int8[64, 32]
p_w_act_scale : float32[1]
p_w_act_scales : float32[64]
p_b : float16[32]
reshape_default : float32[32]
x : float16[s0, 64]
%6 = fxquant_npu.npu_quantize(x, p_w_act_scales, None, 12, 1) : int8[s0, 64]
%7 = aten.sym_size.int(%6, 0) : SymInt
%8 = aten.expand(p_w_act_scale, [%7]) : float32[s0]
%9 = aten.clone(%8, memory_format=contiguous_format) : float32[s0]
%10 = fxquant_npu.npu_quant_matmul(%6, p_w_codes, reshape_default, bias=p_b, pertoken_scale=%9, output_dtype=5) : float16[s0, 32]
return [%10]""",
        )

    def test_fp8_shares_codes(self) -> None:
        low = fxquant.lower(Shared(), **options("fp8", A950, torch.zeros(3, 128, dtype=BF16)), dynamic=False)
        self.check(
            low,
            """\
p_q_bias : bfloat16[128]
p_k_bias : bfloat16[128]
reshape_default : float32[128]
t_default : float8_e4m3fn[128, 128]
reshape_default_1 : float32[128]
t_default_1 : float8_e4m3fn[128, 128]
x : bfloat16[3, 128]
%7 = npu.npu_dynamic_quant(x, dst_type=24) : (float8_e4m3fn[3, 128], float32[3])
%8 = getitem(%7, 0) : float8_e4m3fn[3, 128]
%9 = getitem(%7, 1) : float32[3]
%10 = aten.to.dtype(p_q_bias, float32) : float32[128]
%11 = npu.npu_quant_matmul(%8, t_default, reshape_default, pertoken_scale=%9, bias=%10, output_dtype=15) : bfloat16[3, 128]
%12 = aten.to.dtype(p_k_bias, float32) : float32[128]
%13 = npu.npu_quant_matmul(%8, t_default_1, reshape_default_1, pertoken_scale=%9, bias=%12, output_dtype=15) : bfloat16[3, 128]
%14 = aten.add.Tensor(%11, %13) : bfloat16[3, 128]
return [%14]""",
        )

    def test_fp8_block(self) -> None:
        self.check(
            lowered("fp8_block", 160, 256, target=A950, bias=True, dynamic=True),
            """\
p_b : bfloat16[160]
t_default : float8_e4m3fn[256, 160]
t_default_1 : float32[2, 2]
x : bfloat16[s0, 256]
%4 = fxquant_npu.npu_dynamic_block_quant(x, dst_type=24) : (float8_e4m3fn[s0, 256], float32[s0, 2])
%5 = getitem(%4, 0) : float8_e4m3fn[s0, 256]
%6 = getitem(%4, 1) : float32[s0, 2]
%7 = fxquant_npu.npu_quant_matmul(%5, t_default, t_default_1, pertoken_scale=%6, output_dtype=6, group_sizes=[1, 128, 128]) : float32[s0, 160]
%8 = aten.to.dtype(p_b, float32) : float32[160]
%9 = aten.add.Tensor(%7, %8) : float32[s0, 160]
%10 = aten.to.dtype(%9, bfloat16) : bfloat16[s0, 160]
return [%10]""",
        )

    def test_mxfp8(self) -> None:
        self.check(
            lowered("mxfp8", 32, 128, target=A950, bias=True, shape=(2, 3)),
            """\
p_b : bfloat16[32]
transpose_int : float8_e8m0fnu[2, 32, 2]
t_default : float8_e4m3fn[128, 32]
x : bfloat16[2, 3, 128]
%4 = aten.reshape(x, [-1, 128]) : bfloat16[6, 128]
%5 = npu.npu_dynamic_mx_quant(%4, dst_type=24) : (float8_e4m3fn[6, 128], uint8[6, 2, 2])
%6 = getitem(%5, 0) : float8_e4m3fn[6, 128]
%7 = getitem(%5, 1) : uint8[6, 2, 2]
%8 = aten.to.dtype(p_b, float32) : float32[32]
%9 = npu.npu_quant_matmul(%6, t_default, transpose_int, pertoken_scale=%7, bias=%8, output_dtype=15, pertoken_scale_dtype=293, scale_dtype=293, group_sizes=[1, 1, 32]) : bfloat16[6, 32]
%10 = aten.reshape(%9, [2, 3, 32]) : bfloat16[2, 3, 32]
return [%10]""",
        )

    def test_mxfp4(self) -> None:
        self.check(
            lowered("mxfp4", 32, 128, target=A950),
            """\
transpose_int : float8_e8m0fnu[2, 32, 2]
t_default : uint8[64, 32]
x : bfloat16[3, 128]
%3 = npu.npu_dynamic_mx_quant(x, dst_type=296) : (uint8[3, 64], uint8[3, 2, 2])
%4 = getitem(%3, 0) : uint8[3, 64]
%5 = getitem(%3, 1) : uint8[3, 2, 2]
%6 = npu.npu_quant_matmul(%4, t_default, transpose_int, pertoken_scale=%5, x1_dtype=296, x2_dtype=296, output_dtype=15, pertoken_scale_dtype=293, scale_dtype=293, group_sizes=[1, 1, 32]) : bfloat16[3, 32]
return [%6]""",
        )


def row(
    scheme: str, n: int, k: int, target: str, *, dtype: torch.dtype = BF16, bias: bool = False, **more: Any
) -> Any:
    model = Linear(n, k, bias=bias, dtype=dtype)
    return fxquant.plan(model, **options(scheme, target, torch.zeros(3, k, dtype=dtype)), **more).weight("w")


@pytest.mark.parametrize(
    ("scheme", "target", "n", "k", "dtype", "form", "words"),
    [
        ("int8_weight_only", A2, 64, 64, BF16, "int8_weight_only.bf16", ""),
        ("int8_weight_only", A2, 64, 64, FULL, "int8_weight_only.bf16", "computed in bfloat16"),
        (
            "int8_weight_only",
            A2,
            65536,
            64,
            HALF,
            "int8_weight_only.f16/n:32768,32768",
            "split: parts of at most 65535",
        ),
        ("int8_weight_only", A950, 65536, 64, HALF, "int8_weight_only.f16/n:32768,32768", "split"),
        ("int8_weight_only", A2, 64, 65536, BF16, "float", "axis K is 65536, limit 65535 (D:5464)"),
        ("int8_weight_only", A310P, 64, 64, HALF, "int8_weight_only.f16", ""),
        ("int8_weight_only", A310P, 64, 64, BF16, "float", "x is bfloat16, taken: float16"),
        ("int4_g32", A2, 64, 68, BF16, "float", "K = 68 is not a multiple of 8"),
        ("int4_g32", A2, 1, 64, BF16, "float", "1 x 64 int4 codes"),
        ("int4_channel", A2, 64, 8, BF16, "float", "64 x 8 int4 codes"),
        ("int4_g128", A2, 64, 128, BF16, "int4_g128.s_bf16.bf16", ""),
        ("int8_static", A2, 64, 64, BF16, "int8_static.kn.bf16", "act_scale 0.05"),
        ("int8_static", A2, 65536, 64, BF16, "int8_static.kn.bf16/n:32768,32768", "split"),
        ("int8_static", A950, 65536, 64, BF16, "int8_static.kn.bf16", ""),
        ("int8_static", A2, 64, 65536, BF16, "float", "axis K, the innermost of x1"),
        ("int8_static", A950, 64, 140000, BF16, "float", "overflows int32 sums"),
        ("w4a8_g128", A2, 64, 256, BF16, "float", "groups of 256 along K, not 128"),
        ("fp8", A2, 64, 64, BF16, "float", "needs 950: npu_dynamic_quant on A2"),
        ("fp8", A950, 64, 64, BF16, "fp8", ""),
        ("fp8_tensor", A950, 64, 64, BF16, "float", "one for a whole activation is not documented"),
        ("fp8_block", A950, 200, 300, BF16, "fp8_block", ""),
        ("mxfp8", A950, 64, 96, BF16, "float", "K = 96 has an odd number of blocks of 32"),
        ("mxfp4", A950, 64, 127, BF16, "float", "K = 127 is odd"),
        ("nvfp4", A950, 64, 128, BF16, "float", "not e4m3 scales for 16"),
    ],
)
def test_forms_and_refusals(
    scheme: str, target: str, n: int, k: int, dtype: torch.dtype, form: str, words: str
) -> None:
    found = row(scheme, n, k, target, dtype=dtype)
    assert found.form == form
    assert words in found.reason
    if form != "float":
        assert str(Form.parse(form)) == form


def test_policies() -> None:
    assert row("int4_g32", 65540, 64, A2, wide="host").form == "float@host"
    assert row("int4_g32", 65540, 64, A2, wide="float").form == "float"
    with pytest.raises(RefusedError, match="groups of 256"):
        row("w4a8_g128", 64, 256, A2, strict=True)


def test_fractal_nz() -> None:
    static = row("int8_static", 64, 64, A2, weight_format="nz")
    assert static.form == "int8_static.kn.nz.bf16"
    assert "cast to FRACTAL_NZ" in static.reason
    other = row("int4_g32", 64, 64, A2, weight_format="nz")
    assert other.form == "int4_g32.s_bf16.bf16"
    assert "not in FRACTAL_NZ: npu_weight_quant_batchmatmul takes it in graph mode alone" in other.reason


def test_no_node_of_the_dialect_is_left() -> None:
    for scheme, spec in SCHEMES.items():
        for target in (A2, A950):
            if spec.weight is None or row(scheme, 64, 128, target).form == "float":
                continue
            counts = count_calls(lowered(scheme, 64, 128, target=target).run_graph)
            assert not [op for op in counts if op.startswith("fxquant.")], (scheme, target, counts)


def test_which_chip_takes_which_scheme() -> None:
    text = support_table([name for name in SHOWN if name != "cpu"]) + "\n"
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


class Cut(nn.Module):
    """A linear on the halves of K."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(n, k, dtype=BF16, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.w.chunk(2, 1)
        a, b = x.chunk(2, -1)
        return torch.nn.functional.linear(a, first) + torch.nn.functional.linear(b, second)


@pytest.mark.parametrize(
    ("scheme", "target", "k", "reason"),
    [
        ("mxfp8", A950, 192, "a cut of it, 16 x 96: K = 96 has an odd number of blocks"),
        ("mxfp4", A950, 192, "a cut of it, 16 x 96: K = 96 has an odd number of blocks"),
        ("int4_channel", A2, 24, "a cut of it, 16 x 12: K = 12 is not a multiple of 8"),
        ("int4_channel", A2, 64, ""),
    ],
)
def test_cuts_are_asked_about_when_planning(scheme: str, target: str, k: int, reason: str) -> None:
    given = options(scheme, target, torch.zeros(3, k, dtype=BF16))
    low = fxquant.lower(Cut(16, k), **given)
    made = low.plan.weight("w")
    assert reason in made.reason
    assert (made.form == "float") == bool(reason)


def test_fp4_codes_of_one_row() -> None:
    """Nothing tells that they are passed transposed, which is how the op takes them."""
    made = row("mxfp4", 1, 64, A950)
    assert made.form == "float"
    assert "1 x 64 fp4 codes: N and K / 2 of 1 do not lie transposed" in made.reason
