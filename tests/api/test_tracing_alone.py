"""Modes of a trace, which torch marks in globals of the process, are entered under one lock only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.convert_frame import compile_lock
from torch.utils._python_dispatch import TorchDispatchMode

import fxquant
from tests.api.lives import IDS, Net, compiled, on_meta, run, values, write

OPTIONS: dict[str, Any] = {"scheme": "int8", "example_inputs": (IDS,), "load_workers": 2}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each mode that is entered, whether the lock kept other threads out."""
    enter, seen = TorchDispatchMode.__enter__, []

    def is_free() -> bool:
        free = compile_lock.acquire(blocking=False)
        if free:
            compile_lock.release()
        return free

    with ThreadPoolExecutor(1) as other:

        def entered(mode: TorchDispatchMode) -> TorchDispatchMode:
            seen.append(not other.submit(is_free).result())
            return enter(mode)

        monkeypatch.setattr(TorchDispatchMode, "__enter__", entered)
        yield seen
        monkeypatch.undo()


def materialize_another_kind(folder: Path) -> None:
    lowered = fxquant.lower(on_meta(), folder, **OPTIONS)
    lowered.materialize(values())
    lowered.materialize(folder)


def reload_and_save(folder: Path) -> None:
    model = compiled(folder)
    run(model)
    fxquant.reload(model, values(1), load_workers=2)
    fxquant.save_checkpoint(model, folder / "saved")
    compiled(folder / "saved", scheme=None, config=None)


def compile_cached(folder: Path) -> None:
    for _ in range(2):
        compiled(folder, cache_dir=folder / "cache")


def plan_in_a_bound(folder: Path) -> None:
    fxquant.plan(on_meta(), folder, max_error=0.001, **OPTIONS)


def run_live(folder: Path) -> None:
    model = Net().eval()
    run(torch.compile(model, backend="fxquant", options={"scheme": "int8"}))


@pytest.mark.parametrize(
    "work",
    [materialize_another_kind, reload_and_save, compile_cached, plan_in_a_bound, run_live],
    ids=lambda w: w.__name__,
)
def test_modes_are_entered_under_the_lock(
    work: Callable[[Path], None], alone: list[bool], tmp_path: Path
) -> None:
    work(write(tmp_path))
    assert alone
    assert all(alone)
