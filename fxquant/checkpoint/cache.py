"""Constants kept between starts: one folder for each key, written by any number of processes."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from fxquant.checkpoint.constants import ConstantsCheckpoint, is_constants_folder
from fxquant.checkpoint.files import OS_FILES, Files
from fxquant.checkpoint.writer import (
    SHARD_BYTES,
    WeightConstants,
    hidden_name,
    host_mark,
    remove_tree,
    write_constants,
)
from fxquant.errors import CheckpointFileError, ConfigError

ABANDONED_SECONDS = 24 * 60 * 60
"""A hidden folder in which nothing was written for so long may be removed."""

_log = logging.getLogger("fxquant.checkpoint")
_KEY = re.compile(r"[0-9a-f]{16,128}")
_HIDDEN = re.compile(r"\.fxquant-(?P<host>[0-9a-f]{8})-(?P<pid>[0-9]{1,10})-[0-9a-f]{16}\.(tmp|old)")


class Cache:
    """Constants by key, in ``folder``, which is created at the first ``store``, for its owner alone.

    A key is a hex digest over everything that the constants depend on. An entry appears whole, by one
    rename, and is never changed afterwards; of two processes that store the same key the first one to
    finish wins. There is no bound on the size of the folder: entries may be removed at any time.
    """

    def __init__(self, folder: str | os.PathLike[str], files: Files = OS_FILES) -> None:
        if not os.fspath(folder):
            raise ConfigError("the path of the cache folder is empty")
        self._folder = Path(folder).absolute()
        self._files = files

    @property
    def folder(self) -> Path:
        """Where the entries are."""
        return self._folder

    def find(self, key: str) -> ConstantsCheckpoint | None:
        """Open the entry of ``key``; None if there is none.

        An entry that is damaged or cannot be read is logged and dropped. The values are checked as
        they are read, so the damage may show only then: ``drop`` the entry and go on without it.
        """
        path = self._entry(key)
        if not os.path.lexists(path):
            return None
        if not _is_folder(path):
            _log.warning("%s is not a folder (a link is not followed), so it is not used", path)
            return None
        try:
            return ConstantsCheckpoint(path, files=self._files)
        except CheckpointFileError as error:
            _log.warning("the cached constants in %s cannot be used: %s", path, error)
            self.drop(key)
            return None

    def drop(self, key: str) -> None:
        """Remove the entry of ``key`` if there is one; what cannot be removed is logged.

        It is renamed first, so that nobody finds half an entry. Who has opened it can read on only
        from files that already are open.
        """
        path = self._entry(key)
        if not _is_folder(path):
            return
        hidden = self._folder / hidden_name("old")
        try:
            self._files.rename(path, hidden)
        except FileNotFoundError:  # another process was faster
            return
        except OSError as error:
            _log.warning("%s could not be removed (%s); remove it by hand", path, error.strerror)
            return
        remove_tree(self._files, hidden)

    def store(
        self,
        key: str,
        weights: Mapping[str, WeightConstants],
        plan: Mapping[str, object],
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write the entry of ``key``, see ``write_constants``; an entry that is there stays as it is.

        What writers that died left behind is removed on the way.
        """
        path = self._entry(key)
        self._make_folder()
        self._remove_abandoned()
        if _is_folder(path) and is_constants_folder(path):
            return
        self.drop(key)  # a folder that is no entry
        try:
            write_constants(path, weights, plan, shard_bytes=shard_bytes, files=self._files)
        except CheckpointFileError:
            if not (_is_folder(path) and is_constants_folder(path)):
                raise
            _log.info("another process stored %s meanwhile; its entry is used", path)

    def _entry(self, key: str) -> Path:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigError(f"{key!r} is not a key of the cache: expected 16 to 128 characters of 0-9a-f")
        return self._folder / key

    def _make_folder(self) -> None:
        if self._folder.is_dir():
            return
        try:
            self._files.make_folder(self._folder, mode=0o700, parents=True)
        except OSError as error:
            if not self._folder.is_dir():  # another process may have made it
                raise CheckpointFileError(
                    f"the cache folder {self._folder} could not be created: {error.strerror}"
                ) from error

    def _remove_abandoned(self) -> None:
        try:
            found = [path for path in self._folder.iterdir() if _HIDDEN.fullmatch(path.name)]
        except OSError as error:
            raise CheckpointFileError(
                f"the cache folder {self._folder} cannot be read: {error.strerror}"
            ) from error
        for path in found:
            if _is_abandoned(path):
                _log.info("%s was left by a process that died; it is removed", path)
                remove_tree(self._files, path)


def _is_folder(path: Path) -> bool:
    """Whether ``path`` itself is a folder, not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _is_abandoned(path: Path) -> bool:
    """Whether nothing was written for a day and the writer is dead, as far as that can be known.

    A process of this host is looked up by its number (a number that is in use again keeps the folder
    until that process ends too). Of another host only the time tells.
    """
    match = _HIDDEN.fullmatch(path.name)
    if match is None or not _is_folder(path):
        return False
    try:
        newest = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:  # it is being removed
        return False
    if time.time() - newest < ABANDONED_SECONDS:
        return False
    return match["host"] != host_mark() or not _is_alive(int(match["pid"]))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
