"""Grouped products: each group of rows with one expert, equal to the plain product of these rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from fxquant import grouped_ops as _grouped_ops
from fxquant import numerics
from fxquant.numerics.experts import dequantize_experts, expert_of, quantize_experts
from fxquant.scheme import SCHEMES, Scheme
from fxquant.targets import cpu as _cpu
from reference import error

assert _grouped_ops, _cpu

fxq = torch.ops.fxquant
E, S, N, K = 4, 11, 40, 256
ENDS = {
    "even": (3, 6, 9, 11),
    "one expert": (0, 0, 11, 11),
    "rows of nobody": (2, 2, 5, 7),
    "no rows": (0, 0, 0, 0),
}
DYNAMIC = [scheme for scheme in SCHEMES.values() if scheme.weight and not (scheme.act and scheme.act.static)]
FLOATS = (torch.float32, torch.bfloat16)


def groups(ends: tuple[int, ...]) -> list[slice]:
    return [slice(a, b) for a, b in zip((0, *ends), ends, strict=False)]


def product(scheme: Scheme, x: Tensor, weight: tuple[Tensor, ...], last: Tensor | None, op: str) -> Tensor:
    """The op of ``scheme`` on a quantized ``x``."""
    spec = str(scheme.weight)
    call = getattr(fxq, op.partition("::")[2])
    if scheme.act is None:
        return call(x, list(weight), spec, last)
    codes, scale = fxq.quantize_act(x, str(scheme.act))
    if scheme.op == "fxquant::scaled_mm":
        return call(codes, weight[0], scale, weight[1], last, x.dtype)
    return call(codes, scale, str(scheme.act), list(weight), spec, x.shape[1], last, x.dtype)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("scheme", DYNAMIC, ids=lambda scheme: scheme.name)
def test_each_group_is_a_plain_product(scheme: Scheme, ends: tuple[int, ...]) -> None:
    assert scheme.weight is not None
    x, w = torch.randn(S, K), torch.randn(E, N, K) * torch.tensor([0.01, 1.0, 3.0, 100.0])[:, None, None]
    weight = quantize_experts(w, scheme.weight)
    got = product(scheme, x, weight, torch.tensor(ends), scheme.grouped_op)
    expected = torch.zeros(S, N)
    for i, rows in enumerate(groups(ends)):
        one = numerics.quantize_weight(w[i], scheme.weight)
        assert all(torch.equal(a, b) for a, b in zip(expert_of(weight, i), one, strict=True))
        whole = product(scheme, x, tuple(one), None, scheme.op)  # scales of x may span all rows
        expected[rows] = whole[rows]
    assert torch.equal(got[ends[-1] :], expected[ends[-1] :])
    for rows in groups(ends):  # float sums of one group may have another order: units of 2^-24
        assert error(got[rows], expected[rows]) < 1e-6


@pytest.mark.parametrize("scheme", DYNAMIC, ids=lambda scheme: scheme.name)
def test_float_values_are_those_of_each_expert(scheme: Scheme) -> None:
    assert scheme.weight is not None
    w = torch.randn(E, N, K)
    weight = quantize_experts(w, scheme.weight)
    spec = scheme.weight
    got = fxq.dequantize_weight(list(weight), str(spec), K, torch.bfloat16)
    one = numerics.dequantize_weight(numerics.quantize_weight(w[2], spec), spec, K, torch.bfloat16)
    assert torch.equal(got[2], one)
    assert torch.equal(got, dequantize_experts(weight, spec, K, torch.bfloat16))
    if not any(part.is_floating_point() and part.itemsize == 1 for part in weight):
        # opcheck makes values of its own of the arguments, which torch cannot for float8.
        opcheck(fxq.dequantize_weight.default, (list(weight), str(spec), K, torch.bfloat16))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_opcheck(dtype: torch.dtype, index: torch.dtype) -> None:
    x, offsets = torch.randn(S, K).to(dtype), torch.tensor(ENDS["rows of nobody"], dtype=index)
    w = torch.randn(E, N, K)
    spec = SCHEMES["int8"].weight
    assert spec is not None
    codes, scale = quantize_experts(w, spec)
    x_codes, x_scale = fxq.quantize_act(x, "int8[1,*]dyn")
    args = (x_codes, codes, x_scale, scale, offsets, dtype)
    opcheck(fxq.grouped_scaled_mm.default, args)
    opcheck(torch.ops.fxquant_cpu.grouped_scaled_mm.default, args)
    assert torch.equal(fxq.grouped_scaled_mm(*args), torch.ops.fxquant_cpu.grouped_scaled_mm(*args))
    opcheck(fxq.grouped_weight_only_mm.default, (x, [codes, scale], "int8[1,*]", offsets))
    int4 = SCHEMES["w4a8_g128"]
    assert int4.weight is not None
    assert int4.act is not None
    packed = list(quantize_experts(w, int4.weight))
    given = (x_codes, x_scale, str(int4.act), packed, str(int4.weight), K, offsets, dtype)
    opcheck(fxq.grouped_block_mm.default, given)


def test_sums_are_exact() -> None:
    """Past 2^24, where float32 sums would be off."""
    k = 4096
    x_codes = torch.full((2, k), 127, dtype=torch.int8)
    x_codes[1, -1] = 126
    w_codes = torch.full((2, 3, k), 127, dtype=torch.int8)
    ones, rows = torch.ones(2, 1), torch.ones(2, 3, 1)
    offsets = torch.tensor([1, 2])
    for op in (fxq.grouped_scaled_mm, torch.ops.fxquant_cpu.grouped_scaled_mm):
        got = op(x_codes, w_codes, ones, rows, offsets, torch.float32).double()
        assert got[0, 0] == float(torch.tensor(k * 127 * 127, dtype=torch.int32).float())
        assert got[1, 0] == float(torch.tensor(k * 127 * 127 - 127, dtype=torch.int32).float())


OFFSETS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_codes": torch.zeros(2, 3, 8, dtype=torch.int8)}, r"x must be \[S, K\]"),
        ({"w_codes": torch.zeros(3, 8, dtype=torch.int8)}, r"constants must be \[E"),
        ({"w_scale": torch.ones(3, 3, 1)}, r"constants must be \[E"),
        ({"offsets": torch.tensor([1, 2, 3])}, "offsets must be int32 or int64"),
        ({"offsets": torch.tensor([1.0, 2.0])}, "offsets must be int32 or int64"),
        ({"x_codes": torch.zeros(2, 7, dtype=torch.int8)}, "K = 7"),
        ({"out_dtype": torch.int32}, "out_dtype must be"),
    ],
)
def test_refusals(change: dict[str, object], words: str) -> None:
    args = {
        "x_codes": torch.zeros(2, 8, dtype=torch.int8),
        "w_codes": torch.zeros(2, 3, 8, dtype=torch.int8),
        "x_scale": torch.ones(2, 1),
        "w_scale": torch.ones(2, 3, 1),
        "offsets": OFFSETS,
        "out_dtype": torch.float32,
    } | change
    with pytest.raises(RuntimeError, match=words):
        fxq.grouped_scaled_mm(**args)
