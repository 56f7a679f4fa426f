"""Decides the form of a weight from its uses, the config and the target.

The decision comes before any rewrite, and every graph, ahead of time or at run time, is rewritten
after it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxquant.config import Choice
from fxquant.form import HOST, Form
from fxquant.graph import target_name, value
from fxquant.numerics import block_size
from fxquant.output_cuts import cuts_of
from fxquant.passes.quantize_linear import can_cut
from fxquant.passes.routers import how_it_routes
from fxquant.passes.uses import Cut, ExpertUse, LinearUse, WeightUse
from fxquant.passes.weight_uses import matmul_operands
from fxquant.scheme import SCHEMES, Scheme, weight_only
from fxquant.target import Layout, Refusal, Target

LOOKUP, CONVOLUTION = "fxquant::embedding_dequant", "fxquant::dequantize_weight"
"""The dialect ops by which a target runs look-ups in codes, and convolutions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A use of a weight, apart from the graph it was found in."""

    op: str
    k_axis: int | None
    refusal: str = ""
    lookup: bool = False
    conv: bool = False
    cuts: tuple[int, ...] = ()
    """Offsets where everybody who takes the output cuts it anyway."""
    bias: torch.dtype | None = None
    grouped: bool = False
    """Several experts are multiplied with, each with its own rows."""
    routes: str = ""
    """How the outputs choose or weight experts, in words; empty where they do not."""
    weight_cuts: tuple[Cut, ...] = ()
    """Slices of the weight that the use takes."""

    @staticmethod
    def of(use: WeightUse) -> Use:
        """What is kept of a use that a graph showed."""
        name = target_name(use.node)
        if isinstance(use, ExpertUse):
            return Use(op=name, k_axis=use.k_axis, grouped=True, weight_cuts=use.cuts)
        if isinstance(use, LinearUse):
            operands = matmul_operands(use.node)
            bias = operands[2] if operands is not None else None
            bias_dtype = value(bias).dtype if isinstance(bias, fx.Node) else None
            return Use(
                op=name,
                k_axis=use.k_axis,
                cuts=cuts_of(use.node),
                bias=bias_dtype,
                routes=how_it_routes(use.node) if use.expert is None else "",
                weight_cuts=use.cuts,
            )
        return Use(op=name, k_axis=None, refusal=use.reason, lookup=use.lookup, conv=use.conv)


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
    uses: Sequence[Use],
    shape: Sequence[int],
    dtype: torch.dtype,
    choice: Choice,
    target: Target,
    *,
    rotate: bool = False,
) -> Decision:
    """The form of a parameter of ``shape`` and ``dtype`` with these ``uses``.

    ``rotate``: rotated along K, if K has a power of two in it.
    """
    scheme = choice.scheme
    if scheme.weight is None:
        return Decision(form=None, reason=choice.reason)
    linears = [use for use in uses if use.k_axis is not None]
    lookups = [use for use in uses if use.lookup]
    if not linears:
        return _without_product(uses, shape, dtype, choice, target)
    kept = _kept(linears, lookups, choice)
    if kept:
        return Decision(form=None, reason=kept)
    others = [use for use in uses if use.k_axis is None]
    layout = _layout(linears, others, shape, dtype, choice, target, rotate=rotate)
    if isinstance(layout, Refusal):
        return Decision(form=None, reason=layout.reason, asked=True)
    if layout.host:
        return Decision(
            form=HOST, reason=f"{choice.reason}, {layout.reason}", asked=True, rejected=layout.rejected
        )
    transposed = linears[0].k_axis == 0
    k = shape[-2:][linears[0].k_axis or 0]
    block = block_size(k) if rotate else 1
    turned = transposed or layout.kn or layout.parts_n or layout.parts_k
    lying = "codes do not lie as rows" if turned else "the codes are rotated" if block > 1 else ""
    table, why_table = _table(lookups, choice, target, lying)
    form = Form(
        scheme=scheme.name,
        transposed=transposed,
        table=table,
        kn=layout.kn,
        nz=layout.nz,
        held=layout.held,
        parts_n=layout.parts_n,
        parts_k=layout.parts_k,
        odd_k=scheme.weight.packed and k % 2 == 1,
        scales=scheme.weight.half_scales(dtype),
        rotated=block > 1,
    )
    parts = [
        choice.reason,
        "[in, out] layout" if transposed else "",
        why_table,
        f"rotated in blocks of {block}" if block > 1 else "not rotated: K is odd" if rotate else "",
        layout.reason,
        *(f"{name} {choice.act_scale:g}" for name in form.given),
    ]
    reason = ", ".join(part for part in parts if part)
    given = tuple((name, choice.act_scale) for name in form.given if choice.act_scale is not None)
    return Decision(form=form, reason=reason, asked=True, given=given, rejected=layout.rejected)


def _kept(linears: Sequence[Use], lookups: Sequence[Use], choice: Choice) -> str:
    """Why a weight that is multiplied with is not asked for; empty if it is."""
    if choice.asked:
        return ""
    if lookups:
        return "head tied to an embedding: stays float unless a config entry asks"
    routes = next((use.routes for use in linears if use.routes), "")
    return f"router ({routes}): stays float unless a config entry asks" if routes else ""


def _table(lookups: Sequence[Use], choice: Choice, target: Target, lying: str) -> tuple[bool, str]:
    """Whether look-ups of a tied weight keep the exact floats, and what the plan says about it.

    ``lying``: why rows cannot be looked up in the codes; empty where they can.
    """
    if not lookups:
        return False, ""
    kernel = target.kernel_of(LOOKUP)
    why = lying or (kernel.reason if isinstance(kernel, Refusal) else "")
    if choice.lookups and not why:
        same = choice.lookup_reason == choice.reason
        return False, "look-ups use the codes too" + ("" if same else f": {choice.lookup_reason}")
    why = why if choice.lookups else choice.lookup_reason
    return True, "exact float table kept for look-ups" + (f": {why}" if why else "")


def _without_product(
    uses: Sequence[Use], shape: Sequence[int], dtype: torch.dtype, choice: Choice, target: Target
) -> Decision:
    """The form of a weight that is looked up, or that convolutions use: where a config entry asks."""
    special = next((use for use in uses if use.lookup or use.conv), None)
    if special is None:
        why = uses[0].refusal if uses else "not used by the captured graphs"
        return Decision(form=None, reason=why)
    if not choice.asked:
        return Decision(form=None, reason=f"{special.refusal}: stays float unless a config entry asks")
    blocked = [use for use in uses if (use.lookup, use.conv) != (special.lookup, special.conv)]
    refusal = f"also {blocked[0].refusal}" if blocked else _dtype_refusal(dtype, choice)
    if not refusal and 0 in shape:
        refusal = "the weight is empty"
    kernel = target.kernel_of(LOOKUP if special.lookup else CONVOLUTION)
    if not refusal and isinstance(kernel, Refusal):
        refusal = kernel.reason
    if not refusal and special.conv and choice.scheme.act is not None:
        refusal = _only_weights(choice.scheme)
    if refusal:
        return Decision(form=None, reason=refusal, asked=True)
    scheme = weight_only(choice.scheme) or choice.scheme
    assert scheme.weight is not None
    odd_k = scheme.weight.packed and math.prod(shape[1:]) % 2 == 1
    form = Form(
        scheme=scheme.name,
        odd_k=odd_k,
        scales=scheme.weight.half_scales(dtype),
        kernel=tuple(shape[2:]) if special.conv else (),
    )
    if special.conv:
        return Decision(form=form, reason=f"{choice.reason}, floats made for each call", asked=True)
    ignored = choice.scheme.act is not None
    why = f"the activation part of {choice.scheme.name} is ignored for look-ups" if ignored else ""
    return Decision(form=form, reason=", ".join(filter(None, (choice.reason, why))), asked=True)


def _only_weights(scheme: Scheme) -> str:
    other = weight_only(scheme) or SCHEMES["int8_weight_only"]
    return (
        f"scheme {scheme.name} quantizes activations, and it is weight only for convolutions: "
        f"use {other.name}"
    )


def _dtype_refusal(dtype: torch.dtype, choice: Choice) -> str:
    if dtype in choice.scheme.dtypes:
        return ""
    known = ", ".join(str(d).removeprefix("torch.") for d in choice.scheme.dtypes)
    return f"scheme {choice.scheme.name} takes {known}, not {dtype}"


def _layout(
    linears: Sequence[Use],
    others: Sequence[Use],
    shape: Sequence[int],
    dtype: torch.dtype,
    choice: Choice,
    target: Target,
    *,
    rotate: bool,
) -> Layout | Refusal:
    """How the codes of a weight are to lie, or why a scheme that was asked for cannot be taken."""
    axes = {use.k_axis for use in linears}
    (k_axis, *_) = axes
    assert k_axis is not None
    n, k = shape[-2:] if k_axis else shape[-2:][::-1]
    if 0 in shape:
        return Refusal(reason="the weight is empty")
    if len(shape) == 3:
        kernel = target.kernel_for(choice.scheme, grouped=True)
        if isinstance(kernel, Refusal):
            return kernel
    reason = _obstacle(linears, others, (n, k), dtype, choice, rotate=rotate)
    if reason:
        return Refusal(reason=reason)
    cuts = tuple(sorted(set.intersection(*(set(use.cuts) for use in linears))))
    bias = next((use.bias for use in linears if use.bias is not None), None)
    one_by_one = not all(use.grouped for use in linears)

    def lay_out(n: int, k: int) -> Layout | Refusal:
        if len(shape) == 3:
            return target.lay_out_experts(
                choice.scheme, experts=shape[0], n=n, k=k, dtype=dtype, one_by_one=one_by_one
            )
        return target.lay_out(choice.scheme, n=n, k=k, dtype=dtype, cuts=cuts, bias=bias)

    layout = lay_out(n, k)
    if isinstance(layout, Refusal) or layout.host:
        return layout
    for rows, columns in {_cut_size((n, k), _as_stored(use)) for use in linears} - {(n, k)}:
        found = lay_out(rows, columns)
        if isinstance(found, Refusal):
            why = found.reason.removeprefix("float: ")
            return Refusal(reason=f"a cut of it, {rows} x {columns}: {why}")
    return layout


def _obstacle(
    linears: Sequence[Use],
    others: Sequence[Use],
    shape: tuple[int, int],
    dtype: torch.dtype,
    choice: Choice,
    *,
    rotate: bool,
) -> str:
    """Why a weight ``[N, K]`` cannot be held in a scheme, whatever the target; empty if it can."""
    scheme = choice.scheme
    assert scheme.weight is not None
    known = ", ".join(str(d).removeprefix("torch.") for d in scheme.dtypes)
    blocked = [use for use in others if not use.lookup]
    uncut = [use for use in linears if not can_cut(scheme.weight, shape, _as_stored(use), rotated=rotate)]
    unscaled = scheme.act is not None and scheme.act.static and choice.act_scale is None
    obstacles = (
        (bool(blocked), f"also {blocked[0].refusal}" if blocked else ""),
        (dtype not in scheme.dtypes, f"scheme {scheme.name} takes {known}, not {dtype}"),
        (
            len({use.k_axis for use in linears}) > 1,
            "contracted along both axes, so no axis can hold the scales",
        ),
        (0 in shape, "the weight is empty"),
        (bool(uncut), f"cut where no block of {scheme.weight} ends"),
        (
            unscaled,
            f"scheme {scheme.name} needs the activation's scale: a config entry {{'scheme', 'act_scale'}}",
        ),
    )
    return next((reason for is_there, reason in obstacles if is_there), "")


def _cut_size(shape: tuple[int, int], cuts: tuple[Cut, ...]) -> tuple[int, int]:
    """N and K of what cuts of codes ``[N, K]`` leave."""
    sizes = list(shape)
    for cut in cuts:
        sizes[cut.axis] = len(range(cut.start, cut.stop, cut.step))
    return sizes[0], sizes[1]


def _as_stored(use: Use) -> tuple[Cut, ...]:
    """The cuts of a use on the axes of codes ``[N, K]``."""
    if use.k_axis == 1:
        return use.weight_cuts
    return tuple(replace(cut, axis=1 - cut.axis) for cut in use.weight_cuts)
