"""Encoders, encoder-decoders and vision-text pairs at toy size."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from torch import Tensor

from zoo.case import CONV, EMBEDDING, TABLE, TIED, ZooCase, from_config, ids, logits, normal

VOCAB = 96
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION: dict[str, Any] = SIZES | {"intermediate_size": 128, "image_size": 16, "patch_size": 4}
TEXT: dict[str, Any] = SIZES | {
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def padded(batch: int, length: int, pad: int) -> Tensor:
    """A mask [batch, length] whose last row is padded by ``pad`` tokens."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - pad :] = 0
    return mask


def embeds(result: Any) -> Tensor:
    """Image and text embeddings together: their cosines would cancel most of the signal."""
    return torch.cat([result.image_embeds, result.text_embeds])


def bert() -> tf.BertConfig:
    """Masked language model: its decoder is tied to the embedding and has a bias of its own."""
    return tf.BertConfig(**TEXT, type_vocab_size=2)


def bert_inputs() -> dict[str, Any]:
    return {
        "input_ids": ids((2, 9), VOCAB),
        "token_type_ids": torch.tensor([[0] * 5 + [1] * 4] * 2),
        "attention_mask": padded(2, 9, 3),
    }


def t5() -> tf.T5Config:
    """Relative position buckets, no attention scale, tied encoder, decoder and scaled head."""
    return tf.T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=8,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )


def t5_inputs() -> dict[str, Any]:
    return {
        "input_ids": ids((2, 9), VOCAB),
        "attention_mask": padded(2, 9, 3),
        "decoder_input_ids": ids((2, 6), VOCAB, seed=1),
        "use_cache": False,
    }


def whisper() -> tf.WhisperConfig:
    """Convolutions before the encoder, a key projection without bias, head tied to the embedding."""
    return tf.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=12,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def whisper_inputs() -> dict[str, Any]:
    return {"input_features": normal(2, 8, 24), "decoder_input_ids": ids((2, 6), VOCAB), "use_cache": False}


def vit() -> tf.ViTConfig:
    """Image classifier: class token, patch convolution, a head named ``classifier``."""
    return tf.ViTConfig(**VISION, num_labels=10)


def clip() -> tf.CLIPConfig:
    """Two towers with different masks, two projections without bias."""
    return tf.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=32)


def siglip() -> tf.SiglipConfig:
    """Pools the image with ``nn.MultiheadAttention``: one packed in-projection for q, k and v."""
    return tf.SiglipConfig(text_config=TEXT | {"projection_size": 64}, vision_config=VISION)


def pixels() -> dict[str, Any]:
    return {"pixel_values": normal(2, 3, 16, 16)}


def clip_inputs() -> dict[str, Any]:
    """The text tower pools at the first end token, so each row has one."""
    tokens = ids((2, 9), VOCAB)
    tokens[0, 8] = tokens[1, 5] = 2
    tokens[1, 6:] = 0
    return pixels() | {"input_ids": tokens, "attention_mask": padded(2, 9, 3)}


def siglip_inputs() -> dict[str, Any]:
    """Padded to the full length, without a mask, as the model was trained."""
    tokens = ids((2, 16), VOCAB)
    tokens[1, 9:] = 0
    return pixels() | {"input_ids": tokens}


TOWERS = {
    "text_model.embeddings.*_embedding.weight": EMBEDDING,
    "vision_model.embeddings.position_embedding.weight": EMBEDDING,
    "vision_model.embeddings.patch_embedding.weight": CONV,
}

ENCODERS: tuple[ZooCase, ...] = (
    ZooCase(
        name="bert",
        build=from_config(tf.BertForMaskedLM, bert),
        inputs=bert_inputs,
        linears=13,
        floats={
            "bert.embeddings.word_embeddings.weight": TIED,
            "bert.embeddings.position_embeddings.weight": EMBEDDING,
            "bert.embeddings.token_type_embeddings.weight": EMBEDDING,
        },
        output=logits,
    ),
    ZooCase(
        name="t5",
        build=from_config(tf.T5ForConditionalGeneration, t5),
        inputs=t5_inputs,
        linears=32,
        floats={"shared.weight": TIED, "*.relative_attention_bias.weight": EMBEDDING},
        output=logits,
    ),
    ZooCase(
        name="whisper",
        build=from_config(tf.WhisperForConditionalGeneration, whisper),
        inputs=whisper_inputs,
        linears=32,
        floats={
            "model.encoder.conv?.weight": CONV,
            "model.encoder.embed_positions.weight": TABLE,
            "model.decoder.embed_tokens.weight": TIED,
            "model.decoder.embed_positions.weight": TABLE,
        },
        output=logits,
    ),
    ZooCase(
        name="vit",
        build=from_config(tf.ViTForImageClassification, vit),
        inputs=pixels,
        linears=13,
        floats={
            "vit.embeddings.cls_token": TABLE,
            "vit.embeddings.position_embeddings": TABLE,
            "vit.embeddings.patch_embeddings.projection.weight": CONV,
        },
        output=logits,
    ),
    ZooCase(
        name="clip",
        build=from_config(tf.CLIPModel, clip),
        inputs=clip_inputs,
        linears=26,
        floats=TOWERS,
        output=embeds,
    ),
    ZooCase(
        name="siglip",
        build=from_config(tf.SiglipModel, siglip),
        inputs=siglip_inputs,
        linears=29,
        floats=TOWERS | {"vision_model.head.probe": TABLE},
        output=embeds,
    ),
)
