"""The dialect: target-independent ``fxquant::`` ops, each with schema, fake and reference.

A spec travels as its canonical text. Every fake checks what the real op checks. None of the ops
has a gradient: quantized weights serve inference, and a backward pass through them raises.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from fxquant import numerics
from fxquant.errors import QuantizedWeightError, TiedWeightError
from fxquant.scheme import QuantSpec

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that activations, weights and outputs may have."""


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise RuntimeError(f"fxquant: {text}")


def no_gradient(op: torch._library.custom_ops.CustomOpDef) -> None:
    """Make a backward pass through ``op`` raise with what to do."""

    def backward(ctx: object, *grads: object) -> None:
        raise QuantizedWeightError(
            f"{op._qualname} has no gradient: quantized weights serve inference. Call the model "
            "under torch.no_grad(), or keep the layers to be trained float with ignore=[...]."
        )

    op.register_autograd(backward)


@torch.library.custom_op("fxquant::quantize_act", mutates_args=())
def quantize_act(x: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    """Dynamic quantization of an activation ``[..., K]``: codes ``[..., K]``, scale ``[..., 1]``."""
    _check_quantize_act(x)
    return numerics.quantize_act(x, QuantSpec.parse(spec))


def _check_quantize_act(x: Tensor) -> None:
    _require(x.dim() >= 1, f"quantize_act needs a tensor of rank >= 1, got rank {x.dim()}")
    _require(x.dtype in FLOATS, f"quantize_act takes {FLOATS}, got {x.dtype}")


@quantize_act.register_fake
def _(x: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    _check_quantize_act(x)
    numerics.check_per_row(QuantSpec.parse(spec))
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    return codes, torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


def check_scaled_mm(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> None:
    """What every kernel that stands for ``scaled_mm`` demands of its operands."""
    n, k = w.shape if w.dim() == 2 else (-1, -1)
    _require(w.dim() == 2 and w.dtype == torch.int8, f"w_codes must be int8 [N, K], got {w.dtype} {w.shape}")
    _require(
        x.dim() >= 1 and x.dtype == torch.int8, f"x_codes must be int8 [..., K], got {x.dtype} {x.shape}"
    )
    _require(x.shape[-1] == k, f"x_codes has K = {x.shape[-1]}, w_codes has K = {k}")
    _require(k <= numerics.INT32_K, f"K = {k} overflows int32 sums (at most {numerics.INT32_K})")
    _require(x_scale.dtype == torch.float32 and w_scale.dtype == torch.float32, "scales must be float32")
    _require(tuple(x_scale.shape) == (*x.shape[:-1], 1), f"x_scale must be [..., 1], got {x_scale.shape}")
    _require(tuple(w_scale.shape) == (n, 1), f"w_scale must be [{n}, 1], got {w_scale.shape}")
    _require(dtype in FLOATS, f"out_dtype must be one of {FLOATS}, got {dtype}")
    if bias is not None:
        _require(tuple(bias.shape) == (n,), f"bias must be [{n}], got {bias.shape}")


def scaled_mm_with(
    matmul: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``scaled_mm`` through ``matmul(a_MK, b_NK) -> int32 [M, N]``, for any leading dimensions."""
    check_scaled_mm(x, w, x_scale, w_scale, bias, dtype)
    n, k = w.shape
    m = x_scale.numel()
    sums = matmul(x.reshape(m, k), w)
    out = numerics.apply_scales(sums, x_scale.reshape(m, 1), w_scale, bias, dtype)
    return out.reshape(*x.shape[:-1], n)


def fake_scaled_mm(
    x_codes: Tensor,
    w_codes: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The fake of ``scaled_mm`` and of every kernel that stands for it."""
    check_scaled_mm(x_codes, w_codes, x_scale, w_scale, bias, out_dtype)
    shape = (*x_codes.shape[:-1], w_codes.shape[0])
    return torch.empty(shape, dtype=out_dtype, device=x_codes.device)


@torch.library.custom_op("fxquant::scaled_mm", mutates_args=())
def scaled_mm(
    x_codes: Tensor,
    w_codes: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``(x_codes @ w_codes.t()) * x_scale * w_scale + bias``: ``[..., K] x [N, K] -> [..., N]``.

    Codes accumulate in int32, exactly; both scales and the bias are applied in float32 before the
    cast to ``out_dtype``.
    """
    return scaled_mm_with(numerics.int_matmul, x_codes, w_codes, x_scale, w_scale, bias, out_dtype)


scaled_mm.register_fake(fake_scaled_mm)


@torch.library.custom_op("fxquant::quantize_weight", mutates_args=())
def quantize_weight(w: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    """Codes ``[N, K]`` of a float weight ``[N, K]`` and a scale for each block: ``[N, 1]`` per channel."""
    _check_weight(w)
    return numerics.quantize_weight(w, QuantSpec.parse(spec))


def _check_weight(w: Tensor) -> None:
    _require(w.dim() == 2, f"quantize_weight takes [N, K], got {w.shape}")
    _require(w.dtype in FLOATS, f"quantize_weight takes {FLOATS}, got {w.dtype}")


@quantize_weight.register_fake
def _(w: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    _check_weight(w)
    parsed = QuantSpec.parse(spec)
    numerics.check_weight_spec(parsed)
    codes = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    shape = numerics.scale_shape((w.shape[0], w.shape[1]), parsed)
    return codes, torch.empty(shape, dtype=torch.float32, device=w.device)


@torch.library.custom_op("fxquant::dequantize_weight", mutates_args=())
def dequantize_weight(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The float values ``[N, K]`` that codes ``[N, K]`` and scale ``[N, 1]`` stand for."""
    _check_dequantize(codes, scale, dtype)
    return numerics.dequantize_weight(codes, scale, dtype)


def _check_dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    _require(codes.dim() == 2 and codes.dtype == torch.int8, f"codes must be int8 [N, K], got {codes.shape}")
    _require(tuple(scale.shape) == (codes.shape[0], 1), f"scale must be [N, 1], got {scale.shape}")
    _require(scale.dtype == torch.float32, f"scale must be float32, got {scale.dtype}")
    _require(dtype in FLOATS, f"dtype must be one of {FLOATS}, got {dtype}")


@dequantize_weight.register_fake
def _(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    _check_dequantize(codes, scale, dtype)
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


@torch.library.custom_op("fxquant::fetch", mutates_args=())
def fetch(value: Tensor, device: str) -> Tensor:
    """A copy of a weight in main memory on ``device``, for the ops that follow."""
    return value.to(device, copy=True)


@fetch.register_fake
def _(value: Tensor, device: str) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


@torch.library.custom_op("fxquant::check_same", mutates_args=())
def check_same(value: Tensor, other: Tensor, what: str) -> None:
    """Raise unless ``other`` holds the same values as ``value``; ``what`` names them in the error."""
    if not numerics.same_values(value, other):
        raise _differs(what)


def _differs(what: str) -> TiedWeightError:
    return TiedWeightError(
        f"{what}: the model ties these names together, the checkpoint stores different values. "
        "Untie the model (tie_word_embeddings=False) to load both, or drop one from the checkpoint."
    )


@check_same.register_fake
def _(value: Tensor, other: Tensor, what: str) -> None:
    if value.shape != other.shape:
        raise _differs(what)


has_side_effect(torch.ops.fxquant.check_same.default)

for _op in (quantize_act, scaled_mm, quantize_weight, dequantize_weight, fetch):
    no_gradient(_op)
