"""Starts the processes and watches them from outside, where no GIL is in the way."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.loading.cases import CASES, Spec
from benchmarks.loading.files import drop, ideal_mib, warm
from benchmarks.loading.models import ROOT
from benchmarks.loading.process import memory, reset_peak
from benchmarks.loading.records import Record

INTERVAL = 0.005
TIMEOUT = 600
REASON = 160
"""Characters of an error that are kept."""


class ChildError(Exception):
    """A child process gave no numbers; the text says why."""


class Sampler(threading.Thread):
    """The largest RssAnon and RssFile of a process, looked at every 5 ms."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.samples = pid, 0
        self.peak = {"RssAnon": 0.0, "RssFile": 0.0}
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Sample until asked to stop or the process is gone."""
        with contextlib.suppress(OSError):
            while not self._stop_asked.wait(INTERVAL):
                self.look()

    def look(self) -> None:
        """Take one sample."""
        now = memory(self.pid)
        self.peak = {name: max(value, now.get(name, 0)) for name, value in self.peak.items()}
        self.samples += 1

    def stop(self) -> None:
        """Stop, and wait until the last sample is in."""
        self._stop_asked.set()
        if self.is_alive():
            self.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pythons:
    """The Python of our own cases, and that of the peers."""

    own: str
    peers: str


def run(spec: Spec, pythons: Pythons, *, cached: list[Path], cold: bool, repeat: int) -> Record:
    """One run of a case: `cached` files are warmed or dropped first."""
    case = CASES[spec.case]
    common: dict[str, Any] = {"model": spec.model, "case": spec.case, "cold": cold, "repeat": repeat}
    common["threads"] = spec.threads
    (drop if cold else warm)(cached)
    try:
        result = talk("run", spec, pythons.peers if case.peer else pythons.own)
    except ChildError as error:
        return Record(**common, reason=str(error))
    result["peak_anon"] = result["RssAnon"] - result["base_anon"]
    result["peak_file"] = result["RssFile"] - result["base_file"]
    ideal = ideal_mib(Path(spec.folder), case.scheme)
    return Record(**common, ideal=ideal, **Record.known(result))


def talk(what: str, spec: Spec, python: str) -> dict[str, Any]:
    """Start a child and follow the protocol; what it measured and what was seen from outside."""
    with _child(what, spec, python) as (process, errors):
        assert process.stdin is not None
        assert process.stdout is not None
        sampler = Sampler(process.pid)
        seen: dict[str, Any] = {}
        for line in process.stdout:
            if not line.startswith("@"):
                continue
            message: dict[str, Any] = json.loads(line[1:])
            event = message.pop("event")
            if event == "failed":
                raise ChildError(" ".join(message["reason"].split())[:REASON])
            if event == "result":
                return message | seen
            if event == "ready":
                reset_peak(process.pid)
                sampler.start()
            else:
                sampler.stop()
                sampler.look()  # it waits with everything in place
                seen = {**sampler.peak, "samples": sampler.samples}
                seen["peak_rss"] = memory(process.pid)["VmHWM"]
            process.stdin.write("\n")
            process.stdin.flush()
        code = process.wait()
        sampler.stop()
        text = " ".join("".join(errors).split())[-REASON:]
        raise ChildError(f"the process ended with {code}: {text}")


@contextlib.contextmanager
def _child(what: str, spec: Spec, python: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    command = [python, "-m", "benchmarks.loading.child", what, json.dumps(asdict(spec))]
    try:
        process = subprocess.Popen(  # noqa: S603 - the Python that the user named, our own module
            command,
            cwd=ROOT,
            env=environment(spec.threads, os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
    except OSError as error:
        raise ChildError(f"{python} does not start: {error.strerror}") from error
    errors: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda stream: errors.append(stream.read()), args=(process.stderr,))
    timer = threading.Timer(TIMEOUT, process.kill)
    reader.start()
    timer.start()
    try:
        yield process, errors
        process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        reader.join()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def environment(threads: int, base: Mapping[str, str]) -> dict[str, str]:
    """Nothing is downloaded, nothing spins (neutral to the peers), and all have the same threads."""
    return {
        "OMP_WAIT_POLICY": "passive",
        **base,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
