"""The floors: what loading costs when nothing but the bare loop runs. They build no module.

- `read`: every byte once, into one reused buffer per thread.
- `read_fresh`: positioned reads into fresh tensors of the sizes of the constants.
- `floor_tile`: row tiles of 2 MiB, each read, quantized and written to its place by one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.loading.files import MIB, Entry, data_files, entries_of, read_into

TILE = 2 * MIB
READ = 16 * MIB
FRESH = 8 * MIB
SMALLEST = 1.1754944e-38
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")

Constants = dict[str, tuple[Tensor, ...]]
"""Key -> (codes int8 [N, K], scale float32 [N]) or (floats,)."""


class Buffers(threading.local):
    """Scratch of one thread, kept between tiles."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.floats = torch.empty(0)

    def read(self, descriptor: int, offset: int, nbytes: int) -> Tensor:
        """`nbytes` bytes of a file, uint8; valid until the next call on this thread."""
        if self.bytes.numel() < nbytes:
            self.bytes = torch.empty(max(nbytes, TILE), dtype=torch.uint8)
        part = self.bytes[:nbytes]
        read_into(descriptor, byte_view(part), offset)
        return part

    def float_rows(self, rows: int, columns: int) -> Tensor:
        """float32 `[rows, columns]`, with old values in it."""
        if self.floats.numel() < rows * columns:
            self.floats = torch.empty(rows * columns)
        return self.floats[: rows * columns].view(rows, columns)


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, writable."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


@contextlib.contextmanager
def descriptors(files: list[Path]) -> Iterator[dict[Path, int]]:
    """Open files, closed at the end."""
    with contextlib.ExitStack() as stack:
        found = {file: os.open(file, os.O_RDONLY) for file in files}
        for descriptor in found.values():
            stack.callback(os.close, descriptor)
        yield found


@contextlib.contextmanager
def workers(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads run torch ops on themselves alone."""
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


def read(folder: Path, threads: int) -> None:
    """Every byte of the checkpoint once, `threads` reused buffers of 16 MiB."""
    buffers = Buffers()
    with descriptors(data_files(folder)) as opened, workers(threads) as pool:
        jobs: list[Future[Any]] = []
        for descriptor in opened.values():
            size = os.fstat(descriptor).st_size
            jobs += [
                pool.submit(buffers.read, descriptor, offset, min(READ, size - offset))
                for offset in range(0, size, READ)
            ]
        _wait(jobs)


def read_fresh(folder: Path, threads: int, scheme: str) -> Constants:
    """Fresh tensors of the sizes that `scheme` leaves, filled from the bytes where each weight lies.

    The values mean nothing for `int8`: half of each weight's bytes are read, as a file of codes
    would hold.
    """
    made: Constants = {}
    with descriptors(data_files(folder)) as opened, workers(threads) as pool:
        jobs = []
        for entry in entries_of(folder):
            tensor = torch.empty(min(entry.ideal(scheme), entry.nbytes), dtype=torch.uint8)
            view = byte_view(tensor)
            for start in range(0, len(view), FRESH):
                part = view[start : start + FRESH]
                jobs.append(pool.submit(read_into, opened[entry.file], part, entry.offset + start))
            made[entry.key] = (tensor,)
        _wait(jobs)
    return made


def floor_tile(folder: Path, threads: int, kernel: Path | None) -> Constants:
    """Tiles of whole rows, `threads` at a time; eager torch, or the C kernel in the library `kernel`."""
    made: Constants = {}
    buffers = Buffers()
    quantize = quantize_rows if kernel is None else _compiled(kernel)
    with descriptors(data_files(folder)) as opened, workers(threads) as pool:
        jobs: list[Future[Any]] = []
        for entry in entries_of(folder):
            descriptor = opened[entry.file]
            if not entry.quantized:
                floats = torch.empty(entry.shape, dtype=torch.bfloat16)
                read_into(descriptor, byte_view(floats), entry.offset)
                made[entry.key] = (floats,)
                continue
            codes, scale = torch.empty(entry.shape, dtype=torch.int8), torch.empty(entry.shape[0])
            made[entry.key] = (codes, scale)
            step = max(1, TILE // (2 * entry.shape[1]))
            for row in range(0, entry.shape[0], step):
                tile = (codes[row : row + step], scale[row : row + step])
                jobs.append(pool.submit(_tile, quantize, buffers, entry, descriptor, row, tile))
        _wait(jobs)
    return made


Quantize = Callable[[Tensor, Tensor, Tensor, Buffers], None]


def _tile(
    quantize: Quantize,
    buffers: Buffers,
    entry: Entry,
    descriptor: int,
    row: int,
    tile: tuple[Tensor, Tensor],
) -> None:
    codes, scale = tile
    start = entry.offset + 2 * row * entry.shape[1]
    source = buffers.read(descriptor, start, 2 * codes.numel())
    quantize(source.view(torch.bfloat16).view(codes.shape), codes, scale, buffers)


def quantize_rows(x_NK: Tensor, codes_NK: Tensor, scale_N: Tensor, buffers: Buffers) -> None:
    """Symmetric int8 per row: a float32 scratch of 2 MiB, reused; amax and amin, which are vectorized."""
    rows, columns = x_NK.shape
    step = max(1, TILE // (4 * columns))
    for a in range(0, rows, step):
        b = min(rows, a + step)
        t = buffers.float_rows(b - a, columns)
        t.copy_(x_NK[a:b])
        s = torch.maximum(t.amax(1, keepdim=True), t.amin(1, keepdim=True).neg_())
        s.div_(127.0).clamp_min_(SMALLEST)
        t.div_(s).round_()
        codes_NK[a:b].copy_(t)
        scale_N[a:b].copy_(s[:, 0])


def _compiled(library: Path) -> Quantize:
    function = ctypes.CDLL(str(library)).q_row  # ctypes releases the GIL
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 2
    function.restype = None

    def quantize(x_NK: Tensor, codes_NK: Tensor, scale_N: Tensor, _: Buffers) -> None:
        function(x_NK.data_ptr(), codes_NK.data_ptr(), scale_N.data_ptr(), *x_NK.shape)

    return quantize


def build_kernel(folder: Path) -> Path:
    """Compile the C kernel into `folder`; an `OSError` says why it cannot be had."""
    flags = set(_cpu_flags())
    if missing := [flag for flag in _AVX512 if flag not in flags]:
        raise OSError(f"the C kernel needs {', '.join(missing)}, which this CPU lacks")
    compiler = shutil.which("gcc")
    if compiler is None:
        raise OSError("the C kernel needs gcc, which is not installed")
    library = folder / "floor_kernel.so"
    source = Path(__file__).with_name("floor_kernel.c")
    options = ["-O3", "-shared", "-fPIC", *(f"-m{flag}" for flag in _AVX512)]
    command = [compiler, *options, str(source), "-o", str(library), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own file
    if done.returncode:
        raise OSError(f"gcc failed: {done.stderr.strip()[-200:]}")
    return library


def _cpu_flags() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line.split(":", 1)[1].split()
    return []


def _wait(jobs: list[Future[Any]]) -> None:
    for job in jobs:
        job.result()
