"""Lets models of transformers run their experts without a loop that breaks the graph.

In the implementation ``"eager"`` a loop over the experts that were hit depends on data: the model does not
export, and in ``torch.compile`` every expert is a graph break. The implementation ``"fxquant"``, which is
registered with transformers here, takes the place of the loop: rows in groups, one for each expert, as in
transformers' own ``"grouped_mm"``. Implementations that a user chose, and that trace, stay.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

NAME = "fxquant"
LOOPS = (None, "eager")
"""Implementations that loop over experts; None: a module that was built without a model."""


def register_experts() -> None:
    """Make the implementation known to transformers, if that is in use."""
    moe = sys.modules.get("transformers.integrations.moe")
    if moe is not None:
        moe.ALL_EXPERTS_FUNCTIONS.register(NAME, moe.grouped_mm_experts_forward)


def unroll_experts(model: nn.Module) -> tuple[tuple[Any, str | None], ...]:
    """Take the loops over experts out of ``model``; the configs that were changed, and what they had."""
    configs = {id(config): config for config in map(_looping, model.modules()) if config is not None}
    before = tuple((config, config._experts_implementation) for config in configs.values())
    if configs:
        register_experts()
    for config in configs.values():
        config._experts_implementation = {"": NAME}
    return before


@contextlib.contextmanager
def unrolled_experts(model: nn.Module) -> Iterator[bool]:
    """The same for a while; gives whether anything was changed."""
    changed = unroll_experts(model)
    try:
        yield bool(changed)
    finally:
        for config, before in changed:
            config._experts_implementation = {"": before}


def _looping(module: nn.Module) -> Any:
    """The config of a module whose forward transformers chooses by it, if that is a loop now."""
    config = module.__dict__.get("config")
    if not {"is_transposed", "has_gate"} <= module.__dict__.keys():
        return None
    return config if getattr(config, "_experts_implementation", "") in LOOPS else None
