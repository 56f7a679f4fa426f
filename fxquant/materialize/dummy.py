"""Constants with made-up values: for profiling memory and speed without a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from fxquant.materialize.execute import Loaded
from fxquant.materialize.meter import Account
from fxquant.materialize.recipes import LoadGraph, result_vals
from fxquant.materialize.store import Store

BLOCK = 1 << 20
"""Values that are drawn; larger constants repeat them."""

SMALL = 1e-3
"""Magnitude of made-up floats of rank 2 and more; those of lower rank are ones."""


def dummy_constants(
    graph: LoadGraph, device: torch.device, kept: Mapping[str, Tensor], *, seed: int = 0
) -> Loaded:
    """The constants of every recipe without a read: the same shapes, dtypes and bytes.

    Codes are drawn evenly from their range, scales give weights of variance ``1 / K``. ``kept``:
    buffers that hold values, by FQN, which stay as they are.
    """
    started = time.perf_counter()
    account = Account()
    store = Store(graph, account, device, {})
    generator = torch.Generator().manual_seed(seed)
    codes = torch.empty(BLOCK, dtype=torch.int8).random_(-127, 128, generator=generator)
    floats = torch.empty(BLOCK).uniform_(-SMALL, SMALL, generator=generator)
    with torch.no_grad():
        for recipe in graph.recipes:
            if recipe.expert:  # the first one makes the constants of all
                store.done(recipe)
                continue
            if recipe.fqn in kept:
                store.constants[recipe.fqn] = (kept[recipe.fqn],)
                continue
            # Constants that are made of others come with ``done``; those that were given hold their values.
            parts = dict(zip(recipe.constants, store.allocate(recipe), strict=False))
            for name, part in list(parts.items())[: len(parts) - len(recipe.given)]:
                if name == "scale":
                    k = result_vals(graph.templates[recipe.template])[0].shape[-1]
                    part.fill_(1 / (73 * math.sqrt(max(k, 1))))  # 73: spread of codes
                elif not part.is_floating_point():
                    _repeat(codes if part.dtype == torch.int8 else codes.new_zeros(1), part)
                elif part.dim() < 2:
                    part.fill_(1)
                else:
                    _repeat(floats, part)
            store.done(recipe)
    return Loaded(
        constants=store.constants,
        peak=dict(account.peak),
        seconds=time.perf_counter() - started,
        read_bytes=0,
    )


def _repeat(values: Tensor, out: Tensor) -> None:
    """Fill ``out`` with ``values``, over and over."""
    flat = out.view(-1)
    for start in range(0, flat.numel(), values.numel()):
        part = flat[start : start + values.numel()]
        part.copy_(values[: part.numel()])
