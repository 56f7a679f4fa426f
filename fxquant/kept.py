"""Tracing runs the user's forward: what it writes into modules and into torch is undone here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

Undo = Callable[[], None]


@contextlib.contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Undo what a traced forward writes into the modules: masks, counters, buffers, caches in dicts.

    Otherwise fake tensors would stay behind in the user's model. Attributes are followed through
    dicts, lists, sets and plain objects.
    """
    undo: list[Undo] = []
    seen: set[int] = set()
    for module in model.modules():
        _remember(module.__dict__, undo, seen)
    try:
        yield
    finally:
        for step in reversed(undo):
            step()


def _remember(value: Any, undo: list[Undo], seen: set[int]) -> None:
    """Note how to restore ``value`` and what it holds."""
    if id(value) in seen or isinstance(value, (Tensor, nn.Module, type, str, bytes, int, float)):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items = dict(value)
        undo.append(lambda: _refill(value, items))
        held = list(items.values())
    elif isinstance(value, list):
        held = list(value)
        undo.append(lambda: value.__setitem__(slice(None), held))
    elif isinstance(value, set):
        held = list(value)
        undo.append(lambda: value.intersection_update(held))
        undo.append(lambda: value.update(held))
    elif isinstance(value, tuple):
        held = list(value)
    else:
        held = [value.__dict__] if _is_plain(value) else []
    for part in held:
        _remember(part, undo, seen)


def _refill(value: dict[Any, Any], items: dict[Any, Any]) -> None:
    if value.keys() != items.keys() or any(value[key] is not items[key] for key in items):
        value.clear()
        value.update(items)


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is an object of the user's code that keeps its state in ``__dict__``."""
    library = type(value).__module__.partition(".")[0] in ("builtins", "torch", "typing", "functools", "enum")
    return not library and isinstance(getattr(value, "__dict__", None), dict)


@contextlib.contextmanager
def kept_registration_hooks() -> Iterator[None]:
    """Restore torch's global registration hooks: an export that fails can leave its own behind."""
    from torch.nn.modules import module as state

    names = ("buffer", "module", "parameter")
    hooks = [getattr(state, f"_global_{name}_registration_hooks") for name in names]
    saved = [dict(held) for held in hooks]
    try:
        yield
    finally:
        for held, before in zip(hooks, saved, strict=True):
            held.clear()
            held.update(before)
