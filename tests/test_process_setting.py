"""Settings of the whole process, changed by threads that overlap."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Event

import pytest
import torch

from fxquant.capture import quiet_fast_paths
from fxquant.materialize.workers import one_torch_thread
from fxquant.process_setting import ProcessSetting


def overlap(context: Callable[[], AbstractContextManager[object]]) -> None:
    """One thread enters first and leaves first, so that the other one stays behind."""
    entered, left = Event(), Event()

    def second() -> None:
        with context():
            entered.set()
            assert left.wait(10)

    with ThreadPoolExecutor(1) as pool:
        with context():
            done = pool.submit(second)
            assert entered.wait(10)
        left.set()
        done.result(10)


def in_new_thread(get: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(get).result()


CASES = {
    "attention": (quiet_fast_paths, torch.backends.mha.get_fastpath_enabled),
    "threads": (one_torch_thread, torch.get_num_threads),
}


@pytest.mark.parametrize("case", CASES)
def test_what_overlapping_threads_change_is_restored(case: str) -> None:
    context, get = CASES[case]
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # a number that no one else would set
    try:
        before = get()
        overlap(context)  # type: ignore[arg-type]
        assert get() == in_new_thread(get) == before
    finally:
        torch.set_num_threads(threads)


def test_a_setting_stays_changed_until_the_last_one_leaves() -> None:
    value = ["original"]
    setting = ProcessSetting(lambda: value[0], lambda new: value.__setitem__(0, new))
    with setting.changed("first") as outer:
        with setting.changed("second") as inner:
            assert (outer, inner, value) == ("original", "original", ["second"])
        assert value == ["second"]
    assert value == ["original"]
    with pytest.raises(KeyError), setting.changed("failed"):
        raise KeyError
    assert value == ["original"]
