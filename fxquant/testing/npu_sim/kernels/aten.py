"""Ops of ATen on the simulated device: torch's CPU kernels over the same memory.

Views and allocations keep torch_npu's own kernels, so storages, strides, layouts and
``torch.npu.memory_allocated()`` are the real ones. Results are allocated on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fxquant.testing.npu_sim.kernels import layout
from fxquant.testing.npu_sim.kernels.memory import (
    device_index,
    drain,
    host,
    is_asynchronous,
    map_leaves,
    refuse_mixed_devices,
    to_device,
)
from fxquant.testing.npu_sim.kernels.registry import op_named

Kernel = Callable[..., Any]

# Allocation and bookkeeping: torch_npu's own kernels work with the stand-ins.
_NATIVE = {
    "_has_compatible_shallow_copy_type",
    "_local_scalar_dense",
    "_pin_memory",
    "contiguous",
    "empty.memory_format",
    "empty_strided",
    "is_pinned",
    "is_set_to",
    "pin_memory",
    "record_stream",
    "resize_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
}

# Their operands may be on several devices.
_ACROSS = ("copy", "set_", "index", "_foreach", "_amp")


def registered(key: str, namespace: str) -> list[str]:
    """Ops of a namespace with a kernel for a dispatch key, without the namespace."""
    prefix = f"{namespace}::"
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _through_cpu(op: Any) -> Kernel:
    """The kernel that runs an op on its arguments seen from the host."""
    schema = op._schema
    names = [a.name for a in schema.arguments]
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    returns_written = any(r.alias_info is not None for r in schema.returns)
    across = any(word in schema.name for word in _ACROSS)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        refuse_mixed_devices(schema.name, (args, kwargs), cpu_too=not across)
        drain()
        given = dict(zip(names, args, strict=False)) | kwargs
        if any(layout.is_nz(given[name]) for name in written & given.keys()):
            raise NotImplementedError(f"{schema.name} writes a tensor in FRACTAL_NZ (simulated NPU)")
        result = op(*map_leaves(args, layout.host_nd), **map_leaves(kwargs, layout.host_nd))
        if returns_written:  # in place or out=: what was given comes back
            outs = [given[name] for name in names if name in written and name in given]
            return outs[0] if len(outs) == 1 else tuple(outs)
        asked = given.get("device")
        if asked is not None and torch.device(asked).type == "cpu":
            return result
        index = device_index(asked, (args, kwargs))
        return map_leaves(result, lambda value: to_device(value, index))

    return kernel


def _copy(through: Kernel) -> Kernel:
    """``copy_``: into FRACTAL_NZ by tiles; between host and device on the stream, if asynchronous."""
    native = torch.library.get_kernel("aten::copy_", "PrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def kernel(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        if layout.is_nz(self):
            drain()
            layout.write_nz(self, layout.host_nd(src))
        elif is_asynchronous() and _is_plain(self, src):
            native.call_boxed(keys, self, src, non_blocking)
        else:
            through(self, src, non_blocking)
        return self

    return kernel


def _is_plain(dst: Tensor, src: Tensor) -> bool:
    """Whether bytes are copied as they are, between host and device."""
    return (
        dst.device.type != src.device.type
        and dst.dtype == src.dtype
        and dst.shape == src.shape
        and dst.is_contiguous()
        and src.is_contiguous()
        and dst.numel() > 0
        and not layout.is_nz(src)
    )


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention through the CPU's kernel, so that results equal a run on the CPU bit for bit."""
    operands = (query, key, value, attn_mask)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    traced = any(isinstance(operand, FakeTensor) for operand in operands)  # no values, only shapes
    if needs_grad or traced:
        composite = torch.ops.aten._scaled_dot_product_attention_math
        return composite(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    refuse_mixed_devices("scaled_dot_product_attention", operands, cpu_too=True)
    drain()
    q, k, v, mask = map(host, operands)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return to_device(out, query.device.index)


def _histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002
    """Counts of integers too, which the CPU's kernel refuses: in float64, exact."""
    refuse_mixed_devices("histc", (self,), cpu_too=True)
    drain()
    given = host(self)
    values = given if given.is_floating_point() else given.double()
    return to_device(values.histc(bins, min, max).to(given.dtype), self.device.index)


def _override_kernels(library: torch.library.Library) -> None:
    for name in registered("PrivateUse1", "aten"):
        op = op_named(name, "aten")
        if name in _NATIVE or op is None:
            continue
        if any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns):
            continue  # a view
        kernel = _through_cpu(op)
        library.impl(name, _copy(kernel) if name == "copy_" else kernel, "PrivateUse1", allow_override=True)


def _override_composites(library: torch.library.Library) -> None:
    """Torch's own decompositions, where torch_npu's call its device kernels directly from C++."""
    for name in registered("AutogradPrivateUse1", "aten"):
        op = op_named(name, "aten")
        if op is None or name in _NATIVE:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
            for key in ("PrivateUse1", "AutogradPrivateUse1"):
                library.impl(name, functools.partial(op.decompose), key, allow_override=True)


def install_aten(library: torch.library.Library) -> None:
    """Register all of it in a library of the namespace ``aten``."""
    _override_kernels(library)
    _override_composites(library)
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key, allow_override=True)
    library.impl("histc", _histc, "PrivateUse1", allow_override=True)
