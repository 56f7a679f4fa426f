"""What can be measured: every case by name, as data. `spec` is what a child process is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.loading import floors, peers, subject
from benchmarks.loading.subject import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One run: a case on a checkpoint. `extra` are paths and numbers that only some cases need."""

    case: str
    model: str
    folder: str
    threads: int
    verify: int = 0
    """Layers whose codes are checked after the load: 0 none, -1 all."""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How one case runs.

    `needs`: names in `Spec.extra` that the parent has to supply. `models`: the models it can load,
    empty for all of them. `scheme`: what the ideal size follows.
    """

    name: str
    prepare: Callable[[Spec], Prepared]
    peer: bool = False
    needs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    scheme: str = "int8"


def _floor(load: Callable[[Path], floors.Constants | None]) -> Callable[[Path], Prepared]:
    def prepare(folder: Path) -> Prepared:
        return Prepared(load=lambda: load(folder), codes_of=floor_codes)

    return prepare


def floor_codes(made: Any, key: str) -> tuple[Tensor, Tensor] | None:
    """The codes and scale of one weight that a floor made."""
    constants = made.get(key, ())
    return (constants[0], constants[1]) if len(constants) == 2 else None


def _read(spec: Spec) -> Prepared:
    return _floor(lambda folder: floors.read(folder, spec.threads))(Path(spec.folder))


def _read_fresh(scheme: str) -> Callable[[Spec], Prepared]:
    def prepare(spec: Spec) -> Prepared:
        return _floor(lambda folder: floors.read_fresh(folder, spec.threads, scheme))(Path(spec.folder))

    return prepare


def _floor_tile(threads: int, *, compiled: bool) -> Callable[[Spec], Prepared]:
    def prepare(spec: Spec) -> Prepared:
        kernel = Path(spec.extra["kernel"]) if compiled else None
        return _floor(lambda folder: floors.floor_tile(folder, threads, kernel))(Path(spec.folder))

    return prepare


def _peer(prepare: Callable[[str, Path], Prepared]) -> Callable[[Spec], Prepared]:
    return lambda spec: prepare(spec.model, Path(spec.folder))


def _fxquant(way: str) -> Callable[[Spec], Prepared]:
    return lambda spec: subject.prepare(way, spec.model, Path(spec.folder), spec.extra)


LLAMAS = ("llama2b", "llama_small")

_ALL = (
    Case(name="read", prepare=_read, scheme="none"),
    Case(name="read_fresh", prepare=_read_fresh("int8")),
    Case(name="read_fresh:none", prepare=_read_fresh("none"), scheme="none"),
    Case(name="floor_tile:t1e", prepare=_floor_tile(1, compiled=False)),
    Case(name="floor_tile:t2e", prepare=_floor_tile(2, compiled=False)),
    Case(name="floor_tile:t1", prepare=_floor_tile(1, compiled=True), needs=("kernel",)),
    Case(name="floor_tile:t2", prepare=_floor_tile(2, compiled=True), needs=("kernel",)),
    Case(name="quanto:qint8", prepare=_peer(peers.quanto), peer=True),
    Case(name="hf:ao_w8a8", prepare=_peer(peers.transformers_torchao), peer=True, models=LLAMAS),
    Case(name="ao_mmap:w8a8", prepare=_peer(peers.torchao_mmap), peer=True),
    Case(name="fxquant:int8", prepare=_fxquant("int8")),
    Case(name="fxquant:int8@smallest", prepare=_fxquant("int8@smallest"), needs=("budget",)),
    Case(name="fxquant:none", prepare=_fxquant("none"), scheme="none"),
    Case(name="fxquant:saved", prepare=_fxquant("saved"), needs=("saved",)),
    Case(name="fxquant:cache", prepare=_fxquant("cache"), needs=("cache",)),
    Case(name="fxquant:dummy", prepare=_fxquant("dummy")),
)

CASES: Mapping[str, Case] = {case.name: case for case in _ALL}

COLD = ("read", "fxquant:int8")
"""The cases that `--cold` runs with an empty page cache too."""

STANDARD: Mapping[str, tuple[str, ...]] = {
    "llama2b": tuple(CASES),
    "llama_small": tuple(CASES),
    "widedit": ("floor_tile:t2e", "fxquant:int8", "fxquant:int8@smallest"),
    "wide_small": ("read", "floor_tile:t2e", "fxquant:int8", "fxquant:int8@smallest"),
    "one_big": ("floor_tile:t2e", "fxquant:int8", "fxquant:int8@smallest"),
}
"""What is measured on each model unless `--models` names some."""
