"""A setting of the whole process that several threads change for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ProcessSetting(Generic[T]):
    """Saved by the first thread that comes, restored by the last one that goes.

    Were each thread to save and restore for itself, the second would save what the first has set, and
    leave it behind.
    """

    def __init__(self, get: Callable[[], T], set_to: Callable[[T], object]) -> None:
        self.get, self.set_to = get, set_to
        self.lock = threading.Lock()
        self.saved: list[T] = []

    @contextlib.contextmanager
    def changed(self, value: T) -> Iterator[T]:
        """Set to ``value`` inside; gives what it is without anyone's change."""
        with self.lock:
            original = self.saved[0] if self.saved else self.get()
            self.saved.append(original)
            self.set_to(value)
        try:
            yield original
        finally:
            with self.lock:
                self.saved.pop()
                if not self.saved:
                    self.set_to(original)
