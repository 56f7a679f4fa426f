"""Target tables and the choice of one."""

from __future__ import annotations

from fxquant.errors import ConfigError
from fxquant.target import Target
from fxquant.targets.cpu import cpu_target

BACKENDS = {"cpu": cpu_target}
"""Target families that can be planned for."""


def choose_target(backend: str, target: object = None) -> Target:
    """The table for ``backend``, or the ``target`` that overrides it."""
    if isinstance(target, Target):
        return target
    if target is not None:
        raise ConfigError(f"`target` must be a fxquant.Target for backend {backend!r}, got {target!r}")
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is not available; available: {', '.join(BACKENDS)}")
    return BACKENDS[backend]()
