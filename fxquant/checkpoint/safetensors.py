"""Reading safetensors files with positioned reads, never with a mapping of the file."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch

from fxquant.checkpoint.base import Checkpoint, TensorInfo, check_rows, digest
from fxquant.checkpoint.files import OS_FILES, Files, close_read, fill, open_regular, read_range
from fxquant.checkpoint.header import Header, load_json, read_header, short
from fxquant.checkpoint.locate import Layout, locate, read_small
from fxquant.errors import CheckpointFileError

SAMPLES, SAMPLE_BYTES = 16, 64 << 10
"""How many pieces of a file, and of how many bytes, go into its fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileState:
    """What must not change between reading a header and reading its tensors."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


class Piece(NamedTuple):
    """Bytes of a stored tensor, from ``start``, and where they are to go."""

    key: str
    start: int
    target: memoryview


class FileCheckpoint(Checkpoint):
    """A folder of safetensors files, one such file, or an index of shards.

    Opening reads the headers only. Each file is opened again at its first read, after checking
    that it still is the same file. ``files`` makes the file calls.
    """

    kind: ClassVar[str] = "positioned reads"

    def __init__(self, path: str | os.PathLike[str], *, files: Files = OS_FILES) -> None:
        text = os.fsdecode(path)
        if not text:
            raise CheckpointFileError("the path of the checkpoint is empty")
        self._path = Path(text)
        self._files = files
        self._layout = self._locate()
        self._states: dict[str, _FileState] = {}
        headers = {file: self._header(file) for file in self._layout.files}
        self._infos = _collect(self._layout, headers)
        self._metadata: dict[str, str] = {}
        for header in reversed(headers.values()):
            self._metadata.update(header.metadata)
        self._config: Mapping[str, object] | None = None
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}
        self._finalizer = weakref.finalize(self, _close_all, files, self._open)

    @property
    def location(self) -> str:
        """The path that was opened."""
        return str(self._path)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor that counts, in the order of files and bytes."""
        return MappingProxyType(self._infos)

    @property
    def metadata(self) -> Mapping[str, str]:
        """Text pairs of all files; where two files differ, the first counts."""
        return MappingProxyType(self._metadata)

    @property
    def config(self) -> Mapping[str, object]:
        """``config.json`` of the folder, parsed at first use."""
        if self._config is None:
            self._config = MappingProxyType(_load_config(self._layout.folder, self._files))
        return self._config

    @property
    def identity(self) -> str:
        """Digest over the tensor lists and file sizes, see ``Checkpoint.identity``."""
        return digest(self._infos, {file: state.size for file, state in self._states.items()})

    def fingerprint(self) -> str:
        """Digest that changes with the files: identity, states, and samples of the values of each file.

        Samples are there for file systems whose times cannot be trusted. Not every byte is read.
        """
        text = hashlib.sha256(f"fxquant files 1 {self.identity}".encode())
        for file, state in sorted(self._states.items()):
            known = (file, state.size, state.mtime_ns, state.ctime_ns, state.inode)  # devices are renumbered
            text.update(repr(known).encode("utf-8", "backslashreplace"))
            descriptor = self._descriptor(file)
            step = max(SAMPLE_BYTES, state.size // SAMPLES)
            try:
                for offset in range(0, state.size, step):
                    text.update(read_range(self._files, descriptor, offset, SAMPLE_BYTES))
            except OSError as error:
                raise CheckpointFileError(
                    f"{self._path_of(file)} cannot be read: {error.strerror}"
                ) from error
        return text.hexdigest()

    def read(self, key: str) -> torch.Tensor:
        """Read one tensor into fresh memory of exactly its size; CheckpointFileError if that fails."""
        info = self.info(key)
        return self._read_range(info, info.shape, 0, info.nbytes)

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Read only the bytes of some rows."""
        info = self.info(key)
        check_rows(info, start, stop)
        row_bytes = info.nbytes // info.shape[0] if info.shape[0] else 0
        shape = (stop - start, *info.shape[1:])
        return self._read_range(info, shape, start * row_bytes, (stop - start) * row_bytes)

    def fill(self, pieces: Sequence[Piece]) -> int:
        """Read pieces to where they are to go; those that follow each other in a file in one read.

        Returns the number of reads. CheckpointFileError names the file and the tensor.
        """
        runs: list[list[Piece]] = []
        end: tuple[str | None, int] | None = None
        for piece in pieces:
            info = self.info(piece.key)
            assert info.offset is not None
            begin = info.offset + piece.start
            if (info.file, begin) == end:
                runs[-1].append(piece)
            else:
                runs.append([piece])
            end = (info.file, begin + piece.target.nbytes)
        for run in runs:
            self._fill_run(run)
        return len(runs)

    def will_need(self, key: str, start: int, count: int) -> None:
        """Tell the system that bytes of a tensor are to be read soon. It is a hint: no error comes of it."""
        info = self.info(key)
        descriptor = self._open.get(str(info.file))
        if descriptor is None:
            return  # the first read opens the file, and tells what is wrong with it
        with contextlib.suppress(OSError):
            self._files.will_need(descriptor, (info.offset or 0) + start, count)

    def _fill_run(self, run: Sequence[Piece]) -> None:
        first = self.info(run[0].key)
        assert first.file is not None
        assert first.offset is not None
        begin = first.offset + run[0].start
        wanted = sum(piece.target.nbytes for piece in run)
        reason, cause, done = "the file ends there", None, 0
        try:
            done = fill(self._files, self._descriptor(first.file), [p.target for p in run], begin)
        except OSError as error:
            cause, reason = error, str(error.strerror)
        if done != wanted:
            path = self._path_of(first.file)
            raise CheckpointFileError(
                f"{path}: tensor {short(first.key)}: the read at offset {begin} failed: wanted {wanted} "
                f"bytes, got {done}: {reason}"
            ) from cause
        for piece in run:
            self._check_piece(self.info(piece.key), piece)

    def _check_piece(self, info: TensorInfo, piece: Piece) -> None:
        """Refuse bytes that cannot be values of the tensor's dtype."""
        if info.dtype is not torch.bool or not piece.target.nbytes:
            return
        if bool((torch.frombuffer(piece.target, dtype=torch.uint8) > 1).any()):
            raise CheckpointFileError(
                f"{self._path_of(str(info.file))}: tensor {short(info.key)} is BOOL but holds bytes "
                "other than 0 and 1"
            )

    def check_unchanged(self) -> None:
        """Refuse files that were written to since their headers were read, as far as size and time tell.

        Of the files that are open; after the last read, since what was read may be a mixture.
        """
        with self._lock:
            for file, descriptor in self._open.items():
                path, known = self._path_of(file), self._states[file]
                try:
                    found = self._files.stat(descriptor)
                except OSError as error:
                    raise CheckpointFileError(f"{path} cannot be read: {error.strerror}") from error
                if (found.st_size, found.st_mtime_ns) != (known.size, known.mtime_ns):
                    raise CheckpointFileError(
                        f"{path} was written to while it was read, so its tensors may be a mixture; load "
                        "again when the file is complete"
                    )

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        with self._lock:
            _close_all(self._files, self._open)

    def _locate(self) -> Layout:
        """The files that make up this checkpoint."""
        return locate(self._path, self._files)

    def _path_of(self, file: str) -> Path:
        return self._layout.folder / file

    def _header(self, file: str) -> Header:
        path = self._path_of(file)
        descriptor, state = self._open_file(path)
        try:
            header = read_header(
                lambda offset, count: read_range(self._files, descriptor, offset, count),
                state.size,
                file=file,
                path=path,
            )
        except OSError as error:
            raise CheckpointFileError(f"{path}: the header cannot be read: {error.strerror}") from error
        finally:
            close_read(self._files, descriptor)
        self._states[file] = state
        return header

    def _descriptor(self, file: str) -> int:
        with self._lock:
            found = self._open.get(file)
            if found is not None:
                return found
            path = self._path_of(file)
            descriptor, state = self._open_file(path)
            if state != self._states[file]:
                close_read(self._files, descriptor)
                raise CheckpointFileError(
                    f"{path} changed after its header was read: it was {self._states[file]}, "
                    f"it is {state}; open the checkpoint again"
                )
            self._open[file] = descriptor
            return descriptor

    def _open_file(self, path: Path) -> tuple[int, _FileState]:
        descriptor, found = open_regular(self._files, path)
        return descriptor, _FileState(
            size=found.st_size,
            mtime_ns=found.st_mtime_ns,
            ctime_ns=found.st_ctime_ns,
            inode=found.st_ino,
            device=found.st_dev,
        )

    def _read_range(self, info: TensorInfo, shape: tuple[int, ...], skip: int, nbytes: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=info.dtype, device="cpu")
        if nbytes:
            self.fill([Piece(info.key, skip, bytes_of(tensor))])
        return tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which must outlive the view."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def _collect(layout: Layout, headers: Mapping[str, Header]) -> dict[str, TensorInfo]:
    """The tensors that count, in the order of files and bytes."""
    infos: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        for info in header.tensors:
            if layout.assigned is not None and layout.assigned.get(info.key) != file:
                continue
            if info.key in infos:
                raise CheckpointFileError(
                    f"{layout.folder}: tensor {short(info.key)} is in {infos[info.key].file} and in {file}, "
                    "and no index says which one counts; pass one file, or an index"
                )
            infos[info.key] = info
    for key, file in (layout.assigned or {}).items():
        if key not in infos:
            raise CheckpointFileError(
                f"{layout.index} places tensor {short(key)} in {file}, which does not hold it"
            )
    return infos


def _load_config(folder: Path, files: Files) -> Mapping[str, object]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    found = load_json(read_small(path, files), str(path), unique=False)
    if not isinstance(found, dict):
        raise CheckpointFileError(f"{path} is a {type(found).__name__}, expected a JSON object")
    return found


def _close_all(files: Files, descriptors: dict[str, int]) -> None:
    while descriptors:
        close_read(files, descriptors.popitem()[1])
