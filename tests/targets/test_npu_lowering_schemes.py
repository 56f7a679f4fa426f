"""The lowering rule of experts, on small graphs of what it will replace."""

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
from fxquant.targets.npu_lowering_schemes import grouped_mm
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
        4: lambda x, a, b, c: x.clone(),
    }
    return runs[count]


def experts(dtype: torch.dtype) -> Rule:
    def rule(gm: fx.GraphModule, x: fx.Node, w: fx.Node, scale: fx.Node, counts: fx.Node) -> fx.Node:
        return grouped_mm(gm, x, w, scale, counts, dtype=dtype, rows=ROWS)

    return rule


class TestGoldens(TestCase):
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


@pytest.fixture
def _kernels() -> Iterator[None]:
    library = register()
    yield
    library._destroy()


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


def test_chips_that_have_no_such_form() -> None:
    a3 = parse_chip("Ascend910_9391,cann=9.0")
    moe = (torch.zeros(8, 64, dtype=BF16), torch.zeros(4, 64, 32, dtype=I8), torch.ones(4, 32, dtype=BF16))
    with pytest.raises(RefusedError, match=r"npu_grouped_matmul on A3 .*: only on A2"):
        build(experts(BF16), *moe, torch.ones(4, dtype=I64), chip=a3)
