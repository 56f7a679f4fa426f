"""Number formats that torch has no arithmetic for: packed int4, packed fp4, e8m0; and dtype codes."""

from __future__ import annotations

import torch
from torch import Tensor

# Codes of torch_npu for what torch has no dtype for; an `int dtype` argument takes them.
INT4, HIFLOAT8, E8M0 = 285, 290, 293
E5M2_CODE, E4M3_CODE = 291, 292
E2M1, E1M2 = 296, 297
QUINT4X2 = 16

_DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    12: torch.int8,  # qint8
    13: torch.uint8,  # quint8
    14: torch.int32,  # qint32
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    E5M2_CODE: torch.float8_e5m2,
    E4M3_CODE: torch.float8_e4m3fn,
}

FP4_VALUES = {
    E2M1: (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    E1M2: (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75),
}
"""Magnitudes by code."""

ROUND_MODES = ("rint", "floor", "round")


def dtype_of(code: int | torch.dtype | None, default: torch.dtype) -> torch.dtype:
    """The torch dtype that a dtype argument of torch_npu names."""
    if code is None:
        return default
    if isinstance(code, torch.dtype):
        return code
    if code not in _DTYPES:
        raise NotImplementedError(f"the simulated NPU has no arithmetic for dtype code {code}")
    return _DTYPES[code]


def pack_int4(values: Tensor) -> Tensor:
    """Integers -8..7 ``[..., n]`` to int32 ``[..., n / 8]``, the first one in the lowest bits."""
    nibbles = (values.to(torch.int64) & 0xF).unflatten(-1, (-1, 8))
    shifts = torch.arange(0, 32, 4)
    words = (nibbles << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_int4(words: Tensor) -> Tensor:
    """The inverse of ``pack_int4``, as int8; any strides."""
    nibbles = (words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 0xF
    return (((nibbles ^ 8) - 8).to(torch.int8)).flatten(-2)


def unpack_int4_matrix(words: Tensor, *, k: int) -> Tensor:
    """Int4 codes ``[..., k, n]`` of words ``[..., k, n / 8]``, or ``[..., k / 8, n]`` (transposed)."""
    if words.shape[-2] == k:
        return unpack_int4(words)
    return unpack_int4(words.transpose(-1, -2)).transpose(-1, -2)


def fp4_codes(values: Tensor, kind: int, round_mode: str = "rint") -> Tensor:
    """Float values to fp4 codes (uint8, one each), saturating.

    ``rint`` rounds ties to even, ``round`` away from zero, ``floor`` toward minus infinity.
    """
    table = torch.tensor(FP4_VALUES[kind], dtype=torch.float64)
    x = values.double()
    magnitude = x.abs().clamp(max=float(table[-1]))
    low = torch.searchsorted(table, magnitude, right=True).sub_(1).clamp_(0, 7)
    high = (low + 1).clamp_(max=7)
    middle = (table[low] + table[high]) / 2
    if round_mode == "floor":
        up = (x < 0) & (magnitude > table[low])
    elif round_mode == "round":
        up = magnitude >= middle
    else:
        up = (magnitude > middle) | ((magnitude == middle) & (low % 2 == 1))
    code = torch.where(up & (high > low), high, low)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def pack_fp4(codes: Tensor) -> Tensor:
    """Codes ``[..., n]`` to bytes ``[..., n / 2]``, the first one in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor, kind: int) -> Tensor:
    """Float32 values ``[..., n]`` of bytes ``[..., n / 2]``; any strides."""
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2).long()
    table = torch.tensor(FP4_VALUES[kind])
    return torch.where(codes >= 8, -table[codes & 7], table[codes & 7])


def e8m0_values(codes: Tensor) -> Tensor:
    """Float32 powers of two of biased exponents; 255 is NaN."""
    codes = codes.view(torch.uint8) if codes.element_size() == 1 else codes
    values = torch.exp2(codes.double() - 127).float()
    return torch.where(codes == 255, torch.nan, values)
