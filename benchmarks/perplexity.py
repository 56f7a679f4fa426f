"""Perplexity of SmolLM2-135M-Instruct: bf16, an independent fake-quantized model, and fxquant int8.

The text is `pydoc_data.topics` of the running Python (topics sorted by key, joined by a blank
line), which every machine has. It differs between Python versions, so only the ratios between the
rows compare across machines; the sha256 of the text is printed with them.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.fake_quant import fake_quantize
from examples.smollm2 import checkpoint

TOKENS = 16_384
CONTEXT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured model: its name, perplexity, and the seconds the forwards took."""

    name: str
    perplexity: float
    seconds: float


def corpus() -> str:
    """Return the benchmark's text."""
    table = topics.topics
    return "\n\n".join(table[key] for key in sorted(table))


def sha256(text: str) -> str:
    """Return the hex digest of `text` in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def encode(folder: Path, text: str, tokens: int) -> Tensor:
    """Return the first `tokens` token ids of `text`, int64 (tokens,), without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # A tokenizer warns about texts longer than its model; the windows below are short.
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens, {tokens} were asked for: ask for fewer")
    return torch.tensor(ids[:tokens])


@torch.no_grad()
def perplexity(model: nn.Module, ids: Tensor, context: int) -> float:
    """Return exp(mean negative log likelihood) over all predicted tokens.

    The windows are `context` tokens long and do not overlap; the first token of each is given, not
    predicted. A shorter last window counts too.
    """
    total, count = 0.0, 0
    for window in torch.split(ids, context):
        if window.numel() < 2:
            continue
        logits = model(input_ids=window[None], use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1].float(), window[1:], reduction="sum")
        total += loss.item()
        count += window.numel() - 1
    return math.exp(total / count)


def build_float(folder: Path) -> nn.Module:
    """Return the eager bf16 model."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval()


def build_fake_quant(folder: Path) -> nn.Module:
    """Return the eager model whose block linears compute in fake-quantized int8; the head is bf16."""
    model = build_float(folder)
    fake_quantize(model)
    return model


def build_empty(folder: Path) -> nn.Module:
    """Return the bf16 model with fresh weights; on meta under `fxquant.meta_init()`."""
    config = AutoConfig.from_pretrained(folder)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def build_fxquant(folder: Path) -> nn.Module:
    """Return the model that fxquant quantized to int8 while it loaded."""
    import fxquant

    with fxquant.meta_init():
        model = build_empty(folder)
    compiled: nn.Module = fxquant.compile(model, folder, backend="cpu", scheme="int8")
    return compiled


MODELS: dict[str, Callable[[Path], nn.Module]] = {
    "bf16": build_float,
    "fake": build_fake_quant,
    "fxquant": build_fxquant,
}
TITLES = {"bf16": "bf16 eager", "fake": "int8 fake-quantized eager", "fxquant": "int8 fxquant"}


def measure(names: Sequence[str], folder: Path, ids: Tensor, context: int) -> dict[str, Row]:
    """Measure the models in `names`, one at a time so that only one is in memory."""
    rows = {}
    for name in names:
        model = MODELS[name](folder)
        start = time.perf_counter()
        value = perplexity(model, ids, context)
        rows[name] = Row(name=TITLES[name], perplexity=value, seconds=time.perf_counter() - start)
    return rows


def table(rows: dict[str, Row]) -> str:
    """Return a markdown table with the ratio of each row to bf16 and to the fake-quantized model."""

    def against(row: Row, base: str) -> str:
        return f"{row.perplexity / rows[base].perplexity:.4f}" if base in rows else "-"

    lines = ["| model | perplexity | / bf16 | / fake-quantized | seconds |", "|---|---|---|---|---|"]
    for row in rows.values():
        cells = (f"{row.perplexity:.4f}", against(row, "bf16"), against(row, "fake"), f"{row.seconds:.0f}")
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, then print what was measured on what, and the table."""
    parser = argparse.ArgumentParser(
        description="Perplexity of SmolLM2: bf16, fake-quantized int8, fxquant int8."
    )
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    args = parser.parse_args(argv)
    folder, text = checkpoint(), corpus()
    ids = encode(folder, text, args.tokens)
    rows = measure(args.models, folder, ids, args.context)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"text: pydoc_data.topics, sha256 {sha256(text)}")
    print(f"{ids.numel()} tokens, context {args.context}\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
