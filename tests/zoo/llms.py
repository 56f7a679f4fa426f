"""Decoder-only language models: two layers, hidden size 64, the quirks of each family kept."""

from __future__ import annotations

from typing import Any

import transformers as tf

from zoo.case import CONV, EMBEDDING, HEAD, ROUTER, TABLE, TIED, ZooCase, from_config, ids, logits

VOCAB = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA: dict[str, Any] = SMALL | {
    "intermediate_size": 160,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HEADED = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
MOE = HEADED | {"model.layers.*.mlp.gate.weight": ROUTER}
GPT_OSS = HEADED | {
    "model.layers.*.mlp.router.weight": ROUTER,
    "model.layers.*.mlp.experts.*_bias": TABLE,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def inputs() -> dict[str, Any]:
    """Two prompts of nine tokens: longer than the sliding windows of the configs."""
    return {"input_ids": ids((2, 9), VOCAB), "use_cache": False}


def llama() -> tf.LlamaConfig:
    """Grouped queries and the scaled rotary embedding of Llama 3.1."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    return tf.LlamaConfig(**GQA, rope_parameters=rope)


def qwen2() -> tf.Qwen2Config:
    """Biases on q, k, v only; the sizes up to 1.5B tie the head."""
    return tf.Qwen2Config(**GQA, tie_word_embeddings=True)


def qwen3() -> tf.Qwen3Config:
    """A norm on queries and keys; heads whose sizes do not add up to the hidden size."""
    return tf.Qwen3Config(**GQA, head_dim=32)


def qwen3_moe() -> tf.Qwen3MoeConfig:
    """128 experts in the original, 8 here; stored as one key per expert and projection."""
    return tf.Qwen3MoeConfig(
        **GQA,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )


def mixtral() -> tf.MixtralConfig:
    """Stored under ``block_sparse_moe.experts.E.w1``: other names than in the module tree."""
    return tf.MixtralConfig(**GQA, num_local_experts=4, num_experts_per_tok=2)


def deepseek_v3() -> tf.DeepseekV3Config:
    """Latent attention, one dense layer, shared experts, grouped routing, a stored routing bias."""
    sizes = GQA | {"num_key_value_heads": 4}
    return tf.DeepseekV3Config(
        **sizes,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    )


def gemma3() -> tf.Gemma3TextConfig:
    """Sliding and full attention with different rotary bases, scaled tied embedding, (1 + w) norms."""
    return tf.Gemma3TextConfig(
        **GQA,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=True,
    )


def phi3() -> tf.Phi3Config:
    """Fused qkv and gate-up projections, a sliding window."""
    return tf.Phi3Config(**GQA, sliding_window=4)


def gpt_oss() -> tf.GptOssConfig:
    """Attention sinks, alternating windows, experts stored as [in, out] with biases."""
    return tf.GptOssConfig(
        **GQA, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, rope_parameters=YARN
    )


def gpt2() -> tf.GPT2Config:
    """``Conv1D`` weights stored as [in, out], fused qkv, learned positions, tied head."""
    return tf.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )


def opt() -> tf.OPTConfig:
    """The 350m form: norms after the block, and embeddings narrower than the hidden size."""
    return tf.OPTConfig(
        **SMALL, ffn_dim=160, max_position_embeddings=64, do_layer_norm_before=False, word_embed_proj_dim=32
    )


def mamba2() -> tf.Mamba2Config:
    """A state space model: fused input projection, causal convolution, several chunks."""
    return tf.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=2,
        chunk_size=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _case(name: str, build: Any, linears: int, floats: dict[str, str]) -> ZooCase:
    return ZooCase(name=name, build=build, inputs=inputs, linears=linears, floats=floats, output=logits)


TIED_MODEL = {"model.embed_tokens.weight": TIED}
GPT2_FLOATS = {"transformer.wte.weight": TIED, "transformer.wpe.weight": EMBEDDING}
OPT_FLOATS = {
    "model.decoder.embed_tokens.weight": TIED,
    "model.decoder.embed_positions.weight": EMBEDDING,
}
MAMBA_FLOATS = {
    "backbone.embeddings.weight": EMBEDDING,
    "backbone.layers.*.mixer.conv1d.weight": CONV,
    "lm_head.weight": HEAD,
}

LLMS: tuple[ZooCase, ...] = (
    _case("llama", from_config(tf.LlamaForCausalLM, llama), 14, HEADED),
    _case("qwen2", from_config(tf.Qwen2ForCausalLM, qwen2), 14, TIED_MODEL),
    _case("qwen3", from_config(tf.Qwen3ForCausalLM, qwen3), 14, HEADED),
    _case("qwen3_moe", from_config(tf.Qwen3MoeForCausalLM, qwen3_moe), 12, MOE),
    _case("mixtral", from_config(tf.MixtralForCausalLM, mixtral), 12, MOE),
    _case("deepseek_v3", from_config(tf.DeepseekV3ForCausalLM, deepseek_v3), 18, MOE),
    _case("gemma3", from_config(tf.Gemma3ForCausalLM, gemma3), 14, TIED_MODEL),
    _case("phi3", from_config(tf.Phi3ForCausalLM, phi3), 8, HEADED),
    _case("gpt_oss", from_config(tf.GptOssForCausalLM, gpt_oss), 12, GPT_OSS),
    _case("gpt2", from_config(tf.GPT2LMHeadModel, gpt2), 8, GPT2_FLOATS),
    _case("opt", from_config(tf.OPTForCausalLM, opt), 14, OPT_FLOATS),
    _case("mamba2", from_config(tf.Mamba2ForCausalLM, mamba2), 4, MAMBA_FLOATS),
)
