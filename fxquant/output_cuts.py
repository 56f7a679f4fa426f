"""Parts of a wide output that go straight to the consumers which would cut it anyway (adaLN chunks).

Before: ``a, b, c = chunk(silu(cat(p, q)), 3, -1)``. After: ``a = slice(silu(p))`` and so on, no ``cat``.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from fxquant.graph import call, inserting_before, is_call, is_tensor, value

aten = torch.ops.aten

_LISTS = (
    aten.chunk.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
    aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
_POINTWISE = (
    aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default,
    aten.to.dtype, aten.neg.default, aten.exp.default, aten.mul.Scalar, aten.add.Scalar, aten.clone.default,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A node that takes the range ``start:stop`` of the last axis of an output."""

    node: fx.Node
    start: int
    stop: int


def cuts_of(node: fx.Node) -> tuple[int, ...]:
    """Offsets where every consumer of ``node`` cuts its last axis; none where one reads across them."""
    found = pieces_of(node)
    if found is None:
        return ()
    n = value(node).shape[-1]
    return tuple(sorted({end for piece in found[1] for end in (piece.start, piece.stop)} - {0, n}))


def pieces_of(node: fx.Node) -> tuple[list[fx.Node], list[Piece]] | None:
    """Unary pointwise ops between ``node`` and its cuts, and the cuts; None where it is read whole."""
    chain: list[fx.Node] = []
    while len(node.users) == 1 and is_call(next(iter(node.users)), *_POINTWISE):
        user = next(iter(node.users))
        if user.all_input_nodes != [node]:
            return None
        chain.append(user)
        node = user
    pieces: list[Piece] = []
    for user in _users(node):
        found = _pieces(node, user)
        if found is None:
            return None
        pieces += found
    return (chain, pieces) if pieces else None


def _pieces(source: fx.Node, user: fx.Node) -> list[Piece] | None:
    n = value(source).shape[-1]
    tensors = [arg for arg in user.all_input_nodes if is_tensor(arg)]
    if len(tensors) != 1 or not isinstance(n, int):
        return None
    if is_call(user, *_LISTS):
        return _listed(source, user)
    if is_call(user, aten.unflatten.int, aten.view.default, aten.reshape.default):
        return _grouped(source, user)
    if is_call(user, aten.slice.Tensor) and not user.kwargs:
        return _sliced(source, user, n)
    return None


def _sliced(source: fx.Node, user: fx.Node, n: int) -> list[Piece] | None:
    given = list(user.args[1:])
    axis, start, stop, step = given + [0, None, None, 1][len(given) :]
    if _is_last(source, axis) and step == 1:
        a, b, _ = slice(cast("int | None", start), cast("int | None", stop)).indices(n)
        return [Piece(node=user, start=a, stop=b)] if a < b else None
    return None


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Users, seen through slices that take everything (``out[:, :16]`` takes all rows first)."""
    for user in node.users:
        given = list(user.args[2:])
        start, stop, step = (given + [None, None, 1][len(given) :])[:3]
        everything = start in (0, None) and stop in (None, sys.maxsize) and step == 1
        if is_call(user, aten.slice.Tensor) and not user.kwargs and everything:
            yield from _users(user)
        else:
            yield user


def _is_last(source: fx.Node, axis: object) -> bool:
    return axis in (-1, value(source).dim() - 1)


def _listed(source: fx.Node, user: fx.Node) -> list[Piece] | None:
    """The pieces of an op that gives a list, by the sizes of its results."""
    axis = user.args[2] if len(user.args) > 2 else user.kwargs.get("dim", 0)
    if not _is_last(source, axis) or not all(is_call(item, operator.getitem) for item in user.users):
        return None
    ends = [0, *itertools.accumulate(part.shape[-1] for part in value(user))]
    indices = {item: cast("int", item.args[1]) % len(value(user)) for item in user.users}
    return [Piece(node=item, start=ends[i], stop=ends[i + 1]) for item, i in indices.items()]


def _same(a: Sequence[object], b: Sequence[object]) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return all(bool(statically_known_true(x == y)) for x, y in zip(a, b, strict=True))


def _grouped(source: fx.Node, user: fx.Node) -> list[Piece] | None:
    """``[..., N]`` -> ``[..., G, N / G]``, of which each group is taken by ``unbind`` or ``select``."""
    shape, grouped = tuple(value(source).shape), tuple(value(user).shape)
    if len(grouped) != len(shape) + 1 or not all(isinstance(size, int) for size in grouped[-2:]):
        return None
    count, size = grouped[-2:]
    if count * size != shape[-1] or not _same(shape[:-1], grouped[:-2]):
        return None
    pieces = []
    for taker in _users(user):
        axis = taker.args[1] if len(taker.args) > 1 else 0
        if axis not in (-2, len(grouped) - 2):
            return None
        if is_call(taker, aten.select.int):
            takers = {taker: cast("int", taker.args[2])}
        elif is_call(taker, aten.unbind.int) and all(is_call(item, operator.getitem) for item in taker.users):
            takers = {item: cast("int", item.args[1]) for item in taker.users}
        else:
            return None
        starts = {node: index % count * size for node, index in takers.items()}
        pieces += [Piece(node=node, start=start, stop=start + size) for node, start in starts.items()]
    return pieces or None


def follow_cuts(gm: fx.GraphModule, node: fx.Node, outs: Sequence[fx.Node]) -> bool:
    """Give the consumers of ``node`` their pieces of ``outs``, its parts; False where one needs more."""
    found = pieces_of(node)
    if found is None:
        return False
    chain, pieces = found
    starts = [0]
    for out in outs:
        starts.append(starts[-1] + value(out).shape[-1])
    homes = [_home(piece, starts) for piece in pieces]
    if None in homes:
        return False
    last = chain[-1] if chain else node
    parts = list(outs)
    for step in chain:
        op, rest, kwargs = cast("torch._ops.OpOverload", step.target), step.args[1:], dict(step.kwargs)
        with inserting_before(gm, step):
            parts = [call(gm, op, (part, *rest), kwargs) for part in parts]
    for piece, home in zip(pieces, homes, strict=True):
        index = cast("int", home)
        _replace(gm, piece, parts[index], starts[index])
    _erase(gm, last, node)
    return True


def _home(piece: Piece, starts: Sequence[int]) -> int | None:
    """The part that holds the whole piece."""
    for i, (start, stop) in enumerate(itertools.pairwise(starts)):
        if start <= piece.start and piece.stop <= stop:
            return i
    return None


def _replace(gm: fx.GraphModule, piece: Piece, part: fx.Node, start: int) -> None:
    new = part
    if (piece.start, piece.stop) != (start, start + value(part).shape[-1]):
        with inserting_before(gm, piece.node):
            args = (part, -1, piece.start - start, piece.stop - start)
            new = call(gm, aten.slice.Tensor, args)
    piece.node.replace_all_uses_with(new)


def _erase(gm: fx.GraphModule, last: fx.Node, node: fx.Node) -> None:
    """Erase what is now unused between ``node`` and its cuts, from the end."""
    doomed: list[fx.Node] = []
    stack = [node]
    while stack:
        one = stack.pop()
        for user in one.users:
            doomed.append(user)
            stack.append(user)
    assert last is node or last in doomed
    for one in sorted(set(doomed), reverse=True):
        gm.graph.erase_node(one)
