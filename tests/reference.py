"""An independent eager model of the int8 arithmetic, for comparison: plain torch, nothing of fxquant."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric codes of the last axis, as float64 integers, and their float32 scale."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (x / scale).round().clamp(-127, 127).double(), scale


def int8_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` as W8A8: exact integer sums, both scales and the bias in float32, then the cast."""
    (xq, xs), (wq, ws) = codes(x), codes(w)
    out = (xq @ wq.t()).float() * xs * ws.squeeze(-1)
    return (out if bias is None else out + bias.float()).to(x.dtype)


class Int8Linears(TorchFunctionMode):
    """Within it every ``F.linear`` computes as W8A8, except with the weights in ``skip``."""

    def __init__(self, skip: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self.skip = {id(weight) for weight in skip}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and id(args[1]) not in self.skip:
            return int8_linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def error(got: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-300))
