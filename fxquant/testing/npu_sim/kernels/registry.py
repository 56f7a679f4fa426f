"""References become kernels: checks before, the shape and dtype that were promised after."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fxquant.testing.npu_sim.kernels.layout import host_nd, is_nz
from fxquant.testing.npu_sim.kernels.memory import (
    device_index,
    drain,
    is_npu,
    map_leaves,
    refuse_mixed_devices,
    tensors_in,
    to_device,
    to_meta,
)
from fxquant.testing.npu_sim.refusals import check_call

Call = SimpleNamespace
"""The arguments of a call by name, defaults filled in, tensors on the host and in ND."""

Reference = Callable[[Call], Any]

REFERENCES: dict[str, Reference] = {}
"""By the op's name without its namespace, filled by ``reference``."""


def reference(*names: str) -> Callable[[Reference], Reference]:
    """Make a function the kernel of ``npu::`` ops (overloads as ``name.overload``)."""

    def add(function: Reference) -> Reference:
        REFERENCES.update(dict.fromkeys(names, function))
        return function

    return add


def op_named(name: str, namespace: str = "npu") -> Any:
    """The op of a name with or without an overload, or None."""
    base, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base, None), overload or "default", None)


def _bound(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return Call(**{a.name: given.get(a.name, a.default_value) for a in schema.arguments})


def _compare(name: str, promised: Any, got: Any) -> None:
    wanted, found = ([(list(t.shape), t.dtype) for t in tensors_in(tree)] for tree in (promised, got))
    if wanted != found:
        raise AssertionError(
            f"npu::{name}: its Meta kernel promises {wanted}, the reference returned {found}"
        )


def kernel_of(name: str, function: Reference) -> Callable[..., Any]:
    """The kernel that runs a reference: Meta kernel, rules of the target, reference, comparison."""
    op = op_named(name)
    has_meta = torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "Meta")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        refuse_mixed_devices(f"npu::{name}", (args, kwargs), cpu_too=True)
        promised = op(*map_leaves(args, to_meta), **map_leaves(kwargs, to_meta)) if has_meta else None
        check_call(name, args, kwargs, is_nz)
        drain()
        call = _bound(op._schema, map_leaves(args, host_nd), map_leaves(kwargs, host_nd))
        result = map_leaves(function(call), lambda t: t.contiguous() if isinstance(t, Tensor) else t)
        if has_meta:
            _compare(name, promised, result)
        if not any(is_npu(tensor) for tensor in tensors_in((args, kwargs))):
            return result
        index = device_index(None, (args, kwargs))
        return map_leaves(result, lambda value: to_device(value, index))

    return kernel


@contextlib.contextmanager
def references_on_cpu() -> Iterator[None]:
    """Let ``npu::`` ops run on tensors of the CPU too, with the same checks and references.

    For comparisons: a graph of ``npu::`` ops gives the same bits on the CPU and on the simulated device.
    """
    library = torch.library.Library("npu", "IMPL")
    for name, function in REFERENCES.items():
        if op_named(name) is not None:
            library.impl(name, kernel_of(name, function), "CPU")
    try:
        yield
    finally:
        library._destroy()
