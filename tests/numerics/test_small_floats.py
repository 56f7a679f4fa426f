"""Rounding to e4m3, e2m1 and e8m0 against the values of the formats."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxquant.numerics import floats
from fxquant.numerics.packing import pack_, unpack
from fxquant.numerics.scales import scales_of
from fxquant.scheme import QuantSpec
from tests.numerics.decoders import e2m1, e4m3, e8m0

E2M1_VALUES = [e2m1(code) for code in range(8)]
E4M3_VALUES = [e4m3(code) for code in range(127)]


def nearest(x: float, values: list[float]) -> int:
    """The code of the nearest of ascending values, the even one of two; saturates."""
    best = min(range(len(values)), key=lambda code: (abs(abs(x) - values[code]), code % 2))
    return best + (len(values) + len(values) % 2 if math.copysign(1, x) < 0 else 0)


def interesting(values: list[float]) -> list[float]:
    """The values, the middles between them, and the floats beside both."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    points = torch.tensor(sorted([*values, *middles, 1e-45, 1e-30, values[-1] * 1.5]))
    around = [
        points,
        torch.nextafter(points, torch.tensor(math.inf)),
        torch.nextafter(points, torch.tensor(0.0)),
    ]
    found = torch.cat(around)
    return [*found.tolist(), *(-found).tolist()]


def e2m1_codes(values: list[float]) -> list[int]:
    x = torch.tensor(values)
    floats.e2m1_codes_(x)
    return [int(code) for code in x.tolist()]


def test_the_values_of_e2m1() -> None:
    assert E2M1_VALUES == [0, 0.5, 1, 1.5, 2, 3, 4, 6] == list(floats.E2M1)


def test_e2m1_rounds_to_nearest_even() -> None:
    values = interesting(E2M1_VALUES)
    assert e2m1_codes(values) == [nearest(value, E2M1_VALUES) for value in values]
    assert e2m1_codes([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0]) == [0, 2, 2, 4, 4, 6, 6, 7]
    assert e2m1_codes([-0.0, -0.1, -6.0]) == [8, 8, 15]


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=50))
def test_e2m1_rounds_any_value(values: list[float]) -> None:
    assert e2m1_codes(values) == [nearest(value, E2M1_VALUES) for value in values]


def test_pieces_of_e2m1() -> None:
    x = torch.randn(3 * 7) * 4
    whole = x.clone()
    floats.e2m1_codes_(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(floats, "PIECE", 8)
        floats.e2m1_codes_(x)
    assert torch.equal(x, whole)


def test_e4m3_rounds_to_nearest_even() -> None:
    """The cast that torch has, of values up to the largest."""
    values = [value for value in interesting(E4M3_VALUES) if abs(value) <= 448]
    got = torch.tensor(values).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    assert got == [nearest(value, E4M3_VALUES) for value in values]


def test_e4m3_values_are_looked_up() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = floats.e4m3_values(codes.view(16, 16).t())
    want = torch.tensor([e4m3(code) for code in range(256)]).view(16, 16).t()
    assert got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(1.0), want.nan_to_num(1.0))


def test_e8m0_values() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    for scale in (bits, bits.view(torch.float8_e8m0fnu)):
        got = floats.e8m0_values(scale)
        assert got[:255].tolist() == [e8m0(byte) for byte in range(255)]
        assert got[255].isnan()


@pytest.mark.parametrize(("top", "emax"), [(448.0, 8), (6.0, 2)])
def test_the_shared_exponent(top: float, emax: int) -> None:
    """``floor(log2(absmax)) - emax``, at every power of two and beside it, clamped to -127."""
    for power in range(-149, 128):
        below = torch.nextafter(torch.tensor(2.0**power), torch.tensor(0.0)).item()
        for value, floor in ((2.0**power, power), (below, math.frexp(below)[1] - 1 if below else -200)):
            got = floats.e8m0_of(torch.tensor([value]), top).view(torch.uint8).item()
            assert got == max(floor - emax, -127) + 127, value
    bad = torch.tensor([math.inf, math.nan, -math.nan, 0.0, -0.0])
    assert floats.e8m0_of(bad, top).view(torch.uint8).tolist() == [255, 255, 255, 0, 0]
    assert (
        floats.e8m0_of(torch.tensor([torch.finfo(torch.float32).max]), top).view(torch.uint8).item()
        == 254 - emax
    )


@given(st.integers(1, 4), st.integers(0, 9), st.sampled_from(["int4[1,*]", "int4[1,*]zp", "e2m1[1,*]"]))
def test_unpack_undoes_pack(n: int, k: int, text: str) -> None:
    spec = QuantSpec.parse(text)
    codes = torch.randint(0, 16, (n, k))
    packed = pack_(codes.float(), 8).to(torch.uint8)
    assert packed.shape == (n, (k + 1) // 2)
    for i in range(n):
        for j, byte in enumerate(packed[i].tolist()):
            assert byte & 15 == codes[i, 2 * j]
            assert byte >> 4 == (codes[i, 2 * j + 1] if 2 * j + 1 < k else 8)
    values: Tensor = unpack(packed, spec, k)
    assert values.shape == (n, k)
    if spec.codes == "e2m1":
        assert values.tolist() == [[e2m1(code) for code in row] for row in codes.tolist()]
    else:
        assert torch.equal(values, codes.float() - 8)
        assert torch.equal(unpack(packed, spec, k, torch.int8).float(), values)


@pytest.mark.parametrize(
    ("text", "limit", "reached"),
    [
        ("e4m3[1,1]e8m0", 1 / 8, 0.124),
        ("e2m1[1,1]e8m0", 1 / 4, 0.249),
        ("e2m1[1,1]", 2.0**-22, 0.0),
        ("int4[1,1]", 2.0**-22, 0.0),
        ("int4[1,1]bf16", 2.0**-8, 2.0**-8.1),
        ("int4[1,1]f16", 2.0**-11, 2.0**-11.1),
    ],
)
def test_error_of_the_largest_of_a_block(text: str, limit: float, reached: float) -> None:
    """The limits in the table of formats: those of MX and of half scales are nearly reached."""
    from fxquant.numerics import dequantize_weight, quantize_weight

    spec = QuantSpec.parse(text)
    w = torch.cat([torch.linspace(1, 2 - 2.0**-20, 4097), torch.linspace(1, 600, 1000)])[:, None]
    error = (dequantize_weight(quantize_weight(w, spec), spec, 1, torch.float32) - w).abs() / w
    assert reached <= error.max() < limit


def test_error_of_the_largest_of_a_block_with_an_e4m3_scale() -> None:
    spec = QuantSpec.parse("e2m1[1,1]e4m3")
    ratios = torch.cat([torch.linspace(2.0**-6, 448, 100_003), torch.linspace(2.0**-9, 2.0**-6, 10_007)])
    blocks = (6 * ratios).view(-1, 1, 1, 1)
    scales = scales_of(blocks, spec, torch.ones(1, 1))
    quotient = blocks / scales.values[:, None, :, None]
    codes = quotient.view(-1).clone()
    floats.e2m1_codes_(codes)
    values = torch.tensor(floats.E2M1)[codes.long()] * scales.values.view(-1)
    error = (values / blocks.view(-1) - 1).abs()
    assert 1 / 18 < error[:100_003].max() < 1 / 16
    assert 0.33 < error[100_003:].max() <= 1 / 3
