"""Decides the form of a weight from its uses, the config and the target.

The decision comes before any rewrite, and every graph, ahead of time or at run time, is rewritten
after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxquant.config import Choice
from fxquant.form import HOST, Form
from fxquant.graph import target_name, value
from fxquant.output_cuts import cuts_of
from fxquant.passes.weight_uses import LinearUse, OtherUse, matmul_operands
from fxquant.target import Layout, Refusal, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A use of a weight, apart from the graph it was found in."""

    op: str
    k_axis: int | None
    refusal: str = ""
    lookup: bool = False
    cuts: tuple[int, ...] = ()
    """Offsets where everybody who takes the output cuts it anyway."""
    bias: torch.dtype | None = None

    @staticmethod
    def of(use: LinearUse | OtherUse) -> Use:
        """What is kept of a use that a graph showed."""
        name = target_name(use.node)
        if isinstance(use, LinearUse):
            operands = matmul_operands(use.node)
            bias = operands[2] if operands is not None else None
            bias_dtype = value(bias).dtype if isinstance(bias, fx.Node) else None
            return Use(op=name, k_axis=use.k_axis, cuts=cuts_of(use.node), bias=bias_dtype)
        return Use(op=name, k_axis=None, refusal=use.reason, lookup=use.lookup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The form of a weight (None: float) and why."""

    form: Form | None
    reason: str
    asked: bool = False
    """Whether a scheme was asked for, so that staying float is a refusal."""
    given: tuple[tuple[str, float], ...] = ()
    """Values of constants of the form that are not made of the weight."""
    rejected: tuple[tuple[str, str], ...] = ()
    """Other layouts that the target could have taken, and why it did not."""


def describe(uses: Sequence[Use]) -> tuple[str, ...]:
    """``("aten.linear x2", "aten.embedding")``."""
    counts = Counter(use.op for use in uses)
    return tuple(f"{op} x{n}" if n > 1 else op for op, n in counts.items())


def choose_form(
    uses: Sequence[Use], shape: Sequence[int], dtype: torch.dtype, choice: Choice, target: Target
) -> Decision:
    """The form of a parameter of ``shape`` and ``dtype`` with these ``uses``."""
    scheme = choice.scheme
    if scheme.weight is None:
        return Decision(form=None, reason=choice.reason)
    linears = [use for use in uses if use.k_axis is not None]
    others = [use for use in uses if use.k_axis is None]
    if not linears:
        why = others[0].refusal if others else "not used by the captured graphs"
        return Decision(form=None, reason=why)
    tied = any(use.lookup for use in others)
    if tied and not choice.asked:
        return Decision(form=None, reason="head tied to an embedding: stays float unless a config entry asks")
    layout = _layout(linears, others, shape, dtype, choice, target)
    if isinstance(layout, Refusal):
        return Decision(form=None, reason=layout.reason, asked=True)
    if layout.host:
        return Decision(
            form=HOST, reason=f"{choice.reason}, {layout.reason}", asked=True, rejected=layout.rejected
        )
    transposed = linears[0].k_axis == 0
    form = Form(
        scheme=scheme.name,
        transposed=transposed,
        table=tied,
        kn=layout.kn,
        nz=layout.nz,
        held=layout.held,
        parts_n=layout.parts_n,
        parts_k=layout.parts_k,
        odd_k=scheme.weight.packed and shape[linears[0].k_axis] % 2 == 1,
    )
    if form.given and choice.act_scale is None:
        why = f"scheme {scheme.name} needs the scale of the activation: config={{name: {{'scheme': ..., 'act_scale': number}}}}"
        return Decision(form=None, reason=why, asked=True)
    parts = [
        choice.reason,
        "[in, out] layout" if transposed else "",
        "exact float table kept for look-ups" if tied else "",
        layout.reason,
        *(f"{name} {choice.act_scale:g}" for name in form.given),
    ]
    reason = ", ".join(part for part in parts if part)
    given = tuple((name, choice.act_scale) for name in form.given if choice.act_scale is not None)
    return Decision(form=form, reason=reason, asked=True, given=given, rejected=layout.rejected)


def _layout(
    linears: Sequence[Use],
    others: Sequence[Use],
    shape: Sequence[int],
    dtype: torch.dtype,
    choice: Choice,
    target: Target,
) -> Layout | Refusal:
    """How the codes of a weight are to lie, or why a scheme that was asked for cannot be taken."""
    blocked = [use for use in others if not use.lookup]
    if blocked:
        return Refusal(reason=f"also {blocked[0].refusal}")
    if dtype not in choice.scheme.dtypes:
        known = ", ".join(str(d).removeprefix("torch.") for d in choice.scheme.dtypes)
        return Refusal(reason=f"scheme {choice.scheme.name} takes {known}, not {dtype}")
    axes = {use.k_axis for use in linears}
    if len(axes) > 1:
        return Refusal(reason="contracted along both axes, so no axis can hold the scales")
    (k_axis,) = axes
    assert k_axis is not None
    n, k = shape[1 - k_axis], shape[k_axis]
    if n == 0 or k == 0:
        return Refusal(reason="the weight is empty")
    cuts = set.intersection(*(set(use.cuts) for use in linears))
    bias = next((use.bias for use in linears if use.bias is not None), None)
    return target.lay_out(choice.scheme, n=n, k=k, dtype=dtype, cuts=tuple(sorted(cuts)), bias=bias)
