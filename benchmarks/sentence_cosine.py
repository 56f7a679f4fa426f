"""Cosine between int8 and float sentence embeddings (all-MiniLM-L6-v2, 20 fixed sentences)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.fake_quant import fake_quantize
from examples.sentence_embeddings import SENTENCES, embed, load_float, load_quantized, model_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured model: its name, and the mean and minimum cosine to the float embeddings."""

    name: str
    mean: float
    minimum: float


def build_fake_quant(folder: Path) -> nn.Module:
    """Return the eager model whose linears compute in fake-quantized int8."""
    model = load_float(folder)
    fake_quantize(model, ignore=())
    return model


MODELS: dict[str, Callable[[Path], nn.Module]] = {"fake": build_fake_quant, "fxquant": load_quantized}
TITLES = {"fake": "int8 fake-quantized eager", "fxquant": "int8 fxquant"}


def cosines(model: nn.Module, folder: Path, sentences: Sequence[str], expected: Tensor) -> Tensor:
    """Return the cosine of each sentence's embedding to `expected`, float32 (sentences,)."""
    return (embed(model, folder, sentences) * expected).sum(-1)


def measure(names: Sequence[str], folder: Path, sentences: Sequence[str]) -> list[Row]:
    """Measure the models in `names` against the float model."""
    expected = embed(load_float(folder), folder, sentences)
    rows = []
    for name in names:
        cosine = cosines(MODELS[name](folder), folder, sentences, expected)
        rows.append(Row(name=TITLES[name], mean=cosine.mean().item(), minimum=cosine.min().item()))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return a markdown table."""
    lines = ["| model | mean cosine | minimum cosine |", "|---|---|---|"]
    lines += [f"| {row.name} | {row.mean:.5f} | {row.minimum:.5f} |" for row in rows]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Cosine between int8 and float MiniLM sentence embeddings.")
    parser.add_argument("--sentences", type=int, default=len(SENTENCES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    args = parser.parse_args(argv)
    rows = measure(args.models, model_folder(), SENTENCES[: args.sentences])
    print(f"torch {torch.__version__}, {args.sentences} sentences\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
