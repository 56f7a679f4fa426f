"""Matrix products of the references: integers exactly, floats through float64."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fxquant import numerics
from fxquant.targets.cpu import int_mm_fault

_TILE = 4 << 20
"""Elements of the right operand that are widened at a time."""


def _int_mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    by_column = b_KN.stride(-2) == 1 or b_KN.stride(-1) == 1
    return torch._int_mm(a_MK.contiguous(), b_KN if by_column else b_KN.contiguous())


@functools.cache
def _int_mm_is_exact() -> bool:
    """Whether ``torch._int_mm`` is right on this CPU, for both layouts of the right operand."""
    if int_mm_fault() is not None:
        return False
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 40, 1056), (17, 33, 64), (3, 8, 15)):
        a = torch.randint(0, 2, (m, k), generator=generator).mul_(254).sub_(127).to(torch.int8)
        b = torch.full((n, k), 127, dtype=torch.int8)
        want = numerics.int_matmul(a, b)
        for right in (b.t(), b.t().contiguous()):
            if not torch.equal(_int_mm(a, right), want):
                return False
    return True


def int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Exact int32 ``[..., M, K] @ [..., K, N]`` of int8 codes; batch dimensions broadcast."""
    if a.dim() == b.dim() == 2:
        return _int_matmul_2d(a, b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    right = b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    sums = [_int_matmul_2d(x, y) for x, y in zip(left, right, strict=True)]
    return torch.stack(sums).view(*batch, a.shape[-2], b.shape[-1])


def _int_matmul_2d(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    m, k = a_MK.shape
    if 0 in (m, k, b_KN.shape[1]):
        return torch.zeros((m, b_KN.shape[1]), dtype=torch.int32)
    if k > 1 and _int_mm_is_exact():
        return _int_mm(a_MK, b_KN)
    return numerics.int_matmul(a_MK, b_KN.t())


def float_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Float32 ``[..., M, K] @ [..., K, N]``, summed in float64; works in pieces of N."""
    left = a.double()
    step = max(1, _TILE // max(b[..., 0].numel(), 1))
    pieces = [(left @ part.double()).float() for part in b.split(step, -1)]
    return torch.cat(pieces, -1)
