"""Counts the bytes of live tensors while it is active."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that follows the storages of every real tensor made under it.

    ``now`` and ``peak`` are bytes per device type. Scratch inside one op is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._known: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        return result

    def track(self, tensor: Tensor) -> None:
        """Follow ``tensor`` from now until its storage is freed."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if self._known.get(storage._cdata) is storage:
            return
        self._known[storage._cdata] = storage
        device, size = tensor.device.type, storage.nbytes()
        self.now[device] = self.now.get(device, 0) + size
        self.peak[device] = max(self.peak.get(device, 0), self.now[device])
        weakref.finalize(storage, self._free, device, size).atexit = False

    def _free(self, device: str, size: int) -> None:
        self.now[device] -= size
