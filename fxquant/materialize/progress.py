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
    def rate(self) -> float:
        """Bytes per second so far."""
        return self.done_bytes / self.seconds if self.seconds > 0 else 0.0


Report = Callable[[Progress], None]


class Bar:
    """A line on a terminal: bytes, rate, current tensor, memory now and peak."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.shown = 0.0

    def __call__(self, step: Progress) -> None:
        last = step.done_bytes >= step.total_bytes
        now = time.monotonic()
        if not last and now - self.shown < 0.05:
            return
        self.shown = now
        share = step.done_bytes / max(step.total_bytes, 1)
        text = (
            f"{share:4.0%} {step.done_bytes / MIB:.0f}/{step.total_bytes / MIB:.0f} MiB "
            f"{step.rate / MIB:.0f} MiB/s  memory {step.memory_now / MIB:.0f} "
            f"(peak {step.memory_peak / MIB:.0f}) MiB  {step.tensor[-48:]}"
        )
        self.stream.write(f"\r\x1b[2K{text}" + ("\n" if last else ""))
        self.stream.flush()


def choose_progress(progress: bool | Report | None) -> Report | None:
    """``None`` shows a bar on a terminal, True always, False never; a callable gets each step."""
    if callable(progress):
        return progress
    shown = sys.stderr.isatty() if progress is None else progress
    return Bar() if shown else None
