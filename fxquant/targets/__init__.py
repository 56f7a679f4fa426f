"""Target tables and the choice of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fxquant.errors import ConfigError
from fxquant.scheme import SCHEMES
from fxquant.target import Refusal, Target
from fxquant.targets.cpu import cpu_target


def _cpu(target: object = None, *, wide: str = "auto", weight_format: str = "nd") -> Target:
    if target is not None:
        raise ConfigError(f"`target` must be a fxquant.Target for backend 'cpu', got {target!r}")
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


EXAMPLES: dict[str, tuple[str, str | None]] = {
    "cpu": ("cpu", None),
    "A2": ("npu", "Ascend910B2,cann=9.0"),
    "A3": ("npu", "Ascend910_9391,cann=9.0"),
    "950": ("npu", "Ascend950PR_9579,cann=9.0"),
    "310P": ("npu", "Ascend310P3,cann=9.0"),
}
"""Backend and target of each column of ``support_table``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What a target does with weights of a scheme.

    ``kind``: an op of the target, the dialect's own arithmetic, or nothing: then ``text`` is why.
    """

    scheme: str
    target: str
    kind: Literal["kernel", "reference", "refusal"]
    text: str

    def __str__(self) -> str:
        return self.text if self.kind == "kernel" else f"{self.kind}: {self.text}"


def support_table() -> tuple[Support, ...]:
    """Every scheme on every kind of target; no device is needed."""
    targets = {name: choose_target(backend, text) for name, (backend, text) in EXAMPLES.items()}
    return tuple(
        support_of(scheme, name, target)
        for scheme, row in SCHEMES.items()
        if row.weight is not None
        for name, target in targets.items()
    )


def support_of(scheme: str, name: str, target: Target) -> Support:
    """What ``target`` does with weights of ``scheme``; ``name`` is what the target is called."""
    found = target.kernel_for(SCHEMES[scheme])
    if isinstance(found, Refusal):
        return Support(scheme=scheme, target=name, kind="refusal", text=found.reason)
    if found.op.startswith("fxquant::"):
        reason = found.reason.removeprefix("reference: ")
        return Support(scheme=scheme, target=name, kind="reference", text=reason)
    return Support(scheme=scheme, target=name, kind="kernel", text=f"{found.op}: {found.reason}")
