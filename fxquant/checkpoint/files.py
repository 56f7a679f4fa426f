"""The operating system's file calls that reading and writing weights makes, in one place.

Tests put a layer in their stead that fails on purpose.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from fxquant.errors import CheckpointFileError

PIECE_BYTES = 16 * 2**20
"""The most that is asked of the system in one call."""


class Files:
    """File calls by descriptor. Errors are the system's own ``OSError``."""

    def open(self, path: Path) -> int:
        """Open for reading."""
        # Without O_NONBLOCK, opening a named pipe would wait for ever.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def stat(self, descriptor: int) -> os.stat_result:
        """Size, time and kind of an open file."""
        return os.fstat(descriptor)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read at ``offset`` into ``buffers``, one after the other; the number of bytes, 0 at the end."""
        return os.preadv(descriptor, buffers, offset)

    def will_need(self, descriptor: int, offset: int, count: int) -> None:
        """Let the system read ahead; where it cannot, nothing happens."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)

    def close(self, descriptor: int) -> None:
        """Give the descriptor back."""
        os.close(descriptor)

    def create(self, path: Path) -> int:
        """Create a file for writing; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write at ``offset``; the number of bytes."""
        return os.pwrite(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file or folder within its file system, at once."""
        source.rename(target)

    def make_folder(self, path: Path, *, mode: int = 0o777, parents: bool = False) -> None:
        """Create a folder, which must not exist; with ``parents`` also those above it."""
        path.mkdir(mode, parents=parents)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with all that is in it; links in it are removed, never followed."""
        shutil.rmtree(path)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that cannot do this for folders
                raise
        finally:
            os.close(descriptor)


OS_FILES = Files()


def close_read(files: Files, descriptor: int) -> None:
    """Give back a descriptor that was only read from: an error then says nothing about what was read."""
    with contextlib.suppress(OSError):
        files.close(descriptor)


def open_regular(files: Files, path: Path) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; anything else (a named pipe, a folder) is refused."""
    try:
        descriptor = files.open(path)
    except OSError as error:
        raise CheckpointFileError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        found = files.stat(descriptor)
    except OSError as error:
        close_read(files, descriptor)
        raise CheckpointFileError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        close_read(files, descriptor)
        raise CheckpointFileError(f"{path} is not a regular file")
    return descriptor, found


def read_range(files: Files, descriptor: int, offset: int, count: int) -> bytes:
    """Up to ``count`` bytes at ``offset``; fewer where the file ends. Memory grows with what is there."""
    pieces: list[bytes] = []
    while count:
        piece = bytearray(min(count, PIECE_BYTES))
        got = files.preadv(descriptor, [memoryview(piece)], offset)
        if got <= 0:
            break
        pieces.append(bytes(piece[:got]))
        offset, count = offset + got, count - got
    return b"".join(pieces)


def fill(files: Files, descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
    """Read consecutive bytes from ``offset`` into ``targets``; fewer than asked only at the file's end."""
    left = [target for target in targets if target.nbytes]
    done = 0
    while left:
        batch = _batch(left)
        got = files.preadv(descriptor, batch, offset + done)
        if got <= 0:
            break
        done += got
        while left and got >= left[0].nbytes:
            got -= left.pop(0).nbytes
        if got:
            left[0] = left[0][got:]
    return done


def _batch(targets: Sequence[memoryview]) -> list[memoryview]:
    """The first targets, together at most ``PIECE_BYTES`` and few enough for one call."""
    batch: list[memoryview] = []
    room = PIECE_BYTES
    for target in targets[:256]:
        batch.append(target[:room])
        room -= batch[-1].nbytes
        if room == 0:
            break
    return batch
