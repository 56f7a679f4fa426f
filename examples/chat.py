"""Ask SmolLM2-135M-Instruct a question, with its weights quantized to int8 while they load.

This is what `make demo` runs, and `make demo-npu` on a simulated Ascend NPU. The model is built without
weights, the plan is made from the checkpoint's header alone, and no float copy of a whole quantized
weight outlives its recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fxquant
from examples.smollm2 import checkpoint

QUESTION = "What is the capital of France?"


def mib(count: int) -> str:
    """Return a number of bytes in MiB."""
    return f"{count / 2**20:.1f} MiB"


def build_on_meta(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the model of the checkpoint in `folder`, its parameters on meta."""
    config = AutoConfig.from_pretrained(folder)
    with fxquant.meta_init():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def answer(model: Any, folder: Path, question: str, max_new_tokens: int) -> str:
    """Return the greedy answer of the chat model to `question`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def print_report(model: Any) -> None:
    """Print what loading and running did: bytes, peaks, quantized linears and fallbacks."""
    report = fxquant.report(model)
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.model.layers.modules())
    print(f"float bytes:       {mib(report.float_bytes)}")
    print(f"quantized bytes:   {mib(report.resident_bytes)}")
    for device, peak in report.measured_peak.items():
        print(f"peak while loading on {device}: {mib(peak)}")
    print(f"quantized linears: {report.quantized} of {linears} in the blocks")
    print(f"fallbacks:         {report.fallbacks}")


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, load, answer and report."""
    parser = argparse.ArgumentParser(description="Ask a model that was quantized while it loaded.")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--scheme", default="int8")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--backend", default="cpu", help="cpu, or npu where torch_npu sees one")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", help="such as npu:1; default: the backend's current one")
    args = parser.parse_args(argv)
    folder = checkpoint()
    model = build_on_meta(folder, getattr(torch, args.dtype))
    chosen = {"backend": args.backend, "device": args.device, "scheme": args.scheme}
    print(fxquant.plan(model, folder, **chosen).summary())
    model = fxquant.compile(model, folder, **chosen, progress=True)
    print(f"\n> {args.question}")
    print(f"{answer(model, folder, args.question, args.max_new_tokens)}\n")
    print_report(model)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
