"""The quantized linear outside of compiled graphs: the same ops that the graphs call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxquant.passes.lower_to_target import resolve
from fxquant.form import Form
from fxquant.targets import BACKENDS


def quantized_linear(
    x: Tensor, parts: Sequence[Tensor], scale: Tensor, bias: Tensor | None, form: Form, kernel: str
) -> Tensor:
    """``F.linear`` of ``x [..., K]`` with the codes that ``parts`` hold; the result has the dtype of ``x``.

    ``kernel`` is the op that the plan chose for ``scaled_mm``; empty: the one of the device.
    """
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
    name = _kernel(kernel, x.device.type)
    op = resolve(name)
    if name.endswith("::linear"):
        return op(x, list(parts), scale, bias, str(form), dtype)  # type: ignore[no-any-return]
    x_codes, x_scale = torch.ops.fxquant.quantize_act(x, str(form.act))
    return op(x_codes, whole_codes(parts, form), x_scale, scale, bias, dtype)  # type: ignore[no-any-return]


def whole_codes(parts: Sequence[Tensor], form: Form) -> Tensor:
    """Codes ``[N, K]``: a view where they are in one part, else put together."""
    turned = [part.t() for part in parts] if form.kn else list(parts)
    width = max(len(form.parts_k), 1)
    rows = (
        [torch.cat(turned[i : i + width], 1) for i in range(0, len(turned), width)] if width > 1 else turned
    )
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _kernel(planned: str, device_type: str) -> str:
    """The planned op, or the device's own where the weights were moved to another device."""
    others = {f"fxquant_{backend}" for backend in BACKENDS if backend != device_type}
    if planned and planned.partition("::")[0] not in others:
        return planned
    make_target = BACKENDS.get(device_type)
    return make_target().eager_kernel("fxquant::scaled_mm") if make_target else "fxquant::scaled_mm"
