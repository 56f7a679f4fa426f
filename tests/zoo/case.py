"""What a zoo case is, and the two helpers that every case is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROUTER = "decides which experts are used"
EMBEDDING = "embedding table"
TIED = "embedding table, tied to the head"
HEAD = "language model head"
CONV = "convolution"
TABLE = "added or gathered, never multiplied"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooCase:
    """One architecture at toy size, with what a quantizing load of it has to find.

    ``build()`` gives the model from its config: float32, eval mode, the same values each time;
    it works with parameters on meta too. ``inputs()`` gives the keyword arguments of ``forward``
    (batch >= 2, so that every dimension may be dynamic). ``output(result)`` takes the tensor to
    compare. ``linears`` counts the distinct weights of linear-like matmuls that int8 should
    quantize; the experts of a layer are one. ``floats`` names every other parameter of rank >= 2 by a
    glob, with the reason. ``whole`` is False where the model does not export whole.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    linears: int
    output: Callable[[Any], Tensor]
    floats: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True


@torch.no_grad()
def run(case: ZooCase, model: nn.Module) -> Tensor:
    """The output of ``model`` for the inputs of ``case``."""
    return case.output(model(**case.inputs()))


def from_config(cls: type[nn.Module], make_config: Callable[[], Any]) -> Callable[[], nn.Module]:
    """A ``build`` for a transformers model: ``cls(make_config())``, seeded, in eval mode."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return cls(make_config()).eval()

    return build


def from_kwargs(cls: type[nn.Module], **kwargs: Any) -> Callable[[], nn.Module]:
    """A ``build`` for a diffusers model: ``cls(**kwargs)``, seeded, in eval mode."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return cls(**kwargs).eval()

    return build


def ids(shape: tuple[int, ...], high: int, low: int = 3, seed: int = 0) -> Tensor:
    """Random token ids in ``[low, high)``; the special ids of the configs lie below ``low``."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 0) -> Tensor:
    """A standard normal float32 tensor of ``shape``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def logits(result: Any) -> Tensor:
    """The logits of a transformers output."""
    out: Tensor = result.logits
    return out


def first(result: Any) -> Tensor:
    """The first element of a tuple output (diffusers with ``return_dict=False``)."""
    out: Tensor = result[0]
    return out
