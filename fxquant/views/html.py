"""A plan or report as one HTML page that needs no network: memory curves, contributors, layers.

Names in a checkpoint are written by whoever made it. They reach the page only as JSON in a data
block, in which nothing can end the block, and the page's script makes text nodes of them; the
page's policy allows that one script and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fxquant.timeline import Moment

MAX_POINTS = 600
"""Points of a line that are drawn; more cannot be told apart on a screen."""

SCRIPTS = ("chart.js", "layers.js", "page.js")
"""Parts of the page's one script, in order; the last one runs it."""

COLUMNS = (
    "fqn", "aliases", "kind", "shape", "dtype", "form", "quantized", "float", "resident", "transient",
    "sqnr", "clipped", "reason", "uses", "files",
)  # fmt: skip
"""What the page knows of a weight; a row is an array in this order."""

Points = list[list[float]]
"""``[bytes read, bytes of memory]``, or with the seconds since the load began behind them."""


def page(plan: Any, report: Any = None) -> str:
    """The HTML of a ``Plan``, or of a ``Report`` and its plan. Pure ASCII."""
    style = _part("page.css")
    script = "\n".join(_part(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "CSP": policy,
        "STYLE": style,
        "SUMMARY": html.escape(plan.summary()).encode("ascii", "xmlcharrefreplace").decode("ascii"),
        "DATA": embed(page_data(plan, report)),
        "SCRIPT": script,
    }
    # In one go, so that a part that looks like a placeholder stays what it is.
    return re.sub(r"@([A-Z]+)@", lambda match: parts[match[1]], _part("page.html"))


def write_page(path: str | os.PathLike[str], plan: Any, report: Any = None) -> Path:
    """Write the page to ``path``, which appears, or is replaced, only when it is complete."""
    target = Path(path)
    text = page(plan, report)
    scratch = target.with_name(f".fxquant-{secrets.token_hex(8)}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8", newline="\n")
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    return target


def embed(data: object) -> str:
    """JSON that is safe inside of a ``<script>`` element, whatever its texts hold."""
    text = json.dumps(_plain(data), separators=(",", ":"), allow_nan=False)
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def page_data(plan: Any, report: Any = None) -> dict[str, Any]:
    """Everything that the page shows, as simple values. Sizes in bytes, times in seconds."""
    errors = {} if report is None else report.errors
    return {
        "scheme": plan.scheme,
        "target": plan.target,
        "backend": plan.backend,
        "checkpoint": plan.checkpoint,
        "capture": plan.capture,
        "config": plan.config,
        "hash": plan.hash,
        "float": plan.float_bytes,
        "resident": plan.resident_bytes,
        "peak": plan.predicted_peak,
        "kernels": plan.kernels,
        "rewrites": plan.rewrites,
        "loading": plan.loading,
        "notes": plan.notes,
        "unmatched": plan.unmatched,
        "extra": plan.extra,
        "charts": _charts(plan, report),
        "columns": COLUMNS,
        "weights": [_row(weight, errors.get(weight.fqn)) for weight in plan.weights],
        "report": None if report is None else _measured(report),
    }


def thin(points: Points, limit: int = MAX_POINTS) -> Points:
    """At most ``limit`` points of a line: the first, the last, and the low and high of each stretch."""
    if len(points) <= limit:
        return points
    inner, stretches = points[1:-1], limit // 2 - 1
    kept = [points[0]]
    for index in range(stretches):
        start, stop = (len(inner) * at // stretches for at in (index, index + 1))
        ranked = sorted(range(start, stop), key=lambda at: inner[at][1])
        kept += [inner[at] for at in sorted({ranked[0], ranked[-1]})]
    return [*kept, points[-1]]


def _row(weight: Any, error: Any) -> list[object]:
    files = dict.fromkeys(stored.file or "memory" for stored in weight.stored)
    return [
        weight.fqn,
        weight.aliases,
        weight.kind,
        weight.shape,
        weight.dtype,
        weight.form,
        weight.quantized,
        weight.float_bytes,
        weight.resident_bytes,
        weight.transient_bytes,
        None if error is None else error.sqnr_db,
        None if error is None else error.clipped,
        weight.reason,
        weight.uses,
        list(files),
    ]


def _measured(report: Any) -> dict[str, Any]:
    return {
        "peak": report.measured_peak,
        "anonymous": report.measured_anonymous,
        "seconds": report.load_seconds,
        "read": report.read_bytes,
        "graphs": report.graphs,
        "recompiles": report.recompiles,
        "rewritten": report.rewritten,
        "eager": report.eager_linears,
        "fallbacks": report.fallbacks,
        "sites": report.fallback_sites,
        "unnormalized": report.unnormalized,
    }


def _charts(plan: Any, report: Any) -> list[dict[str, Any]]:
    """One chart for each device that any peak or moment names; the process's memory is on cpu's."""
    measured: Sequence[Moment] = () if report is None else report.timeline
    anonymous: Points = [[m.read_bytes, m.anonymous] for m in measured if m.anonymous is not None]
    devices = set(plan.predicted_peak) | {name for m in (*plan.timeline, *measured) for name in m.memory}
    if report is not None:
        devices |= set(report.measured_peak)
    if anonymous:
        devices.add("cpu")
    charts: list[dict[str, Any]] = []
    for device in sorted(devices):
        predicted = _points(plan.timeline, device)
        resident = plan.resident_bytes if len(devices) == 1 else predicted[-1][1] if predicted else None
        charts.append(
            {
                "device": device,
                "resident": resident,
                "budgets": _budgets(plan, device),
                "predicted": thin(predicted),
                "measured": thin(_points(measured, device)),
                "anonymous": thin(_ordered(anonymous)) if device == "cpu" else [],
            }
        )
    return charts


def _budgets(plan: Any, device: str) -> dict[str, int]:
    """The budgets that bound the memory of ``device``; a plan for the CPU may have either."""
    names = ["host_budget"] if device == "cpu" else ["device_budget"]
    if device == "cpu" and plan.backend == "cpu":
        names.append("device_budget")
    found = {name: plan.loading.get(name) for name in names}
    return {name.replace("_", " "): size for name, size in found.items() if size is not None}


def _points(timeline: Iterable[Moment], device: str) -> Points:
    """The line of ``device``; empty if no moment names it, and 0 where only others do."""
    moments = list(timeline)
    if not any(device in moment.memory for moment in moments):
        return []
    return _ordered(
        [
            [m.read_bytes, m.memory.get(device, 0), *(() if m.seconds is None else (m.seconds,))]
            for m in moments
        ]
    )


def _ordered(points: Points) -> Points:
    return sorted(points, key=lambda point: point[0])


def _plain(value: object) -> object:
    """``value`` as JSON has it: what it cannot hold becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(part) for part in value]
    return str(value)


def _part(name: str) -> str:
    return resources.files("fxquant.views").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The source expression of a Content-Security-Policy that allows exactly ``text`` inline."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
