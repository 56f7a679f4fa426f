"""Finds what a graph does with a weight: the one analysis behind both planning and rewriting.

A weight's value is followed forward through views, casts and cuts to the ops that consume it. A
``LinearUse`` multiplies with the weight. A weight of rank 3 may hold experts along its first axis: one of
them is picked for a linear use, or an ``ExpertUse`` multiplies with several. An ``OtherUse`` is no product,
and says why: an embedding look-up and a convolution take codes where an entry of the config asks, other
uses never.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxquant.graph import is_call, is_tensor, target_name, value
from fxquant.ops import FLOATS
from fxquant.passes.aliasing import mutated_args
from fxquant.passes.uses import Cut, ExpertUse, LinearUse, OtherUse, Pick, WeightUse

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
BATCHED = (aten.bmm.default, aten.matmul.default)
GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
"""``(x [S, K], w [E, K, N], offsets [E])``, by name, since transformers may not be imported."""

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
class _View:
    """``node`` gives ``axes`` of the weight; those of one matrix are 0 and 1, that of the experts is -1."""

    node: fx.Node
    axes: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    expert: Pick | None = None
    via: fx.Node | None = None

    @property
    def whole(self) -> bool:
        """Whether it is the weight as it is stored, perhaps cast."""
        orders = (tuple(range(len(self.axes))), (EXPERTS, 0, 1))
        return not self.cuts and self.expert is None and self.axes in orders


EXPERTS = -1
"""The axis of the experts."""


def weight_uses(source: fx.Node) -> list[WeightUse]:
    """Every use of the weight that ``source`` stands for, in graph order; of rank 3 it may hold experts."""
    uses: list[WeightUse] = []
    rank = value(source).dim()
    stack = [_View(node=source, axes=(EXPERTS, 0, 1) if rank == 3 else tuple(range(rank)))]
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
    target: Any = user.target
    found = VIEWS.get(target)
    if found is None and (not is_tensor(user) or value(user).dtype not in FLOATS):
        return None
    if found is not None:
        return found(user, view)
    axes = _axes_after(user, view)
    return None if axes is None else [replace(view, node=user, axes=axes)]


def _picked(user: fx.Node, view: _View) -> list[_View] | None:
    """One expert, or one for each of several indices, whose axis takes the place of the experts'."""
    args = _arguments(user)
    if view.axes[0] != EXPERTS or view.expert is not None:
        return None
    if user.target is aten.select.int:
        if int(args[1]) % len(view.axes) != 0:
            return None
        index = args[2]
        if isinstance(index, int):
            index %= int(value(view.node).shape[0])
        return [replace(view, node=user, axes=view.axes[1:], expert=index)]
    (ids, *others) = args[1]
    known = is_tensor(ids) and value(ids).dtype in (torch.int32, torch.int64) and value(ids).dim() < 2
    if not known or any(other is not None for other in others):
        return None
    axes = view.axes if value(ids).dim() else view.axes[1:]
    return [replace(view, node=user, axes=axes, expert=ids)]


def _axes_after(user: fx.Node, view: _View) -> tuple[int, ...] | None:
    """The weight's axes in the order in which ``user`` gives them; None if it does something else."""
    axes, args = view.axes, _arguments(user)
    if user.target in SAME:
        return axes if value(user).shape == value(view.node).shape else None
    if user.target in SWAPS and (len(axes) == 2 or user.target is aten.mT.default):
        return (*axes[:-2], axes[-1], axes[-2])
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
    if view.axes[dim] == EXPERTS:
        return [replace(view, node=user)] if (first, last, stride) == (0, size, 1) else None
    cut = Cut(axis=view.axes[dim], start=first, stop=last, step=stride)
    return [replace(view, node=user, cuts=(*view.cuts, cut))]


def _unbound(user: fx.Node, view: _View) -> list[_View] | None:
    """The experts, one by one."""
    axis = int(_arguments(user)[1]) if len(_arguments(user)) > 1 else 0
    takers = list(user.users)
    if axis % len(view.axes) or view.axes[0] != EXPERTS or view.expert is not None:
        return None
    if not all(is_call(taker, operator.getitem) for taker in takers):
        return None
    count = len(value(user))
    return [
        replace(view, node=taker, axes=view.axes[1:], expert=int(_arguments(taker)[1]) % count)
        for taker in takers
    ]


def _parts_of(user: fx.Node, view: _View) -> list[_View] | None:
    """Views of the parts that a split or chunk gives, through the ``getitem`` nodes that take them."""
    args = _arguments(user)
    given: Any = user.kwargs.get("dim", args[2] if len(args) > 2 else 0)
    dim = int(given)
    sizes = [int(part.shape[dim]) for part in value(user)]
    if view.axes[dim] == EXPERTS:
        return None
    views = []
    for taker in user.users:
        if not is_call(taker, operator.getitem):
            return [replace(view, node=user)]
        index = int(_arguments(taker)[1])
        start = sum(sizes[: index % len(sizes)])
        cut = Cut(axis=view.axes[dim], start=start, stop=start + sizes[index])
        views.append(replace(view, node=taker, cuts=(*view.cuts, cut)))
    return views


VIEWS: dict[Any, Callable[[fx.Node, _View], list[_View] | None]] = {
    **dict.fromkeys(PARTS, _parts_of),
    **dict.fromkeys((aten.slice.Tensor, aten.narrow.default), _slice_of),
    **dict.fromkeys((aten.select.int, aten.index.Tensor), _picked),
    aten.unbind.int: _unbound,
}
"""Ops that give a part of the weight; those that give all of it are ``SAME``, ``SWAPS`` and permutations."""


def _terminal_use(user: fx.Node, view: _View) -> WeightUse:
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
    matched = _match_experts(user, view) if len(view.axes) == 3 else _match_linear(user, view)
    return OtherUse(node=user, reason=matched) if isinstance(matched, str) else matched


def _match_experts(user: fx.Node, view: _View) -> ExpertUse | str:
    """The product with several experts that ``user`` is, or why it is none."""
    name = target_name(user)
    args = _arguments(user)
    schema = user.target._schema.name if isinstance(user.target, torch._ops.OpOverload) else ""
    if schema not in GROUPED and not is_call(user, *BATCHED):
        return f"used by {name}, which cannot take codes"
    swapped = args[0] is view.node
    x: fx.Node = args[1] if swapped else args[0]
    others = {value(part).dtype if is_tensor(part) else None for part in (x, user)}
    if x is view.node or view.axes[0] != EXPERTS or others != {value(view.node).dtype}:
        return f"used by {name} as something else than experts"
    k_dim = 2 if swapped else 1
    _, *sizes = value(view.node).shape
    n, k = int(sizes[2 - k_dim]), int(sizes[k_dim - 1])
    axis = view.axes[k_dim]
    found = ExpertUse(node=user, k_axis=axis, cuts=view.cuts, n=n, k=k, x=x, swapped=swapped)
    return _with_offsets(found, view, args) if schema in GROUPED else _in_batches(found, view)


def _in_batches(found: ExpertUse, view: _View) -> ExpertUse | str:
    """The use as a product of batches, each with one expert."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes a third of a second

    name, shape = target_name(found.node), value(found.x).shape
    if len(shape) != 3 or not statically_known_true(shape[0] == value(view.node).shape[0]):
        return f"used by {name} with an activation that is not a batch for each expert"
    if view.expert is None:
        return f"used by {name} on its left side" if found.swapped else found
    if not statically_known_true(shape[2 if found.swapped else 1] == 1):
        return f"used by {name} with several rows for each index"
    assert isinstance(view.expert, fx.Node)
    return replace(found, ids=view.expert)


def _with_offsets(found: ExpertUse, view: _View, args: tuple[Any, ...]) -> ExpertUse | str:
    """The use as a grouped product, if it is the form with rows of ``x`` in groups."""
    name = target_name(found.node)
    offsets: Any = args[2] if len(args) > 2 else found.node.kwargs.get("offs")
    extra = [*args[3:], *(given for key, given in found.node.kwargs.items() if key != "offs")]
    if view.expert is not None or found.swapped or value(found.x).dim() != 2 or not is_tensor(offsets):
        return f"used by {name} in another way than rows in groups"
    if any(given is not None for given in extra):
        return f"used by {name} with further arguments"
    return replace(found, offsets=offsets)


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
    return LinearUse(
        node=user, k_axis=view.axes[k_dim], cuts=view.cuts, n=int(n), k=int(k), expert=view.expert
    )


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
