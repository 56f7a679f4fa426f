"""Errors that are measured while weights are loaded, against a computation on the same rows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from templates import graph_of, saved, values
from torch import Tensor

from fxquant import numerics
from fxquant.checkpoint import DictCheckpoint, StreamCheckpoint
from fxquant.form import Form
from fxquant.materialize.errors import WeightError
from fxquant.materialize.execute import materialize
from fxquant.materialize.jobs import Settings
from fxquant.materialize.measure import measure_errors
from fxquant.materialize.meter import LiveBytes
from fxquant.materialize.schedule import Scheduler
from fxquant.numerics.deviation import SAMPLE_ROWS
from fxquant.scheme import find_scheme
from schemes.models import NAMES, REFINED

ALL = (*NAMES, *REFINED)
N, K = 300, 200


def weights() -> dict[str, Tensor]:
    """Values of all magnitudes, rows of zeros, an outlier, in two dtypes."""
    plain, other = values(N, K), values(K, N, dtype=torch.float32, seed=1)
    plain[0] = plain[7] = plain[299] = 0
    other[:, 5] = 0
    plain[3, 3] = 500
    return {"plain": plain, "other": other}


def load(
    form: Form, tensors: dict[str, Tensor], *, tile_bytes: int = 8192, workers: int = 1
) -> dict[str, WeightError]:
    graph = graph_of(
        ("plain", ["plain"], None, form),
        ("other", ["other"], None, Form(scheme=form.scheme, transposed=True)),
        **tensors,
    )
    checkpoint = DictCheckpoint(tensors)
    schedule = Scheduler(graph, checkpoint.infos).make(
        Settings(workers=workers, tile_bytes=tile_bytes, in_memory=True)
    )
    return dict(materialize(graph, schedule, checkpoint).errors)


def sampled(w_NK: Tensor) -> list[int]:
    return [row for rows in numerics.sample_ranges(*w_NK.shape) for row in rows]


def relative(w_NK: Tensor, scheme: str, rows: list[int] | slice = slice(None)) -> float:
    """Of the whole weight quantized at once, in float64."""
    spec = find_scheme(scheme).weight
    assert spec is not None
    made = numerics.dequantize_weight(
        numerics.quantize_weight(w_NK, spec), spec, w_NK.shape[1], torch.float32
    ).double()
    exact = w_NK.double()
    return float((made - exact)[rows].norm() / exact[rows].norm())


@pytest.mark.parametrize("scheme", ALL)
def test_error_is_that_of_the_sampled_rows(scheme: str) -> None:
    tensors = weights()
    found = load(Form(scheme=scheme), tensors)
    for name, w_NK in (("plain", tensors["plain"]), ("other", tensors["other"].bfloat16().t())):
        rows = sampled(w_NK)
        error = found[name]
        assert error.relative == pytest.approx(relative(w_NK, scheme, rows), rel=1e-5)
        assert error.sqnr_db == pytest.approx(-20 * math.log10(error.relative))
        assert (error.sampled_rows, error.rows) == (len(rows), w_NK.shape[0])
        largest = float((w_NK if error.maximum_is_exact else w_NK[rows]).abs().max())
        assert error.maximum == pytest.approx(largest, rel=1e-6)
        if error.maximum_is_exact and w_NK.dtype == torch.bfloat16:
            assert error.maximum == largest


@pytest.mark.parametrize("scheme", ALL)
def test_rows_of_zeros_are_counted(scheme: str) -> None:
    found = load(Form(scheme=scheme), weights())
    spec = find_scheme(scheme).weight
    assert spec is not None
    told = spec.block[0] == 1 and not spec.two_level
    assert found["plain"].zero_rows == (3 if told else None)
    assert found["other"].zero_rows == (1 if told else None)
    full = {"plain": values(N, K), "other": values(K, N, dtype=torch.float32)}
    assert load(Form(scheme=scheme), full)["plain"].zero_rows == (0 if spec.block[0] == 1 else None)


@pytest.mark.parametrize("scheme", ALL)
def test_clipped_values_are_counted(scheme: str) -> None:
    """Quotients by the scales that were stored, which round to codes out of the range."""
    tensors = weights()
    w_NK, spec = tensors["plain"].float(), find_scheme(scheme).weight
    assert spec is not None
    parts = numerics.quantize_weight(w_NK, spec)
    rows = sampled(w_NK)
    n, k = w_NK.shape
    height, width = numerics.block_of((n, k), spec)
    scale = parts[1].float().repeat_interleave(height, 0)[:n].repeat_interleave(width, 1)[:, :k]
    if spec.two_level:
        scale = scale * parts[2]
    quotients = w_NK / scale
    if spec.zero:
        quotients = quotients + parts[2].repeat_interleave(width, 1)[:, :k]
        out = (quotients.round() < -8) | (quotients.round() > 7)
    elif spec.codes in ("int8", "int4"):
        out = quotients.round().abs() > spec.top
    else:
        out = quotients.abs() > 464 if spec.codes == "e4m3" else quotients.abs() >= 7
    count = int(out[rows].sum())
    found = load(Form(scheme=scheme), tensors)["plain"]
    assert round(found.clipped * len(rows) * k) == count
    assert bool(count) == (spec.scale == "e8m0" or spec.refine == "clip" or bool(spec.zero and count))


@pytest.mark.parametrize("scheme", ["int8", "int4_g32", "fp8_tensor", "nvfp4", "int4_g64_asym(refine=hqq)"])
def test_tiles_and_workers_change_nothing(scheme: str) -> None:
    tensors = weights()
    first = load(Form(scheme=scheme), tensors)
    for workers in (1, 4):
        assert load(Form(scheme=scheme), tensors, workers=workers) == first  # to the last bit
    other = load(Form(scheme=scheme), tensors, tile_bytes=1 << 20)
    for name, error in first.items():
        assert other[name].relative == pytest.approx(error.relative, rel=1e-6)
        assert other[name].sampled_rows == error.sampled_rows


@pytest.mark.parametrize("scheme", ["int8", "int4_channel", "mxfp4"])
def test_sample_is_close_to_the_whole(scheme: str) -> None:
    tensors = {"plain": values(2048, 256), "other": values(256, 640)}
    found = load(Form(scheme=scheme), tensors)["plain"]
    assert found.sampled_rows == SAMPLE_ROWS
    whole = relative(tensors["plain"], scheme)
    assert abs(found.sqnr_db + 20 * math.log10(whole)) < 0.5


def test_codes_in_parts_and_turned() -> None:
    """What an NPU takes: codes ``[K, N]``, cut along both axes."""
    tensors = weights()
    plain = load(Form(scheme="int8"), tensors)
    laid_out = Form(scheme="int8", kn=True, parts_n=(130, 170), parts_k=(96, 104))
    assert load(laid_out, tensors) == plain


def test_a_stream_in_parts() -> None:
    tensors = weights()
    graph = graph_of(("plain", ["plain"], None, Form(scheme="int4_g32")), plain=tensors["plain"])
    scheduler = Scheduler(graph, DictCheckpoint(tensors).infos)
    schedule = scheduler.make(Settings(workers=1, tile_bytes=8192, in_memory=True))
    parts = [("plain", tensors["plain"][at : at + 100], (at, 0)) for at in (200, 0, 100)]
    loaded = materialize(graph, schedule, StreamCheckpoint(parts))
    expected = load(Form(scheme="int4_g32"), tensors)["plain"]
    assert loaded.errors["plain"] == expected


def test_floats_have_no_errors() -> None:
    tensors = {"a": values(64, 64)}
    graph = graph_of(("a", ["a"], None, None), **tensors)
    checkpoint = DictCheckpoint(tensors)
    schedule = Scheduler(graph, checkpoint.infos).make(Settings(workers=1, tile_bytes=8192, in_memory=True))
    assert materialize(graph, schedule, checkpoint).errors == {}


def test_weights_that_are_not_finite() -> None:
    tensors = weights()
    tensors["plain"][0, 0] = torch.nan
    found = load(Form(scheme="int8"), tensors)["plain"]
    assert math.isnan(found.relative)
    assert math.isnan(found.sqnr_db)


def test_zeros_alone() -> None:
    tensors = {**weights(), "plain": torch.zeros(64, 64)}
    found = load(Form(scheme="int8"), tensors)["plain"]
    assert (found.relative, found.sqnr_db, found.zero_rows, found.maximum) == (
        0,
        math.inf,
        64,
        pytest.approx(0),
    )


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 31, 63, 64, 127, 1000, 4096, 50000])
@pytest.mark.parametrize("columns", [1, 64, 2048, 1 << 19, 1 << 22])
def test_sample(rows: int, columns: int) -> None:
    """Within the weight, each row once, some of every 8M values, all of a small weight's span."""
    picked = [row for part in numerics.sample_ranges(rows, columns) for row in part]
    assert picked == sorted(set(picked))
    assert picked[0] == 0
    assert picked[-1] < rows
    assert len(picked) >= min(rows, SAMPLE_ROWS, max(1, (1 << 20) // columns))
    assert len(picked) <= SAMPLE_ROWS * (1 + rows // max(8, (1 << 23) // columns))


@pytest.mark.parametrize("scheme", ALL)
@pytest.mark.parametrize("workers", [1, 4])
def test_measuring_before_loading(scheme: str, workers: int, tmp_path: Path) -> None:
    """Every row, and nothing is kept."""
    tensors = weights()
    graph = graph_of(
        ("plain", ["plain"], None, Form(scheme=scheme)),
        ("other", ["other"], None, Form(scheme=scheme, transposed=True)),
        **tensors,
    )
    with saved(tmp_path / "model.safetensors", tensors) as checkpoint:
        schedule = Scheduler(graph, checkpoint.infos).make(Settings(workers=workers, tile_bytes=8192))
        found = measure_errors(graph, schedule, checkpoint)
    assert found.constants == {}
    for name, w_NK in (("plain", tensors["plain"]), ("other", tensors["other"].bfloat16().t())):
        assert found.errors[name].relative == pytest.approx(relative(w_NK, scheme), rel=1e-5)
        assert found.errors[name].sampled_rows == w_NK.shape[0]


def test_measuring_takes_a_few_tiles(tmp_path: Path) -> None:
    tensors = {f"w{i}": values(1024, 1024) for i in range(12)}
    graph = graph_of(*((name, [name], None, Form(scheme="int8")) for name in tensors), **tensors)
    with saved(tmp_path / "model.safetensors", tensors) as checkpoint:
        settings = Settings(workers=2, tile_bytes=256 << 10)
        schedule = Scheduler(graph, checkpoint.infos).make(settings)
        found = measure_errors(graph, schedule, checkpoint)
    assert found.peak["cpu"] <= 2 * (2 * (256 << 10) + (2 << 20) + (256 << 10))
    assert found.read_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_comparing_takes_no_more_than_it_says() -> None:
    for scheme in ALL:
        spec = find_scheme(scheme).weight
        assert spec is not None
        w_NK = values(96, 512)
        codes, *others = numerics.quantize_weight(w_NK, spec)
        scratch = numerics.scratch_for(w_NK, spec)
        rows = slice(0, 96, 1)
        with LiveBytes() as live:
            for found in numerics.compare_rows(w_NK, codes[rows], others, spec, rows, scratch):
                del found
        assert live.peak.get("cpu", 0) <= numerics.comparing_bytes((96, 512), spec), scheme
