"""Weights of every spec: values, errors, tiles, what is not finite, and what is allocated."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxquant import numerics
from fxquant.materialize.meter import LiveBytes
from fxquant.materialize.scattered import Scattered
from fxquant.numerics import blocks
from fxquant.scheme import FULL, QuantSpec
from tests.numerics.decoders import decode, scale_value
from tests.numerics.matrices import (
    ALL_SPECS,
    FLOATS,
    RULED_SPECS,
    TINY,
    matrices,
    normal,
    spread,
    weight_for,
)

specs = st.sampled_from(ALL_SPECS).map(QuantSpec.parse)
ruled = st.sampled_from(RULED_SPECS).map(QuantSpec.parse)


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Equal bits."""
    pairs = list(zip(a, b, strict=True))
    return all(x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in pairs)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def values_of(parts: tuple[Tensor, ...], spec: QuantSpec, k: int) -> Tensor:
    return numerics.dequantize_weight(parts, spec, k, torch.float32)


@given(matrices(), specs)
@settings(max_examples=300)
def test_constants_are_as_the_spec_says(w: Tensor, spec: QuantSpec) -> None:
    n, k = w.shape
    w = weight_for(w, spec)
    parts = numerics.quantize_weight(w, spec)
    assert [(part.dtype, tuple(part.shape)) for part in parts] == list(spec.constants(n, k).values())
    for name, part in zip(spec.names[1:], parts[1:], strict=True):
        assert part.float().isfinite().all()
        if name == "zero":
            assert spec.refine or (part == part.round().clamp(-8, 7)).all()
        else:
            assert (part.float() > 0).all()
    assert values_of(parts, spec, k).isfinite().all()
    if spec.codes == "int8":
        assert (parts[0] != -128).all()
    if spec.codes == "int4" and not spec.zero and k:
        nibbles = torch.cat([parts[0] & 15, parts[0] >> 4])
        assert (nibbles >= 1).all()
    if spec.packed and k % 2:
        assert (parts[0][:, -1] >> 4 == (8 if spec.codes == "int4" else 0)).all()


def test_zeros_give_zeros() -> None:
    for text in ALL_SPECS:
        spec = QuantSpec.parse(text)
        parts = numerics.quantize_weight(torch.zeros(5, 7), spec)
        assert (values_of(parts, spec, 7) == 0).all(), text
        codes = parts[0].view(torch.uint8)
        if spec.zero:  # the lowest code, and the one beside the last column
            assert (codes[:, :-1] == 0).all(), text
            assert (codes[:, -1] == 0x80).all(), text
        else:
            assert (codes == (0x88 if spec.codes == "int4" else 0)).all(), text


def error_bound(w: Tensor, parts: tuple[Tensor, ...], spec: QuantSpec) -> Tensor:
    """How far off a value may be, in float64: half a step of its code, more where its format saturates."""
    n, k = w.shape
    scale = torch.tensor(
        [[scale_value(parts[1], i, j) for j in range(parts[1].shape[1])] for i in range(parts[1].shape[0])],
        dtype=torch.float64,
    ).view(parts[1].shape)
    if spec.two_level:
        scale = (scale.float() * parts[2]).double()
    step, size = spread(scale, spec, n, k), w.double().abs()
    slack = 1 + 2.0**-17
    if not spec.type.is_float:
        # A rounded scale may leave out the ends of the range, by 2^-8 of its 15 steps.
        missing = 15 * 2.0**-8 if spec.half_scale and spec.zero else 0
        return step * (0.5 + missing) * slack
    if spec.codes == "e4m3":
        near = torch.maximum(size / 16, step * 2.0**-10)
        return torch.where(size > 448 * step * slack, size / 8, near * slack)
    return torch.maximum(size / (3 if spec.two_level else 4), step / 4) * slack


@given(matrices(), ruled)
@settings(max_examples=300)
def test_error_of_each_value(w: Tensor, spec: QuantSpec) -> None:
    n, k = w.shape
    w = weight_for(w, spec)
    if 0 in (n, k):
        return
    parts = numerics.quantize_weight(w, spec)
    error = (values_of(parts, spec, k).double() - w.double()).abs()
    # The last bit of the product of code and scale, and where it is a denormal.
    assert (error <= error_bound(w, parts, spec) + w.double().abs() * 2.0**-23 + 2.0**-149).all()


@given(matrices(3, 20), specs)
@settings(max_examples=200)
def test_values_are_those_of_the_formats(w: Tensor, spec: QuantSpec) -> None:
    k = w.shape[1]
    w = weight_for(w, spec)
    parts = numerics.quantize_weight(w, spec)
    want = decode(parts, spec, k)
    assert torch.equal(values_of(parts, spec, k), want)
    for dtype in FLOATS:
        assert torch.equal(numerics.dequantize_weight(parts, spec, k, dtype), want.to(dtype))


@pytest.mark.parametrize("text", ALL_SPECS)
def test_any_codes_are_values_of_the_formats(text: str) -> None:
    """Of codes that no rounding makes too: -8, NaN."""
    spec = QuantSpec.parse(text)
    n, k = 5, 33
    generator = torch.Generator().manual_seed(0)
    parts = []
    for name, (dtype, shape) in spec.constants(n, k).items():
        if name != "codes" and dtype in FLOATS:
            parts.append((torch.rand(shape, generator=generator) * (7 if name == "zero" else 1)).to(dtype))
        else:
            part = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
            part = part.clamp(1, 254) if name == "scale" and spec.scale == "e8m0" else part
            parts.append(part.view(dtype))
    got, want = values_of(tuple(parts), spec, k), decode(parts, spec, k)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    if spec.scale == "e8m0":
        as_bits = [parts[0], parts[1].view(torch.uint8), *parts[2:]]
        assert numerics.same_values(values_of(tuple(as_bits), spec, k), got)


@given(matrices(9, 40), specs, st.sampled_from((1, 64, 200, 400)))
@settings(max_examples=200)
def test_chunks_do_not_change_results(w: Tensor, spec: QuantSpec, tile_bytes: int) -> None:
    w = weight_for(w, spec)
    whole = numerics.quantize_weight(w, spec)
    values = values_of(whole, spec, w.shape[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "TILE_BYTES", tile_bytes)
        assert same(numerics.quantize_weight(w, spec), whole)
        assert torch.equal(values_of(whole, spec, w.shape[1]), values)


def empty_parts(n: int, k: int, spec: QuantSpec) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype) for dtype, shape in spec.constants(n, k).values())


@pytest.mark.parametrize("text", ALL_SPECS)
@pytest.mark.parametrize("shape", [(256, 96), (259, 101), (131, 1)])
def test_tiles_of_rows_are_parts_of_the_whole(text: str, shape: tuple[int, int]) -> None:
    spec = QuantSpec.parse(text)
    if spec.block[0] == FULL or spec.two_level:
        return  # two passes: below
    n, k = shape
    if spec.refine:
        n = 21  # slower
    w = normal(n, k).to(torch.bfloat16)
    whole, tiled = numerics.quantize_weight(w, spec), empty_parts(n, k, spec)
    rows = spec.block[0]
    for start in range(0, n, 2 * rows):
        stop = min(start + 2 * rows, n)
        grid = slice(start // rows, -(-stop // rows))
        outs = (tiled[0][start:stop], *(part[grid] for part in tiled[1:]))
        numerics.quantize_into(w[start:stop], spec, outs, numerics.scratch_for(w[start:stop], spec))
    assert same(tiled, whole)


@pytest.mark.parametrize("text", RULED_SPECS)
@pytest.mark.parametrize("shape", [(256, 256), (259, 102)])
@pytest.mark.parametrize("axis", [0, 1])
def test_two_passes_are_equal_to_the_whole(text: str, shape: tuple[int, int], axis: int) -> None:
    """Tiles along an axis: maxima first, then codes; at multiples of the blocks, or blocks span the axis."""
    spec = QuantSpec.parse(text)
    w = normal(*shape) * torch.linspace(0.1, 3, shape[0])[:, None]
    whole, outs = numerics.quantize_weight(w, spec), empty_parts(*shape, spec)
    side = spec.block[axis]
    step = 2 * (side or 1) * (1 if side % 2 == 0 and side else 2)
    absmax = torch.zeros(numerics.scan_shape(shape, spec))
    tiles = [(start, min(start + step, shape[axis])) for start in range(0, shape[axis], step)]

    def part_of(grid: Tensor, start: int, stop: int) -> Tensor:
        """The rows or columns of a grid of blocks (its last two axes) that a tile has."""
        if side == FULL:
            return grid
        return grid.narrow(axis - 2, start // side, -(-stop // side) - start // side)

    def known_of(grid: Tensor, start: int, stop: int) -> Tensor:
        return grid if spec.two_level else part_of(grid, start, stop)

    for start, stop in tiles:
        part = w.narrow(axis, start, stop - start)
        scratch = numerics.scratch_for(part, spec)
        numerics.absmax_into(part, spec, known_of(absmax, start, stop), scratch)
    known = numerics.scale_from_absmax(absmax, spec)
    assert known.shape == numerics.scan_shape(shape, spec)
    for name, values in numerics.known_constants(known, spec).items():
        outs[spec.names.index(name)].copy_(values)
    for start, stop in tiles:
        part = w.narrow(axis, start, stop - start)
        low, high = (start, stop) if axis == 0 or not spec.packed else (start // 2, -(-stop // 2))
        codes = outs[0].narrow(axis, low, high - low)
        places = (codes, *(part_of(out, start, stop) for out in outs[1:2]))
        numerics.quantize_known_into(
            part, spec, known_of(known, start, stop), places, numerics.scratch_for(part, spec)
        )
    assert same(outs, whole)


@pytest.mark.parametrize("text", ALL_SPECS)
def test_codes_may_be_scattered_or_strided(text: str) -> None:
    spec = QuantSpec.parse(text)
    n, k = 131, 77
    w = normal(n, k)
    whole, outs = numerics.quantize_weight(w, spec), empty_parts(n, k, spec)
    columns = spec.columns(k)
    pieces = []
    for rows in (slice(0, 50), slice(50, n)):
        for cut in (slice(0, 16), slice(16, columns)):
            view = torch.empty(cut.stop - cut.start, rows.stop - rows.start, dtype=spec.type.dtype).t()
            pieces.append((rows, cut, view))
    target = Scattered(pieces, (n, columns))
    numerics.quantize_into(w, spec, (target, *outs[1:]), numerics.scratch_for(w, spec))
    for rows, cut, view in pieces:
        outs[0][rows, cut].copy_(view)
    assert same(outs, whole)
    strided = torch.empty(columns, n, dtype=spec.type.dtype).t()
    numerics.quantize_into(w, spec, (strided, *outs[1:]), numerics.scratch_for(w, spec))
    assert same((strided, *outs[1:]), whole)
    if spec.scale == "e8m0":
        as_bits = outs[1].view(torch.uint8)
        numerics.quantize_into(w, spec, (strided, as_bits), numerics.scratch_for(w, spec))
        assert torch.equal(as_bits, bits(whole[1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("text", ALL_SPECS)
def test_what_is_not_finite_shows_and_stays_in_its_block(text: str, bad: float) -> None:
    spec = QuantSpec.parse(text)
    n, k = 130, 130
    w = normal(n, k)
    clean = numerics.quantize_weight(w, spec)
    w[1, 2] = bad
    parts = numerics.quantize_weight(w, spec)
    values = values_of(parts, spec, k)
    block = spread(torch.arange(math.prod(spec.grid(n, k))).view(spec.grid(n, k)), spec, n, k)
    hit = torch.full((n, k), spec.two_level) | (block == block[1, 2])
    assert not values[hit].isfinite().any()
    assert torch.equal(values[~hit], values_of(clean, spec, k)[~hit])
    for part in parts[2:] if spec.zero else ():
        assert part.isfinite().all()


@pytest.mark.parametrize("shape", [(64, 64), (3000, 512), (600, 4099), (70, 2), (1, 5000), (2, 100_000)])
@pytest.mark.parametrize("text", ALL_SPECS)
def test_what_is_allocated(text: str, shape: tuple[int, int]) -> None:
    """``temporary_bytes`` is a bound; a close one where it is worth planning with."""
    spec = QuantSpec.parse(text)
    if spec.refine and math.prod(shape) > 10_000:
        shape = (shape[0], min(shape[1], 10_000 // shape[0]))
    w = torch.ones(shape, dtype=torch.bfloat16)
    w[0, 0] = 5
    outs, scratch = empty_parts(*shape, spec), numerics.scratch_for(w, spec)
    bound = numerics.temporary_bytes(shape, spec)
    with LiveBytes() as meter:
        numerics.quantize_into(w, spec, outs, scratch)
    peak = meter.peak.get("cpu", 0)
    assert peak <= bound
    assert bound <= max(4 * peak, 1024) or spec.refine
    assert bound <= 2 * blocks.TILE_BYTES


@given(matrices(), ruled)
def test_the_sign_is_the_codes_alone(w: Tensor, spec: QuantSpec) -> None:
    if spec.zero:
        return
    k = w.shape[1]
    w = weight_for(w, spec)
    parts, negated = numerics.quantize_weight(w, spec), numerics.quantize_weight(-w, spec)
    assert same(parts[1:], negated[1:])
    assert torch.equal(values_of(parts, spec, k), -values_of(negated, spec, k))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_zero_has_a_code_of_its_own(dtype: torch.dtype) -> None:
    """Ranges that do not include 0 are made to."""
    spec = QuantSpec.parse("int4[1,*]zp")
    w = torch.tensor([[3.0, 15.0, 0.0], [-15.0, -3.0, 0.0], [-5.0, 10.0, 0.0], [0.0, 0.0, 0.0]], dtype=dtype)
    codes, scale, zero = numerics.quantize_weight(w, spec)
    assert scale.flatten().tolist() == [1, 1, 1, TINY]
    assert zero.flatten().tolist() == [-8, 7, -3, -8]
    assert codes.tolist() == [[3 | 15 << 4, 0x80], [0 | 12 << 4, 0x8F], [0 | 15 << 4, 0x85], [0, 0x80]]
    assert torch.equal(numerics.dequantize_weight((codes, scale, zero), spec, 3, dtype), w)


@pytest.mark.parametrize(
    "text",
    ["int8[1,32]e8m0", "int8[1,*]zp", "e4m3[1,*]e4m3", "int4[1,32]e8m0", "int8[1,*]dyn", "int8[1,*]!clip"],
)
def test_specs_without_numerics_are_refused(text: str) -> None:
    spec = QuantSpec.parse(text)
    with pytest.raises(NotImplementedError, match=text[:4]):
        numerics.quantize_weight(torch.ones(2, 64), spec)


def test_refined_scales_take_no_maxima() -> None:
    spec = QuantSpec.parse("int4[1,*]zp!hqq")
    with pytest.raises(NotImplementedError, match="whole blocks"):
        numerics.absmax_into(torch.ones(2, 4), spec, torch.zeros(2, 2, 1), torch.empty(8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.int8])
def test_same_values(dtype: torch.dtype) -> None:
    a = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert numerics.same_values(a, a.clone())
    assert not numerics.same_values(a, a[torch.arange(255, -1, -1)])
    assert not numerics.same_values(a, a[:-1])
    assert numerics.same_values(a[:0], a[:0])
    if dtype == torch.float8_e4m3fn:
        zeros = torch.tensor([0, 128, 127, 255], dtype=torch.uint8).view(dtype)
        assert numerics.same_values(zeros, torch.tensor([128, 0, 255, 127], dtype=torch.uint8).view(dtype))
        assert numerics.same_values(zeros.view(2, 2).t(), zeros.view(2, 2).t())
