"""Finds what a graph does with a weight: the one analysis behind both planning and rewriting.

A weight's value is followed forward through views, casts and cuts to the ops that consume it. A
``LinearUse`` multiplies with the weight. An ``OtherUse`` does not, and says why: an embedding look-up and
a convolution take codes where an entry of the config asks, other uses never.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxquant.graph import is_call, is_tensor, target_name, value
from fxquant.ops import FLOATS
from fxquant.passes.aliasing import mutated_args

aten = torch.ops.aten

SAME = (
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.view.default,
    aten.reshape.default,
    aten.expand.default,
)
"""Ops that give the weight's values again, perhaps cast, when the shape stays."""

SWAPS = (aten.t.default, aten.numpy_T.default, aten.mT.default)
PARTS = (
    aten.chunk.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
)
MATMULS = (aten.matmul.default, aten.mm.default)
LOOKUPS = (aten.embedding.default,)
CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.convolution.default,
)
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
BAGS = (aten.embedding_bag.default, aten.embedding_bag.padding_idx)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A slice ``[start:stop:step]`` along an axis of the weight as it is stored."""

    axis: int
    start: int
    stop: int
    step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearUse:
    """``x @ w`` with the weight's ``k_axis`` contracted, after ``cuts``; see ``matmul_operands``."""

    node: fx.Node
    k_axis: int
    cuts: tuple[Cut, ...]
    n: int
    k: int
    via: fx.Node | None = None
    """The user of the weight itself through which it gets here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherUse:
    """A use that is no product, with the reason in words."""

    node: fx.Node
    reason: str
    lookup: bool = False
    conv: bool = False
    writes: bool = False
    via: fx.Node | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    node: fx.Node
    axes: tuple[int, ...]
    cuts: tuple[Cut, ...]
    via: fx.Node | None = None

    @property
    def whole(self) -> bool:
        """Whether it is the weight as it is stored, perhaps cast."""
        return not self.cuts and self.axes == tuple(range(len(self.axes)))


def weight_uses(source: fx.Node) -> list[LinearUse | OtherUse]:
    """Every use of the weight that ``source`` stands for, in graph order."""
    uses: list[LinearUse | OtherUse] = []
    stack = [_View(node=source, axes=tuple(range(value(source).dim())), cuts=())]
    while stack:
        view = stack.pop()
        for user in view.node.users:
            views = None if _writes(user, view.node) else _views_of(user, view)
            via = view.via or user
            if views is None:
                uses.append(replace(_terminal_use(user, view), via=via))
            else:
                stack.extend(replace(found, via=via) for found in views)
    order = {node: i for i, node in enumerate(source.graph.nodes)}
    return sorted(uses, key=lambda use: order[use.node])


def _views_of(user: fx.Node, view: _View) -> list[_View] | None:
    """The views that ``user`` gives of the weight, or None where it consumes it."""
    if user.op != "call_function" or user.args[:1] != (view.node,):
        return None
    if user.target in PARTS:
        return list(_parts_of(user, view))
    if not is_tensor(user) or value(user).dtype not in FLOATS:
        return None
    if user.target in (aten.slice.Tensor, aten.narrow.default):
        return _slice_of(user, view)
    axes = _axes_after(user, view)
    return None if axes is None else [_View(node=user, axes=axes, cuts=view.cuts)]


def _axes_after(user: fx.Node, view: _View) -> tuple[int, ...] | None:
    """The weight's axes in the order in which ``user`` gives them; None if it does something else."""
    axes, args = view.axes, _arguments(user)
    if user.target in SAME:
        return axes if value(user).shape == value(view.node).shape else None
    if user.target in SWAPS and len(axes) == 2:
        return axes[::-1]
    order = list(range(len(axes)))
    if user.target is aten.transpose.int:
        first, second = (int(d) % len(axes) for d in args[1:3])
        order[first], order[second] = second, first
    elif user.target is aten.permute.default:
        order = [int(d) % len(axes) for d in args[1]]
    else:
        return None
    return tuple(axes[d] for d in order)


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _slice_of(user: fx.Node, view: _View) -> list[_View] | None:
    args = [*_arguments(user)[1:], None, None, None, None]
    if not all(arg is None or isinstance(arg, int) for arg in args):
        return None
    dim, start, third, step = args[0] or 0, args[1] or 0, args[2], args[3] or 1
    size = int(value(view.node).shape[dim])
    if user.target is aten.narrow.default:
        start = start + size if start < 0 else start
        third, step = start + third, 1
    first, last, stride = slice(start, third, step).indices(size)
    cut = Cut(axis=view.axes[dim], start=first, stop=last, step=stride)
    return [_View(node=user, axes=view.axes, cuts=(*view.cuts, cut))]


def _parts_of(user: fx.Node, view: _View) -> Iterator[_View]:
    """Views of the parts that a split or chunk gives, through the ``getitem`` nodes that take them."""
    args = _arguments(user)
    given: Any = user.kwargs.get("dim", args[2] if len(args) > 2 else 0)
    dim = int(given)
    sizes = [int(part.shape[dim]) for part in value(user)]
    for taker in user.users:
        if not is_call(taker, operator.getitem):
            yield _View(node=user, axes=view.axes, cuts=view.cuts)
            return
        index = int(_arguments(taker)[1])
        start = sum(sizes[: index % len(sizes)])
        cut = Cut(axis=view.axes[dim], start=start, stop=start + sizes[index])
        yield _View(node=taker, axes=view.axes, cuts=(*view.cuts, cut))


def _terminal_use(user: fx.Node, view: _View) -> LinearUse | OtherUse:
    if _writes(user, view.node):
        return OtherUse(node=user, reason=f"written in place by {target_name(user)}", writes=True)
    if user.op == "output":
        return OtherUse(node=user, reason="returned by the model")
    if is_call(user, *LOOKUPS) and user.args[0] is view.node:
        part = "" if view.whole else " in a part or another order of the weight"
        return OtherUse(node=user, reason=f"embedding look-up{part}", lookup=view.whole)
    if is_call(user, *BAGS):
        reason = f"used by {target_name(user)}: sums of rows are not computed from codes"
        return OtherUse(node=user, reason=reason)
    if is_call(user, *CONVOLUTIONS, *TRANSPOSED):
        refusal = _convolution_refusal(user, view)
        return OtherUse(node=user, reason=refusal or "convolution", conv=not refusal)
    matched = _match_linear(user, view)
    return matched if isinstance(matched, LinearUse) else OtherUse(node=user, reason=matched)


def _convolution_refusal(user: fx.Node, view: _View) -> str:
    """Why a convolution cannot take its weight as codes; empty where it can."""
    name = target_name(user)
    x, weight, *others = _arguments(user)
    if weight is not view.node or view.node in (x, *others) or not view.whole:
        return f"used by {name} as something else than the weight, or in a part"
    if is_call(user, *TRANSPOSED) or (is_call(user, aten.convolution.default) and others[4]):
        return (
            f"used by {name}: the weight of a transposed convolution is [in, out, *kernel], "
            "so it has no rows for output channels"
        )
    if not is_tensor(x) or value(x).dtype not in FLOATS or len(view.axes) < 3:
        return f"used by {name} with an activation of {value(x).dtype}"
    return ""


def _match_linear(user: fx.Node, view: _View) -> LinearUse | str:
    """The linear use that ``user`` is, or why it is none."""
    name = target_name(user)
    operands = matmul_operands(user)
    if operands is None:
        return f"used by {name}, which cannot take codes"
    x, w, bias, k_first = operands
    if w is not view.node or x is view.node or bias is view.node:
        return f"used by {name} as something else than the weight"
    if len(view.axes) != 2:
        return f"used by {name} with rank {len(view.axes)}"
    if not is_tensor(x) or value(x).dtype not in FLOATS or value(user).dtype not in FLOATS:
        return f"used by {name} with an activation that is not {', '.join(str(d) for d in FLOATS)}"
    k_dim = 0 if k_first else 1
    n, k = value(w).shape[1 - k_dim], value(w).shape[k_dim]
    if bias is not None and tuple(value(bias).shape) != (n,):
        return f"used by {name} with an addend of shape {tuple(value(bias).shape)}, not [{n}]"
    return LinearUse(node=user, k_axis=view.axes[k_dim], cuts=view.cuts, n=int(n), k=int(k))


def matmul_operands(user: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """``(x, weight, bias, whether K is the weight's first axis)`` of a matmul-like call."""
    args = _arguments(user)
    if is_call(user, aten.linear.default):
        bias: Any = args[2] if len(args) > 2 else user.kwargs.get("bias")
        return args[0], args[1], bias, False
    if is_call(user, *MATMULS):
        return args[0], args[1], None, True
    if is_call(user, aten.addmm.default):
        plain = all(user.kwargs.get(name, 1) == 1 for name in ("beta", "alpha"))
        return (args[1], args[2], args[0], True) if plain else None
    return None


def _writes(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` mutates ``node``."""
    if not isinstance(user.target, torch._ops.OpOverload) or not user.target._schema.is_mutable:
        return False
    return any(arg is node for arg in mutated_args(user))
