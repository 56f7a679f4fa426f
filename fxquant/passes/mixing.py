"""Tells a linear whose outputs, made scores by softmax or sigmoid, weight the outputs of experts.

Experts are what the scores meet: a product with a weight of rank 3 (all scores at once), a stack of products
with other weights (the same), or, score by score, products each with its own weight or expert. A gate of a
feed-forward or of attention has one weight on its other side, and is no router.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fxquant.graph import is_call, is_tensor, value
from fxquant.passes.uses import Pick
from fxquant.passes.weight_uses import BATCHED, GROUPED, MATMULS, PARTS, SAME, SWAPS

aten = torch.ops.aten

SCORES = (aten.softmax.int, aten._softmax.default, aten.sigmoid.default)
VIEWS = (
    *SAME, *SWAPS, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.flatten.using_ints,
)  # fmt: skip
CUTS = (*PARTS, aten.slice.Tensor, aten.narrow.default, aten.select.int, aten.unbind.int)
POINTWISE = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.where.self,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor,
)  # fmt: skip
PRODUCTS = (*MATMULS, *BATCHED, aten.linear.default, aten.addmm.default, aten.einsum.default)

MIXES = "its scores weight outputs of experts"

Source = tuple[fx.Node, Pick | None]
"""A weight, and which of its experts."""
Piece = tuple[fx.Node, object]
"""The op that cut the scores, and what of them it took."""


def mixes(linear: fx.Node) -> str:
    """In words, that the outputs of ``linear`` weight outputs of experts; empty where they do not."""
    met = _meetings(linear)
    if any(_is_stack_of_experts(other) for _, other in met):
        return MIXES
    pieces: dict[Piece, set[Source]] = {}
    for piece, other in met:
        if piece is not None:
            pieces.setdefault(piece, set()).update(_sources(other))
    return MIXES if _differ(list(pieces.values())) else ""


def _differ(parts: Sequence[set[Source]]) -> bool:
    """Whether there are several parts, each made of weights, none of which made another."""
    together = set().union(*parts)
    return len(parts) > 1 and all(parts) and sum(map(len, parts)) == len(together)


def _meetings(linear: fx.Node) -> list[tuple[Piece | None, fx.Node]]:
    """What scores are multiplied with, and which of them: None for all."""
    met: list[tuple[Piece | None, fx.Node]] = []
    stack: list[tuple[fx.Node, bool, Piece | None]] = [(linear, False, None)]
    seen = {linear}
    while stack:
        node, scored, piece = stack.pop()
        for user in node.users:
            others = [arg for arg in user.all_input_nodes if arg is not node]
            if user in seen:
                continue
            if scored and others and (is_call(user, *PRODUCTS) or _spreads(user, node, others[0])):
                met.append((piece, others[0]))
            if is_call(user, *POINTWISE) and not any(
                _multiplied(other) for other in others if other not in seen
            ):
                stack.append((user, scored, piece))
            elif is_call(user, *SCORES, *VIEWS):
                stack.append((user, scored or is_call(user, *SCORES), piece))
            elif is_call(user, *CUTS):
                stack += [(part, scored, key) for part, key in _pieces(user, piece)]
            else:
                continue
            seen.add(user)
    return met


def _spreads(user: fx.Node, scores: fx.Node, other: fx.Node) -> bool:
    """Whether ``user`` multiplies whole rows with one score each, not each element with its own."""
    return is_call(user, aten.mul.Tensor) and value(scores).shape != value(other).shape


def _pieces(cut: fx.Node, piece: Piece | None) -> Iterator[tuple[fx.Node, Piece | None]]:
    """The parts that ``cut`` gives; one that takes all, as slices of other axes do, stays what it was."""
    if not is_tensor(cut):
        for taker in cut.users:
            if is_call(taker, operator.getitem):
                yield taker, (cut, taker.args[1])
        return
    whole = is_call(cut, aten.slice.Tensor) and value(cut).shape == value(cut.all_input_nodes[0]).shape
    yield cut, piece if whole else (cut, None)


def _is_stack_of_experts(node: fx.Node) -> bool:
    """Whether one product with a weight of rank 3 made ``node``, or it is a stack of products of others."""
    if any(value(weight).dim() == 3 and pick is None for weight, pick in _sources(node)):
        return True
    stacks = (found for found in _cone(node) if is_call(found, aten.stack.default))
    return any(_differ([_sources(part) for part in stack.all_input_nodes]) for stack in stacks)


def _cone(node: fx.Node) -> Iterator[fx.Node]:
    """``node`` and what it is made of, down to products with weights."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        here = stack.pop()
        if here in found:
            continue
        found.add(here)
        yield here
        if _weight_of(here) is None:
            stack += here.all_input_nodes


def _sources(node: fx.Node) -> set[Source]:
    """The weights of the last products that ``node`` is made of."""
    return {source for source in map(_weight_of, _cone(node)) if source is not None}


def _multiplied(node: fx.Node) -> bool:
    """Whether ``node`` is made of a product with a weight."""
    return any(_weight_of(found) is not None for found in _cone(node))


def _weight_of(product: fx.Node) -> Source | None:
    """The weight with which ``product`` multiplies, if it is one."""
    grouped = isinstance(product.target, torch._ops.OpOverload) and product.target._schema.name in GROUPED
    if not grouped and not is_call(product, *PRODUCTS):
        return None
    found = [source for source in map(_stored, product.all_input_nodes) if source is not None]
    # The other operand may be an input of the model: of a lower rank, or before the weight.
    return max(reversed(found), key=lambda source: value(source[0]).dim(), default=None)


def _stored(operand: fx.Node) -> Source | None:
    """The weight of which ``operand`` is a view, and which expert of it."""
    pick: Pick | None = None
    node = operand
    while is_call(node, *VIEWS, *CUTS, aten.index.Tensor, operator.getitem):
        if is_call(node, aten.select.int):
            pick = node.args[2] if pick is None else pick  # type: ignore[assignment]
        elif is_call(node, operator.getitem):
            pick = node.args[1]  # type: ignore[assignment]
        node = node.all_input_nodes[0]
    stored = node.op in ("placeholder", "get_attr") and is_tensor(node) and value(node).dim() >= 2
    return (node, pick) if stored else None
