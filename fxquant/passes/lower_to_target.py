"""Replaces dialect ops by the ops of the target that stand for them.

Before: ``fxquant.scaled_mm(...)``. After, on a CPU whose ``_int_mm`` passed its self-test:
``fxquant_cpu.scaled_mm(...)``, the same operands. A target may bring a lowering of its own.
"""

from __future__ import annotations

import torch
from torch import fx

from fxquant.target import Target


def resolve(op: str) -> torch._ops.OpOverload:
    """``"fxquant::scaled_mm"`` -> ``torch.ops.fxquant.scaled_mm.default``."""
    namespace, name = op.split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    return packet.default  # type: ignore[no-any-return]


def lower_to_target(gm: fx.GraphModule, target: Target, proven: bool = False) -> int:
    """Replace the ops that ``target`` has a kernel of its own for; the number of them.

    ``proven``: guards outside of the graph hold for its symbolic sizes, as in ``torch.compile``.
    """
    if target.lower is not None:
        return target.lower(gm, proven)
    count = 0
    for op, kernel in target.kernels.items():
        if kernel.op == op:
            continue
        for node in gm.graph.find_nodes(op="call_function", target=resolve(op)):
            node.target = resolve(kernel.op)
            count += 1
    return count
