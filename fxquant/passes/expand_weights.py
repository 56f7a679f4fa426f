"""Replaces quantized parameters by their constants.

Before: ``w : bfloat16[N, K]``, a placeholder.
After: ``w_codes : int8[N, K]``, ``w_scale : float32[N, 1]`` (and what else the scheme has) and
``dequantize_weight([w_codes, w_scale], spec, K, bfloat16)``, so that every use sees the float values that
the codes stand for; uses that can take codes are rewritten later. A ``[K, N]`` parameter gets a ``t``.
Codes in parts, or laid out as ``[K, N]``, are put together by ``cat`` and ``t``, which a target that
asked for them takes apart again.
The new placeholders carry the ``Form`` in ``meta["form"]``, which tells later passes the scheme.
A float weight in main memory, ``w_value``, is copied by ``fetch`` before each use.
Look-ups of a form with a table read ``w_table : bfloat16[N, K]``, the exact floats.
The weight of a convolution is ``view(dequantize_weight(...), [O, I, *kernel])`` before each use, so that the
floats of no more than one layer exist at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fxquant.errors import QuantizedWeightError
from fxquant.form import Form
from fxquant.graph import call, fake_mode_of, inserting_before, placeholders, value
from fxquant.held import FLIP, flipped
from fxquant.numerics import block_size
from fxquant.ops import dequantize_weight as _  # noqa: F401 - registers the dialect
from fxquant.passes.uses import OtherUse
from fxquant.passes.weight_uses import weight_uses
from fxquant.scheme import SCALES

aten = torch.ops.aten


def expand_weights(gm: fx.GraphModule, forms: Mapping[str, Form]) -> int:
    """Replace each placeholder named in ``forms``; the number of them."""
    count = 0
    for node in placeholders(gm):
        form = forms.get(str(node.target))
        if form is not None:
            _expand(gm, node, form)
            count += 1
    return count


def _whole_codes(gm: fx.GraphModule, parts: list[fx.Node], form: Form) -> fx.Node:
    """Codes ``[N, K]`` from their parts; the target's lowering uses the parts."""
    turned = [call(gm, aten.t.default, (part,)) for part in parts] if form.kn else parts
    width = max(len(form.parts_k), 1)
    rows = [turned[i : i + width] for i in range(0, len(turned), width)]
    joined = [row[0] if width == 1 else call(gm, aten.cat.default, (row, 1)) for row in rows]
    codes = joined[0] if len(joined) == 1 else call(gm, aten.cat.default, (joined, 0))
    codes.meta["form"] = form
    return codes


def _unheld(gm: fx.GraphModule, name: str, part: fx.Node, form: Form) -> fx.Node:
    """A constant as the scheme has it, of one that is held for a target's ops; they take it as it is."""
    if not form.held or form.act is not None:
        return part
    if name in form.codes:
        if not flipped(form):
            return part
        made = call(gm, aten.bitwise_xor.Scalar, (part, FLIP))
    else:
        made = call(gm, aten.to.dtype, (part, SCALES[form.weight.scale]))
        made = call(gm, aten.neg.default, (made,)) if name == "zero" else made
    made.meta["held"] = part
    return made


def _expand(gm: fx.GraphModule, node: fx.Node, form: Form) -> None:
    uses = weight_uses(node)
    for use in uses:
        if isinstance(use, OtherUse) and use.writes:
            raise QuantizedWeightError(
                f"{node.target}: the model writes to a quantized weight ({use.reason}), and the write "
                f"would be lost. Keep it float: ignore=[...] with its name."
            )
    mode, val = fake_mode_of(gm), value(node)
    shapes = form.shapes(tuple(val.shape), val.dtype)
    place = torch.device("cpu") if form.host else val.device
    with mode:
        vals = {name: torch.empty(size, dtype=d, device=place) for name, (d, size) in shapes.items()}
    parts = {}
    with gm.graph.inserting_before(node):
        for name in form.constants:
            parts[name] = gm.graph.placeholder(f"{node.target}_{name}")
            parts[name].meta["val"] = vals[name]
            parts[name].meta["form"] = form
    users = tuple(node.users)
    last = placeholders(gm)[-1]
    if form.host:
        for user in users:  # at each use, so that no more than one copy is on the device at a time
            with inserting_before(gm, user):
                fetched = call(gm, torch.ops.fxquant.fetch.default, (parts["value"], str(val.device)))
            user.replace_input_with(node, fetched)
        gm.graph.erase_node(node)
        return
    if form.kernel:
        for user in users:
            with inserting_before(gm, user):
                floats = _floats(gm, parts, form, node)
            user.replace_input_with(node, floats)
        gm.graph.erase_node(node)
        return
    with gm.graph.inserting_before(last.next):
        floats = _floats(gm, parts, form, node)
    exact = {use.via for use in uses if form.table and isinstance(use, OtherUse) and use.lookup}
    exact -= {use.via for use in uses if not isinstance(use, OtherUse) or not use.lookup}
    for user in users:
        user.replace_input_with(node, parts["table"] if user in exact else floats)
    gm.graph.erase_node(node)


def _floats(gm: fx.GraphModule, parts: dict[str, fx.Node], form: Form, node: fx.Node) -> fx.Node:
    """The float values that the constants stand for, in the shape of the parameter ``node``."""
    val = value(node)
    codes = _whole_codes(gm, [_unheld(gm, name, parts[name], form) for name in form.codes], form)
    constants = [codes, *(_unheld(gm, name, parts[name], form) for name in form.weight.names[1:])]
    parts["scale"].meta["derived"] = {name: parts[name] for name in form.derived}
    k = form.codes_shape(tuple(val.shape))[1]
    args = (constants, str(form.weight.plain), k, val.dtype)
    anchor = call(gm, torch.ops.fxquant.dequantize_weight.default, args)
    anchor.meta["form"] = form
    anchor.meta["act_scale"] = parts.get("act_scale")
    if form.kernel:
        return call(gm, aten.view.default, (anchor, list(val.shape)))
    floats = call(gm, torch.ops.fxquant.hadamard.default, (anchor, block_size(k))) if form.rotated else anchor
    if not form.transposed:
        return floats
    return call(gm, aten.mT.default if val.dim() == 3 else aten.t.default, (floats,))
