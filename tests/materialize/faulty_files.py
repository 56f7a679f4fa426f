"""File calls that fail on purpose, a small checkpoint to read with them, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fxquant
from fxquant.checkpoint.files import Files

KINDS = ("open", "stat", "preadv", "close", "create", "pwrite", "sync", "rename", "make_folder")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
HEADER_READS = 4
"""Calls of ``preadv`` for the headers of two shards; the calls after them read values."""

Fault = Callable[..., Any]


class FaultyFiles(Files):
    """The real calls, but ``fault`` in the place of the ``at``-th of ``kind`` (of all from it on if ``on``).

    A fault is called with the real method and its arguments.
    """

    def __init__(self, kind: str = "", at: int = 0, fault: Fault | None = None, *, on: bool = False) -> None:
        self.kind, self.at, self.fault, self.on = kind, at, fault, on
        self.counts = dict.fromkeys(KINDS, 0)
        self.lock = threading.Lock()
        self.hits = 0

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            number = self.counts[name]
            self.counts[name] += 1
            hit = name == self.kind and (number >= self.at if self.on else number == self.at)
            self.hits += hit
        real = getattr(super(), name)
        if hit and self.fault is not None:
            return self.fault(real, *args, **kwargs)
        return real(*args, **kwargs)


def _layer(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self.call(name, *args, **kwargs)


for _name in KINDS:
    setattr(FaultyFiles, _name, _layer(_name))


def fails(code: int) -> Fault:
    """The system refuses."""

    def fault(real: Any, *args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    fault.__name__ = errno.errorcode[code]
    return fault


def raises(error: type[BaseException]) -> Fault:
    """Something else is raised."""

    def fault(real: Any, *args: Any, **kwargs: Any) -> Any:
        raise error("on purpose")

    fault.__name__ = error.__name__
    return fault


def late(other: Fault) -> Fault:
    """The real call, and then the fault."""

    def fault(real: Any, *args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        return other(real, *args, **kwargs)

    return fault


def ends(real: Any, *args: Any) -> int:
    """A read or write that does nothing."""
    return 0


def half(real: Any, descriptor: int, buffers: list[memoryview], offset: int) -> int:
    """A read of half of what was asked for."""
    size = max(1, sum(buffer.nbytes for buffer in buffers) // 2)
    return int(real(descriptor, [_joined(buffers, size)], offset))


def single(real: Any, descriptor: int, buffers: list[memoryview], offset: int) -> int:
    """A read of one byte."""
    first = next(buffer for buffer in buffers if buffer.nbytes)
    return int(real(descriptor, [first[:1]], offset))


def _joined(buffers: list[memoryview], size: int) -> memoryview:
    first = next(buffer for buffer in buffers if buffer.nbytes)
    return first[:size]


def flips(real: Any, descriptor: int, buffers: list[memoryview], offset: int) -> int:
    """A read that gives a wrong bit."""
    count = int(real(descriptor, buffers, offset))
    first = next(buffer for buffer in buffers if buffer.nbytes)
    first[0] ^= 4
    return count


def after(change: Callable[[], object]) -> Fault:
    """The real call, after something happened to the files."""

    def fault(real: Any, *args: Any, **kwargs: Any) -> Any:
        change()
        return real(*args, **kwargs)

    return fault


# --------------------------------------------------------------------------- what is read


class Net(nn.Module):
    """A linear of several tiles, one of one tile, floats, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 160)
        self.b = nn.Linear(160, 24, bias=False)
        self.table = nn.Parameter(torch.zeros(40, 64))
        self.register_buffer("gain", torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x + self.table[0]))) * self.gain


def on_meta() -> Net:
    with fxquant.meta_init():
        return Net().eval()


def values(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(v.shape, generator=generator) / 8 for k, v in Net().state_dict().items()}


def write_shards(folder: Path, seed: int = 0) -> Path:
    """Two shards, found by their suffix."""
    state = values(seed)
    folder.mkdir(exist_ok=True)
    for shard, names in zip(SHARDS, (("a.weight", "gain"), ("a.bias", "b.weight", "table")), strict=True):
        save_file({name: state[name] for name in names}, folder / shard)
    return folder


def load(ckpt: object, model: Net | None = None, **options: Any) -> Net:
    """Compile without a trace, with many small reads."""
    options = {"scheme": "int8", "read_bytes": 4096, **options}
    return fxquant.compile(on_meta() if model is None else model, ckpt, **options)


def constants(model: nn.Module) -> list[Tensor]:
    """All that a model holds, as plain tensors."""
    found: list[Tensor] = []
    for tensor in (*model.parameters(), *model.buffers()):
        found += getattr(tensor, "constants", (tensor.detach(),))
    return found


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models hold the same constants, bit by bit."""
    return all(torch.equal(x, y) for x, y in zip(constants(a), constants(b), strict=True))


# --------------------------------------------------------------------------- what must hold


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only


def live_tensors() -> int:
    """Plain tensors with memory of at least 1 KiB."""
    kinds = (Tensor, nn.Parameter)
    return sum(
        1
        for found in gc.get_objects()
        if type(found) in kinds and not found.is_meta and found.numel() * found.element_size() >= 1024
    )


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Keep what exists before the tests of a module out of the collector's way: each look takes 0.2 s."""
    load(values())  # imports half of torch
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def loaders() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fxquant-load-")]


@contextlib.contextmanager
def nothing_left(model: nn.Module) -> Iterator[None]:
    """An error in the block leaves the model on meta, and no thread, descriptor or tensor behind."""
    gc.collect()
    before = descriptors(), live_tensors()
    yield
    assert loaders() == []
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not {"fxquant_plan", "_fxquant_load", "_fxquant_shell"} & model.__dict__.keys()
    assert (descriptors(), live_tensors()) == before
