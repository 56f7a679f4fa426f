"""Scales of integer codes, and of float codes that have float32 scales."""

from __future__ import annotations

import torch
from torch import Tensor

INT4_OFFSET = 8
"""A symmetric int4 code lies in its nibble as code + 8."""

INT4_STEPS = 15
"""Codes with a zero point are 0 to 15."""

TINY = torch.finfo(torch.float32).tiny


def scale_of(absmax: Tensor, top: float) -> Tensor:
    """Float32 scale, never zero: a zero row has the smallest normal scale and zero codes."""
    return absmax.div_(top).clamp_min_(TINY)


def scale_and_zero(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point of codes 0 to 15 from the largest values and the largest negated values.

    The range is made to include 0, which then has a code of its own, the zero point. Values that are not
    finite show in the scale. Works in the place of both.
    """
    low.clamp_min_(0)
    scale = high.clamp_min_(0).div_(INT4_STEPS).add_(low / INT4_STEPS).clamp_min_(TINY)
    return scale, low.div_(scale).round_().clamp_(0, INT4_STEPS).nan_to_num_(0.0)
