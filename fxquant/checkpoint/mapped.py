"""Reading safetensors through a mapping of the files: no copy, at the price of file pages."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from typing import ClassVar

import torch

from fxquant.checkpoint.files import OS_FILES, Files
from fxquant.checkpoint.safetensors import FileCheckpoint
from fxquant.errors import CheckpointFileError


class MappedCheckpoint(FileCheckpoint):
    """A FileCheckpoint whose tensors are views of private mappings.

    Pages of the files count as the process's (reclaimable) memory until ``forget`` gives them back.
    A file that is cut short while it is mapped kills the process (SIGBUS): use it for files that
    nobody writes to.
    """

    kind: ClassVar[str] = "a mapping of the files"

    def __init__(self, path: str | os.PathLike[str], *, files: Files = OS_FILES) -> None:
        super().__init__(path, files=files)
        self._maps: dict[str, mmap.mmap] = {}
        self._map_lock = threading.Lock()

    def read(self, key: str) -> torch.Tensor:
        """A view of the tensor in the mapping; it must not be written to."""
        info = self.info(key)
        assert info.file is not None
        assert info.offset is not None
        if not info.nbytes:
            return torch.empty(info.shape, dtype=info.dtype)
        where = self._map(info.file)
        count = info.nbytes // info.dtype.itemsize
        # By offset, not as a view of bytes: values that are not aligned in the file need no copy.
        part = torch.frombuffer(where, dtype=info.dtype, count=count, offset=info.offset)
        if info.dtype is torch.bool and bool((part.view(torch.uint8) > 1).any()):
            raise CheckpointFileError(
                f"{self._path_of(info.file)}: tensor {key!r} is BOOL but holds bytes other than 0 and 1"
            )
        return part.view(info.shape)

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """A view of some rows."""
        return self.read(key)[start:stop]

    def forget(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Give the pages of ``(key, start, stop)`` bytes back to the system."""
        for key, start, stop in ranges:
            info = self.info(key)
            if info.file is None or info.offset is None or info.file not in self._maps:
                continue
            first = (info.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
            size = info.offset + stop - first
            if size > 0:
                self._maps[info.file].madvise(mmap.MADV_DONTNEED, first, size)

    def close(self) -> None:
        """Let go of the mappings (they go with the last tensor that looks at them) and the files."""
        self._maps.clear()
        super().close()

    def _map(self, file: str) -> mmap.mmap:
        with self._map_lock:
            if file not in self._maps:
                descriptor = self._descriptor(file)
                # A private writable mapping: torch warns about memory that cannot be written to.
                self._maps[file] = mmap.mmap(
                    descriptor,
                    self._states[file].size,
                    flags=mmap.MAP_PRIVATE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
            return self._maps[file]
