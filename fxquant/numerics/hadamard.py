"""Rotation of the K axis by a Hadamard matrix, which spreads outliers over the values of a block.

``H`` is block-diagonal, of Sylvester's matrix over the square root of its size, so it is orthogonal and
symmetric: ``(x @ H) @ (w @ H).t() == x @ w.t()``. With a seed, columns get random signs first, ``D H`` in
place of ``H``, which keeps a constant row from becoming one large value.

M: tokens or rows, K: input features, N: output features.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

CHUNK_BYTES = 256 << 10
"""Float32 bytes of rows that are worked on at a time: they stay in the cache through all steps."""


def block_size(k: int) -> int:
    """The largest power of two that divides ``k``."""
    if k < 1:
        raise ValueError(f"no rotation of an axis of {k} values")
    return k & -k


def hadamard(x: Tensor, block: int | None = None, *, seed: int | None = None) -> Tensor:
    """``x @ H`` for ``x`` ``[..., K]`` of any float dtype, ``x @ D @ H`` with a seed; float32, contiguous.

    ``block`` is a power of two that divides K, by default ``block_size(K)``. There is no matrix but
    ``log2(block)`` passes of sums and differences, in which a row has the same bits whatever rows are beside
    it. Without a seed it is its own inverse.
    """
    k = x.shape[-1]
    size = block_size(k) if block is None else block
    if size < 1 or size & (size - 1) or k % size:
        raise ValueError(f"a block of {size} is no power of two that divides K={k}")
    rows_MK = x.reshape(-1, k)
    out_MK = torch.empty(rows_MK.shape, dtype=torch.float32, device=x.device)
    # Before the sums: after them, they could have been infinite.
    factor = torch.full((k,), 1 / math.sqrt(size), dtype=torch.float32, device=x.device)
    if seed is not None:
        factor *= signs(k, seed).to(x.device)
    step = max(1, CHUNK_BYTES // (4 * k))
    scratch = torch.empty((2, min(step, rows_MK.shape[0]) * k), dtype=torch.float32, device=x.device)
    for start in range(0, rows_MK.shape[0], step):
        part = out_MK[start : start + step]
        torch.mul(rows_MK[start : start + step].to(torch.float32), factor, out=part)
        # Blocks as columns: sums and differences are then of long contiguous runs.
        values, other = (buffer[: part.numel()].view(size, -1) for buffer in scratch)
        values.copy_(part.view(-1, size).t())
        part.view(-1, size).copy_(_transform(values, other).t())
    return out_MK.view(x.shape)


def _transform(values: Tensor, other: Tensor) -> Tensor:
    """Transform the columns of ``values``; the result is in one of the two buffers."""
    size, columns = values.shape
    half = 1
    while half < size:
        pairs = values.view(size // (2 * half), 2, half * columns)
        sums = other.view(pairs.shape)
        torch.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        values, other = other, values
        half *= 2
    return values


def signs(k: int, seed: int) -> Tensor:
    """``k`` values of 1 and -1, float32, that depend on the seed alone: bits of SHAKE-128 of its text.

    They are part of the format of a rotated checkpoint, so they come from no generator of a library.
    """
    data = bytearray(hashlib.shake_128(str(seed).encode()).digest(-(-k // 8)))
    octets = torch.frombuffer(data, dtype=torch.uint8)[:, None]
    bits = octets.bitwise_right_shift(torch.arange(8, dtype=torch.uint8)).bitwise_and_(1)
    return 1 - 2 * bits.flatten()[:k].to(torch.float32)


def rotate_weight(w_NK: Tensor, block: int | None = None, *, seed: int | None = None) -> Tensor:
    """The weight ``w @ H``, float32 ``[N, K]``, for activations that went through ``hadamard`` alike."""
    return hadamard(w_NK, block, seed=seed)
