"""A small model for every scheme, and what its layers must compute, written down independently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxquant
from fxquant.runtime.quantized_weight import QuantizedWeight
from fxquant.scheme import SCHEMES, find_scheme

NAMES = tuple(name for name in SCHEMES if name != "none")
REFINED = ("int4_g64(refine=clip)", "int4_g64_asym(refine=clip)", "int4_g64_asym(refine=hqq)")
ALL = (*NAMES, *REFINED)
ACT_SCALE = 4 / 127

LIMITS = {"int8": 0.04, "int4": 0.3, "e4m3": 0.12, "e2m1": 0.4}
"""Largest relative error of an output against floats, by the codes of the weight."""


class Net(nn.Module):
    """A linear, one with a ragged last group and an odd K, a transposed weight, a fused one that is cut."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(160, 131, dtype=dtype)
        self.ragged = nn.Linear(131, 128, dtype=dtype)
        self.conv = nn.Parameter(torch.zeros(128, 72, dtype=dtype))
        self.fused = nn.Parameter(torch.zeros(2 * 40, 72, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ragged(torch.tanh(self.first(x)))
        x = torch.tanh(x @ self.conv)
        query, key = self.fused.chunk(2)
        return torch.cat([F.linear(x, query), F.linear(x, key)], -1)


X = torch.randn(2, 5, 160, generator=torch.Generator().manual_seed(1))


def state(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: value.shape for name, value in Net().state_dict().items()}
    return {
        name: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)
        for name, shape in shapes.items()
    }


def options_of(scheme: str) -> dict[str, Any]:
    """Options of ``compile``: a static scheme needs a scale for each layer."""
    act = find_scheme(scheme).act
    if act is None or not act.static:
        return {"scheme": scheme}
    entry = {"scheme": scheme, "act_scale": ACT_SCALE}
    return {"scheme": scheme, "config": dict.fromkeys(("first", "ragged", "conv", "fused"), entry)}


def compiled(name: str, source: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    with fxquant.meta_init():
        model = Net(dtype).eval()
    source = state(dtype) if source is None else source
    given = {**options_of(name), "example_inputs": (X.to(dtype),), **options}
    model = fxquant.compile(model, source, **given)
    assert isinstance(model, nn.Module)
    return model


def weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedWeight)}


def run(model: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(x)
    return out


def reference(values: Mapping[str, Tensor], x: Tensor = X) -> Tensor:
    """The float model."""
    model = Net(x.dtype)
    model.load_state_dict({name: value.to(x.dtype) for name, value in values.items()})
    return run(model, x)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
