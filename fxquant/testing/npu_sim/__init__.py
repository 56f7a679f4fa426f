"""A simulated Ascend NPU under the real torch_npu wheel: for tests, on a CPU.

Stand-ins for the libraries of CANN let the wheel import; its own allocator, streams, events and Meta
kernels run over this process's memory, and references on the CPU compute. See docs/npu-simulator.md.

    python -m fxquant.testing.npu_sim --memory 4096 -- pytest tests
    pytest -p fxquant.testing.npu_sim.plugin

or, before torch_npu is imported::

    from fxquant.testing import npu_sim

    npu_sim.install(npu_sim.Settings(soc="Ascend910_9391", devices=2))
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from fxquant.testing.npu_sim.settings import Settings
from fxquant.testing.npu_sim.stubs import CORE, reason_unavailable, stub_libraries

__all__ = ["Settings", "SimulatorUnavailable", "install", "is_available", "load", "on_cpu", "stub_libraries"]

_loaded: list[ctypes.CDLL] = []


class SimulatorUnavailable(RuntimeError):  # noqa: N818
    """The simulated NPU cannot run here; the text says why."""


def is_available() -> str | None:
    """Why the simulated NPU cannot run here (no gcc, no wheel, ...), or None where it can."""
    return reason_unavailable()


def load(settings: Settings | None = None, *, cache: Path | None = None) -> None:
    """Load the stand-ins, building them first if need be, so that ``import torch_npu`` works.

    Raises:
        SimulatorUnavailable: where they cannot be built or loaded.
    """
    if settings is not None:
        os.environ.update(settings.environment())
    if _loaded:
        return
    reason = is_available()
    if reason is not None:
        raise SimulatorUnavailable(reason)
    if "torch_npu" in sys.modules:
        raise SimulatorUnavailable("torch_npu is imported already, with the libraries that it found")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # for processes that this one starts
    folder = stub_libraries(cache)
    names = sorted(path.name for path in folder.glob("*.so"))
    names.remove(CORE)
    _loaded.extend(ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in (CORE, *names))


def install(settings: Settings | None = None, *, cache: Path | None = None) -> None:
    """Make ``torch.npu`` the simulated device in this process: ``load``, torch_npu, kernels.

    Args:
        settings: what is simulated; those of the environment by default. Chip, CANN version and
            number of devices are read once per process.
        cache: where the built libraries are kept; by default ``fxquant/npu_sim`` in the user's cache.

    Raises:
        SimulatorUnavailable: where the simulated NPU cannot run.
    """
    load(settings, cache=cache)
    import torch_npu  # noqa: F401

    from fxquant.testing.npu_sim.kernels import install_kernels

    install_kernels()


def on_cpu() -> AbstractContextManager[None]:
    """Let ``npu::`` ops run on CPU tensors too, within the context, for comparisons. Needs ``install``."""
    from fxquant.testing.npu_sim.kernels.registry import references_on_cpu

    return references_on_cpu()
