"""References of ``npu_quant_matmul`` and ``npu_quant_matmul_dequant``.

Legend: M rows of x1, N columns of x2, K summed; leading dimensions are a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.testing.npu_sim.kernels.codes import (
    E2M1,
    E8M0,
    HIFLOAT8,
    dtype_of,
    e8m0_values,
    unpack_fp4,
    unpack_int4,
    unpack_int4_matrix,
)
from fxquant.testing.npu_sim.kernels.exact import float_matmul, int_matmul
from fxquant.testing.npu_sim.kernels.quantize import scale_and_offset, to_codes
from fxquant.testing.npu_sim.kernels.registry import Call, reference

_MX_BLOCK = 32
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _unsupported(what: str) -> NotImplementedError:
    return NotImplementedError(f"npu_quant_matmul: the simulated NPU has no reference for {what}")


def finish(sums: Tensor, call: Call, bias: Tensor | None) -> Tensor:
    """``sums`` (int32 or float32) to the output: integer bias, scales, float bias, offset, cast.

    An int32 output is the sums as they are: the device skips the scales (ops-nn,
    quant_batch_matmul_v3/op_kernel/quant_batch_matmul_v3_cube_basic.h, where y is int32).
    """
    out_dtype = dtype_of(call.output_dtype, torch.int8)
    if bias is not None and bias.dtype == torch.int32:
        sums = sums + bias
        bias = None
    if out_dtype == torch.int32:
        return sums.to(torch.int32)
    scale, packed_offset = scale_and_offset(_as_the_device_takes_it(call.scale, call, out_dtype))
    out = sums.float() * scale
    if call.pertoken_scale is not None:
        out = out * call.pertoken_scale.float().unsqueeze(-1)
    if bias is not None:
        out = out + bias.float()
    if out_dtype == torch.int8:
        offset = call.offset if call.offset is not None else packed_offset
        return to_codes(out if offset is None else out.round() + offset.float().round(), torch.int8)
    return to_codes(out, out_dtype) if out_dtype in _FP8 else out.to(out_dtype)


def _as_the_device_takes_it(scale: Tensor, call: Call, out_dtype: torch.dtype) -> Tensor:
    """Without per-token scales, int8 and float16 outputs take float32 scales cut to their upper 19 bits."""
    if scale.dtype != torch.float32 or call.pertoken_scale is not None or out_dtype == torch.bfloat16:
        return scale
    return (scale.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _operands(call: Call) -> tuple[Tensor, Tensor]:
    """x1 ``[..., M, K]`` and x2 ``[..., K, N]``, unpacked: int8 codes or float32 values."""
    x1, x2 = call.x1, call.x2
    if HIFLOAT8 in {call.x1_dtype, call.x2_dtype}:
        raise _unsupported("hifloat8")
    if x1.dtype == x2.dtype == torch.int32:
        x1 = unpack_int4(x1)
        return x1, unpack_int4_matrix(x2, k=x1.shape[-1])
    if x1.dtype == x2.dtype == torch.int8 and call.x2_dtype is None:
        return x1, x2
    if call.x1_dtype == E2M1:
        x1 = unpack_fp4(x1.view(torch.uint8), E2M1)
    elif x1.dtype in _FP8:
        x1 = x1.float()
    else:
        raise _unsupported(f"x1 {x1.dtype} with x2 {x2.dtype}")
    if call.x2_dtype == E2M1:
        x2 = _unpacked_fp4_matrix(x2.view(torch.uint8), k=x1.shape[-1])
    elif x2.dtype in _FP8:
        x2 = x2.float()
    else:
        raise _unsupported(f"x1 {call.x1.dtype} with x2 {x2.dtype}")
    return x1, x2


def _unpacked_fp4_matrix(packed: Tensor, *, k: int) -> Tensor:
    if packed.shape[-2] == k:
        return unpack_fp4(packed, E2M1)
    return unpack_fp4(packed.transpose(-1, -2), E2M1).transpose(-1, -2)


def _mx_scales(call: Call, k: int) -> tuple[Tensor, Tensor]:
    """Scales of each element: ``[M, K]`` of ``[M, K / 64, 2]``, ``[K, N]`` of ``[K / 64, N, 2]``."""
    rows = e8m0_values(call.pertoken_scale).flatten(-2)
    columns = e8m0_values(call.scale).transpose(-1, -2).flatten(-3, -2)
    left = rows.repeat_interleave(_MX_BLOCK, -1)[..., :k]
    right = columns.repeat_interleave(_MX_BLOCK, -2)[..., :k, :]
    return left, right


def _mx(call: Call) -> Tensor:
    x1, x2 = _operands(call)
    left, right = _mx_scales(call, x1.shape[-1])
    out = float_matmul(x1 * left, x2 * right)
    if call.bias is not None:
        out = out + call.bias.float()
    return out.to(dtype_of(call.output_dtype, torch.int8))


def _blocks(call: Call) -> Tensor:
    """Scales ``[K / 128, N / 128]`` and ``[M / g, K / 128]``: each block of K is summed, scaled and added."""
    x1, x2 = _operands(call)
    rows, columns, block = call.group_sizes
    m, k, n = x1.shape[-2], x1.shape[-1], x2.shape[-1]
    left = call.pertoken_scale.float().repeat_interleave(max(rows, 1), -2)[..., :m, :]
    right = call.scale.float().repeat_interleave(max(columns, 1), -1)[..., :n]
    matmul = int_matmul if x1.dtype == torch.int8 else float_matmul
    out = torch.zeros((), dtype=torch.float32)
    for index, start in enumerate(range(0, k, block)):
        part = matmul(x1[..., start : start + block], x2[..., start : start + block, :]).float()
        out = out + part * left[..., index : index + 1] * right[..., index : index + 1, :]
    if call.bias is not None:
        out = out + call.bias.float()
    return out.to(dtype_of(call.output_dtype, torch.int8))


@reference("npu_quant_matmul")
def quant_matmul(call: Call) -> Tensor:
    """``(x1 @ x2 + bias) * scale * pertoken_scale``, or ``x1 @ x2 * scale * pertoken_scale + bias``."""
    if call.y_scale is not None or {call.x1.dtype, call.x2.dtype} == {torch.int8, torch.int32}:
        raise _unsupported("A8W4 operands")
    if call.scale_dtype == E8M0 or call.scale.dtype == torch.float8_e8m0fnu:
        return _mx(call)
    if call.group_sizes is not None and max(call.group_sizes) > 1:
        return _blocks(call)
    x1, x2 = _operands(call)
    sums = int_matmul(x1, x2) if x1.dtype == torch.int8 else float_matmul(x1, x2)
    return finish(sums, call, call.bias)


@reference("npu_quant_matmul_dequant")
def quant_matmul_dequant(call: Call) -> Tensor:
    """X float16 ``[M, K]`` quantized by token, or with a given scale, times codes ``[N, K]``."""
    if call.quant_mode not in {"pertoken", "pertensor"}:
        raise NotImplementedError(
            f"npu_quant_matmul_dequant: the simulated NPU has no mode {call.quant_mode!r}"
        )
    x = call.x.float()
    if call.smooth_scale is not None:
        x = x * call.smooth_scale.float()
    if call.x_scale is not None:
        scale = call.x_scale.float().view(-1, 1)
    elif call.quant_mode == "pertoken":
        scale = x.abs().amax(-1, keepdim=True) / 127
    else:
        scale = x.abs().amax().view(1, 1) / 127
    codes = to_codes(torch.where(scale == 0, 0.0, x / scale), torch.int8)
    sums = int_matmul(codes, call.quantized_weight.t())
    return (sums.float() * scale * call.weight_scale.float()).to(call.x.dtype)
