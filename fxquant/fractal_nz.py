"""FRACTAL_NZ, the NPU's blocked layout: columns of tiles of 16 rows of 32 bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ND, FRACTAL_NZ = 2, 29
"""Values of ``acl_format``."""

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


def as_nd(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it lies in FRACTAL_NZ, whose bytes are in another order."""
    if tensor.device.type != "npu" or torch.ops.npu.get_npu_format(tensor) != FRACTAL_NZ:
        return tensor
    cast: Tensor = torch.ops.npu.npu_format_cast(tensor, ND)
    return cast


def write_over(tensor: Tensor, values: Tensor) -> None:
    """Write ``values``, which lie as ND, into a tensor of the same shape, whatever its layout."""
    layout = torch.ops.npu.get_npu_format(tensor)
    tensor.copy_(torch.ops.npu.npu_format_cast(values, layout))
