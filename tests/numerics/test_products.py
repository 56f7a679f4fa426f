"""Products of codes against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxquant import numerics
from fxquant.materialize.meter import LiveBytes
from fxquant.numerics import blocks, matmul
from fxquant.scheme import FULL, SCHEMES, QuantSpec, Scheme
from tests.numerics.matrices import FLOATS, SCHEME_SPECS, normal

BLOCK_MM = [scheme for scheme in SCHEMES.values() if scheme.op.endswith("block_mm")]
SCALED_MM = [
    scheme
    for scheme in SCHEMES.values()
    if scheme.op.endswith("scaled_mm") and scheme.act is not None and scheme.act.dynamic
]


def names(schemes: list[Scheme]) -> list[str]:
    return [scheme.name for scheme in schemes]


def act_values(codes: Tensor, scale: Tensor, spec: QuantSpec, k: int) -> Tensor:
    """Codes ``[m, k]`` times scale, in float64."""
    one_level = QuantSpec(codes=spec.codes, block=spec.block, scale="f32" if spec.two_level else spec.scale)
    return numerics.dequantize_weight((codes, scale), one_level, k, torch.float32).double()


def test_the_schemes_that_are_here() -> None:
    assert names(BLOCK_MM) == ["w4a8_g128", "fp8_block", "mxfp8", "mxfp4", "nvfp4"]
    assert names(SCALED_MM) == ["int8", "fp8", "fp8_tensor"]


@pytest.mark.parametrize("scheme", BLOCK_MM, ids=names(BLOCK_MM))
@pytest.mark.parametrize(
    "shape", [(3, 5, 300), (1, 260, 129), (130, 3, 16), (2, 4, 1), (0, 4, 32), (3, 0, 32)]
)
def test_block_mm(scheme: Scheme, shape: tuple[int, int, int]) -> None:
    assert scheme.weight is not None
    assert scheme.act is not None
    m, n, k = shape
    x, w, bias = normal(m, k), normal(n, k, 1), normal(1, n, 2)[0]
    codes, scale = numerics.quantize_act(x, scheme.act)
    parts = numerics.quantize_weight(w, scheme.weight)
    values = numerics.dequantize_weight(parts, scheme.weight, k, torch.float32).double()
    want = F.linear(act_values(codes, scale, scheme.act, k), values, bias.double())
    got = numerics.block_mm(codes, scale, scheme.act, parts, scheme.weight, k, bias, torch.float32)
    assert got.shape == (m, n)
    # Sums of float32: a few last bits of the largest terms.
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=2e-6 * k**0.5)
    low = numerics.block_mm(codes, scale, scheme.act, parts, scheme.weight, k, bias, torch.bfloat16)
    assert torch.equal(low, got.to(torch.bfloat16))
    if m:
        one = numerics.block_mm(codes[0], scale[0], scheme.act, parts, scheme.weight, k, None, torch.float32)
        assert torch.allclose(one + bias, got[0], rtol=1e-5, atol=1e-5)
    if scheme.act.scale == "e8m0":
        as_bits = [parts[0], parts[1].view(torch.uint8)]
        raw = scale.view(torch.uint8)
        again = numerics.block_mm(codes, raw, scheme.act, as_bits, scheme.weight, k, bias, torch.float32)
        assert torch.equal(again, got)


@pytest.mark.parametrize("scheme", BLOCK_MM, ids=names(BLOCK_MM))
def test_block_mm_of_pieces(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces of tokens and rows, more than two dimensions."""
    assert scheme.weight is not None
    assert scheme.act is not None
    x, w = normal(6, 300).view(2, 3, 300), normal(300, 300, 1)
    codes, scale = numerics.quantize_act(x, scheme.act)
    parts = numerics.quantize_weight(w, scheme.weight)
    whole = numerics.block_mm(codes, scale, scheme.act, parts, scheme.weight, 300, None, torch.float32)
    assert whole.shape == (2, 3, 300)
    monkeypatch.setattr(blocks, "TILE_BYTES", 4000)
    monkeypatch.setattr(matmul, "TOKENS", 4)
    pieces = numerics.block_mm(codes, scale, scheme.act, parts, scheme.weight, 300, None, torch.float32)
    assert torch.allclose(pieces, whole, rtol=1e-5, atol=1e-4)


def test_group_sums_of_integers_are_exact() -> None:
    """With scales that are powers of two nothing rounds: equal to the product of integers."""
    x_spec, w_spec = QuantSpec.parse("int8[1,*]dyn"), QuantSpec.parse("int4[1,128]")
    k = 128 * 9 + 40
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (5, k), generator=generator).to(torch.int8)
    w = torch.randint(1, 16, (7, k), generator=generator)
    packed = (w[:, 0::2] + 16 * w[:, 1::2]).to(torch.uint8)
    scale = 2.0 ** torch.randint(-3, 3, (7, 10), generator=generator)
    spread = scale.repeat_interleave(128, 1)[:, :k]
    want = x.double() @ ((w - 8).double() * spread.double()).t()
    got = numerics.block_mm(x, torch.ones(5, 1), x_spec, (packed, scale), w_spec, k, None, torch.float32)
    assert torch.equal(got.double(), want)


def test_integers_with_scales_for_blocks_on_both_sides() -> None:
    x_spec, w_spec = QuantSpec.parse("int8[1,32]dyn"), QuantSpec.parse("int8[16,48]")
    x, w = normal(4, 100), normal(20, 100, 1)
    codes, scale = numerics.quantize_act(x, x_spec)
    parts = numerics.quantize_weight(w, w_spec)
    got = numerics.block_mm(codes, scale, x_spec, parts, w_spec, 100, None, torch.float32)
    want = (
        act_values(codes, scale, x_spec, 100)
        @ numerics.dequantize_weight(parts, w_spec, 100, torch.float32).double().t()
    )
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-5)


def test_products_without_numerics_are_refused() -> None:
    w_spec = QuantSpec.parse("int4[1,32]zp")
    parts = numerics.quantize_weight(torch.ones(2, 32), w_spec)
    for text in ("int8[1,*]dyn", "e4m3[1,*]dyn"):
        x_spec = QuantSpec.parse(text)
        codes, scale = numerics.quantize_act(torch.ones(2, 32), x_spec)
        with pytest.raises(NotImplementedError, match="zp"):
            numerics.block_mm(codes, scale, x_spec, parts, w_spec, 32, None, torch.float32)


@pytest.mark.parametrize("scheme", SCALED_MM, ids=names(SCALED_MM))
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_scale_for_a_row_or_for_all(scheme: Scheme, dtype: torch.dtype) -> None:
    assert scheme.weight is not None
    assert scheme.act is not None
    m, n, k = 5, 7, 1500
    x, w, bias = normal(m, k), normal(n, k, 1), normal(1, n, 2)[0].to(dtype)
    codes, scale = numerics.quantize_act(x, scheme.act)
    w_codes, w_scale = numerics.quantize_weight(w, scheme.weight)
    sums = numerics.scaled_sums(codes, w_codes)
    exact = codes.double() @ w_codes.double().t()
    assert sums.dtype == (torch.int32 if scheme.act.codes == "int8" else torch.float32)
    if sums.dtype == torch.int32:
        assert torch.equal(sums.double(), exact)
    else:
        assert torch.allclose(sums.double(), exact, rtol=1e-6, atol=1e-6 * exact.abs().max().item())
    kept = sums.clone()
    got = numerics.apply_scales(sums, scale, w_scale, bias, dtype)
    assert torch.equal(sums, kept)
    want = sums.double() * scale.double() * w_scale.double().t() + bias.double()
    assert got.dtype == dtype
    assert torch.allclose(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)


@given(st.integers(0, 4), st.integers(0, 9), st.sampled_from((0, 1, 40)))
def test_sums_of_e4m3_in_pieces(m: int, n: int, k: int) -> None:
    a, b = (torch.randint(0, 127, (rows, k)).to(torch.uint8).view(torch.float8_e4m3fn) for rows in (m, n))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "TILE_BYTES", 300)
        got = numerics.scaled_sums(a, b)
    assert got.shape == (m, n)
    assert torch.allclose(got.double(), a.double() @ b.double().t(), rtol=1e-6)


@pytest.mark.parametrize("text", SCHEME_SPECS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_weight_only(text: str, dtype: torch.dtype) -> None:
    spec = QuantSpec.parse(text)
    n, k = 131, 77
    w, bias = normal(n, k), normal(1, n, 2)[0].to(dtype)
    x = normal(6, k, 1).to(dtype).view(2, 3, k)
    parts = numerics.quantize_weight(w, spec)
    values = numerics.dequantize_weight(parts, spec, k, dtype)
    for given_bias in (None, bias):
        got = numerics.weight_only_mm(x, parts, spec, k, given_bias)
        want = F.linear(x.double(), values.double(), None if given_bias is None else given_bias.double())
        assert (got.dtype, got.shape) == (dtype, (2, 3, n))
        # One rounding of the sum, another of the sum with the bias.
        assert torch.allclose(
            got.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=2e-5 + 20 * torch.finfo(dtype).eps
        )
    assert numerics.weight_only_mm(x[0, 0], parts, spec, k, None).shape == (n,)


def test_autocast_does_not_change_products() -> None:
    spec = QuantSpec.parse("int4[1,32]")
    x, w = normal(3, 64), normal(5, 64, 1)
    parts = numerics.quantize_weight(w, spec)
    x_spec, w_spec = QuantSpec.parse("e4m3[1,32]e8m0dyn"), QuantSpec.parse("e4m3[1,32]e8m0")
    codes, scale = numerics.quantize_act(x, x_spec)
    mx = numerics.quantize_weight(w, w_spec)

    def products() -> tuple[Tensor, ...]:
        return (
            numerics.weight_only_mm(x, parts, spec, 64, None),
            numerics.block_mm(codes, scale, x_spec, mx, w_spec, 64, None, torch.float32),
            numerics.scaled_sums(codes, mx[0]),
        )

    plain = products()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = products()
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("text", ["int4[1,32]zp", "e2m1[1,16]e4m3", "int8[1,*]", "e2m1[1,32]e8m0"])
def test_weight_only_makes_few_bytes(text: str) -> None:
    """Some MiB beside the result, however large the weight: the indices and values of a chunk."""
    spec = QuantSpec.parse(text)
    w = torch.ones(3000, 1024, dtype=torch.bfloat16)
    parts, x = numerics.quantize_weight(w, spec), torch.ones(1, 1024, dtype=torch.bfloat16)
    with LiveBytes() as meter:
        numerics.weight_only_mm(x, parts, spec, 1024, None)
    assert meter.peak["cpu"] <= 3.2 * blocks.TILE_BYTES
    assert spec.block[0] != FULL
