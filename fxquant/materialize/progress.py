"""Progress of a load: numbers for a callback, a bar for a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One step of a load. Bytes are of the checkpoint; memory is of live tensors."""

    tensor: str
    done_bytes: int
    total_bytes: int
    seconds: float
    memory_now: int
    memory_peak: int

    @property
    def share(self) -> float:
        """Share of the bytes that is done, 0 to 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0

    @property
    def rate(self) -> float:
        """Bytes per second so far."""
        return self.done_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining(self) -> float:
        """Seconds until the end at the rate so far."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate else 0.0


Report = Callable[[Progress], None]


class Bar:
    """Shows bytes, rate, time left, memory now and peak, and the current weight.

    One line that is redrawn on a terminal, a line for each tenth elsewhere.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.terminal = self.stream.isatty()
        self.shown_at = 0.0
        self.shown_tenth = -1

    def __call__(self, step: Progress) -> None:
        """Show ``step`` if it is due."""
        if not self._is_due(step):
            return
        text = (
            f"{step.share:4.0%} {step.done_bytes / MIB:.0f}/{step.total_bytes / MIB:.0f} MiB "
            f"{step.rate / MIB:.0f} MiB/s  {_time_left(step)}  memory {step.memory_now / MIB:.0f} "
            f"(peak {step.memory_peak / MIB:.0f}) MiB  {step.tensor[-48:]}"
        )
        end = "\n" if step.share >= 1 or not self.terminal else ""
        self.stream.write((f"\r\x1b[2K{text}" if self.terminal else text) + end)
        self.stream.flush()

    def _is_due(self, step: Progress) -> bool:
        now, tenth = time.monotonic(), int(step.share * 10)
        due = tenth > self.shown_tenth or (self.terminal and now - self.shown_at > 0.05)
        if due or step.share >= 1:
            self.shown_at, self.shown_tenth = now, tenth
        return due or step.share >= 1


def _time_left(step: Progress) -> str:
    if step.share >= 1:
        return f"{step.seconds:.1f} s"
    minutes, seconds = divmod(round(step.remaining), 60)
    return f"{minutes}:{seconds:02d} left"


def choose_progress(progress: bool | Report | None) -> Report | None:
    """``None`` shows a bar on a terminal, True always, False never; a callable gets each step."""
    if callable(progress):
        return progress
    shown = sys.stderr.isatty() if progress is None else progress
    return Bar() if shown else None
