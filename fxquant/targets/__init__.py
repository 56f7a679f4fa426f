"""Target tables and the choice of one."""

from __future__ import annotations

from collections.abc import Callable

from fxquant.errors import ConfigError
from fxquant.target import Target
from fxquant.targets.cpu import cpu_target


def _cpu(target: object = None, *, wide: str = "auto", weight_format: str = "nd") -> Target:
    if target is not None:
        hint = "; the name of a chip goes with backend='npu'" if isinstance(target, str) else ""
        raise ConfigError(f"`target` must be a fxquant.Target for backend 'cpu', got {target!r}{hint}")
    if wide != "auto":
        raise ConfigError(f"wide={wide!r}: the CPU has no limit on the width of a layer")
    if weight_format != "nd":
        raise ConfigError(f"weight_format={weight_format!r}: FRACTAL_NZ is a layout of the NPU")
    return cpu_target()


def _npu(target: object = None, *, wide: str = "auto", weight_format: str = "nd") -> Target:
    from fxquant.targets.npu import npu_target  # defines operators of the NPU

    return npu_target(target, wide=wide, weight_format=weight_format)


BACKENDS: dict[str, Callable[..., Target]] = {"cpu": _cpu, "npu": _npu}
"""Target families that can be planned for."""


def choose_target(
    backend: str, target: object = None, *, wide: str = "auto", weight_format: str = "nd"
) -> Target:
    """The table for ``backend``, or the ``target`` that overrides it; the others: see ``Options``."""
    if isinstance(target, Target):
        return target
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is not available; available: {', '.join(BACKENDS)}")
    return BACKENDS[backend](target, wide=wide, weight_format=weight_format)
