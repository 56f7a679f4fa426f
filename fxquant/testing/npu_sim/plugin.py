"""The pytest plugin: ``pytest -p fxquant.testing.npu_sim.plugin``.

The simulated NPU is installed before any conftest is imported. Where it cannot run, tests that use
the fixture ``npu`` are skipped with the reason. Settings come from the environment; see
``fxquant.testing.npu_sim.settings``.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fxquant.testing import npu_sim
from fxquant.testing.npu_sim.settings import MEMORY

_reason: list[str] = []  # why it cannot run


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Install the simulated NPU, or note why it cannot be."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch_npu's, about CANN that is not there
            npu_sim.install()
    except npu_sim.SimulatorUnavailable as error:
        _reason.append(str(error))


def pytest_report_header() -> str:
    """Say what is simulated."""
    if _reason:
        return f"simulated NPU: none ({_reason[0]})"
    return f"simulated NPU: {npu_sim.Settings.from_environment()}"


def _clean(module: Any) -> None:
    module.synchronize()
    devices = range(module.device_count())
    if any(module.memory_allocated(device) for device in devices):
        gc.collect()
    module.empty_cache()
    for device in devices:
        module.reset_peak_memory_stats(device)


@pytest.fixture
def npu() -> Iterator[torch.device]:
    """The device ``npu:0``, with its cache empty and its peaks reset."""
    if _reason:
        pytest.skip(_reason[0])
    module = vars(torch)["npu"]
    module.set_device(0)
    _clean(module)
    yield torch.device("npu:0")
    module.synchronize()


@pytest.fixture
def npu_capacity(npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the memory of each device, in MiB, until the end of the test."""
    assert npu.type == "npu"

    def set_capacity(mib: int) -> None:
        monkeypatch.setitem(os.environ, MEMORY, str(mib))

    return set_capacity
