"""Scales of integer codes, and of float codes that have float32 scales."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.scheme import SCALES

INT4_OFFSET = 8
"""An int4 code lies in its nibble as code + 8."""

INT4_LOWEST, INT4_HIGHEST = -8, 7
INT4_STEPS = INT4_HIGHEST - INT4_LOWEST
"""Codes with a zero point are -8 to 7."""

TINY = torch.finfo(torch.float32).tiny


F16_NORMAL, F16_TINY = 2.0**-14, 2.0**-24
"""The smallest normal and subnormal float16."""


def smallest_scale(kind: str) -> float:
    """The float scale of a block of zeros, stored as ``kind``."""
    return F16_TINY if kind == "f16" else TINY


def as_stored_(scale: Tensor, kind: str) -> Tensor:
    """Round float32 scales in place to what ``kind`` holds, so that codes are made for the stored ones.

    To nearest, ties to even. Subnormal float16 are too far apart for that: up, so that no code saturates
    and no scale is zero.
    """
    if kind == "f32":
        return scale
    if kind != "f16":
        return scale.copy_(scale.to(SCALES[kind]))
    half = scale.to(torch.float16)
    low = (half < scale) & (scale < F16_NORMAL)
    half.view(torch.int16).add_(low)  # the next float16
    return scale.copy_(half)


def scale_of(absmax: Tensor, top: float) -> Tensor:
    """Float32 scale, never zero: a zero row has the smallest normal scale and zero codes."""
    return absmax.div_(top).clamp_min_(TINY)


def scale_and_zero(high: Tensor, low: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Scale and zero point of codes -8 to 7 from the largest values and the largest negated values.

    The range is made to include 0, which then has a code of its own, the zero point. Values that are not
    finite show in the scale. Float32, of values that ``kind`` holds. Works in the place of both.
    """
    low.clamp_min_(0)
    scale = as_stored_(high.clamp_min_(0).div_(INT4_STEPS).add_(low / INT4_STEPS).clamp_min_(TINY), kind)
    zero = low.div_(scale).round_().add_(INT4_LOWEST).clamp_(INT4_LOWEST, INT4_HIGHEST)
    return scale, zero.nan_to_num_(0.0)
