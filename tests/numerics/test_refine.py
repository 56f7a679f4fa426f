"""Refined scales of int4 groups: never worse than rounding to nearest, near the best there is, bounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxquant.materialize.meter import LiveBytes
from fxquant.numerics import refine
from fxquant.numerics.refine import ZEROS, choose, temporary_bytes
from fxquant.scheme import SCALES, QuantSpec

TINY = torch.finfo(torch.float32).tiny
CLIP, CLIP_ASYM, HQQ = SPECS = tuple(
    QuantSpec.parse(f"int4[1,64]{text}") for text in ("!clip", "zp!clip", "zp!hqq")
)
ASYMMETRIC = (CLIP_ASYM, HQQ)
HALF = tuple(QuantSpec.parse(f"int4[1,64]{text}") for text in ("bf16!clip", "bf16zp!clip", "bf16zp!hqq"))
F16 = QuantSpec.parse("int4[1,64]f16zp!clip")


def represented(v: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """What codes of ``v [..., c]`` stand for, in float64."""
    v, scale = v.double(), scale.double()[..., None]
    if zero is None:
        return (v / scale).round().clamp(-7, 7) * scale
    shift = zero.double()[..., None]
    return ((v / scale + shift).round().clamp(-8, 7) - shift) * scale


def loss(v: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The squared error of each group."""
    return (v.double() - represented(v, scale, zero)).square().sum(-1)


def nearest(v: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """Scale and zero of rounding to nearest, the scale as it is stored."""
    dtype = SCALES[spec.scale]
    if not spec.zero:
        return (v.abs().amax(-1) / 7).clamp_min(TINY).to(dtype).float(), None
    low, high = v.amin(-1).clamp_max(0), v.amax(-1).clamp_min(0)
    scale = (high / 15 - low / 15).clamp_min(TINY).to(dtype).float()
    return scale, ((-low / scale).round() - 8).clamp(-8, 7)


def samples(size: int, rows: int = 60, groups: int = 5) -> Tensor:
    """Rows of normal, heavy-tailed, skewed, one-signed and sparse values, with scales far apart."""
    generator = torch.Generator().manual_seed(size)
    v = torch.randn(rows, groups, size, generator=generator)
    v[1::5] = v[1::5] ** 3
    v[2::5] = v[2::5].exp()
    v[3::5] = -v[3::5].abs() - 1
    v[4::5] *= torch.rand(v[4::5].shape, generator=generator) < 0.3
    return v * 10.0 ** torch.randint(-6, 6, (rows, groups, 1), generator=generator)


@pytest.mark.parametrize("size", [1, 2, 7, 32, 64, 200])
@pytest.mark.parametrize("spec", [*SPECS, *HALF], ids=str)
def test_never_worse_than_rounding_to_nearest(spec: QuantSpec, size: int) -> None:
    v = samples(size)
    scale, zero = choose(v, spec)
    assert (scale.dtype, scale.shape) == (torch.float32, v.shape[:2])
    assert (zero is not None) == spec.zero
    for found in (scale, zero):
        assert found is None or torch.equal(found.to(SCALES[spec.scale]).float(), found)
    assert zero is None or ((zero >= ZEROS[0]) & (zero <= ZEROS[1])).all()
    before, after = loss(v, *nearest(v, spec)), loss(v, scale, zero)
    # Float32 rounds each value's error by some 1e-7 of the value.
    slack = (1e-7 * v.double().abs().amax(-1)) ** 2 * size
    assert (after <= before * (1 + 1e-5) + slack).all()
    if size >= 32:
        assert (after / before)[0::5].mean() < 0.95  # normal values


@pytest.mark.parametrize("factor", [1e-44, 1e-40, 1e-38, 1e-37, 1e-36, 1e-30, 1e37])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_never_worse_at_the_ends_of_float32(spec: QuantSpec, factor: float) -> None:
    v = torch.randn(40, 3, 16, generator=torch.Generator().manual_seed(4)) * factor
    before, after = loss(v, *nearest(v, spec)), loss(v, *choose(v, spec))
    assert (after <= before * (1 + 1e-3)).all()


@pytest.mark.parametrize("spec", ASYMMETRIC, ids=str)
def test_groups_of_one_sign_need_no_range_down_to_zero(spec: QuantSpec) -> None:
    v = torch.rand(20, 2, 64, generator=torch.Generator().manual_seed(5)) + 5
    v[1::2] *= -1
    assert (loss(v, *choose(v, spec)) < 0.8 * loss(v, *nearest(v, spec))).all()


@pytest.mark.parametrize("beta", [1.0, 10.0])
def test_a_step_of_hqq_takes_up_the_mean_of_thresholded_values(beta: float) -> None:
    v = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(7))
    scale, zero = choose(v, CLIP_ASYM)
    assert zero is not None
    chunk, fit = refine._Chunk(v, *torch.empty(3, *v.shape)), refine._Fit(scale * 0.8, zero + 0.2)
    found = refine._half_quadratic(chunk, fit, beta)
    assert found.zero is not None
    assert torch.equal(found.scale, fit.scale)
    position = v.double() / fit.scale.double()[..., None]
    shift = (zero + 0.2).double()[..., None]
    codes = (position + shift).round().clamp(-8, 7)
    residual = position - (codes - shift)
    error = residual.sign() * (residual.abs() - residual.abs() ** -0.5 / beta).clamp_min(0)
    assert (error != 0).any()
    expected = (codes - (position - error)).mean(-1)
    assert torch.allclose(found.zero.double(), expected, atol=1e-5)


def test_hqq_keeps_the_mean_and_the_range_of_a_group() -> None:
    v = torch.randn(100, 2, 64, generator=torch.Generator().manual_seed(6))
    scale, zero = choose(v, HQQ)
    error = v.double() - represented(v, scale, zero)
    before = v.double() - represented(v, *nearest(v, HQQ))
    assert (error.abs() <= scale[..., None]).all()
    means = error.mean(-1).square().mean(), before.mean(-1).square().mean()
    print(f"{means[0] / means[1]:.4f}")
    assert means[0] < 0.2 * means[1]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_near_the_best_of_an_exhaustive_grid(spec: QuantSpec) -> None:
    v = torch.randn(20, 3, 12, generator=torch.Generator().manual_seed(1))
    best = torch.full(v.shape[:2], torch.inf, dtype=torch.float64)
    reach = v.amax(-1) - v.amin(-1) if spec.zero else v.abs().amax(-1) * 15 / 7
    parts = (
        [1.0] if spec.refine == "hqq" else torch.linspace(0.4, 1.1, 71).tolist()
    )  # hqq moves the zero alone
    for part in parts:
        scale = reach * part / 15
        shifts = torch.linspace(-9, 8, 171).tolist() if spec.zero else [None]
        for shift in shifts:
            zero = None if shift is None else torch.full_like(scale, shift)
            best = torch.minimum(best, loss(v, scale, zero))
    ratio = loss(v, *choose(v, spec)).sum() / best.sum()
    before = loss(v, *nearest(v, spec)).sum() / best.sum()
    print(f"{spec}: {ratio:.3f} of the best, rounding to nearest {before:.3f}")
    assert ratio < 1 + 0.35 * (before - 1)


@pytest.mark.parametrize("spec", ASYMMETRIC, ids=str)
def test_a_grid_of_sixteen_values_is_found_again(spec: QuantSpec) -> None:
    codes = torch.arange(64).remainder(16).expand(3, 2, 64)
    v = (codes - 7.3) * torch.tensor([0.01, 1.0, 300.0])[:, None, None]
    scale, zero = choose(v, spec)
    assert zero is not None
    assert torch.allclose(represented(v, scale, zero), v.double(), rtol=1e-5, atol=1e-5 * 8 * 300)
    assert torch.allclose(zero, torch.tensor(-0.7), atol=1e-3)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_special_groups(spec: QuantSpec) -> None:
    top = float(torch.finfo(torch.float32).max)
    line = torch.linspace(-1, 1, 16)
    one = torch.zeros(16)
    one[3] = -2.5
    groups = {
        "zeros": torch.zeros(16),
        "negative zeros": -torch.zeros(16),
        "one value": torch.full((16,), 3.7),
        "one negative value": torch.full((16,), -3.7),
        "one among zeros": one,
        "huge": line * 1e30,
        "largest": line * top,
        "largest alone": one.sign() * top,
        "denormal": line * 1e-40,
        "smallest": line.sign() * 1e-45,
        "smallest normal": line * TINY,
        "far from zero": line * 1e-3 + 1e3,
        "outlier": torch.cat([line[:15] * 1e-3, torch.tensor([1e30])]),
    }
    v = torch.stack(list(groups.values()))[:, None]
    scale, zero = choose(v, spec)
    assert scale.isfinite().all()
    assert (scale >= TINY).all()
    if zero is not None:
        assert ((zero >= ZEROS[0]) & (zero <= ZEROS[1])).all()
    error = (represented(v, scale, zero) - v).abs().amax(-1)
    before = (represented(v, *nearest(v, spec)) - v).abs().amax(-1)
    for name, now, then, largest in zip(groups, error, before, v.abs().amax(-1), strict=True):
        # A clipped value may be off by more than before, never by a large part of the range.
        assert now <= max(float(then), 0.3 * float(largest), TINY / 2), name


def test_a_multiple_has_the_same_codes() -> None:
    v = samples(64)
    for spec in SPECS:
        scale, zero = choose(v, spec)
        doubled, same = choose(v * 1024, spec)
        assert torch.equal(doubled, scale * 1024)
        assert zero is None or (same is not None and torch.equal(zero, same))


@pytest.mark.parametrize("shape", [(300, 9, 64), (33, 1, 1000), (65, 40, 32), (129, 3, 100), (3, 1, 70_000)])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_tiles_of_rows_have_the_bits_of_the_whole(spec: QuantSpec, shape: tuple[int, int, int]) -> None:
    v = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    kept = v.clone()
    whole = choose(v, spec)
    assert torch.equal(v, kept)
    for step in (1, 7, 64):
        tiles = [choose(v[start : start + step], spec) for start in range(0, min(len(v), 3 * step), step)]
        for found, expected in zip(zip(*tiles, strict=True), whole, strict=True):
            if expected is not None:
                tiled = torch.cat([tile for tile in found if tile is not None])
                assert torch.equal(tiled, expected[: len(tiled)])
    again = choose(v.transpose(0, 1).contiguous().transpose(0, 1), spec)  # other strides
    assert torch.equal(again[0], whole[0])


@pytest.mark.parametrize("shape", [(2000, 9, 64), (40, 1, 4096), (500, 3, 1), (2, 1, 200_000), (1, 4, 16)])
@pytest.mark.parametrize("spec", [*SPECS, *HALF, F16], ids=str)
def test_memory_is_bounded(spec: QuantSpec, shape: tuple[int, int, int]) -> None:
    v = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    with LiveBytes() as meter:
        choose(v, spec)
    bound = temporary_bytes(shape, spec)
    assert meter.peak["cpu"] <= bound
    assert bound <= 4 * meter.peak["cpu"]
    if shape[0] == 2000:
        assert bound < v.nbytes


@pytest.mark.parametrize("shape", [(0, 3, 64), (3, 0, 64), (3, 2, 0)])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_empty(spec: QuantSpec, shape: tuple[int, int, int]) -> None:
    scale, zero = choose(torch.empty(shape), spec)
    assert scale.shape == shape[:2]
    assert (scale > 0).all()
    assert zero is None or not zero.any()
    assert temporary_bytes(shape, spec) >= 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_values_that_are_not_finite_show_in_the_scale_of_their_group(spec: QuantSpec, bad: float) -> None:
    v = samples(64)
    good, _ = choose(v, spec)
    v[0, 1, 5] = bad
    scale, _ = choose(v, spec)
    assert not scale[0, 1].isfinite()
    scale[0, 1] = good[0, 1]
    assert torch.equal(scale, good)


@pytest.mark.parametrize("text", ["int4[1,64]", "int4[1,64]!hqq", "int8[1,*]", "int4[1,64]!other"])
def test_what_cannot_be_refined_is_refused(text: str) -> None:
    with pytest.raises(NotImplementedError, match="no refined scales for"):
        choose(torch.zeros(1, 1, 64), QuantSpec.parse(text))
