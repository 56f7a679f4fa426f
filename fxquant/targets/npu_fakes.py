# ruff: noqa: ARG001 - the signatures are those of the ops
"""Shapes and dtypes of the NPU's ops, as torch_npu 2.13.0's Meta kernels give them.

Plain functions on tensors: they check what the Meta kernels check, and allocate their results on the
operands' device, so they also serve calls on empty operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fxquant.targets.npu_table import CODES

_CARRIERS = {
    "qint8": torch.int8, "quint8": torch.uint8, "int4": torch.uint8, "hifloat8": torch.uint8,
    "float8_e8m0fnu": torch.uint8, "float4_e2m1fn_x2": torch.uint8, "float4_e1m2fn_x2": torch.uint8,
    "quint4x2": torch.int32,
}  # fmt: skip
"""Dtypes of the tensors that hold what torch has no dtype of its own for."""

_BY_CODE = {code: _CARRIERS.get(name) or getattr(torch, name) for code, name in CODES.items()}

E8M0, E4M3, INT32 = 293, 292, 3
FP4 = (296, 297)


def dtype_code(dtype: torch.dtype) -> int:
    """What stands for a torch dtype in an ``int`` dtype argument."""
    name = str(dtype).removeprefix("torch.")
    return next(code for code, known in CODES.items() if known == name)


def _require(op: str, ok: bool, text: str) -> None:
    if not ok:
        raise RuntimeError(f"npu::{op}: {text}")


def _dtype(op: str, code: int | None, default: torch.dtype) -> torch.dtype:
    if code is None:
        return default
    _require(op, code in _BY_CODE, f"dtype code {code} is not known")
    return _BY_CODE[code]


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """``[..., m, k] x [..., k, n] -> [..., m, n]`` (M:4480)."""
    op = "npu_quant_matmul"
    plain = x1_dtype is None and x2_dtype is None
    fp4 = (x1_dtype, x2_dtype) == (FP4[0], FP4[0]) and x2.stride(-2) == 1  # the shapes are those of bytes
    _require(op, (plain or fp4) and y_scale is None, "a fake is there for fp4 times transposed fp4 alone")
    _require(
        op, {scale_dtype, pertoken_scale_dtype} <= {None, E8M0}, "scale dtypes are float8_e8m0fnu or none"
    )
    _require(op, 2 <= x1.dim() <= 6 and 2 <= x2.dim() <= 6, f"x1, x2 have 2-6 dims: {x1.dim()}, {x2.dim()}")
    packed = x2.dtype == torch.int32
    both = packed and x1.dtype == torch.int32
    turned = both and x1.size(-1) == x2.size(-2)
    k = x1.size(-1) * (8 if both and not turned else 1)
    _require(op, k == x2.size(-2), f"k of x1 is {k}, of x2 {x2.size(-2)}")
    n = x2.size(-1) * (8 if packed and not turned else 1)
    if group_sizes is None and not (packed and not both):
        for name, one in (("scale", scale), ("offset", offset)):
            fits = one is None or (one.dim() == 1 and one.size(0) in (1, n))
            _require(op, fits, f"{name} is 1-D of 1 or {n}, got {None if one is None else tuple(one.shape)}")
        flat = pertoken_scale is None or pertoken_scale.dim() == 1
        _require(op, flat, "pertoken_scale is 1-D: flatten x1 to 2-D first")
    out = _dtype(op, output_dtype, torch.int8)
    _check_dtypes(scale, offset, pertoken_scale, bias, out)
    batch: tuple[int, ...] = ()
    if x1.dim() + x2.dim() > 4:
        batch = tuple(cast("Any", torch).broadcast_shapes(x1.shape[:-2], x2.shape[:-2]))
    if bias is not None:
        shape = tuple(bias.shape)
        fits = shape == (n,) or (len(batch) == 1 and shape == (batch[0], 1, n))
        _require(op, fits, f"bias is [{n}] or [batch, 1, {n}], got {list(shape)}")
    return x1.new_empty((*batch, x1.size(-2), n), dtype=out)


def _check_dtypes(
    scale: Tensor, offset: Tensor | None, token: Tensor | None, bias: Tensor | None, out: torch.dtype
) -> None:
    op = "npu_quant_matmul"
    half = scale.dtype != torch.bfloat16 or out in (torch.bfloat16, torch.int32)
    _require(op, half, f"a bfloat16 scale gives bfloat16 or int32, not {out}")
    whole = out != torch.int32 or scale.dtype in (torch.bfloat16, torch.float32)
    _require(op, whole, f"an int32 result needs a bfloat16 or float32 scale, got {scale.dtype}")
    _require(op, offset is None or offset.dtype == torch.float32, "offset is float32")
    if bias is None:
        return
    _require(
        op, bias.dtype != torch.bfloat16 or out == torch.bfloat16, "a bfloat16 bias needs a bfloat16 result"
    )
    _require(op, out != torch.int32 or bias.dtype == torch.int32, "an int32 result needs an int32 bias")
    fits = bias.dtype != torch.float16 or (token is not None and out == torch.float16)
    _require(op, fits, "a float16 bias needs pertoken_scale and a float16 result")


def dynamic_quant(
    input: Tensor,  # noqa: A002 - the op's own name
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Codes as the input, scale float32 without the last dim (M:5040; rank 1 is refused, D:4654)."""
    op = "npu_dynamic_quant"
    _require(op, input.dim() >= 2, f"input has rank >= 2, got {input.dim()}")
    shape = list(input.shape[:-1])
    if quant_mode == "perchannel":
        shape = [*input.shape[:-2], input.size(-1)]
    scale = input.new_empty([1] if quant_mode == "pertensor" else shape, dtype=torch.float32)
    dtype = _dtype(op, dst_type, torch.int8)
    if dtype == torch.int32:
        _require(op, input.size(-1) % 8 == 0, "quint4x2 needs a last dim that is a multiple of 8")
        return input.new_empty((*input.shape[:-1], input.size(-1) // 8), dtype=dtype), scale
    return torch.empty_like(input, dtype=dtype), scale


def weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    """``[m, k] x [k, n] -> [m, n]`` in x's dtype (M:4002)."""
    packed = weight.dtype in (torch.int32, torch.float32) and weight.is_contiguous()
    n = weight.size(1) * (8 if packed else 1)
    return x.new_empty((x.size(0), n), dtype=x.dtype if quant_scale is None else torch.int8)


def quantize(
    input: Tensor,  # noqa: A002 - the op's own name
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    """Codes as the input (M:4993); the length of scales is checked as the C++ code does on a device."""
    op = "npu_quantize"
    if div_mode and scales.dim() == 1:
        size = input.size(axis)
        _require(op, scales.size(0) == size, f"scales has {scales.size(0)} entries for {size} on axis {axis}")
    made = _dtype(op, dtype, torch.int8)
    if CODES.get(dtype) == "quint4x2":
        _require(op, input.size(-1) % 8 == 0, "quint4x2 needs a last dim that is a multiple of 8")
        return input.new_empty((*input.shape[:-1], input.size(-1) // 8), dtype=made)
    return torch.empty_like(input, dtype=made)


def trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0) -> Tensor:
    """int64 as the scale, or as the offset if that is longer (M:4960)."""
    op = "npu_trans_quant_param"
    flat = scale.dim() == 1 or (scale.dim() == 2 and scale.size(0) == 1)
    _require(op, flat, f"scale is [n] or [1, n], got {list(scale.shape)}")
    _require(op, round_mode in (None, 0, 1), f"round_mode is 0 or 1, got {round_mode}")
    longer = offset if offset is not None and offset.numel() > scale.numel() else scale
    return longer.new_empty(longer.shape, dtype=torch.int64)


def grouped_matmul(
    x: Sequence[Tensor], weight: Sequence[Tensor], *, group_list: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """``[M, k] x [E, k, n] -> [M, n]`` for one tensor each and split_item 2 or 3 (M:3504)."""
    op = "npu_grouped_matmul"
    single = len(x) == len(weight) == 1 and weight[0].dim() == 3 and options.get("split_item") in (2, 3)
    _require(op, single and group_list is not None, "the fake knows one x, one 3-D weight, split_item 2 or 3")
    _require(op, options.get("group_type") in (-1, 0), f"group_type is 0, got {options.get('group_type')}")
    turned = weight[0].stride(-2) == 1 and weight[0].stride(-1) == weight[0].size(-2)
    n = weight[0].size(2) * (8 if weight[0].dtype == torch.int32 and not turned else 1)
    if (
        options.get("x_dtype") in FP4
        and options.get("weight_dtype") in FP4
        and x[0].size(1) != weight[0].size(1)
    ):
        n *= 2  # packed along N
    dtype = _dtype(op, options.get("output_dtype"), x[0].dtype)
    return [x[0].new_empty((x[0].size(0), n), dtype=dtype)]


def quant_matmul_dequant(
    x: Tensor,
    quantized_weight: Tensor,
    weight_scale: Tensor,
    *,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_offset: Tensor | None = None,
    smooth_scale: Tensor | None = None,
    quant_mode: str | None = "pertoken",
) -> Tensor:
    """``[m, k] x [n, k] -> [m, n]`` in float16 (M:4637)."""
    op = "npu_quant_matmul_dequant"
    _require(op, x.dim() == 2 and x.dtype == torch.float16, f"x is float16 [m, k], got {x.dtype} {x.dim()}-D")
    codes = quantized_weight.dim() == 2 and quantized_weight.dtype == torch.int8
    _require(op, codes and quantized_weight.size(1) == x.size(1), "quantized_weight is int8 [n, k]")
    scales = weight_scale.dim() == 1 and weight_scale.dtype == torch.float32
    _require(op, scales and weight_scale.size(0) == quantized_weight.size(0), "weight_scale is float32 [n]")
    return x.new_empty((x.size(0), weight_scale.size(0)))


def dynamic_mx_quant(
    input: Tensor,  # noqa: A002 - the op's own name
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Codes, and e8m0 exponents as uint8 with a last dim of 2 (M:5109)."""
    op = "npu_dynamic_mx_quant"
    _require(op, -input.dim() <= axis < input.dim(), f"axis {axis} is out of range")
    _require(op, block_size % 32 == 0 and 0 < block_size <= 1024, f"block_size {block_size}")
    _require(op, scale_alg in (0, 1, 2), f"scale_alg {scale_alg}")
    shape = [*input.shape, 2]
    blocks = -(-input.size(axis) // block_size)
    shape[axis % input.dim()] = (blocks + 1) // 2
    scale = input.new_empty(shape, dtype=torch.uint8)
    dtype = _dtype(op, dst_type, torch.uint8)
    if dst_type in FP4:
        _require(op, input.size(-1) % 2 == 0, "fp4 needs an even last dim")
        return input.new_empty((*input.shape[:-1], input.size(-1) // 2), dtype=dtype), scale
    return torch.empty_like(input, dtype=dtype), scale


def dynamic_block_quant(
    x: Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 1,
    row_block_size: int = 1,
    col_block_size: int = 128,
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Codes, and float32 scales with dims divided by the block, rounded up (M:6526)."""
    op = "npu_dynamic_block_quant"
    _require(op, x.dim() in (2, 3), f"x has 2 or 3 dims, got {x.dim()}")
    shape = (*x.shape[:-2], -(-x.size(-2) // row_block_size), -(-x.size(-1) // col_block_size))
    codes = x.new_empty(x.shape, dtype=_dtype(op, dst_type, torch.int8))
    return codes, x.new_empty(shape, dtype=torch.float32)


def format_cast(
    input: Tensor,  # noqa: A002 - the op's own name
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """The logical shape stays (D:1274); torch_npu has no Meta kernel for it."""
    return torch.empty_like(input)


def convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """int32 ``[a, b]`` -> ``[a, b / 8]`` (D:5686-5797); torch_npu has no Meta kernel for it."""
    op = "npu_convert_weight_to_int4pack"
    _require(op, weight.dim() == 2 and weight.dtype == torch.int32, "weight is int32 [a, b]")
    _require(op, weight.size(1) % 8 == 0, f"the last dim is a multiple of 8, got {weight.size(1)}")
    return weight.new_empty((weight.size(0), weight.size(1) // 8))


FAKES: dict[str, Callable[..., Any]] = {
    "npu_quant_matmul": quant_matmul,
    "npu_dynamic_quant": dynamic_quant,
    "npu_weight_quant_batchmatmul": weight_quant_batchmatmul,
    "npu_quantize": quantize,
    "npu_trans_quant_param": trans_quant_param,
    "npu_grouped_matmul": grouped_matmul,
    "npu_quant_matmul_dequant": quant_matmul_dequant,
    "npu_dynamic_mx_quant": dynamic_mx_quant,
    "npu_dynamic_block_quant": dynamic_block_quant,
    "npu_format_cast": format_cast,
    "npu_convert_weight_to_int4pack": convert_weight_to_int4pack,
}
