"""fxquant's load against the peers and the floors: alternately, in fresh processes, in one run.

    python -m benchmarks.load --small                 # minutes: tiny checkpoints, what is installed
    python -m benchmarks.load --cold --json out.jsonl # the whole comparison, 9 GB of checkpoints

Every run is a process of its own that imports, prepares and waits; its memory is watched from
outside. Seconds of one run compare with each other, those of different runs do not: quote ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.loading.cases import CASES, COLD, STANDARD, Spec
from benchmarks.loading.floors import build_kernel
from benchmarks.loading.models import MODELS, ROOT, checkpoint, default_folder
from benchmarks.loading.records import Record, Results
from benchmarks.loading.runner import ChildError, Pythons, run, talk
from benchmarks.loading.table import render_table, render_verdicts
from benchmarks.loading.verdicts import BIG, FAIL, INT8, SMALL, Item, judge

VERIFIED = (
    "fxquant:int8",
    "fxquant:int8@smallest",
    "fxquant:saved",
    "fxquant:cache",
    "floor_tile:t1e",
    "floor_tile:t2e",
)
LAYERS = 4
"""Layers of a large model whose codes are checked; of a small one all are."""
SMALL_MODELS = (SMALL.main, *SMALL.wide)
BIG_MODELS = (BIG.main, *BIG.wide)


class Bench:
    """One run of the benchmark: what was asked for, and a folder for what cases need."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.pythons = Pythons(own=sys.executable, peers=args.peers_python)
        self.records: list[Record] = []

    def model(self, name: str, cases: Sequence[str], repeats: int) -> None:
        """Measure cases of one model alternately, `repeats` times."""
        folder = checkpoint(name, self.args.ckpt_dir)
        specs = []
        for case in cases:
            spec = Spec(case=case, model=name, folder=str(folder), threads=self.args.threads)
            try:
                specs.append(self.supplied(spec))
            except (OSError, ChildError) as error:
                self.keep(Record(model=name, case=case, threads=spec.threads, reason=str(error)))
        os.sync()  # what was written for the cases must not be written back during a run
        turns = [(spec, cold) for spec in specs for cold in self.conditions(spec.case)]
        dead = set()
        for repeat in range(repeats):
            for spec, cold in turns:
                if (spec.case, cold) in dead:
                    continue
                record = self.once(spec, cold=cold, repeat=repeat)
                if record.reason is not None:
                    dead.add((spec.case, cold))
                self.keep(record)

    def conditions(self, case: str) -> tuple[bool, ...]:
        """Whether to run warm (False), cold (True) or both."""
        return (False, True) if self.args.cold and case in COLD else (False,)

    def once(self, spec: Spec, *, cold: bool, repeat: int) -> Record:
        """One run; codes are checked in the first."""
        if self.args.verify and repeat == 0 and not cold and spec.case in VERIFIED:
            spec = replace(spec, verify=-1 if spec.model in SMALL_MODELS else LAYERS)
        stored = [Path(spec.extra[name]) for name in ("saved", "cache") if name in spec.extra]
        cached = [Path(spec.folder)] if spec.case != "fxquant:saved" else []
        return run(spec, self.pythons, cached=[*cached, *stored], cold=cold, repeat=repeat)

    def supplied(self, spec: Spec) -> Spec:
        """`spec` with what its case needs made: a kernel, a budget, a saved folder, a filled cache."""
        needs = CASES[spec.case].needs
        extra: dict[str, str | int] = {}
        if "kernel" in needs:
            extra["kernel"] = str(build_kernel(self.work))
        if "budget" in needs:
            extra["budget"] = talk("smallest", spec, self.pythons.own)["budget"]
        for name, what in (("saved", "save"), ("cache", "cache")):
            if name in needs:
                target = str(self.work / f"{spec.model}-{name}")
                talk(what, replace(spec, extra={"target": target}), self.pythons.own)
                extra[name] = target
        return replace(spec, extra=extra)

    def keep(self, record: Record) -> None:
        """Remember a record, write it down, and say that it is there."""
        self.records.append(record)
        if self.args.json is not None:
            with self.args.json.open("a") as file:
                file.write(json.dumps(record.to_dict()) + "\n")
        what = f"{record.model} {record.case}{' cold' if record.cold else ''}"
        seconds = record.reason or f"{record.load_s:.2f} s"
        print(f"  {what}: {seconds}", file=sys.stderr, flush=True)


def chosen(args: argparse.Namespace) -> dict[str, list[str]]:
    """Model -> its cases. Models that are named take every case that can load them."""
    names: Iterable[str] = args.models or (SMALL_MODELS if args.small else BIG_MODELS)
    picked = {}
    for name in names:
        standard = CASES if args.models else STANDARD[name]
        able = [case for case in standard if not CASES[case].models or name in CASES[case].models]
        picked[name] = [case for case in able if args.cases is None or case in args.cases]
    return picked


def measure(args: argparse.Namespace) -> Results:
    """Run everything that was asked for."""
    args.ckpt_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="work.", dir=args.ckpt_dir) as work:
        bench = Bench(args, Path(work))
        plan = chosen(args)
        for name, cases in plan.items():
            bench.model(name, cases, args.repeat)
        if args.verify and BIG.small not in plan and any(INT8 in cases for cases in plan.values()):
            bench.model(BIG.small, [INT8], 1)
    return Results(bench.records)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; unknown cases and models are refused."""
    first, rest = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = ROOT / ".venv-peers" / "bin" / "python"
    parser.add_argument("--small", action="store_true", help="tiny checkpoints; timings are for information")
    parser.add_argument("--models", help=f"comma separated, of {', '.join(MODELS)}")
    parser.add_argument("--cases", help=f"comma separated, or a name before the colon: {', '.join(CASES)}")
    parser.add_argument("--repeat", type=int, help="runs of each case (default: 3, small 1)")
    parser.add_argument("--threads", type=int, default=2, help="threads and CPUs of each case (default: 2)")
    parser.add_argument("--cold", action="store_true", help="also from an empty page cache")
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help="check codes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line per run")
    parser.add_argument("--ckpt-dir", type=Path, default=default_folder(), help="default: %(default)s")
    parser.add_argument(
        "--peers-python",
        default=str(peers) if peers.exists() else sys.executable,
        metavar="PATH",
        help="the Python that has the peers: make .venv-peers/.installed",
    )
    args = parser.parse_args(argv)
    args.ckpt_dir = args.ckpt_dir.absolute()  # the children run in the project's root
    if os.sep in args.peers_python:
        args.peers_python = str(Path(args.peers_python).absolute())
    args.repeat = args.repeat or (1 if args.small else 3)
    if args.models is not None:
        args.models = args.models.split(",")
        if unknown := sorted(set(args.models) - set(MODELS)):
            parser.error(f"unknown models {', '.join(unknown)}; known: {', '.join(MODELS)}")
    if args.cases is not None:
        asked = args.cases.split(",")
        args.cases = {case for case in CASES if case in asked or case.partition(":")[0] in asked}
        if unknown := [a for a in asked if not any(a in (c, c.partition(":")[0]) for c in CASES)]:
            parser.error(f"unknown cases {', '.join(unknown)}; known: {', '.join(CASES)}")
    return args


def failed(results: Results, items: Iterable[Item], *, small: bool) -> bool:
    """Whether an item failed, or the main case did not run although it was asked for.

    On small models only wrong codes count: their seconds are noise.
    """
    if any(record.case == INT8 and record.reason is not None for record in results.records):
        return True
    checks = [check for item in items for check in item.checks if check.status == FAIL]
    return any(not small or "codes" in check.text for check in checks)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge; 1 if something failed."""
    args = parse(argv)
    print(f"{platform.machine()}, {args.threads} threads, {args.repeat} runs of each case, MiB and seconds")
    before = os.getloadavg()[0]
    results = measure(args)
    print(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after")
    items = judge(results, SMALL if args.small else BIG)
    print(f"\n{render_table(results)}\n\n{render_verdicts(items)}")
    if args.small:
        print(f"\nsmall models: only wrong codes, or no {INT8} at all, fail the run")
    return int(failed(results, items, small=args.small))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        raise SystemExit(main())
