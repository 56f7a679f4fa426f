"""Reading the folder in which fxquant keeps quantized constants.

The folder holds ``fxquant.json`` (the manifest, written last) and files
``constants-00001-of-0000N.safetensors``. The manifest::

    {"format": "fxquant-constants", "version": 2,
     "plan": {...},
     "weights": {fqn: {"form": "int8", "dtype": "bfloat16", "shape": [N, K],
                       "constants": {"codes": key, "scale": key}}},
     "files": {name: size in bytes},
     "digests": {key: [a number for each 2 MiB, see ``digests.py``]},
     "sha256": over every byte before the comma in front of this field}

A float weight has the form ``"float"`` and one constant, ``"value"``. All of it is read as if its
author were hostile; the sum at its end is there for damage, not against an author.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from fxquant.checkpoint.base import TensorInfo
from fxquant.checkpoint.digests import DIGEST_BYTES, DIGEST_LIMIT, digest_count, digest_piece
from fxquant.checkpoint.files import OS_FILES, Files
from fxquant.checkpoint.header import DTYPES, Header, load_json, short
from fxquant.checkpoint.locate import Layout, read_small
from fxquant.checkpoint.safetensors import FileCheckpoint, Piece
from fxquant.errors import CheckpointFileError, ConfigError
from fxquant.form import Form

MANIFEST = "fxquant.json"
FORMAT = "fxquant-constants"
VERSION = 2
"""Since 2 zero points are -8 to 7, and scales of int4 in the dtype of the weight."""
FIELDS = ("format", "version", "plan", "weights", "files", "digests", "sha256")
FILE_METADATA: Mapping[str, str] = MappingProxyType({"format": "pt", "fxquant": str(VERSION)})
FLOAT = "float"
"""The form, in the manifest, of a weight that is kept as it is."""

EXTRA_FILES = ("config.json", "generation_config.json")
"""Other files that may lie in the folder, written along with the constants."""

_FILE_NAME = re.compile(r"constants-[0-9]{5}-of-[0-9]{5}\.safetensors")
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """What is stored of one weight.

    ``dtype`` and ``shape`` are those that the weight has in the model. ``constants`` pairs the
    name of each constant (``form.constants``, or ``value`` where ``form`` is None) with its key.
    """

    fqn: str
    form: Form | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    constants: tuple[tuple[str, str], ...]


class ConstantsCheckpoint(FileCheckpoint):
    """A folder of constants. Opening reads the manifest and the headers and checks all that they say.

    Bytes are checked against the digests as they are read: every piece of ``DIGEST_BYTES`` (or the
    shorter one at the end of a tensor) that a read covers whole. ``read`` covers all of them.
    """

    _manifest: _Manifest

    def __init__(self, path: str | os.PathLike[str], *, files: Files = OS_FILES) -> None:
        super().__init__(path, files=files)
        for name, size in self._manifest.files.items():
            if self._states[name].size != size:
                raise CheckpointFileError(
                    f"{self._path_of(name)} has {self._states[name].size} bytes, {MANIFEST} says {size}; "
                    "it was not written by the same run, or it is damaged"
                )
        _check_tensors(self._manifest, self._infos, self.location)

    @property
    def manifest_plan(self) -> Mapping[str, object]:
        """The object that was given as the plan when the folder was written."""
        return MappingProxyType(self._manifest.plan)

    @property
    def weights(self) -> Mapping[str, StoredWeight]:
        """Every weight by FQN, in the order in which they were written."""
        return MappingProxyType(self._manifest.weights)

    @property
    def identity(self) -> str:
        """Digest over tensor lists, file sizes, forms and the digests of the values; nothing is read."""
        text = hashlib.sha256(f"fxquant constants {VERSION}\n".encode())
        text.update(super().identity.encode())
        for part in (self._manifest.weights, self._manifest.digests):
            for item in part.items():
                text.update(repr(item).encode("utf-8", "backslashreplace"))
        return text.hexdigest()

    def _locate(self) -> Layout:
        if not is_constants_folder(self._path):
            raise CheckpointFileError(
                f"{self._path} is not a folder of fxquant constants: no {MANIFEST} in it"
            )
        path = self._path / MANIFEST
        raw = read_small(path, self._files)
        try:
            self._manifest = _parse_manifest(raw, path)
        except RecursionError:  # showing a value takes more depth than parsing it
            raise CheckpointFileError(f"{path}: the JSON is nested too deeply") from None
        return Layout(folder=self._path, files=tuple(self._manifest.files), index=None, assigned=None)

    def _header(self, file: str) -> Header:
        header = super()._header(file)
        if header.metadata != FILE_METADATA:
            raise CheckpointFileError(
                f"{self._path_of(file)}: __metadata__ is {short(header.metadata)}, "
                f"expected {dict(FILE_METADATA)}"
            )
        return header

    def _check_piece(self, info: TensorInfo, piece: Piece) -> None:
        """Compare with the digests that the piece covers whole, then as every file checkpoint."""
        end = piece.start + piece.target.nbytes
        expected = self._manifest.digests[info.key]
        for number in range(digest_count(piece.start), len(expected)):
            begin = number * DIGEST_BYTES
            stop = min(begin + DIGEST_BYTES, info.nbytes)
            if stop > end:
                break
            if digest_piece(piece.target[begin - piece.start : stop - piece.start]) != expected[number]:
                offset = info.offset or 0
                raise CheckpointFileError(
                    f"{self._path_of(str(info.file))}: tensor {short(info.key)} is damaged: its bytes "
                    f"{begin} to {stop} (at offset {offset + begin} of the file) do not give the digest "
                    f"in {MANIFEST}; write or copy the folder again"
                )
        super()._check_piece(info, piece)


def is_constants_folder(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a folder that holds a manifest; what the manifest says is not looked at."""
    try:
        return stat.S_ISREG((Path(path) / MANIFEST).stat().st_mode)
    except (OSError, ValueError):  # absent, not a folder, a name that no file can have
        return False


def is_own_file(name: str) -> bool:
    """Whether a folder of constants has files of this name."""
    return name in (MANIFEST, *EXTRA_FILES) or _FILE_NAME.fullmatch(name) is not None


def expected_constants(
    form: Form | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    """Name, dtype and shape of each constant of a weight. ConfigError if the form cannot have the shape."""
    if form is None:
        return (("value", dtype, shape),)
    if form.host:
        return (("value", dtype, shape),)
    ranks = (2 + len(form.kernel),) if form.kernel else (2, 3)
    if len(shape) not in ranks:
        dims = "two dimensions (experts: three)"
        if form.kernel:
            dims = f"{('three', 'four', 'five')[len(form.kernel) - 1]} dimensions"
        raise ConfigError(f"the form {str(form)!r} has {dims}, the shape is {list(shape)}")
    if form.kernel:
        _check_convolution(form, shape)
    n, k = form.codes_shape(shape)
    if (form.parts_n and sum(form.parts_n) != n) or (form.parts_k and sum(form.parts_k) != k):
        raise ConfigError(f"the parts of the form {str(form)!r} do not add up to [{n}, {k}]")
    spec = form.weight
    odd = spec.packed and k % 2 == 1
    if form.odd_k != odd or (spec.packed and (form.kn or any(part % 2 for part in form.parts_k))):
        raise ConfigError(f"codes of the form {str(form)!r} cannot hold [{n}, {k}]")
    return tuple((name, *facts) for name, facts in form.shapes(shape, dtype).items())


def _check_convolution(form: Form, shape: tuple[int, ...]) -> None:
    if shape[2:] != form.kernel:
        raise ConfigError(f"the kernel of the form {str(form)!r} is not that of the shape {list(shape)}")
    turned = (
        form.transposed or form.kn or form.nz or form.parts_n or form.parts_k or form.table or form.rotated
    )
    if turned or form.act is not None:
        raise ConfigError(f"a convolution cannot have the form {str(form)!r}")


def key_of(fqn: str, name: str) -> str:
    """The key under which a constant is stored."""
    return fqn if name == "value" else f"{fqn}.{name}"


def file_names(count: int) -> tuple[str, ...]:
    """The names of ``count`` files."""
    return tuple(f"constants-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count))


def manifest_bytes(
    plan: Mapping[str, object],
    weights: Mapping[str, StoredWeight],
    sizes: Mapping[str, int],
    digests: Mapping[str, tuple[int, ...]],
) -> bytes:
    """The manifest as it is written."""
    entries = {
        fqn: {
            "form": FLOAT if weight.form is None else str(weight.form),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "shape": weight.shape,
            "constants": dict(weight.constants),
        }
        for fqn, weight in weights.items()
    }
    values = (FORMAT, VERSION, plan, entries, sizes, digests)
    return seal(dict(zip(FIELDS, values, strict=False)))


def seal(fields: Mapping[str, object]) -> bytes:
    """JSON of ``fields``, a line for each, and the sum over it as the last one."""
    lines = (f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in fields.items())
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + _seal_of(body)


def _seal_of(body: bytes) -> bytes:
    return f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


_SEAL_BYTES = len(_seal_of(b""))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    plan: Mapping[str, object]
    weights: Mapping[str, StoredWeight]
    files: Mapping[str, int]
    digests: Mapping[str, tuple[int, ...]]


def _parse_manifest(raw: bytes, path: Path) -> _Manifest:
    table = load_json(raw, str(path), unique=True)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise CheckpointFileError(f"{path} is not the manifest of a folder of fxquant constants")
    version = table.get("version")
    if not _is_count(version) or version != VERSION:
        raise CheckpointFileError(
            f"{path}: the folder has version {short(version)} of the format, this fxquant reads version "
            f"{VERSION}; use the fxquant that wrote it, or write it again from the original checkpoint"
        )
    if raw[-_SEAL_BYTES:] != _seal_of(raw[:-_SEAL_BYTES]):
        raise CheckpointFileError(
            f"{path} is damaged or was changed: the sum at its end does not fit; "
            "write or copy the folder again"
        )
    if table.keys() != set(FIELDS):
        raise CheckpointFileError(f"{path}: the fields are {short(sorted(table))}, expected {sorted(FIELDS)}")
    plan, weights = _object(table["plan"], f"{path}: plan"), _object(table["weights"], f"{path}: weights")
    return _Manifest(
        plan=plan,
        weights={fqn: _weight(fqn, entry, f"{path}: weight {short(fqn)}") for fqn, entry in weights.items()},
        files=_files(_object(table["files"], f"{path}: files"), path),
        digests={
            key: _numbers(found, DIGEST_LIMIT, f"{path}: digests of {short(key)}")
            for key, found in _object(table["digests"], f"{path}: digests").items()
        },
    )


def _weight(fqn: str, found: object, where: str) -> StoredWeight:
    entry = _object(found, where)
    if entry.keys() != {"form", "dtype", "shape", "constants"}:
        raise CheckpointFileError(
            f"{where}: the fields are {short(sorted(entry))}, expected form, dtype, shape and constants"
        )
    form = _form(entry["form"], where)
    dtype = _DTYPE_NAMES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointFileError(f"{where}: the dtype {short(entry['dtype'])} is not one that can be stored")
    shape = _numbers(entry["shape"], 2**63, f"{where}: shape")
    constants = _object(entry["constants"], f"{where}: constants")
    names = ("value",) if form is None else form.constants
    if constants.keys() != set(names) or not all(isinstance(key, str) for key in constants.values()):
        raise CheckpointFileError(
            f"{where}: the constants are {short(constants)}, expected a key for each of {', '.join(names)}"
        )
    pairs = tuple((name, str(constants[name])) for name in names)
    return StoredWeight(fqn=fqn, form=form, dtype=dtype, shape=shape, constants=pairs)


def _form(text: object, where: str) -> Form | None:
    if text == FLOAT:
        return None
    try:
        form = Form.parse(text) if isinstance(text, str) else None
    except ConfigError:
        form = None
    if form is None or str(form) != text:
        raise CheckpointFileError(f"{where}: the form {short(text)} is not one that this fxquant knows")
    return form


def _files(found: Mapping[str, object], path: Path) -> Mapping[str, int]:
    """Names and sizes. Only the names that the format itself gives pass, so none leads out of the folder."""
    strange = next((name for name in found if not _FILE_NAME.fullmatch(name)), None)
    if strange is not None or not found or set(found) != set(file_names(len(found))):
        raise CheckpointFileError(
            f"{path}: the files are {short(sorted(found))}, expected constants-00001-of-0000N.safetensors "
            "and so on, all of them"
        )
    sizes = _numbers(list(found.values()), 2**63, f"{path}: files")
    return dict(sorted(zip(found, sizes, strict=True)))


def _check_tensors(manifest: _Manifest, infos: Mapping[str, TensorInfo], location: str) -> None:
    """Manifest and headers must speak of the same tensors, each of them as its weight demands."""
    seen: set[str] = set()
    for key, dtype, shape, fqn in _constants(manifest.weights, location):
        where = f"{location}: weight {short(fqn)}: constant {short(key)}"
        info = infos.get(key)
        if info is None or key in seen:
            raise CheckpointFileError(f"{where} is {'in no file' if info is None else 'named twice'}")
        seen.add(key)
        if (info.dtype, info.shape) != (dtype, shape):
            raise CheckpointFileError(
                f"{where} is {info.dtype} {list(info.shape)} in {info.file}, expected {dtype} {list(shape)}"
            )
        if len(manifest.digests.get(key, ())) != digest_count(info.nbytes):
            raise CheckpointFileError(
                f"{where}: {MANIFEST} has {len(manifest.digests.get(key, ()))} digests, expected "
                f"{digest_count(info.nbytes)} for {info.nbytes} bytes"
            )
    for kind, keys in (("files hold", infos.keys()), (f"{MANIFEST} has digests of", manifest.digests.keys())):
        if keys != seen:
            raise CheckpointFileError(
                f"{location}: the {kind} more or less than the weights need: {short(sorted(keys ^ seen)[:3])}"
            )


def _constants(
    weights: Mapping[str, StoredWeight], location: str
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], str]]:
    for fqn, weight in weights.items():
        try:
            expected = expected_constants(weight.form, weight.dtype, weight.shape)
        except ConfigError as error:
            raise CheckpointFileError(f"{location}: weight {short(fqn)}: {error}") from None
        for (_, key), (_, dtype, shape) in zip(weight.constants, expected, strict=True):
            yield key, dtype, shape, fqn


def _object(found: object, where: str) -> dict[str, object]:
    if not isinstance(found, dict):
        raise CheckpointFileError(f"{where}: a {type(found).__name__}, expected a JSON object")
    return found


def _numbers(found: object, limit: int, where: str) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(_is_count(value) and value < limit for value in found):
        raise CheckpointFileError(f"{where}: {short(found)} is not a list of integers from 0 to {limit - 1}")
    return tuple(found)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
