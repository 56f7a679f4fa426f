"""FRACTAL_NZ, the NPU's blocked layout: columns of tiles of 16 rows of 32 bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FRACTAL_NZ = 29
"""``acl_format`` of FRACTAL_NZ; ND is 2."""

ROWS = 16
ROW_BYTES = 32


def padded_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of a tensor ``[..., rows, columns]`` in FRACTAL_NZ."""
    *leading, rows, columns = shape
    tiles = -(-rows // ROWS) * -(-columns * itemsize // ROW_BYTES)
    return math.prod(leading) * tiles * ROWS * ROW_BYTES


def to_nz(tensor: Tensor) -> Tensor:
    """A copy on the same NPU in FRACTAL_NZ; the shape stays."""
    cast: Tensor = torch.ops.npu.npu_format_cast(tensor, FRACTAL_NZ)
    return cast


def write_over(tensor: Tensor, values: Tensor) -> None:
    """Write ``values``, which lie as ND, into a tensor of the same shape, whatever its layout."""
    layout = torch.ops.npu.get_npu_format(tensor)
    tensor.copy_(torch.ops.npu.npu_format_cast(values, layout))
