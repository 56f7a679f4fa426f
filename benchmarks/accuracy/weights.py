"""What quantized weights stand for, and how far that is from the floats."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.accuracy.models import linears

LOSSLESS = 100.0
"""The most decibels that a layer counts with: what is exact would be infinite."""


class RoundTrip(nn.Module):
    """A linear layer whose weight and inputs went to a peer's format and back; the product is float."""

    def __init__(
        self, linear: nn.Linear, weight: Callable[[Tensor], Tensor], act: Callable[[Tensor], Tensor] | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight(linear.weight.detach()), requires_grad=False)
        self.bias, self.act = linear.bias, act

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., K) to (..., N) in the dtype of `x`."""
        if self.act is not None:
            x = self.act(x.reshape(-1, x.shape[-1])).view(x.shape)
        return F.linear(x, self.weight, self.bias)


def restored(module: nn.Module) -> Tensor | None:
    """The floats that a quantized layer's weight stands for, None if it is float."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if isinstance(module, RoundTrip):
        return weight
    if type(weight) in (Tensor, nn.Parameter):
        return None
    try:
        return weight.dequantize()
    except NotImplementedError:  # some can only multiply
        return F.linear(torch.eye(weight.shape[1], dtype=weight.dtype), weight).t()


@torch.no_grad()
def compare_weights(model: nn.Module, exact: nn.Module) -> dict[str, float]:
    """Mean signal-to-noise ratio in decibels over the quantized layers; how many there are, of how many."""
    ratios = []
    layers = linears(exact)
    for fqn, layer in layers.items():
        found = restored(model.get_submodule(fqn))
        if found is None:
            continue
        signal = layer.weight.double()
        noise = (found.double() - signal).square().sum().item()
        power = signal.square().sum().item()
        ratios.append(min(LOSSLESS, 10 * math.log10(power / noise) if noise else LOSSLESS))
    mean = {"sqnr": sum(ratios) / len(ratios)} if ratios else {}
    return {**mean, "quantized": len(ratios), "layers": len(layers)}
