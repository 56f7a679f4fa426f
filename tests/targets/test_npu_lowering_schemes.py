"""Lowering rules of schemes to come, on small graphs of what they will replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from expecttest import TestCase
from npu_kernels import register, trace
from torch import Tensor, fx

from fxquant.errors import RefusedError
from fxquant.graph import count_calls, dump, placeholders
from fxquant.pass_manager import check, clean
from fxquant.targets.npu_chip import NpuChip, parse_chip
from fxquant.targets.npu_lowering import Rows
from fxquant.targets.npu_lowering_schemes import (
    grouped_mm,
    mx_mm,
    static_mm,
    static_quantize,
    static_scale,
    weight_only_mm,
)
from fxquant.targets.npu_schemas import ensure_schemas, planning_for

I8, I32, I64, U8 = torch.int8, torch.int32, torch.int64, torch.uint8
F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
A2, A950 = parse_chip("Ascend910B2,cann=9.0"), parse_chip("Ascend950PR_9579,cann=9.0")
ROWS = Rows()

Rule = Callable[..., fx.Node]


def build(rule: Rule, *inputs: Tensor, dynamic: bool = False, chip: NpuChip = A2) -> fx.GraphModule:
    """The graph whose result is what ``rule(gm, *placeholders)`` makes of its inputs."""
    ensure_schemas()
    gm = trace(_names(len(inputs)), *inputs, dynamic=dynamic)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output), planning_for(chip):
        output.args = (rule(gm, *placeholders(gm)),)
    clean(gm)
    check(gm, after="test")
    return gm


def _names(count: int) -> Callable[..., Tensor]:
    runs: dict[int, Callable[..., Tensor]] = {
        3: lambda x, a, b: x.clone(),
        4: lambda x, a, b, c: x.clone(),
    }
    return runs[count]


def weight_only(gm: fx.GraphModule, x: fx.Node, w: fx.Node, scale: fx.Node, bias: fx.Node) -> fx.Node:
    return weight_only_mm(gm, x, w, scale, n=32, k=64, bias=bias, rows=ROWS)


def grouped_int4(gm: fx.GraphModule, x: fx.Node, w: fx.Node, scale: fx.Node) -> fx.Node:
    return weight_only_mm(gm, x, w, scale, n=32, k=64, group=32, rows=ROWS)


def static(dtype: torch.dtype) -> Rule:
    def rule(gm: fx.GraphModule, x: fx.Node, x_scale: fx.Node, w: fx.Node, w_scale: fx.Node) -> fx.Node:
        one = gm.graph.call_function(torch.ops.aten.slice.Tensor, (x_scale, 0, 0, 1))
        one.meta["val"] = x_scale.meta["val"][:1]
        scale = static_scale(gm, one, w_scale, dtype)
        codes = static_quantize(gm, x, x_scale, None, k=64, rows=ROWS)
        return static_mm(gm, codes, w, scale, like=x, dtype=dtype, rows=ROWS)

    return rule


def experts(dtype: torch.dtype) -> Rule:
    def rule(gm: fx.GraphModule, x: fx.Node, w: fx.Node, scale: fx.Node, counts: fx.Node) -> fx.Node:
        return grouped_mm(gm, x, w, scale, counts, dtype=dtype, rows=ROWS)

    return rule


def mx(gm: fx.GraphModule, x: fx.Node, w: fx.Node, scale: fx.Node, bias: fx.Node) -> fx.Node:
    return mx_mm(gm, x, w, scale, k=100, dtype=BF16, bias=bias, rows=ROWS)


class TestGoldens(TestCase):
    def test_weight_only(self) -> None:
        inputs = (torch.zeros(2, 3, 64, dtype=BF16), torch.zeros(64, 32, dtype=I8))
        text = dump(build(weight_only, *inputs, torch.ones(32, dtype=BF16), torch.zeros(32, dtype=BF16)))
        self.assertExpectedInline(
            text,
            """\
x : bfloat16[2, 3, 64]
a : int8[64, 32]
b : bfloat16[32]
c : bfloat16[32]
%4 = aten.to.dtype(c, float32) : float32[32]
%5 = aten.reshape(x, [-1, 64]) : bfloat16[6, 64]
%6 = npu.npu_weight_quant_batchmatmul(%5, a, b, bias=%4) : bfloat16[6, 32]
%7 = aten.reshape(%6, [2, 3, 32]) : bfloat16[2, 3, 32]
return %7""",
        )

    def test_weight_only_int4_dynamic(self) -> None:
        inputs = (torch.zeros(5, 64, dtype=F16), torch.zeros(64, 4, dtype=I32), torch.ones(2, 32, dtype=F16))
        self.assertExpectedInline(
            dump(build(grouped_int4, *inputs, dynamic=True)),
            """\
x : float16[s0, 64]
a : int32[64, 4]
b : float16[2, 32]
%3 = fxquant_npu.npu_weight_quant_batchmatmul(x, a, b, antiquant_group_size=32) : float16[s0, 32]
return %3""",
        )

    def test_static_float16(self) -> None:
        inputs = (
            torch.zeros(2, 3, 64, dtype=F16),
            torch.ones(64),
            torch.zeros(64, 32, dtype=I8),
            torch.ones(32),
        )
        self.assertExpectedInline(
            dump(build(static(F16), *inputs)),
            """\
x : float16[2, 3, 64]
a : float32[64]
b : int8[64, 32]
c : float32[32]
%4 = aten.slice.Tensor(a, 0, 0, 1) : float32[1]
%5 = aten.mul.Tensor(%4, c) : float32[32]
%6 = npu.npu_trans_quant_param(%5) : int64[32]
%7 = aten.reshape(x, [-1, 64]) : float16[6, 64]
%8 = npu.npu_quantize(%7, a, None, 12, 1) : int8[6, 64]
%9 = npu.npu_quant_matmul(%8, b, %6, output_dtype=5) : float16[6, 32]
%10 = aten.reshape(%9, [2, 3, 32]) : float16[2, 3, 32]
return %10""",
        )

    def test_static_bfloat16_dynamic(self) -> None:
        inputs = (
            torch.zeros(5, 64, dtype=BF16),
            torch.ones(64),
            torch.zeros(64, 32, dtype=I8),
            torch.ones(32),
        )
        self.assertExpectedInline(
            dump(build(static(BF16), *inputs, dynamic=True)),
            """\
x : bfloat16[s0, 64]
a : float32[64]
b : int8[64, 32]
c : float32[32]
%4 = aten.slice.Tensor(a, 0, 0, 1) : float32[1]
%5 = aten.mul.Tensor(%4, c) : float32[32]
%6 = fxquant_npu.npu_quantize(x, a, None, 12, 1) : int8[s0, 64]
%7 = fxquant_npu.npu_quant_matmul(%6, b, %5, output_dtype=15) : bfloat16[s0, 32]
return %7""",
        )

    def test_experts(self) -> None:
        inputs = (
            torch.zeros(8, 64, dtype=BF16),
            torch.zeros(4, 64, 32, dtype=I8),
            torch.ones(4, 32, dtype=BF16),
        )
        text = dump(build(experts(BF16), *inputs, torch.ones(4, dtype=I64), dynamic=True))
        self.assertExpectedInline(
            text,
            """\
x : bfloat16[s0, 64]
a : int8[4, 64, 32]
b : bfloat16[4, 32]
c : int64[4]
%4 = fxquant_npu.npu_dynamic_quant(x) : (int8[s0, 64], float32[s0])
%5 = getitem(%4, 0) : int8[s0, 64]
%6 = getitem(%4, 1) : float32[s0]
%7 = fxquant_npu.npu_grouped_matmul([%5], [a], scale=[b], per_token_scale=[%6], group_list=c, split_item=3, group_type=0, group_list_type=1, output_dtype=15) : (bfloat16[s0, 32])
%8 = getitem(%7, 0) : bfloat16[s0, 32]
return %8""",  # noqa: E501
        )

    def test_mx(self) -> None:
        inputs = (
            torch.zeros(2, 3, 100, dtype=BF16),
            torch.zeros(100, 32).to(E4M3),
            torch.zeros(2, 32, 2, dtype=U8),
        )
        text = dump(build(mx, *inputs, torch.zeros(32, dtype=BF16), chip=A950))
        self.assertExpectedInline(
            text,
            """\
x : bfloat16[2, 3, 100]
a : float8_e4m3fn[100, 32]
b : uint8[2, 32, 2]
c : bfloat16[32]
%4 = aten.reshape(x, [-1, 100]) : bfloat16[6, 100]
%5 = npu.npu_dynamic_mx_quant(%4, dst_type=24) : (float8_e4m3fn[6, 100], uint8[6, 2, 2])
%6 = getitem(%5, 0) : float8_e4m3fn[6, 100]
%7 = getitem(%5, 1) : uint8[6, 2, 2]
%8 = aten.to.dtype(c, float32) : float32[32]
%9 = npu.npu_quant_matmul(%6, a, b, pertoken_scale=%7, bias=%8, output_dtype=15, pertoken_scale_dtype=293, scale_dtype=293, group_sizes=[1, 1, 32]) : bfloat16[6, 32]
%10 = aten.reshape(%9, [2, 3, 32]) : bfloat16[2, 3, 32]
return %10""",  # noqa: E501
        )


@pytest.fixture
def _kernels() -> Iterator[None]:
    library = register()
    yield
    library._destroy()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_numbers(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 64).to(dtype)
    w, scale = torch.randint(-127, 128, (64, 32), dtype=I8), torch.rand(32) / 64
    floats = w.float() * scale
    for dynamic in (False, True):
        example = torch.zeros(5, 64, dtype=dtype) if dynamic else x
        bias = torch.randn(32).to(dtype)
        gm = build(weight_only, example, w, scale.to(dtype), bias, dynamic=dynamic)
        want = (x.float() @ (w.float() * scale.to(dtype).float()) + bias.float()).to(dtype)
        torch.testing.assert_close(gm(x, w, scale.to(dtype), bias), want)

        step = torch.full((64,), 4 / 127)
        gm = build(static(dtype), example, step, w, scale, dynamic=dynamic)
        got = gm(x, step, w, scale)
        codes = (x.float() / step).round().clamp(-128, 127)
        torch.testing.assert_close(got, (codes * step @ floats).to(dtype), rtol=2e-2, atol=2e-2)
        assert got.dtype == dtype


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_numbers_of_experts(dtype: torch.dtype) -> None:
    x, counts = torch.randn(17, 64).to(dtype), torch.tensor([5, 0, 10, 2])
    w = torch.randint(-127, 128, (4, 64, 32), dtype=I8)
    scale = (torch.rand(4, 32) / 64).to(F32 if dtype == F16 else BF16)
    gm = build(experts(dtype), x, w, scale, counts)
    want = torch.cat(
        [part.float() @ (w[e].float() * scale[e].float()) for e, part in enumerate(x.split(counts.tolist()))]
    )
    torch.testing.assert_close(
        gm(x, w, scale, counts).float(), want, rtol=0.03, atol=0.03 * float(want.abs().max())
    )


def test_rows_that_are_none() -> None:
    inputs = (torch.zeros(0, 64, dtype=BF16), torch.zeros(4, 64, 32, dtype=I8), torch.ones(4, 32, dtype=BF16))
    assert count_calls(build(experts(BF16), *inputs, torch.ones(4, dtype=I64))) == {"aten.new_zeros": 1}
    empty = (torch.zeros(0, 100, dtype=BF16), torch.zeros(100, 32).to(E4M3), torch.zeros(2, 32, 2, dtype=U8))
    assert count_calls(build(mx, *empty, torch.zeros(32), chip=A950)) == {"aten.new_zeros": 1}


def test_chips_that_have_no_such_form() -> None:
    inputs = (torch.zeros(3, 100, dtype=BF16), torch.zeros(100, 32).to(E4M3), torch.zeros(2, 32, 2, dtype=U8))
    with pytest.raises(RefusedError, match=r"npu_dynamic_mx_quant on A2 .*: only on 950"):
        build(mx, *inputs, torch.zeros(32))
    a3 = parse_chip("Ascend910_9391,cann=9.0")
    moe = (torch.zeros(8, 64, dtype=BF16), torch.zeros(4, 64, 32, dtype=I8), torch.ones(4, 32, dtype=BF16))
    with pytest.raises(RefusedError, match=r"npu_grouped_matmul on A3 .*: only on A2"):
        build(experts(BF16), *moe, torch.ones(4, dtype=I64), chip=a3)
