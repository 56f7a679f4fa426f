"""Thousands of damaged headers, indexes and manifests: equal to the original, or one clear error.

``FXQUANT_MUTATIONS`` sets how many of each are tried (default 2000).
"""

from __future__ import annotations

import json
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save

from fxquant.checkpoint import FileCheckpoint, bytes_of
from fxquant.errors import FxquantError
from fxquant.materialize.meter import anonymous_bytes

COUNT = int(os.environ.get("FXQUANT_MUTATIONS", "2000"))
LIMIT_BYTES = 64 << 20
LIMIT_SECONDS = 1.0
BATCH = 250
"""Mutations under one look at the clock and the memory."""

TENSORS = {
    "layer.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "layer.bias": torch.arange(3, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "empty": torch.empty(0, 5),
    "scalar": torch.tensor(7, dtype=torch.int64),
}
OTHERS = {"other.weight": torch.ones(2, 2)}
WORDS = (
    b"F32", b"BF16", b"F64", b"F4", b"BOOL", b"null", b"true", b"-1", b"1e400", b"NaN", b"\\ud800",
    b"\\u0000", b"9" * 40, b"[" * 50, b'{"a":', b'"', b"}", b"]", b",", b":", b"\xff\xfe", b"\x00", b"../",
    b"/etc/passwd", b"18446744073709551616", b"9223372036854775807", b"__metadata__", b"weight_map",
    b"data_offsets",
)  # fmt: skip


def change_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite, insert, cut, repeat or exchange bytes, once to three times."""
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(len(raw) + 1), rng.choice((1, 1, 2, 4, 8, 40))
        match rng.randrange(8):
            case 0:
                raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
            case 1:
                raw = raw[:at] + rng.choice(WORDS) + raw[at + rng.choice((0, 1, 3)) :]
            case 2:
                raw = raw[:at] + raw[at + size :]
            case 3:
                raw = raw[:at] + raw[at : at + size] * rng.randint(2, 50) + raw[at + size :]
            case 4:
                raw = raw[:at]
            case 5:
                digits = [i for i, byte in enumerate(raw) if 48 <= byte <= 57] or [0]
                at = rng.choice(digits)
                raw = (
                    raw[:at]
                    + str(rng.choice((0, 1, 2**31, 2**63, rng.randrange(100)))).encode()
                    + raw[at + 1 :]
                )
            case 6:
                other = rng.randrange(len(raw) + 1)
                low, high = min(at, other), max(at, other)
                raw = raw[:low] + raw[high : high + size] + raw[low + size : high] + raw[low : low + size]
            case 7:
                raw = rng.randbytes(size) + raw[size:]
    return raw


def change_header(raw: bytes, rng: random.Random) -> bytes:
    """Damage a file as it is, or its header alone under a length that fits."""
    length = int.from_bytes(raw[:8], "little")
    if rng.random() < 0.3:
        return change_bytes(raw, rng)
    if rng.random() < 0.1:
        length = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, 100_000_001))
        return struct.pack("<Q", length) + raw[8:]
    header = change_bytes(raw[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + raw[8 + length :]


def read_all(path: Path) -> dict[str, torch.Tensor]:
    with FileCheckpoint(path) as checkpoint:
        return {key: checkpoint.read(key) for key in checkpoint.infos}


def agrees(found: dict[str, torch.Tensor], raw: bytes) -> bool:
    """Whether the safetensors library finds the same tensors: names and bytes."""
    theirs = {name: bytes(view["data"]) for name, view in safetensors.deserialize(raw)}
    return theirs == {key: bytes(bytes_of(tensor.contiguous())) for key, tensor in found.items()}


def check_text(error: Exception, folder: Path) -> None:
    """An error names the place and is not as long as what is in it."""
    text = str(error)
    assert str(folder) in text
    assert len(text) < 5000


@pytest.fixture
def bounded() -> Iterator[Callable[[Callable[[int], None]], None]]:
    """Run a check for each seed, within bounds of memory and time."""

    def run(check: Callable[[int], None]) -> None:
        for first in range(0, COUNT, BATCH):
            base = anonymous_bytes() or 0
            tracemalloc.start()
            try:
                for seed in range(first, min(first + BATCH, COUNT)):
                    started = time.perf_counter()
                    check(seed)
                    seconds = time.perf_counter() - started
                    assert seconds < LIMIT_SECONDS, f"seed {seed} took {seconds:.1f} s"
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < LIMIT_BYTES, f"seeds from {first} on: {peak} bytes"
            assert (anonymous_bytes() or 0) - base < LIMIT_BYTES

    return run


def test_mutated_headers(tmp_path: Path, bounded: Callable[[Callable[[int], None]], None]) -> None:
    original = save(TENSORS, metadata={"format": "pt"})
    path = tmp_path / "model.safetensors"
    refused = [0]

    def check(seed: int) -> None:
        raw = change_header(original, random.Random(seed))
        path.write_bytes(raw)
        try:
            found = read_all(path)
        except FxquantError as error:
            refused[0] += 1
            check_text(error, tmp_path)
            return
        assert agrees(found, raw), seed

    bounded(check)
    assert refused[0] > COUNT * 0.8


def test_mutated_indexes(tmp_path: Path, bounded: Callable[[Callable[[int], None]], None]) -> None:
    (tmp_path / "x.safetensors").write_bytes(save(TENSORS))
    (tmp_path / "y.safetensors").write_bytes(save(OTHERS))
    table: dict[str, Any] = {
        "metadata": {"total_size": 100},
        "weight_map": {**dict.fromkeys(TENSORS, "x.safetensors"), **dict.fromkeys(OTHERS, "y.safetensors")},
    }
    original = json.dumps(table, indent=1).encode()
    path = tmp_path / "model.safetensors.index.json"
    stored = {**TENSORS, **OTHERS}
    refused = [0]

    def check(seed: int) -> None:
        path.write_bytes(change_bytes(original, random.Random(seed)))
        try:
            found = read_all(tmp_path if seed % 2 else path)
        except FxquantError as error:
            refused[0] += 1
            check_text(error, tmp_path)
            return
        # An index may name fewer tensors, never others than the files hold.
        assert found.keys() <= stored.keys(), seed
        assert all(torch.equal(found[key], stored[key]) for key in found), seed

    bounded(check)
    assert refused[0] > COUNT * 0.5


def test_a_huge_header_is_parsed_in_bounded_memory(tmp_path: Path) -> None:
    """A header of 4 MiB that nests, repeats or counts as no honest one does."""
    path = tmp_path / "model.safetensors"
    for text in (
        b'{"a":' + b"[" * (4 << 20),
        b"{" + b'"a":1,' * (1 << 19),
        b'{"a":' + b"1" * (4 << 20) + b"}",
    ):
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        started = time.perf_counter()
        with pytest.raises(FxquantError, match=str(tmp_path)):
            FileCheckpoint(path)
        assert time.perf_counter() - started < 5
