"""The quantized linear outside of compiled graphs: the same ops that the graphs call."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.passes.lower_to_target import resolve
from fxquant.scheme import Form
from fxquant.targets import BACKENDS


def quantized_linear(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, form: Form, kernel: str
) -> Tensor:
    """``F.linear`` of ``x [..., K]`` with codes ``[N, K]``; the result has the dtype of ``x``.

    ``kernel`` is the op that the plan chose for ``scaled_mm``; empty: the one of the device.
    """
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
    x_codes, x_scale = torch.ops.fxquant.quantize_act(x, str(form.act))
    matmul = resolve(kernel or _kernel(x.device.type))
    return matmul(x_codes, codes, x_scale, scale, bias, dtype)  # type: ignore[no-any-return]


def _kernel(device_type: str) -> str:
    make_target = BACKENDS.get(device_type)
    return make_target().eager_kernel("fxquant::scaled_mm") if make_target else "fxquant::scaled_mm"
