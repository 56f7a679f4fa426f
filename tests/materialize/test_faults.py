"""A load that fails at any of its file calls names the file, changes nothing and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fxquant
from fxquant.checkpoint import ConstantsCheckpoint, FileCheckpoint
from fxquant.errors import CheckpointFileError
from tests.materialize.faulty_files import (
    HEADER_READS,
    SHARDS,
    FaultyFiles,
    after,
    ends,
    fails,
    flips,
    frozen_heap,
    half,
    late,
    load,
    nothing_left,
    on_meta,
    same,
    single,
    values,
    write_shards,
)

__all__ = ["frozen_heap"]  # a fixture

EIO, EINTR, EACCES, ENOENT, EMFILE = errno.EIO, errno.EINTR, errno.EACCES, errno.ENOENT, errno.EMFILE
WORKERS = pytest.mark.parametrize("workers", [1, 3])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "ckpt")


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Calls of ``preadv`` of a whole load."""
    folder = write_shards(tmp_path_factory.mktemp("counted"))
    files = FaultyFiles()
    load(FileCheckpoint(folder, files=files), load_workers=1)
    return files.counts["preadv"]


def test_what_a_load_calls(folder: Path) -> None:
    files = FaultyFiles()
    checkpoint = FileCheckpoint(folder, files=files)
    assert files.counts["preadv"] == HEADER_READS
    load(checkpoint, load_workers=1)
    assert files.counts == {
        **dict.fromkeys(files.counts, 0),
        "open": 4,
        "stat": 6,
        "close": 4,
        "preadv": files.counts["preadv"],
    }
    assert files.counts["preadv"] > HEADER_READS + 15


@pytest.mark.parametrize("fault", [half, single])
@WORKERS
def test_short_reads_are_continued(fault: Callable[..., int], workers: int, folder: Path) -> None:
    files = FaultyFiles("preadv", 0, fault, on=True)
    model = load(FileCheckpoint(folder, files=files), load_workers=workers)
    assert same(model, load(values()))
    assert files.hits > 20


# ---------------------------------------------------------------- while the headers are read


@pytest.mark.parametrize("code", [EIO, EACCES, ENOENT, EMFILE])
@pytest.mark.parametrize("at", [0, 1])
def test_headers_that_cannot_be_opened(at: int, code: int, folder: Path) -> None:
    model = on_meta()
    with nothing_left(model):
        with pytest.raises(CheckpointFileError) as caught:
            load(FileCheckpoint(folder, files=FaultyFiles("open", at, fails(code))), model)
        assert str(folder / SHARDS[at]) in str(caught.value)
        assert os.strerror(code) in str(caught.value)


@pytest.mark.parametrize("fault", [fails(EIO), fails(EINTR), ends])
@pytest.mark.parametrize("at", range(HEADER_READS))
def test_headers_that_cannot_be_read(at: int, fault: Callable[..., int], folder: Path) -> None:
    model = on_meta()
    with nothing_left(model):
        with pytest.raises(CheckpointFileError) as caught:
            load(FileCheckpoint(folder, files=FaultyFiles("preadv", at, fault)), model)
        assert str(folder / SHARDS[at // 2]) in str(caught.value)


# ---------------------------------------------------------------- while the values are read


@pytest.mark.parametrize("fault", [fails(EIO), fails(EINTR), fails(errno.ESTALE), ends])
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
@WORKERS
def test_values_that_cannot_be_read(
    fault: Callable[..., int], where: float, workers: int, folder: Path, reads: int
) -> None:
    at = HEADER_READS + int(where * (reads - HEADER_READS - 1))
    files = FaultyFiles("preadv", at, fault)
    model = on_meta()
    checkpoint = FileCheckpoint(folder, files=files)
    with nothing_left(model):
        with pytest.raises(CheckpointFileError, match=r"tensor '[a-z.]+': the read at offset \d+") as caught:
            load(checkpoint, model, load_workers=workers)
        assert str(folder) in str(caught.value)
        assert files.hits == 1
    assert same(load(folder, model), load(values()))


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("open", fails(EACCES)),
        ("open", fails(ENOENT)),
        ("open", fails(EMFILE)),
        ("open", fails(EINTR)),
        ("stat", fails(EIO)),
    ],
)
@pytest.mark.parametrize("at", [2, 3])
@WORKERS
def test_shards_that_cannot_be_opened_again(
    kind: str, fault: Callable[..., int], at: int, workers: int, folder: Path
) -> None:
    model = on_meta()
    checkpoint = FileCheckpoint(folder, files=FaultyFiles(kind, at, fault))
    with nothing_left(model):
        with pytest.raises(CheckpointFileError) as caught:
            load(checkpoint, model, load_workers=workers)
        assert ".safetensors cannot be" in str(caught.value)
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize("at", range(4))
def test_an_error_of_close_says_nothing_about_what_was_read(at: int, folder: Path) -> None:
    files = FaultyFiles("close", at, late(fails(EIO)))
    assert same(load(FileCheckpoint(folder, files=files)), load(values()))
    assert files.hits == 1


def test_no_descriptor_is_left_to_open(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    model = on_meta()
    checkpoint = FileCheckpoint(folder)
    with nothing_left(model):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            with pytest.raises(CheckpointFileError, match="Too many open files"):
                load(checkpoint, model, load_workers=3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---------------------------------------------------------------- files that change meanwhile


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def rewrite(path: Path) -> None:
    """Other values in the place of the last bytes."""
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    tensors = {name: values(1)[name] for name in ("a.bias", "b.weight", "table")}
    save_file(tensors, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut, "changed after its header was read"),
        (rewrite, "changed after its header was read"),
        (touch, "changed after its header was read"),
        (replace, "changed after its header was read"),
        (Path.unlink, "cannot be opened: No such file"),
    ],
)
@WORKERS
def test_a_shard_that_changed_between_plan_and_load(
    change: Callable[[Path], None], words: str, workers: int, folder: Path
) -> None:
    checkpoint = FileCheckpoint(folder)
    fxquant.plan(on_meta(), checkpoint, scheme="int8")
    change(folder / SHARDS[1])
    model = on_meta()
    with nothing_left(model), pytest.raises(CheckpointFileError, match=rf"{SHARDS[1]} {words}"):
        load(checkpoint, model, load_workers=workers)


@pytest.mark.parametrize(
    ("change", "words"),
    [(cut, "(the file ends there|written to while)"), (rewrite, "written to while it was read")],
)
@WORKERS
def test_a_shard_that_is_written_to_while_it_is_read(
    change: Callable[[Path], None], words: str, workers: int, folder: Path, reads: int
) -> None:
    path = folder / SHARDS[1]
    # The first read of the second shard is the third from the end at the latest.
    fault = after(lambda: change(path))
    model = on_meta()
    checkpoint = FileCheckpoint(folder, files=FaultyFiles("preadv", reads - 2, fault))
    with nothing_left(model), pytest.raises(CheckpointFileError, match=rf"{SHARDS[1]}.* {words}"):
        load(checkpoint, model, load_workers=workers)


@pytest.mark.parametrize("change", [replace, Path.unlink])
def test_a_file_that_is_open_may_lose_its_name(
    change: Callable[[Path], None], folder: Path, reads: int
) -> None:
    fault = after(lambda: change(folder / SHARDS[1]))
    files = FaultyFiles("preadv", reads - 2, fault)
    assert same(load(FileCheckpoint(folder, files=files)), load(values()))
    assert files.hits == 1


# ---------------------------------------------------------------- folders of constants


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> Path:
    fxquant.save_checkpoint(load(folder), tmp_path / "saved")
    return tmp_path / "saved"


SAVED_HEADER_READS = 3
"""The manifest, and two for the only file."""


@pytest.mark.parametrize(
    ("fault", "words"),
    [(flips, "is damaged"), (fails(EIO), "Input/output error"), (ends, "the file ends there")],
)
@pytest.mark.parametrize("last", [False, True])
@WORKERS
def test_constants_that_cannot_be_read(
    fault: Callable[..., int], words: str, last: bool, workers: int, saved: Path
) -> None:
    counted = FaultyFiles()
    load(ConstantsCheckpoint(saved, files=counted), scheme=None, load_workers=1)
    at = counted.counts["preadv"] - 1 if last else SAVED_HEADER_READS
    files = FaultyFiles("preadv", at, fault)
    model = on_meta()
    checkpoint = ConstantsCheckpoint(saved, files=files)
    with nothing_left(model):
        with pytest.raises(CheckpointFileError, match=words) as caught:
            load(checkpoint, model, scheme=None, load_workers=workers)
        assert str(saved) in str(caught.value)
        assert "tensor '" in str(caught.value)
        assert files.hits == 1


@pytest.mark.parametrize("fault", [fails(EIO), ends, flips])
@pytest.mark.parametrize("at", range(SAVED_HEADER_READS))
def test_manifest_and_headers_that_cannot_be_read(at: int, fault: Callable[..., int], saved: Path) -> None:
    model = on_meta()
    with nothing_left(model), pytest.raises(CheckpointFileError, match=str(saved)):
        load(ConstantsCheckpoint(saved, files=FaultyFiles("preadv", at, fault)), model, scheme=None)


@pytest.mark.parametrize("read_bytes", [4096, 100_000, 2 << 20, 8 << 20])
def test_every_byte_of_large_constants_is_checked(read_bytes: int, tmp_path: Path) -> None:
    """Whatever the size of reads: tiles of constants cover whole pieces of a digest."""
    model = torch.nn.Sequential(torch.nn.Linear(1001, 3001, bias=False)).eval()
    state = model.state_dict()
    fxquant.save_checkpoint(fxquant.compile(model, state, scheme="int8"), tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.safetensors")
    raw = path.read_bytes()
    for at in (4096, 2_500_000, len(raw) - 20_000, len(raw) - 1):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointFileError, match="is damaged"):
            fxquant.compile(model, tmp_path / "saved", read_bytes=read_bytes)
