"""The quantized linear outside of compiled graphs: the calls that ``npu_lowering`` writes, made at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxquant.form import Form
from fxquant.numerics import INT32_K
from fxquant.ops import no_gradient
from fxquant.targets.npu_chip import choose_chip
from fxquant.targets.npu_lowering import bounds
from fxquant.targets.npu_wide import DEQUANT, decide

fxq = torch.ops.fxquant


def compute_dtype(dtype: object) -> torch.dtype:
    """What the quantized ops compute in for weights or outputs of ``dtype``: float32 has no op."""
    return torch.float16 if dtype is torch.float16 else torch.bfloat16


@torch.library.custom_op("fxquant_npu::linear", mutates_args=())
def linear(
    x: Tensor,
    codes: Sequence[Tensor],
    scale: Tensor,
    bias: Tensor | None,
    form: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """``x [..., K]`` times int8 codes in the parts of ``form``, scale ``[N, 1]``, bias ``[N]`` or none."""
    made = Form.parse(form)
    n, k = scale.shape[0], x.shape[-1]
    shape = (*x.shape[:-1], n)
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=out_dtype)
    rows = x.reshape(-1, k).to(compute_dtype(x.dtype))
    chip = choose_chip(None)
    if chip.family == "310P":
        dequant = decide(n, k, chip=chip, dtype=rows.dtype).op == DEQUANT
        out = _dequant(rows, codes[0], scale, bias) if dequant else _reference(rows, codes[0], scale, bias)
        return out.to(out_dtype).reshape(shape)
    row_codes, token = torch.ops.npu.npu_dynamic_quant(rows)
    width = max(len(made.parts_k), 1)
    outs = []
    for i, (start, stop) in enumerate(bounds(made.parts_n or (n,))):
        parts = [part if made.kn else part.t() for part in codes[i * width : (i + 1) * width]]
        part_scale, part_bias = scale[start:stop, 0], None if bias is None else bias[start:stop]
        if width == 1:
            outs.append(_matmul(row_codes, token, parts[0], part_scale, part_bias, compute_dtype(out_dtype)))
        else:
            outs.append(_sums(row_codes, token, parts, part_scale, part_bias))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
    return out.to(out_dtype).reshape(shape)


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
    codes: Sequence[Tensor],  # noqa: ARG001 - as in the op
    scale: Tensor,
    bias: Tensor | None,  # noqa: ARG001
    form: str,  # noqa: ARG001
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], scale.shape[0]), dtype=out_dtype)


linear.register_fake(_fake)
no_gradient(linear)
