"""Tracing runs the user's forward: what it writes into modules and into torch is undone here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

Undo = Callable[[], None]

_LEAVES = (Tensor, nn.Module, type, str, bytes, int, float)


@contextlib.contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Undo what a traced forward writes into the modules: masks, counters, buffers, caches in dicts.

    Otherwise fake tensors would stay behind in the user's model. Attributes are followed through
    dicts, lists, sets and plain objects.
    """
    undo = _remember([module.__dict__ for module in model.modules()])
    try:
        yield
    finally:
        for step in undo:
            step()


def _remember(start: Iterable[Any]) -> list[Undo]:
    """How to restore the containers and objects in ``start`` and all that they hold."""
    undo: list[Undo] = []
    seen: set[int] = set()
    stack = list(start)
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            undo.append(partial(_refill_dict, value, dict(value)))
            stack.extend(value.values())
        elif isinstance(value, list):
            undo.append(partial(_refill_list, value, list(value)))
            stack.extend(value)
        elif isinstance(value, set):
            undo.append(partial(_refill_set, value, set(value)))
        elif isinstance(value, tuple):
            stack.extend(value)
        elif _is_plain(value):
            stack.append(value.__dict__)
    return undo


def _refill_dict(value: dict[Any, Any], items: dict[Any, Any]) -> None:
    if value.keys() != items.keys() or any(value[key] is not items[key] for key in items):
        value.clear()
        value.update(items)


def _refill_list(value: list[Any], items: list[Any]) -> None:
    if len(value) != len(items) or any(one is not two for one, two in zip(value, items, strict=True)):
        value[:] = items


def _refill_set(value: set[Any], items: set[Any]) -> None:
    if value != items:
        value.clear()
        value.update(items)


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is an object of the user's code, or of a library, that keeps a ``__dict__``.

    Objects of the standard library and of torch are left alone: through a logger, say, they lead to
    state of the whole process.
    """
    package = type(value).__module__.partition(".")[0]
    if package == "torch" or package in sys.stdlib_module_names:
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


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
