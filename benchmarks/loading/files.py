"""Safetensors files as this benchmark sees them: headers, positioned reads, the page cache, ideal sizes.

Written without the loader that is measured, so that the two can be compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
_CHUNK = 16 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file; `offset` counts from the start of the file, in bytes."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def quantized(self) -> bool:
        """Whether every case makes codes of it: weights of linears, but for heads (and embeddings)."""
        owner, _, leaf = self.key.rpartition(".")
        name = owner.rpartition(".")[2]
        return leaf == "weight" and len(self.shape) == 2 and "head" not in name and "embed" not in name

    def ideal(self, scheme: str) -> int:
        """Bytes that must be held: int8 codes and a float32 scale per row, or the floats."""
        if scheme == "int8" and self.quantized:
            return self.shape[0] * self.shape[1] + 4 * self.shape[0]
        return self.nbytes


def read_header(file: Path) -> list[Entry]:
    """The tensors of a file, in the order of their bytes."""
    with file.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(size))
    header.pop("__metadata__", None)
    entries = []
    for key, value in header.items():
        begin, end = value["data_offsets"]
        entries.append(
            Entry(
                key=key,
                file=file,
                dtype=value["dtype"],
                shape=tuple(value["shape"]),
                offset=8 + size + begin,
                nbytes=end - begin,
            )
        )
    return sorted(entries, key=lambda entry: entry.offset)


def data_files(folder: Path) -> list[Path]:
    """The safetensors files under `folder`."""
    return sorted(folder.rglob("*.safetensors"))


def entries_of(folder: Path) -> list[Entry]:
    """Every tensor of a checkpoint."""
    return [entry for file in data_files(folder) for entry in read_header(file)]


def ideal_mib(folder: Path, scheme: str) -> float:
    """MiB that the loaded model must hold under `scheme` (`"int8"` or `"none"`)."""
    return sum(entry.ideal(scheme) for entry in entries_of(folder)) / MIB


def read_into(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill `view` from `offset`; a file that ends before is an error."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise EOFError(f"file ends at {offset + done}, {len(view) - done} bytes early")
        done += count


def warm(paths: Iterable[Path]) -> None:
    """Bring files, and those in folders, into the page cache."""
    buffer = bytearray(_CHUNK)
    for file in _expanded(paths):
        with file.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def drop(paths: Iterable[Path]) -> None:
    """Drop files, and those in folders, from the page cache; only clean pages can be dropped."""
    os.sync()
    for file in _expanded(paths):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _expanded(paths: Iterable[Path]) -> Sequence[Path]:
    found: list[Path] = []
    for path in paths:
        found += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return found
