"""What holds for the threads of a load."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import torch

from fxquant.process_setting import ProcessSetting


def forget_locals(error: BaseException) -> None:
    """Let go of what finished frames hold, so that an error that is kept keeps no tensors."""
    seen: BaseException | None = error
    known: list[BaseException] = []
    while seen is not None and seen not in known:  # a cause may lead back to its effect
        known.append(seen)
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch ops on one thread for each worker.

    Tiles are small, and idle OpenMP threads spin: SmolLM2 on two busy cores took 36 s with two
    threads for each op and 1.2 s with one.
    """
    with _threads.changed(1) as threads:
        try:
            yield
        finally:
            torch.set_num_threads(threads)  # of this thread; other loads have set theirs


_threads = ProcessSetting(torch.get_num_threads, torch.set_num_threads)
