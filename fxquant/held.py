"""Constants as the ops of a target take them, made once a weight is whole.

A ``Form`` with ``held``, the dtype of the activations, has for weight-only int8 and int4 schemes ``scale``
in that dtype, ``-zero`` in that dtype for ``zero``, and codes of 4 bits in two's complement, eight of
which along K are an int32. With a static activation it has two constants more: ``act_scales``, the scale
once for each of K, and ``deq_scale``, the product of both scales as the op takes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxquant.form import Form
from fxquant.scheme import SCALES

FLIP = 0x88
"""Bits by which code + 8 and two's complement differ, in the two codes of a byte."""


def flipped(form: Form) -> bool:
    """Whether its codes of 4 bits are in two's complement."""
    return bool(form.held) and form.weight.codes == "int4"


def is_changed(form: Form, name: str) -> bool:
    """Whether a constant of ``form`` is not as the scheme has it."""
    return bool(form.held) and form.act is None and name in ("scale", "zero")


def hold(form: Form, name: str, value: Tensor) -> Tensor:
    """A constant of the scheme as ``form`` holds it; codes are changed in place, ``value`` may be."""
    if name.startswith("codes"):
        return value.bitwise_xor_(FLIP) if flipped(form) else value
    if not is_changed(form, name):
        return value
    return (value.neg_() if name == "zero" else value).to(form.held_dtype)


def unhold(form: Form, name: str, value: Tensor) -> Tensor:
    """The inverse of ``hold``, but for the rounding of scales; codes are copied."""
    if name.startswith("codes"):
        return value ^ FLIP if flipped(form) else value
    if not is_changed(form, name):
        return value
    exact = value.to(SCALES[form.weight.scale])
    return -exact if name == "zero" else exact


def derive(form: Form, name: str, given: Mapping[str, Tensor]) -> Tensor:
    """A constant that is made of others: ``act_scales`` float32 ``[K]``, or ``deq_scale`` ``[N]``.

    ``given``: at least the ``scale`` and ``act_scale`` of the weight, and its codes.
    """
    if name == "act_scales":
        axis = 0 if form.kn else 1
        count = max(len(form.parts_k), 1)
        k = sum(given[part].shape[axis] for part in form.codes[:count])
        return given["act_scale"].expand(k).contiguous()
    product = (given["scale"] * given["act_scale"]).reshape(-1)
    if form.held_dtype != torch.float16:
        return product
    if product.device.type == "npu":
        made: Tensor = torch.ops.npu.npu_trans_quant_param(product)
        return made
    return packed_scale(product)


def packed_scale(scale: Tensor) -> Tensor:
    """The int64 that ``npu_trans_quant_param`` gives: the upper 19 bits, and bit 46 set.

    Source: ops-nn, quant/trans_quant_param_v2/README.md.
    """
    return (scale.view(torch.int32).to(torch.int64) & 0xFFFFE000) | (1 << 46)
