"""Tensors of the simulated device seen from the host: device memory is this process's memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fxquant.testing.npu_sim.settings import ASYNC


def is_npu(value: object) -> bool:
    """Whether a value is a tensor on the simulated device."""
    return isinstance(value, Tensor) and value.device.type == "npu"


def storage_bytes(tensor: Tensor) -> Tensor:
    """The storage of a tensor on the device as flat uint8 on the host, without a copy."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() == 0:
        return torch.empty(0, dtype=torch.uint8)
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(buffer, dtype=torch.uint8)


def host(value: Any) -> Any:
    """The same memory as a tensor of the CPU; the CPU for a device; other values unchanged."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "npu" else value
    if not is_npu(value):
        return value
    flat = storage_bytes(value)
    out = torch.empty(0, dtype=value.dtype)
    if flat.numel() == 0:
        return out.new_empty(value.shape)
    return out.set_(flat.untyped_storage(), value.storage_offset(), value.size(), value.stride())


def to_device(value: Any, index: int) -> Any:
    """A copy on the simulated device of a tensor on the CPU; other values unchanged."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    out = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=f"npu:{index}")
    if value.numel():
        host(out).copy_(value)
    return out


def to_meta(value: Any) -> Any:
    """A tensor without values of the same shape, strides and dtype; other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def on_host(tree: Any, one: Callable[[Any], Any] = host) -> Any:
    """``host`` on every leaf of arguments."""
    return tree_map(one, tree)


def refuse_mixed_devices(op: str, arguments: Any, *, cpu_too: bool) -> None:
    """Raise where operands are on several devices; tensors of rank 0 may be anywhere, as on a card."""
    devices = {
        str(leaf.device)
        for leaf in tree_leaves(arguments)
        if isinstance(leaf, Tensor) and leaf.dim() and (cpu_too or is_npu(leaf))
    }
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(devices))}! (operands of {op})"
        )


def device_index(asked: Any, arguments: Any) -> int:
    """The device a result belongs on: the one asked for, else the operands', else the current one."""
    if asked is not None and torch.device(asked).index is not None:
        return torch.device(asked).index
    for leaf in tree_leaves(arguments):
        if is_npu(leaf):
            return int(leaf.device.index)
    return int(torch.npu.current_device())  # type: ignore[attr-defined]


def is_asynchronous() -> bool:
    """Whether streams run on threads of their own."""
    return os.environ.get(ASYNC, "0") == "1"


def drain() -> None:
    """Wait for what the current stream was given: kernels run on the calling thread, after it."""
    if is_asynchronous():
        torch.npu.current_stream().synchronize()  # type: ignore[attr-defined]
