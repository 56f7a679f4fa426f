"""Lets forwards of a model run side by side, and a reload of its weights only between them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from fxquant.errors import QuantizedWeightError


class Gate:
    """Many forwards or one reload at a time. A forward may call the model again in the same thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._running = 0
        self._reloading = False
        self._own = threading.local()
        self.broken = ""
        """Why the weights cannot be used; a reload that succeeds mends it."""

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward; waits for a reload."""
        depth = getattr(self._own, "depth", 0)
        if not depth:
            with self._changed:
                while self._reloading:
                    self._changed.wait()
                if self.broken:
                    raise QuantizedWeightError(self.broken)
                self._running += 1
        self._own.depth = depth + 1
        try:
            yield
        finally:
            self._own.depth = depth
            if not depth:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    @contextlib.contextmanager
    def reload(self) -> Iterator[None]:
        """Around a reload; waits for running forwards, and for another reload."""
        if getattr(self._own, "depth", 0):
            raise QuantizedWeightError("reload was called inside of a forward of the same model")
        with self._changed:
            while self._reloading or self._running:
                self._changed.wait()
            self._reloading = True
        try:
            yield
        finally:
            with self._changed:
                self._reloading = False
                self._changed.notify_all()

    def __deepcopy__(self, memo: dict[int, object]) -> Gate:
        """A copy of a model has a gate of its own."""
        return Gate()

    def __reduce__(self) -> tuple[type[Gate], tuple[()]]:
        return Gate, ()
