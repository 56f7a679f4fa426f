"""How a weight is cut: into chunks of rows that stay in the cache, and chunks into blocks.

R, C: rows and columns of blocks; r, c: rows and columns of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fxquant.scheme import FULL, QuantSpec

TILE_BYTES = 2 << 20
"""Float32 bytes of a weight that are worked on at a time."""


class Region(NamedTuple):
    """Blocks of one size: ``blocks`` is a view ``[R, r, C, c]`` of floats, ``grid`` their scales' place."""

    grid: tuple[slice, slice]
    blocks: Tensor


def block_of(shape: tuple[int, ...], spec: QuantSpec) -> tuple[int, int]:
    """Rows and columns of a block of ``spec`` in a tensor ``[N, K]``; the last ones may be smaller."""
    rows, columns = (
        (size or 1) if side == FULL else side for size, side in zip(shape, spec.block, strict=True)
    )
    return rows, columns


def scale_shape(shape: tuple[int, ...], spec: QuantSpec) -> tuple[int, int]:
    """Shape of the scale of a weight ``[N, K]``; an empty weight still has one scale per row."""
    return spec.grid(shape[0], shape[1])


def scan_shape(shape: tuple[int, ...], spec: QuantSpec) -> tuple[int, ...]:
    """Shape of the maxima of a first pass: see ``absmax_into``.

    One for each block; one for the whole weight, ``[1, 1]``, if scales have two levels; two for each
    block, ``[2, R, C]``, with a zero point: of the values and of the negated values.
    """
    if spec.two_level:
        return (1, 1)
    grid = spec.grid(shape[0], shape[1])
    return (2, *grid) if spec.zero else grid


def chunk_rows(shape: tuple[int, ...], spec: QuantSpec) -> int:
    """Rows of a weight that are worked on at a time.

    A multiple of a block's rows, of at most ``TILE_BYTES`` in float32 unless one row of blocks is more.
    Blocks that span all rows are worked on row by row, in two passes.
    """
    rows = 1 if spec.block[0] == FULL else spec.block[0]
    return max(rows, TILE_BYTES // (4 * max(shape[1], 1)) // rows * rows)


def scratch_for(w_NK: Tensor, spec: QuantSpec) -> Tensor:
    """Flat float32 memory for the functions that take ``scratch``."""
    rows = min(chunk_rows(tuple(w_NK.shape), spec), w_NK.shape[0])
    return torch.empty(rows * w_NK.shape[1], dtype=torch.float32, device=w_NK.device)


def float_chunks(w_NK: Tensor, spec: QuantSpec, scratch: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Chunks of a weight in float32, contiguous in ``scratch``, and the first row of each."""
    n, k = w_NK.shape
    if k == 0:
        return
    step = chunk_rows((n, k), spec)
    for start in range(0, n, step):
        rows = min(step, n - start)
        chunk = scratch[: rows * k].view(rows, k)
        chunk.copy_(w_NK[start : start + rows])
        yield start, chunk


def regions(chunk: Tensor, spec: QuantSpec, start: int = 0) -> Iterator[Region]:
    """The blocks of rows from ``start`` on of a tensor: of the full size, then those cut off at the edges."""
    height, width = block_of(tuple(chunk.shape), spec)
    first = 0 if spec.block[0] == FULL else start // height
    n, k = chunk.shape
    if n % height == 0 and k % width == 0:
        if n and k:
            grid = (slice(first, first + n // height), slice(None))
            yield Region(grid, chunk.view(n // height, height, k // width, width))
        return
    for low, high, r in _spans(chunk.shape[0], height):
        rows = slice(first + low // height, first + -(-high // height))
        for left, right, c in _spans(chunk.shape[1], width):
            blocks = chunk[low:high, left:right].view((high - low) // r, r, (right - left) // c, c)
            yield Region((rows, slice(left // width, -(-right // width))), blocks)


def _spans(size: int, side: int) -> Iterator[tuple[int, int, int]]:
    """``(start, stop, side)`` of the blocks that are whole, and of the rest."""
    whole = size // side * side
    if whole:
        yield 0, whole, side
    if whole < size:
        yield whole, size, size - whole
