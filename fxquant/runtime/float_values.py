"""Float values of a weight that are there whole, and its constants: made of them, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant import numerics
from fxquant.form import Form
from fxquant.held import hold
from fxquant.numerics.experts import dequantize_experts, quantize_experts


def quantize_values(values: Tensor, form: Form) -> dict[str, Tensor]:
    """The constants of ``form`` for float ``values`` in the parameter's layout, but what was given."""
    rows = form.as_matrix(values)
    rows = numerics.hadamard(rows.detach(), numerics.block_size(rows.shape[-1])) if form.rotated else rows
    quantize = quantize_experts if rows.dim() == 3 else numerics.quantize_weight
    codes, *beside = quantize(rows.detach(), form.weight)
    regions = form.code_regions(*rows.shape[-2:])
    parts = [codes[..., part_rows, columns] for part_rows, columns in regions]
    parts = [part.mT.contiguous() if form.kn else part.contiguous() for part in parts]
    found = dict(zip(form.codes, parts, strict=True))
    found |= dict(zip(form.weight.names[1:], beside, strict=True))
    found = {name: hold(form, name, part) for name, part in found.items()}
    return {**found, "table": values.detach().clone()} if form.table else found


def dequantize_values(
    whole: tuple[Tensor, ...], form: Form, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """What constants, with codes in one part, stand for in the parameter's ``shape`` and ``dtype``."""
    k = form.codes_shape(shape)[1]
    decode = dequantize_experts if len(shape) == 3 and not form.kernel else numerics.dequantize_weight
    floats = decode(whole, form.weight, k, dtype)
    if form.rotated:
        floats = numerics.hadamard(floats, numerics.block_size(k)).to(dtype)
    return form.as_parameter(floats)


def whole_shape(constants: tuple[Tensor, ...], form: Form) -> tuple[int, int]:
    """N and K of the codes that ``constants`` hold."""
    return form.whole_size([part.shape for part in constants[: len(form.codes)]])
