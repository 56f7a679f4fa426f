"""What a quantized weight does outside of compiled graphs with an axis of experts in front.

One expert, or one for each of several indices, is a quantized weight again, and so is a transposed view;
products run the ops that compiled graphs call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxquant.passes.weight_uses import GROUPED
from fxquant.runtime.eager import quantized_linear
from fxquant.runtime.state import is_traced

if TYPE_CHECKING:
    from fxquant.runtime.quantized_weight import QuantizedWeight

aten = torch.ops.aten
FLOATS_INSTEAD = object()
"""The answer of a handler that leaves a call to float values."""


def select(func: Any, weight: QuantizedWeight, dim: int = 0, index: int = 0) -> Any:
    """One expert."""
    if not _is_experts(weight) or dim % 3 != 0:
        return FLOATS_INSTEAD
    return weight.over(tuple(part[index] for part in weight.constants), weight.form)


def index(func: Any, weight: QuantizedWeight, indices: Any) -> Any:
    """An expert for each index."""
    (ids, *others) = indices
    if not _is_experts(weight) or ids is None or ids.dim() > 1 or any(other is not None for other in others):
        return FLOATS_INSTEAD
    return weight.over(tuple(part[ids] for part in weight.constants), weight.form)


def unbind(func: Any, weight: QuantizedWeight, dim: int = 0) -> Any:
    """Each expert."""
    if not _is_experts(weight) or dim % 3 != 0:
        return FLOATS_INSTEAD
    return [select(func, weight, 0, i) for i in range(weight.shape[0])]


def transpose(func: Any, weight: QuantizedWeight, first: int = 0, second: int = 1) -> Any:
    """The view that claims the two axes of a matrix in the other order."""
    rank = weight.dim()
    form = weight.form
    if {first % rank, second % rank} != {rank - 2, rank - 1} or form.table or form.kernel or form.host:
        return FLOATS_INSTEAD
    return weight.over(weight.constants, replace(form, transposed=not form.transposed))


def product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``mm``, ``bmm`` or a grouped product with a quantized weight on one side."""
    x, weight, *more = args
    if func._schema.name in GROUPED:
        more = [*more, *kwargs.values()]
        plain = x.dim() == 2 and weight.dim() == 3 and more[0] is not None
        if not plain or not _fits(x, weight) or any(given is not None for given in more[1:]):
            return FLOATS_INSTEAD
        return _run(x, weight, more[0])
    if _is_weight(x):  # w @ x is the transposed product
        return FLOATS_INSTEAD if _is_weight(weight) else _turned(func, x, weight)
    if not _fits(x, weight):
        return FLOATS_INSTEAD
    if weight.dim() == 2:
        return quantized_linear(x, weight, None, _counted(weight).kernels)
    batches, rows, k = x.shape
    offsets = torch.arange(1, batches + 1, device=x.device) * rows
    return _run(x.reshape(batches * rows, k), weight, offsets).view(batches, rows, weight.shape[2])


def _turned(func: Any, weight: QuantizedWeight, x: Tensor) -> Any:
    out = product(func, (x.mT, transpose(func, weight, -2, -1)), {})
    return out if out is FLOATS_INSTEAD else out.mT


def _is_experts(weight: QuantizedWeight) -> bool:
    return weight.dim() == 3 and not weight.form.kernel and not weight.form.host


def _is_weight(value: Any) -> bool:
    return hasattr(value, "form")


def _fits(x: Any, weight: Any) -> bool:
    """Whether ``x @ weight`` contracts the axis along which the codes have their scales.

    A tracer that tries a product for its shape is served by floats: kernels test themselves on values.
    """
    if not _is_weight(weight) or weight.form.host or is_traced(weight.constants[0]):
        return False
    return bool(weight.form.transposed) and x.dtype == weight.dtype and not weight.form.given


def _run(x: Tensor, weight: QuantizedWeight, offsets: Tensor) -> Tensor:
    return quantized_linear(x, weight, offsets, _counted(weight).kernels, grouped=True)


def _counted(weight: QuantizedWeight) -> Any:
    weight.state.eager_linears += 1
    return weight.state
