"""The start-up peak on a simulated Ascend NPU: how much device memory loading takes.

    python -m benchmarks.npu_startup             # 50 blocks, 6.6 GiB of bf16, on a device of 4096 MiB
    python -m benchmarks.npu_startup --small     # 8 blocks on their share of it; what CI runs
    python -m benchmarks.npu_startup --json out.jsonl

A model shaped like MiniMax-H3's transformer, whose adaLN linears are 96768 wide, is loaded by each
variant in a process of its own. Memory is what torch_npu's own caching allocator says; the device
below it is simulated, and no number was measured on hardware. Needs the environment of `make test-npu`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from benchmarks.loading.models import ROOT, default_folder
from benchmarks.npu_startup_model import checkpoint
from benchmarks.npu_startup_records import Case, Record, cases, judge

HEAD = (
    "model", "variant", "CANN", "allocator", "max allocated", "max reserved", "after", "constants",
    "predicted", "load s", "running", "output",
)  # fmt: skip


def say(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process at a time write checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "npu_startup.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def measure(case: Case, root: Path) -> Record:
    """One run, in a process of its own on its own simulated device."""
    with alone(root):
        folder = checkpoint(case.size, root, say)
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "record.json"
        command = [
            sys.executable, "-m", "fxquant.testing.npu_sim", "--memory", str(case.memory), "--soc", case.soc,
            "--cann", case.cann, *(["--expandable-segments"] if case.expandable else []), "--",
            "python", "-m", "benchmarks.npu_startup_child", json.dumps(asdict(case)), str(folder), str(out),
        ]  # fmt: skip
        environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTORCH_NPU_ALLOC_CONF", None)
        done = subprocess.run(  # noqa: S603 - our own module
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode or not out.exists():
            text = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            return Record(case=case, reason=f"exit code {done.returncode}: {text}")
        return Record.of(json.loads(out.read_text()))


def measure_all(wanted: Sequence[Case], root: Path, jobs: int) -> Iterator[Record]:
    """Every run, `jobs` at a time, in order."""
    with ThreadPoolExecutor(jobs) as pool:
        for record in pool.map(lambda case: measure(case, root), wanted):
            say(
                f"  {record.case.name}: {record.reason or record.failed or f'{record.max_allocated:.0f} MiB'}"
            )
            yield record


def render_table(records: Sequence[Record]) -> str:
    """A markdown table, in MiB and seconds."""
    lines = [HEAD, tuple("---" if i < 4 or i == len(HEAD) - 1 else "---:" for i in range(len(HEAD)))]
    lines += [_cells(record) for record in records]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(record: Record) -> tuple[str, ...]:
    case = record.case
    allocator = "expandable" if case.expandable else "default"
    first = (case.size.name, case.variant, case.cann.removesuffix(".0"), allocator)
    if record.reason:
        numbers = [f"{record.max_allocated:.0f}", f"{record.max_reserved:.0f}"] if record.oom else ["", ""]
        return (*first, *numbers, *[""] * 5, record.reason)
    predicted = "" if record.predicted is None else f"{record.predicted:.0f}"
    memory = (record.max_allocated, record.max_reserved, record.after, record.constants)
    load = [f"{size:.0f}" for size in memory]
    worst = max(record.errors.values(), default=0.0)
    output = "exact" if worst == 0 else f"error {worst:.0e}"
    running = f"{record.running:.0f}" if record.errors else ""
    output = record.failed or (output if record.errors else "")
    return (*first, *load, predicted, f"{record.seconds:.1f}", running, output)


def render_verdicts(records: Sequence[Record]) -> str:
    """A line for each run with its bars."""
    lines = []
    for record in records:
        checks = judge(record)
        status = "PASS" if all(check.passed for check in checks) else "FAIL"
        texts = [f"{'' if check.passed else 'FAIL: '}{check.text}" for check in checks]
        lines.append(f"{status if checks else '-':5}{record.case.name}: {'; '.join(texts) or 'not judged'}")
    return "\n".join(lines)


def show(records: Sequence[Record]) -> int:
    """Print table and verdicts; 1 if a bar was missed."""
    print(f"{render_table(records)}\n\n{render_verdicts(records)}")
    return int(not all(check.passed for record in records for check in judge(record)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    first, rest = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="8 blocks and the full-size one, fewer variants")
    parser.add_argument("--blocks", type=int, help="default: 50, with --small 8")
    parser.add_argument("--variants", help="comma separated: naive, per layer, split, transpose, ...")
    parser.add_argument("--workers", type=int, default=2, help="fxquant's load_workers (default: 2)")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: 1, with --small 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line per run")
    parser.add_argument("--of", type=Path, metavar="FILE", help="run nothing: show what --json wrote")
    parser.add_argument("--ckpt-dir", type=Path, default=default_folder(), help="default: %(default)s")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge; 1 if a bar was missed."""
    args = parse(argv)
    wanted = cases(small=args.small, blocks=args.blocks, workers=args.workers)
    if args.variants is not None:
        wanted = [case for case in wanted if case.variant in args.variants.split(",")]
    if args.of is not None:
        return show([Record.of(json.loads(line)) for line in args.of.read_text().splitlines()])
    records = []
    for record in measure_all(wanted, args.ckpt_dir.absolute(), args.jobs or (2 if args.small else 1)):
        records.append(record)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(record.to_dict()) + "\n")
    return show(records)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        raise SystemExit(main())
