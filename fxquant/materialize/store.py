"""The constants while they are made: allocated at the first tile that writes to them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxquant.fractal_nz import padded_bytes, to_nz, write_over
from fxquant.held import derive, hold
from fxquant.materialize.jobs import Job
from fxquant.materialize.meter import Account
from fxquant.materialize.program import ABSMAX, Maxima
from fxquant.materialize.recipes import LoadGraph, Recipe, result_vals
from fxquant.materialize.row_rules import WHOLE
from fxquant.materialize.scattered import Scattered
from fxquant.numerics.experts import expert_of

Constants = dict[str, tuple[Tensor, ...]]
"""FQN -> the constants of its weight, in the order of the recipe."""


class Store:
    """Constants of a load, and what several tiles of one weight share. Safe to use from several threads.

    ``into`` gives constants that exist already and are written over.
    """

    def __init__(
        self, graph: LoadGraph, account: Account, device: torch.device, into: Mapping[str, Sequence[Tensor]]
    ) -> None:
        self.graph = graph
        self.account = account
        self.device = device
        self.into = into
        self.constants: Constants = {}
        self.lock = threading.RLock()
        self._maxima: dict[str, Maxima] = {}
        self._held: dict[str, dict[int, Tensor]] = {}
        self._experts: dict[str, int] = {}
        self._shapes = [tuple((val.shape, val.dtype) for val in result_vals(gm)) for gm in graph.templates]

    def allocate(self, recipe: Recipe) -> tuple[Tensor, ...]:
        """The constants of a weight, made now if this is the first time."""
        found = self.constants.get(recipe.fqn)
        if found is not None:
            return found
        with self.lock:
            if recipe.fqn not in self.constants:
                self.constants[recipe.fqn] = self._new(recipe)
            return self.constants[recipe.fqn]

    def device_of(self, recipe: Recipe) -> torch.device:
        """Where a weight's constants are."""
        return torch.device("cpu") if recipe.host else self.device

    def _new(self, recipe: Recipe) -> tuple[Tensor, ...]:
        shapes = recipe.shapes(self._shapes[recipe.template])
        shapes = (*shapes, *([(torch.Size((1,)), torch.float32)] * len(recipe.given)))
        given = self.into.get(recipe.fqn)
        if given is not None:
            found = [part.shape for part in given[: len(shapes)]]
            assert found == [s for s, _ in shapes], f"{recipe.fqn}: {found} cannot take {shapes}"
        device = self.device_of(recipe)
        constants = []
        for i, (shape, dtype) in enumerate(shapes):
            if given is not None and i >= self.casts(recipe) and given[i].dtype == dtype:
                constants.append(given[i])
            else:
                constants.append(torch.empty(shape, dtype=dtype, device=device))
                self.account.add(device.type, constants[-1].nbytes)
        for value, part in zip(reversed(recipe.given), reversed(constants), strict=False):
            if value is not None:
                part.fill_(value)
        return tuple(constants)

    def casts(self, recipe: Recipe) -> int:
        """How many of the constants are cast to FRACTAL_NZ once they are whole."""
        return recipe.nz if self.device.type == "npu" else 0

    def _cast(self, recipe: Recipe) -> None:
        """Cast one part after the other, so that only one of them lies there twice."""
        given = self.into.get(recipe.fqn)
        for i in range(self.casts(recipe)):
            parts = list(self.constants[recipe.fqn])
            size = parts[i].nbytes
            padded = padded_bytes(parts[i].shape, parts[i].itemsize)
            self.account.add("npu", padded)
            if given is None:
                parts[i] = to_nz(parts[i])
            else:
                write_over(given[i], parts[i])
                parts[i] = given[i]
                self.account.add("npu", -padded)
            self.constants[recipe.fqn] = tuple(parts)
            self.account.add("npu", -size)

    def _hold(self, recipe: Recipe) -> None:
        """Make what the target's ops take of constants that are whole, one after the other."""
        form = recipe.held
        if form is None:
            return
        into = self.into.get(recipe.fqn)
        parts = dict(zip(recipe.constants, self.constants[recipe.fqn], strict=False))
        for i, name in enumerate(recipe.constants):
            old = parts.get(name)
            new = derive(form, name, parts) if old is None else hold(form, name, old)
            if new is old:
                continue
            self.account.add(self.device.type, new.nbytes)
            if into is not None:
                self.account.add(self.device.type, -new.nbytes)
                new = into[i].copy_(new)
            parts[name] = new
            self.account.add(self.device.type, 0 if old is None else -old.nbytes)
            self.constants[recipe.fqn] = tuple(parts.values())

    def _results(self, recipe: Recipe) -> Sequence[Any]:
        """The constants as the template's results: codes that lie in parts are one matrix again."""
        constants = self.allocate(recipe)  # of a weight that is not whole
        form = recipe.laid_out
        if recipe.expert is not None:
            return expert_of(constants, recipe.expert)
        if form is None:
            return constants
        n, columns = self._shapes[recipe.template][0][0]
        count = len(form.codes)
        return (Scattered.of(form, constants[:count], n, form.features(columns)), *constants[count:])

    def _result(self, recipe: Recipe, index: int) -> Any:
        return self._results(recipe)[index]

    def beside_codes(self, recipe: Recipe) -> Sequence[Tensor] | None:
        """What stands behind the codes of a weight that is there: scales and all the rest."""
        return self._results(recipe)[1:] if recipe.fqn in self.constants else None

    def parts(self, job: Job) -> dict[int, Any]:
        """The parts of the constants that a job writes to, by the position of the template's result."""
        results = self._results(job.recipe)
        parts = {}
        for index, place in job.tile.outs:
            whole = results[index]
            if place is WHOLE:
                parts[index] = whole
            else:
                parts[index] = whole.narrow(place.axis, place.start, place.stop - place.start)
        return parts

    def place(self, job: Job, values: Tensor) -> None:
        """Copy the bytes of a direct tile to where they belong."""
        assert job.tile.direct is not None
        index, _ = job.tile.outs[0]
        flat = self.allocate(job.recipe)[index].view(-1).view(torch.uint8)
        flat[job.tile.direct : job.tile.direct + values.numel()].copy_(values)

    def maxima(self, job: Job) -> Maxima | None:
        """The maxima that the tiles of a weight share, if its scales span several tiles."""
        ends = [end for end in job.tile.program.ends if end.spec is not None]
        if not ends or (ends[0].kind != ABSMAX and not job.tile.phase):
            return None
        label = job.recipe.label
        with self.lock:
            if label not in self._maxima:
                spec = ends[0].spec
                assert spec is not None
                scale = self._result(job.recipe, ends[0].outs[spec.names.index(spec.scanned)])
                self._maxima[label] = Maxima(scale, threading.Lock())
            return self._maxima[label]

    def held(self, recipe: Recipe) -> dict[int, Tensor]:
        """Reads that several tiles of a weight need, by position; the caller fills it under the lock."""
        return self._held.setdefault(recipe.label, {})

    def done(self, recipe: Recipe) -> None:
        """A weight, or one expert, is made: forget what its tiles shared, give a whole weight its layout."""
        with self.lock:
            self._experts[recipe.fqn] = self._experts.get(recipe.fqn, 0) + 1
            if self.is_whole(recipe):
                self._hold(recipe)
                self._cast(recipe)
            self._maxima.pop(recipe.label, None)
            held = self._held.pop(recipe.label, {})
            self.account.add("cpu", -sum(tensor.nbytes for tensor in held.values()))

    def is_whole(self, recipe: Recipe) -> bool:
        """Whether the weight of a recipe, all of its experts, has its final layout."""
        return self._experts.get(recipe.fqn, 0) >= max(recipe.experts, 1)

    def clear(self) -> None:
        """Give everything back."""
        with self.lock:
            self.constants.clear()
            self._maxima.clear()
            self._held.clear()
            self._experts.clear()
