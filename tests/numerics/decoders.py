"""What codes and scales mean, bit by bit from the definitions of the formats, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxquant.scheme import FULL, QuantSpec

NAN = float("nan")


def e4m3(byte: int) -> float:
    """OCP FP8 E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa; S.1111.111 is NaN, no infinities."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 0xF, byte & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return NAN
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1(nibble: int) -> float:
    """OCP FP4 E2M1: sign, 2 bits of exponent with bias 1, 1 of mantissa; neither NaN nor infinities."""
    sign = -1.0 if nibble & 0x8 else 1.0
    exponent, mantissa = nibble >> 1 & 0x3, nibble & 0x1
    if exponent == 0:
        return sign * mantissa / 2
    return sign * (1 + mantissa / 2) * 2.0 ** (exponent - 1)


def e8m0(byte: int) -> float:
    """OCP E8M0: an exponent with bias 127; all ones is NaN."""
    return NAN if byte == 0xFF else 2.0 ** (byte - 127)


def nibble(row: list[int], column: int) -> int:
    """The code of a column: the even ones are in the low halves."""
    return row[column // 2] >> 4 if column % 2 else row[column // 2] & 0xF


def code_value(row: list[int], column: int, spec: QuantSpec) -> float:
    """What the code of a column stands for, without scale and zero point."""
    if spec.codes == "int8":
        return float(row[column] - 256 if row[column] >= 128 else row[column])
    if spec.codes == "e4m3":
        return e4m3(row[column])
    if spec.codes == "e2m1":
        return e2m1(nibble(row, column))
    return float(nibble(row, column) - 8)


def scale_value(scale: Tensor, row: int, column: int) -> float:
    """A scale of any dtype."""
    if scale.dtype.itemsize > 1:
        return float(scale[row, column].item())  # a float
    byte = int(scale.view(torch.uint8)[row, column].item())
    return e8m0(byte) if scale.dtype == torch.float8_e8m0fnu else e4m3(byte)


def rounded(value: float) -> float:
    """To float32 and back."""
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32).item())


def decode(parts: Sequence[Tensor], spec: QuantSpec, k: int) -> Tensor:
    """The float32 values of a weight, one by one. Each product is exact in float64, then rounded."""
    rows = parts[0].contiguous().view(torch.uint8).tolist()
    out = torch.empty(len(rows), k)
    for i, row in enumerate(rows):
        for j in range(k):
            at = (
                (0 if spec.block[0] == FULL else i // spec.block[0]),
                (0 if spec.block[1] == FULL else j // spec.block[1]),
            )
            scale = scale_value(parts[1], *at)
            if spec.two_level:
                scale = rounded(scale * float(parts[2].item()))
            value = code_value(row, j, spec)
            if spec.zero:
                value = rounded(value - float(parts[2][at].item()))
            out[i, j] = value * scale
    return out
