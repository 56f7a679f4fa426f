"""Int8 per channel and per token, value by value: the numerics that the first schemes rest on."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch import Tensor

from fxquant.numerics import blocks, dequantize_weight, int_matmul, quantize_act, quantize_weight
from fxquant.scheme import FULL, QuantSpec
from tests.numerics.matrices import FLOATS, TINY, matrices

SPEC = QuantSpec(block=(1, FULL))


def codes_of(w: Tensor) -> tuple[Tensor, Tensor]:
    """``round(w / (absmax / 127))`` in float32, row by row."""
    w = w.float()
    codes, scale = torch.zeros(w.shape, dtype=torch.int8), torch.zeros(w.shape[0], 1)
    for i, row in enumerate(w):
        absmax = max((abs(value) for value in row.tolist()), default=0.0)
        scale[i] = max(torch.tensor(absmax) / torch.tensor(127.0), torch.tensor(TINY))
        codes[i] = torch.round(row / scale[i]).to(torch.int8)
    return codes, scale


@given(matrices())
@example(torch.tensor([[0.0, -0.0]]))
@example(torch.tensor([[1e-45, 0.0], [-1e-45, 1e-45]]))
@example(torch.tensor([[float(torch.finfo(torch.float32).max), 1.0]]))
def test_codes_and_scale(w: Tensor) -> None:
    codes, scale = quantize_weight(w, SPEC)
    assert (codes.dtype, codes.shape) == (torch.int8, w.shape)
    assert (scale.dtype, scale.shape) == (torch.float32, (w.shape[0], 1))
    assert scale.isfinite().all()
    assert (scale >= TINY).all()
    assert (codes != -128).all()
    want_codes, want_scale = codes_of(w)
    assert torch.equal(scale, want_scale)
    assert torch.equal(codes, want_codes)
    # What w / scale is off by is half a unit of 127 in float32: 2^-18 of a code, on top of the 1/2.
    error = (w.double() - codes.double() * scale.double()).abs()
    assert (error <= scale.double() * (0.5 + 2.0**-18)).all()


@given(matrices())
def test_the_largest_of_a_row_has_the_largest_code(w: Tensor) -> None:
    codes, scale = quantize_weight(w, SPEC)
    normal = scale > TINY
    if w.shape[1]:
        assert (codes.int().abs().amax(-1, keepdim=True)[normal] == 127).all()
        assert (codes[(w == 0).all(-1)] == 0).all()
    assert torch.equal(codes, -quantize_weight(-w, SPEC)[0])


@given(matrices(), st.sampled_from(FLOATS))
def test_dequantized_values(w: Tensor, dtype: torch.dtype) -> None:
    codes, scale = quantize_weight(w, SPEC)
    floats = dequantize_weight((codes, scale), SPEC, w.shape[1], dtype)
    assert (floats.dtype, floats.shape) == (dtype, w.shape)
    assert torch.equal(floats, (codes.float() * scale).to(dtype))
    assert (floats[codes == 0] == 0).all()
    if dtype in (torch.float32, w.dtype) or w.dtype == torch.float16:
        assert floats.isfinite().all()


@given(matrices(), st.integers(1, 3))
def test_an_activation_is_quantized_as_a_weight_is(x: Tensor, batch: int) -> None:
    codes, scale = quantize_weight(x, SPEC)
    got_codes, got_scale = quantize_act(x.expand(batch, *x.shape), SPEC)
    assert torch.equal(got_codes, codes.expand(batch, *codes.shape))
    assert torch.equal(got_scale, scale.expand(batch, *scale.shape))


@given(matrices(), st.sampled_from((1, 4, 63, 64, 200, 400)))
def test_tiles_do_not_change_results(w: Tensor, tile_bytes: int) -> None:
    whole = quantize_weight(w, SPEC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "TILE_BYTES", tile_bytes)
        tiled = quantize_weight(w, SPEC)
    assert all(torch.equal(a, b) for a, b in zip(whole, tiled, strict=True))


def test_a_weight_of_more_than_one_real_tile() -> None:
    rows = blocks.TILE_BYTES // (4 * 64)
    w = torch.randn(2 * rows + 3, 64)
    codes, scale = quantize_weight(w, SPEC)
    assert torch.equal(scale, (w.abs().amax(-1, keepdim=True) / 127))
    assert torch.equal(codes.float(), (w / scale).round())


def test_ties_go_to_even() -> None:
    w = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5, 126.5]])
    codes, scale = quantize_weight(w, SPEC)
    assert scale.tolist() == [[1.0]]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, 126]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_zero_rows_and_no_columns(dtype: torch.dtype) -> None:
    w = torch.zeros(2, 3, dtype=dtype)
    w[1, 2] = -127
    codes, scale = quantize_weight(w, SPEC)
    assert codes.tolist() == [[0, 0, 0], [0, 0, -127]]
    assert scale.tolist() == [[TINY], [1.0]]
    for empty in (torch.empty(2, 0, dtype=dtype), torch.empty(0, 3, dtype=dtype)):
        for codes, scale in (quantize_weight(empty, SPEC), quantize_act(empty, SPEC)):
            assert codes.shape == empty.shape
            assert scale.shape == (empty.shape[0], 1)
            assert (scale == TINY).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_shows_in_its_scale(bad: float) -> None:
    x = torch.tensor([[1.0, -127.0], [1.0, bad]])
    for codes, scale in (quantize_act(x, SPEC), quantize_weight(x, SPEC)):
        assert codes.tolist() == [[1, -127], [0, 0]]
        assert scale.isfinite().flatten().tolist() == [True, False]


@given(st.integers(0, 6), st.integers(0, 6), st.sampled_from((0, 1, 63, 1023, 1024, 1025, 2049, 4104)))
def test_integer_matmul_is_exact(m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = (torch.randint(-127, 128, (rows, k), generator=generator).to(torch.int8) for rows in (m, n))
    a[: m // 2], b[: n // 2] = 127, -127
    got = int_matmul(a, b)
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), a.long() @ b.long().t())


@pytest.mark.parametrize("block", [(1, 32), (16, 0), (16, 32), (0, 0), (0, 32), (128, 128)])
def test_blocks_of_a_weight(block: tuple[int, int]) -> None:
    """A scale for each block, whatever its sides; tiles of rows change nothing."""
    w = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    codes, scale = quantize_weight(w, QuantSpec(block=block))
    rows, columns = block[0] or 256, block[1] or 128
    parts = w.view(256 // rows, rows, 128 // columns, columns)
    want = parts.abs().amax((1, 3)) / 127
    assert torch.equal(scale, want)
    assert torch.equal(codes, (parts / want[:, None, :, None]).round().to(torch.int8).view(256, 128))
