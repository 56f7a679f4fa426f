"""What CANN refuses when an op is called, in its style: the rules of the target's table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from fxquant.targets.npu_chip import NpuChip, parse_chip
from fxquant.targets.npu_rules import refusal_of_call
from fxquant.testing.npu_sim.settings import Settings


def refuse(op: str, reason: str) -> NoReturn:
    """Raise what torch_npu raises for parameters that CANN does not take (error 161002)."""
    raise RuntimeError(
        f"npu::{op}: call aclnn failed, error code is 161002\n"
        f"EZ1001: {reason} (a check of the simulated NPU: {simulated_chip()})"
    )


def simulated_chip() -> NpuChip:
    """The chip and the CANN version that are simulated."""
    settings = Settings.from_environment()
    return _chip(settings.soc, settings.cann)


@functools.cache
def _chip(soc: str, cann: str) -> NpuChip:
    return parse_chip(f"{soc},cann={cann}")


def check_call(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], is_nz: Callable[[Tensor], bool]
) -> None:
    """Refuse what the table of the target refuses; ``is_nz`` tells what is in FRACTAL_NZ."""
    refusal = refusal_of_call(op, args, kwargs, simulated_chip(), is_nz=is_nz)
    if refusal is not None:
        refuse(op, refusal.reason)
