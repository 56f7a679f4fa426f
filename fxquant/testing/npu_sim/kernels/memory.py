"""Tensors of the simulated device seen from the host: device memory is this process's memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

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


def map_leaves(tree: Any, one: Callable[[Any], Any]) -> Any:
    """A function on every leaf of arguments or results: what an op's schema can nest, and no more."""
    if isinstance(tree, (tuple, list)):
        return type(tree)([map_leaves(value, one) for value in tree])
    if isinstance(tree, dict):
        return {name: map_leaves(value, one) for name, value in tree.items()}
    return one(tree)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors_in(value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)


def refuse_mixed_devices(op: str, arguments: Any, *, cpu_too: bool) -> None:
    """Raise where operands are on several devices; tensors of rank 0 may be anywhere, as on a card."""
    devices = {
        tensor.device for tensor in tensors_in(arguments) if tensor.dim() and (cpu_too or is_npu(tensor))
    }
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(map(str, devices)))}! (operands of {op})"
        )


def device_index(asked: Any, arguments: Any) -> int:
    """The device a result belongs on: the one asked for, else the operands', else the current one."""
    if asked is not None and torch.device(asked).index is not None:
        return torch.device(asked).index
    for tensor in tensors_in(arguments):
        if is_npu(tensor):
            return int(tensor.device.index)
    return int(torch.npu.current_device())  # type: ignore[attr-defined]


def is_asynchronous() -> bool:
    """Whether streams run on threads of their own."""
    return os.environ.get(ASYNC, "0") == "1"


def drain() -> None:
    """Wait for what the current stream was given: kernels run on the calling thread, after it."""
    if is_asynchronous():
        torch.npu.current_stream().synchronize()  # type: ignore[attr-defined]
