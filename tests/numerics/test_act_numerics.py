"""Activations: per token, per tensor, in groups, with a given scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxquant import numerics
from fxquant.numerics import blocks
from fxquant.scheme import FULL, QuantSpec
from tests.numerics.matrices import ACT_SPECS, FLOATS, TINY, matrices, normal

specs = st.sampled_from(ACT_SPECS).map(QuantSpec.parse)
STATIC = QuantSpec.parse("int8[*,*]static")


def as_weight(spec: QuantSpec) -> QuantSpec:
    text = str(spec).removesuffix("dyn")
    return QuantSpec.parse(text)


def weight_values(x: Tensor, spec: QuantSpec) -> Tensor:
    """What a weight of these values would be, a token at a time if scales have two levels."""
    plain = as_weight(spec)
    rows = x.split(1) if spec.two_level else (x,)
    found = [
        numerics.dequantize_weight(numerics.quantize_weight(row, plain), plain, x.shape[1], torch.float32)
        for row in rows
    ]
    return torch.cat(found) if found else x.float()


def act_values(codes: Tensor, scale: Tensor, spec: QuantSpec, k: int) -> Tensor:
    """Codes times scale, for two dimensions."""
    one_level = QuantSpec(codes=spec.codes, block=spec.block, scale="f32" if spec.two_level else spec.scale)
    return numerics.dequantize_weight((codes, scale), one_level, k, torch.float32)


@given(matrices(), specs, st.sampled_from([(), (1,), (2, 3)]))
def test_an_activation_has_the_values_of_a_weight(x: Tensor, spec: QuantSpec, lead: tuple[int, ...]) -> None:
    m, k = x.shape
    codes, scale = numerics.quantize_act(x.expand(*lead, m, k), spec)
    groups = spec.grid(1, k)[1]
    assert (codes.dtype, codes.shape) == (spec.type.dtype, (*lead, m, spec.columns(k)))
    assert scale.dtype == (torch.float8_e8m0fnu if spec.scale == "e8m0" else torch.float32)
    assert scale.shape == ((1,) * (len(lead) + 2) if spec.block[0] == FULL else (*lead, m, groups))
    assert (scale.float() > 0).all()
    assert scale.float().isfinite().all()
    if not x.numel():
        return
    flat_scale = scale.reshape(-1, groups)[: 1 if spec.block[0] == FULL else m]
    got = act_values(codes.reshape(-1, codes.shape[-1])[:m], flat_scale, spec, k)
    assert torch.equal(got, weight_values(x, spec))


@pytest.mark.parametrize("text", ACT_SPECS)
def test_shapes_of_any_rank(text: str) -> None:
    spec = QuantSpec.parse(text)
    x = normal(6, 70)
    codes, scale = numerics.quantize_act(x, spec)
    alone, of_one = numerics.quantize_act(x[2], spec)
    assert alone.shape == (spec.columns(70),)
    assert of_one.shape == (1,) if spec.block[0] == FULL else scale.shape[1:]
    if spec.block[0] != FULL:
        assert numerics.same_values(alone, codes[2])
        assert numerics.same_values(of_one, scale[2])
    strided, _ = numerics.quantize_act(x.t().contiguous().t(), spec)
    assert numerics.same_values(strided, codes)
    for shape in ((0, 70), (3, 0), (2, 0, 5)):
        codes, scale = numerics.quantize_act(torch.empty(shape), spec)
        assert codes.shape == (*shape[:-1], spec.columns(shape[-1]))
        assert (scale.float() > 0).all()


@pytest.mark.parametrize("text", ACT_SPECS)
def test_chunks_do_not_change_results(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, spec = normal(37, 50), QuantSpec.parse(text)
    whole = numerics.quantize_act(x, spec)
    monkeypatch.setattr(blocks, "TILE_BYTES", 1024)
    assert all(numerics.same_values(a, b) for a, b in zip(numerics.quantize_act(x, spec), whole, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("text", ACT_SPECS)
def test_what_is_not_finite_shows_and_stays_with_its_token(text: str, bad: float) -> None:
    spec = QuantSpec.parse(text)
    x = normal(3, 70)
    clean = act_values(*numerics.quantize_act(x, spec), spec, 70)
    x[1, 2] = bad
    values = act_values(*numerics.quantize_act(x, spec), spec, 70)
    assert not values[1, 2].isfinite()
    if spec.block[0] != FULL:
        assert torch.equal(values[0], clean[0])
        assert torch.equal(values[2], clean[2])


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_given_scale(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 128.0, -128.0, -1e4, 0.0]], dtype=dtype)
    want = [0, 2, 2, 0, -2, 126, 127, 127, -127, -127, 0]
    for scale in (torch.tensor([1.0]), torch.tensor(1.0), torch.ones(1, 1)):
        codes = numerics.quantize_act_static(x, scale, STATIC)
        assert (codes.dtype, codes.shape) == (torch.int8, x.shape)
        if dtype != torch.bfloat16:
            assert codes.tolist() == [want]
    assert numerics.quantize_act_static(x[0], torch.tensor([1.0]), STATIC).shape == x[0].shape
    assert numerics.quantize_act_static(x[:, :0], torch.tensor([1.0]), STATIC).shape == (1, 0)


def test_a_given_scale_cannot_tell_what_is_not_finite() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf])
    assert numerics.quantize_act_static(x, torch.tensor([0.1]), STATIC).tolist() == [0, 127, -127]


def test_the_scale_of_a_token_is_in_the_product() -> None:
    """NVFP4: the e4m3 scale of a group, times absmax / 2688 of the token."""
    spec = QuantSpec.parse("e2m1[1,16]e4m3dyn")
    x = torch.zeros(2, 32)
    x[0, 0], x[0, 16], x[1, 5] = 2688.0, 6.0, 1.0
    _, scale = numerics.quantize_act(x, spec)
    assert scale[0].tolist() == [448.0, 1.0]
    assert scale[1].tolist() == pytest.approx([1 / 6, 2.0**-9 / 2688])


def test_zeros() -> None:
    for text in ACT_SPECS:
        spec = QuantSpec.parse(text)
        codes, scale = numerics.quantize_act(torch.zeros(2, 33), spec)
        assert (codes.view(torch.uint8) == 0).all()
        smallest = {"f32": TINY, "e8m0": 2.0**-127, "e4m3": TINY * 2.0**-9}[spec.scale]
        assert (scale.float() == smallest).all()


@pytest.mark.parametrize("text", ["int4[1,*]dyn", "int8[128,128]dyn", "e2m1[*,*]e8m0dyn", "int8[1,*]zpdyn"])
def test_specs_without_numerics_are_refused(text: str) -> None:
    with pytest.raises(NotImplementedError, match="activation"):
        numerics.quantize_act(torch.ones(2, 64), QuantSpec.parse(text))


@pytest.mark.parametrize("text", ["int8[1,32]static", "e2m1[*,*]static"])
def test_given_scales_without_numerics_are_refused(text: str) -> None:
    with pytest.raises(NotImplementedError, match="given scale"):
        numerics.quantize_act_static(torch.ones(2, 64), torch.ones(1), QuantSpec.parse(text))
