"""Tensors as bytes, in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fxquant.checkpoint.digests import DIGEST_BYTES
from fxquant.checkpoint.safetensors import bytes_of
from fxquant.fractal_nz import as_nd


def pieces_of(tensor: Tensor, flip: int = 0) -> Iterator[memoryview]:
    """The bytes of a tensor in pieces of ``DIGEST_BYTES``, each valid until the next one is asked for.

    ``flip``: bits of each byte that are written the other way.
    """
    if not tensor.nbytes:
        return
    tensor = as_nd(tensor)
    if not flip and tensor.device.type == "cpu" and tensor.is_contiguous() and _holds_its_bytes(tensor):
        view = bytes_of(tensor)
        for start in range(0, tensor.nbytes, DIGEST_BYTES):
            yield view[start : start + DIGEST_BYTES]
        return
    # Copied as integers: what a float's bits mean must not matter.
    source = tensor.view(_INTEGERS[tensor.itemsize]) if _holds_its_bytes(tensor) else tensor
    step = DIGEST_BYTES // source.itemsize
    buffer = torch.empty(min(step, source.numel()), dtype=source.dtype, device="cpu")
    for start in range(0, source.numel(), step):
        part = buffer[: source.numel() - start]
        _copy_range(source, start, part)
        if flip:
            part.bitwise_xor_(flip)
        yield bytes_of(part)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _holds_its_bytes(tensor: Tensor) -> bool:
    """Whether the memory holds the values, and not their conjugates or negatives."""
    return not tensor.is_conj() and not tensor.is_neg()


def _copy_range(source: Tensor, start: int, out: Tensor) -> None:
    """Fill ``out`` (1-d) with elements of ``source`` from ``start``, counted in row-major order."""
    if source.dim() == 0 or source.is_contiguous():
        source = source.reshape(-1)
    if source.dim() == 1:
        out.copy_(source[start : start + out.numel()])
        return
    row = source[0].numel()
    done = 0
    while done < out.numel():
        first, skip = divmod(start + done, row)
        rows = 0 if skip else (out.numel() - done) // row
        if rows:
            count = rows * row
            out[done : done + count].view(rows, *source.shape[1:]).copy_(source[first : first + rows])
        else:
            count = min(row - skip, out.numel() - done)
            _copy_range(source[first], skip, out[done : done + count])
        done += count
