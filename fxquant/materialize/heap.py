"""Gives memory that the C library keeps after it was freed back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

from fxquant.process_setting import ProcessSetting

KEPT_BYTES, KEPT_SHARE = 8 << 20, 0.01
"""So much freed memory may stay with the C library during a load, or this share of what is alive."""

REST_SECONDS = 0.02
"""The least time between two times of giving it back, each of which takes about 1 ms."""


@functools.cache
def _trim() -> Any:
    """``malloc_trim`` of glibc; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if found is not None:
        found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    return found


@contextlib.contextmanager
def one_arena() -> Iterator[None]:
    """Let threads that start meanwhile allocate from the heap that ``give_back`` can give back.

    glibc otherwise gives each its own, and keeps what is freed there (80 MiB after 8 workers).
    """
    if _mallopt() is None:
        yield
        return
    with _most_arenas.changed(1):
        yield


def _set_most_arenas(count: int) -> None:
    _mallopt()(_M_ARENA_MAX, count)


def _given_most_arenas() -> int:
    """What glibc was started with; 0 for as many as it finds right. It cannot be asked."""
    given = os.environ.get("MALLOC_ARENA_MAX", "")
    return int(given) if given.isdecimal() else 0


_M_ARENA_MAX = -8
_most_arenas = ProcessSetting(_given_most_arenas, _set_most_arenas)


@functools.cache
def _mallopt() -> Any:
    """``mallopt`` of glibc; None elsewhere."""
    if _trim() is None:
        return None
    found = ctypes.CDLL(None).mallopt
    found.argtypes, found.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return found


def give_back() -> None:
    """Return freed heap to the system, so that what loading takes is not hidden in it. Takes about 1 ms.

    Planning frees tens of MiB of graphs, which glibc would keep.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


class Trimmer:
    """Gives memory back in the middle of a load, once the C library keeps much.

    Small tensors come and go in whichever hole of the heap fits, and each hole that was used stays resident.
    """

    def __init__(self) -> None:
        self.last = 0.0

    def look(self, process: int, alive: int, seconds: float) -> None:
        """``process``: its anonymous bytes over those before the load; ``alive``: what of them is in use."""
        kept = process - alive
        if kept > max(KEPT_BYTES, KEPT_SHARE * alive) and seconds - self.last >= REST_SECONDS:
            self.last = seconds
            give_back()
