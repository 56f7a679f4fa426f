"""Lowering of the int8 dialect ops to the NPU's: functions that build replacement nodes after a decision.

Before: ``quantize_act(x) -> codes [..., K], scale [..., 1]`` and ``scaled_mm(codes, w_codes, scale, ...)``.
After: ``npu_dynamic_quant(x)`` and, for each part of the weight, ``npu_quant_matmul`` on ``codes [M, K]``;
parts of N are concatenated or given to whom the graph cut them for, parts of K are summed before the
scales. On 310P ``npu_quant_matmul_dequant`` quantizes the activation itself.

CANN refuses empty operands: a call whose number of rows is known is the op itself or zeros; one whose
rows may be none is ``fxquant_npu::<the same op>`` (see ``npu_schemas``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import Argument

from fxquant.errors import GraphCheckError, RefusedError
from fxquant.graph import call, inserting_before, is_call, items, value
from fxquant.output_cuts import follow_cuts
from fxquant.targets.npu_fakes import INT32, dtype_code
from fxquant.targets.npu_rules import refusal_of_call
from fxquant.targets.npu_schemas import planned_chip
from fxquant.targets.npu_wide import DEQUANT, WideDecision

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParts:
    """Constants of a weight, cut as its decision says.

    ``codes[i][j]``: part i of N, part j of K; ``[k, n]``, or ``[n, k]`` for the layouts ``nk.t`` and
    ``nk``. ``scales[i]``: float32 ``[n]``. ``biases[i]``: ``[n]`` in the decision's ``bias_dtype``.
    """

    codes: tuple[tuple[fx.Node, ...], ...]
    scales: tuple[fx.Node, ...]
    biases: tuple[fx.Node | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How calls on a number of rows that is not a plain integer are written.

    ``proven``: guards outside of the graph hold for its symbolic sizes (graphs of ``torch.compile``,
    which is called again for other sizes); an exported graph has no such guards.
    """

    proven: bool = False

    def op(self, name: str, x: fx.Node) -> Any:
        """``npu::name``, or its form for rows that may be none."""
        namespace = torch.ops.npu if self._some(x) else torch.ops.fxquant_npu
        return getattr(namespace, name).default

    def _some(self, x: fx.Node) -> bool:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        sizes = value(x).shape
        if all(isinstance(size, int) for size in sizes):
            return all(size > 0 for size in sizes)
        return self.proven and all(bool(statically_known_true(size > 0)) for size in sizes)

    @staticmethod
    def none(x: fx.Node) -> bool:
        """Whether ``x`` is known to be empty."""
        return any(isinstance(size, int) and size == 0 for size in value(x).shape)


def emit(
    gm: fx.GraphModule,
    op: torch._ops.OpOverload,
    args: tuple[Argument, ...],
    kwargs: dict[str, Argument] | None = None,
) -> fx.Node:
    """Insert a call of an NPU op, or raise what the table says where ``planning_for`` names a chip.

    torch_npu's own fakes check no limit, so the check does not rest on the fakes.
    """
    chip = planned_chip()
    if chip is not None:
        given, named = cast("Any", fx.node.map_arg((args, kwargs or {}), value))
        refusal = refusal_of_call(op._schema.name.partition("::")[2], given, named, chip)
        if refusal is not None:
            raise RefusedError(f"lowering: {refusal.reason}")
    return call(gm, op, args, kwargs)


def cast_to(gm: fx.GraphModule, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """``x`` in ``dtype``."""
    return x if value(x).dtype == dtype else call(gm, aten.to.dtype, (x, dtype))


def size_of(gm: fx.GraphModule, x: fx.Node, axis: int) -> Argument:
    """A plain integer, or a node that gives the symbolic size."""
    size = value(x).shape[axis]
    return size if isinstance(size, int) else call(gm, aten.sym_size.int, (x, axis))


def flatten(gm: fx.GraphModule, x: fx.Node, k: int) -> fx.Node:
    """``[..., K]`` -> ``[M, K]``; K is the weight's, a plain integer where that of ``x`` may be symbolic."""
    return x if value(x).dim() == 2 else call(gm, aten.reshape.default, (x, [-1, k]))


def unflatten(gm: fx.GraphModule, out: fx.Node, like: fx.Node) -> fx.Node:
    """``[M, N]`` -> ``[..., N]`` with the leading dims of ``like``."""
    rank = value(like).dim()
    if rank == 2:
        return out
    leading = [size_of(gm, like, axis) for axis in range(rank - 1)]
    return call(gm, aten.reshape.default, (out, [*leading, value(out).shape[-1]]))


def zeros(gm: fx.GraphModule, like: fx.Node, last: Sequence[Argument], dtype: torch.dtype) -> fx.Node:
    """Zeros ``[..., *last]`` with the leading dims of ``like``."""
    leading = [size_of(gm, like, axis) for axis in range(value(like).dim() - 1)]
    return call(gm, aten.new_zeros.default, (like, [*leading, *last]), {"dtype": dtype})


def constant_parts(
    gm: fx.GraphModule, codes: fx.Node, scale: fx.Node, bias: fx.Node | None, decision: WideDecision
) -> WeightParts:
    """Cut codes ``[N, K]``, scale ``[N, 1]`` and bias ``[N]``: nodes of load time, at the insertion point."""
    grid, scales, biases = [], [], []
    for start, stop in bounds(decision.parts_n):
        rows = _slice(gm, codes, 0, start, stop)
        grid.append(tuple(_block(gm, rows, a, b, decision) for a, b in bounds(decision.parts_k)))
        part = _slice(gm, scale, 0, start, stop)
        scales.append(call(gm, aten.reshape.default, (part, [stop - start])))
        added = None if bias is None else _slice(gm, bias, 0, start, stop)
        if added is not None and decision.bias_dtype is not None:
            added = cast_to(gm, added, decision.bias_dtype)
        biases.append(added)
    return WeightParts(codes=tuple(grid), scales=tuple(scales), biases=tuple(biases))


def bounds(parts: Sequence[int]) -> list[tuple[int, int]]:
    """``(3, 4)`` -> ``[(0, 3), (3, 7)]``."""
    found, start = [], 0
    for size in parts:
        found.append((start, start + size))
        start += size
    return found


def _slice(gm: fx.GraphModule, node: fx.Node, axis: int, start: int, stop: int) -> fx.Node:
    if start == 0 and stop == value(node).shape[axis]:
        return node
    return call(gm, aten.slice.Tensor, (node, axis, start, stop))


def _block(gm: fx.GraphModule, rows: fx.Node, start: int, stop: int, decision: WideDecision) -> fx.Node:
    block = _slice(gm, rows, 1, start, stop)
    if decision.layout == "kn":
        return call(gm, aten.contiguous.default, (call(gm, aten.t.default, (block,)),))
    return block if block is rows else call(gm, aten.contiguous.default, (block,))


def lower_quantize_act(gm: fx.GraphModule, node: fx.Node, dtype: torch.dtype, rows: Rows) -> None:
    """Replace a ``fxquant.quantize_act`` by ``npu_dynamic_quant`` of ``x`` cast to ``dtype``.

    ``x [..., K]`` -> codes int8 ``[..., K]``, scale float32 ``[..., 1]``, as the dialect has them; a
    vector is a matrix of one row.
    """
    x = cast("fx.Node", node.args[0])
    with inserting_before(gm, node):
        if rows.none(x):
            codes = zeros(gm, x, [size_of(gm, x, -1)], torch.int8)
            scale = zeros(gm, x, [1], torch.float32)
        else:
            x = cast_to(gm, x, dtype)
            vector = value(x).dim() == 1
            matrix = call(gm, aten.unsqueeze.default, (x, 0)) if vector else x
            codes, scale = items(gm, emit(gm, rows.op("npu_dynamic_quant", matrix), (matrix,)))
            if vector:
                codes = call(gm, aten.squeeze.dim, (codes, 0))
            else:
                scale = call(gm, aten.unsqueeze.default, (scale, -1))
    for user in list(node.users):
        assert is_call(user, operator.getitem)
        user.replace_all_uses_with((codes, scale)[cast("int", user.args[1])])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)


def lower_scaled_mm(
    gm: fx.GraphModule, node: fx.Node, parts: WeightParts, decision: WideDecision, rows: Rows
) -> None:
    """Replace a ``fxquant.scaled_mm`` by the calls that ``decision`` stands for.

    The codes, scales and biases come from ``parts``, the activation and the output dtype from the node.
    """
    x, x_scale = cast("fx.Node", node.args[0]), cast("fx.Node", node.args[2])
    out_dtype = cast("torch.dtype", node.args[5])
    if decision.op == DEQUANT:
        x = _quantized(x)
    with inserting_before(gm, node):
        if rows.none(x):
            outs = [zeros(gm, x, [sum(decision.parts_n)], out_dtype)]
        elif decision.op == DEQUANT:
            outs = _dequant(gm, x, parts, decision, rows)
        elif decision.sums is None:
            outs = _matmuls(gm, x, x_scale, parts, decision, rows)
        else:
            outs = _sums(gm, x, x_scale, parts, decision, rows)
        if not rows.none(x):
            outs = [unflatten(gm, cast_to(gm, out, out_dtype), x) for out in outs]
    if not (decision.follows_cuts and len(outs) > 1 and follow_cuts(gm, node, outs)):
        with inserting_before(gm, node):
            whole = outs[0] if len(outs) == 1 else call(gm, aten.cat.default, (outs, -1))
        node.replace_all_uses_with(whole)
    gm.graph.erase_node(node)


def _passed(gm: fx.GraphModule, codes: fx.Node, decision: WideDecision) -> fx.Node:
    """The weight as it is passed: ``[k, n]``."""
    return call(gm, aten.t.default, (codes,)) if decision.layout == "nk.t" else codes


def _matmuls(
    gm: fx.GraphModule, x: fx.Node, x_scale: fx.Node, parts: WeightParts, decision: WideDecision, rows: Rows
) -> list[fx.Node]:
    matrix = flatten(gm, x, sum(decision.parts_k))
    token = call(gm, aten.reshape.default, (x_scale, [-1]))
    outs = []
    for (codes,), scale, bias in zip(parts.codes, parts.scales, parts.biases, strict=True):
        kwargs: dict[str, Argument] = {"pertoken_scale": token}
        if bias is not None:
            kwargs["bias"] = bias
        kwargs["output_dtype"] = dtype_code(decision.dtype)
        args = (matrix, _passed(gm, codes, decision), scale)
        outs.append(emit(gm, rows.op("npu_quant_matmul", x), args, kwargs))
    return outs


def _sums(
    gm: fx.GraphModule, x: fx.Node, x_scale: fx.Node, parts: WeightParts, decision: WideDecision, rows: Rows
) -> list[fx.Node]:
    """Parts of K: int32 products with a scale of one, summed, then scaled in float32.

    Whether CANN multiplies an int32 result by its scale is not documented, so the scale is one.
    """
    matrix = flatten(gm, x, sum(decision.parts_k))
    pieces = []
    for start, stop in bounds(decision.parts_k):  # CANN takes no strided x1
        piece = _slice(gm, matrix, 1, start, stop)
        pieces.append(call(gm, aten.contiguous.default, (piece,)))
    token = call(gm, aten.reshape.default, (x_scale, [-1, 1]))
    one = call(gm, aten.new_ones.default, (token, [1]))
    outs = []
    for codes, scale, bias in zip(parts.codes, parts.scales, parts.biases, strict=True):
        total: fx.Node | None = None
        for piece, block in zip(pieces, codes, strict=True):
            args = (piece, _passed(gm, block, decision), one)
            product = emit(gm, rows.op("npu_quant_matmul", x), args, {"output_dtype": INT32})
            product = cast_to(gm, product, cast("torch.dtype", decision.sums))
            total = product if total is None else call(gm, aten.add.Tensor, (total, product))
        assert total is not None
        out = call(gm, aten.mul.Tensor, (cast_to(gm, total, torch.float32), token))
        out = call(gm, aten.mul.Tensor, (out, scale))
        outs.append(out if bias is None else call(gm, aten.add.Tensor, (out, bias)))
    return outs


def _quantized(x_codes: fx.Node) -> fx.Node:
    """The float activation that codes were made of."""
    quantize = cast("fx.Node", x_codes.args[0]) if is_call(x_codes, operator.getitem) else x_codes
    if not is_call(quantize, torch.ops.fxquant.quantize_act.default):
        raise GraphCheckError(f"{x_codes.format_node()}: these codes are not of a quantize_act")
    return cast("fx.Node", quantize.args[0])


def _dequant(
    gm: fx.GraphModule, x: fx.Node, parts: WeightParts, decision: WideDecision, rows: Rows
) -> list[fx.Node]:
    """``npu_quant_matmul_dequant`` on the float activation ``x``."""
    matrix = flatten(gm, cast_to(gm, x, decision.dtype), sum(decision.parts_k))
    op = rows.op("npu_quant_matmul_dequant", x)
    return [
        emit(gm, op, (matrix, codes, scale), {"quant_mode": "pertoken"})
        for (codes,), scale in zip(parts.codes, parts.scales, strict=True)
    ]
