"""Lowering of the int8 dialect ops to the NPU's: golden graphs, and numbers against the dialect's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import TestCase
from npu_kernels import register, trace
from torch import Tensor, fx

from fxquant.errors import GraphCheckError, RefusedError
from fxquant.graph import count_calls, dump, placeholders
from fxquant.output_cuts import cuts_of
from fxquant.pass_manager import check, clean
from fxquant.targets.npu_chip import NpuChip, parse_chip
from fxquant.targets.npu_lowering import Rows, constant_parts, lower_quantize_act, lower_scaled_mm
from fxquant.targets.npu_schemas import ensure_schemas, planning_for
from fxquant.targets.npu_wide import WideDecision, decide

fxq = torch.ops.fxquant
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
A2 = parse_chip("Ascend910B2,cann=9.0")
P310 = parse_chip("Ascend310P3,cann=9.0")
SPEC = "int8[1,*]dyn"


def one(n: int, k: int, *, dtype: torch.dtype = BF16, chip: NpuChip = A2, **options: object) -> WideDecision:
    return decide(n, k, chip=chip, dtype=dtype, **options)  # type: ignore[arg-type]


def split(
    n: tuple[int, ...], k: tuple[int, ...], *, sums: torch.dtype | None = None, **fields: object
) -> WideDecision:
    """A decision of small sizes: what ``decide`` gives for large ones."""
    options: dict[str, object] = {"kind": "split", "op": "npu_quant_matmul", "layout": "kn", "dtype": BF16}
    options |= {"reason": "small", "parts_n": n, "parts_k": k, "sums": sums, **fields}
    return WideDecision(**options)  # type: ignore[arg-type]


def lower(
    gm: fx.GraphModule, decision: WideDecision, *, rows: Rows | None = None, chip: NpuChip = A2
) -> fx.GraphModule:
    ensure_schemas()
    rows = rows or Rows()
    with planning_for(chip):
        for node in gm.graph.find_nodes(op="call_function", target=fxq.scaled_mm.default):
            with gm.graph.inserting_before(node):
                parts = constant_parts(gm, node.args[1], node.args[3], node.args[4], decision)
            lower_scaled_mm(gm, node, parts, decision, rows)
        clean(gm)
        for node in gm.graph.find_nodes(op="call_function", target=fxq.quantize_act.default):
            lower_quantize_act(gm, node, decision.dtype, rows)
    clean(gm)
    check(gm, after="test")
    return gm


def linear(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    codes, x_scale = fxq.quantize_act(x, SPEC)
    return fxq.scaled_mm(codes, w, x_scale, scale, bias, x.dtype)


def plain(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    codes, x_scale = fxq.quantize_act(x, SPEC)
    return fxq.scaled_mm(codes, w, x_scale, scale, None, x.dtype)


def chunks(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return torch.nn.functional.silu(plain(x, w, scale)).chunk(4, -1)


def weight(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n, 1) + 0.5


X = torch.zeros(2, 3, 64, dtype=BF16)
W = (torch.zeros(32, 64, dtype=torch.int8), torch.ones(32, 1))


class TestGoldens(TestCase):
    def lowered(
        self, run: Callable[..., object], inputs: tuple[Tensor, ...], decision: WideDecision, *,
        dynamic: bool = False, rows: Rows | None = None, chip: NpuChip = A2,
    ) -> str:  # fmt: skip
        return dump(lower(trace(run, *inputs, dynamic=dynamic), decision, rows=rows, chip=chip))

    def test_as_it_is(self) -> None:
        bias = torch.zeros(32, dtype=BF16)
        text = self.lowered(linear, (X, *W, bias), one(32, 64, bias_dtype=BF16))
        self.assertExpectedInline(
            text,
            """\
x : bfloat16[2, 3, 64]
w : int8[32, 64]
scale : float32[32, 1]
bias : bfloat16[32]
%4 = npu.npu_dynamic_quant(x) : (int8[2, 3, 64], float32[2, 3])
%5 = getitem(%4, 0) : int8[2, 3, 64]
%6 = getitem(%4, 1) : float32[2, 3]
%7 = aten.unsqueeze(%6, -1) : float32[2, 3, 1]
%8 = aten.t(w) : int8[64, 32]
%9 = aten.contiguous(%8) : int8[64, 32]
%10 = aten.reshape(scale, [32]) : float32[32]
%11 = aten.reshape(%5, [-1, 64]) : int8[6, 64]
%12 = aten.reshape(%7, [-1]) : float32[6]
%13 = npu.npu_quant_matmul(%11, %9, %10, pertoken_scale=%12, bias=bias, output_dtype=15) : bfloat16[6, 32]
%14 = aten.reshape(%13, [2, 3, 32]) : bfloat16[2, 3, 32]
return %14""",
        )

    def test_rows_that_may_be_none(self) -> None:
        text = self.lowered(plain, (X, *W), one(32, 64), dynamic=True)
        self.assertExpectedInline(
            text,
            """\
x : bfloat16[s0, s1, 64]
w : int8[32, 64]
scale : float32[32, 1]
%3 = fxquant_npu.npu_dynamic_quant(x) : (int8[s0, s1, 64], float32[s0, s1])
%4 = getitem(%3, 0) : int8[s0, s1, 64]
%5 = getitem(%3, 1) : float32[s0, s1]
%6 = aten.unsqueeze(%5, -1) : float32[s0, s1, 1]
%7 = aten.t(w) : int8[64, 32]
%8 = aten.contiguous(%7) : int8[64, 32]
%9 = aten.reshape(scale, [32]) : float32[32]
%10 = aten.reshape(%4, [-1, 64]) : int8[s0*s1, 64]
%11 = aten.reshape(%6, [-1]) : float32[s0*s1]
%12 = fxquant_npu.npu_quant_matmul(%10, %8, %9, pertoken_scale=%11, output_dtype=15) : bfloat16[s0*s1, 32]
%13 = aten.sym_size.int(%4, 0) : SymInt
%14 = aten.sym_size.int(%4, 1) : SymInt
%15 = aten.reshape(%12, [%13, %14, 32]) : bfloat16[s0, s1, 32]
return %15""",
        )

    def test_rows_that_are_proven(self) -> None:
        matrix = torch.zeros(5, 64, dtype=F16)
        text = self.lowered(plain, (matrix, *W), one(32, 64, dtype=F16), dynamic=True, rows=Rows(proven=True))
        self.assertExpectedInline(
            text,
            """\
x : float16[s0, 64]
w : int8[32, 64]
scale : float32[32, 1]
%3 = npu.npu_dynamic_quant(x) : (int8[s0, 64], float32[s0])
%4 = getitem(%3, 0) : int8[s0, 64]
%5 = getitem(%3, 1) : float32[s0]
%6 = aten.unsqueeze(%5, -1) : float32[s0, 1]
%7 = aten.t(w) : int8[64, 32]
%8 = aten.contiguous(%7) : int8[64, 32]
%9 = aten.reshape(scale, [32]) : float32[32]
%10 = aten.reshape(%6, [-1]) : float32[s0]
%11 = npu.npu_quant_matmul(%4, %8, %9, pertoken_scale=%10, output_dtype=5) : float16[s0, 32]
return %11""",
        )

    def test_no_rows(self) -> None:
        text = self.lowered(plain, (torch.zeros(0, 64, dtype=BF16), *W), one(32, 64))
        self.assertExpectedInline(
            text,
            """\
x : bfloat16[0, 64]
w : int8[32, 64]
scale : float32[32, 1]
%3 = aten.new_zeros(x, [0, 64], dtype=int8) : int8[0, 64]
%4 = aten.new_zeros(%3, [0, 32], dtype=bfloat16) : bfloat16[0, 32]
return %4""",
        )

    def test_vector_of_a_float32_model(self) -> None:
        bias = torch.zeros(32)
        text = self.lowered(linear, (torch.zeros(64), *W, bias), one(32, 64, bias_dtype=F32))
        self.assertExpectedInline(
            text,
            """\
x : float32[64]
w : int8[32, 64]
scale : float32[32, 1]
bias : float32[32]
%4 = aten.to.dtype(x, bfloat16) : bfloat16[64]
%5 = aten.unsqueeze(%4, 0) : bfloat16[1, 64]
%6 = npu.npu_dynamic_quant(%5) : (int8[1, 64], float32[1])
%7 = getitem(%6, 0) : int8[1, 64]
%8 = getitem(%6, 1) : float32[1]
%9 = aten.squeeze.dim(%7, 0) : int8[64]
%10 = aten.t(w) : int8[64, 32]
%11 = aten.contiguous(%10) : int8[64, 32]
%12 = aten.reshape(scale, [32]) : float32[32]
%13 = aten.reshape(%9, [-1, 64]) : int8[1, 64]
%14 = aten.reshape(%8, [-1]) : float32[1]
%15 = npu.npu_quant_matmul(%13, %11, %12, pertoken_scale=%14, bias=bias, output_dtype=15) : bfloat16[1, 32]
%16 = aten.to.dtype(%15, float32) : float32[1, 32]
%17 = aten.reshape(%16, [32]) : float32[32]
return %17""",
        )

    def test_transposed(self) -> None:
        text = self.lowered(plain, (X[0], *W), split((32,), (64,), kind="transpose", layout="nk.t"))
        self.assertExpectedInline(
            text,
            """\
x : bfloat16[3, 64]
w : int8[32, 64]
scale : float32[32, 1]
%3 = npu.npu_dynamic_quant(x) : (int8[3, 64], float32[3])
%4 = getitem(%3, 0) : int8[3, 64]
%5 = getitem(%3, 1) : float32[3]
%6 = aten.unsqueeze(%5, -1) : float32[3, 1]
%7 = aten.reshape(scale, [32]) : float32[32]
%8 = aten.reshape(%6, [-1]) : float32[3]
%9 = aten.t(w) : int8[64, 32]
%10 = npu.npu_quant_matmul(%4, %9, %7, pertoken_scale=%8, output_dtype=15) : bfloat16[3, 32]
return %10""",
        )

    def test_split(self) -> None:
        bias = torch.zeros(32, dtype=F16)
        decision = split((16, 16), (64,), bias_dtype=F32)
        self.assertExpectedInline(
            self.lowered(linear, (X[0], *W, bias), decision),
            """\
x : bfloat16[3, 64]
w : int8[32, 64]
scale : float32[32, 1]
bias : float16[32]
%4 = npu.npu_dynamic_quant(x) : (int8[3, 64], float32[3])
%5 = getitem(%4, 0) : int8[3, 64]
%6 = getitem(%4, 1) : float32[3]
%7 = aten.unsqueeze(%6, -1) : float32[3, 1]
%8 = aten.slice.Tensor(w, 0, 0, 16) : int8[16, 64]
%9 = aten.t(%8) : int8[64, 16]
%10 = aten.contiguous(%9) : int8[64, 16]
%11 = aten.slice.Tensor(scale, 0, 0, 16) : float32[16, 1]
%12 = aten.reshape(%11, [16]) : float32[16]
%13 = aten.slice.Tensor(bias, 0, 0, 16) : float16[16]
%14 = aten.to.dtype(%13, float32) : float32[16]
%15 = aten.slice.Tensor(w, 0, 16, 32) : int8[16, 64]
%16 = aten.t(%15) : int8[64, 16]
%17 = aten.contiguous(%16) : int8[64, 16]
%18 = aten.slice.Tensor(scale, 0, 16, 32) : float32[16, 1]
%19 = aten.reshape(%18, [16]) : float32[16]
%20 = aten.slice.Tensor(bias, 0, 16, 32) : float16[16]
%21 = aten.to.dtype(%20, float32) : float32[16]
%22 = aten.reshape(%7, [-1]) : float32[3]
%23 = npu.npu_quant_matmul(%5, %10, %12, pertoken_scale=%22, bias=%14, output_dtype=15) : bfloat16[3, 16]
%24 = npu.npu_quant_matmul(%5, %17, %19, pertoken_scale=%22, bias=%21, output_dtype=15) : bfloat16[3, 16]
%25 = aten.cat([%23, %24], -1) : bfloat16[3, 32]
return %25""",
        )

    def test_split_at_cuts(self) -> None:
        decision = split((16, 16), (64,), follows_cuts=True)
        self.assertExpectedInline(
            self.lowered(chunks, (X[0], *W), decision),
            """\
x : bfloat16[3, 64]
w : int8[32, 64]
scale : float32[32, 1]
%3 = npu.npu_dynamic_quant(x) : (int8[3, 64], float32[3])
%4 = getitem(%3, 0) : int8[3, 64]
%5 = getitem(%3, 1) : float32[3]
%6 = aten.unsqueeze(%5, -1) : float32[3, 1]
%7 = aten.slice.Tensor(w, 0, 0, 16) : int8[16, 64]
%8 = aten.t(%7) : int8[64, 16]
%9 = aten.contiguous(%8) : int8[64, 16]
%10 = aten.slice.Tensor(scale, 0, 0, 16) : float32[16, 1]
%11 = aten.reshape(%10, [16]) : float32[16]
%12 = aten.slice.Tensor(w, 0, 16, 32) : int8[16, 64]
%13 = aten.t(%12) : int8[64, 16]
%14 = aten.contiguous(%13) : int8[64, 16]
%15 = aten.slice.Tensor(scale, 0, 16, 32) : float32[16, 1]
%16 = aten.reshape(%15, [16]) : float32[16]
%17 = aten.reshape(%6, [-1]) : float32[3]
%18 = npu.npu_quant_matmul(%4, %9, %11, pertoken_scale=%17, output_dtype=15) : bfloat16[3, 16]
%19 = npu.npu_quant_matmul(%4, %14, %16, pertoken_scale=%17, output_dtype=15) : bfloat16[3, 16]
%20 = aten.silu(%18) : bfloat16[3, 16]
%21 = aten.silu(%19) : bfloat16[3, 16]
%22 = aten.slice.Tensor(%20, -1, 0, 8) : bfloat16[3, 8]
%23 = aten.slice.Tensor(%20, -1, 8, 16) : bfloat16[3, 8]
%24 = aten.slice.Tensor(%21, -1, 0, 8) : bfloat16[3, 8]
%25 = aten.slice.Tensor(%21, -1, 8, 16) : bfloat16[3, 8]
return [%22, %23, %24, %25]""",
        )

    def test_split_of_k(self) -> None:
        bias = torch.zeros(32, dtype=BF16)
        decision = split((32,), (32, 32), sums=torch.int32, bias_dtype=F32)
        self.assertExpectedInline(
            self.lowered(linear, (X[0], *W, bias), decision),
            """\
x : bfloat16[3, 64]
w : int8[32, 64]
scale : float32[32, 1]
bias : bfloat16[32]
%4 = npu.npu_dynamic_quant(x) : (int8[3, 64], float32[3])
%5 = getitem(%4, 0) : int8[3, 64]
%6 = getitem(%4, 1) : float32[3]
%7 = aten.unsqueeze(%6, -1) : float32[3, 1]
%8 = aten.slice.Tensor(w, 1, 0, 32) : int8[32, 32]
%9 = aten.t(%8) : int8[32, 32]
%10 = aten.contiguous(%9) : int8[32, 32]
%11 = aten.slice.Tensor(w, 1, 32, 64) : int8[32, 32]
%12 = aten.t(%11) : int8[32, 32]
%13 = aten.contiguous(%12) : int8[32, 32]
%14 = aten.reshape(scale, [32]) : float32[32]
%15 = aten.to.dtype(bias, float32) : float32[32]
%16 = aten.slice.Tensor(%5, 1, 0, 32) : int8[3, 32]
%17 = aten.contiguous(%16) : int8[3, 32]
%18 = aten.slice.Tensor(%5, 1, 32, 64) : int8[3, 32]
%19 = aten.contiguous(%18) : int8[3, 32]
%20 = aten.reshape(%7, [-1, 1]) : float32[3, 1]
%21 = aten.new_ones(%20, [1]) : float32[1]
%22 = npu.npu_quant_matmul(%17, %10, %21, output_dtype=3) : int32[3, 32]
%23 = npu.npu_quant_matmul(%19, %13, %21, output_dtype=3) : int32[3, 32]
%24 = aten.add.Tensor(%22, %23) : int32[3, 32]
%25 = aten.to.dtype(%24, float32) : float32[3, 32]
%26 = aten.mul.Tensor(%25, %20) : float32[3, 32]
%27 = aten.mul.Tensor(%26, %14) : float32[3, 32]
%28 = aten.add.Tensor(%27, %15) : float32[3, 32]
%29 = aten.to.dtype(%28, bfloat16) : bfloat16[3, 32]
return %29""",
        )

    def test_310p(self) -> None:
        decision = one(32, 64, dtype=F16, chip=P310)
        text = self.lowered(plain, (X.to(F16), *W), decision, dynamic=True, chip=P310)
        self.assertExpectedInline(
            text,
            """\
x : float16[s0, s1, 64]
w : int8[32, 64]
scale : float32[32, 1]
%3 = aten.reshape(scale, [32]) : float32[32]
%4 = aten.reshape(x, [-1, 64]) : float16[s0*s1, 64]
%5 = fxquant_npu.npu_quant_matmul_dequant(%4, w, %3, quant_mode=pertoken) : float16[s0*s1, 32]
%6 = aten.sym_size.int(x, 0) : SymInt
%7 = aten.sym_size.int(x, 1) : SymInt
%8 = aten.reshape(%5, [%6, %7, 32]) : float16[s0, s1, 32]
return %8""",
        )


@pytest.fixture
def _kernels() -> Iterator[None]:
    library = register()
    yield
    library._destroy()


DECISIONS = {
    "as is": one(48, 64),
    "transpose": split((48,), (64,), kind="transpose", layout="nk.t"),
    "split": split((16, 32), (64,)),
    "sums": split((48,), (32, 32), sums=torch.int32),
    "float sums": split((16, 32), (32, 16, 16), sums=F32, layout="nk.t"),
    "310P": one(48, 64, dtype=F16, chip=P310),
}
SHAPES = [(64,), (1, 64), (17, 64), (0, 64), (2, 3, 64), (2, 0, 64), (1, 2, 3, 64), (2, 1, 2, 2, 64)]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("form", DECISIONS)
def test_numbers(form: str, dynamic: bool) -> None:
    """Inputs of 1 to 5 dims, with 0, 1 and 17 rows, in three dtypes, and biases of each dtype."""
    w, scale = weight(48, 64)
    for shape in SHAPES[2:6] if dynamic else SHAPES:
        for dtype in (F16, BF16, F32):
            for bias_dtype in (None, F16, BF16, F32) if len(shape) == 2 and not dynamic else (None,):
                if form == "310P" and bias_dtype is not None:
                    continue
                _compare(DECISIONS[form], shape, dtype, bias_dtype, (w, scale), dynamic=dynamic)


def _compare(
    decision: WideDecision, shape: tuple[int, ...], dtype: torch.dtype, bias_dtype: torch.dtype | None,
    weights: tuple[Tensor, Tensor], *, dynamic: bool,
) -> None:  # fmt: skip
    compute = F16 if dtype == F16 or decision.op == "npu_quant_matmul_dequant" else BF16
    taken = bias_dtype if bias_dtype == compute and decision.sums is None else F32
    decision = replace(decision, dtype=compute, bias_dtype=taken if bias_dtype else None)
    x = torch.randn(shape).to(dtype)
    inputs: tuple[Tensor, ...] = (x, *weights)
    run: Callable[..., Tensor] = plain
    if bias_dtype is not None:
        inputs, run = (*inputs, torch.randn(48).to(bias_dtype)), linear
    example = torch.zeros([max(size, 2) for size in shape], dtype=dtype) if dynamic else x
    chip = P310 if decision.op == "npu_quant_matmul_dequant" else A2
    gm = lower(trace(run, example, *inputs[1:], dynamic=dynamic), decision, chip=chip)
    assert not any("fxquant.s" in name for name in count_calls(gm))
    got, want = gm(*inputs), run(*inputs)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    # One rounding of the result (and, from float32, of the activation, which moves codes by one).
    torch.testing.assert_close(
        got, want, rtol=0.02, atol=0.02 * float(want.abs().max()) if want.numel() else 0
    )
    if dtype == compute and decision.sums is None:
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("rows", [0, 3])
def test_guarded_ops_are_sound(rows: int) -> None:
    guarded = torch.ops.fxquant_npu
    x, w = torch.randint(-127, 128, (rows, 64), dtype=torch.int8), torch.zeros(64, 32, dtype=torch.int8)
    kwargs = {"pertoken_scale": torch.ones(rows), "output_dtype": 15}
    torch.library.opcheck(guarded.npu_quant_matmul.default, (x, w, torch.ones(32)), kwargs)
    torch.library.opcheck(guarded.npu_dynamic_quant.default, (torch.randn(rows, 64).to(F16),))


def cut_by_split(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return plain(x, w, scale).split([16, 8, 8], dim=1)


def cut_by_slices(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    out = plain(x, w, scale)
    return out[:, :16], out[..., 16:]


def cut_by_unbind(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return plain(x, w, scale).unflatten(-1, (4, 8)).unbind(-2)


def cut_by_view_and_select(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    groups = plain(x, w, scale).view(x.shape[0], 2, 16)
    return groups[:, 0], groups[:, -1]


def groups_across(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return plain(x, w, scale).unflatten(-1, (4, 8)).unbind(-1)


def read_whole(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    out = plain(x, w, scale)
    return out[:, :16], out.sum(-1)


def cut_rows(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return plain(x, w, scale).chunk(2, 0)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("run", "cuts"),
    [
        (chunks, (8, 16, 24)),
        (cut_by_split, (16, 24)),
        (cut_by_slices, (16,)),
        (cut_by_unbind, (8, 16, 24)),
        (cut_by_view_and_select, (16,)),
        (groups_across, ()),
        (read_whole, ()),
        (cut_rows, ()),
    ],
)
def test_cuts_of_consumers(run: Callable[..., Any], cuts: tuple[int, ...], dynamic: bool) -> None:
    w, scale = weight(32, 64)
    x = torch.randn(6, 64).to(BF16)
    gm = trace(run, x, w, scale, dynamic=dynamic)
    (node,) = gm.graph.find_nodes(op="call_function", target=fxq.scaled_mm.default)
    assert cuts_of(node) == cuts
    counts = count_calls(lower(gm, split((16, 16), (64,), follows_cuts=True)))
    assert ("aten.cat" in counts) == (not cuts)
    assert counts["fxquant_npu.npu_quant_matmul" if dynamic else "npu.npu_quant_matmul"] == 2
    for got, want in zip(gm(x, w, scale), run(x, w, scale), strict=True):
        torch.testing.assert_close(got, want)


def shared(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    codes, x_scale = fxq.quantize_act(x, SPEC)
    return tuple(fxq.scaled_mm(codes, w, x_scale, scale, None, x.dtype) for _ in range(3))


def test_an_activation_is_quantized_once() -> None:
    counts = count_calls(lower(trace(shared, X, *W), one(32, 64)))
    assert counts["npu.npu_dynamic_quant"] == 1
    assert counts["npu.npu_quant_matmul"] == 3


def test_codes_of_unknown_origin() -> None:
    def given(codes: Tensor, w: Tensor, x_scale: Tensor, scale: Tensor) -> Tensor:
        return fxq.scaled_mm(codes, w, x_scale, scale, None, F16)

    gm = trace(given, torch.zeros(3, 64, dtype=torch.int8), W[0], torch.ones(3, 1), W[1])
    assert len(placeholders(gm)) == 4
    with pytest.raises(GraphCheckError, match="are not of a quantize_act"):
        lower(gm, one(32, 64, dtype=F16, chip=P310), chip=P310)


def test_a_wrong_decision_fails_when_planning() -> None:
    gm = trace(plain, X, torch.empty(65536, 64, dtype=torch.int8), torch.ones(65536, 1))
    with pytest.raises(RefusedError, match="limit 65535"):
        lower(gm, split((65536,), (64,), kind="as is"))
