"""A small Llama through ``generate()``: the same greedy tokens as an eager model with the same arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import fxquant
from reference import Int8Linears

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
    tie_word_embeddings=True,
    eos_token_id=None,
    bos_token_id=1,
    pad_token_id=0,
)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def reference(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=dtype).eval()
    with torch.no_grad():  # sharp logits, so that greedy choices are not decided by rounding
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1 / parameter.shape[1] ** 0.5)
        model.model.embed_tokens.weight.normal_()
    return model


@pytest.fixture
def folder(reference: PreTrainedModel, tmp_path: Path) -> Path:
    reference.save_pretrained(tmp_path)
    return tmp_path


def compiled(folder: Path, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    with fxquant.meta_init():
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=dtype)
    return fxquant.compile(model.eval(), folder, scheme="int8", **options)


def prompts(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch * 100 + length)
    return torch.randint(1, 100, (batch, length), generator=generator)


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_equal_the_same_arithmetic(
    cache: str, reference: PreTrainedModel, folder: Path, dtype: torch.dtype
) -> None:
    model = compiled(folder, dtype)
    arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, **CACHES[cache]}
    for ids in (prompts(1, 9), prompts(3, 5)):
        got = model.generate(ids, **arguments)
        with Int8Linears(skip=(reference.lm_head.weight,)):
            expected = reference.generate(ids, **arguments)
        assert torch.equal(got, expected)
    report = fxquant.report(model)
    assert report.fallbacks == 0
    assert report.eager_linears == 0
    assert not report.unnormalized


def test_logits_are_those_of_the_same_arithmetic(
    reference: PreTrainedModel, folder: Path, dtype: torch.dtype
) -> None:
    model = compiled(folder, dtype)
    ids = prompts(2, 11)
    with torch.no_grad(), Int8Linears(skip=(reference.lm_head.weight,)):
        expected = reference(ids).logits
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32], ids=["float32"], indirect=True)
def test_graphs_do_not_grow_with_shapes(folder: Path, dtype: torch.dtype) -> None:
    """Batch and sequence 1..64: at most 4 graphs over forwards and 8 over generate, for each frame."""
    model = compiled(folder, dtype)
    with torch.no_grad():
        for batch, length in ((1, 1), (1, 64), (64, 1), (3, 9), (16, 33), (64, 64), (2, 2)):
            model(prompts(batch, length))
    assert max(fxquant.report(model).graphs.values()) <= 4
    model = compiled(folder, dtype)
    for batch, length in ((1, 1), (1, 7), (2, 1), (2, 2), (5, 33), (64, 3), (1, 64)):
        model.generate(prompts(batch, length), max_new_tokens=4, do_sample=False)
    report = fxquant.report(model)
    assert max(report.graphs.values()) <= 8
    assert report.fallbacks == 0
    assert report.eager_linears == 0


def test_one_quantization_for_each_shared_input(folder: Path, dtype: torch.dtype) -> None:
    """q, k, v share one, gate and up one, o and down have their own: 4 in each of the 2 layers."""
    with fxquant.meta_init():
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=dtype)
    lowered = fxquant.lower(model.eval(), folder, scheme="int8")
    text = lowered.dump()
    assert text.count("fxquant.quantize_act(") == 8
    assert text.count("scaled_mm(") == 14


def test_lowered_program_computes_the_same(
    reference: PreTrainedModel, folder: Path, dtype: torch.dtype
) -> None:
    ids = prompts(2, 11)
    inputs = {"input_ids": ids, "use_cache": False}
    with fxquant.meta_init():
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=dtype)
    lowered = fxquant.lower(model.eval(), folder, scheme="int8", example_inputs=inputs)
    with pytest.raises(fxquant.errors.NotMaterializedError):
        lowered(**inputs)
    lowered.materialize()
    for given in (ids, prompts(4, 3)):
        with torch.no_grad(), Int8Linears(skip=(reference.lm_head.weight,)):
            expected = reference(given, use_cache=False).logits
        with torch.no_grad():
            assert torch.equal(lowered(input_ids=given, use_cache=False).logits, expected)


def test_encoder_decoder_generates_the_same(tmp_path: Path) -> None:
    """``generate()`` calls the encoder by itself, outside of the compiled call: the same arithmetic."""
    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        vocab_size=64,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(3)
    reference = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3)
    reference.save_pretrained(tmp_path)
    with fxquant.meta_init():
        model = T5ForConditionalGeneration(config).eval()
    model = fxquant.compile(model, tmp_path, scheme="int8")
    ids = prompts(2, 7) % 64
    arguments: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with Int8Linears(skip=(reference.lm_head.weight,)):
        expected = reference.generate(ids, **arguments)
    assert torch.equal(model.generate(ids, **arguments), expected)
    report = fxquant.report(model)
    assert report.fallbacks == 0
    assert report.eager_linears == 2 * 6  # the encoder's
    assert report.quantized == 2 * 6 + 2 * 10
