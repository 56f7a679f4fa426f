"""Quantized experts by hand, in plain torch: the eager loop of transformers, with codes made per expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reference import codes, int8_linear

MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


def is_router(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("topkrouter")


def is_quantized(model: nn.Module, fqn: str, p: Tensor) -> bool:
    """Whether a weight of a zoo's language model is quantized: experts and linears, not what decides."""
    owner = model.get_submodule(fqn.rpartition(".")[0])
    linear = isinstance(owner, nn.Linear) and p.dim() == 2 and not fqn.startswith("lm_head")
    return linear or (p.dim() == 3 and type(owner).__name__.endswith("Experts"))


def quantized_names(model: nn.Module) -> set[str]:
    return {fqn for fqn, p in model.named_parameters() if is_quantized(model, fqn, p)}


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Weight-only int8: each expert, and each of its output rows, has a scale of its own."""
    for fqn, p in model.named_parameters():
        if is_quantized(model, fqn, p):
            turned = p.dim() == 3 and model.get_submodule(fqn.rpartition(".")[0]).is_transposed
            rows = p.mT if turned else p
            quantized, scale = codes(rows)
            values = (quantized.float() * scale).to(p.dtype)
            p.copy_(values.mT if turned else values)


class ByHand(TorchFunctionMode):
    """Within it products with the weights of ``names`` compute as W8A8, also with one expert's."""

    def __init__(self, model: nn.Module, names: set[str]) -> None:
        super().__init__()
        self.known = {model.get_parameter(name).untyped_storage().data_ptr() for name in names}
        self.products = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and self.knows(args[1]):
            self.products += 1
            return int8_linear(*args, **(kwargs or {}))
        if func in MATMULS and self.knows(args[1]):
            self.products += 1
            return int8_linear(args[0], args[1].mT)
        return func(*args, **(kwargs or {}))

    def knows(self, weight: Any) -> bool:
        return isinstance(weight, Tensor) and weight.untyped_storage().data_ptr() in self.known
