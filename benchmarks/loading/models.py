"""The checkpoints that are loaded: synthetic, bf16, random normal * 0.02, written once and reused.

Nothing is downloaded. The same name gives the same bytes on every machine with the same torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loading.files import read_header

ROOT = Path(__file__).resolve().parent.parent.parent
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 1_000_000_000
PIECE = 1 << 26
"""Values that are drawn at once where a tensor is larger than a shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """Sizes of a Llama; heads of 128 or fewer, as many for keys as for queries."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape, in the order of the module's state dict."""
        d, wide = self.hidden, self.intermediate
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, d)}
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            shapes |= {f"{layer}.self_attn.{name}_proj.weight": (d, d) for name in "qkvo"}
            shapes |= {f"{layer}.mlp.{name}_proj.weight": (wide, d) for name in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj.weight"] = (d, wide)
            shapes |= {f"{layer}.{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
        return shapes | {"model.norm.weight": (d,), "lm_head.weight": (self.vocab, d)}

    def config(self) -> dict[str, Any]:
        """What transformers' config.json says."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }

    def build(self) -> nn.Module:
        """The bare transformers model, in the dtype of the checkpoint."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        settings = {key: value for key, value in self.config().items() if key != "model_type"}
        model: nn.Module = AutoModelForCausalLM.from_config(LlamaConfig(**settings), dtype=torch.bfloat16)
        return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Wide:
    """Sizes of a stack of blocks whose modulation linear is far wider than the rest."""

    depth: int
    hidden: int
    wide: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape, in the order of the module's state dict."""
        return _shapes(self.build)

    def config(self) -> None:
        """A plain module has none."""

    def build(self) -> nn.Module:
        """The bare module, in the dtype of the checkpoint."""
        return WideModel(self.depth, self.hidden, self.wide)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLinear:
    """One linear layer, alone in its file."""

    inputs: int
    outputs: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape."""
        return {"linear.weight": (self.outputs, self.inputs)}

    def config(self) -> None:
        """A plain module has none."""

    def build(self) -> nn.Module:
        """The bare module, in the dtype of the checkpoint."""
        linear = nn.Linear(self.inputs, self.outputs, bias=False, dtype=torch.bfloat16)
        return nn.Sequential(OrderedDict(linear=linear))


Spec = Llama | Wide | OneLinear

MODELS: dict[str, Spec] = {
    "llama2b": Llama(hidden=2048, intermediate=8192, layers=24, heads=16, vocab=64_000),
    "widedit": Wide(depth=8, hidden=2048, wide=96_768),
    "one_big": OneLinear(inputs=8192, outputs=98_304),
    "llama_small": Llama(hidden=640, intermediate=2560, layers=4, heads=10, vocab=8000),
    "wide_small": Wide(depth=2, hidden=512, wide=24_192),
}
"""1.87 B parameters, weights of 378 MiB, a weight of 1.5 GiB, and two of about 70 and 50 MB."""


class WideBlock(nn.Module):
    """A block of an AdaLN kind: the condition gives 47 chunks of shift, scale and gate."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.adaln = nn.Linear(hidden, wide, dtype=torch.bfloat16)
        self.proj = nn.Linear(hidden, hidden, dtype=torch.bfloat16)
        self.hidden = hidden

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Both `[batch, hidden]`."""
        modulation = self.adaln(nn.functional.silu(condition))
        chunks = modulation.shape[-1] // self.hidden
        modulation = modulation[..., : chunks * self.hidden].unflatten(-1, (chunks, self.hidden))
        shift, scale, gate = (modulation[..., i::3, :].mean(-2) for i in range(3))
        projected: Tensor = self.proj(x * (1 + scale) + shift)
        out: Tensor = x + gate * projected
        return out


class WideModel(nn.Module):
    """`WideBlock`s and a small head."""

    def __init__(self, depth: int, hidden: int, wide: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WideBlock(hidden, wide) for _ in range(depth))
        self.head = nn.Linear(hidden, 64, dtype=torch.bfloat16)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Both `[batch, hidden]`."""
        for block in self.blocks:
            x = block(x, condition)
        logits: Tensor = self.head(x)
        return logits


def _shapes(build: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = build()
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def default_folder() -> Path:
    """Where checkpoints are kept: `$FXQUANT_BENCH_DIR`, else `.cache/bench` under the project's root."""
    return Path(os.environ.get("FXQUANT_BENCH_DIR") or ROOT / ".cache" / "bench")


def is_complete(folder: Path, spec: Spec) -> bool:
    """Whether `folder` holds every tensor of `spec`, in its shape, in files of the right sizes."""
    try:
        files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        if spec.config() is not None and not (folder / "config.json").is_file():
            return False
        found: dict[str, tuple[int, ...]] = {}
        for file in files:
            entries = read_header(folder / file)
            if max(entry.offset + entry.nbytes for entry in entries) != (folder / file).stat().st_size:
                return False
            found |= {entry.key: entry.shape for entry in entries}
    except (OSError, ValueError, KeyError):
        return False
    return found == spec.shapes()


def checkpoint(name: str, root: Path, spec: Spec | None = None) -> Path:
    """The folder of checkpoint `name` under `root`, written first if it is missing or incomplete.

    It appears under its final name only when it is complete.
    """
    spec = MODELS[name] if spec is None else spec
    target = root / name
    if is_complete(target, spec):
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=root))
    try:
        print(f"writing checkpoint {name} (once)", flush=True)
        _write(scratch, spec)
        scratch.chmod(0o755)  # mkdtemp makes it private
        if target.exists():
            shutil.rmtree(target)
        with contextlib.suppress(FileExistsError):  # another process may have finished first
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write(folder: Path, spec: Spec) -> None:
    from safetensors.torch import save_file

    shapes, generator = spec.shapes(), torch.Generator().manual_seed(0)
    shards = list(_shards(shapes))
    weight_map: dict[str, str] = {}
    total = 0
    for i, keys in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: _draw(key, shapes[key], generator) for key in keys}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(keys, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    if (config := spec.config()) is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=1))


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    keys: list[str] = []
    size = 0
    for key, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        if keys and size + nbytes > SHARD_BYTES:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += nbytes
    yield keys


def _draw(key: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if "norm" in key:
        return torch.ones(shape, dtype=torch.bfloat16)
    out = torch.empty(shape, dtype=torch.bfloat16)
    flat = out.view(-1)
    step = PIECE if out.nbytes > SHARD_BYTES else flat.numel()
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        piece.copy_(torch.empty(piece.shape).normal_(generator=generator).mul_(0.02))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Write checkpoints ahead of time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS), help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--ckpt-dir", type=Path, default=default_folder())
    args = parser.parse_args(argv)
    for name in args.names:
        print(checkpoint(name, args.ckpt_dir))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
