"""The dialect's ops: schema, fake and reference agree, integers are exact, what cannot be done is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils import _pytree as pytree

from fxquant import numerics
from fxquant.errors import ConfigError, QuantizedWeightError, TiedWeightError
from fxquant.scheme import SCHEMES
from fxquant.targets import cpu as _cpu

fxq = torch.ops.fxquant
SCALED_MM = (fxq.scaled_mm.default, torch.ops.fxquant_cpu.scaled_mm.default)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ACT, WEIGHT = "int8[1,*]dyn", "int8[1,*]"


def codes(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda x: torch.cat([x, x])[x.shape[0] :],
    "expanded": lambda x: x[:1].expand(x.shape),
}


SHAPES = [(6,), (3, 6), (2, 3, 6), (2, 1, 3, 6), (0, 6), (2, 0, 6), (3, 0), (3, 1)]
CASES = [("contiguous", shape, dtype) for shape in SHAPES for dtype in FLOATS]
CASES += [(layout, shape, torch.bfloat16) for layout in list(LAYOUTS)[1:] for shape in SHAPES[1:4]]


@pytest.mark.parametrize(("layout", "shape", "dtype"), CASES)
def test_quantize_act(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](torch.randn(shape).to(dtype))
    opcheck(fxq.quantize_act.default, (x, ACT))
    got = fxq.quantize_act(x, ACT)
    want = fxq.quantize_act(x.contiguous(), ACT)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(got, want, strict=True))
    assert (got[0].shape, got[1].shape) == (x.shape, (*x.shape[:-1], 1))


MATRICES = [case for case in CASES if len(case[1]) == 2]


@pytest.mark.parametrize(("layout", "shape", "dtype"), MATRICES)
def test_quantize_and_dequantize_weight(layout: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = LAYOUTS[layout](torch.randn(shape).to(dtype))
    opcheck(fxq.quantize_weight.default, (w, WEIGHT))
    c, s = fxq.quantize_weight(w.contiguous(), WEIGHT)
    assert all(torch.equal(a, b) for a, b in zip(fxq.quantize_weight(w, WEIGHT), (c, s), strict=True))
    c, s = LAYOUTS[layout](c), LAYOUTS[layout](s)
    opcheck(fxq.dequantize_weight.default, ([c, s], WEIGHT, w.shape[1], dtype))
    assert torch.equal(fxq.dequantize_weight([c, s], WEIGHT, w.shape[1], dtype), (c.float() * s).to(dtype))


SPECS = tuple(dict.fromkeys(str(scheme.weight) for scheme in SCHEMES.values() if scheme.weight is not None))
ACTS = {str(s.act): s for s in SCHEMES.values() if s.act is not None and s.op == "fxquant::block_mm"}


def check(op: Any, args: tuple[Any, ...]) -> None:
    """``opcheck``; its check of the schema multiplies results, which torch does not do for float8."""
    whole = pytree.tree_leaves((args, op(*args)))
    small = any(isinstance(leaf, Tensor) and leaf.dtype in SMALL_FLOATS for leaf in whole)
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(op, args, test_utils=utils if small else ("test_schema", *utils))


SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(5, 40), (130, 257), (1, 1), (0, 8), (3, 0)])
def test_weights_of_every_spec(spec: str, shape: tuple[int, int]) -> None:
    w = torch.randn(shape)
    check(fxq.quantize_weight.default, (w, spec))
    made = fxq.quantize_weight(w, spec)
    check(fxq.dequantize_weight.default, (made, spec, shape[1], torch.bfloat16))
    x = torch.randn(2, 3, shape[1])
    check(fxq.weight_only_mm.default, (x, made, spec, torch.randn(shape[0])))
    want = x @ fxq.dequantize_weight(made, spec, shape[1], torch.float32).t()
    torch.testing.assert_close(fxq.weight_only_mm(x, made, spec, None), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("lead", [(), (4,), (2, 3), (0,)])
@pytest.mark.parametrize("k", [40, 257])
def test_products_of_blocks(act: str, lead: tuple[int, ...], k: int) -> None:
    spec = str(ACTS[act].weight)
    x, w, bias = torch.randn(*lead, k), torch.randn(7, k), torch.randn(7)
    check(fxq.quantize_act.default, (x, act))
    x_codes, x_scale = fxq.quantize_act(x, act)
    args = (x_codes, x_scale, act, fxq.quantize_weight(w, spec), spec, k, bias, torch.bfloat16)
    check(fxq.block_mm.default, args)
    out = fxq.block_mm(*args)
    assert out.shape == (*lead, 7)
    want = x @ w.t() + bias
    assert (out.float() - want).norm() <= 0.4 * want.norm()


@pytest.mark.parametrize(("layout", "shape", "dtype"), CASES)
def test_static_codes_and_rotation(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](torch.randn(shape).to(dtype))
    scale = torch.tensor([0.02])
    opcheck(fxq.quantize_act_static.default, (x, scale, "int8[*,*]static"))
    got = fxq.quantize_act_static(x, scale, "int8[*,*]static")
    assert torch.equal(got, (x.float() / 0.02).round().clamp(-127, 127).to(torch.int8))
    if shape[-1] % 2 == 0 and shape[-1]:
        opcheck(fxq.hadamard.default, (x, 2))
        torch.testing.assert_close(fxq.hadamard(fxq.hadamard(x.float(), 2), 2), x.float())


OUT_AND_BIAS = [(torch.float32, None), *((dtype, dtype) for dtype in FLOATS), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("op", SCALED_MM)
@pytest.mark.parametrize("shape", SHAPES[:-1])
@pytest.mark.parametrize(("dtype", "bias"), OUT_AND_BIAS)
def test_scaled_mm(op: Any, dtype: torch.dtype, shape: tuple[int, ...], bias: torch.dtype | None) -> None:
    k = shape[-1]
    b = None if bias is None else torch.randn(5).to(bias)
    args = (codes(*shape), codes(5, k), scales(*shape[:-1], 1), scales(5, 1), b, dtype)
    opcheck(op, args)
    got = op(*args)
    want = float_scaled_mm(*args)
    assert got.dtype == dtype
    assert got.shape == want.shape == (*shape[:-1], 5)
    # Three roundings to float32, then one to the output; where the bias cancels the product, the
    # former are relative to it: 6 * 127^2 * 2.25 * 2^-23 < 0.03.
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=0.03)


def float_scaled_mm(x: Tensor, w: Tensor, xs: Tensor, ws: Tensor, bias: Tensor | None, _: Any) -> Tensor:
    out = (x.double() @ w.double().t()) * xs.double() * ws.double().reshape(-1)
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("op", SCALED_MM)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_mm_of_any_layout(op: Any, layout: str) -> None:
    lay = LAYOUTS[layout]
    args = (lay(codes(2, 3, 8)), lay(codes(5, 8)), lay(scales(2, 3, 1)), lay(scales(5, 1)), lay(scales(5)))
    opcheck(op, (*args, torch.float32))
    plain = [arg.contiguous() for arg in args]
    assert torch.equal(op(*args, torch.float32), op(*plain, torch.float32))


@pytest.mark.parametrize("op", SCALED_MM)
def test_no_output_features_and_cuts_of_a_weight(op: Any) -> None:
    w, s = codes(9, 6), scales(9, 1)
    x, xs = codes(4, 6), scales(4, 1)
    assert op(x, w[:0], xs, s[:0], None, torch.float32).shape == (4, 0)
    whole = op(x, w, xs, s, None, torch.float32)
    assert torch.equal(op(x, w[1:9:3], xs, s[1:9:3], None, torch.float32), whole[:, 1:9:3])


def full(m: int, k: int, value: int) -> Tensor:
    return torch.full((m, k), value, dtype=torch.int8)


@pytest.mark.parametrize("op", SCALED_MM)
@pytest.mark.parametrize("k", [64, 1024, 1040, 1041, 1056, 4104, 8200])
@pytest.mark.parametrize("sign", [127, -127])
def test_sums_are_exact_past_float32(op: Any, k: int, sign: int) -> None:
    """All of +-127: 127^2 * 1041 passes 2^24, where float32 skips integers."""
    mixed = torch.where(torch.rand(3, k) < 0.7, 127, -127).to(torch.int8)
    mixed[:, -1] = 126  # an odd sum, which float32 cannot hold past 2^24
    x, w = torch.cat([full(1, k, 127), mixed]), torch.cat([full(1, k, sign), mixed])
    sums = x.long() @ w.long().t()
    if op in SCALED_MM[1:] and _cpu.int_mm_fault() is not None:
        pytest.skip("torch._int_mm is not exact on this CPU, and not used")
    ones = torch.ones(4, 1)
    got = op(x, w, ones, ones, None, torch.float32)
    assert torch.equal(got, sums.float())  # one rounding, at the end
    assert torch.equal(numerics.int_matmul(x, w).long(), sums)


@pytest.mark.parametrize("op", SCALED_MM)
def test_autocast_does_not_round_the_sums(op: Any) -> None:
    x = full(2, 1056, 127)
    ones = torch.ones(2, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = op(x, x, ones, ones, None, torch.float32)
        c, s = fxq.quantize_act(torch.ones(2, 8), ACT)
    assert got.unique().tolist() == [127 * 127 * 1056]
    assert (s.dtype, c.unique().tolist()) == (torch.float32, [127])


# What each op refuses. The same operands are given as real tensors, as fakes and on meta.
X = torch.randn(3, 8)
GOOD_MM = (codes(3, 8), codes(5, 8), scales(3, 1), scales(5, 1), torch.zeros(5), torch.float32)


def mm_with(position: int, value: object) -> tuple[object, ...]:
    return (*GOOD_MM[:position], value, *GOOD_MM[position + 1 :])


BAD_MM = {
    "wrong K": (mm_with(0, codes(3, 7)), "K = 7"),
    "x of rank 0": (mm_with(0, codes()), "x_codes must be"),
    "float x": (mm_with(0, X), "x_codes must be torch.int8"),
    "int32 x": (mm_with(0, codes(3, 8).int()), "x_codes must be torch.int8"),
    "int32 w": (mm_with(1, codes(5, 8).int()), "w_codes must be codes"),
    "w of rank 1": (mm_with(1, codes(8)), "w_codes must be"),
    "w of rank 3": (mm_with(1, codes(1, 5, 8)), "w_codes must be"),
    "x_scale without its last axis": (mm_with(2, scales(3)), "x_scale must be"),
    "x_scale of another M": (mm_with(2, scales(4, 1)), "x_scale must be"),
    "x_scale of rank 3": (mm_with(2, scales(1, 1, 1)), "x_scale must be"),
    "bfloat16 x_scale": (mm_with(2, scales(3, 1).bfloat16()), "scales must be float32"),
    "w_scale of another N": (mm_with(3, scales(4, 1)), "w_scale must be"),
    "flat w_scale": (mm_with(3, scales(5)), "w_scale must be"),
    "float64 w_scale": (mm_with(3, scales(5, 1).double()), "scales must be float32"),
    "bias of another N": (mm_with(4, torch.zeros(4)), "bias must be"),
    "bias of rank 2": (mm_with(4, torch.zeros(1, 5)), "bias must be"),
    "int out_dtype": (mm_with(5, torch.int32), "out_dtype must be"),
}
BAD = {
    **{
        f"{op.name()}: {what}": (op, args, RuntimeError, text)
        for op in SCALED_MM
        for what, (args, text) in BAD_MM.items()
    },
    "quantize_act: int": (fxq.quantize_act.default, (codes(3, 8), ACT), RuntimeError, "takes"),
    "quantize_act: float64": (fxq.quantize_act.default, (X.double(), ACT), RuntimeError, "takes"),
    "quantize_act: rank 0": (fxq.quantize_act.default, (torch.tensor(1.0), ACT), RuntimeError, "rank 0"),
    "quantize_act: spec": (fxq.quantize_act.default, (X, "int8"), ConfigError, "not a quantization spec"),
    "quantize_act: 4 bits": (fxq.quantize_act.default, (X, "int4[1,*]"), NotImplementedError, "int4"),
    "quantize_weight: int": (fxq.quantize_weight.default, (codes(3, 8), WEIGHT), RuntimeError, "takes"),
    "quantize_weight: rank 1": (fxq.quantize_weight.default, (X[0], WEIGHT), RuntimeError, r"\[N, K\]"),
    "quantize_weight: rank 3": (fxq.quantize_weight.default, (X[None], WEIGHT), RuntimeError, r"\[N, K\]"),
    "quantize_weight: spec": (fxq.quantize_weight.default, (X, "int4[1,32]dyn"), NotImplementedError, "dyn"),
    "quantize_act_static: scales": (
        fxq.quantize_act_static.default,
        (X, scales(2), "int8[*,*]static"),
        RuntimeError,
        "act_scale must be",
    ),
    "hadamard: K": (fxq.hadamard.default, (X, 16), RuntimeError, "do not divide K = 8"),
    "hadamard: block": (fxq.hadamard.default, (X, 3), RuntimeError, "power of two"),
    "weight_only_mm: K": (
        fxq.weight_only_mm.default,
        (torch.randn(3, 7), [codes(5, 8), scales(5, 1)], WEIGHT, None),
        RuntimeError,
        "codes of int8",
    ),
    "weight_only_mm: one constant": (
        fxq.weight_only_mm.default,
        (X, [codes(5, 8)], WEIGHT, None),
        RuntimeError,
        "codes, scale, got 1",
    ),
    "weight_only_mm: bias": (
        fxq.weight_only_mm.default,
        (X, [codes(5, 8), scales(5, 1)], WEIGHT, torch.zeros(4)),
        RuntimeError,
        "bias must be",
    ),
    "block_mm: columns": (
        fxq.block_mm.default,
        (codes(3, 8), scales(3, 1), ACT, [codes(5, 8), scales(5, 1)], WEIGHT, 9, None, torch.float32),
        RuntimeError,
        "x_codes has 8 columns",
    ),
    "dequantize_weight: float codes": (
        fxq.dequantize_weight.default,
        ([X, scales(3, 1)], WEIGHT, 8, torch.float32),
        RuntimeError,
        "codes of int8",
    ),
    "dequantize_weight: scale of another N": (
        fxq.dequantize_weight.default,
        ([codes(3, 8), scales(4, 1)], WEIGHT, 8, torch.float32),
        RuntimeError,
        "scale of int8",
    ),
    "dequantize_weight: bfloat16 scale": (
        fxq.dequantize_weight.default,
        ([codes(3, 8), scales(3, 1).bfloat16()], WEIGHT, 8, torch.float32),
        RuntimeError,
        "scale of int8",
    ),
    "dequantize_weight: int out": (
        fxq.dequantize_weight.default,
        ([codes(3, 8), scales(3, 1)], WEIGHT, 8, torch.int8),
        RuntimeError,
        "dtype must be",
    ),
    "check_same: shapes": (fxq.check_same.default, (X, X[:2], "a and b"), TiedWeightError, "a and b"),
}


@pytest.mark.parametrize("case", BAD)
def test_real_fake_and_meta_refuse_the_same(case: str) -> None:
    op, args, error, text = BAD[case]
    with pytest.raises(error, match=text):
        op(*args)
    mode = FakeTensorMode()
    with pytest.raises(error, match=text), mode:
        op(*pytree.tree_map_only(Tensor, mode.from_tensor, args))
    with pytest.raises(error, match=text):
        op(*pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args))


@pytest.mark.parametrize("op", SCALED_MM)
def test_sums_that_int32_cannot_hold_are_refused(op: Any) -> None:
    k = numerics.INT32_K + 1
    x, ones = torch.empty((1, k), dtype=torch.int8, device="meta"), torch.empty((1, 1), device="meta")
    with pytest.raises(RuntimeError, match="overflows int32"):
        op(x, x, ones, ones, None, torch.float32)
    assert op(x[:, 1:], x[:, 1:], ones, ones, None, torch.float32).shape == (1, 1)
    assert numerics.INT32_K * 127**2 < 2**31 <= k * 127**2


BACKWARD: dict[str, Callable[[], Tensor]] = {
    "quantize_act": lambda: fxq.quantize_act(torch.ones(2, 8, requires_grad=True), ACT)[1],
    "quantize_weight": lambda: fxq.quantize_weight(torch.ones(2, 8, requires_grad=True), WEIGHT)[1],
    "dequantize_weight": lambda: fxq.dequantize_weight(
        [codes(2, 8), torch.ones(2, 1, requires_grad=True)], WEIGHT, 8, torch.float32
    ),
    **{op.name(): lambda op=op: op(*mm_with(4, torch.zeros(5, requires_grad=True))) for op in SCALED_MM},
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_raises_with_what_to_do(name: str) -> None:
    out = BACKWARD[name]()
    assert out.requires_grad
    with pytest.raises(QuantizedWeightError, match=rf"{name}.*no_grad.*ignore"):
        out.sum().backward()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("op", SCALED_MM)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_bad_token_shows_and_stays_in_its_row(dtype: torch.dtype, op: Any, bad: float) -> None:
    x = torch.randn(4, 8).to(dtype)
    w, s = fxq.quantize_weight(torch.randn(5, 8), WEIGHT)
    clean = op(*_pick(fxq.quantize_act(x, ACT), w, s), None, dtype)
    x[2, 3] = bad
    got = op(*_pick(fxq.quantize_act(x, ACT), w, s), None, dtype)
    assert not got[2].isfinite().any()
    rest = [0, 1, 3]
    assert torch.equal(got[rest], clean[rest])
    assert clean.isfinite().all()


def _pick(act: tuple[Tensor, Tensor], w: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return act[0], w, act[1], s


def test_check_same() -> None:
    value = torch.tensor([1.0, 2.5])
    opcheck(fxq.check_same.default, (value, value.clone(), "a and b"))
    fxq.check_same(value, value.clone(), "a and b")
    fxq.check_same(value.bfloat16(), value, "stored in two dtypes")
    for other in (value + 1e-6, value[:1], value[None]):
        with pytest.raises(TiedWeightError, match=r"a and b.*tie_word_embeddings"):
            fxq.check_same(value, other, "a and b")


def test_check_same_is_not_dead_code() -> None:
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.call_function(fxq.check_same.default, (a, b, "a and b"))
    graph.output(a)
    graph.eliminate_dead_code()
    assert len(graph.find_nodes(op="call_function", target=fxq.check_same.default)) == 1
