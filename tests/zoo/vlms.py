"""Vision-language models: they run eagerly and do not export whole (loops over the image grids)."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

from zoo.case import CONV, EMBEDDING, HEAD, TIED, ZooCase, from_config, ids, logits, normal

VOCAB = 96
IMAGE, VIDEO, START, END = 90, 91, 92, 93
# Two images of 4 x 4 and 4 x 8 patches; a 2 x 2 merge makes 4 and 8 tokens of them.
GRIDS = ((1, 4, 4), (1, 4, 8))
PATCH = 3 * 2 * 4 * 4  # channels, frames, height, width
TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
}


def inputs() -> dict[str, Any]:
    """Two rows of 14 tokens, each text around one image of its own size, and all their patches."""
    tokens = ids((2, 14), IMAGE)
    for row, (frames, height, width) in enumerate(GRIDS):
        count = frames * height * width // 4
        tokens[row, 1] = START
        tokens[row, 2 : 2 + count] = IMAGE
        tokens[row, 2 + count] = END
    patches = sum(frames * height * width for frames, height, width in GRIDS)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "pixel_values": normal(patches, PATCH),
        "image_grid_thw": torch.tensor(GRIDS),
        "use_cache": False,
    }


def qwen2_5_vl() -> tf.Qwen2_5_VLConfig:
    """Windowed attention in the first vision block, full attention in the second; RMS norms."""
    text = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    vision = VISION | {"window_size": 16, "fullatt_block_indexes": [1]}
    return tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **TOKENS)


def qwen3_vl() -> tf.Qwen3VLConfig:
    """Interpolated position table, features of an early vision block added to text layers, tied head."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = TEXT | {"head_dim": 32, "rope_parameters": rope}
    vision = VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return tf.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **TOKENS)


VLMS: tuple[ZooCase, ...] = (
    ZooCase(
        name="qwen2_5_vl",
        build=from_config(tf.Qwen2_5_VLForConditionalGeneration, qwen2_5_vl),
        inputs=inputs,
        linears=26,
        floats={
            "model.visual.patch_embed.proj.weight": CONV,
            "model.language_model.embed_tokens.weight": EMBEDDING,
            "lm_head.weight": HEAD,
        },
        output=logits,
        whole=False,
    ),
    ZooCase(
        name="qwen3_vl",
        build=from_config(tf.Qwen3VLForConditionalGeneration, qwen3_vl),
        inputs=inputs,
        linears=26,
        floats={
            "model.visual.patch_embed.proj.weight": CONV,
            "model.visual.pos_embed.weight": EMBEDDING,
            "model.language_model.embed_tokens.weight": TIED,
        },
        output=logits,
        whole=False,
    ),
)
