"""Weights of experts: matrices along a first axis, each quantized and multiplied for itself.

Shape suffixes: E experts, S rows (a token for each expert that it is sent to), N output and K input
features. The constants of ``[E, N, K]`` are those of ``[N, K]`` with a leading E.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fxquant import numerics
from fxquant.scheme import QuantSpec


def quantize_experts(w_ENK: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, ...]:
    """The constants of float experts, one expert after the other."""
    experts, n, k = w_ENK.shape
    made = tuple(
        torch.empty((experts, *shape), dtype=dtype, device=w_ENK.device)
        for dtype, shape in spec.constants(n, k).values()
    )
    for i, w_NK in enumerate(w_ENK):
        for whole, part in zip(made, numerics.quantize_weight(w_NK, spec), strict=True):
            whole[i].copy_(part)
    return made


def dequantize_experts(
    constants: Sequence[torch.Tensor], spec: QuantSpec, k: int, dtype: torch.dtype
) -> torch.Tensor:
    """The float values ``[E, N, k]`` that the constants stand for."""
    experts, n = constants[0].shape[:2]
    floats = torch.empty((experts, n, k), dtype=dtype, device=constants[0].device)
    if _has_no_values(floats):
        return floats  # Dynamo asks for the shape, and would wait for each expert
    for i in range(experts):
        floats[i].copy_(numerics.dequantize_weight(expert_of(constants, i), spec, k, dtype))
    return floats


def _has_no_values(tensor: torch.Tensor) -> bool:
    """Whether nothing is computed, and no graph of what would be is recorded."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return (tensor.is_meta or isinstance(tensor, FakeTensor)) and get_proxy_mode() is None


def expert_of(constants: Sequence[torch.Tensor], index: int) -> tuple[torch.Tensor, ...]:
    """The constants of one expert, as views."""
    return tuple(part[index] for part in constants)


def by_group(
    offsets_E: torch.Tensor, out_SN: torch.Tensor, product: Callable[[int, slice], torch.Tensor]
) -> torch.Tensor:
    """``product(expert, rows)`` for the rows of each expert, which end at ``offsets``; other rows get 0."""
    start = 0
    for expert, stop in enumerate(offsets_E.tolist()):
        if stop > start:
            out_SN[start:stop] = product(expert, slice(start, stop))
            start = stop
    out_SN[start:] = 0
    return out_SN
