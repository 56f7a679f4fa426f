"""Example inputs for the plan's capture: the user's, or built from a model's own config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxquant.errors import ConfigError

BATCH, LENGTH = 2, 8


def normalize_inputs(example_inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` from a tuple, a dict or one tensor; tensors on meta become zeros."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    elif isinstance(example_inputs, tuple | list):
        args = tuple(example_inputs)
    elif isinstance(example_inputs, Tensor):
        args = (example_inputs,)
    else:
        raise ConfigError(f"example_inputs must be a tuple or a dict, got {type(example_inputs).__name__}")
    filled: tuple[Any, Any] = pytree.tree_map_only(Tensor, _with_values, (args, kwargs))
    return filled


def _with_values(tensor: Tensor) -> Tensor:
    """What meets a weight is fake while a model is captured, what does not is computed: it needs values."""
    return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor


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
