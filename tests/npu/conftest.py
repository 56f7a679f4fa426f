"""Tests on the simulated NPU: they run in its environment (``make test-npu``) and are skipped elsewhere.

Modules here import no torch_npu at their top: outside of the simulator that would fail. Ops are
reached as ``torch.ops.npu``, and each test takes the fixture ``npu``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
PLUGIN = "fxquant.testing.npu_sim.plugin"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin(PLUGIN):
        return
    skip = pytest.mark.skip(reason="runs in the simulated NPU: make test-npu")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture
def simulate(npu, monkeypatch):
    """A function that changes chip and CANN version, as the rules see them, until the end of the test."""

    def set_chip(soc: str, cann: str = "9.0.0") -> None:
        monkeypatch.setenv("STUB_CANN_SOC", soc)
        monkeypatch.setenv("STUB_CANN_VERSION", cann)

    set_chip("Ascend910B2")
    return set_chip
