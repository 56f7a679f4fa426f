"""Counts the bytes of live tensors and buffers while weights are loaded."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from typing_extensions import Self

LARGE_BYTES = 4 << 20
"""When so much is freed at once, the process's memory is looked at first: a peak may lie there."""


class Account:
    """Bytes that are alive, by device type, now and at most. Safe to use from several threads."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._recent: dict[str, int] = {}
        self._process: int | None = None
        self._lock = threading.RLock()  # a finalizer may run inside of a call

    def add(self, device: str, size: int) -> None:
        """Count ``size`` bytes more (less if negative)."""
        with self._lock:
            self.now[device] = self.now.get(device, 0) + size
            self.peak[device] = max(self.peak.get(device, 0), self.now[device])
            self._recent[device] = max(self._recent.get(device, 0), self.now[device])
            if size <= -LARGE_BYTES:
                self._process = self._most_of_process()

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        device, size = tensor.device.type, storage.nbytes()
        self.add(device, size)
        weakref.finalize(storage, self.add, device, -size).atexit = False

    def recent(self) -> Mapping[str, int]:
        """The most that was alive since this was last asked."""
        with self._lock:
            found, self._recent = self._recent, dict(self.now)
            return found or dict(self.now)

    def recent_process(self) -> int | None:
        """The most anonymous memory that the process was seen to have since this was last asked.

        It is looked at now, and was before each large tensor was freed. None where the system does not tell.
        """
        with self._lock:
            found, self._process = self._most_of_process(), None
            return found

    def _most_of_process(self) -> int | None:
        return max((seen for seen in (self._process, anonymous_bytes()) if seen is not None), default=None)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the storages of every real tensor made under it, in this thread.

    ``now`` and ``peak`` are bytes per device type. Scratch inside one op is not seen.

    It goes on the stack of the thread, and not into the marks that torch keeps in globals of the process:
    each mode saves and restores these for itself, so that modes of two threads leave them behind. What
    any thread compiled with such a mark was made anew by the next thread that ran it.
    """

    def __init__(self, account: Account | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.account = account or Account()
        self._known: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __enter__(self) -> Self:
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    @property
    def now(self) -> dict[str, int]:
        """Bytes that are alive."""
        return self.account.now

    @property
    def peak(self) -> dict[str, int]:
        """The most bytes that were alive at once."""
        return self.account.peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(args):
            if isinstance(leaf, Tensor):
                self.know(leaf)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        return result

    def know(self, tensor: Tensor) -> None:
        """Leave out the storage of ``tensor``: it was there before, and somebody else counts it."""
        if type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta:
            storage = tensor.untyped_storage()
            self._known.setdefault(storage._cdata, storage)

    def track(self, tensor: Tensor) -> None:
        """Count ``tensor`` from now until its storage is freed."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if self._known.get(storage._cdata) is storage:
            return
        self._known[storage._cdata] = storage
        self.account.follow(tensor)


def anonymous_bytes() -> int | None:
    """Anonymous resident memory of this process; None where the system does not tell."""
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None
    try:
        fields = os.read(descriptor, 256).split()
    finally:
        os.close(descriptor)
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
