"""The private layout FRACTAL_NZ: tiles of 16 rows of 32 bytes, columns of tiles one after another."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_npu
from torch import Tensor

from fxquant.testing.npu_sim.kernels.memory import host, is_npu, storage_bytes
from fxquant.testing.npu_sim.refusals import refuse

ND = 2
FRACTAL_NZ = 29
ROWS = 16
ROW_BYTES = 32


def tile(nd: Tensor) -> Tensor:
    """``[..., k, n]`` to the tiles ``[..., n / c, k / 16, 16, c]``, padded with zeros; c fills 32 bytes."""
    c = ROW_BYTES // nd.element_size()
    k, n = nd.shape[-2:]
    padded = torch.nn.functional.pad(nd, (0, -n % c, 0, -k % ROWS))
    return padded.unflatten(-1, (-1, c)).unflatten(-3, (-1, ROWS)).movedim(-2, -4).contiguous()


def untile(tiles: Tensor, k: int, n: int) -> Tensor:
    """The inverse of ``tile``."""
    return tiles.movedim(-4, -2).flatten(-2).flatten(-3, -2)[..., :k, :n]


def is_nz(value: object) -> bool:
    """Whether a value is a tensor in FRACTAL_NZ on the simulated device."""
    if not is_npu(value):
        return False
    try:
        return bool(torch.ops.npu.get_npu_format(value) == FRACTAL_NZ)
    except RuntimeError:  # a tensor that torch made over a bare storage, as pickle does: it has no layout
        return False


def is_transposed(tensor: Tensor) -> bool:
    """Whether the last two dimensions are a transposed view."""
    return tensor.dim() > 1 and tensor.stride(-2) == 1 and tensor.stride(-1) != 1


def _tiles_of(tensor: Tensor, shape: torch.Size) -> Tensor:
    c = ROW_BYTES // tensor.element_size()
    tiles = (*shape[:-2], -(-shape[-1] // c), -(-shape[-2] // ROWS), ROWS, c)
    flat = storage_bytes(tensor).view(tensor.dtype)
    count = math.prod(tiles)
    if tensor.storage_offset() or not tensor.numel() or count > flat.numel():
        raise NotImplementedError("views of a tensor in FRACTAL_NZ, but for its transpose (simulated NPU)")
    return flat[:count].view(tiles)


def write_nz(tensor: Tensor, nd: Tensor) -> None:
    """Write values of the host into a tensor in FRACTAL_NZ."""
    _tiles_of(tensor, tensor.shape).copy_(tile(nd.to(tensor.dtype).expand(tensor.shape)))


def host_nd(value: Any) -> Any:
    """``memory.host``, with FRACTAL_NZ tensors and transposed views of them as ND copies."""
    if not is_nz(value):
        return host(value)
    swapped = is_transposed(value)
    shape = value.transpose(-1, -2).shape if swapped else value.shape
    nd = untile(_tiles_of(value, shape), *shape[-2:])
    return nd.transpose(-1, -2) if swapped else nd


def format_cast(tensor: Tensor, acl_format: int) -> Tensor:
    """``npu_format_cast``: the same values in another layout, out of place."""
    current = torch_npu.get_npu_format(tensor)
    if acl_format not in {ND, FRACTAL_NZ}:
        raise NotImplementedError(f"npu_format_cast to format {acl_format}: the simulated NPU has ND and NZ")
    if (acl_format == FRACTAL_NZ) == (current == FRACTAL_NZ):
        return tensor
    if acl_format == ND:
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        host(out).copy_(host_nd(tensor))
        return out
    if tensor.dim() < 2 or 0 in tensor.shape:
        refuse(
            "npu_format_cast", f"FRACTAL_NZ needs two dimensions or more, none of 0, got {list(tensor.shape)}"
        )
    out = torch_npu.empty_with_format(
        tensor.shape, dtype=tensor.dtype, device=tensor.device, acl_format=FRACTAL_NZ
    )
    write_nz(out, host(tensor))
    return out
