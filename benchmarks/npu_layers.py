"""Per-layer error of int8 on the (simulated) NPU against the float model, for each dtype.

    python -m fxquant.testing.npu_sim -- python -m benchmarks.npu_layers

SmolLM2-135M-Instruct on the prompt of the demo. Errors are relative, ``|a - b| / |b|``, of the hidden
state after each block, against the float32 model.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fxquant
from examples.chat import QUESTION
from examples.smollm2 import checkpoint


def prompt(folder: Path) -> dict[str, Tensor]:
    """The demo's question as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": QUESTION}]
    return dict(
        tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    )


def states(model: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The hidden states after each block, and the logits of the last token."""
    given = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    with torch.no_grad():
        out = model(**given, use_cache=False, output_hidden_states=True)
    return [*(h.float().cpu() for h in out.hidden_states[1:]), out.logits[:, -1].float().cpu()]


def quantized(folder: Path, dtype: torch.dtype, backend: str) -> Any:
    """SmolLM2 on the backend."""
    with fxquant.meta_init():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    return fxquant.compile(
        model.eval(), folder, backend=backend, scheme="int8", progress=False, dynamic=False
    )


def error(a: Tensor, b: Tensor) -> float:
    """``|a - b| / |b|``."""
    return float((a - b).norm() / b.norm())


def measure(folder: Path, backend: str) -> tuple[list[list[float]], list[str]]:
    """Rows of errors (blocks, then logits) and the likeliest first token of each model."""
    inputs, tokenizer = prompt(folder), AutoTokenizer.from_pretrained(folder)
    columns, tokens = [], []
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = states(exact, inputs)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        floats = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for model in (floats, quantized(folder, dtype, backend)):
            got = states(model, inputs)
            columns.append([error(a, b) for a, b in zip(got, expected, strict=True)])
            tokens.append(tokenizer.decode(int(got[-1].argmax())))
    return [list(row) for row in zip(*columns, strict=True)], tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Per-layer error of int8 on an NPU.")
    parser.add_argument("--backend", default="npu", help="cpu: what the same scheme gives there")
    args = parser.parse_args(argv)
    rows, tokens = measure(checkpoint(), args.backend)
    heads = [f"{kind} {dtype}" for dtype in ("fp16", "bf16", "fp32") for kind in ("float", "int8")]
    print("| after block | " + " | ".join(heads) + " |")
    print("|---" * (len(heads) + 1) + "|")
    for i, row in enumerate(rows):
        name = "logits" if i == len(rows) - 1 else str(i + 1)
        print(f"| {name} | " + " | ".join(f"{value:.4f}" for value in row) + " |")
    print("| first token | " + " | ".join(tokens) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
