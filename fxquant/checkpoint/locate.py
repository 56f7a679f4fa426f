"""Which files make up a checkpoint, and which of them holds which tensor."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fxquant.checkpoint.files import OS_FILES, Files, close_read, open_regular, read_range
from fxquant.checkpoint.header import MAX_HEADER_BYTES, load_json, refuse_lfs_pointer, short
from fxquant.errors import CheckpointFileError

INDEX_NAMES = ("model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json")
SINGLE_NAMES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The files of a checkpoint.

    ``assigned`` maps each key to its file when an index decides that; None means that every
    tensor of every file counts.
    """

    folder: Path
    files: tuple[str, ...]
    index: Path | None
    assigned: Mapping[str, str] | None


def locate(path: Path, files: Files = OS_FILES) -> Layout:
    """Find the safetensors files of a folder, of an index file, or a single file."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise CheckpointFileError(_absent(path, error)) from error
    if stat.S_ISDIR(mode):
        return _locate_folder(path, files)
    if path.suffix == ".json":
        return _from_index(path, files)
    refuse_pickle(str(path))
    if path.suffix != ".safetensors":
        raise CheckpointFileError(
            f"{path} is not a checkpoint that fxquant reads: give a folder, a .safetensors file "
            "or a .safetensors.index.json file"
        )
    return Layout(folder=path.parent, files=(path.name,), index=None, assigned=None)


def refuse_pickle(path: str) -> None:
    """Pickles run code when they are loaded, so they are never opened."""
    if path.endswith(PICKLE_SUFFIXES):
        raise CheckpointFileError(
            f"{path} is a pickle, which runs code when it is loaded; fxquant never opens one. "
            "Load it where you trust it and save it with safetensors.torch.save_file"
        )


def read_small(path: Path, files: Files = OS_FILES) -> bytes:
    """A whole JSON file beside the weights, of bounded size."""
    descriptor, found = open_regular(files, path)
    try:
        if found.st_size > MAX_HEADER_BYTES:
            raise CheckpointFileError(
                f"{path} has {found.st_size} bytes; at most {MAX_HEADER_BYTES} bytes of JSON are read"
            )
        raw = read_range(files, descriptor, 0, found.st_size)
    except OSError as error:
        raise CheckpointFileError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        close_read(files, descriptor)
    refuse_lfs_pointer(raw, path)
    return raw


def _absent(path: Path, error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return f"{path} cannot be read: {error.strerror}"
    text = f"there is no file or folder {short(str(path))}"
    if len(path.parts) == 2 and not path.is_absolute():
        text += "; if it is the name of a repository on a hub, download it first and pass its folder"
    return text


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):  # absent, too long a name, a name that no file can have
        return False


def _locate_folder(folder: Path, files: Files) -> Layout:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise CheckpointFileError(f"the folder {folder} cannot be read: {error.strerror}") from error
    indexes = [name for name in INDEX_NAMES if name in names]
    if len(indexes) > 1:
        raise CheckpointFileError(
            f"{folder} holds two indexes, {' and '.join(indexes)}; pass the path of the one to use"
        )
    if indexes:
        return _from_index(folder / indexes[0], files)
    found = [name for name in names if name.endswith(".safetensors")]
    preferred = [name for name in SINGLE_NAMES if name in found]
    if preferred:
        found = preferred[:1]
    if not found:
        raise CheckpointFileError(_nothing_found(folder, names))
    return Layout(folder=folder, files=tuple(found), index=None, assigned=None)


def _nothing_found(folder: Path, names: Sequence[str]) -> str:
    text = f"{folder} holds no weights: looked for {', '.join(INDEX_NAMES + SINGLE_NAMES)}, *.safetensors"
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        text += (
            f"; it holds {', '.join(pickles[:3])}, but fxquant never opens pickles "
            "(convert them where you trust them, with safetensors.torch.save_file)"
        )
    elif "model_index.json" in names:
        text += "; it is a pipeline (model_index.json): pass the folder of one component"
    elif not names:
        text += "; the folder is empty"
    return text


def _from_index(path: Path, files: Files) -> Layout:
    table = load_json(read_small(path, files), str(path), unique=True)
    mapping = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(mapping, dict):
        raise CheckpointFileError(f"{path} is not an index of shards: it has no object 'weight_map'")
    for key, file in mapping.items():
        _check_shard_name(file, f"{path}: tensor {short(key)}")
    shards = sorted(set(mapping.values()))
    for file in shards:
        if not _is_file(path.parent / file):
            count = sum(1 for shard in mapping.values() if shard == file)
            raise CheckpointFileError(
                f"{path} places {count} tensors in {short(file)}, which does not exist there; "
                "the download is incomplete, or the index belongs to other files (then pass the path "
                "of the right .safetensors file)"
            )
    return Layout(folder=path.parent, files=tuple(shards), index=path, assigned=mapping)


def _check_shard_name(file: object, where: str) -> None:
    if not isinstance(file, str):
        raise CheckpointFileError(f"{where}: the shard is a {type(file).__name__}, expected a file name")
    path = PurePosixPath(file.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or "\0" in file:
        raise CheckpointFileError(f"{where}: the shard {short(file)} lies outside the folder; refused")
    refuse_pickle(file)
    if not file.endswith(".safetensors"):
        raise CheckpointFileError(f"{where}: the shard {short(file)} is not a .safetensors file")
