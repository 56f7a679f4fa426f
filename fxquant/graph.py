"""Small FX helpers: values of nodes, insertion with true ``meta["val"]``, a stable text dump."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

Val = Any
"""What ``meta["val"]`` holds: a fake tensor, a symbolic or plain number, or a tuple of them."""


def value(node: fx.Node) -> Val:
    """The node's ``meta["val"]``; it is an invariant that every node has one."""
    return node.meta["val"]


def is_tensor(node: object) -> bool:
    """Whether ``node`` is a node whose value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """The graph's inputs in order."""
    return gm.graph.find_nodes(op="placeholder")


def is_call(node: fx.Node, *targets: Callable[..., Any]) -> bool:
    """Whether ``node`` calls one of ``targets``."""
    return node.op == "call_function" and node.target in targets


def fake_mode_of(gm: fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """The fake mode that the graph's values were made under."""
    for node in gm.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode  # type: ignore[no-any-return]
    return contextlib.nullcontext()


def _values(args: Argument) -> Any:
    return fx.node.map_arg(args, lambda node: node.meta["val"])


def call(
    gm: fx.GraphModule,
    target: Callable[..., Any],
    args: tuple[Argument, ...],
    kwargs: dict[str, Argument] | None = None,
) -> fx.Node:
    """Insert ``target(*args, **kwargs)`` at the graph's insertion point, with its true value."""
    node = gm.graph.call_function(target, args, kwargs or {})
    with fake_mode_of(gm), torch.no_grad():
        node.meta["val"] = target(*_values(node.args), **_values(node.kwargs))
    return node


def items(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """``getitem`` nodes for each part of a node that gives a tuple."""
    import operator

    return [call(gm, operator.getitem, (node, i)) for i in range(len(value(node)))]


@contextlib.contextmanager
def inserting_before(gm: fx.GraphModule, node: fx.Node) -> Iterator[None]:
    """Insert before ``node`` and give the new nodes its stack trace and module stack."""
    kept = ("stack_trace", "nn_module_stack", "source_fn_stack")
    first = node.prev
    with gm.graph.inserting_before(node):
        yield
    new = first.next
    while new is not node:
        for key in kept:
            if key in node.meta:
                new.meta.setdefault(key, node.meta[key])
        new = new.next


def count_calls(gm: fx.GraphModule) -> dict[str, int]:
    """How often each op is called, by its name, sorted."""
    counts: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            name = target_name(node)
            counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def target_name(node: fx.Node) -> str:
    """A short stable name of what a node calls: ``aten.linear``, ``fxquant.scaled_mm``."""
    name = (
        str(node.target) if not callable(node.target) else getattr(node.target, "__name__", str(node.target))
    )
    if isinstance(node.target, torch._ops.OpOverload):
        name = str(node.target).removesuffix(".default")
    return name


def _short(val: Val) -> str:
    if isinstance(val, torch.Tensor):
        dims = ", ".join(str(size) for size in val.shape)
        return f"{str(val.dtype).removeprefix('torch.')}[{dims}]"
    if isinstance(val, (tuple, list)):
        return "(" + ", ".join(_short(part) for part in val) + ")"
    return type(val).__name__


def dump(gm: fx.GraphModule) -> str:
    """The graph as text that does not depend on node names or on the torch release's printer.

    One line for each node: ``%3 = fxquant.scaled_mm(%1, codes, ...) : float32[2, 8]``.
    """
    names: dict[fx.Node, str] = {}
    symbols: dict[str, str] = {}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            names[node] = str(node.target)
            lines.append(f"{node.target} : {_rename(_short(node.meta.get('val')), symbols)}")
        elif node.op == "output":
            lines.append(f"return {_argument(node.args[0], names)}")
        else:
            names[node] = f"%{len(lines)}"
            parts = [_argument(arg, names) for arg in node.args]
            parts += [f"{key}={_argument(arg, names)}" for key, arg in node.kwargs.items()]
            name = node.target if node.op == "get_attr" else target_name(node)
            text = _rename(_short(node.meta.get("val")), symbols)
            lines.append(f"{names[node]} = {name}({', '.join(parts)}) : {text}")
    return "\n".join(lines)


def _argument(arg: Argument, names: dict[fx.Node, str]) -> str:
    if isinstance(arg, fx.Node):
        return names[arg]
    if isinstance(arg, (tuple, list)):
        return "[" + ", ".join(_argument(part, names) for part in arg) + "]"
    return str(arg).removeprefix("torch.")


def _rename(text: str, symbols: dict[str, str]) -> str:
    import re

    def name(match: re.Match[str]) -> str:
        return symbols.setdefault(match[0], f"s{len(symbols)}")

    return re.sub(r"\b[su]\d+\b", name, text)
