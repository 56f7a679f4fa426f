"""Rewrites matmuls with a quantized weight to ops on its codes.

Before: ``linear(x : bfloat16[..., K], dequantize_weight([codes, scale], ...), bias)``, also through casts,
transposes and cuts of the weight, and as ``matmul``, ``mm`` or ``addmm``.
After, by scheme: ``scaled_mm(x_codes, codes, x_scale, scale, bias, bfloat16)`` with
``x_codes, x_scale = quantize_act(x)``, ``block_mm`` where scales are for blocks along K, or
``weight_only_mm(x, [codes, scale], spec, bias)``; cuts of the weight become cuts of its constants. A cut
that does not fall on the borders of blocks leaves the use as it is, in floats. Where one of several
experts is multiplied with, its constants are picked first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar, cast

import torch
from torch import fx

from fxquant import ops as _ops  # noqa: F401 - registers the dialect
from fxquant.form import Form
from fxquant.graph import call, inserting_before, is_call, is_tensor, items, value
from fxquant.numerics import block_size
from fxquant.passes.lower_to_target import resolve
from fxquant.passes.uses import Cut, ExpertUse, LinearUse, Pick
from fxquant.passes.weight_uses import matmul_operands, weight_uses
from fxquant.scheme import FULL, QuantSpec

aten = torch.ops.aten
fxq = torch.ops.fxquant

UseT = TypeVar("UseT", LinearUse, ExpertUse)


def quantize_linear(gm: fx.GraphModule) -> int:
    """Rewrite every linear use of every expanded weight; the number of them."""
    count = 0
    for source, use in uses_of_codes(gm, LinearUse):
        _rewrite(gm, use, source)
        count += 1
    return count


def uses_of_codes(gm: fx.GraphModule, kind: type[UseT]) -> Iterator[tuple[fx.Node, UseT]]:
    """Uses of one kind that codes can serve, each with the expanded weight; a caller may rewrite each."""
    for source in gm.graph.find_nodes(op="call_function", target=fxq.dequantize_weight.default):
        form: Form = source.meta["form"]
        shape = cast("tuple[int, int]", tuple(value(source).shape[-2:]))
        for use in weight_uses(floats_of(source, form)):
            if (
                isinstance(use, kind)
                and use.k_axis == 1
                and can_cut(form.weight, shape, use.cuts, rotated=form.rotated)
            ):
                yield source, use


def floats_of(source: fx.Node, form: Form) -> fx.Node:
    """The node that stands for the model's float weight: behind the rotation, if there is one."""
    turned = [user for user in source.users if is_call(user, fxq.hadamard.default)]
    return turned[0] if form.rotated and turned else source


def _rewrite(gm: fx.GraphModule, use: LinearUse, source: fx.Node) -> None:
    node, form = use.node, source.meta["form"]
    operands = matmul_operands(node)
    assert operands is not None
    x, _, bias, _ = operands
    with inserting_before(gm, node):
        constants = [_picked(gm, part, use.expert) for part in constants_of(source)]
        constants = cut_constants(gm, constants, form.weight, use.cuts)
        new = product(gm, x, constants, source, value(node).dtype, bias)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def constants_of(source: fx.Node) -> list[fx.Node]:
    """The constants of an expanded weight."""
    return list(cast("list[fx.Node]", source.args[0]))


def _picked(gm: fx.GraphModule, part: fx.Node, expert: Pick | None) -> fx.Node:
    """The part of a constant that belongs to one expert."""
    if expert is None:
        return part
    if is_tensor(expert):
        return call(gm, aten.index.Tensor, (part, [expert]))
    return call(gm, aten.select.int, (part, 0, expert))


def product(
    gm: fx.GraphModule,
    x: fx.Node,
    weight: list[fx.Node],
    source: fx.Node,
    dtype: torch.dtype,
    last: fx.Node | None,
    *,
    grouped: bool = False,
) -> fx.Node:
    """``x`` times the weight that the constants hold.

    ``last``: the bias, or for ``grouped`` rows the offsets of the groups.
    """
    form: Form = source.meta["form"]
    scheme, spec = form.quantized_as, str(form.weight.plain)
    op = resolve(scheme.grouped_op if grouped else scheme.op)
    if form.rotated:
        x = call(gm, fxq.hadamard.default, (x, block_size(value(source).shape[-1])))
    if scheme.act is None:
        out = call(gm, op, (x, weight, spec, last))
        return out if value(out).dtype == dtype else call(gm, aten.to.dtype, (out, dtype))
    if scheme.act.static:
        given = cast("fx.Node", source.meta["act_scale"])
        x_codes = call(gm, fxq.quantize_act_static.default, (x, given, str(scheme.act)))
        x_scale = call(gm, aten.view.default, (given, [1] * value(x).dim()))
    else:
        x_codes, x_scale = items(gm, call(gm, fxq.quantize_act.default, (x, str(scheme.act))))
    if scheme.op == "fxquant::scaled_mm":
        return call(gm, op, (x_codes, weight[0], x_scale, weight[1], last, dtype))
    k = value(x).shape[-1]
    return call(gm, op, (x_codes, x_scale, str(scheme.act), weight, spec, int(k), last, dtype))


def can_cut(spec: QuantSpec, shape: tuple[int, int], cuts: tuple[Cut, ...], *, rotated: bool) -> bool:
    """Whether the constants of a weight ``[N, K]`` of ``shape`` can be cut so."""
    sizes = list(shape)
    if rotated and any(cut.axis == 1 for cut in cuts):
        return False
    for cut in cuts:
        side, size = spec.block[cut.axis], sizes[cut.axis]
        grain = 1 if side == FULL else side
        if cut.axis == 1 and spec.packed:
            grain = grain if grain % 2 == 0 else 2 * grain
        whole = cut.start % grain == 0 and (cut.stop % grain == 0 or cut.stop == size)
        if grain > 1 and not (whole and cut.step == 1):
            return False
        sizes[cut.axis] = len(range(cut.start, cut.stop, cut.step))
    return True


def cut_constants(
    gm: fx.GraphModule, constants: list[fx.Node], spec: QuantSpec, cuts: tuple[Cut, ...]
) -> list[fx.Node]:
    """The parts of the constants that belong to cuts of the weight."""
    for cut in cuts:
        named = zip(spec.names, constants, strict=True)
        constants = [_cut(gm, name, part, spec, cut) for name, part in named]
    return constants


def _cut(gm: fx.GraphModule, name: str, part: fx.Node, spec: QuantSpec, cut: Cut) -> fx.Node:
    """The part of a constant that belongs to a cut of the weight."""
    if name == "codes":
        step = 2 if cut.axis == 1 and spec.packed else 1
    elif name == "global_scale" or spec.block[cut.axis] == FULL:
        return part
    else:
        step = spec.block[cut.axis]
    start, stop = cut.start // step, -(-cut.stop // step)
    axis = value(part).dim() - 2 + cut.axis
    if (start, stop, cut.step) == (0, value(part).shape[axis], 1):
        return part
    return call(gm, aten.slice.Tensor, (part, axis, start, stop, cut.step))
