"""How a range of an op's output depends on ranges of its inputs: one table, by op.

A *range* is ``(axis, start, stop)`` of a value, or ``WHOLE``. A rule takes a node and the range that
is wanted of its output. It returns the ranges that this takes of its tensor inputs, and how to call
the op on those parts. An op without a rule cannot run on a part: ``NotSeparableError`` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from fxquant import ops as _ops  # noqa: F401 - registers the dialect
from fxquant.graph import value

aten = torch.ops.aten


class Range(NamedTuple):
    """Indices ``start`` to ``stop`` (exclusive) along ``axis``."""

    axis: int
    start: int
    stop: int


WHOLE = None
"""The range that is everything."""


class NotSeparableError(Exception):
    """A value cannot be computed in parts along the axis that was asked for."""


class GrainError(NotSeparableError):
    """A range of ``span`` rows is not made of whole groups of ``grain`` rows."""

    def __init__(self, grain: int, span: int) -> None:
        super().__init__(f"rows come in groups of {grain}")
        self.grain, self.span = grain, span


class CrossingError(NotSeparableError):
    """The range spans pieces that come from different inputs; ``points`` are their borders, 0 to 1 in it."""

    def __init__(self, points: list[Fraction]) -> None:
        super().__init__("the range spans several inputs")
        self.points = points


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One op on a part: ranges of its inputs, and the call (``target=None``: the input as it is)."""

    ranges: Mapping[fx.Node, Range | None]
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


Rule = Callable[[fx.Node, Range], Part]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Static shape of a node's tensor."""
    return tuple(int(size) for size in cast("Tensor", value(node)).shape)


def _same_call(node: fx.Node, ranges: Mapping[fx.Node, Range | None]) -> Part:
    return Part(ranges=ranges, target=node.target, args=node.args, kwargs=node.kwargs)  # type: ignore[arg-type]


def pointwise(node: fx.Node, wanted: Range) -> Part:
    """Inputs are aligned at their last axes; a side of 1 is broadcast and needed whole."""
    out = shape_of(node)
    ranges: dict[fx.Node, Range | None] = {}
    for given in node.all_input_nodes:
        shape = shape_of(given)
        axis = wanted.axis - (len(out) - len(shape))
        spread = axis < 0 or shape[axis] != out[wanted.axis]
        ranges[given] = WHOLE if spread else Range(axis, wanted.start, wanted.stop)
    return _same_call(node, ranges)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _axis(axis: int, rank: int) -> int:
    return axis % rank if rank else 0


def transposed(node: fx.Node, wanted: Range) -> Part:
    """``t`` and ``transpose``: the axis follows."""
    (given,) = node.all_input_nodes
    rank = len(shape_of(given))
    default = (0, 1) if node.target is aten.t.default else node.args[1:3]
    one, two = (_axis(cast("int", axis), rank) for axis in default)
    axis = {one: two, two: one}.get(wanted.axis, wanted.axis)
    return _same_call(node, {given: Range(axis, wanted.start, wanted.stop)})


def permuted(node: fx.Node, wanted: Range) -> Part:
    """``permute``: the axis follows."""
    (given,) = node.all_input_nodes
    dims = cast("list[int]", node.args[1])
    axis = _axis(dims[wanted.axis], len(dims))
    return _same_call(node, {given: Range(axis, wanted.start, wanted.stop)})


def unsqueezed(node: fx.Node, wanted: Range) -> Part:
    """``unsqueeze``: along the new axis there is only one index."""
    (given,) = node.all_input_nodes
    dim = _axis(cast("int", node.args[1]), len(shape_of(node)))
    if dim == wanted.axis:
        return _same_call(node, {given: WHOLE})
    axis = wanted.axis - (wanted.axis > dim)
    return _same_call(node, {given: Range(axis, wanted.start, wanted.stop)})


def viewed(node: fx.Node, wanted: Range) -> Part:
    """``view``: rows keep their order, so a range of rows is one of rows if it has whole ones."""
    given = node.all_input_nodes[0]
    before, after = shape_of(given), shape_of(node)
    axis = wanted.axis
    if before[:axis] != after[:axis] or len(before) <= axis:
        raise NotSeparableError(f"{node.name}: axis {axis} of {list(after)} is mixed with others")
    row_before, row_after = math.prod(before[axis + 1 :]), math.prod(after[axis + 1 :])
    start, stop = wanted.start * row_after, wanted.stop * row_after
    if not row_before or not row_after:
        raise NotSeparableError(f"{node.name}: empty rows")
    if start % row_before or stop % row_before:
        raise GrainError(row_before // math.gcd(row_before, row_after), wanted.stop - wanted.start)
    part = [*after[:axis], wanted.stop - wanted.start, *after[axis + 1 :]]
    ranges = {given: Range(axis, start // row_before, stop // row_before)}
    return Part(ranges=ranges, target=aten.reshape.default, args=(given, part))


def reinterpreted(node: fx.Node, wanted: Range) -> Part:
    """``view`` as another dtype: the last axis counts other elements if their sizes differ."""
    given = node.all_input_nodes[0]
    if shape_of(given)[wanted.axis] != shape_of(node)[wanted.axis]:
        raise NotSeparableError(f"{node.name}: elements along axis {wanted.axis} change their size")
    return _same_call(node, {given: wanted})


def expanded(node: fx.Node, wanted: Range) -> Part:
    """``expand``: what is repeated is needed whole."""
    (given,) = node.all_input_nodes
    before, after = shape_of(given), shape_of(node)
    axis = wanted.axis - (len(after) - len(before))
    repeated = axis < 0 or before[axis] != after[wanted.axis]
    part = [*after[: wanted.axis], wanted.stop - wanted.start, *after[wanted.axis + 1 :]]
    ranges = {given: WHOLE if repeated else Range(axis, wanted.start, wanted.stop)}
    return Part(ranges=ranges, target=aten.expand.default, args=(given, part))


def sliced(node: fx.Node, wanted: Range) -> Part:
    """``slice``: along its own axis the range moves, else the op stays."""
    (given,) = node.all_input_nodes
    shape = shape_of(given)
    dim = _axis(_argument(node, 1, "dim", 0), len(shape))
    if dim != wanted.axis:
        return _same_call(node, {given: wanted})
    first = _argument(node, 2, "start", None) or 0
    first = max(0, first + shape[dim]) if first < 0 else first
    step = _argument(node, 4, "step", 1)
    start, stop = first + wanted.start * step, first + (wanted.stop - 1) * step + 1
    ranges = {given: Range(dim, start, stop)}
    if step == 1:
        return Part(ranges=ranges)
    return Part(ranges=ranges, target=aten.slice.Tensor, args=(given, dim, 0, stop - start, step))


def selected(node: fx.Node, wanted: Range) -> Part:
    """``select``: the axes behind the one that is taken away move."""
    (given,) = node.all_input_nodes
    dim = _axis(cast("int", node.args[1]), len(shape_of(given)))
    axis = wanted.axis + (wanted.axis >= dim)
    return _same_call(node, {given: Range(axis, wanted.start, wanted.stop)})


def _one_of(sizes: list[int], wanted: Range) -> tuple[int, int]:
    """The input that holds the range, and where it begins; CrossingError if several do."""
    borders = [0]
    for size in sizes:
        borders.append(borders[-1] + size)
    inside = [border for border in borders[1:-1] if wanted.start < border < wanted.stop]
    if inside:
        span = wanted.stop - wanted.start
        raise CrossingError([Fraction(border - wanted.start, span) for border in inside])
    index = max(i for i, border in enumerate(borders[:-1]) if border <= wanted.start and sizes[i])
    return index, borders[index]


def concatenated(node: fx.Node, wanted: Range) -> Part:
    """``cat``: along its axis a range must lie in one input, which then is the result."""
    inputs = cast("list[fx.Node]", node.args[0])
    dim = _axis(_argument(node, 1, "dim", 0), len(shape_of(node)))
    if dim != wanted.axis:
        return _same_call(node, dict.fromkeys(inputs, wanted))
    index, begin = _one_of([shape_of(given)[dim] for given in inputs], wanted)
    if cast("Tensor", value(inputs[index])).dtype != cast("Tensor", value(node)).dtype:
        raise NotSeparableError(f"{node.name}: it casts some of its inputs")
    return Part(ranges={inputs[index]: Range(dim, wanted.start - begin, wanted.stop - begin)})


def stacked(node: fx.Node, wanted: Range) -> Part:
    """``stack``: along its axis each input is one index."""
    inputs = cast("list[fx.Node]", node.args[0])
    dim = _axis(_argument(node, 1, "dim", 0), len(shape_of(node)))
    if dim != wanted.axis:
        axis = wanted.axis - (wanted.axis > dim)
        return _same_call(node, dict.fromkeys(inputs, Range(axis, wanted.start, wanted.stop)))
    index, _ = _one_of([1] * len(inputs), wanted)
    given = inputs[index]
    return Part(ranges={given: WHOLE}, target=aten.unsqueeze.default, args=(given, dim))


def split_part(node: fx.Node, wanted: Range) -> Part:
    """One result of ``split`` or ``chunk``: a slice."""
    source, index = cast("fx.Node", node.args[0]), cast("int", node.args[1])
    (given,) = source.all_input_nodes
    dim = _axis(_argument(source, 2, "dim", 0), len(shape_of(given)))
    sizes = [int(part.shape[dim]) for part in cast("list[Tensor]", value(source))]
    begin = sum(sizes[:index])
    if dim == wanted.axis:
        return Part(ranges={given: Range(dim, begin + wanted.start, begin + wanted.stop)})
    args = (given, dim, begin, begin + sizes[index])
    return Part(ranges={given: wanted}, target=aten.slice.Tensor, args=args)


def reduced(node: fx.Node, wanted: Range) -> Part:
    """``amax``, ``sum`` and the like over given axes: other axes are kept apart."""
    (given,) = node.all_input_nodes
    rank = len(shape_of(given))
    position = 2 if node.target is aten.linalg_vector_norm.default else 1
    dims = _argument(node, position, "dim", ()) or range(rank)
    dims = {_axis(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)}
    if len(shape_of(node)) == rank:  # keepdim
        axis = wanted.axis
    else:
        axis = [axis for axis in range(rank) if axis not in dims][wanted.axis]
    if axis in dims:
        return _same_call(node, {given: WHOLE})
    return _same_call(node, {given: Range(axis, wanted.start, wanted.stop)})


def multiplied(node: fx.Node, wanted: Range) -> Part:
    """``mm``: rows need rows of the left side, columns need columns of the right side."""
    left, right = cast("tuple[fx.Node, fx.Node]", node.args)
    if left is right:
        raise NotSeparableError(f"{node.name}: a product of a value with itself")
    if wanted.axis == 0:
        return _same_call(node, {left: wanted, right: WHOLE})
    return _same_call(node, {left: WHOLE, right: wanted})


def rotated(node: fx.Node, wanted: Range) -> Part:
    """``hadamard``: mixes the last axis."""
    given = node.all_input_nodes[0]
    if wanted.axis == len(shape_of(node)) - 1:
        raise NotSeparableError(f"{node.name}: the axis is rotated")
    return _same_call(node, {given: wanted})


_POINTWISE = """
    _to_copy clone alias detach contiguous abs neg exp exp2 log2 floor ceil round trunc sign reciprocal sqrt
    rsqrt add sub rsub mul div maximum minimum clamp clamp_min clamp_max where pow remainder fmod
    bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__
    __lshift__ __rshift__ eq ne lt le gt ge logical_not logical_and logical_or isnan isfinite nan_to_num
    copysign ldexp
"""


def _overloads(names: str) -> list[Any]:
    found = []
    for name in names.split():
        packet = getattr(aten, name, None)
        assert packet is not None, name
        found += [getattr(packet, overload) for overload in packet.overloads()]
    return found


RULES: dict[Any, Rule] = {
    **dict.fromkeys(_overloads(_POINTWISE), pointwise),
    **dict.fromkeys(_overloads("t transpose"), transposed),
    **dict.fromkeys(_overloads("amax amin sum mean linalg_vector_norm"), reduced),
    **dict.fromkeys([aten.view.default, aten.reshape.default, aten._unsafe_view.default], viewed),
    aten.view.dtype: reinterpreted,
    aten.permute.default: permuted,
    aten.unsqueeze.default: unsqueezed,
    aten.expand.default: expanded,
    aten.slice.Tensor: sliced,
    aten.select.int: selected,
    aten.cat.default: concatenated,
    aten.stack.default: stacked,
    aten.mm.default: multiplied,
    torch.ops.fxquant.hadamard.default: rotated,
}
"""Op -> rule. What is not here runs on the whole value."""

SPLITS = frozenset(_overloads("split split_with_sizes chunk"))
"""Ops with several results, each of which is a slice (rule: ``split_part``)."""
