"""The meter of live bytes counts for its own thread and leaves no mark on the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import fxquant
from fxquant.materialize.meter import LiveBytes
from tests.api.lives import compiled, run, values

Do = Callable[..., Any]


@pytest.fixture
def threads() -> Iterator[tuple[Do, Do]]:
    """Two threads: each runs a function and gives its result."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        yield tuple(lambda work, *args, of=of: of.submit(work, *args).result() for of in (one, two))


def test_meters_that_overlap_leave_no_mark(threads: tuple[Do, Do]) -> None:
    meters = LiveBytes(), LiveBytes()
    for do, meter in zip(threads, meters, strict=True):
        do(meter.__enter__)
    for size, do in enumerate(threads, 1):
        do(torch.zeros, size)
    for do, meter in zip(threads, meters, strict=True):  # the first to come is the first to go
        do(meter.__exit__, None, None, None)
    assert [meter.peak for meter in meters] == [{"cpu": 4}, {"cpu": 8}]
    assert not is_in_torch_dispatch_mode()


def test_what_is_compiled_beside_a_meter_serves_every_thread(threads: tuple[Do, Do]) -> None:
    """Guards hold torch's marks of a mode; a mark of another thread would cost a recompile."""
    load, other = threads
    model, meter = compiled(values()), LiveBytes()
    load(meter.__enter__)
    expected = run(model)
    load(meter.__exit__, None, None, None)
    assert torch.equal(other(run, model), expected)
    assert fxquant.report(model).recompiles == 0
