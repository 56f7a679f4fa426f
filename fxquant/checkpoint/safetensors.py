"""Reading safetensors files with positioned reads, never with a mapping of the file."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from fxquant.checkpoint.base import Checkpoint, TensorInfo, check_rows, digest
from fxquant.checkpoint.header import Header, load_json, read_header, short
from fxquant.checkpoint.locate import Layout, locate, open_regular, read_small
from fxquant.errors import CheckpointFileError

PIECE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileState:
    """What must not change between reading a header and reading its tensors."""

    size: int
    mtime_ns: int
    inode: int


class FileCheckpoint(Checkpoint):
    """A folder of safetensors files, one such file, or an index of shards.

    Opening reads the headers only. Each file is opened again at its first read, after checking
    that it still is the same file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fsdecode(path)
        if not text:
            raise CheckpointFileError("the path of the checkpoint is empty")
        self._path = Path(text)
        self._layout = locate(self._path)
        self._states: dict[str, _FileState] = {}
        headers = {file: self._header(file) for file in self._layout.files}
        self._infos = _collect(self._layout, headers)
        self._metadata: dict[str, str] = {}
        for header in reversed(headers.values()):
            self._metadata.update(header.metadata)
        self._config: Mapping[str, object] | None = None
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._open)

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
            self._config = MappingProxyType(_load_config(self._layout.folder))
        return self._config

    @property
    def identity(self) -> str:
        """Digest over the tensor lists and file sizes, see ``Checkpoint.identity``."""
        return digest(self._infos, {file: state.size for file, state in self._states.items()})

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

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        with self._lock:
            _close_all(self._open)

    def _path_of(self, file: str) -> Path:
        return self._layout.folder / file

    def _header(self, file: str) -> Header:
        path = self._path_of(file)
        descriptor, state = _open_file(path)
        try:
            header = read_header(
                lambda offset, count: _pread(descriptor, offset, count), state.size, file=file, path=path
            )
        except OSError as error:
            raise CheckpointFileError(f"{path}: the header cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self._states[file] = state
        return header

    def _descriptor(self, file: str) -> int:
        with self._lock:
            found = self._open.get(file)
            if found is not None:
                return found
            path = self._path_of(file)
            descriptor, state = _open_file(path)
            if state != self._states[file]:
                os.close(descriptor)
                raise CheckpointFileError(
                    f"{path} changed after its header was read: it was {self._states[file]}, "
                    f"it is {state}; open the checkpoint again"
                )
            self._open[file] = descriptor
            return descriptor

    def _read_range(self, info: TensorInfo, shape: tuple[int, ...], skip: int, nbytes: int) -> torch.Tensor:
        assert info.file is not None
        assert info.offset is not None
        tensor = torch.empty(shape, dtype=info.dtype, device="cpu")
        if nbytes:
            where = f"{self._path_of(info.file)}: tensor {short(info.key)}"
            _fill(self._descriptor(info.file), tensor, nbytes, info.offset + skip, where)
            if info.dtype is torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
                raise CheckpointFileError(f"{where} is BOOL but holds bytes other than 0 and 1")
        return tensor


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


def _load_config(folder: Path) -> Mapping[str, object]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    found = load_json(read_small(path), str(path), unique=False)
    if not isinstance(found, dict):
        raise CheckpointFileError(f"{path} is a {type(found).__name__}, expected a JSON object")
    return found


def _open_file(path: Path) -> tuple[int, _FileState]:
    descriptor = open_regular(path)
    found = os.fstat(descriptor)
    return descriptor, _FileState(size=found.st_size, mtime_ns=found.st_mtime_ns, inode=found.st_ino)


def _pread(descriptor: int, offset: int, count: int) -> bytes:
    pieces: list[bytes] = []
    while count:
        piece = os.pread(descriptor, min(count, PIECE_BYTES), offset)
        if not piece:
            break
        pieces.append(piece)
        offset, count = offset + len(piece), count - len(piece)
    return b"".join(pieces)


def _fill(descriptor: int, tensor: torch.Tensor, nbytes: int, offset: int, where: str) -> None:
    """Read ``nbytes`` at ``offset`` straight into the memory of ``tensor``."""
    target = memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
    done = 0
    reason = "the file ends there"
    cause: OSError | None = None
    try:
        while done < nbytes:
            got = os.preadv(descriptor, [target[done : done + PIECE_BYTES]], offset + done)
            if got <= 0:
                break
            done += got
    except OSError as error:
        cause, reason = error, str(error.strerror)
    if done != nbytes:
        raise CheckpointFileError(
            f"{where}: the read at offset {offset} failed: wanted {nbytes} bytes, got {done}: {reason}"
        ) from cause


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
