"""Tells the linear of a router from what the graph does with its outputs, and in which way it routes.

A router chooses (its largest outputs decide which experts a row meets), or it mixes (its outputs weight the
outputs of all experts). An expert that is chosen or weighted otherwise is an error that no scale makes
small, and a router has few weights.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx

from fxquant.graph import is_call, is_tensor
from fxquant.passes.mixing import mixes
from fxquant.passes.weight_uses import SAME

aten = torch.ops.aten


def _overloads(names: str) -> frozenset[Callable[..., object]]:
    """All overloads of the ATen ops with these names."""
    packets = [getattr(aten, name) for name in names.split()]
    return frozenset(getattr(packet, name) for packet in packets for name in packet.overloads())


ELEMENTWISE = frozenset(SAME) | _overloads(
    """
    sigmoid softmax log_softmax _softmax softplus sqrt tanh exp relu neg add sub mul div masked_fill
    squeeze unsqueeze flatten slice select where clamp t transpose permute sum amax cumsum
    """
)
"""Ops between the outputs of a router and a choice: of their results each still tells of the outputs."""

INDICES = _overloads("argmax argsort")
VALUES_AND_INDICES = _overloads("topk sort max kthvalue")
COMPARISONS = _overloads("eq ge gt le lt")


def how_it_routes(linear: fx.Node) -> str:
    """How the outputs of ``linear`` route, in words for the plan; empty where they do not."""
    return _chooses(linear) or mixes(linear)


def is_returned(linear: fx.Node) -> bool:
    """Whether the graph gives the outputs of ``linear``, or what is made of each, to who called it."""
    seen = {linear}
    stack = [linear]
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                return True
            if is_call(user, *ELEMENTWISE) and user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def _chooses(linear: fx.Node) -> str:
    """Whether indices of the largest outputs are used, or outputs are compared with some of themselves."""
    seen = {linear}
    stack = [linear]
    while stack:
        node = stack.pop()
        for user in node.users:
            if is_call(user, *INDICES):
                return _choice(user)
            if is_call(user, *COMPARISONS):
                if all(arg in seen for arg in user.args[:2]):
                    return _choice(user)
                continue
            if is_call(user, *VALUES_AND_INDICES) and not is_tensor(user):
                if _indices_used(user):
                    return _choice(user)
                found = list(_taken(user, 0))
            else:
                found = [user] if is_call(user, *ELEMENTWISE) else []
            stack.extend(node for node in found if node not in seen)
            seen.update(found)
    return ""


def _choice(node: fx.Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    return f"{node.target.overloadpacket.__name__} chooses by its outputs"


def _taken(node: fx.Node, index: int) -> Iterator[fx.Node]:
    return (user for user in node.users if is_call(user, operator.getitem) and user.args[1] == index)


def _indices_used(node: fx.Node) -> bool:
    return any(taker.users for taker in _taken(node, 1))
