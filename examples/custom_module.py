"""Quantize a module of one's own: no transformers, no config, only an nn.Module and its checkpoint."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import fxquant


class Attention(nn.Module):
    """Self-attention whose query, key and value come from one fused weight."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the projections for `heads` heads over `width` features."""
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return mixed


class Block(nn.Module):
    """Attention, then a gated MLP, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        """Make a block of `width` features; the MLP is four times as wide inside."""
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self.attention(self.norm_1(x))
        h = self.norm_2(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Net(nn.Module):
    """A stack of blocks with a head."""

    def __init__(self, width: int = 256, heads: int = 4, depth: int = 2, classes: int = 10) -> None:
        """Make `depth` blocks and a head with `classes` outputs."""
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to (batch, classes)."""
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def main(argv: Sequence[str] | None = None) -> int:
    """Write a checkpoint, compile from it, print the plan and the error against the float module."""
    parser = argparse.ArgumentParser(description="Quantize a plain nn.Module while its checkpoint loads.")
    parser.add_argument("--scheme", default="int8")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    reference = Net(width=args.width, depth=args.depth).eval()
    x = torch.randn(2, 16, args.width)
    with tempfile.TemporaryDirectory() as folder:
        save_file(reference.state_dict(), Path(folder) / "model.safetensors")
        with fxquant.meta_init():
            model = Net(width=args.width, depth=args.depth)
        model.eval()
        # The head has ten outputs: nothing to gain, so it is told to stay float.
        fxquant.compile(  # in place; it also returns the module
            model, folder, backend="cpu", scheme=args.scheme, ignore=["head"], example_inputs=(x,)
        )
    with torch.no_grad():
        expected, actual = reference(x), model(x)
    error = ((actual - expected).norm() / expected.norm()).item()
    report = fxquant.report(model)
    print(report.plan)
    print(
        f"quantized {report.quantized} weights: {report.float_bytes:,} bytes became {report.resident_bytes:,}"
    )
    print(f"relative error of the output: {error:.2e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
