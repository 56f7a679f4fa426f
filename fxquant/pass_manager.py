"""Runs passes: cleans up, checks, counts, stamps, logs and dumps. A pass itself does none of that."""

from __future__ import annotations

import difflib
import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxquant.errors import ConfigError, GraphCheckError
from fxquant.graph import dump, is_call

log = logging.getLogger("fxquant.passes")

Pass = Callable[[fx.GraphModule], int]
"""``gm -> number of rewrites``; settings are bound before it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What one pass did."""

    name: str
    rewrites: int
    seconds: float


def pass_name(run: Pass) -> str:
    """The name by which a pass is logged and disabled; of a partial, its function's."""
    return getattr(getattr(run, "func", run), "__name__", repr(run))


def run_passes(
    gm: fx.GraphModule, passes: Sequence[Pass], *, disable: Collection[str] = ()
) -> tuple[PassResult, ...]:
    """Run ``passes`` in order on ``gm`` in place; those named in ``disable`` are left out."""
    import time

    unknown = set(disable) - {pass_name(run) for run in passes}
    if unknown:
        known = ", ".join(pass_name(run) for run in passes)
        raise ConfigError(f"cannot disable unknown passes {sorted(unknown)}; known: {known}")
    results = []
    for run in passes:
        name = pass_name(run)
        if name in disable:
            continue
        started = time.perf_counter()
        before = dump(gm) if log.isEnabledFor(logging.DEBUG) else ""
        old = set(gm.graph.nodes)
        rewrites = run(gm)
        for node in gm.graph.nodes:
            if node not in old:
                node.meta.setdefault("fxquant_pass", name)
        clean(gm)
        check(gm, after=name)
        seconds = time.perf_counter() - started
        log.info("%s: %d rewrites, %.3f s", name, rewrites, seconds)
        if before and rewrites:
            log.debug("%s", _diff(before, dump(gm), name))
        results.append(PassResult(name=name, rewrites=rewrites, seconds=seconds))
    return tuple(results)


def clean(gm: fx.GraphModule) -> None:
    """Drop dead nodes, check the graph's form, make its code."""
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()


def check(gm: fx.GraphModule, *, after: str) -> None:
    """The invariants that hold after every pass (docs/dialect.md)."""
    for node in gm.graph.nodes:
        if _needs_val(node) and "val" not in node.meta:
            raise GraphCheckError(f"after pass {after}: node {node.format_node()} has no meta['val']")


def _needs_val(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.returns)
    return node.op == "placeholder" or is_call(node, operator.getitem)


def trace(name: str, gm: fx.GraphModule, facts: Mapping[str, object]) -> None:
    """Put a graph and facts about it into ``TORCH_TRACE`` for tlparse."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"fxquant_{name}", "encoding": "string", **facts},
        payload_fn=lambda: dump(gm),
    )


def _diff(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"before {name}", f"after {name}", lineterm="", n=1
    )
    return "\n".join(lines)
