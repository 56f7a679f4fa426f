"""Quantized calls outside of compiled graphs: the same ops that the graphs call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fxquant import embedding_op as _embedding_op  # noqa: F401 - registers the op
from fxquant.form import Form
from fxquant.numerics import block_size
from fxquant.passes.lower_to_target import resolve
from fxquant.targets import BACKENDS

fxq = torch.ops.fxquant


class Weight(Protocol):
    """What is needed of a quantized weight."""

    form: Form
    act_scale: Tensor | None

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """The constants of the form."""

    @property
    def whole(self) -> tuple[Tensor, ...]:
        """The constants, with the codes in one part."""


def quantized_linear(
    x: Tensor,
    weight: Weight,
    last: Tensor | None,
    kernels: Mapping[str, str],
    *,
    grouped: bool = False,
) -> Tensor:
    """``F.linear`` of ``x [..., K]`` with a quantized weight; the result has the dtype of ``x``.

    ``last``: the bias. ``grouped``: the weight is experts, ``x`` is ``[S, K]``, and ``last`` are the ends of
    the rows of each. ``kernels``: for dialect ops, those that the plan chose; others are the ones of the
    device.
    """
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
    if weight.form.rotated:
        x = fxq.hadamard(x, block_size(x.shape[-1]))
    scheme, spec = weight.form.quantized_as, str(weight.form.weight.plain)
    dialect = scheme.grouped_op if grouped else scheme.op
    name = _kernel(kernels.get(dialect, ""), dialect, x.device.type)
    op = resolve(name)
    if name.endswith("::linear"):
        return op(x, list(weight.constants), last, str(weight.form), dtype)  # type: ignore[no-any-return]
    if scheme.act is None:
        return op(x, list(weight.whole), spec, last)  # type: ignore[no-any-return]
    if scheme.act.static:
        assert weight.act_scale is not None
        x_codes = fxq.quantize_act_static(x, weight.act_scale, str(scheme.act))
        x_scale = weight.act_scale.view([1] * x.dim())
    else:
        x_codes, x_scale = fxq.quantize_act(x, str(scheme.act))
    if scheme.op == "fxquant::scaled_mm":
        codes, scale = weight.whole
        return op(x_codes, codes, x_scale, scale, last, dtype)  # type: ignore[no-any-return]
    return op(  # type: ignore[no-any-return]
        x_codes, x_scale, str(scheme.act), list(weight.whole), spec, x.shape[-1], last, dtype
    )


def quantized_embedding(indices: Tensor, weight: Weight, k: int, dtype: torch.dtype) -> Tensor:
    """Rows ``indices`` of a quantized weight ``[N, k]``, as floats of ``dtype``."""
    spec = str(weight.form.weight.plain)
    return fxq.embedding_dequant(indices, list(weight.whole), spec, k, dtype)  # type: ignore[no-any-return]


def whole_codes(parts: Sequence[Tensor], form: Form) -> Tensor:
    """Codes ``[N, K]``: a view where they are in one part, else put together."""
    turned = [part.t() for part in parts] if form.kn else list(parts)
    width = max(len(form.parts_k), 1)
    rows = (
        [torch.cat(turned[i : i + width], 1) for i in range(0, len(turned), width)] if width > 1 else turned
    )
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _kernel(planned: str, op: str, device_type: str) -> str:
    """The planned op, or the device's own where the weights were moved to another device."""
    others = {f"fxquant_{backend}" for backend in BACKENDS if backend != device_type}
    if planned and planned.partition("::")[0] not in others:
        return planned
    make_target = BACKENDS.get(device_type)
    return (make_target().eager_kernel(op) if make_target else "") or op
