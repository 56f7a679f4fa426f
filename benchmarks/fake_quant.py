"""An independent eager model of int8 W8A8 arithmetic: the yardstick for fxquant, written without it.

Weights: per output channel, symmetric, codes in [-127, 127]. Activations: per token (last axis),
symmetric, dynamic. The integer codes are multiplied exactly, both scales and the bias are applied
in float32, and only the result is cast to the activation's dtype.

M: tokens (all leading axes flattened), K: input features, N: output features.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

QMAX = 127.0
# Smallest scale: an all-zero row gives zero codes instead of 0 / 0.
TINY = torch.finfo(torch.float32).tiny


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize every row of `x` (..., K) to integers in [-127, 127].

    Returns the codes as float32 (..., K) and the scales as float32 (..., 1).
    """
    x32 = x.to(torch.float32)
    scale = (x32.abs().amax(dim=-1, keepdim=True) / QMAX).clamp_min(TINY)
    return (x32 / scale).round().clamp(-QMAX, QMAX), scale


class FakeQuantLinear(nn.Module):
    """A linear layer that computes with int8 codes held as float64, in which the products are exact."""

    w_codes_KN: Tensor
    w_scale_N: Tensor
    bias_N: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        """Take the weight (N, K) and the bias (N) of `linear`."""
        super().__init__()
        codes_NK, scale_N1 = quantize_rows(linear.weight.detach())
        # float64 holds every integer up to 2**53: K * 127**2 is far below it for any real K.
        self.register_buffer("w_codes_KN", codes_NK.to(torch.float64).t())
        self.register_buffer("w_scale_N", scale_N1[:, 0])
        bias = linear.bias
        self.register_buffer("bias_N", None if bias is None else bias.detach().to(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., K) to (..., N) in the dtype of `x`."""
        codes, scale = quantize_rows(x)
        total = (codes.to(torch.float64) @ self.w_codes_KN).to(torch.float32)
        out = total * scale * self.w_scale_N
        if self.bias_N is not None:
            out = out + self.bias_N
        return out.to(x.dtype)


def fake_quantize(model: nn.Module, ignore: Iterable[str] = ("lm_head",)) -> int:
    """Replace every `nn.Linear` of `model` in place and return their number.

    A layer stays as it is if one component of its name is in `ignore`.
    """
    kept = set(ignore)
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not kept.intersection(name.split("."))
    ]
    for name, module in chosen:
        model.set_submodule(name, FakeQuantLinear(module))
    return len(chosen)
