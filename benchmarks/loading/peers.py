"""The peers, each as its documentation says to load on a CPU with little memory.

They run under their own Python (`--peers-python`), which need not have fxquant. Their packages are
imported by name: the development environment does not have them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.loading.files import data_files
from benchmarks.loading.models import MODELS
from benchmarks.loading.subject import Prepared

_LLAMA = ("transformers", "transformers.models.llama.modeling_llama", "transformers.integrations")


def is_quantized(module: nn.Module, fqn: str) -> bool:
    """The linears that every case quantizes: all but heads."""
    return isinstance(module, nn.Linear) and "head" not in fqn.rpartition(".")[2]


def quanto(name: str, folder: Path) -> Prepared:
    """optimum-quanto: mapped tensors assigned to a module on meta, quantize, freeze."""
    library = _imported(*_LLAMA, "optimum.quanto")

    def load() -> nn.Module:
        model = _mapped(name, folder)
        library.quantize(model, weights=library.qint8, exclude=["*head*"])
        library.freeze(model)
        return model

    return Prepared(load=load)


def torchao_mmap(name: str, folder: Path) -> Prepared:
    """torchao: mapped tensors assigned to a module on meta, `quantize_`."""
    library = _imported(*_LLAMA, "torchao.quantization")

    def load() -> nn.Module:
        model = _mapped(name, folder)
        library.quantize_(model, library.Int8DynamicActivationInt8WeightConfig(), is_quantized)
        return model

    return Prepared(load=load)


def transformers_torchao(name: str, folder: Path) -> Prepared:
    """transformers: `from_pretrained` with a torchao config."""
    library, transformers = _imported(*_LLAMA, "torchao.quantization"), import_module("transformers")
    del name

    def load() -> nn.Module:
        config = transformers.TorchAoConfig(library.Int8DynamicActivationInt8WeightConfig())
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map="cpu", quantization_config=config
        )
        return model

    return Prepared(load=load)


def _imported(*names: str) -> Any:
    """Import every module, before the clock runs; the last one is returned."""
    return [import_module(name) for name in names][-1]


def _mapped(name: str, folder: Path) -> nn.Module:
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = MODELS[name].build()
    state: dict[str, torch.Tensor] = {}
    for file in data_files(folder):
        state |= load_file(file)
    model.load_state_dict(state, assign=True, strict=True)
    for module in model.modules():  # rotary frequencies are not in the checkpoint
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, torch.Tensor) and frequencies.is_meta:
            fresh = type(module)(module.config)
            module.inv_freq, module.original_inv_freq = fresh.inv_freq, fresh.inv_freq
    return model
