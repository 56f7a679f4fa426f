"""Starts a process for each case, and collects what it tells."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.accuracy.records import MINILM, SMOLLM2, Record
from benchmarks.loading.models import ROOT
from benchmarks.loading.runner import environment

TIMEOUT = 1800
REASON = 240
"""Characters of an error that are kept."""

_VERSIONS = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions(python: str, packages: Iterable[str]) -> dict[str, str]:
    """The versions of `packages` that a Python has, and its own; empty if it does not start."""
    try:
        done = subprocess.run(  # noqa: S603 - the Python that the user named
            [python, "-c", _VERSIONS, *packages], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, str] = json.loads(done.stdout)
    return found


def run(case: str, texts: Path, python: str, threads: int, *, compiled: bool = True) -> list[Record]:
    """The records of one case, one for each model; those that are missing say why.

    With `compiled=False` Dynamo is switched off: fxquant then runs its quantized ops from eager code,
    with the same results, and little text takes seconds where compiling would take most of the time.
    """
    variables = environment(threads, os.environ)
    if not compiled:
        variables["TORCHDYNAMO_DISABLE"] = "1"
    try:
        done = subprocess.run(  # noqa: S603 - the Python that the user named, our own module
            [python, "-m", "benchmarks.accuracy.child", case, str(texts)],
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
    except OSError as error:
        return failed(case, f"{python} does not start: {error.strerror}")
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return _complete(case, output, f"it ran for more than {TIMEOUT} s")
    return _complete(case, done.stdout, f"the process ended with {done.returncode}: {_short(done.stderr)}")


def failed(case: str, reason: str) -> list[Record]:
    """Records that only say why there are no numbers."""
    return [Record(case=case, model=model, reason=reason) for model in (SMOLLM2, MINILM)]


def _complete(case: str, output: str, reason: str) -> list[Record]:
    told = [json.loads(line[1:]) for line in output.splitlines() if line.startswith("@")]
    found = {record.model: record for record in (_record(data) for data in told)}
    return [found.get(record.model, record) for record in failed(case, reason)]


def _record(data: dict[str, Any]) -> Record:
    texts: dict[str, Any] = {name: _clean(data[name]) for name in ("reason", "note") if name in data}
    return Record(**Record.known(data | texts))


def _clean(text: str) -> str:
    """One line of ASCII, not too long."""
    return " ".join(text.encode("ascii", "replace").decode().split())[:REASON]


def _short(text: str) -> str:
    return _clean(text[-REASON:])
