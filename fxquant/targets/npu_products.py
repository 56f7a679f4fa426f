"""The NPU's calls for one part of a weight, for schemes other than dynamic int8.

Each rule gives ``[M, n]`` in the dtype ``dtype`` for a part of ``n`` output features. Constants are as the
form has them (see ``held``), so that only views stand between them and the ops. Legend: M rows, n output
features, K input features, G blocks along K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fxquant.scheme import FULL, QuantSpec
from fxquant.targets.npu_build import Build, Val
from fxquant.targets.npu_fakes import E8M0, dtype_code

aten = torch.ops.aten

Family = Literal["weight only", "static", "fp8", "fp8 block", "mx fp8", "mx fp4"]

QINT8 = 12
E4M3 = dtype_code(torch.float8_e4m3fn)
E2M1 = 296
MX_GROUPS = (1, 1, 32)
BLOCK_GROUPS = (1, 128, 128)
PER_INT32 = 8
"""Codes of 4 bits in an int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Constants of a part: ``codes`` ``[n, ...]``, or ``[K, n]`` with ``kn``; scale and zero ``[n, G]``.

    ``deq_scale`` ``[n]`` and ``act_scale`` ``[1]`` are those of a static activation.
    """

    codes: Val
    scale: Val
    zero: Val = None
    deq_scale: Val = None
    act_scale: Val = None
    bias: Val = None
    kn: bool = False


def group_of(spec: QuantSpec, k: int) -> int:
    """The size of the groups along K that the op is told, 0 where a row has one scale."""
    columns = spec.block[1]
    return 0 if columns == FULL or columns >= k else columns


def weight_only(b: Build, x: Val, part: Part, spec: QuantSpec, k: int) -> Val:
    """``x [M, K]`` times int8 or int4 codes; scale and offset in x's dtype, bias as D:5452 wants it."""
    codes, kwargs = part.codes, {}
    if spec.packed:  # bytes of two codes along K, whose lower half comes first, as in an int32 of eight
        codes = b.call(aten.view.dtype, codes, torch.int32)
    group = group_of(spec, k)
    if part.zero is not None:
        kwargs["antiquant_offset"] = _by_column(b, part.zero, group)
    if part.bias is not None:
        wanted = torch.float32 if b.value(x).dtype == torch.bfloat16 else torch.float16
        kwargs["bias"] = b.cast(part.bias, wanted)
    if group:
        kwargs["antiquant_group_size"] = group
    turned, scale = b.call(aten.t.default, codes), _by_column(b, part.scale, group)
    return b.npu("npu_weight_quant_batchmatmul", x, x, turned, scale, **kwargs)


def _by_column(b: Build, parameter: Val, group: int) -> Val:
    """``[n, G]`` as the op takes it: ``[G, n]``, or ``[n]`` of one for each row."""
    return b.call(aten.t.default, parameter) if group else b.call(aten.reshape.default, parameter, [-1])


def static_codes(b: Build, x: Val, act_scales: Val) -> Val:
    """Codes int8 ``[M, K]``: ``npu_quantize`` wants a scale for each entry of its axis (D:11342)."""
    return b.npu("npu_quantize", x, x, act_scales, None, QINT8, 1)


def static(b: Build, codes: Val, part: Part, dtype: torch.dtype) -> Val:
    """Codes ``[M, K]`` times int8 codes with one scale, the product of both.

    For float16 that is an int64 (D:5002), beside which the op takes no float bias: then the scale of the
    activation goes in place of the scales of tokens.
    """
    kwargs, scale = {}, part.deq_scale
    if part.bias is not None:
        kwargs["bias"] = part.bias if b.value(part.bias).dtype == dtype else b.cast(part.bias, torch.float32)
        if dtype == torch.float16:
            scale = b.call(aten.reshape.default, part.scale, [-1])
            token = b.call(aten.expand.default, part.act_scale, [b.size(codes, 0)])
            kwargs["pertoken_scale"] = b.call(
                aten.clone.default, token, memory_format=torch.contiguous_format
            )
    weight = part.codes if part.kn else b.call(aten.t.default, part.codes)
    kwargs["output_dtype"] = dtype_code(dtype)
    return b.npu("npu_quant_matmul", codes, codes, weight, scale, **kwargs)


def quantized(b: Build, x: Val, family: Family) -> tuple[Val, Val]:
    """Codes of ``x [M, K]`` and their scales, as the op for ``family`` takes them."""
    if family == "fp8":
        made = b.npu("npu_dynamic_quant", x, x, dst_type=E4M3)
    elif family == "fp8 block":
        made = b.npu("npu_dynamic_block_quant", x, x, dst_type=E4M3)
    else:
        made = b.npu("npu_dynamic_mx_quant", x, x, dst_type=E4M3 if family == "mx fp8" else E2M1)
    codes, scale = b.items(made, 2)
    return codes, scale


def fp8(b: Build, codes: Val, token: Val, part: Part, dtype: torch.dtype) -> Val:
    """Codes e4m3 ``[M, K]`` with a scale for each token, times codes with a scale for each column."""
    kwargs = {} if part.bias is None else {"bias": b.cast(part.bias, torch.float32)}
    scale = b.call(aten.reshape.default, part.scale, [-1])
    turned = b.call(aten.t.default, part.codes)
    return b.npu(
        "npu_quant_matmul", codes, codes, turned, scale,
        pertoken_scale=token, **kwargs, output_dtype=dtype_code(dtype),
    )  # fmt: skip


def fp8_block(b: Build, codes: Val, token: Val, part: Part, dtype: torch.dtype) -> Val:
    """Codes e4m3 with scales for 128 features of a token, times those with scales for 128 x 128.

    The op takes no bias here: it is added in float32, before the cast.
    """
    exact = dtype if part.bias is None else torch.float32
    turned, scale = b.call(aten.t.default, part.codes), b.call(aten.t.default, part.scale)
    out = b.npu(
        "npu_quant_matmul", codes, codes, turned, scale,
        pertoken_scale=token, output_dtype=dtype_code(exact), group_sizes=list(BLOCK_GROUPS),
    )  # fmt: skip
    if part.bias is None:
        return out
    return b.cast(b.call(aten.add.Tensor, out, b.cast(part.bias, torch.float32)), dtype)


def mx(b: Build, codes: Val, exponents: Val, part: Part, dtype: torch.dtype) -> Val:
    """Codes e4m3 or e2m1, exponents ``[M, ceil(K / 64), 2]`` times ``[ceil(K / 64), n, 2]``."""
    kwargs = {} if part.bias is None else {"bias": b.cast(part.bias, torch.float32)}
    if b.value(codes).dtype == torch.uint8:
        kwargs |= {"x1_dtype": E2M1, "x2_dtype": E2M1}
    n, groups = b.value(part.scale).shape
    pairs = b.call(aten.view.default, part.scale, [n, groups // 2, 2])
    scale = b.call(aten.transpose.int, pairs, 0, 1)
    turned = b.call(aten.t.default, part.codes)
    return b.npu(
        "npu_quant_matmul", codes, codes, turned, scale,
        pertoken_scale=exponents, **kwargs, output_dtype=dtype_code(dtype),
        pertoken_scale_dtype=E8M0, scale_dtype=E8M0, group_sizes=list(MX_GROUPS),
    )  # fmt: skip


PRODUCTS = {"fp8": fp8, "fp8 block": fp8_block, "mx fp8": mx, "mx fp4": mx}
"""Rules for codes that ``quantized`` gives."""
