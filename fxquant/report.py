"""What happened to a compiled model: its plan, peaks, graphs and fallbacks."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch._compile import _disable_dynamo

from fxquant.errors import ConfigError
from fxquant.materialize.errors import WeightError
from fxquant.materialize.execute import Loaded
from fxquant.plan import MIB, Plan
from fxquant.runtime.quantized_weight import QuantizedWeight
from fxquant.runtime.state import RunState
from fxquant.timeline import Moment
from fxquant.views.html import write_page

WORST = 5
"""Weights that the text names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of ``fxquant.report(model)``. Bytes are of live tensors, by device type.

    ``timeline`` is the memory while loading, and ``measured_anonymous`` the peak of the process's
    anonymous resident memory over what it was before (None where the system does not tell).
    ``origin`` says where the constants come from: the checkpoint, the cache, or made up.
    ``errors``: by FQN, how far each quantized weight is from its values, over a sample of rows that were
    compared while they were loaded; empty where nothing was quantized (stored or made-up constants).
    ``graphs``: compiled graphs by frame; ``recompiles``: those beyond the first of a frame;
    ``rewritten``: products, look-ups and convolutions with codes in them; ``eager_linears``: quantized
    calls outside of compiled graphs; ``fallbacks``: uses of quantized weights that computed with floats, by
    site in ``fallback_sites``; ``unnormalized``: graphs that run without rewriting, and why.
    """

    plan: Plan
    measured_peak: Mapping[str, int]
    measured_anonymous: int | None
    timeline: tuple[Moment, ...]
    load_seconds: float
    read_bytes: int
    origin: str
    errors: Mapping[str, WeightError]
    graphs: Mapping[str, int]
    recompiles: int
    rewritten: int
    eager_linears: int
    fallbacks: int
    fallback_sites: Mapping[str, int]
    unnormalized: tuple[str, ...]

    @property
    def quantized(self) -> int:
        """Number of weights held as codes."""
        return len(self.plan.quantized)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights after loading."""
        return self.plan.resident_bytes

    @property
    def float_bytes(self) -> int:
        """Bytes of all weights in the model's own dtypes."""
        return self.plan.float_bytes

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write plan and report as one page for a browser, which needs no network; returns its path."""
        return write_page(path, self.plan, self)

    def __str__(self) -> str:
        peaks = ", ".join(f"{size / MIB:.1f} MiB on {device}" for device, size in self.measured_peak.items())
        before, after = self.float_bytes / MIB, self.resident_bytes / MIB
        anonymous = ""
        if self.measured_anonymous is not None:
            anonymous = f"; the process grew by {self.measured_anonymous / MIB:.1f} MiB of anonymous memory"
        read, graphs = self.read_bytes / MIB, sum(self.graphs.values())
        lines = [
            f"{self.quantized} quantized weights, {before:.1f} -> {after:.1f} MiB",
            f"loaded {read:.1f} MiB in {self.load_seconds:.2f} s from {self.origin}",
            f"measured peak {peaks}{anonymous}",
            *describe_errors(self.errors),
            f"{graphs} graphs over {len(self.graphs)} frames, {self.rewritten} uses rewritten in them",
            f"{self.eager_linears} quantized calls outside of graphs, {self.fallbacks} fallbacks",
            *(f"  fallback: {site} x{count}" for site, count in self.fallback_sites.items()),
            *(f"  not rewritten: {reason}" for reason in self.unnormalized),
        ]
        return "\n".join(lines)


def describe_errors(errors: Mapping[str, WeightError]) -> Iterator[str]:
    """Lines on the weights with the largest errors; none where nothing is known."""
    if not errors:
        return
    ordered = sorted(errors.items(), key=lambda item: _order(item[1]))
    middle = ordered[len(ordered) // 2][1].sqnr_db
    yield f"errors of {len(errors)} weights, over sampled rows: median SQNR {middle:.1f} dB, worst"
    for fqn, error in ordered[:WORST]:
        rows = f"{error.sampled_rows} of {error.rows} rows"
        clipped = f", {error.clipped:.2%} clipped" if error.clipped else ""
        zeros = f", {error.zero_rows} rows of zeros" if error.zero_rows else ""
        about = "" if error.maximum_is_exact else " in them"
        yield f"  {error.sqnr_db:.1f} dB: {fqn} ({rows}; maximum {error.maximum:.3g}{about}{clipped}{zeros})"


def _order(error: WeightError) -> float:
    """Worst first; what is not finite is worse than all."""
    return -math.inf if math.isnan(error.sqnr_db) else error.sqnr_db


@_disable_dynamo
def report(model: nn.Module) -> Report:
    """What happened to ``model``, which ``fxquant.compile`` returned (or a copy of it)."""
    loaded: Loaded | None = model.__dict__.get("_fxquant_load")
    shell = model.__dict__.get("_fxquant_shell")
    if loaded is None or shell is None:
        raise ConfigError(f"{type(model).__name__} was not compiled by fxquant.compile")
    states = {id(state): state for state in (shell.state, *_weight_states(model))}.values()
    fallbacks = sum((state.fallbacks for state in states), Counter[str]())
    state: RunState = shell.state
    return Report(
        plan=model.__dict__["fxquant_plan"],
        measured_peak=loaded.peak,
        measured_anonymous=max(
            (m.anonymous for m in loaded.timeline if m.anonymous is not None), default=None
        ),
        timeline=loaded.timeline,
        load_seconds=loaded.seconds,
        read_bytes=loaded.read_bytes,
        origin=loaded.origin,
        errors=loaded.errors,
        graphs=dict(state.graphs),
        recompiles=state.recompiles,
        rewritten=state.rewritten,
        eager_linears=sum(state.eager_linears for state in states),
        fallbacks=sum(fallbacks.values()),
        fallback_sites=dict(fallbacks),
        unnormalized=tuple(state.unnormalized),
    )


def _weight_states(model: nn.Module) -> Iterator[RunState]:
    """The counters of the weights; those of an unpickled model are their own."""
    return (weight.state for weight in model.parameters() if isinstance(weight, QuantizedWeight))
