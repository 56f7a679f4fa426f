"""The cache: entries are whole or absent, whoever writes them and whoever dies."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fxquant.checkpoint.cache import ABANDONED_SECONDS, Cache
from fxquant.checkpoint.constants import MANIFEST
from fxquant.checkpoint.files import Files
from fxquant.checkpoint.writer import WeightConstants, hidden_name, host_mark
from fxquant.errors import CheckpointFileError, ConfigError

KEY = "0123456789abcdef"
OTHER = "f" * 64
ONE = "constants-00001-of-00001.safetensors"


def weights(value: float = 1.0, count: int = 64) -> dict[str, WeightConstants]:
    tensor = torch.full((count,), value)
    return {"w": WeightConstants(form=None, dtype=tensor.dtype, shape=(count,), tensors=(tensor,))}


def value_of(cache: Cache, key: str = KEY) -> float | None:
    found = cache.find(key)
    if found is None:
        return None
    with found:
        (value,) = found.read("w").unique()
        return float(value)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def names(cache: Cache) -> list[str]:
    return sorted(entry.name for entry in cache.folder.iterdir())


def test_store_and_find(cache: Cache) -> None:
    assert cache.find(KEY) is None
    assert not cache.folder.exists()
    cache.store(KEY, weights(1.0), {"scheme": "int8"})
    cache.store(OTHER, weights(2.0), {})
    assert (value_of(cache), value_of(cache, OTHER)) == (1.0, 2.0)
    found = cache.find(KEY)
    assert found is not None
    assert found.manifest_plan == {"scheme": "int8"}
    assert names(cache) == [KEY, OTHER]
    cache.drop(KEY)
    cache.drop(KEY)
    assert names(cache) == [OTHER]


def test_the_folder_is_for_its_owner(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "above" / "cache")
    cache.store(KEY, weights(), {})
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    (tmp_path / "own").mkdir(mode=0o755)
    Cache(tmp_path / "own").store(KEY, weights(), {})
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o755


def test_an_entry_that_is_there_stays(cache: Cache) -> None:
    cache.store(KEY, weights(1.0), {})
    cache.store(KEY, weights(2.0), {})
    assert value_of(cache) == 1.0


@pytest.mark.parametrize("key", ["", "0" * 15, "0" * 129, "../" + "0" * 16, "A" * 16, "0" * 16 + "\n", 7])
def test_what_is_no_key(key: str, cache: Cache) -> None:
    for call in (cache.find, cache.drop, lambda key: cache.store(key, weights(), {})):
        with pytest.raises(ConfigError, match="is not a key of the cache"):
            call(key)


@pytest.mark.parametrize("damage", ["manifest", "header", "cut", "absent file", "absent manifest", "empty"])
def test_damaged_entries_are_dropped(damage: str, cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    cache.store(KEY, weights(), {})
    folder = cache.folder / KEY
    match damage:
        case "manifest":
            (folder / MANIFEST).write_text("{")
        case "header":
            (folder / ONE).write_bytes(b"\xff" + (folder / ONE).read_bytes()[1:])
        case "cut":
            (folder / ONE).write_bytes((folder / ONE).read_bytes()[:-1])
        case "absent file":
            (folder / ONE).unlink()
        case "absent manifest":
            (folder / MANIFEST).unlink()
        case "empty":
            (folder / MANIFEST).unlink()
            (folder / ONE).unlink()
    assert cache.find(KEY) is None
    assert f"the cached constants in {folder} cannot be used" in caplog.text
    assert names(cache) == []
    cache.store(KEY, weights(2.0), {})
    assert value_of(cache) == 2.0


def test_damage_that_shows_when_values_are_read(cache: Cache) -> None:
    cache.store(KEY, weights(), {})
    path = cache.folder / KEY / ONE
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    found = cache.find(KEY)
    assert found is not None
    with pytest.raises(CheckpointFileError, match="tensor 'w' is damaged"):
        found.read("w")
    cache.drop(KEY)
    assert cache.find(KEY) is None


def test_an_unfinished_folder_in_the_place_of_an_entry(cache: Cache) -> None:
    (cache.folder / KEY).mkdir(parents=True)
    (cache.folder / KEY / "stray").write_text("text")
    cache.store(KEY, weights(), {})
    assert value_of(cache) == 1.0


def test_links_are_not_followed(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    cache.store(OTHER, weights(), {})
    (cache.folder / KEY).symlink_to(OTHER)
    assert cache.find(KEY) is None
    assert "a link is not followed" in caplog.text
    cache.drop(KEY)
    with pytest.raises(CheckpointFileError, match="exists already"):
        cache.store(KEY, weights(), {})
    assert names(cache) == [KEY, OTHER]
    assert value_of(cache, OTHER) == 1.0


def test_what_cannot_be_read_or_removed(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Files):
        def preadv(self, *args: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        def rename(self, *args: object) -> None:
            raise OSError(errno.EACCES, "Permission denied")

    cache.store(KEY, weights(), {})
    assert Cache(cache.folder, Failing()).find(KEY) is None
    assert "Input/output error" in caplog.text
    assert f"{cache.folder / KEY} could not be removed (Permission denied)" in caplog.text


def test_a_cache_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for name in ("file", "file/below"):
        cache = Cache(tmp_path / name)
        assert cache.find(KEY) is None
        with pytest.raises(CheckpointFileError, match=f"the cache folder .*{name} could not be created"):
            cache.store(KEY, weights(), {})


# ----------------------------------------------------------------------------- writers that compete


def test_another_writer_that_is_faster_wins(cache: Cache) -> None:
    class Late(Files):
        def rename(self, source: Path, target: Path) -> None:
            cache.store(target.name, weights(3.0), {})
            super().rename(source, target)

    Cache(cache.folder, Late()).store(KEY, weights(), {})
    assert names(cache) == [KEY]
    assert value_of(cache) == 3.0


def test_a_failure_is_an_error_unless_the_entry_is_there(cache: Cache) -> None:
    class Full(Files):
        def sync(self, descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointFileError, match="No space left"):
        Cache(cache.folder, Full()).store(KEY, weights(), {})
    assert names(cache) == []


PROGRAM = """
import os, sys, time
import torch
from fxquant.checkpoint.cache import Cache
from fxquant.checkpoint.files import Files
from fxquant.checkpoint.writer import WeightConstants

folder, key, value, what = sys.argv[1:]
tensor = torch.full((1_000_000,), float(value))
weights = {"w": WeightConstants(form=None, dtype=tensor.dtype, shape=(1_000_000,), tensors=(tensor,))}

class Slow(Files):
    def pwrite(self, descriptor, data, offset):
        if what == "die" and offset > 2_000_000:
            os._exit(9)
        if what == "wait" and offset > 2_000_000:
            print("waiting", flush=True)
            time.sleep(600)
        return super().pwrite(descriptor, data, offset)

if what == "race":
    print("ready", flush=True)
    sys.stdin.readline()
Cache(folder, Slow()).store(key, weights, {"value": value})
print(Cache(folder).find(key).read("w")[0].item(), flush=True)
"""


def start(cache: Cache, value: float, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(cache.folder), KEY, str(value), what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_store_the_same_key(cache: Cache) -> None:
    writers = [start(cache, value, "race") for value in (1.0, 2.0)]
    try:
        for _ in range(2):
            for writer in writers:
                assert writer.stdout is not None
                assert writer.stdin is not None
                if _ == 0:
                    assert writer.stdout.readline() == "ready\n"
                else:
                    writer.stdin.write("go\n")
                    writer.stdin.flush()
        printed = [writer.communicate(timeout=120)[0] for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert [writer.returncode for writer in writers] == [0, 0]
    assert names(cache) == [KEY]
    assert {float(text) for text in printed} == {value_of(cache)}


def age(path: Path, seconds: float) -> None:
    when = time.time() - seconds
    for entry in (*path.iterdir(), path):
        os.utime(entry, (when, when))


def test_what_a_killed_writer_left_is_removed_after_a_day(cache: Cache) -> None:
    writer = start(cache, 1.0, "die")
    writer.communicate(timeout=120)
    assert writer.returncode == 9
    (left,) = cache.folder.iterdir()
    assert left.name.startswith(f".fxquant-{host_mark()}-{writer.pid}-")
    assert cache.find(KEY) is None
    cache.store(KEY, weights(), {})
    assert names(cache) == [left.name, KEY]  # it is too young
    age(left, ABANDONED_SECONDS + 60)
    cache.store(KEY, weights(), {})
    assert names(cache) == [KEY]


def test_what_a_live_writer_has_is_kept(cache: Cache) -> None:
    writer = start(cache, 1.0, "wait")
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "waiting\n"
        (left,) = cache.folder.iterdir()
        age(left, ABANDONED_SECONDS + 60)
        cache.store(KEY, weights(), {})
        assert names(cache) == [left.name, KEY]
    finally:
        writer.kill()
        writer.communicate()
    cache.store(OTHER, weights(), {})
    assert names(cache) == [KEY, OTHER]


def test_of_another_host_only_the_time_tells(cache: Cache) -> None:
    cache.store(KEY, weights(), {})
    mine = cache.folder / hidden_name("old")
    theirs = cache.folder / hidden_name("tmp").replace(host_mark(), "0" * 8)
    strange = cache.folder / ".fxquant-notes"
    link = cache.folder / hidden_name("tmp").replace(host_mark(), "1" * 8)
    for folder in (mine, theirs, strange):
        folder.mkdir()
        (folder / ONE).write_text("half")
        age(folder, ABANDONED_SECONDS - 60)
    link.symlink_to(KEY)
    everything = sorted([KEY, mine.name, theirs.name, strange.name, link.name])
    cache.store(KEY, weights(), {})
    assert names(cache) == everything
    for folder in (mine, theirs, strange):
        age(folder, ABANDONED_SECONDS + 60)
    (theirs / "second").write_text("just written")
    cache.store(KEY, weights(), {})
    assert names(cache) == everything
    age(theirs, ABANDONED_SECONDS + 60)
    cache.store(KEY, weights(), {})
    assert names(cache) == sorted(set(everything) - {theirs.name})
    assert value_of(cache) == 1.0
