"""Errors of experts while loading and under ``max_error``: over all of a weight, against a computation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fxquant
from fxquant import numerics
from fxquant.checkpoint import DictCheckpoint
from fxquant.form import Form
from fxquant.materialize.jobs import Settings
from fxquant.materialize.measure import measure_errors
from fxquant.materialize.recipes import LoadGraph, Reads
from fxquant.materialize.schedule import Scheduler
from fxquant.numerics.experts import dequantize_experts, quantize_experts
from tests.specs import spec_of

E, N, K = 3, 96, 128
BF16 = torch.bfloat16
X = torch.randn(E, 2, K, dtype=BF16)


class Experts(nn.Module):
    """Each expert takes as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(E, N, K, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        """``[E, S, K] -> [E, S, N]``."""
        return torch.bmm(x, self.w.mT)


def values() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn((E, N, K), generator=generator) * torch.tensor([0.1, 1.0, 30.0])[:, None, None]
    w[0, 5] = w[2, 7] = w[2, 8] = 0
    w[1, 3, 3] = 500
    return w.to(BF16)


def on_meta() -> nn.Module:
    with fxquant.meta_init():
        return Experts().eval()


def relative(w: Tensor, scheme: str, rows: Sequence[int] = range(N)) -> float:
    spec = spec_of(scheme, w.dtype)
    made = dequantize_experts(quantize_experts(w, spec), spec, K, torch.float32)
    error, picked = (w.double() - made)[:, rows], w.double()[:, rows]
    return float(error.norm() / picked.norm())


@pytest.mark.parametrize("scheme", ["int8", "int4_g32", "fp8_block"])
@pytest.mark.parametrize("read_bytes", ["4KiB", "1MiB"])
def test_errors_while_loading(scheme: str, read_bytes: str, tmp_path: Path) -> None:
    w = values()
    save_file({"w": w}, tmp_path / "model.safetensors")
    model = fxquant.compile(
        on_meta(), tmp_path, scheme=scheme, example_inputs=(X,), inner="eager", read_bytes=read_bytes
    )
    (error,) = fxquant.report(model).errors.values()
    assert error.rows == E * N
    rows = [row for some in numerics.sample_ranges(N, K) for row in some]
    assert error.sampled_rows == E * len(rows)
    assert error.relative == pytest.approx(relative(w, scheme, rows), rel=1e-3)
    assert error.maximum == 500
    assert error.zero_rows in (3, None)


@pytest.mark.parametrize(("bound", "taken"), [(0.5, "int4_channel"), (1e-9, "none")])
def test_max_error(bound: float, taken: str, tmp_path: Path) -> None:
    w = values()
    save_file({"w": w}, tmp_path / "model.safetensors")
    plan = fxquant.plan(
        on_meta(), tmp_path, scheme="int4_channel", example_inputs=(X,), max_error=bound, read_bytes="4KiB"
    )
    row = plan.weight("w")
    assert row.scheme == taken
    if taken == "none":
        assert f"error {relative(w, 'int4_channel'):.3g} over max_error" in row.reason


@pytest.mark.parametrize("mixed", [False, True])
def test_measured_before_loading(mixed: bool) -> None:
    """All rows of all experts, each in tiles; experts that are made together are not measured."""
    w = values()
    graph = LoadGraph()
    convert = (lambda stored: stored.flip(0)) if mixed else None
    reads = Reads(keys=("w",), dtypes=(BF16,), shapes=((E, N, K),), convert=convert)
    graph.add("w", reads, dtype=BF16, form=Form(scheme="fp8_tensor"), experts=True)
    checkpoint = DictCheckpoint({"w": w})
    schedule = Scheduler(graph, checkpoint.infos).make(Settings(workers=2, tile_bytes=4096, in_memory=True))
    errors = measure_errors(graph, schedule, checkpoint).errors
    if mixed:
        assert not errors
    else:
        assert errors["w"].relative == pytest.approx(relative(w, "fp8_tensor"), rel=1e-3)
