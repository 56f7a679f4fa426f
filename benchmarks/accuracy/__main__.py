"""What each scheme costs in accuracy, next to the peers' same schemes: fresh processes, one run.

    python -m benchmarks.accuracy --small                      # a minute: three schemes on little text
    python -m benchmarks.accuracy --json out.jsonl             # every scheme and every peer: an hour
    python -m benchmarks.accuracy --schemes int8,int4_g64_asym # some schemes, with the peers beside them

SmolLM2-135M-Instruct in bf16 tells perplexity, all-MiniLM-L6-v2 in float32 the cosine between its
sentence embeddings and the float model's, both the signal-to-noise ratio of the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.accuracy import half_products, own
from benchmarks.accuracy.models import PIECES, write_texts
from benchmarks.accuracy.peers import PEERS
from benchmarks.accuracy.records import FLOAT, SMOLLM2, Record, Results
from benchmarks.accuracy.runner import failed, run, versions
from benchmarks.accuracy.table import render_table, render_verdicts
from benchmarks.accuracy.verdicts import FAIL, Check, judge
from benchmarks.loading.models import ROOT
from benchmarks.perplexity import CONTEXT, TOKENS
from examples.sentence_embeddings import SENTENCES

SMALL_SCHEMES = ("int8", "int8_weight_only", "int4_g64_asym")
WINDOWS = 4
"""Windows of text that scales of activations are taken from."""


def cases(schemes: Iterable[str]) -> list[str]:
    """The float model, then each scheme and the peers beside it."""
    return [
        FLOAT,
        *(
            case
            for scheme in schemes
            for case in (scheme, *(name for name, peer in PEERS.items() if peer.beside == scheme))
        ),
    ]


def measure(args: argparse.Namespace, texts: Path) -> Results:
    """Run every case, write its records down, and say that they are there."""
    packages = {peer.package for peer in PEERS.values()}
    have = versions(args.peers_python, packages)

    def one(case: str) -> tuple[list[Record], float]:
        package = PEERS[case].package if case in PEERS else None
        started = time.perf_counter()
        if package is None or package in have:
            python = args.peers_python if package else sys.executable
            found = run(case, texts, python, args.threads, compiled=not args.small)
        else:
            found = failed(case, f"{package} is not installed: see --peers-python")
        return found, time.perf_counter() - started

    records: list[Record] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for found, seconds in pool.map(one, cases(args.schemes)):
            keep(found, args.json, seconds)
            records += found
    return Results(records)


def keep(records: Sequence[Record], target: Path | None, seconds: float) -> None:
    """Append the records of a case to a file, and tell what is new."""
    if target is not None:
        with target.open("a") as file:
            file.writelines(json.dumps(record.to_dict()) + "\n" for record in records)
    for record in records:
        value = record.perplexity if record.model == SMOLLM2 else record.mean
        text = record.reason or ("no number" if value is None else f"{value:.5f}")
        print(f"  {record.case} {record.model}: {text}", file=sys.stderr, flush=True)
    print(f"  {records[0].case}: {seconds:.0f} s", file=sys.stderr, flush=True)


def header(args: argparse.Namespace, digest: str) -> str:
    """What was measured on what."""
    have = versions(args.peers_python, sorted({peer.package for peer in PEERS.values()}))
    peers = ", ".join(f"{name} {version}" for name, version in have.items() if name != "python")
    products = ["Products of bfloat16 are computed in float32."] if half_products.is_slow() else []
    return "\n".join(
        (
            f"torch {torch.__version__}, CPython {platform.python_version()}; {peers or 'no peers'}.",
            *products,
            "SmolLM2-135M-Instruct in bf16, its tied head and embedding float: the first",
            f"{args.tokens} tokens of pydoc_data.topics (sha256 `{digest}`) in windows of {args.context}.",
            f"all-MiniLM-L6-v2 in float32, {args.sentences} sentences. Scales of static activations:",
            f"absmax / 127 over {WINDOWS} windows behind the measured text, and over {PIECES} pieces of it.",
        )
    )


def wrong(results: Results, checks: Iterable[Check], *, small: bool) -> bool:
    """Whether one of our own schemes has no numbers, or a bar is missed.

    On little text perplexity is too coarse for the bars: they are shown only.
    """
    ours = [record for record in results.records if record.case not in PEERS]
    if any(record.reason is not None for record in ours):
        return True
    return not small and any(check.status == FAIL for check in checks)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; unknown schemes are refused."""
    first, rest = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    peers = ROOT / ".venv-peers" / "bin" / "python"
    known = own.names()
    parser.add_argument("--schemes", help=f"comma separated, of {', '.join(known)}")
    parser.add_argument("--small", action="store_true", help="little text, three schemes; no bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line per case and model")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process (default: 1)")
    parser.add_argument("--tokens", type=int, help=f"of SmolLM2's text (default: {TOKENS}, small 256)")
    parser.add_argument("--context", type=int, help=f"tokens of a window (default: {CONTEXT}, small 128)")
    parser.add_argument("--sentences", type=int, help=f"for MiniLM (default: {len(SENTENCES)}, small 4)")
    parser.add_argument(
        "--peers-python",
        default=str(peers) if peers.exists() else sys.executable,
        metavar="PATH",
        help="the Python that has the peers: make .venv-peers/.installed",
    )
    args = parser.parse_args(argv)
    if os.sep in args.peers_python:
        args.peers_python = str(Path(args.peers_python).absolute())  # the children run in the project's root
    args.tokens = args.tokens or (256 if args.small else TOKENS)
    args.context = args.context or (128 if args.small else CONTEXT)
    args.sentences = args.sentences or (4 if args.small else len(SENTENCES))
    if args.schemes is None:
        args.schemes = SMALL_SCHEMES if args.small else known
    else:
        args.schemes = tuple(args.schemes.split(","))
        if unknown := [name for name in args.schemes if name not in known]:
            parser.error(f"unknown schemes {', '.join(unknown)}; known: {', '.join(known)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge; 1 if something failed."""
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="fxquant-accuracy.") as work:
        texts = Path(work) / "texts.json"
        digest = write_texts(
            texts, tokens=args.tokens, context=args.context, windows=WINDOWS, sentences=args.sentences
        )
        results = measure(args, texts)
    checks = judge(results)
    print(f"{header(args, digest)}\n\n{render_table(results)}\n\n{render_verdicts(checks)}")
    if args.small:
        print("\nlittle text, without compiling: only schemes without numbers fail the run")
    return int(wrong(results, checks, small=args.small))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        raise SystemExit(main())
