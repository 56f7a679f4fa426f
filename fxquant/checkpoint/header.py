"""The header of a safetensors file, read as if its author were hostile.

Layout (https://github.com/huggingface/safetensors): 8 bytes little-endian header length N, N bytes
of JSON ``{key: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}``,
then the data, which the tensors fill without holes or overlaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from fxquant.checkpoint.base import TensorInfo
from fxquant.errors import CheckpointFileError

MAX_HEADER_BYTES = 100_000_000  # limit of the format, also that of the safetensors library
MAX_DIMS = 64
MAX_ELEMENTS = 2**63 - 1
LFS_MARK = b"version https://git-lfs"

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Tensors of one file in the order of their bytes, and the file's metadata."""

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]


def read_header(read: Callable[[int, int], bytes], size: int, *, file: str, path: Path) -> Header:
    """Parse the header of a file of ``size`` bytes.

    ``read(offset, count)`` gives up to ``count`` bytes. No more is asked for than the file holds,
    whatever length the header declares. ``file`` goes into the tensor infos, ``path`` into messages.
    """
    start = read(0, min(size, len(LFS_MARK)))
    refuse_lfs_pointer(start, path)
    if size == 0:
        raise CheckpointFileError(f"{path} is empty (0 bytes); download or copy it again")
    if size < 8:
        raise CheckpointFileError(
            f"{path} has {size} bytes; a safetensors file has at least 8, so it was cut short"
        )
    length = int.from_bytes(start[:8], "little")
    _check_length(length, size, path)
    raw = read(8, length)
    if len(start) < 8 or len(raw) != length:
        raise CheckpointFileError(f"{path}: the header ended early, after {len(raw)} of {length} bytes")
    return parse_header(raw, size, file=file, path=path)


def refuse_lfs_pointer(start: bytes, path: Path) -> None:
    """Say in words that a file is only a Git LFS pointer."""
    if start.startswith(LFS_MARK):
        raise CheckpointFileError(
            f"{path} is a Git LFS pointer, not the file itself: the repository was cloned without its "
            "large files. Run 'git lfs install' and 'git lfs pull' in it, or download the file"
        )


def _check_length(length: int, size: int, path: Path) -> None:
    if length > MAX_HEADER_BYTES and 8 + length <= size:
        raise CheckpointFileError(
            f"{path}: its header has {length} bytes, over the limit of {MAX_HEADER_BYTES} bytes of the "
            "safetensors format. This is a limit, not corruption: split the file into shards"
        )
    if 8 + length > size:
        raise CheckpointFileError(
            f"{path}: it declares a header of {length} bytes but has only {size} bytes in all; "
            "it was cut short or is not a safetensors file"
        )


def parse_header(raw: bytes, size: int, *, file: str, path: Path) -> Header:
    """Parse and check the JSON of a header; ``size`` is that of the whole file."""
    if not raw.startswith(b"{"):
        raise CheckpointFileError(f"{path}: the header is not a JSON object (it starts with {raw[:8]!r})")
    table = load_json(raw, f"{path} (header)", unique=True)
    if not isinstance(table, dict):
        raise CheckpointFileError(f"{path}: the header is a {type(table).__name__}, expected a JSON object")
    metadata = _metadata(table.pop("__metadata__", None), path)
    data_start = 8 + len(raw)
    tensors = [_tensor(key, entry, data_start, file=file, path=path) for key, entry in table.items()]
    tensors.sort(key=lambda info: (info.offset, info.nbytes, info.key))
    _check_cover(tensors, data_start, size, path)
    return Header(tensors=tuple(tensors), metadata=metadata)


def load_json(raw: bytes, where: str, *, unique: bool) -> object:
    """Parse JSON text; every way in which it can be damaged is a CheckpointFileError.

    ``unique`` refuses an object that holds a key twice and numbers that JSON does not have.
    """
    try:
        text = raw.decode("utf-8")
        if unique:
            return json.loads(text, object_pairs_hook=_unique_pairs, parse_constant=_no_constant)
        return json.loads(text)
    except RecursionError:
        raise CheckpointFileError(f"{where}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise CheckpointFileError(f"{where}: the JSON is damaged: {error}") from error


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {short(key)} appears twice")
        found[key] = value
    return found


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not a JSON number")


def short(value: object) -> str:
    """A value from a file, for messages: escaped and of bounded length."""
    text = ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _metadata(found: object, path: Path) -> Mapping[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointFileError(f"{path}: __metadata__ in the header is not an object of texts")
    return found


def _tensor(key: str, entry: object, data_start: int, *, file: str, path: Path) -> TensorInfo:
    where = f"{path}: tensor {short(key)}"
    try:
        key.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointFileError(f"{where}: the name is not valid Unicode") from None
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointFileError(f"{where}: the entry must be an object with dtype, shape and data_offsets")
    dtype = _dtype(entry["dtype"], where)
    logical = _shape(entry["shape"], where)
    shape = _packed_shape(logical, where) if dtype is torch.float4_e2m1fn_x2 else logical
    begin, end = _offsets(entry["data_offsets"], where)
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise CheckpointFileError(
            f"{where}: shape {list(logical)} of {entry['dtype']} takes {nbytes} bytes but data_offsets "
            f"[{begin}, {end}] span {end - begin}"
        )
    return TensorInfo(key=key, dtype=dtype, shape=shape, nbytes=nbytes, file=file, offset=data_start + begin)


def _dtype(name: object, where: str) -> torch.dtype:
    found = DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointFileError(
            f"{where}: the dtype {short(name)} is not supported; known: {', '.join(sorted(DTYPES))}"
        )
    return found


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shape(found: object, where: str) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(_is_int(dim) for dim in found):
        raise CheckpointFileError(f"{where}: the shape is not a list of integers")
    if len(found) > MAX_DIMS:
        raise CheckpointFileError(f"{where}: the shape has {len(found)} dimensions, at most {MAX_DIMS} exist")
    if any(not 0 <= dim <= MAX_ELEMENTS for dim in found) or math.prod(filter(None, found)) > MAX_ELEMENTS:
        raise CheckpointFileError(f"{where}: the shape {found} is negative or too large to be real")
    return tuple(found)


def _packed_shape(shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Two F4 values share a byte: the header counts values, torch counts bytes."""
    if not shape or shape[-1] % 2:
        raise CheckpointFileError(
            f"{where}: F4 packs two values in a byte, so the last dimension of {list(shape)} must be even"
        )
    return (*shape[:-1], shape[-1] // 2)


def _offsets(found: object, where: str) -> tuple[int, int]:
    if not isinstance(found, list) or len(found) != 2 or not all(_is_int(value) for value in found):
        raise CheckpointFileError(f"{where}: data_offsets are not two integers")
    begin, end = found
    if not 0 <= begin <= end:
        raise CheckpointFileError(f"{where}: data_offsets [{begin}, {end}] are negative or reversed")
    return begin, end


def _check_cover(tensors: list[TensorInfo], data_start: int, size: int, path: Path) -> None:
    """The tensors must fill the data without holes, overlaps, missing or trailing bytes."""
    spans = [((info.offset or 0), (info.offset or 0) + info.nbytes, info.key) for info in tensors]
    last = max((end for _, end, _ in spans), default=data_start)
    if last > size:
        raise CheckpointFileError(
            f"{path}: the data is cut short: the tensors end at byte {last} but the file has {size} bytes "
            f"({last - size} missing); download or copy it again"
        )
    spans = [(data_start, data_start, "the header"), *spans]
    for (_, end, before), (begin, _, key) in pairwise(spans):
        if begin != end:
            kind = "overlaps" if begin < end else "leaves a hole after"
            raise CheckpointFileError(
                f"{path}: tensor {short(key)} at byte {begin} {kind} {short(before)}, "
                f"which ends at byte {end}"
            )
    if last != size:
        raise CheckpointFileError(f"{path}: {size - last} bytes follow the last tensor; expected none")
