"""References of the ops that quantize: dynamic, static, by block, int4 packing."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.testing.npu_sim.kernels.codes import QUINT4X2, dtype_of, pack_int4
from fxquant.testing.npu_sim.kernels.registry import Call, reference
from fxquant.testing.npu_sim.refusals import refuse

_RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int32: (-(2**31), 2**31 - 1)}


def to_codes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values in a code's dtype: ties to even, saturating; NaN becomes 0 in integers."""
    if dtype.is_floating_point:
        top = torch.finfo(dtype).max
        return values.clamp(-top, top).to(dtype)
    low, high = _RANGES[dtype]
    return values.double().round().clamp(low, high).nan_to_num(0.0).to(dtype)


def _divided(x: Tensor, scale: Tensor) -> Tensor:
    """``x / scale``, and 0 where the scale is 0."""
    return torch.where(scale == 0, torch.zeros((), dtype=x.dtype), x / scale)


def _smoothed(call: Call) -> Tensor:
    """The input in float32, times the smooth scales of its row's group."""
    x: Tensor = call.input.float()
    if call.smooth_scales is None:
        return x
    if call.group_index is None:
        return x * call.smooth_scales.float()
    rows = torch.arange(x.numel() // max(x.shape[-1], 1))
    groups = torch.searchsorted(call.group_index.long(), rows, right=True)
    groups = groups.clamp(max=call.smooth_scales.shape[0] - 1)
    return x * call.smooth_scales.float()[groups].view(x.shape)


def _top(call: Call, dtype: torch.dtype) -> float:
    if call.dst_type_max > 0:
        return float(call.dst_type_max)
    if call.dst_type == QUINT4X2:
        return 7
    return 127 if dtype == torch.int8 else torch.finfo(dtype).max


def _code_dtype(call: Call) -> torch.dtype:
    return torch.int8 if call.dst_type == QUINT4X2 else dtype_of(call.dst_type, torch.int8)


def _dims(call: Call, x: Tensor) -> tuple[int, ...]:
    """The dimensions that share a scale."""
    dims = {"pertoken": (-1,), "perchannel": (-2,), "pertensor": tuple(range(x.dim()))}
    if call.quant_mode not in dims:
        raise NotImplementedError(f"the simulated NPU has no quant_mode {call.quant_mode!r}")
    return dims[call.quant_mode]


def _scale_shape(call: Call, scale: Tensor) -> Tensor:
    if call.quant_mode == "pertensor":
        return scale.view(1)
    return scale.squeeze(-1 if call.quant_mode == "pertoken" else -2)


@reference("npu_dynamic_quant")
def dynamic_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Codes, and ``scale = absmax / top`` in float32; both 0 where all values are 0."""
    x, dtype = _smoothed(call), _code_dtype(call)
    scale = x.abs().amax(_dims(call, x), keepdim=True) / _top(call, dtype)
    codes = _divided(x, scale)
    if call.dst_type == QUINT4X2:
        return pack_int4(codes.round().clamp(-8, 7)), _scale_shape(call, scale)
    return to_codes(codes, dtype), _scale_shape(call, scale)


@reference("npu_dynamic_quant_asymmetric")
def dynamic_quant_asymmetric(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, ``scale = (max - min) / (qmax - qmin)`` and ``offset = qmax - max / scale``."""
    x = _smoothed(call)
    if _code_dtype(call) != torch.int8:
        raise NotImplementedError("the simulated NPU quantizes asymmetrically to int8 and int4 only")
    low, high = (-8, 7) if call.dst_type == QUINT4X2 else (-128, 127)
    dims = _dims(call, x)
    scale = (x.amax(dims, keepdim=True) - x.amin(dims, keepdim=True)) / (high - low)
    offset = high - _divided(x.amax(dims, keepdim=True), scale)
    codes = (_divided(x, scale) + offset).round().clamp(low, high)
    packed = pack_int4(codes) if call.dst_type == QUINT4X2 else to_codes(codes, torch.int8)
    return packed, _scale_shape(call, scale), _scale_shape(call, offset)


def _along(name: str, call: Call, parameter: Tensor, axis: int) -> Tensor:
    """A parameter of one dimension laid along an axis of the input; others broadcast as they are."""
    if parameter.dim() != 1:
        return parameter
    size = call.input.shape[axis]
    if parameter.numel() not in {1, size}:
        refuse("npu_quantize", f"{name} has {parameter.numel()} values for dimension {axis} of {size}")
    shape = [1] * call.input.dim()
    shape[axis] = parameter.numel()
    return parameter.reshape(shape)


@reference("npu_quantize")
def quantize(call: Call) -> Tensor:
    """``x / scales + zero_points``, or ``x * scales + zero_points`` where ``div_mode`` is False."""
    axis = call.axis if call.div_mode else (-2 if call.axis == -2 else -1)
    if not -call.input.dim() <= axis < call.input.dim():
        refuse("npu_quantize", f"axis {axis} is not one of the {call.input.dim()} dimensions of input")
    x = call.input.float()
    scales = _along("scales", call, call.scales.float(), axis)
    y = x / scales if call.div_mode else x * scales
    if call.zero_points is not None:
        y = y + _along("zero_points", call, call.zero_points.float(), axis)
    if call.dtype == QUINT4X2:
        return pack_int4(y.round().clamp(-8, 7))
    return to_codes(y, dtype_of(call.dtype, torch.int8))


@reference("npu_trans_quant_param")
def trans_quant_param(call: Call) -> Tensor:
    """The scale's upper 19 bits as int64, bit 46 set, the offset in bits 37 to 45.

    Source: ops-nn, quant/trans_quant_param_v2/README.md.
    """
    bits = call.scale.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    if call.round_mode == 1:
        bits = bits + 0xFFF + ((bits >> 13) & 1)
    out = (bits & 0xFFFFE000) | (1 << 46)
    if call.offset is None:
        return out
    offset = call.offset.float().round().clamp(-256, 255).to(torch.int64)
    return (out & 0x4000FFFFFFFF) | ((offset & 0x1FF) << 37)


def scale_and_offset(scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """The float32 scale, and the offset of an int64 scale of ``npu_trans_quant_param``."""
    if scale.dtype != torch.int64:
        return scale.float(), None
    offset = (scale >> 37) & 0x1FF
    signed = (offset ^ 0x100) - 0x100
    bits = scale & 0xFFFFFFFF
    words = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    return words.view(torch.float32), signed.float()


@reference("npu_dynamic_block_quant")
def dynamic_block_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Codes and a float32 scale for each block; ``scale = min(absmax / top, 1 / min_scale)``."""
    dtype = dtype_of(call.dst_type, torch.int8)
    rows, columns = call.row_block_size, call.col_block_size
    m, n = call.x.shape[-2:]
    padded = torch.nn.functional.pad(call.x.float(), (0, -n % columns, 0, -m % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # [..., R, rows, C, columns]
    top = call.dst_type_max or (127 if dtype == torch.int8 else torch.finfo(dtype).max)
    scale = blocks.abs().amax((-3, -1), keepdim=True) / top
    if call.min_scale > 0:
        scale = scale.clamp(max=1 / call.min_scale)
    codes = to_codes(_divided(blocks, scale), dtype)
    return codes.flatten(-2).flatten(-3, -2)[..., :m, :n], scale.squeeze(-1).squeeze(-2)


@reference("npu_convert_weight_to_int4pack")
def convert_weight_to_int4pack(call: Call) -> Tensor:
    """Int32 values -8..7 ``[..., n]`` to words of eight ``[..., n / 8]``."""
    weight = call.weight
    if weight.shape[-1] % 8:
        refuse(
            "npu_convert_weight_to_int4pack",
            f"the last dimension, {weight.shape[-1]}, is not a multiple of 8",
        )
    return pack_int4(weight)
