"""Keeps errors of quantized weights under a bound: above it a weight takes a wider scheme, or stays float."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fxquant.checkpoint import Checkpoint, KeyEntry
from fxquant.config import Choice
from fxquant.form import Form
from fxquant.loading import LoadOptions, add_recipe, is_in_memory
from fxquant.materialize.budget import SMALL_TILES
from fxquant.materialize.jobs import Settings
from fxquant.materialize.measure import measure_errors
from fxquant.materialize.recipes import LoadGraph
from fxquant.materialize.schedule import Scheduler
from fxquant.parameters import WeightGroup
from fxquant.passes.choose_form import Decision
from fxquant.scheme import wider

log = logging.getLogger("fxquant.plan")

UNMEASURED = "max_error not measured: its experts are not made one by one"

Decide = Callable[[Choice], Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A weight with the scheme that the config chose for it; ``decide`` gives the form for another choice."""

    group: WeightGroup
    entry: KeyEntry
    choice: Choice
    decision: Decision
    decide: Decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """The decisions once no error is above the bound, and what was read to find them."""

    decisions: Mapping[str, Decision]
    measured: Mapping[str, int | float]


def keep_max_error(
    bound: float, weights: Mapping[str, Asked], checkpoint: Checkpoint, options: LoadOptions
) -> Bounded:
    """Measure every quantized weight as it would be, and each wider scheme until the error is in the bound.

    The error is ``||w - dequantized|| / ||w||`` over all of a weight. Rounds go on with the weights that
    were above the bound, so that most are read once. Nothing is kept but a few tiles for each worker; with
    a ``host_budget`` by one worker in small tiles, which is less than any load takes.
    """
    decisions = {fqn: asked.decision for fqn, asked in weights.items()}
    tried: dict[str, list[str]] = {}
    left = {fqn: asked.choice for fqn, asked in weights.items() if _is_quantized(asked.decision)}
    total = {"max_error": bound, "measuring_bytes": 0, "measuring_reads": 0, "measuring_rounds": 0}
    while left:
        errors, nbytes, reads = _measure({f: (weights[f], decisions[f]) for f in left}, checkpoint, options)
        total["measuring_bytes"] += nbytes
        total["measuring_reads"] += reads
        total["measuring_rounds"] += 1
        for fqn in left.keys() - errors.keys():
            decisions[fqn] = replace(decisions[fqn], reason=f"{decisions[fqn].reason}, {UNMEASURED}")
        above = {fqn: choice for fqn, choice in left.items() if fqn in errors and not errors[fqn] <= bound}
        for fqn, choice in above.items():
            known = tried.setdefault(fqn, [])
            number = f"{errors[fqn]:.3g}"
            known.append(
                f"{number if known else f'error {number} over max_error {bound:g}'} as {choice.scheme.name}"
            )
            left[fqn], decisions[fqn] = _widened(weights[fqn], choice, tried[fqn])
            log.info("%s: %s", fqn, decisions[fqn].reason)
        left = {fqn: left[fqn] for fqn in above if _is_quantized(decisions[fqn])}
    return Bounded(decisions=decisions, measured=total)


def _is_quantized(decision: Decision) -> bool:
    return decision.form is not None and not decision.form.host


def _widened(asked: Asked, choice: Choice, tried: list[str]) -> tuple[Choice, Decision]:
    """The next wider scheme that the target takes, else float."""
    scheme = choice.scheme
    text = ", ".join([asked.choice.reason, *tried])
    refused = ""
    while (scheme := wider(scheme)).weight is not None:
        new = replace(asked.choice, scheme=scheme, reason=f"{text}{refused}: takes {scheme.name}")
        decision = asked.decide(new)
        if decision.form is not None:
            return new, decision
        refused += f", {scheme.name} refused ({decision.reason})"
    new = replace(asked.choice, scheme=scheme, reason=f"{text}{refused}: stays float")
    return new, Decision(form=None, reason=new.reason, asked=True)


def _measure(
    weights: Mapping[str, tuple[Asked, Decision]], checkpoint: Checkpoint, options: LoadOptions
) -> tuple[dict[str, float], int, int]:
    """The errors, and the bytes and number of reads that it took."""
    graph = LoadGraph()
    for asked, decision in weights.values():
        assert decision.form is not None
        add_recipe(graph, asked.group, asked.entry, checkpoint, _plain(decision.form))
    bounded = options.budgets.host is not None
    settings = Settings(
        workers=1 if bounded else options.workers,
        tile_bytes=min(options.read_bytes, *SMALL_TILES) if bounded else options.read_bytes,
        in_memory=is_in_memory(checkpoint),
    )
    schedule = Scheduler(graph, checkpoint.infos).make(settings)
    try:
        loaded = measure_errors(graph, schedule, checkpoint)
    finally:
        checkpoint.close()
    return {fqn: error.relative for fqn, error in loaded.errors.items()}, loaded.read_bytes, schedule.reads


def _plain(form: Form) -> Form:
    """A form whose codes have the same values, in one part, and nothing beside them."""
    return replace(form.in_one_part, table=False)
