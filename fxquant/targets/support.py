"""Which scheme runs on which target, and by what: the matrix as text."""

from __future__ import annotations

from collections.abc import Sequence

from fxquant.scheme import SCHEMES
from fxquant.target import Kernel, Refusal, Target
from fxquant.targets import choose_target

SHOWN = (
    "cpu",
    "Ascend910B2,cann=9.0",
    "Ascend910_9391,cann=9.0",
    "Ascend950PR_9579,cann=9.1",
    "Ascend310P3,cann=9.0",
)
"""Targets of the table: the CPU and a chip of each family (A2, A3, 950, 310P)."""


def support(targets: Sequence[str], *, experts: bool = False) -> dict[str, dict[str, Kernel | Refusal]]:
    """By scheme and target: the kernel, or why there is none. ``"cpu"`` or the text of an Ascend chip.

    ``experts``: for products of groups of rows with experts, in place of those with one weight.
    """
    tables = {name: _target(name) for name in targets}
    return {
        scheme.name: {name: target.kernel_for(scheme, grouped=experts) for name, target in tables.items()}
        for scheme in SCHEMES.values()
        if scheme.weight is not None
    }


def _target(name: str) -> Target:
    return choose_target("cpu") if name == "cpu" else choose_target("npu", name)


def support_table(targets: Sequence[str], *, experts: bool = False) -> str:
    """The matrix as text: a line for each scheme and target, after the scheme's own."""
    lines = []
    for name, cells in support(targets, experts=experts).items():
        lines.append(f"{name}: {SCHEMES[name].note}")
        width = max(len(target) for target in cells)
        for target, cell in cells.items():
            what = f"refused: {cell.reason}" if isinstance(cell, Refusal) else f"{cell.op} ({cell.reason})"
            lines.append(f"  {target.ljust(width)}  {what}")
    return "\n".join(lines)
