"""SmolLM2 on the simulated NPU: its answer, the bits of its logits, and which ops run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fxquant

Counts = list["Counter[str]"]


def counted(counts: Counts) -> Callable[..., Any]:
    """An inner compiler that notes the ops of each rewritten graph and runs it as it is."""

    def inner(gm: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        counts.append(Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function"))
        return gm.forward

    return inner


class Reference(nn.Module):
    """int8 as the NPU computes it, in plain torch and on the CPU, written without fxquant.

    ``dtype`` is what the activation is cast to before it is quantized, and what the product has.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        self.codes = (weight / scale).round().double().t().contiguous()
        self.scale, self.bias, self.dtype = scale.squeeze(1), linear.bias, dtype

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(self.dtype).float().flatten(0, -2)
        token = rows.abs().amax(-1) / 127
        sums = (rows / token[:, None]).round().double() @ self.codes  # exact: below 2^53
        out = sums.float() * self.scale * token[:, None]
        out = out if self.bias is None else out + self.bias.float()
        return out.to(self.dtype).to(x.dtype).unflatten(0, x.shape[:-1])


def reference(folder: Path, dtype: torch.dtype, compute: torch.dtype, layers: int = 30) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, num_hidden_layers=layers).eval()
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Reference(child, compute))
    return model


def smollm2(folder: Path, dtype: torch.dtype, layers: int = 30, **options: Any) -> nn.Module:
    config = AutoConfig.from_pretrained(folder, num_hidden_layers=layers)
    with fxquant.meta_init():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return fxquant.compile(model, folder, backend="npu", scheme="int8", progress=False, **options)


def question(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    given = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return tokenizer, dict(given)


def check_ops(counts: Counter[str], layers: int = 30) -> None:
    """Every linear of the blocks is one NPU matmul; q, k, v share an activation, and gate, up."""
    assert counts["npu.npu_quant_matmul.default"] == 7 * layers
    assert counts["npu.npu_dynamic_quant.default"] == 4 * layers
    assert counts["aten.linear.default"] == 1  # the head, tied to the embedding
    assert not [name for name in counts if name.startswith("fxquant")]


def test_smollm2_fp16_answers_paris_and_its_logits_are_those_of_the_reference(npu, smollm2_folder):
    counts: Counts = []
    model = smollm2(smollm2_folder, torch.float16, inner=counted(counts))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"npu"}
    tokenizer, inputs = question(smollm2_folder)
    given = {name: tensor.to(npu) for name, tensor in inputs.items()}
    how = {"max_new_tokens": 7, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(**given, **how)
    text = tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in text
    assert len(counts) == 2  # the prompt, then one token with the cache
    for graph in counts:
        check_ops(graph)
    expected = reference(smollm2_folder, torch.float16, torch.float16).generate(**inputs, **how)
    assert len(out.logits) == len(expected.logits) == 7
    for ours, theirs in zip(out.logits, expected.logits, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    report = fxquant.report(model)
    assert (report.quantized, report.fallbacks, report.eager_linears) == (210, 0, 0)
    assert not report.unnormalized


@pytest.mark.parametrize(
    ("dtype", "compute"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)], ids=str
)
def test_six_blocks_in_other_dtypes_give_the_logits_of_the_reference(npu, smollm2_folder, dtype, compute):
    counts: Counts = []
    model = smollm2(smollm2_folder, dtype, 6, inner=counted(counts), dynamic=False)
    _, inputs = question(smollm2_folder)
    with torch.no_grad():
        logits = model(**{name: tensor.to(npu) for name, tensor in inputs.items()}, use_cache=False).logits
        expected = reference(smollm2_folder, dtype, compute, 6)(**inputs, use_cache=False).logits
    assert logits.dtype == dtype
    assert torch.equal(logits.cpu(), expected)
    (graph,) = counts
    check_ops(graph, 6)
    row = model.fxquant_plan.weight("model.layers.0.mlp.up_proj")
    assert ("computed in bfloat16" in row.reason) == (dtype == torch.float32)
