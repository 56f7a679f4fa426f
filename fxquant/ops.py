"""The dialect: target-independent ``fxquant::`` ops, each with schema, fake and reference.

A spec travels as its canonical text. Every fake checks what the real op checks. None of the ops
has a gradient: quantized weights serve inference, and a backward pass through them raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from fxquant import numerics
from fxquant.errors import QuantizedWeightError, TiedWeightError
from fxquant.numerics.experts import dequantize_experts, expert_of
from fxquant.scheme import FULL, QuantSpec

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that activations, weights and outputs may have."""

CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)
"""Dtypes of codes that have one scale for a row."""


def require(ok: bool, text: str) -> None:
    """Raise with what is wrong unless ``ok``."""
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
    """Dynamic quantization of an activation ``[..., K]``: codes ``[..., K]`` and their scale.

    The scale is ``[..., 1]`` per token, ``[1, ..., 1]`` per tensor, ``[..., ceil(K / g)]`` for groups of
    g along K. Codes of 4 bits lie two to a byte: ``[..., ceil(K / 2)]``.
    """
    _check_quantize_act(x)
    return numerics.quantize_act(x, QuantSpec.parse(spec))


def _check_quantize_act(x: Tensor) -> None:
    require(x.dim() >= 1, f"quantize_act needs a tensor of rank >= 1, got rank {x.dim()}")
    require(x.dtype in FLOATS, f"quantize_act takes {FLOATS}, got {x.dtype}")


@quantize_act.register_fake
def _(x: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    _check_quantize_act(x)
    parsed = QuantSpec.parse(spec)
    numerics.check_act_spec(parsed)
    k = x.shape[-1]
    codes = torch.empty((*x.shape[:-1], parsed.columns(k)), dtype=parsed.type.dtype, device=x.device)
    shape, dtype = act_scale_shape(x, parsed)
    return codes, torch.empty(shape, dtype=dtype, device=x.device)


def act_scale_shape(x: Tensor, spec: QuantSpec) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the scale of an activation."""
    dtype = torch.float8_e8m0fnu if spec.scale == "e8m0" else torch.float32
    if spec.block[0] == FULL:
        return (1,) * x.dim(), dtype
    return (*x.shape[:-1], spec.grid(1, x.shape[-1])[1]), dtype


@torch.library.custom_op("fxquant::quantize_act_static", mutates_args=())
def quantize_act_static(x: Tensor, act_scale: Tensor, spec: str) -> Tensor:
    """Codes ``[..., K]`` of an activation with a given scale, float32 ``[1]``."""
    _check_static(x, act_scale)
    return numerics.quantize_act_static(x, act_scale, QuantSpec.parse(spec))


def _check_static(x: Tensor, act_scale: Tensor) -> None:
    _check_quantize_act(x)
    require(
        act_scale.dtype == torch.float32 and tuple(act_scale.shape) == (1,),
        f"act_scale must be float32 [1], got {act_scale.dtype} {tuple(act_scale.shape)}",
    )


@quantize_act_static.register_fake
def _(x: Tensor, act_scale: Tensor, spec: str) -> Tensor:
    _check_static(x, act_scale)
    return torch.empty(x.shape, dtype=QuantSpec.parse(spec).type.dtype, device=x.device)


def check_scaled_mm(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> None:
    """What every kernel that stands for ``scaled_mm`` demands of its operands."""
    n, k = w.shape if w.dim() == 2 else (-1, -1)
    require(w.dim() == 2 and w.dtype in CODE_DTYPES, f"w_codes must be codes [N, K], got {w.dtype} {w.shape}")
    require(
        x.dim() >= 1 and x.dtype == w.dtype, f"x_codes must be {w.dtype} [..., K], got {x.dtype} {x.shape}"
    )
    require(x.shape[-1] == k, f"x_codes has K = {x.shape[-1]}, w_codes has K = {k}")
    if w.dtype == torch.int8:
        require(k <= numerics.INT32_K, f"K = {k} overflows int32 sums (at most {numerics.INT32_K})")
    require(x_scale.dtype == torch.float32 and w_scale.dtype == torch.float32, "scales must be float32")
    tokens, whole = (*x.shape[:-1], 1), (1,) * x.dim()
    require(tuple(x_scale.shape) in (tokens, whole), f"x_scale must be [..., 1], got {x_scale.shape}")
    require(tuple(w_scale.shape) in ((n, 1), (1, 1)), f"w_scale must be [{n}, 1], got {w_scale.shape}")
    require(dtype in FLOATS, f"out_dtype must be one of {FLOATS}, got {dtype}")
    if bias is not None:
        require(tuple(bias.shape) == (n,), f"bias must be [{n}], got {bias.shape}")


def scaled_mm_with(
    matmul: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``scaled_mm`` through ``matmul(a_MK, b_NK) -> sums [M, N]``, for any leading dimensions."""
    check_scaled_mm(x, w, x_scale, w_scale, bias, dtype)
    n, k = w.shape
    m = math.prod(x.shape[:-1])
    sums = matmul(x.reshape(m, k), w)
    out = numerics.apply_scales(sums, x_scale.reshape(-1, 1), w_scale, bias, dtype)
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

    Int8 codes accumulate in int32, exactly, float8 codes in float32; both scales and the bias are
    applied in float32 before the cast to ``out_dtype``. Scales: ``[..., 1]`` and ``[N, 1]``, or of one
    element.
    """
    return scaled_mm_with(numerics.scaled_sums, x_codes, w_codes, x_scale, w_scale, bias, out_dtype)


scaled_mm.register_fake(fake_scaled_mm)


@torch.library.custom_op("fxquant::block_mm", mutates_args=())
def block_mm(
    x_codes: Tensor,
    x_scale: Tensor,
    x_spec: str,
    weight: Sequence[Tensor],
    w_spec: str,
    k: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product of codes with scales for blocks along K: ``[..., K] x [N, K] -> [..., N]``.

    ``weight``: the constants of a weight ``[N, k]`` of ``w_spec``, in their order; ``x_codes`` and
    ``x_scale`` as ``quantize_act`` gives them for ``x_spec``. Integer codes accumulate exactly within a
    block; scales and bias are applied in float32 before the cast to ``out_dtype``.
    """
    _check_block_mm(x_codes, x_spec, weight, w_spec, k, bias, out_dtype)
    parsed = QuantSpec.parse(w_spec)
    return numerics.block_mm(x_codes, x_scale, QuantSpec.parse(x_spec), weight, parsed, k, bias, out_dtype)


def _check_block_mm(
    x_codes: Tensor,
    x_spec: str,
    weight: Sequence[Tensor],
    w_spec: str,
    k: int,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    columns = QuantSpec.parse(x_spec).columns(k)
    require(x_codes.shape[-1] == columns, f"x_codes has {x_codes.shape[-1]} columns, K = {k} has {columns}")
    check_constants(weight, QuantSpec.parse(w_spec), k)
    _check_out(weight, bias, dtype)


def _check_out(weight: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> None:
    require(dtype in FLOATS, f"the result's dtype must be one of {FLOATS}, got {dtype}")
    n = weight[0].shape[0]
    if bias is not None:
        require(tuple(bias.shape) == (n,), f"bias must be [{n}], got {bias.shape}")


def check_constants(weight: Sequence[Tensor], spec: QuantSpec, k: int) -> None:
    """The constants of a weight ``[N, k]`` have the dtypes and shapes of the spec."""
    require(len(weight) == len(spec.names), f"{spec} has {', '.join(spec.names)}, got {len(weight)} tensors")
    require(weight[0].dim() == 2, f"codes must be [N, K], got {weight[0].shape}")
    n = weight[0].shape[0]
    for (name, (dtype, shape)), part in zip(spec.constants(n, k).items(), weight, strict=True):
        require(
            part.dtype == dtype and tuple(part.shape) == shape,
            f"{name} of {spec} must be {dtype} {list(shape)}, got {part.dtype} {list(part.shape)}",
        )


@block_mm.register_fake
def _(
    x_codes: Tensor,
    x_scale: Tensor,
    x_spec: str,
    weight: Sequence[Tensor],
    w_spec: str,
    k: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    _check_block_mm(x_codes, x_spec, weight, w_spec, k, bias, out_dtype)
    shape = (*x_codes.shape[:-1], weight[0].shape[0])
    return torch.empty(shape, dtype=out_dtype, device=x_codes.device)


@torch.library.custom_op("fxquant::weight_only_mm", mutates_args=())
def weight_only_mm(x: Tensor, weight: Sequence[Tensor], spec: str, bias: Tensor | None) -> Tensor:
    """``F.linear`` of a float ``x [..., K]`` with the values that codes stand for, in x's dtype.

    ``weight``: the constants of a weight ``[N, K]`` of ``spec``, in their order.
    """
    parsed = QuantSpec.parse(spec)
    _check_weight_only(x, weight, parsed, bias)
    return numerics.weight_only_mm(x, weight, parsed, x.shape[-1], bias)


def _check_weight_only(x: Tensor, weight: Sequence[Tensor], spec: QuantSpec, bias: Tensor | None) -> None:
    require(
        x.dim() >= 1 and x.dtype in FLOATS, f"x must be one of {FLOATS} [..., K], got {x.dtype} {x.shape}"
    )
    check_constants(weight, spec, x.shape[-1])
    _check_out(weight, bias, x.dtype)


@weight_only_mm.register_fake
def _(x: Tensor, weight: Sequence[Tensor], spec: str, bias: Tensor | None) -> Tensor:
    _check_weight_only(x, weight, QuantSpec.parse(spec), bias)
    return torch.empty((*x.shape[:-1], weight[0].shape[0]), dtype=x.dtype, device=x.device)


@torch.library.custom_op("fxquant::quantize_weight", mutates_args=())
def quantize_weight(w: Tensor, spec: str) -> list[Tensor]:
    """The constants of a float weight ``[N, K]``: codes, scale and what else ``spec`` names, in order."""
    _check_weight(w)
    return list(numerics.quantize_weight(w, QuantSpec.parse(spec)))


def _check_weight(w: Tensor) -> None:
    require(w.dim() == 2, f"quantize_weight takes [N, K], got {w.shape}")
    require(w.dtype in FLOATS, f"quantize_weight takes {FLOATS}, got {w.dtype}")


@quantize_weight.register_fake
def _(w: Tensor, spec: str) -> list[Tensor]:
    _check_weight(w)
    parsed = QuantSpec.parse(spec)
    numerics.check_weight_spec(parsed)
    sizes = parsed.constants(w.shape[0], w.shape[1]).values()
    return [torch.empty(shape, dtype=dtype, device=w.device) for dtype, shape in sizes]


@torch.library.custom_op("fxquant::dequantize_weight", mutates_args=())
def dequantize_weight(weight: Sequence[Tensor], spec: str, k: int, dtype: torch.dtype) -> Tensor:
    """The float values ``[N, k]`` that the constants of a weight of ``spec`` stand for.

    Of constants with a leading axis, the experts: ``[E, N, k]``.
    """
    _check_dequantize(weight, spec, k, dtype)
    if weight[0].dim() == 3:
        return dequantize_experts(weight, QuantSpec.parse(spec), k, dtype)
    return numerics.dequantize_weight(weight, QuantSpec.parse(spec), k, dtype)


def _check_dequantize(weight: Sequence[Tensor], spec: str, k: int, dtype: torch.dtype) -> None:
    one = expert_of(weight, 0) if weight[0].dim() == 3 else weight
    check_constants(one, QuantSpec.parse(spec), k)
    require(dtype in FLOATS, f"dtype must be one of {FLOATS}, got {dtype}")


@dequantize_weight.register_fake
def _(weight: Sequence[Tensor], spec: str, k: int, dtype: torch.dtype) -> Tensor:
    _check_dequantize(weight, spec, k, dtype)
    return torch.empty((*weight[0].shape[:-1], k), dtype=dtype, device=weight[0].device)


@torch.library.custom_op("fxquant::hadamard", mutates_args=())
def hadamard(x: Tensor, block: int) -> Tensor:
    """``x [..., K]`` rotated by a Hadamard matrix in blocks along K; computed in float32, in x's dtype.

    Its own inverse, and its own transpose: rotated activations times rotated weights are the product.
    """
    _check_hadamard(x, block)
    return numerics.hadamard(x, block).to(x.dtype)


def _check_hadamard(x: Tensor, block: int) -> None:
    require(x.dim() >= 1 and x.dtype in FLOATS, f"hadamard takes {FLOATS} [..., K], got {x.dtype} {x.shape}")
    require(block > 0 and block & (block - 1) == 0, f"a block must be a power of two, got {block}")
    require(x.shape[-1] % block == 0, f"blocks of {block} do not divide K = {x.shape[-1]}")


@hadamard.register_fake
def _(x: Tensor, block: int) -> Tensor:
    _check_hadamard(x, block)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


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

for _op in (
    quantize_act,
    quantize_act_static,
    scaled_mm,
    block_mm,
    weight_only_mm,
    quantize_weight,
    dequantize_weight,
    hadamard,
    fetch,
):
    no_gradient(_op)
