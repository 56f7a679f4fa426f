"""Sources of weights: what they hold, how a tensor is read, and which key belongs to which FQN."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch

from fxquant.checkpoint.base import Checkpoint, TensorInfo
from fxquant.checkpoint.cache import Cache
from fxquant.checkpoint.constants import ConstantsCheckpoint, StoredWeight, is_constants_folder
from fxquant.checkpoint.keymap import KeyEntry, KeyMap, require_complete, resolve_keys
from fxquant.checkpoint.mapped import MappedCheckpoint
from fxquant.checkpoint.memory import DictCheckpoint, StreamCheckpoint, StreamItem
from fxquant.checkpoint.safetensors import FileCheckpoint, Piece, bytes_of
from fxquant.checkpoint.writer import WeightConstants, constants_in_files, write_constants
from fxquant.errors import ConfigError

__all__ = [
    "Cache",
    "Checkpoint",
    "ConstantsCheckpoint",
    "DictCheckpoint",
    "FileCheckpoint",
    "KeyEntry",
    "KeyMap",
    "MappedCheckpoint",
    "Piece",
    "StoredWeight",
    "StreamCheckpoint",
    "StreamItem",
    "TensorInfo",
    "WeightConstants",
    "bytes_of",
    "constants_in_files",
    "is_constants_folder",
    "open_checkpoint",
    "require_complete",
    "resolve_keys",
    "write_constants",
]


def open_checkpoint(ckpt: object, *, mapped: bool = False) -> Checkpoint:
    """Open a source of weights; ``mapped`` reads safetensors through a mapping of the files.

    ``ckpt`` is a path (a folder that ``save_checkpoint`` wrote, a folder of safetensors, a
     ``.safetensors`` file, a ``.json`` index of shards), a mapping
    of names to tensors, an iterable of ``(name, tensor)`` pairs, or an open Checkpoint.
    """
    match ckpt:
        case Checkpoint():
            return ckpt
        case str() | os.PathLike():
            if is_constants_folder(ckpt):
                return ConstantsCheckpoint(ckpt)
            return MappedCheckpoint(ckpt) if mapped else FileCheckpoint(ckpt)
        case Mapping():
            return DictCheckpoint(ckpt)
        case torch.nn.Module():
            raise ConfigError(f"ckpt is a module ({type(ckpt).__name__}); pass its state_dict()")
        case Iterable() if not isinstance(ckpt, bytes | bytearray | torch.Tensor):
            return StreamCheckpoint(ckpt)
    raise ConfigError(
        f"ckpt is of type {type(ckpt).__name__}; expected a path, a dict of tensors, "
        "an iterable of (name, tensor) pairs, or an open checkpoint"
    )
