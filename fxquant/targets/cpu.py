"""The CPU: which integer matmul is exact here.

``torch._int_mm`` on CPUs without VNNI adds pairs of products in saturating int16 (seen with
``DNNL_MAX_CPU_ISA=AVX2``: 8160 where 1032256 is right), so it is used only where it passes a
self-test in this process; the exact reference runs elsewhere.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fxquant import numerics
from fxquant.grouped_ops import fake_grouped_scaled_mm, grouped_scaled_mm_with
from fxquant.ops import fake_scaled_mm, no_gradient, scaled_mm_with
from fxquant.scheme import SCHEMES, Scheme
from fxquant.target import Kernel, Limit, Target


def _sums(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    return _int_mm(a_MK, b_NK) if a_MK.dtype == torch.int8 else numerics.scaled_sums(a_MK, b_NK)


def _int_mm(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    if 0 in a_MK.shape or 0 in b_NK.shape:
        return torch.zeros((a_MK.shape[0], b_NK.shape[0]), dtype=torch.int32, device=a_MK.device)
    if a_MK.shape[1] == 1:  # the transposed view has strides (1, 1), and _int_mm reads past its end
        return numerics.int_matmul(a_MK, b_NK)
    return torch._int_mm(a_MK.contiguous(), b_NK.contiguous().t())


@torch.library.custom_op("fxquant_cpu::scaled_mm", mutates_args=(), device_types="cpu")
def scaled_mm(
    x_codes: Tensor,
    w_codes: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``fxquant::scaled_mm`` through oneDNN's int8 matmul (``torch._int_mm``)."""
    return scaled_mm_with(_sums, x_codes, w_codes, x_scale, w_scale, bias, out_dtype)


scaled_mm.register_fake(fake_scaled_mm)
no_gradient(scaled_mm)


@torch.library.custom_op("fxquant_cpu::grouped_scaled_mm", mutates_args=(), device_types="cpu")
def grouped_scaled_mm(
    x_codes: Tensor,
    w_codes: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """``fxquant::grouped_scaled_mm`` through oneDNN's int8 matmul, a call for each group."""
    return grouped_scaled_mm_with(_sums, x_codes, w_codes, x_scale, w_scale, offsets, out_dtype)


grouped_scaled_mm.register_fake(fake_grouped_scaled_mm)
no_gradient(grouped_scaled_mm)


def int_mm_fault() -> str | None:
    """Why ``torch._int_mm`` is not to be trusted in this process, or None where it is.

    Operands of 127 overflow int16 pairs; with one 126 and K = 1056 they sum to an odd number past
    2^24, which float32 cannot hold; odd sizes, single rows and single columns take other code paths.
    """
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 5, 64), (17, 40, 1056), (3, 33, 15), (2, 8, 4104), (5, 1, 7), (2, 7, 1), (4, 3, 2)):
        signs = torch.randint(0, 2, (m, k), generator=generator, device="cpu") * 254 - 127
        full = torch.full((n, k), 127, dtype=torch.int8, device="cpu")
        mixed = torch.randint(-127, 128, (n, k), generator=generator, device="cpu").to(torch.int8)
        odd = torch.full((m, k), 127, dtype=torch.int8, device="cpu")
        odd[:, -1] = 126
        for a in (signs.to(torch.int8), odd):
            for b in (full, -full, mixed):
                try:
                    got = _int_mm(a, b)
                except RuntimeError as error:
                    return f"torch._int_mm raises: {str(error).splitlines()[0]}"
                if not torch.equal(got, numerics.int_matmul(a, b)):
                    return "torch._int_mm gives wrong sums on this CPU (as it does without VNNI)"
    return None


_FLOATS = {
    op: Kernel(op=op, reason=reason)
    for op, reason in (
        ("fxquant::embedding_dequant", "reference: rows of codes gathered, then made floats"),
        ("fxquant::dequantize_weight", "reference: a layer's floats, then the float convolution"),
    )
}


@functools.cache
def cpu_target() -> Target:
    """The table of this machine's CPU, after the self-test."""
    source = "int32 sums of 127 * 127"
    limits = [
        Limit(op=op, axis="K", maximum=numerics.INT32_K, source=source)
        for op in ("fxquant::scaled_mm", "fxquant::grouped_scaled_mm")
    ]
    names = ("int8", "w4a8_g128", "int8_weight_only")  # of each op, one row
    schemes = [SCHEMES[name] for name in names]
    return Target(
        name="cpu",
        device_type="cpu",
        kernels={
            **{scheme.op: cpu_kernel(scheme) for scheme in schemes},
            **{scheme.grouped_op: _grouped_kernel(scheme) for scheme in schemes},
            **_FLOATS,
        },
        limits=tuple(limits),
        choose=cpu_kernel,
        choose_grouped=_grouped_kernel,
    )


def _grouped_kernel(scheme: Scheme) -> Kernel:
    """What multiplies with experts of ``scheme``."""
    kernel = cpu_kernel(scheme)
    return Kernel(op=kernel.op.replace("::", "::grouped_"), reason=f"{kernel.reason}; a call for each group")


def cpu_kernel(scheme: Scheme) -> Kernel:
    """What multiplies with weights of ``scheme`` on this machine."""
    if scheme.op == "fxquant::weight_only_mm":
        return Kernel(op=scheme.op, reason="reference: values of rows at a time, then a float matmul")
    if scheme.op == "fxquant::block_mm":
        return Kernel(op=scheme.op, reason="reference: products of each block along K, scaled in float32")
    assert scheme.weight is not None
    if scheme.weight.type.is_float:
        return Kernel(op=scheme.op, reason="reference: float8 codes multiplied in float32")
    return int8_kernel()


@functools.cache
def int8_kernel() -> Kernel:
    """What multiplies int8 codes, after the self-test."""
    fault = int_mm_fault()
    if fault is None:
        return Kernel(op="fxquant_cpu::scaled_mm", reason="torch._int_mm passed its self-test")
    return Kernel(op="fxquant::scaled_mm", reason=f"exact reference: {fault}")
