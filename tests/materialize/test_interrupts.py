"""Workers, callbacks and signals that stop a load: it ends at once and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fxquant import numerics
from fxquant.errors import FxquantError
from tests.materialize.faulty_files import (
    frozen_heap,
    load,
    nothing_left,
    on_meta,
    same,
    values,
    write_shards,
)

__all__ = ["frozen_heap"]  # a fixture

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
WORKERS = pytest.mark.parametrize("workers", [1, 3])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "ckpt")


def failing_op(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int, where: Callable[[], bool] = lambda: True
) -> None:
    """Let the ``at``-th quantization (in threads of which ``where`` is true) raise."""
    real, lock, count = numerics.quantize_into, threading.Lock(), [0]

    def quantize(*args: Any) -> None:
        if where():
            with lock:
                count[0] += 1
                hit = count[0] == at
            if hit:
                raise error
        elif count[0] < at:
            time.sleep(0.01)  # let the others have their turn
        real(*args)

    monkeypatch.setattr(numerics, "quantize_into", quantize)


def in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError, IndexError])
@pytest.mark.parametrize("at", [1, 5])
@WORKERS
def test_an_op_that_fails_is_named(
    error: type[Exception], at: int, workers: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_op(monkeypatch, error("on purpose"), at)
    model = on_meta()
    with nothing_left(model):
        with pytest.raises(FxquantError, match=r"while making (a|b)\.weight from .*on purpose") as caught:
            load(folder, model, load_workers=workers)
        assert isinstance(caught.value.__cause__, error)
    monkeypatch.undo()
    assert same(load(folder, model), load(values()))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, SystemExit, AssertionError])
@pytest.mark.parametrize("where", [in_main, lambda: not in_main()], ids=["main", "worker"])
def test_other_errors_are_raised_as_they_are(
    error: type[BaseException], where: Callable[[], bool], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_op(monkeypatch, error("on purpose"), 2, where)
    model = on_meta()
    with nothing_left(model), pytest.raises(error, match="on purpose"):
        load(folder, model, load_workers=3)


class OwnError(Exception):
    """What only the user knows."""


@pytest.mark.parametrize("error", [OwnError, KeyboardInterrupt, StopIteration])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@WORKERS
def test_a_callback_that_raises(error: type[BaseException], share: float, workers: int, folder: Path) -> None:
    def progress(step: Any) -> None:
        if step.share >= share:
            raise error("on purpose")

    model = on_meta()
    with nothing_left(model), pytest.raises(error, match="on purpose"):
        load(folder, model, load_workers=workers, progress=progress)


@WORKERS
def test_a_stream_that_raises(workers: int) -> None:
    def stream() -> Any:
        for number, item in enumerate(values().items()):
            if number == 3:
                raise OwnError("on purpose")
            yield item

    model = on_meta()
    with nothing_left(model), pytest.raises(OwnError, match="on purpose"):
        load(stream(), model, load_workers=workers)


@pytest.mark.parametrize("failing", [1, 2])
def test_threads_that_cannot_be_started(failing: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = threading.Thread.start, [0]

    def start(self: threading.Thread) -> None:
        count[0] += self.name.startswith("fxquant-load-")
        if count[0] == failing:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    model = on_meta()
    with nothing_left(model), pytest.raises(RuntimeError, match="can't start new thread"):
        load(folder, model, load_workers=3)


FAILING = """
import sys
import fxquant
from torch import nn
from fxquant.materialize.meter import anonymous_bytes
from tests.materialize.faulty_files import descriptors, loaders

class OwnError(Exception):
    pass

with fxquant.meta_init():
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24))).eval()
seen = []

def progress(step):
    seen.append(anonymous_bytes())
    if step.share > 0.9:
        raise OwnError("on purpose")

def grown():
    seen.clear()
    base = anonymous_bytes()
    try:
        fxquant.compile(model, sys.argv[1], scheme="none", progress=progress, load_workers=int(sys.argv[2]))
    except OwnError as error:
        assert error.__traceback__ is not None
        return max(seen) - base, anonymous_bytes() - base

grown()
before = descriptors()
most, left = grown()
print(most, left, descriptors() == before, loaders())
"""


# The C library keeps up to twice the largest tensor in the arena of each thread, and more in a process
# whose threads have had larger ones, so that this is one of its own.
@pytest.mark.parametrize(("workers", "kept"), [(1, 4 << 20), (3, 24 << 20)])
def test_the_memory_is_given_back_while_the_error_is_held(workers: int, kept: int, tmp_path: Path) -> None:
    names = [f"{i}.weight" for i in range(24)]
    save_file({name: torch.ones(1024, 1024) for name in names}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", FAILING, str(tmp_path), str(workers)]
    root = Path(__file__).parents[2]
    given = {"capture_output": True, "text": True, "env": ENVIRONMENT, "cwd": root}
    out = subprocess.run(command, check=True, **given).stdout
    most, left, same_descriptors, threads = out.split(maxsplit=3)
    assert int(most) > 48 << 20
    assert int(left) < kept
    assert (same_descriptors, threads.strip()) == ("True", "[]")


PROGRAM = """
import signal, sys, threading, time
import torch
import fxquant
from fxquant.checkpoint import FileCheckpoint
from fxquant.checkpoint.files import Files

class Slow(Files):
    def preadv(self, descriptor, buffers, offset):
        time.sleep(0.02)
        return super().preadv(descriptor, buffers, offset)

with fxquant.meta_init():
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(40))).eval()
checkpoint = FileCheckpoint(sys.argv[1], files=Slow())
workers = int(sys.argv[2])

def progress(step):
    if step.share > 0.1:
        print("loading", flush=True)

options = {"load_workers": workers, "read_bytes": 4096, "progress": progress}
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let jobs in the background ignore it
try:
    fxquant.compile(model, checkpoint, scheme="int8", **options)
except KeyboardInterrupt:
    left = [t.name for t in threading.enumerate() if t.name.startswith("fxquant")]
    meta = all(p.is_meta for p in model.parameters())
    print("interrupted", left, meta, checkpoint._open, flush=True)
"""


@WORKERS
def test_control_c_ends_a_load(workers: int, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(40)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGINT)
            sent = time.monotonic()
            lines = [line for line in process.stdout if line != "loading\n"]
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    assert lines == ["interrupted [] True {}\n"]
    assert time.monotonic() - sent < 10
