"""fxquant's own cases. fxquant is imported when one of them runs, never before."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loading.files import MIB
from benchmarks.loading.models import MODELS
from benchmarks.loading.process import memory

IGNORE = ("head",)
"""Heads stay float in every case; `lm_head` does by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A load that is ready to start.

    `info` was measured while preparing; `after` says more about what `load` returned; `codes_of`
    finds codes int8 `[N, K]` and scale float32 `[N]` in it by key.
    """

    load: Callable[[], Any]
    info: Mapping[str, float] = field(default_factory=dict)
    after: Callable[[Any], dict[str, float]] = lambda _: {}
    codes_of: Callable[[Any, str], tuple[Tensor, Tensor] | None] = lambda _made, _key: None


def arguments(way: str, folder: Path, extra: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The checkpoint and the keyword arguments of `fxquant.plan` and `fxquant.compile`."""
    options: dict[str, Any] = {"scheme": "none" if way == "none" else "int8", "ignore": IGNORE}
    if way == "saved":
        return Path(extra["saved"]), {}  # the file says how it was quantized
    if way == "cache":
        options["cache_dir"] = extra["cache"]
    elif way == "dummy":
        options["weights"] = "dummy"
    elif way == "int8@smallest":
        options["host_budget"] = extra["budget"]
    return folder, options


def prepare(way: str, name: str, folder: Path, extra: Mapping[str, Any]) -> Prepared:
    """Build the module, plan once with the arguments of the load, and measure both."""
    fxquant = import_module("fxquant")
    checkpoint, options = arguments(way, folder, extra)
    model = build(name)
    gc.collect()
    before = memory()["RssAnon"]
    started = time.perf_counter()
    plan = fxquant.plan(model, checkpoint, **options)
    seconds = time.perf_counter() - started
    info = {"plan_s": seconds, "predicted": plan.predicted_peak["cpu"] / MIB}
    del plan
    gc.collect()
    info["plan_anon"] = memory()["RssAnon"] - before
    if "host_budget" in options:
        info["budget"] = options["host_budget"] / MIB

    def load() -> nn.Module:
        compiled: nn.Module = fxquant.compile(model, checkpoint, **options)
        return compiled

    def after(compiled: nn.Module) -> dict[str, float]:
        report = fxquant.report(compiled)
        return {"load_s": report.load_seconds, "measured": report.measured_peak["cpu"] / MIB}

    return Prepared(load=load, info=info, after=after, codes_of=codes_of)


def build(name: str) -> nn.Module:
    """The module on meta, as the user builds it."""
    with import_module("fxquant").meta_init():
        model = MODELS[name].build()
    return model.eval()


def codes_of(model: nn.Module, key: str) -> tuple[Tensor, Tensor] | None:
    """The codes and scale of one weight, None if it stayed float."""
    weight: Any = model.get_parameter(key)
    codes = getattr(weight, "codes", None)
    return None if codes is None else (codes, weight.scale.view(-1))


def smallest_budget(name: str, folder: Path) -> int:
    """The smallest `host_budget` in bytes that fxquant says it can load with."""
    fxquant, errors = import_module("fxquant"), import_module("fxquant.errors")
    expected: Any = errors.BudgetError
    try:
        fxquant.plan(build(name), folder, scheme="int8", ignore=IGNORE, host_budget=1)
    except expected as error:
        smallest: int = error.smallest
        return smallest
    raise RuntimeError("fxquant.plan(host_budget=1) raised no BudgetError")


def save(name: str, folder: Path, target: Path) -> None:
    """Write a folder of constants."""
    fxquant = import_module("fxquant")
    model = fxquant.compile(build(name), folder, scheme="int8", ignore=IGNORE)
    fxquant.save_checkpoint(model, target, format="fxquant")


def fill_cache(name: str, folder: Path, target: Path) -> None:
    """The first start with a cache, which fills it."""
    target.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"scheme": "int8", "ignore": IGNORE, "cache_dir": str(target)}
    import_module("fxquant").compile(build(name), folder, **options)


def first_use() -> None:
    """Costs of the first op that are no part of loading: thread pools and libraries that start up."""
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
