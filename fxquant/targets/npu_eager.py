"""The quantized linear outside of compiled graphs: the calls that ``npu_lowering`` writes, made at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.form import HELD, Form
from fxquant.numerics import INT32_K
from fxquant.ops import no_gradient
from fxquant.scheme import QuantSpec
from fxquant.target import Refusal
from fxquant.targets.npu_build import AtOnce, joined
from fxquant.targets.npu_chip import choose_chip
from fxquant.targets.npu_lowering import bounds
from fxquant.targets.npu_products import PRODUCTS, Part, quantized, static, static_codes, weight_only
from fxquant.targets.npu_schemes import family_of
from fxquant.targets.npu_wide import DEQUANT, decide

fxq = torch.ops.fxquant
AS_BF16 = "computed in bfloat16, the NPU's quantized ops take no float32"


def compute_dtype(dtype: object) -> torch.dtype:
    """What the quantized ops compute in for weights or outputs of ``dtype``: float32 has no op."""
    return torch.float16 if dtype is torch.float16 else torch.bfloat16


@torch.library.custom_op("fxquant_npu::linear", mutates_args=())
def linear(
    x: Tensor, constants: Sequence[Tensor], bias: Tensor | None, form: str, out_dtype: torch.dtype
) -> Tensor:
    """``x [..., K]`` times the weight whose constants of ``form`` these are, plus bias ``[N]`` or none."""
    made = Form.parse(form)
    named = dict(zip(made.constants, constants, strict=True))
    n, _ = made.whole_size([part.shape for part in constants[: len(made.codes)]])
    shape = (*x.shape[:-1], n)
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=out_dtype)
    rows = x.reshape(-1, x.shape[-1])
    multiply = _int8 if made.scheme == "int8" else _scheme
    return multiply(rows, made, named, bias, out_dtype).to(out_dtype).reshape(shape)


def _int8(
    x: Tensor, form: Form, named: Mapping[str, Tensor], bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Int8 codes, activations quantized by token."""
    codes, scale = [named[name] for name in form.codes], named["scale"]
    n, k = scale.shape[0], x.shape[-1]
    rows = x.to(compute_dtype(x.dtype))
    chip = choose_chip(None)
    if chip.family == "310P":
        dequant = decide(n, k, chip=chip, dtype=rows.dtype).op == DEQUANT
        return _dequant(rows, codes[0], scale, bias) if dequant else _reference(rows, codes[0], scale, bias)
    row_codes, token = torch.ops.npu.npu_dynamic_quant(rows)
    width = max(len(form.parts_k), 1)
    outs = []
    for i, (start, stop) in enumerate(bounds(form.parts_n or (n,))):
        parts = [part if form.kn else part.t() for part in codes[i * width : (i + 1) * width]]
        part_scale, part_bias = scale[start:stop, 0], None if bias is None else bias[start:stop]
        if width == 1:
            outs.append(_matmul(row_codes, token, parts[0], part_scale, part_bias, compute_dtype(out_dtype)))
        else:
            outs.append(_sums(row_codes, token, parts, part_scale, part_bias))
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


def _scheme(
    x: Tensor, form: Form, named: Mapping[str, Tensor], bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """The other schemes: the calls that ``npu_dialect`` writes into graphs."""
    scheme, b = form.quantized_as, AtOnce()
    family = family_of(scheme)
    assert not isinstance(family, Refusal), family.reason  # refused when planning
    spec, k = form.weight, x.shape[-1]
    n, _ = form.whole_size([named[name].shape for name in form.codes])
    dtype = HELD[form.held] if form.held else compute_dtype(out_dtype)
    if family == "weight only":
        act: tuple[Tensor, Any] = (x.to(dtype), None)
    elif family == "static":
        act = (static_codes(b, x, named["act_scales"]), None)
    else:
        act = quantized(b, x if family.startswith("mx") else x.to(dtype), family)
    outs = []
    for (start, stop), codes in zip(bounds(form.parts_n or (n,)), form.codes, strict=True):
        rows = slice(start, stop)
        part = Part(
            codes=named[codes],
            kn=form.kn,
            scale=_rows(named["scale"], rows, spec),
            zero=_rows(named["zero"], rows, spec) if spec.zero else None,
            deq_scale=named["deq_scale"][rows] if family == "static" else None,
            act_scale=named.get("act_scale"),
            bias=None if bias is None else bias[rows],
        )
        if family == "weight only":
            outs.append(weight_only(b, act[0], part, spec, k))
        elif family == "static":
            outs.append(static(b, act[0], part, dtype))
        else:
            outs.append(PRODUCTS[family](b, act[0], act[1], part, dtype))
    return joined(b, outs)  # type: ignore[no-any-return]


def _rows(parameter: Tensor, rows: slice, spec: QuantSpec) -> Tensor:
    """The scales of some rows of the weight."""
    height = spec.block[0]
    return parameter[rows.start // height : -(-rows.stop // height)] if height else parameter


def _matmul(
    row_codes: Tensor, token: Tensor, part: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(torch.float32)
    out: Tensor = torch.ops.npu.npu_quant_matmul(
        row_codes, part, scale, pertoken_scale=token, bias=bias, output_dtype=dtype
    )
    return out


def _sums(
    row_codes: Tensor, token: Tensor, parts: Sequence[Tensor], scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Parts of K: int32 products with a scale of one, summed before the scales."""
    one = torch.ones(1, dtype=torch.float32, device=row_codes.device)
    sums = torch.int32 if row_codes.shape[1] <= INT32_K else torch.float32
    total: Tensor | None = None
    for (start, stop), part in zip(bounds([part.shape[0] for part in parts]), parts, strict=True):
        piece = row_codes[:, start:stop].contiguous()
        product = torch.ops.npu.npu_quant_matmul(piece, part, one, output_dtype=torch.int32).to(sums)
        total = product if total is None else total + product
    assert total is not None
    out = total.to(torch.float32) * token[:, None] * scale
    return out if bias is None else out + bias.to(torch.float32)


def _dequant(rows: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.npu.npu_quant_matmul_dequant(rows, codes, scale[:, 0], quant_mode="pertoken")
    return out if bias is None else out.to(torch.float32) + bias.to(torch.float32)


def _reference(rows: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Where no op of the chip takes the weight: the dialect's own arithmetic."""
    row_codes, token = fxq.quantize_act(rows, str(Form(scheme="int8").act))
    out: Tensor = fxq.scaled_mm(row_codes, codes, token, scale, bias, rows.dtype)
    return out


def _fake(
    x: Tensor,
    constants: Sequence[Tensor],
    bias: Tensor | None,  # noqa: ARG001 - as in the op
    form: str,
    out_dtype: torch.dtype,
) -> Tensor:
    made = Form.parse(form)
    n, _ = made.whole_size([part.shape for part in constants[: len(made.codes)]])
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)


linear.register_fake(_fake)
no_gradient(linear)
