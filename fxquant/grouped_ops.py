"""The dialect's products with experts: each group of rows with the weight of one expert.

``offsets`` int32 or int64 ``[E]``: where the rows of each expert end, in rising order. Rows behind the
last belong to no expert: they give 0 here, and anything on a device. Apart from that the ops are
``scaled_mm``, ``block_mm`` and ``weight_only_mm`` of the rows of a group, and their constants have a
leading E.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fxquant import numerics
from fxquant.numerics.experts import by_group, expert_of
from fxquant.ops import FLOATS, check_constants, check_scaled_mm, no_gradient, require, scaled_mm_with
from fxquant.scheme import QuantSpec


def _check_rows(x: Tensor, weight: Sequence[Tensor], offsets: Tensor) -> None:
    """Rows are a matrix, and there is an offset for each expert."""
    require(x.dim() == 2, f"x must be [S, K], got {tuple(x.shape)}")
    experts = weight[0].shape[0]
    require(
        all(part.dim() == 3 and part.shape[0] == experts for part in weight),
        f"constants must be [E, ..., ...], got {[tuple(part.shape) for part in weight]}",
    )
    require(
        offsets.dtype in (torch.int32, torch.int64) and tuple(offsets.shape) == (experts,),
        f"offsets must be int32 or int64 [{experts}], got {offsets.dtype} {tuple(offsets.shape)}",
    )


def check_grouped_scaled_mm(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> None:
    """What every kernel that stands for ``grouped_scaled_mm`` demands of its operands."""
    _check_rows(x, (w, w_scale), offsets)
    check_scaled_mm(x, w[0], x_scale, w_scale[0], None, dtype)


def grouped_scaled_mm_with(
    matmul: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """``grouped_scaled_mm`` through ``matmul(a_MK, b_NK) -> sums [M, N]``."""
    check_grouped_scaled_mm(x, w, x_scale, w_scale, offsets, dtype)
    scales = x_scale.expand(x.shape[0], 1)
    out = torch.empty((x.shape[0], w.shape[1]), dtype=dtype, device=x.device)
    return by_group(
        offsets,
        out,
        lambda i, rows: scaled_mm_with(matmul, x[rows], w[i], scales[rows], w_scale[i], None, dtype),
    )


def fake_grouped_scaled_mm(
    x_codes: Tensor,
    w_codes: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """The fake of ``grouped_scaled_mm`` and of every kernel that stands for it."""
    check_grouped_scaled_mm(x_codes, w_codes, x_scale, w_scale, offsets, out_dtype)
    return torch.empty((x_codes.shape[0], w_codes.shape[1]), dtype=out_dtype, device=x_codes.device)


@torch.library.custom_op("fxquant::grouped_scaled_mm", mutates_args=())
def grouped_scaled_mm(
    x_codes: Tensor,
    w_codes: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """``scaled_mm`` by groups: ``[S, K] x [E, N, K] -> [S, N]``, scales ``[S, 1]`` and ``[E, N, 1]``."""
    matmul = numerics.scaled_sums
    return grouped_scaled_mm_with(matmul, x_codes, w_codes, x_scale, w_scale, offsets, out_dtype)


grouped_scaled_mm.register_fake(fake_grouped_scaled_mm)


@torch.library.custom_op("fxquant::grouped_block_mm", mutates_args=())
def grouped_block_mm(
    x_codes: Tensor,
    x_scale: Tensor,
    x_spec: str,
    weight: Sequence[Tensor],
    w_spec: str,
    k: int,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """``block_mm`` by groups: ``[S, K] x [E, N, K] -> [S, N]``; ``weight`` are constants ``[E, ...]``."""
    _check_grouped_block_mm(x_codes, x_scale, x_spec, weight, w_spec, k, offsets, out_dtype)
    xs, ws = QuantSpec.parse(x_spec), QuantSpec.parse(w_spec)
    scales = x_scale.expand(x_codes.shape[0], x_scale.shape[1])
    out = torch.empty((x_codes.shape[0], weight[0].shape[1]), dtype=out_dtype, device=x_codes.device)

    def product(i: int, rows: slice) -> Tensor:
        one = expert_of(weight, i)
        return numerics.block_mm(x_codes[rows], scales[rows], xs, one, ws, k, None, out_dtype)

    return by_group(offsets, out, product)


def _check_grouped_block_mm(
    x_codes: Tensor,
    x_scale: Tensor,
    x_spec: str,
    weight: Sequence[Tensor],
    w_spec: str,
    k: int,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> None:
    _check_rows(x_codes, weight, offsets)
    columns = QuantSpec.parse(x_spec).columns(k)
    require(x_codes.shape[1] == columns, f"x_codes has {x_codes.shape[1]} columns, K = {k} has {columns}")
    require(x_scale.dim() == 2, f"x_scale must be [S, ...] or [1, ...], got {tuple(x_scale.shape)}")
    check_constants(expert_of(weight, 0), QuantSpec.parse(w_spec), k)
    require(out_dtype in FLOATS, f"out_dtype must be one of {FLOATS}, got {out_dtype}")


@grouped_block_mm.register_fake
def _(
    x_codes: Tensor,
    x_scale: Tensor,
    x_spec: str,
    weight: Sequence[Tensor],
    w_spec: str,
    k: int,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    _check_grouped_block_mm(x_codes, x_scale, x_spec, weight, w_spec, k, offsets, out_dtype)
    return torch.empty((x_codes.shape[0], weight[0].shape[1]), dtype=out_dtype, device=x_codes.device)


@torch.library.custom_op("fxquant::grouped_weight_only_mm", mutates_args=())
def grouped_weight_only_mm(x: Tensor, weight: Sequence[Tensor], spec: str, offsets: Tensor) -> Tensor:
    """``weight_only_mm`` by groups: a float ``[S, K] x [E, N, K] -> [S, N]`` in x's dtype."""
    _check_grouped_weight_only(x, weight, spec, offsets)
    parsed, k = QuantSpec.parse(spec), x.shape[1]
    out = torch.empty((x.shape[0], weight[0].shape[1]), dtype=x.dtype, device=x.device)
    return by_group(
        offsets,
        out,
        lambda i, rows: numerics.weight_only_mm(x[rows], expert_of(weight, i), parsed, k, None),
    )


def _check_grouped_weight_only(x: Tensor, weight: Sequence[Tensor], spec: str, offsets: Tensor) -> None:
    _check_rows(x, weight, offsets)
    require(x.dtype in FLOATS, f"x must be one of {FLOATS}, got {x.dtype}")
    check_constants(expert_of(weight, 0), QuantSpec.parse(spec), x.shape[1])


@grouped_weight_only_mm.register_fake
def _(x: Tensor, weight: Sequence[Tensor], spec: str, offsets: Tensor) -> Tensor:
    _check_grouped_weight_only(x, weight, spec, offsets)
    return torch.empty((x.shape[0], weight[0].shape[1]), dtype=x.dtype, device=x.device)


for _op in (grouped_scaled_mm, grouped_block_mm, grouped_weight_only_mm):
    no_gradient(_op)
