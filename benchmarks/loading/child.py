"""One run in its own process: prepare, wait, load, wait, tell. The parent watches from outside.

    python -m benchmarks.loading.child run|smallest|save|cache SPEC

`SPEC` is a `Spec` as JSON. Lines of the protocol start with `@`; whatever else libraries print is
left alone. Needs torch and safetensors, and what the case itself imports.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.loading import subject
from benchmarks.loading.cases import CASES, Spec
from benchmarks.loading.process import memory
from benchmarks.loading.verify import check_codes


def tell(event: str, **data: Any) -> None:
    """One line for the parent."""
    print(f"@{json.dumps({'event': event, **data})}", flush=True)


def pause(event: str) -> None:
    """Tell the parent where we are, and go on when it says so."""
    tell(event)
    sys.stdin.readline()


def measure(spec: Spec) -> dict[str, Any]:
    """Run the case and return the numbers of the process that ran it."""
    started = time.perf_counter()
    prepared = CASES[spec.case].prepare(spec)
    subject.first_use()
    gc.collect()
    base = memory()
    result: dict[str, Any] = {"prepare_s": time.perf_counter() - started, **prepared.info}
    pause("ready")
    cpu, started = time.process_time(), time.perf_counter()
    loaded = prepared.load()
    result["wall_s"] = time.perf_counter() - started
    result["cpu_s"] = time.process_time() - cpu
    pause("loaded")
    gc.collect()
    settled = memory()
    result |= {"base_anon": base["RssAnon"], "base_file": base["RssFile"]}
    result["settled_anon"] = settled["RssAnon"] - base["RssAnon"]
    result["load_s"] = result["wall_s"]
    result |= prepared.after(loaded)
    if spec.verify:
        codes_of = partial(prepared.codes_of, loaded)
        result |= check_codes(Path(spec.folder), codes_of, spec.verify)
    return result


def stage(spec: Spec, what: str) -> dict[str, Any]:
    """What a later run needs: a budget, a saved folder, a filled cache."""
    folder = Path(spec.folder)
    if what == "smallest":
        return {"budget": subject.smallest_budget(spec.model, folder)}
    target = Path(spec.extra["target"])
    {"save": subject.save, "cache": subject.fill_cache}[what](spec.model, folder, target)
    return {}


def limit_cpus(threads: int) -> None:
    """Run on as many CPUs as there are threads, so that every case has the same."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:threads])
    torch.set_num_threads(threads)


def main(argv: Sequence[str]) -> int:
    """Run `argv`: what to do, and the spec."""
    what, text = argv
    data: Mapping[str, Any] = json.loads(text)
    spec = Spec(**data)
    limit_cpus(spec.threads)
    try:
        result = measure(spec) if what == "run" else stage(spec, what)
    except Exception as error:  # noqa: BLE001 - the reason is all that the parent needs
        tell("failed", reason=f"{type(error).__name__}: {error}")
        return 1
    tell("result", **result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
