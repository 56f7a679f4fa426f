"""Writing of small checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

WriteSharded = Callable[[Mapping[str, Mapping[str, torch.Tensor]], Mapping[str, str] | None], Path]


@pytest.fixture
def write_bytes(tmp_path: Path) -> Callable[..., Path]:
    """Write raw bytes as the only file of a folder; gives its path."""

    def write(raw: bytes, name: str = "model.safetensors") -> Path:
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    return write


@pytest.fixture
def write_sharded(tmp_path: Path) -> WriteSharded:
    """Write files of tensors, and an index of ``{key: file}`` if one is given; gives the folder."""

    def write(files: Mapping[str, Mapping[str, torch.Tensor]], index: Mapping[str, str] | None) -> Path:
        for name, tensors in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            save_file(dict(tensors), tmp_path / name)
        if index is not None:
            text = json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(index)})
            (tmp_path / "model.safetensors.index.json").write_text(text)
        return tmp_path

    return write
