"""Writing the folder in which fxquant keeps quantized constants; ``constants.py`` describes and reads it.

The folder is written aside, each file of it brought to the disk, and then moved to its name by one
rename, so that there is never half a folder under that name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from fxquant.checkpoint.constants import (
    EXTRA_FILES,
    FILE_METADATA,
    MANIFEST,
    StoredWeight,
    expected_constants,
    file_names,
    is_constants_folder,
    is_own_file,
    key_of,
    manifest_bytes,
)
from fxquant.checkpoint.digests import digest_piece
from fxquant.checkpoint.files import OS_FILES, Files
from fxquant.checkpoint.header import DTYPES, MAX_HEADER_BYTES, load_json, short
from fxquant.checkpoint.pieces import pieces_of
from fxquant.errors import CheckpointFileError, ConfigError
from fxquant.form import Form, form_in_files
from fxquant.held import FLIP, flipped, unhold

SHARD_BYTES = 4 * 2**30
"""The most that a file holds, unless a single tensor is larger."""

DATA_ALIGNMENT = 4096
"""The tensors of a file begin at a multiple of this."""

_log = logging.getLogger("fxquant.checkpoint")
_DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightConstants:
    """One weight to be written.

    ``dtype`` and ``shape`` are those that it has in the model. ``tensors`` are its constants in the
    order of ``form.constants``, or its value alone where ``form`` is None; on any device. ``flip``: bits
    of each byte of the codes that are written the other way.
    """

    form: Form | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    flip: int = 0


def constants_in_files(
    form: Form | None, dtype: torch.dtype, shape: tuple[int, ...], constants: Sequence[Tensor]
) -> WeightConstants:
    """A weight to be written, from its constants: as its scheme has them, whatever a device holds."""
    if form is None or not form.held:
        return WeightConstants(form=form_in_files(form), dtype=dtype, shape=shape, tensors=tuple(constants))
    stored = tuple(
        part if name in form.codes else unhold(form, name, part)  # codes are turned while they are written
        for name, part in zip(form.constants, constants, strict=True)
        if name not in form.derived
    )
    flip = FLIP if flipped(form) else 0
    return WeightConstants(form=form.in_files, dtype=dtype, shape=shape, tensors=stored, flip=flip)


def write_constants(
    folder: str | os.PathLike[str],
    weights: Mapping[str, WeightConstants],
    plan: Mapping[str, object],
    *,
    overwrite: bool = False,
    extras: Mapping[str, bytes] = MappingProxyType({}),
    shard_bytes: int = SHARD_BYTES,
    files: Files = OS_FILES,
) -> None:
    """Write ``weights`` (by FQN) and ``plan`` (anything that JSON can hold) to a new folder.

    A contiguous tensor on the CPU is written straight from its memory, any other through one buffer
    of ``DIGEST_BYTES``. Tensors must not be written to meanwhile: the digests would not fit. ``extras``
    are small files of ``EXTRA_FILES`` that go along.

    The folder must not exist; with ``overwrite=True`` a folder of constants that holds nothing else is
    replaced once the new one is complete. ConfigError: what was given cannot be stored.
    CheckpointFileError: the system failed; then nothing was changed and nothing is left behind.
    """
    if not set(extras) <= set(EXTRA_FILES):
        raise ConfigError(f"extras are {sorted(extras)}, expected some of {', '.join(EXTRA_FILES)}")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes is {shard_bytes}, expected at least 1")
    target = Path(folder).absolute()
    plan = _checked_plan(plan)
    stored, tensors = _checked_weights(weights)
    flips = {
        key_of(fqn, name): weight.flip
        for fqn, weight in weights.items()
        for name in (weight.form.codes if weight.form is not None and weight.flip else ())
    }
    shards = _shards(tensors, shard_bytes)
    headers = [_header(shard, tensors) for shard in shards]
    _check_target(target, overwrite=overwrite)
    aside = target.parent / hidden_name("tmp")
    try:
        with _explain(f"the folder {target} could not be created"):
            files.make_folder(aside)
        sizes: dict[str, int] = {}
        digests: dict[str, tuple[int, ...]] = {}
        for name, header, shard in zip(file_names(len(shards)), headers, shards, strict=True):
            output = _Output(files, aside / name, target / name, flips)
            parts = {key: tensors[key] for key in shard}
            sizes[name] = output.write_tensors(header, parts, digests)
        for name, content in extras.items():
            _Output(files, aside / name, target / name).write_tensors(content, {}, digests)
        manifest = _manifest(plan, stored, sizes, digests)
        _Output(files, aside / MANIFEST, target / MANIFEST).write_tensors(manifest, {}, digests)
        with _explain(f"the folder {target} could not be brought to the disk"):
            files.sync_folder(aside)
        _move_in(files, aside, target, overwrite=overwrite)
    except BaseException:
        remove_tree(files, aside)
        raise


def _manifest(
    plan: Mapping[str, object],
    stored: Mapping[str, StoredWeight],
    sizes: Mapping[str, int],
    digests: Mapping[str, tuple[int, ...]],
) -> bytes:
    manifest = manifest_bytes(plan, stored, sizes, digests)
    if len(manifest) > MAX_HEADER_BYTES:
        raise ConfigError(f"the manifest has {len(manifest)} bytes, at most {MAX_HEADER_BYTES} can be read")
    return manifest


class _Output:
    """One file that is being written, ``path``; ``final`` is its name in messages.

    ``flips``: by key, bits of each byte that are written the other way.
    """

    def __init__(
        self, files: Files, path: Path, final: Path, flips: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self._files, self._path, self._final, self._flips = files, path, final, flips
        self._descriptor = -1
        self._offset = 0

    def write_tensors(
        self, start: bytes, tensors: Mapping[str, Tensor], digests: dict[str, tuple[int, ...]]
    ) -> int:
        """Create the file, write ``start`` and the tensors, bring all to the disk; the number of bytes.

        The digests of the tensors are added to ``digests``.
        """
        total = len(start) + sum(tensor.nbytes for tensor in tensors.values())
        with _explain(f"{self._final}, {total} bytes in all, could not be written"):
            self._descriptor = self._files.create(self._path)
            try:
                self._put(memoryview(start))
                for key, tensor in tensors.items():
                    digests[key] = self._write_tensor(key, tensor)
                self._files.sync(self._descriptor)
            finally:
                self._files.close(self._descriptor)
        return total

    def _write_tensor(self, key: str, tensor: Tensor) -> tuple[int, ...]:
        digests: list[int] = []
        what = f"{self._final}: tensor {short(key)}, {tensor.nbytes} bytes at offset {self._offset}"
        with _explain(f"{what}, could not be written"):
            for piece in pieces_of(tensor, self._flips.get(key, 0)):
                digests.append(digest_piece(piece))
                self._put(piece)
        return tuple(digests)

    def _put(self, data: memoryview) -> None:
        while data.nbytes:
            count = self._files.pwrite(self._descriptor, data, self._offset)
            if count <= 0:
                raise OSError(errno.EIO, f"the system took none of {data.nbytes} bytes")
            self._offset += count
            data = data[count:]


def _checked_plan(plan: Mapping[str, object]) -> Mapping[str, object]:
    try:
        text = json.dumps(dict(plan), allow_nan=False)
        load_json(text.encode(), "the plan", unique=True)
    except (TypeError, ValueError, RecursionError, CheckpointFileError) as error:
        raise ConfigError(f"the plan cannot be stored as JSON: {error}") from error
    return dict(plan)


def _checked_weights(
    weights: Mapping[str, WeightConstants],
) -> tuple[dict[str, StoredWeight], dict[str, Tensor]]:
    """The weights for the manifest and every tensor by key; ConfigError if one cannot be stored."""
    stored: dict[str, StoredWeight] = {}
    tensors: dict[str, Tensor] = {}
    for fqn, weight in weights.items():
        shape = tuple(weight.shape)
        expected = expected_constants(weight.form, weight.dtype, shape)
        if len(weight.tensors) != len(expected):
            raise ConfigError(f"weight {fqn!r} has {len(weight.tensors)} constants, expected {len(expected)}")
        pairs = []
        for (name, *wanted), tensor in zip(expected, weight.tensors, strict=True):
            key = key_of(fqn, name)
            if key in tensors or not _is_name(key):
                reason = "is needed by two weights" if key in tensors else "is not a name a file can hold"
                raise ConfigError(f"weight {fqn!r}: the key {short(key)} {reason}; rename the parameter")
            tensors[key] = _plain(tensor, f"weight {fqn!r}: constant {name!r}")
            if [tensor.dtype, tuple(tensor.shape)] != wanted:
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise ConfigError(f"weight {fqn!r}: constant {name!r} is {found}, expected {wanted}")
            pairs.append((name, key))
        stored[fqn] = StoredWeight(
            fqn=fqn, form=weight.form, dtype=weight.dtype, shape=shape, constants=tuple(pairs)
        )
    return stored, tensors


def _is_name(key: str) -> bool:
    return key != "__metadata__" and key.encode("utf-8", "replace").decode() == key


def _plain(tensor: Tensor, what: str) -> Tensor:
    plain = tensor.detach()
    if type(plain) is not Tensor or plain.layout is not torch.strided or plain.is_meta:
        kind = f"a {type(plain).__name__} ({plain.layout}, {plain.device})"
        raise ConfigError(f"{what} is {kind}, expected a dense tensor that holds its values")
    if plain.dtype not in _DTYPE_CODES or (plain.dtype is torch.float4_e2m1fn_x2 and not plain.dim()):
        raise ConfigError(f"{what} is {plain.dtype} {list(plain.shape)}, which safetensors cannot hold")
    return plain


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Keys for each file, at least one file: in the given order, as long as every tensor is aligned.

    Readers that map a file need each tensor at a multiple of its item size. Where an odd size would
    break that, the tensors of the file are ordered by item size instead.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += tensor.nbytes
    return [_aligned(shard, tensors) for shard in shards]


def _aligned(shard: Sequence[str], tensors: Mapping[str, Tensor]) -> list[str]:
    offset = 0
    for key in shard:
        if offset % tensors[key].itemsize:
            return sorted(shard, key=lambda key: -tensors[key].itemsize)
        offset += tensors[key].nbytes
    return list(shard)


def _header(shard: Sequence[str], tensors: Mapping[str, Tensor]) -> bytes:
    """The start of a file: length and JSON, padded so that the tensors begin at ``DATA_ALIGNMENT``."""
    table: dict[str, object] = {"__metadata__": dict(FILE_METADATA)}
    offset = 0
    for key in shard:
        tensor = tensors[key]
        shape = list(tensor.shape)
        if tensor.dtype is torch.float4_e2m1fn_x2:
            shape[-1] *= 2  # the format counts values, torch counts bytes
        offsets = [offset, offset + tensor.nbytes]
        table[key] = {"dtype": _DTYPE_CODES[tensor.dtype], "shape": shape, "data_offsets": offsets}
        offset += tensor.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigError(f"a file would have a header of {len(text)} bytes; pass a smaller shard_bytes")
    return len(text).to_bytes(8, "little") + text


def _check_target(target: Path, *, overwrite: bool) -> None:
    try:
        target.lstat()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise CheckpointFileError(f"{short(str(target))} cannot be written: {error}") from error
    if not overwrite:
        raise CheckpointFileError(f"{target} exists already; give a new name, or pass overwrite=True")
    if target.is_symlink() or not is_constants_folder(target):
        raise CheckpointFileError(
            f"{target} is not a folder of fxquant constants (no {MANIFEST} in it), so it is not overwritten"
        )
    others = sorted(entry.name for entry in target.iterdir() if not is_own_file(entry.name))
    if others:
        raise CheckpointFileError(
            f"{target} also holds {short(others[:3])}, which overwriting would remove; move them away first"
        )


def _move_in(files: Files, aside: Path, target: Path, *, overwrite: bool) -> None:
    """Give the complete folder its name; what had the name before is removed after that."""
    old = target.parent / hidden_name("old")
    try:
        with _explain(f"the complete folder could not be moved to {target}"):
            if overwrite and os.path.lexists(target):
                files.rename(target, old)
            files.rename(aside, target)
            files.sync_folder(target.parent)
    except BaseException:
        _move_back(files, aside, old, target)
        raise
    remove_tree(files, old)


def _move_back(files: Files, aside: Path, old: Path, target: Path) -> None:
    # What was moved is read off the disk: an interrupt may come between a move and a note of it.
    try:
        if not os.path.lexists(aside) and os.path.lexists(target):
            files.rename(target, aside)
        if os.path.lexists(old):
            files.rename(old, target)
    except OSError as error:
        _log.error("%s could not be moved back to %s (%s); move it by hand", old, target, error.strerror)


def remove_tree(files: Files, path: Path) -> None:
    """Remove a folder if it is there; if that fails twice, say so and go on."""
    if not os.path.lexists(path):
        return
    try:
        files.remove_tree(path)
    except BaseException as error:  # once more, so that an interrupt does not leave gigabytes behind
        try:
            if os.path.lexists(path):
                files.remove_tree(path)
        except OSError as second:
            _log.warning("%s could not be removed (%s); remove it by hand", path, second.strerror)
        if not isinstance(error, OSError):
            raise


def hidden_name(suffix: str) -> str:
    """A new name that says which process of which host uses it, for what is not complete or not needed."""
    return f".fxquant-{host_mark()}-{os.getpid()}-{secrets.token_hex(8)}.{suffix}"


def host_mark() -> str:
    """A short text that differs between hosts."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


@contextlib.contextmanager
def _explain(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointFileError(f"{what}: {error.strerror or error}; nothing was changed") from error
