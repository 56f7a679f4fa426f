"""Float values that stand for a part of a quantized weight: they can be read, not written to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import Self

from fxquant.errors import QuantizedWeightError
from fxquant.passes.aliasing import written_arguments


def check_not_written(func: Any, args: Any, kwargs: Any, kinds: tuple[type, ...]) -> None:
    """Raise if ``func`` writes to an argument that is one of ``kinds``."""
    for given in written_arguments(func, args, kwargs):
        if any(isinstance(leaf, kinds) for leaf in pytree.tree_leaves(given)):
            raise QuantizedWeightError(
                f"{func} would write to float values that a quantized weight does not hold, and the write "
                "would be lost. Use weight.copy_(values) with the whole of it, which quantizes them."
            )


class ReadOnlyFloats(Tensor):
    """What a view op gives of a quantized weight: its float values, which cannot be written to."""

    def __new__(cls, values: Tensor) -> Self:
        """A wrapper of the same shape and strides; ``values`` is what it reads."""
        return Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor) -> None:
        self.floats = values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.floats)

    def numpy(self, **options: Any) -> Any:
        """The values as a numpy array."""
        return self.floats.numpy(**options)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check_not_written(func, args, kwargs, (ReadOnlyFloats,))
        args, kwargs = pytree.tree_map_only(ReadOnlyFloats, lambda leaf: leaf.floats, (args, kwargs))
        return frozen(func, func(*args, **kwargs))


def frozen(func: Any, result: Any) -> Any:
    """The result of a view op as values that cannot be written to; other results as they are."""
    if not any(returned.alias_info is not None for returned in func._schema.returns):
        return result
    return pytree.tree_map_only(Tensor, ReadOnlyFloats, result)
