"""One way to write the calls of a product, for graphs and for calls at once.

The rules in ``npu_products`` speak to a ``Build``: ``InGraph`` inserts nodes, ``AtOnce`` calls the ops on
tensors. So a linear outside of graphs is the same calls as in one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from fxquant.graph import call, value
from fxquant.targets.npu_lowering import Rows, emit

aten = torch.ops.aten

Val = Any
"""A node of a graph, or a tensor."""


class Build(ABC):
    """Makes calls; values are nodes or tensors."""

    @abstractmethod
    def value(self, x: Val) -> Tensor:
        """The tensor that ``x`` is, or its fake."""

    @abstractmethod
    def call(self, op: Any, *args: Any, **kwargs: Any) -> Val:
        """A call of an ATen op."""

    @abstractmethod
    def npu(self, name: str, x: Val, *args: Any, **kwargs: Any) -> Val:
        """A call of ``npu::name``, where the rows of ``x`` may be none."""

    @abstractmethod
    def none(self, x: Val) -> bool:
        """Whether ``x`` is known to be empty."""

    @abstractmethod
    def size(self, x: Val, axis: int) -> Val:
        """A size of ``x``: a number, or a node that gives it."""

    def items(self, made: Val, count: int) -> list[Val]:
        """The parts of a tuple."""
        import operator

        return [self.call(operator.getitem, made, i) for i in range(count)]

    def cast(self, x: Val, dtype: torch.dtype) -> Val:
        """``x`` in ``dtype``."""
        return x if self.value(x).dtype == dtype else self.call(aten.to.dtype, x, dtype)

    def matrix(self, x: Val, k: int) -> Val:
        """``[..., K]`` -> ``[M, K]``."""
        return x if self.value(x).dim() == 2 else self.call(aten.reshape.default, x, [-1, k])

    def rows_of(self, out: Val, like: Val) -> Val:
        """``[M, N]`` -> ``[..., N]`` with the leading dims of ``like``."""
        rank = self.value(like).dim()
        if rank == 2:
            return out
        leading = [self.size(like, axis) for axis in range(rank - 1)]
        return self.call(aten.reshape.default, out, [*leading, self.value(out).shape[-1]])

    def zeros(self, like: Val, last: int, dtype: torch.dtype) -> Val:
        """Zeros ``[..., last]`` with the leading dims of ``like``."""
        leading = [self.size(like, axis) for axis in range(self.value(like).dim() - 1)]
        return self.call(aten.new_zeros.default, like, [*leading, last], dtype=dtype)

    def narrow(self, x: Val, axis: int, start: int, stop: int) -> Val:
        """A range of an axis."""
        whole = start == 0 and stop == self.value(x).shape[axis]
        return x if whole else self.call(aten.slice.Tensor, x, axis, start, stop)


class InGraph(Build):
    """Inserts nodes at the insertion point of a graph."""

    def __init__(self, gm: fx.GraphModule, rows: Rows) -> None:
        self.gm = gm
        self.rows = rows

    def value(self, x: Val) -> Tensor:
        """The value of a node."""
        return cast("Tensor", value(x))

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Val:
        """A node."""
        return call(self.gm, op, args, kwargs)

    def npu(self, name: str, x: Val, *args: Any, **kwargs: Any) -> Val:
        """A node, checked against the table of the chip."""
        return emit(self.gm, self.rows.op(name, x), args, kwargs)

    def none(self, x: Val) -> bool:
        """Known from the shape of its value."""
        return self.rows.none(x)

    def size(self, x: Val, axis: int) -> Val:
        """A number, or a node."""
        size = value(x).shape[axis]
        return size if isinstance(size, int) else call(self.gm, aten.sym_size.int, (x, axis))


class AtOnce(Build):
    """Calls the ops."""

    def value(self, x: Val) -> Tensor:
        """The tensor itself."""
        return cast("Tensor", x)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Val:
        """Its result."""
        return op(*args, **kwargs)

    def npu(self, name: str, x: Val, *args: Any, **kwargs: Any) -> Val:  # noqa: ARG002
        """Its result; there are rows."""
        return getattr(torch.ops.npu, name)(*args, **kwargs)

    def none(self, x: Val) -> bool:
        """It has no elements."""
        return bool(x.numel() == 0)

    def size(self, x: Val, axis: int) -> Val:
        """A number."""
        return x.shape[axis]


def joined(b: Build, outs: Sequence[Val]) -> Val:
    """Results of parts of N, side by side."""
    return outs[0] if len(outs) == 1 else b.call(aten.cat.default, list(outs), -1)
