"""The model of `benchmarks.npu_startup`, shaped like MiniMax-H3's transformer, and its checkpoint.

Every block has an adaLN linear K -> 96768, cut into 18 pieces (shift, scale and gate, twice, for three
streams of 5376 features), and ordinary linears. K = 2688 is the full size; a smaller K makes many such
blocks fit a disk, and leaves the width, which is over the limit of 65535, as it is.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.loading.files import Entry, read_header

WIDE = 96_768
STREAMS = 3
FEATURES = WIDE // (6 * STREAMS)
"""Of each stream: the adaLN linear gives six pieces of so many values for each."""
FILE = "model.safetensors"
EPSILON = 1e-5
POOL = 1 << 22
"""Values that are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model: its number of blocks, and K, the input features of its linears."""

    blocks: int
    k: int

    @property
    def name(self) -> str:
        """As the table and the folder of the checkpoint call it."""
        return f"{self.blocks}x{self.k}"

    @property
    def largest_part(self) -> int:
        """Bytes of the int8 codes of half an adaLN linear: its width is split in two."""
        return WIDE // 2 * self.k


FULL_SIZE = Size(blocks=1, k=2688)


class Block(nn.Module):
    """One block. Streams are `[batch, 5376]`; the ordinary linears work on pieces of K features."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.adaln = nn.Linear(k, WIDE, dtype=torch.bfloat16)
        self.q, self.key, self.v, self.o = (
            nn.Linear(k, k, bias=False, dtype=torch.bfloat16) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(k, 3 * k, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.down = nn.Linear(3 * k, k, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """`x` `[3, batch, 5376]`, `condition` `[batch, K]` -> the same as `x`."""
        pieces = self.adaln(F.silu(condition)).chunk(6 * STREAMS, dim=-1)
        shift, scale, gate, shift2, scale2, gate2 = [torch.stack(pieces[i::6]) for i in range(6)]
        x = x + gate * self.mix(modulated(x, shift, scale))
        return x + gate2 * self.feed_forward(modulated(x, shift2, scale2))

    def mix(self, x: Tensor) -> Tensor:
        """Stands for attention: its four linears."""
        h = x.view(*x.shape[:-1], -1, self.k)
        out: Tensor = self.o(torch.sigmoid(self.q(h) * self.key(h)) * self.v(h))
        return out.flatten(-2)

    def feed_forward(self, x: Tensor) -> Tensor:
        """A gated one."""
        h = x.view(*x.shape[:-1], -1, self.k)
        out: Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return out.flatten(-2)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Normalized, scaled and shifted."""
    return F.layer_norm(x, (FEATURES,), eps=EPSILON) * (1 + scale) + shift


class Transformer(nn.Module):
    """The blocks."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size.k) for _ in range(size.blocks))

    def forward(self, x: Tensor, condition: Tensor) -> list[Tensor]:
        """What goes into each block and what comes out of the last, so that blocks can be checked."""
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1], condition))
        return states


def build(size: Size) -> nn.Module:
    """The model on meta."""
    with torch.device("meta"):
        return Transformer(size).eval()


def inputs(size: Size) -> tuple[Tensor, Tensor]:
    """The same two inputs every time: streams and condition, for a batch of 2."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STREAMS, 2, FEATURES, generator=generator)
    condition = torch.randn(2, size.k, generator=generator)
    return x.to(torch.bfloat16), condition.to(torch.bfloat16)


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Key -> shape, in the order of the file."""
    return {key: tuple(value.shape) for key, value in build(size).state_dict().items()}


def checkpoint(size: Size, root: Path, say: Callable[[str], None]) -> Path:
    """The folder of the checkpoint under `root`; written first, tensor by tensor, if it is not complete."""
    folder = root / f"npu_startup_{size.name}"
    if is_complete(folder, size):
        return folder
    say(f"writing {folder.name} (once)")
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=root))
    try:
        _write(scratch / FILE, size)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.chmod(0o755)  # mkdtemp makes it private
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def is_complete(folder: Path, size: Size) -> bool:
    """Whether `folder` holds every tensor in its shape, in a file of the right size."""
    file = folder / FILE
    try:
        entries = read_header(file)
        end = max(entry.offset + entry.nbytes for entry in entries)
        return file.stat().st_size == end and {e.key: e.shape for e in entries} == shapes(size)
    except (OSError, ValueError, KeyError):
        return False


def _write(file: Path, size: Size) -> None:
    header: dict[str, object] = {}
    offset = 0
    for key, shape in shapes(size).items():
        end = offset + 2 * torch.Size(shape).numel()
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for tensor in _tensors(size):
            handle.write(tensor.view(torch.uint8).numpy().tobytes())


def _tensors(size: Size) -> Iterator[Tensor]:
    """Flat bf16 values: uniform, of the width that keeps the size of activations.

    All are parts of one pool, each from another place on: drawing 7 GB anew would take minutes.
    """
    pool = torch.rand(POOL, generator=torch.Generator().manual_seed(0)).sub_(0.5).to(torch.bfloat16)
    for i, shape in enumerate(shapes(size).values()):
        count = torch.Size(shape).numel()
        width = (12 / shape[-1]) ** 0.5 if len(shape) > 1 else 0.2
        start = 7919 * i % POOL
        pieces = [pool[start:], *[pool] * (count // POOL + 1)]
        yield torch.cat(pieces)[:count].mul_(width)


def entries(folder: Path) -> dict[str, Entry]:
    """Where each tensor of a checkpoint is."""
    return {entry.key: entry for entry in read_header(folder / FILE)}


def read(entry: Entry) -> Tensor:
    """One tensor of the checkpoint."""
    with entry.file.open("rb") as handle:
        handle.seek(entry.offset)
        data = bytearray(handle.read(entry.nbytes))
    return torch.frombuffer(data, dtype=torch.bfloat16).view(entry.shape)
