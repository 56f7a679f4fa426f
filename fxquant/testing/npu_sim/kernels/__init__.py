"""Kernels of the simulated device, over host memory."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxquant.testing.npu_sim.kernels import fused, grouped, matmul, microscaling, quantize, weight_only
from fxquant.testing.npu_sim.kernels.aten import install_aten, registered
from fxquant.testing.npu_sim.kernels.layout import format_cast, is_nz
from fxquant.testing.npu_sim.kernels.memory import drain
from fxquant.testing.npu_sim.kernels.registry import REFERENCES, kernel_of, op_named
from fxquant.testing.npu_sim.refusals import check_call

_MODULES = (fused, grouped, matmul, microscaling, quantize, weight_only)  # they fill REFERENCES

# What torch_npu's own code does right with the stand-ins: bookkeeping, no arithmetic.
_NATIVE = {
    "copy_memory_",
    "get_npu_format",
    "get_storage_size",
    "npu_change_data_ptr",
    "npu_get_npu_format",
    "set_op_timeout_ms",
}

_libraries: list[torch.library.Library] = []  # registrations live as long as these


def _format_cast(input: Tensor, acl_format: int, **kwargs: Any) -> Tensor:  # noqa: A002
    if torch.ops.npu.get_npu_format(input) != acl_format:  # else nothing is called; a deepcopy does that
        check_call("npu_format_cast", (input, acl_format), kwargs, is_nz)
    drain()
    return format_cast(input, acl_format)


def _format_cast_fake(input: Tensor, acl_format: int, **kwargs: Any) -> Tensor:  # noqa: A002, ARG001
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _unsupported(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(f"npu::{name} has no kernel in the simulated NPU")


def install_kernels() -> None:
    """Replace the compute kernels of torch_npu; the first call counts."""
    if _libraries:
        return
    aten = torch.library.Library("aten", "IMPL")
    npu = torch.library.Library("npu", "IMPL")
    _libraries.extend((aten, npu))
    install_aten(aten)
    for name in registered("PrivateUse1", "npu"):
        if name not in _NATIVE and name not in REFERENCES:
            npu.impl(name, functools.partial(_unsupported, name), "PrivateUse1", allow_override=True)
    for name, function in REFERENCES.items():
        if op_named(name) is not None:
            npu.impl(name, kernel_of(name, function), "PrivateUse1", allow_override=True)
    npu.impl("npu_format_cast", _format_cast, "PrivateUse1", allow_override=True)
    npu.impl("npu_format_cast", _format_cast_fake, "Meta")
