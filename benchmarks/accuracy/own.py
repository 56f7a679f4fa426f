"""fxquant's own schemes. fxquant is imported when one of them runs, never before."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from benchmarks.accuracy.models import Subject

REFINED = ("int4_g64(refine=clip)", "int4_g64_asym(refine=clip)", "int4_g64_asym(refine=hqq)")
"""The forms with refined scales that are measured."""


def names() -> tuple[str, ...]:
    """Every scheme, those with refined scales behind the one they refine."""
    table = import_module("fxquant.scheme").SCHEMES
    return tuple(
        form for name in table for form in (name, *(r for r in REFINED if r.partition("(")[0] == name))
    )


def is_static(scheme: str) -> bool:
    """Whether a scheme has to be given the scales of activations."""
    act = import_module("fxquant.scheme").find_scheme(scheme).act
    return act is not None and bool(act.static)


def options(scheme: str, scales: Mapping[str, float] | None) -> dict[str, Any]:
    """The keyword arguments of `fxquant.compile`; `scales` of activations by FQN where they are needed."""
    if scales is None:
        return {"scheme": scheme}
    entries = {fqn: {"scheme": scheme, "act_scale": scale} for fqn, scale in scales.items()}
    return {"scheme": "none", "config": entries}


def build(scheme: str, subject: Subject, scales: Mapping[str, float] | None) -> nn.Module:
    """The model, quantized while it loads."""
    fxquant = import_module("fxquant")
    with fxquant.meta_init():
        model = subject.empty()
    compiled: nn.Module = fxquant.compile(model, subject.where(), backend="cpu", **options(scheme, scales))
    return compiled
