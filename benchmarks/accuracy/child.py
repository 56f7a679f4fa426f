"""One case in its own process: quantize both models, score them, tell.

    python -m benchmarks.accuracy.child CASE TEXTS

Lines of the protocol start with `@` and hold one record each; whatever else libraries print is left
alone. A model that fails is told with its reason, and the next one is measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.accuracy import half_products, own
from benchmarks.accuracy.models import Subject, layer_inputs, read_subjects
from benchmarks.accuracy.peers import PEERS
from benchmarks.accuracy.records import FLOAT
from benchmarks.accuracy.weights import compare_weights

Built = tuple[nn.Module, str]
"""A model that is ready, and a note."""


class NotTheSameError(Exception):
    """A library left layers float without a word, so that its numbers would not compare."""


def builder(case: str) -> Callable[[Subject, nn.Module], Built]:
    """What makes the model of a case; it takes what is measured and the float model."""
    if case == FLOAT:
        return lambda _subject, exact: (exact, "")
    if case in PEERS:
        return lambda subject, _exact: _peer(case, subject)
    return lambda subject, exact: _own(case, subject, exact)


def _peer(case: str, subject: Subject) -> Built:
    model = subject.load()
    note = PEERS[case].quantize(model, subject)
    return model, note


def _own(case: str, subject: Subject, exact: nn.Module) -> Built:
    scales = None
    if own.is_static(case):
        scales = {fqn: given.scale for fqn, given in layer_inputs(subject, exact).items()}
    return own.build(case, subject, scales), ""


@torch.no_grad()
def measure(case: str, subject: Subject) -> dict[str, Any]:
    """The numbers of one case on one model."""
    exact = subject.load()
    started = time.perf_counter()
    model, note = builder(case)(subject, exact)
    built = time.perf_counter()
    found: dict[str, Any] = {**compare_weights(model, exact)}
    if found["quantized"] != (0 if case in (FLOAT, "none") else found["layers"]):
        raise NotTheSameError(f"{found['quantized']} of {found['layers']} layers were quantized")
    found["build_s"] = built - started
    started = time.perf_counter()
    found |= subject.score(model, exact)
    found["score_s"] = time.perf_counter() - started
    return found | ({"note": note} if note else {})


def main(argv: Sequence[str]) -> int:
    """Run `argv`: the case, and the file of the texts."""
    case, texts = argv
    if half_products.is_slow():
        half_products.through_float32()
    for subject in read_subjects(Path(texts)):
        try:
            found = measure(case, subject)
        except Exception as error:  # noqa: BLE001 - the reason is all that the parent needs
            found = {"reason": f"{type(error).__name__}: {error}"}
        print(f"@{json.dumps({'case': case, 'model': subject.name, **found})}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
