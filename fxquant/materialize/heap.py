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
