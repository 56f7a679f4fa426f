"""A float weight that stays in main memory: it claims to be on the device, and is copied for each call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fxquant import ops as _ops  # noqa: F401 - registers the dialect
from fxquant.form import HOST
from fxquant.runtime.quantized_weight import QuantizedWeight
from fxquant.runtime.state import RunState


class HostWeight(QuantizedWeight):
    """``value`` in main memory in the place of a weight on ``place``. No op ever holds more than one copy.

    Moving it to another device changes only what is claimed.
    """

    value: Tensor

    def __new__(
        cls,
        value: Tensor,
        place: torch.device,
        state: RunState | None = None,  # noqa: ARG004 - for __init__
    ) -> Self:
        """A wrapper of the weight's own shape and strides."""
        return Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=place, requires_grad=False
        )

    def __init__(self, value: Tensor, place: torch.device, state: RunState | None = None) -> None:
        super().__init__((value,), HOST, value.dtype, state)
        self.place = place

    def dequantize(self) -> Tensor:
        """The weight on its device."""
        fetched: Tensor = torch.ops.fxquant.fetch(self.value, str(self.place))
        return fetched

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["value"], str(self.place)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> HostWeight:
        return HostWeight(inner["value"], torch.device(context))

    def like(self, constants: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> HostWeight:
        """The same over another value, in ``dtype``; it stays in main memory."""
        (value,) = constants
        place = value.device if value.device.type != "cpu" else self.place
        return HostWeight(value.to(dtype=dtype, device="cpu"), place, self.state)

    def moved(self, place: torch.device) -> HostWeight:
        """The same value, claimed to be on ``place``."""
        return HostWeight(self.value, place, self.state)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HostWeight({list(self.shape)}, {self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        import copy

        if id(self) not in memo:
            state = copy.deepcopy(self.state, memo)
            new: Tensor = HostWeight(self.value.detach().clone(), self.place, state)
            memo[id(self)] = nn.Parameter(new, requires_grad=False) if isinstance(self, nn.Parameter) else new
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return rebuild_host_weight, (self.value, str(self.place), isinstance(self, nn.Parameter))


def rebuild_host_weight(value: Tensor, place: str, is_parameter: bool) -> Tensor:
    """Undo ``HostWeight.__reduce_ex__``."""
    weight: Tensor = HostWeight(value, torch.device(place))
    return nn.Parameter(weight, requires_grad=False) if is_parameter else weight


torch.serialization.add_safe_globals([rebuild_host_weight])
