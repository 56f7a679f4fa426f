"""The NPU's ops on machines without torch_npu: our own definitions of ``npu::``, for cross-compiling.

With torch_npu loaded its own definitions stand. Ops cannot be taken back once graphs hold them, so a
process that defined them refuses a later ``import torch_npu``, with the reason.

``fxquant_npu::npu_*`` are the same ops for graphs whose number of rows may be zero: CANN refuses empty
operands, so on those they give an empty result, and else they are one call of the op they are named
after. Graphs of a known number of rows hold the op itself.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Literal, cast

import torch

from fxquant.errors import ConfigError
from fxquant.targets.npu_chip import NpuChip
from fxquant.targets.npu_fakes import FAKES
from fxquant.targets.npu_rules import refusal_of_call
from fxquant.targets.npu_table import SCHEMAS

GUARDED = (
    "npu_dynamic_quant",
    "npu_quant_matmul",
    "npu_quant_matmul_dequant",
    "npu_weight_quant_batchmatmul",
    "npu_quantize",
    "npu_dynamic_mx_quant",
    "npu_dynamic_block_quant",
    "npu_grouped_matmul",
)
"""The ops that have a form for rows whose number may be zero."""

_NO_META = ("npu_format_cast", "npu_convert_weight_to_int4pack")

_LIBRARIES: dict[str, Any] = {}  # registrations live as long as these
_CHIP: ContextVar[NpuChip | None] = ContextVar("fxquant_npu_chip", default=None)


@contextlib.contextmanager
def planning_for(chip: NpuChip) -> Iterator[None]:
    """Fakes of our own also refuse, by the rules of ``chip``, what it would refuse at run time."""
    token = _CHIP.set(chip)
    try:
        yield
    finally:
        _CHIP.reset(token)


def planned_chip() -> NpuChip | None:
    """The chip of the innermost ``planning_for``."""
    return _CHIP.get()


def ensure_schemas() -> Literal["torch_npu", "fxquant"]:
    """Make ``torch.ops.npu.*`` exist: torch_npu's if it is loaded, else ours. Says whose they are."""
    _define_guards()
    if "npu" in _LIBRARIES:
        return "fxquant"
    if is_defined("npu_quant_matmul"):
        _add_missing_fakes()
        return "torch_npu"
    if sys.modules.get("torch_npu") is not None:
        raise ConfigError(
            "torch_npu is in sys.modules and its ops are not registered: its import failed or has not "
            "ended. Import it first, or in a new process not at all."
        )
    library = _library("npu", "npu", "FRAGMENT")
    for name, signature in SCHEMAS.items():
        library.define(f"{name}{signature}")
        torch.library.register_fake(f"npu::{name}", _checked(name), lib=library)
    sys.meta_path.insert(0, _NoLaterImport())
    return "fxquant"


def _library(key: str, namespace: str, kind: str) -> Any:
    _LIBRARIES[key] = cast("Any", torch.library).Library(namespace, kind)
    return _LIBRARIES[key]


def is_defined(name: str) -> bool:
    """Whether ``npu::name`` exists in this process, whoever defined it."""
    try:
        torch._C._dispatch_find_schema_or_throw(f"npu::{name}", "")
    except RuntimeError:
        return False
    return True


def declared(name: str) -> str:
    """The canonical text of the schema of ``npu::name`` that this process has."""
    return str(getattr(torch.ops.npu, name).default._schema)


def expected(name: str) -> str:
    """The canonical text of ours."""
    return str(torch._C.parse_schema(f"npu::{name}{SCHEMAS[name]}"))


def _checked(name: str) -> Callable[..., Any]:
    """The fake of an op, with the rules of the chip that is planned for."""
    fake = FAKES[name]

    def run(*args: Any, **kwargs: Any) -> Any:
        chip = _CHIP.get()
        refusal = refusal_of_call(name, args, kwargs, chip) if chip is not None else None
        if refusal is not None:
            raise RuntimeError(refusal.reason)
        return fake(*args, **kwargs)

    return run


def _add_missing_fakes() -> None:
    """torch_npu has no Meta kernel for some ops that load graphs call."""
    if "fakes" in _LIBRARIES:
        return
    library = _library("fakes", "npu", "FRAGMENT")
    for name in _NO_META:
        if is_defined(name) and not torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "Meta"):
            torch.library.register_fake(f"npu::{name}", FAKES[name], lib=library)


def _define_guards() -> None:
    if "fxquant_npu" in _LIBRARIES:
        return
    library = _library("fxquant_npu", "fxquant_npu", "FRAGMENT")
    for name in GUARDED:
        library.define(f"{name}{SCHEMAS[name]}")
        library.impl(name, _guarded(name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fxquant_npu::{name}", _checked(name), lib=library)


def _guarded(name: str) -> Callable[..., Any]:
    """The op ``npu::name``, or empty results where its first operand has no elements."""
    fake = FAKES[name]

    def run(x: torch.Tensor | list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if (x[0] if isinstance(x, list) else x).numel() == 0:
            return fake(x, *args, **kwargs)
        return getattr(torch.ops.npu, name)(x, *args, **kwargs)

    return run


class _NoLaterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch_npu where it is installed, and refuses to load it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch_npu":
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        return found and importlib.machinery.ModuleSpec(fullname, self, origin=found.origin)

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(
            f"{module.__name__} cannot be imported in this process any more: fxquant has planned or lowered "
            "for an NPU without it and defined its ops, which cannot be defined twice. Import it first."
        )
