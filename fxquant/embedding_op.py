"""The dialect's look-up in a quantized embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxquant import numerics
from fxquant.ops import FLOATS, check_constants, no_gradient
from fxquant.scheme import QuantSpec


@torch.library.custom_op("fxquant::embedding_dequant", mutates_args=())
def embedding_dequant(
    indices: Tensor, weight: Sequence[Tensor], spec: str, k: int, dtype: torch.dtype
) -> Tensor:
    """Rows of the float values that codes stand for: indices ``[...]`` -> ``[..., k]`` in ``dtype``.

    ``weight``: the constants of a weight ``[N, k]`` of ``spec``, in their order. Only the rows that are
    asked for are made. There is no ``padding_idx``: it matters to gradients alone, and there are none.
    """
    _check(indices, weight, spec, k, dtype)
    return numerics.embedding_rows(indices, weight, QuantSpec.parse(spec), k, dtype)


def _check(indices: Tensor, weight: Sequence[Tensor], spec: str, k: int, dtype: torch.dtype) -> None:
    if indices.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"fxquant: indices must be int64 or int32, got {indices.dtype}")
    if dtype not in FLOATS:
        raise RuntimeError(f"fxquant: dtype must be one of {FLOATS}, got {dtype}")
    check_constants(weight, QuantSpec.parse(spec), k)


@embedding_dequant.register_fake
def _(indices: Tensor, weight: Sequence[Tensor], spec: str, k: int, dtype: torch.dtype) -> Tensor:
    _check(indices, weight, spec, k, dtype)
    return torch.empty((*indices.shape, k), dtype=dtype, device=weight[0].device)


no_gradient(embedding_dequant)
