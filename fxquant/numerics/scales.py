"""From the maxima of blocks to their scales, as they are stored and as codes are divided by them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fxquant.numerics.floats import E4M3_TOP, e4m3_scale, e8m0_of, e8m0_values
from fxquant.numerics.integers import as_stored_, scale_and_zero, scale_of
from fxquant.scheme import QuantSpec


class Scales(NamedTuple):
    """Of a grid of blocks: ``stored`` as the constant has it, ``values`` in float32, a zero or None.

    Where ``stored`` is a float it may still be float32, of values that the constant can hold.
    """

    stored: Tensor
    values: Tensor
    zero: Tensor | None = None


def absmax_of(blocks: Tensor, out: Tensor | None = None) -> Tensor:
    """The largest magnitude of each block ``[R, r, C, c]``: ``[R, C]``; NaN if there is a NaN."""
    # amax and amin along a dim are vectorized; aminmax, norm and abs().amax are many times slower.
    high = blocks.amax((1, 3))
    return torch.maximum(high, blocks.amin((1, 3)).neg_(), out=high if out is None else out)


def scales_of(blocks: Tensor, spec: QuantSpec, unit: Tensor | None) -> Scales:
    """The scales of float32 blocks ``[R, r, C, c]``; ``unit`` is the scale of scales that have two levels."""
    if spec.refine:
        from fxquant.numerics.refine import choose

        scale, zero = choose(blocks.squeeze(1), spec)
        return Scales(scale, scale, None if zero is None else zero.nan_to_num_(0.0))
    if spec.zero:
        scale, zero = scale_and_zero(blocks.amax((1, 3)), blocks.amin((1, 3)).neg_(), spec.scale)
        return Scales(scale, scale, zero)
    absmax = absmax_of(blocks)
    if spec.scale == "e8m0":
        stored = e8m0_of(absmax, spec.top)
        return Scales(stored, e8m0_values(stored))
    if unit is not None:
        stored = e4m3_scale(absmax.div_(spec.top).div_(unit))
        return Scales(stored, stored.to(torch.float32).mul_(unit))
    scale = as_stored_(scale_of(absmax, spec.top), spec.scale)
    return Scales(scale, scale)


def unit_of(absmax: Tensor, spec: QuantSpec) -> Tensor:
    """The float32 scale of e4m3 scales from the largest magnitude of a tensor or token; changes it."""
    return scale_of(absmax, E4M3_TOP * spec.top)


def scale_from_absmax(absmax: Tensor, spec: QuantSpec) -> Tensor:
    """What is known after a first pass, from its maxima (see ``scan_shape``, whose shape it keeps).

    The scale in its stored dtype (half ones as float32 of the same values); the scale for the whole tensor if
    there are two levels; scale and zero point, stacked, if there is a zero point. ``known_constants`` says
    which constants these are.
    """
    if spec.two_level:
        return unit_of(absmax.clone(), spec)
    if spec.zero:
        return torch.stack(scale_and_zero(absmax[0].clone(), absmax[1].clone(), spec.scale))
    if spec.scale == "e8m0":
        return e8m0_of(absmax, spec.top)
    return as_stored_(scale_of(absmax.clone(), spec.top), spec.scale)


def known_constants(known: Tensor, spec: QuantSpec) -> dict[str, Tensor]:
    """The constants, by name, that the result of ``scale_from_absmax`` holds."""
    if spec.two_level:
        return {"global_scale": known}
    if spec.zero:
        return {"scale": known[0], "zero": known[1]}
    return {"scale": known}


def known_scales(known: Tensor, spec: QuantSpec, grid: tuple[slice, slice]) -> Scales:
    """Some of the scales that are known, one level only."""
    if spec.zero:
        return Scales(known[0][grid], known[0][grid], known[1][grid])
    part = known[grid]
    return Scales(part, e8m0_values(part) if spec.scale == "e8m0" else part.to(torch.float32))
