"""The mapping reader: the same constants, alignment, pages given back, files that change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from templates import INT8, INT8_T, TABLE, graph_of, hold_bytes, values
from torch import Tensor

from fxquant.checkpoint import FileCheckpoint, MappedCheckpoint
from fxquant.errors import CheckpointFileError
from fxquant.materialize.execute import Loaded, materialize
from fxquant.materialize.recipes import LoadGraph
from fxquant.materialize.schedule import Scheduler, Settings
from fxquant.numerics import same_values

NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.bool: "BOOL", torch.int64: "I64"}


def model() -> tuple[LoadGraph, dict[str, Tensor]]:
    tensors = {
        "direct": values(40, 16),
        "rows": values(64, 16),
        "wide": values(64, 16, dtype=torch.float32),
        "columns": values(48, 20),
        "norm": values(3),
        "empty": values(0, 4),
    }
    forms = {"rows": INT8, "wide": TABLE, "columns": INT8_T}
    rows = [(key, [key], None, forms.get(key)) for key in tensors]
    joined = ("joined", ["norm"], lambda w: torch.cat([w, w]), None)
    return graph_of(*rows, joined, **tensors), tensors


def write(path: Path, tensors: dict[str, Tensor], *, shift: int) -> Path:
    """A file whose tensors begin ``shift`` bytes after a multiple of 16."""
    header, at = {}, 0
    for key, tensor in tensors.items():
        span = [at, at + tensor.nbytes]
        header[key] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(header).encode()
    text += b" " * ((shift - 8 - len(text)) % 16)
    data = b"".join(bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def load(graph: LoadGraph, checkpoint: FileCheckpoint, *, workers: int = 1) -> Loaded:
    mapped = isinstance(checkpoint, MappedCheckpoint)
    with hold_bytes(0):
        settings = Settings(workers=workers, tile_bytes=256, in_memory=mapped)
        schedule = Scheduler(graph, checkpoint.infos).make(settings)
    return materialize(graph, schedule, checkpoint)


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("workers", [1, 4])
def test_the_same_constants_as_with_reads(shift: int, workers: int, tmp_path: Path) -> None:
    graph, tensors = model()
    path = write(tmp_path / "m.safetensors", tensors, shift=shift)
    expected = load(graph, FileCheckpoint(path))
    found = load(graph, MappedCheckpoint(path), workers=workers)
    assert found.constants.keys() == expected.constants.keys()
    for fqn, parts in expected.constants.items():
        for one, two in zip(parts, found.constants[fqn], strict=True):
            assert same_values(one, two), fqn
    assert found.read_bytes == expected.read_bytes


@pytest.mark.parametrize("shift", [0, 1, 7])
def test_values_are_those_of_the_file_and_not_copied(shift: int, tmp_path: Path) -> None:
    _, tensors = model()
    tensors = {**tensors, "mask": values(7) > 0, "ids": torch.arange(9)}
    checkpoint = MappedCheckpoint(write(tmp_path / "m.safetensors", tensors, shift=shift))
    for key, tensor in tensors.items():
        found = checkpoint.read(key)
        assert torch.equal(found, tensor)
        assert found.data_ptr() == checkpoint.read(key).data_ptr()
    assert torch.equal(checkpoint.read_rows("rows", 3, 9), tensors["rows"][3:9])


def test_bytes_that_are_no_bools(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"mask": torch.ones(8, dtype=torch.bool)}, shift=0)
    data = bytearray(path.read_bytes())
    data[-1] = 2
    path.write_bytes(data)
    with pytest.raises(CheckpointFileError, match="'mask' is BOOL but holds bytes other than 0 and 1"):
        MappedCheckpoint(path).read("mask")


@pytest.mark.parametrize("change", ["longer", "shorter", "replaced", "touched"])
def test_a_file_that_changed_after_opening_is_refused(change: str, tmp_path: Path) -> None:
    graph, tensors = model()
    path = write(tmp_path / "m.safetensors", tensors, shift=0)
    checkpoint = MappedCheckpoint(path)
    data = path.read_bytes()
    if change == "replaced":
        (tmp_path / "new").write_bytes(data)
        (tmp_path / "new").rename(path)
    elif change == "touched":
        os.utime(path, ns=(1, 1))
    else:
        path.write_bytes(data + b"x" if change == "longer" else data[:-1])
    with pytest.raises(CheckpointFileError, match="changed after its header was read"):
        load(graph, checkpoint)


def test_closing_leaves_tensors_that_are_in_use(tmp_path: Path) -> None:
    _, tensors = model()
    checkpoint = MappedCheckpoint(write(tmp_path / "m.safetensors", tensors, shift=0))
    rows = checkpoint.read("rows")
    checkpoint.close()
    assert torch.equal(rows, tensors["rows"])
    assert torch.equal(checkpoint.read("rows"), tensors["rows"])  # opened again
    checkpoint.forget([("rows", 0, 64), ("empty", 0, 0)])
    assert torch.equal(checkpoint.read("rows"), tensors["rows"])


def test_what_is_read_cannot_change_the_file(tmp_path: Path) -> None:
    _, tensors = model()
    path = write(tmp_path / "m.safetensors", tensors, shift=0)
    before = path.read_bytes()
    MappedCheckpoint(path).read("rows").zero_()
    assert path.read_bytes() == before


PAGES = """
import sys, torch
torch.set_num_threads(1)
from fxquant.checkpoint import MappedCheckpoint
from fxquant.materialize.execute import materialize
from fxquant.materialize.recipes import LoadGraph, Reads
from fxquant.materialize.schedule import Scheduler, Settings
from fxquant.form import Form

def pages():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["RssFile"].split()[0]) * 1024

checkpoint = MappedCheckpoint(sys.argv[1])
graph = LoadGraph()
for key, info in checkpoint.infos.items():
    reads = Reads(keys=(key,), dtypes=(info.dtype,), shapes=(info.shape,))
    graph.add(key, reads, dtype=info.dtype, form=Form(scheme="int8"))
schedule = Scheduler(graph, checkpoint.infos).make(Settings(workers=1, tile_bytes=1 << 20, in_memory=True))
warm = torch.ops.fxquant.quantize_weight(torch.ones(8, 8), "int8[1,*]")
before, most = pages(), 0

def report(step):
    global most
    most = max(most, pages() - before)

materialize(graph, schedule, checkpoint, report=report)
print(most, pages() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_the_file_are_given_back(tmp_path: Path) -> None:
    """Of a file of 64 MiB, little is mapped in at any time, and nothing after the load."""
    save_file(
        {f"w{i}": torch.ones(4096, 1024, dtype=torch.bfloat16) for i in range(8)}, tmp_path / "m.safetensors"
    )
    command = [sys.executable, "-c", PAGES, str(tmp_path / "m.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    most, after = map(int, done.stdout.split())
    assert most < 12 << 20
    assert after < 6 << 20
