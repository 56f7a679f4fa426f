"""Example inputs for the plan's capture: the user's, or built from a model's own config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.errors import ConfigError

BATCH, LENGTH = 2, 8


def normalize_inputs(example_inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` from a tuple, a dict or one tensor."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    raise ConfigError(f"example_inputs must be a tuple or a dict, got {type(example_inputs).__name__}")


def build_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Keyword inputs from a transformers model's config, or None where there is no builder."""
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    if config is None or not isinstance(main, str):
        return None
    builder = {"input_ids": _text, "pixel_values": _image, "input_features": _audio}.get(main)
    return builder(model, config) if builder else None


def _text(model: nn.Module, config: Any) -> dict[str, Any] | None:
    if not isinstance(getattr(config, "vocab_size", None), int):
        return None
    ids = torch.zeros((BATCH, LENGTH), dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs | _no_cache(model)


def _image(_: nn.Module, config: Any) -> dict[str, Any] | None:
    vision = getattr(config, "vision_config", config)
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    if not isinstance(size, int):
        return None
    return {"pixel_values": torch.zeros((BATCH, channels, size, size))}


def _audio(model: nn.Module, config: Any) -> dict[str, Any] | None:
    mels, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if not isinstance(mels, int) or not isinstance(frames, int):
        return None
    inputs: dict[str, Any] = {"input_features": torch.zeros((BATCH, mels, 2 * frames))}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.zeros((BATCH, LENGTH), dtype=torch.long)
    return inputs | _no_cache(model)


def _no_cache(model: nn.Module) -> dict[str, Any]:
    import inspect

    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
