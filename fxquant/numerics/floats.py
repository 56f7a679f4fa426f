"""Rounding to the small floats: e2m1 and e4m3 values, e8m0 scales.

Formats: OCP 8-bit Floating Point Specification 1.0 (e4m3, without infinities, largest 448) and OCP
Microscaling Formats 1.0 (e2m1, e8m0). All roundings are to nearest, ties to even, and saturate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PIECE = 1 << 15
"""Values that are rounded to e2m1 at a time."""

PIECE_BYTES = 12 * PIECE
"""Bytes that ``e2m1_codes_`` allocates at most."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; codes 8 to 15 are their negatives."""

E8M0_NAN = 255

E4M3_TOP = 448.0
E4M3_TINY = 2.0**-9
"""The smallest e4m3 above zero, a subnormal one."""


def e2m1_codes_(x: Tensor) -> None:
    """Codes 0 to 15 of a contiguous float32 ``x``, in its place, as floats; no value may be NaN.

    Between 0, 2, 4 and 6 the values are evenly spaced, in steps of 1/2, 1 and 2. What a value has of each
    of the three intervals is rounded by itself, in units of the step. Nothing else rounds, and a tie goes
    to an even code, as the codes of 0, 2 and 4 are even.
    """
    flat = x.view(-1)
    size = min(PIECE, flat.numel())
    buffers = torch.empty((3, size), dtype=torch.float32, device=x.device)
    four = torch.tensor(4.0, dtype=torch.float32, device="cpu")
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + size]
        signed, middle, top = buffers[:, : piece.numel()]
        if x.device.type == "cpu":
            torch.copysign(four, piece, out=signed)
        else:  # not every device has copysign
            negative = middle.view(torch.bool)[: piece.numel()]
            torch.signbit(piece, out=negative)
            signed.copy_(negative).mul_(-8).add_(4)
        piece.abs_()
        torch.clamp(piece, 2, 4, out=middle).round_()  # where codes go up by 0 to 2
        torch.clamp(piece, 4, 6, out=top).mul_(0.5).round_()  # 2 to 3, where codes go up by 0 or 1
        # Code 8 is the sign: 4 less for what both begin with, 0 or 8 more.
        piece.clamp_(max=2).mul_(2).round_().add_(middle).add_(top).sub_(signed)


def e4m3_values(codes: Tensor) -> Tensor:
    """Float32 values of e4m3 codes, a new tensor."""
    if codes.device.type != "cpu":
        return codes.to(torch.float32)
    # A cast goes one by one on a CPU, eight times slower than looking values up.
    table = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(torch.float32)
    indices = codes.view(torch.uint8).reshape(-1).to(torch.int32)
    return table.index_select(0, indices).view(codes.shape)


def e8m0_of(absmax: Tensor, top: float) -> Tensor:
    """The shared scale of MX blocks, float8_e8m0fnu: ``2^(floor(log2(absmax)) - emax)``.

    ``emax`` is the exponent of ``top``, the largest value of the elements (OCP Microscaling Formats 1.0,
    section 6.3). Exponents are read from the bits. The smallest scale, 2^-127, also stands for blocks of
    zeros; a maximum that is not finite gives NaN.
    """
    emax = math.frexp(top)[1] - 1
    exponent = absmax.view(torch.int32).bitwise_right_shift(23).bitwise_and_(255)
    bad = exponent == E8M0_NAN
    exponent.sub_(emax).clamp_(min=0).masked_fill_(bad, E8M0_NAN)
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def e8m0_values(scale: Tensor) -> Tensor:
    """Float32 values of e8m0 scales, held as such or as their bits in uint8."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


def e4m3_scale(scale: Tensor) -> Tensor:
    """Float32 scales rounded to e4m3 that is neither zero nor infinite; changes ``scale``."""
    return scale.clamp_(E4M3_TINY, E4M3_TOP).to(torch.float8_e4m3fn)
