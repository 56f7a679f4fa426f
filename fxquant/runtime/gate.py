"""Lets forwards of a model run side by side, and a reload of its weights only between them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from fxquant.errors import QuantizedWeightError

_RELOADING: ContextVar[tuple[Gate, ...]] = ContextVar("fxquant_reloading", default=())
"""Reloads that this code runs inside of. Loaders give it to their workers, which run callbacks too."""


class Gate:
    """Many forwards or one reload at a time, in the order in which they come.

    A forward may call the model again in the same thread, but not wait for another thread that does.
    """

    def __init__(self, broken: str = "") -> None:
        self._changed = threading.Condition(threading.Lock())
        self._running: set[object] = set()
        self._waiting: deque[object] = deque()
        self._reloading = False
        self._own = threading.local()
        self.broken = broken
        """Why the weights cannot be used; a reload that succeeds mends it."""

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward; waits for reloads that came before it."""
        depth = getattr(self._own, "depth", 0)
        if depth:
            yield
            return
        if self in _RELOADING.get():
            raise QuantizedWeightError("the model was called inside of a reload of its own weights")
        ticket = object()
        try:
            with self._changed:
                self._wait(ticket, lambda: not self._reloading)
                if self.broken:
                    raise QuantizedWeightError(self.broken)
                self._running.add(ticket)
            self._own.depth = 1
            yield
        finally:
            self._own.depth = 0
            with self._changed:
                self._running.discard(ticket)
                self._changed.notify_all()

    @contextlib.contextmanager
    def reload(self) -> Iterator[None]:
        """Around a reload; waits for running forwards, and for reloads that came before it."""
        if getattr(self._own, "depth", 0):
            raise QuantizedWeightError("reload was called inside of a forward of the same model")
        if self in _RELOADING.get():
            raise QuantizedWeightError("reload was called inside of a reload of the same model")
        entered = False
        inside = _RELOADING.set((*_RELOADING.get(), self))
        try:
            with self._changed:
                self._wait(object(), lambda: not self._reloading and not self._running)
                self._reloading = entered = True
            yield
        finally:
            _RELOADING.reset(inside)
            if entered:
                with self._changed:
                    self._reloading = False
                    self._changed.notify_all()

    def _wait(self, ticket: object, may_enter: Callable[[], bool]) -> None:
        """Wait for what came before, so that neither forwards nor reloads keep the others out."""
        if not self._waiting and may_enter():
            return
        self._waiting.append(ticket)
        try:
            while self._waiting[0] is not ticket or not may_enter():
                self._changed.wait()
        finally:
            self._waiting.remove(ticket)
            self._changed.notify_all()

    def __deepcopy__(self, memo: dict[int, object]) -> Gate:
        """A copy of a model has a gate of its own, and a copy of broken weights is broken."""
        return Gate(self.broken)

    def __reduce__(self) -> tuple[type[Gate], tuple[str]]:
        return Gate, (self.broken,)
