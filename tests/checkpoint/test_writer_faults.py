"""A write that fails at any of its calls leaves nothing behind and changes nothing."""

from __future__ import annotations

import errno
import gc
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxquant.checkpoint.constants import MANIFEST, ConstantsCheckpoint
from fxquant.checkpoint.digests import DIGEST_BYTES
from fxquant.checkpoint.files import Files
from fxquant.checkpoint.writer import WeightConstants, write_constants
from fxquant.errors import CheckpointFileError

CALLS = ("create", "pwrite", "sync", "close", "rename", "make_folder", "remove_tree", "sync_folder")


class FaultyFiles(Files):
    """The real calls, counted; the ``at``-th one raises ``fault`` before or after it did its work."""

    def __init__(self, at: int = -1, fault: BaseException | None = None, *, late: bool = False) -> None:
        self.at, self.fault, self.late = at, fault, late
        self.names: list[str] = []


def _faulty(name: str) -> Callable[..., Any]:
    real = getattr(Files, name)

    def call(self: FaultyFiles, *args: Any, **kwargs: Any) -> Any:
        self.names.append(name)
        fault = self.fault if len(self.names) - 1 == self.at else None
        # The system gives a descriptor back even if close fails, and hands none out if create does.
        late = name == "close" or (self.late and name != "create")
        if fault is not None and not late:
            raise fault
        result = real(self, *args, **kwargs)
        if fault is not None:
            raise fault
        return result

    return call


for _name in CALLS:
    setattr(FaultyFiles, _name, _faulty(_name))


class ShortFiles(Files):
    """Writes that take at most ``limit`` bytes, and from the ``at``-th on none."""

    def __init__(self, limit: int, at: int | None = None) -> None:
        self.limit, self.at, self.count = limit, at, 0

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.count += 1
        if self.at is not None and self.count > self.at:
            return 0
        return super().pwrite(descriptor, data[: self.limit], offset)


def weights(value: float = 1.0) -> dict[str, WeightConstants]:
    tensors = {
        "a": torch.full((3, 5), value),
        "b": torch.full((5, 3), value).t(),
        "big": torch.full((DIGEST_BYTES // 2 + 7,), value).half(),
    }
    return {
        fqn: WeightConstants(form=None, dtype=tensor.dtype, shape=tuple(tensor.shape), tensors=(tensor,))
        for fqn, tensor in tensors.items()
    }


def value_of(folder: Path) -> float:
    """The value that a whole, readable folder was written with."""
    with ConstantsCheckpoint(folder) as checkpoint:
        found = {float(value) for key in checkpoint.infos for value in checkpoint.read(key).unique()}
    (value,) = found
    return value


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only


@pytest.fixture(autouse=True)
def _no_descriptors_of_other_tests() -> None:
    gc.collect()


def calls_of(write: Callable[[Files], object]) -> list[str]:
    files = FaultyFiles()
    write(files)
    return files.names


def write_new(parent: Path) -> Callable[[Files], None]:
    return lambda files: write_constants(parent / "out", weights(), {}, shard_bytes=100, files=files)


FAULTS = [
    pytest.param(lambda: OSError(errno.ENOSPC, "No space left on device"), False, id="no space"),
    pytest.param(lambda: OSError(errno.EIO, "Input/output error"), False, id="input/output error"),
    pytest.param(lambda: OSError(errno.EIO, "Input/output error"), True, id="late error"),
    pytest.param(KeyboardInterrupt, False, id="interrupt"),
    pytest.param(KeyboardInterrupt, True, id="late interrupt"),
]


def test_what_a_write_calls(tmp_path: Path) -> None:
    names = calls_of(write_new(tmp_path))
    shard = ["create", "pwrite", "pwrite", "sync", "close"]
    assert names == [
        "make_folder",
        *shard,
        *shard,
        *[*shard[:2], *shard[1:]],
        *["create", "pwrite", "sync", "close"],
        *["sync_folder", "rename", "sync_folder"],
    ]


@pytest.mark.parametrize(("fault", "late"), FAULTS)
def test_a_failed_write_leaves_nothing(
    fault: Callable[[], BaseException], late: bool, tmp_path: Path
) -> None:
    count = len(calls_of(write_new(tmp_path)))
    write = write_new(tmp_path / "parent")
    (tmp_path / "parent").mkdir()
    before = descriptors()
    for at in range(count):
        expected = CheckpointFileError if isinstance(fault(), OSError) else KeyboardInterrupt
        files = FaultyFiles(at, fault(), late=late)
        with pytest.raises(expected) as caught:
            write(files)
        assert len(files.names) > at
        assert list((tmp_path / "parent").iterdir()) == [], files.names[at]
        assert descriptors() == before
        if expected is CheckpointFileError:
            assert str(tmp_path / "parent" / "out") in str(caught.value)
            assert fault().args[1] in str(caught.value)
    write(FaultyFiles(count, fault()))
    assert value_of(tmp_path / "parent" / "out") == 1.0


@pytest.mark.parametrize(("fault", "late"), FAULTS)
def test_a_failed_overwrite_changes_nothing(
    fault: Callable[[], BaseException], late: bool, tmp_path: Path
) -> None:
    target = tmp_path / "out"

    def write(files: Files) -> None:
        write_constants(target, weights(2.0), {}, overwrite=True, shard_bytes=100, files=files)

    write_constants(target, weights(1.0), {})
    names = calls_of(write)
    assert names[-5:] == ["sync_folder", "rename", "rename", "sync_folder", "remove_tree"]
    write_constants(target, weights(1.0), {}, overwrite=True)
    before = descriptors()
    for at in range(len(names) - 1):
        with pytest.raises((CheckpointFileError, KeyboardInterrupt)):
            write(FaultyFiles(at, fault(), late=late))
        assert list(tmp_path.iterdir()) == [target], names[at]
        assert value_of(target) == 1.0
        assert descriptors() == before
    # The new folder is in place when the old one is removed: an error there is no failure.
    try:
        write(FaultyFiles(len(names) - 1, fault(), late=late))
    except KeyboardInterrupt:
        assert fault is KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [target]
    assert value_of(target) == 2.0


def test_the_error_names_file_tensor_and_bytes(tmp_path: Path) -> None:
    names = calls_of(write_new(tmp_path))
    (tmp_path / "parent").mkdir()
    write = write_new(tmp_path / "parent")
    at = [n for n, name in enumerate(names) if name == "pwrite"][-2]
    with pytest.raises(CheckpointFileError) as caught:
        write(FaultyFiles(at, OSError(errno.ENOSPC, "No space left on device")))
    text = re.escape(str(tmp_path / "parent" / "out" / "constants-00003-of-00003.safetensors"))
    assert re.match(rf"{text}: tensor 'big', 2097166 bytes at offset \d+, could not", str(caught.value))
    assert "No space left on device; nothing was changed" in str(caught.value)


def test_short_writes_are_continued(tmp_path: Path) -> None:
    write_constants(tmp_path / "out", weights(), {}, files=ShortFiles(100_001))
    assert value_of(tmp_path / "out") == 1.0


def test_writes_that_take_nothing_fail(tmp_path: Path) -> None:
    files = ShortFiles(1_000_001)
    write_constants(tmp_path / "whole", weights(), {}, files=files)
    before = descriptors()
    (tmp_path / "parent").mkdir()
    for at in range(files.count):
        with pytest.raises(CheckpointFileError, match="the system took none of"):
            write_constants(tmp_path / "parent" / "out", weights(), {}, files=ShortFiles(1_000_001, at))
        assert list((tmp_path / "parent").iterdir()) == []
        assert descriptors() == before


# ------------------------------------------------------------------------------- what is in the way


def test_what_exists_is_not_overwritten_unasked(tmp_path: Path) -> None:
    write_constants(tmp_path / "out", weights(1.0), {})
    with pytest.raises(CheckpointFileError, match="out exists already; give a new name"):
        write_constants(tmp_path / "out", weights(2.0), {})
    assert value_of(tmp_path / "out") == 1.0
    write_constants(tmp_path / "out", weights(2.0), {}, overwrite=True)
    assert value_of(tmp_path / "out") == 2.0
    write_constants(tmp_path / "new", weights(2.0), {}, overwrite=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["new", "out"]


def test_only_folders_of_constants_are_overwritten(tmp_path: Path) -> None:
    write_constants(tmp_path / "out", weights(), {})
    (tmp_path / "link").symlink_to("out")
    (tmp_path / "broken").symlink_to("absent")
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").write_text("text")
    for name in ("link", "broken", "file", "folder"):
        for overwrite, text in ((False, "exists already"), (True, "is not a folder of fxquant constants")):
            with pytest.raises(CheckpointFileError, match=text):
                write_constants(tmp_path / name, weights(2.0), {}, overwrite=overwrite)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointFileError, match=r"also holds \['notes.txt'\], which overwriting"):
        write_constants(tmp_path / "out", weights(2.0), {}, overwrite=True)
    assert value_of(tmp_path / "out") == 1.0
    assert (tmp_path / "folder" / "model.safetensors").read_text() == "text"
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "absent/out", "file/out"])
def test_names_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(CheckpointFileError, match=r"could not be created|cannot be written"):
        write_constants(tmp_path / name, weights(), {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_relative_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_constants("out", weights(), {})
    assert value_of(tmp_path / "out") == 1.0


def test_another_writer_that_is_faster_wins(tmp_path: Path) -> None:
    class Late(Files):
        def rename(self, source: Path, target: Path) -> None:
            if not target.exists():
                write_constants(target, weights(3.0), {})
            super().rename(source, target)

    with pytest.raises(CheckpointFileError, match="could not be moved"):
        write_constants(tmp_path / "out", weights(), {}, files=Late())
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert value_of(tmp_path / "out") == 3.0


def test_what_cannot_be_removed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Keeping(Files):
        def remove_tree(self, path: Path) -> None:
            raise OSError(errno.EACCES, "Permission denied")

    write_constants(tmp_path / "out", weights(1.0), {})
    write_constants(tmp_path / "out", weights(2.0), {}, overwrite=True, files=Keeping())
    (old,) = (entry for entry in tmp_path.iterdir() if entry.name != "out")
    assert f"{old} could not be removed (Permission denied)" in caplog.text
    assert (value_of(old), value_of(tmp_path / "out")) == (1.0, 2.0)


def test_the_old_folder_is_never_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Files):
        moves = 0

        def rename(self, source: Path, target: Path) -> None:
            self.moves += 1
            if self.moves > 1:
                raise OSError(errno.EIO, "Input/output error")
            super().rename(source, target)

    write_constants(tmp_path / "out", weights(1.0), {})
    with pytest.raises(CheckpointFileError, match="could not be moved"):
        write_constants(tmp_path / "out", weights(2.0), {}, overwrite=True, files=Stuck())
    (old,) = tmp_path.iterdir()
    assert f"{old} could not be moved back to {tmp_path / 'out'}" in caplog.text
    assert value_of(old) == 1.0
    assert (old / MANIFEST).exists()
