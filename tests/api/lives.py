"""A model with every kind of constant, for tests of what happens to it after it is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fxquant
from fxquant.runtime.quantized_weight import QuantizedWeight
from tests.materialize.faulty_files import constants, same

__all__ = ["IDS", "Net", "addresses", "compiled", "constants", "on_meta", "run", "same", "values", "write"]

IDS = torch.arange(12).view(3, 4)
FORMS = {"embed.weight": "int8+table", "conv": "int8.t", "first.weight": "int8", "last.weight": "int8"}


class Net(nn.Module):
    """A tied table, a linear with bias, a transposed weight, floats and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.first = nn.Linear(64, 96)
        self.conv = nn.Parameter(torch.zeros(96, 64))
        self.shift = nn.Parameter(torch.zeros(64))
        self.last = nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("gain", torch.ones(64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.ones(64), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.relu(self.first(self.embed(ids)))
        x = torch.addmm(self.shift, x.view(-1, 96), self.conv).view(*ids.shape, 64)
        return self.head(self.last(x) * self.gain * self.count * self.mask)


def on_meta() -> Net:
    with fxquant.meta_init():
        return Net().eval()


def values(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(t.shape, generator=generator) / 8 for name, t in Net().state_dict().items()}
    state["count"] = torch.tensor(seed + 1)
    del state["head.weight"]
    return state


def write(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(values(seed), folder / "model.safetensors")
    return folder


def compiled(ckpt: object, model: nn.Module | None = None, **options: Any) -> Net:
    options = {"scheme": "int8", "config": {"head": "int8"}, "example_inputs": (IDS,), **options}
    return fxquant.compile(on_meta() if model is None else model, ckpt, **options)


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS)


def addresses(model: nn.Module) -> list[int]:
    return [part.data_ptr() for part in constants(model)]


def forms(model: nn.Module) -> dict[str, str]:
    named = model.named_parameters()
    return {name: str(tensor.form) for name, tensor in named if isinstance(tensor, QuantizedWeight)}
