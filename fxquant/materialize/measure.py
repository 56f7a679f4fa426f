"""Errors of weights before they are loaded: every row, tile by tile, and no constant is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.checkpoint import Checkpoint
from fxquant.materialize.errors import Errors
from fxquant.materialize.execute import Load, Loaded
from fxquant.materialize.jobs import Job, Schedule
from fxquant.materialize.meter import Account
from fxquant.materialize.recipes import LoadGraph, Recipe
from fxquant.materialize.row_rules import WHOLE
from fxquant.materialize.store import Store


class TileStore(Store):
    """Parts of constants that last for one tile; what all tiles of a weight need, until it is done."""

    def __init__(self, graph: LoadGraph) -> None:
        super().__init__(graph, Account(), torch.device("cpu"), {})
        self._shared: dict[str, dict[int, Tensor]] = {}

    def allocate(self, recipe: Recipe) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Nothing: a weight has no constants of its own."""
        return ()

    def beside_codes(self, recipe: Recipe) -> Sequence[Tensor] | None:  # noqa: ARG002
        """Nothing is there when all is done."""
        return None

    def parts(self, job: Job) -> dict[int, Any]:
        """New tensors for what a job writes, but for scales that span the tiles."""
        parts: dict[int, Any] = {}
        for index, place in job.tile.outs:
            if place is WHOLE and index:
                parts[index] = self._spanning(job.recipe, index)
                continue
            shape, dtype = self._shapes[job.recipe.template][index]
            size = list(shape)
            if place is not WHOLE:
                size[place.axis] = place.stop - place.start
            parts[index] = torch.empty(size, dtype=dtype)
            self.account.follow(parts[index])
        return parts

    def done(self, recipe: Recipe) -> None:
        """Forget what the tiles of a weight shared."""
        with self.lock:
            self._shared.pop(recipe.label, None)
        super().done(recipe)

    def clear(self) -> None:
        """Give everything back."""
        super().clear()
        self._shared.clear()

    def _result(self, recipe: Recipe, index: int) -> Tensor:
        return self._spanning(recipe, index)

    def _spanning(self, recipe: Recipe, index: int) -> Tensor:
        with self.lock:
            held = self._shared.setdefault(recipe.label, {})
            if index not in held:
                shape, dtype = self._shapes[recipe.template][index]
                held[index] = torch.empty(shape, dtype=dtype)
                self.account.follow(held[index])
            return held[index]


def measure_errors(graph: LoadGraph, schedule: Schedule, checkpoint: Checkpoint) -> Loaded:
    """``errors`` of the result are over all rows; its ``read_bytes`` and ``peak`` tell what they took.

    The forms of ``graph`` hold codes in one part and no float table.
    """
    errors = Errors(graph, schedule, torch.device("cpu"), every=True)
    load = Load(schedule, checkpoint, TileStore(graph), errors)
    with load.running():
        load.run_all(graph)
        return load.result()
