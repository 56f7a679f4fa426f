"""The two models that schemes are measured on, and the texts, which all processes share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from benchmarks.perplexity import build_empty, build_float, corpus, encode, perplexity, sha256
from benchmarks.sentence_cosine import cosines
from examples import sentence_embeddings, smollm2
from examples.sentence_embeddings import SENTENCES, embed, load_float

HEADS = ("lm_head",)
"""Modules of these names stay float everywhere."""
PIECES, PIECE = 16, 300
"""How many pieces of the corpus MiniLM is calibrated on, and their length in characters."""


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that every scheme quantizes, by FQN."""
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if isinstance(module, nn.Linear) and fqn.rpartition(".")[2] not in HEADS
    }


class Subject(Protocol):
    """A model that is measured."""

    name: ClassVar[str]

    def load(self) -> nn.Module:
        """The float model."""

    def empty(self) -> nn.Module:
        """The model without weights; called under `fxquant.meta_init()`."""

    def where(self) -> Path:
        """The folder of the checkpoint."""

    def calibrate(self, model: nn.Module) -> None:
        """Run the texts from which scales of activations are taken."""

    def score(self, model: nn.Module, exact: nn.Module) -> dict[str, float]:
        """Numbers of `model`; `exact` is the float model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Smollm2:
    """SmolLM2-135M-Instruct in bf16: perplexity."""

    name: ClassVar[str] = "smollm2"
    folder: str
    ids: Sequence[int]
    context: int
    calibration: Sequence[Sequence[int]]

    def load(self) -> nn.Module:
        """The float model."""
        return build_float(self.where())

    def empty(self) -> nn.Module:
        """The model without weights."""
        return build_empty(self.where())

    def where(self) -> Path:
        """The folder of the checkpoint."""
        return Path(self.folder)

    def calibrate(self, model: nn.Module) -> None:
        """Run windows of the text behind the measured ones."""
        for window in self.calibration:
            model(input_ids=torch.tensor(window)[None], use_cache=False)

    def score(self, model: nn.Module, exact: nn.Module) -> dict[str, float]:
        """Perplexity."""
        del exact
        return {"perplexity": perplexity(model, torch.tensor(self.ids), self.context)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniLM:
    """all-MiniLM-L6-v2 in float32: cosine between its sentence embeddings and the float model's."""

    name: ClassVar[str] = "minilm"
    folder: str
    sentences: Sequence[str]
    calibration: Sequence[str]

    def load(self) -> nn.Module:
        """The float model."""
        return load_float(self.where())

    def empty(self) -> nn.Module:
        """The model without weights."""
        config = AutoConfig.from_pretrained(self.folder)
        model: nn.Module = AutoModel.from_config(config, dtype=torch.float32)
        return model.eval()

    def where(self) -> Path:
        """The folder of the checkpoint."""
        return Path(self.folder)

    def calibrate(self, model: nn.Module) -> None:
        """Embed pieces of the corpus."""
        embed(model, self.where(), self.calibration)

    def score(self, model: nn.Module, exact: nn.Module) -> dict[str, float]:
        """Mean and worst cosine."""
        expected = embed(exact, self.where(), self.sentences)
        cosine = cosines(model, self.where(), self.sentences, expected)
        return {"mean": cosine.mean().item(), "minimum": cosine.min().item()}


def write_texts(target: Path, *, tokens: int, context: int, windows: int, sentences: int) -> str:
    """Write what the models read to `target`, a JSON file; returns the text's sha256."""
    folder, text = smollm2.checkpoint(), corpus()
    ids = encode(folder, text, tokens + windows * context).tolist()
    behind = ids[tokens:]
    step = len(text) // PIECES
    data: dict[str, Any] = {
        Smollm2.name: {
            "folder": str(folder),
            "ids": ids[:tokens],
            "context": context,
            "calibration": [behind[i : i + context] for i in range(0, len(behind), context)],
        },
        MiniLM.name: {
            "folder": str(sentence_embeddings.model_folder()),
            "sentences": SENTENCES[:sentences],
            "calibration": [text[i * step : i * step + PIECE] for i in range(PIECES)],
        },
    }
    target.write_text(json.dumps(data))
    return sha256(text)


def read_subjects(source: Path) -> tuple[Subject, ...]:
    """Both models, as `write_texts` described them."""
    data: dict[str, Any] = json.loads(source.read_text())
    return (Smollm2(**data[Smollm2.name]), MiniLM(**data[MiniLM.name]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What a layer is given over the calibration texts: the largest magnitude, and how many axes it has."""

    absmax: float
    axes: int

    @property
    def scale(self) -> float:
        """The scale of its int8 codes."""
        return self.absmax / 127


@torch.no_grad()
def layer_inputs(subject: Subject, model: nn.Module) -> dict[str, Input]:
    """What each layer of the float model is given over the calibration texts, by FQN."""
    found: dict[str, Input] = {}

    def watch(fqn: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            absmax = inputs[0].abs().max().item()
            before = found.get(fqn)
            largest = absmax if before is None else max(absmax, before.absmax)
            found[fqn] = Input(absmax=largest, axes=inputs[0].dim())

        return hook

    handles = [module.register_forward_pre_hook(watch(fqn)) for fqn, module in linears(model).items()]
    try:
        subject.calibrate(model)
    finally:
        for handle in handles:
            handle.remove()
    return found
