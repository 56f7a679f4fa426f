"""Are the codes right? Computed once more here, from the bytes of the checkpoint, in plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.loading.files import Entry, entries_of

ROWS = 1024

CodesOf = Callable[[str], tuple[Tensor, Tensor] | None]
"""Key -> codes int8 `[N, K]` and scale float32 `[N]`, None where the weight stayed float."""


def check_codes(folder: Path, codes_of: CodesOf, layers: int) -> dict[str, int]:
    """Compare `layers` weights (-1: all): `codes == round(x / (absmax / 127))`, and the scales.

    Returns the number of weights `checked` and of values that are `wrong`; every value of a weight
    that has no codes is.
    """
    entries = spread([entry for entry in entries_of(folder) if entry.quantized], layers)
    wrong = 0
    for entry in entries:
        found = codes_of(entry.key)
        if found is None or tuple(found[0].shape) != entry.shape or found[1].numel() != entry.shape[0]:
            wrong += entry.shape[0] * entry.shape[1]
        else:
            wrong += wrong_values(entry, *found)
    return {"checked": len(entries), "wrong": wrong}


def spread(entries: list[Entry], count: int) -> list[Entry]:
    """`count` entries from the first to the last, in even steps, and the largest; all for -1."""
    if count < 0 or count >= len(entries):
        return entries
    steps = [round(i * (len(entries) - 1) / max(1, count - 1)) for i in range(count)]
    largest = max(range(len(entries)), key=lambda i: entries[i].nbytes)
    return [entries[i] for i in sorted({*steps, largest})]


def wrong_values(entry: Entry, codes_NK: Tensor, scale_N: Tensor) -> int:
    """The number of codes and scales of one weight that differ from the definition."""
    wrong, columns = 0, entry.shape[1]
    with entry.file.open("rb") as handle:
        for row in range(0, entry.shape[0], ROWS):
            rows = min(ROWS, entry.shape[0] - row)
            handle.seek(entry.offset + 2 * row * columns, os.SEEK_SET)
            data = bytearray(handle.read(2 * rows * columns))
            x = torch.frombuffer(data, dtype=torch.bfloat16).view(rows, columns).float()
            scale = x.abs().max(dim=1, keepdim=True).values / 127
            codes = torch.round(x / scale)
            wrong += int((codes != codes_NK[row : row + rows].float()).sum())
            wrong += int((scale.view(-1) != scale_N[row : row + rows]).sum())
    return wrong
