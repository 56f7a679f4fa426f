"""``cache_dir``: a second start reads constants alone, and a damaged cache never damages a load."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fxquant
from fxquant import numerics
from fxquant.checkpoint import Cache, FileCheckpoint
from fxquant.checkpoint.constants import MANIFEST
from fxquant.errors import CheckpointFileError, ConfigError
from tests.materialize.faulty_files import (
    HEADER_READS,
    SHARDS,
    FaultyFiles,
    ends,
    fails,
    flips,
    late,
    load,
    on_meta,
    raises,
    same,
    values,
    write_shards,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "ckpt")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def entries(cache: Path) -> list[str]:
    return sorted(entry.name for entry in cache.iterdir()) if cache.exists() else []


def origin(model: torch.nn.Module) -> str:
    return fxquant.report(model).origin


def test_a_second_start_reads_only_the_cache(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(folder, cache_dir=cache)
    (key,) = entries(cache)
    assert origin(first) == f"the checkpoint; cached in {cache / key}"
    monkeypatch.setattr(numerics, "quantize_into", lambda *args: pytest.fail("quantized again"))
    monkeypatch.setattr(FileCheckpoint, "fill", _only_constants(FileCheckpoint.fill))
    second = load(folder, cache_dir=cache)
    assert origin(second) == f"the cache, {cache / key}"
    assert same(first, second)
    assert entries(cache) == [key]


def _only_constants(real: Callable[..., int]) -> Callable[..., int]:
    def fill(self: FileCheckpoint, pieces: Any) -> int:
        assert type(self) is not FileCheckpoint, f"{pieces[0].key} is read from the source"
        return real(self, pieces)

    return fill


@pytest.mark.parametrize(
    "options",
    [
        {"load_workers": 3},
        {"read_bytes": 1 << 20},
        {"host_budget": "1GiB"},
        {"reader": "mmap"},
        {"dynamic": False},
        {"progress": False},
        {"strict": False},
    ],
    ids=str,
)
def test_how_it_is_loaded_is_not_in_the_key(options: dict[str, Any], folder: Path, cache: Path) -> None:
    load(folder, cache_dir=cache)
    assert origin(load(folder, cache_dir=cache, **options)).startswith("the cache")


@pytest.mark.parametrize(
    "options",
    [{"scheme": "none"}, {"ignore": ["b"]}, {"config": {"a": "none"}}, {"dtype": torch.float16}],
    ids=str,
)
def test_what_decides_the_constants_is_in_the_key(options: dict[str, Any], folder: Path, cache: Path) -> None:
    load(folder, cache_dir=cache)
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    found = load(folder, on_meta().to(dtype), cache_dir=cache, **options)
    assert origin(found).startswith("the checkpoint; cached in")
    assert len(entries(cache)) == 2
    assert same(found, load(folder, on_meta().to(dtype), **options))


def test_values_that_change_in_place_are_noticed(folder: Path, cache: Path) -> None:
    load(folder, cache_dir=cache)
    path = folder / SHARDS[0]
    before = path.stat()
    other = values(1)
    save_file({name: other[name] for name in ("a.weight", "gain")}, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    model = load(folder, cache_dir=cache)
    assert origin(model).startswith("the checkpoint")
    assert same(model, load({**values(), "a.weight": other["a.weight"], "gain": other["gain"]}))


def test_sources_that_cannot_be_cached(folder: Path, cache: Path, tmp_path: Path) -> None:
    fxquant.save_checkpoint(load(folder), tmp_path / "saved")
    for source, scheme in (
        (values(), "int8"),
        (iter(values().items()), "int8"),
        (tmp_path / "saved", None),
    ):
        with pytest.raises(ConfigError, match="cache_dir is for float checkpoints in files"):
            load(source, scheme=scheme, cache_dir=cache)
    with pytest.raises(ConfigError, match="the path of the cache folder is empty"):
        load(folder, cache_dir="")
    assert entries(cache) == []


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[3])
from tests.materialize.faulty_files import load, same, values
import fxquant
print("ready", flush=True)
sys.stdin.readline()
model = load(sys.argv[1], cache_dir=sys.argv[2])
assert same(model, load(values()))
print(fxquant.report(model).origin)
"""


def test_two_processes_at_once(folder: Path, cache: Path) -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", PROGRAM, str(folder), str(cache), root]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    found = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        for process in found:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        texts = [process.communicate("go\n", timeout=120)[0] for process in found]
    finally:
        for process in found:
            process.kill()
            process.wait()
    (key,) = entries(cache)
    assert all(str(cache / key) in text for text in texts)
    assert origin(load(folder, cache_dir=cache)).startswith("the cache")


# ------------------------------------------------------------------- writing the cache fails


@pytest.fixture
def faulty_cache(monkeypatch: pytest.MonkeyPatch) -> Callable[[FaultyFiles], None]:
    """Let every cache make its file calls through a layer."""

    real = Cache.__init__

    def use(files: FaultyFiles) -> None:
        monkeypatch.setattr(Cache, "__init__", lambda self, folder: real(self, folder, files))

    return use


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("make_folder", fails(errno.EACCES)),
        ("make_folder", fails(errno.EROFS)),
        ("create", fails(errno.ENOSPC)),
        ("create", fails(errno.EMFILE)),
        ("pwrite", fails(errno.ENOSPC)),
        ("pwrite", fails(errno.EDQUOT)),
        ("pwrite", ends),
        ("sync", fails(errno.EIO)),
        ("close", late(fails(errno.EIO))),
        ("rename", fails(errno.EXDEV)),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_a_cache_that_cannot_be_written(
    kind: str,
    fault: Callable[..., Any],
    last: bool,
    folder: Path,
    cache: Path,
    faulty_cache: Callable[[FaultyFiles], None],
) -> None:
    count = 1
    if last:
        counted = FaultyFiles()
        faulty_cache(counted)
        load(folder, cache_dir=cache)
        count = counted.counts[kind]
        shutil.rmtree(cache)
    files = FaultyFiles(kind, count - 1, fault)
    faulty_cache(files)
    model = load(folder, cache_dir=cache)
    assert files.hits == 1
    assert same(model, load(values()))
    assert "the checkpoint; not cached: " in origin(model)
    assert entries(cache) == []


def test_an_interrupt_while_the_cache_is_written(
    folder: Path, cache: Path, faulty_cache: Callable[[FaultyFiles], None]
) -> None:
    faulty_cache(FaultyFiles("pwrite", 1, raises(KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        load(folder, cache_dir=cache)
    assert entries(cache) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(folder: Path, cache: Path) -> None:
    cache.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    assert "not cached" in origin(load(folder, cache_dir=cache))


def test_a_file_in_the_place_of_the_folder(folder: Path, cache: Path) -> None:
    cache.write_text("mine")
    model = load(folder, cache_dir=cache)
    assert "not cached: the cache folder" in origin(model)
    assert same(model, load(values()))
    assert cache.read_text() == "mine"


# ------------------------------------------------------------------- an entry is damaged


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def _exchange(entry: Path, seed: int, **options: Any) -> None:
    """Put the entry of other weights, or of other options, in the place of ``entry``."""
    other = write_shards(entry.parent.parent / "other", seed)
    load(other, cache_dir=other / "cache", **options)
    (found,) = (other / "cache").iterdir()
    shutil.rmtree(entry)
    found.rename(entry)


def _one(entry: Path) -> Path:
    (path,) = entry.glob("*.safetensors")
    return path


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first data": lambda entry: _flip(_one(entry), 4096),
    "last data": lambda entry: _flip(_one(entry), -1),
    "header": lambda entry: _flip(_one(entry), 40),
    "length of the header": lambda entry: _flip(_one(entry), 1),
    "manifest": lambda entry: _flip(entry / MANIFEST, 30),
    "sum of the manifest": lambda entry: _flip(entry / MANIFEST, -6),
    "short manifest": lambda entry: os.truncate(entry / MANIFEST, 100),
    "empty manifest": lambda entry: (entry / MANIFEST).write_bytes(b""),
    "no manifest": lambda entry: (entry / MANIFEST).unlink(),
    "short file": lambda entry: os.truncate(_one(entry), _one(entry).stat().st_size - 1),
    "empty file": lambda entry: _one(entry).write_bytes(b""),
    "no file": lambda entry: _one(entry).unlink(),
    "empty folder": lambda entry: [path.unlink() for path in entry.iterdir()],
    "other forms": lambda entry: _exchange(entry, 0, scheme="none"),
    "other form of one": lambda entry: _exchange(entry, 0, ignore=["b"]),
    "other weights": lambda entry: _exchange(entry, 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_damaged_entry_is_made_again(damage: str, workers: int, folder: Path, cache: Path) -> None:
    load(folder, cache_dir=cache)
    (key,) = entries(cache)
    DAMAGES[damage](cache / key)
    model = load(folder, cache_dir=cache, load_workers=workers)
    assert same(model, load(values()))
    assert origin(model).startswith("the checkpoint")
    assert origin(model).endswith(f"cached in {cache / key}")
    assert entries(cache) == [key]
    again = load(folder, cache_dir=cache, load_workers=workers)
    assert origin(again) == f"the cache, {cache / key}"
    assert same(again, model)


@pytest.mark.parametrize("fault", [flips, fails(errno.EIO), ends])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 5])
def test_an_entry_that_cannot_be_read(
    fault: Callable[..., int],
    at: int,
    folder: Path,
    cache: Path,
    faulty_cache: Callable[[FaultyFiles], None],
) -> None:
    load(folder, cache_dir=cache)
    faulty_cache(FaultyFiles("preadv", at, fault))
    model = load(folder, cache_dir=cache)
    assert same(model, load(values()))
    assert origin(model).startswith("the checkpoint")


@pytest.mark.parametrize("at", [0, 9])
def test_the_source_fails_while_its_fingerprint_is_taken(at: int, folder: Path, cache: Path) -> None:
    source = FileCheckpoint(folder, files=FaultyFiles("preadv", HEADER_READS + at, fails(errno.EIO)))
    with pytest.raises(CheckpointFileError, match=str(folder)):
        load(source, cache_dir=cache)
    assert entries(cache) == []
