"""``max_error``: which scheme a weight takes, against a direct computation; reads, refusals, the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fxquant
from fxquant import numerics
from fxquant.errors import ConfigError, RefusedError
from fxquant.scheme import SCHEMES, WIDER, find_scheme, wider
from tests.specs import spec_of

BF16 = torch.bfloat16
X = (torch.ones(2, 256, dtype=BF16),)


class Net(nn.Module):
    """A weight of outliers, an easy one, a transposed one, and a head that is tied to a table."""

    def __init__(self) -> None:
        super().__init__()
        self.hard = nn.Linear(256, 320, dtype=BF16)
        self.easy = nn.Linear(320, 256, dtype=BF16)
        self.turned = nn.Parameter(torch.empty(256, 192, dtype=BF16))
        self.table = nn.Embedding(64, 192, dtype=BF16)
        self.head = nn.Linear(192, 64, bias=False, dtype=BF16)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.easy(self.hard(x)) @ self.turned
        return self.head(x + self.table(torch.zeros(2, dtype=torch.int64)))


MATRICES = {"hard.weight": False, "easy.weight": False, "turned": True, "table.weight": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in meta().state_dict().items() if name != "head.weight"}
    state = {name: torch.randn(shape, generator=generator).to(BF16) for name, shape in shapes.items()}
    state["hard.weight"] = state["hard.weight"] ** 5
    state["easy.weight"] = torch.randint(-7, 8, (256, 320), generator=generator).to(BF16)
    save_file(state, path / "model.safetensors")
    return path


def meta() -> Net:
    with fxquant.meta_init():
        return Net().eval()


def plan(source: object, scheme: str, bound: float | None, **options: Any) -> fxquant.Plan:
    options = {"config": {"head": scheme}, "example_inputs": X, "read_bytes": "16KiB", **options}
    return fxquant.plan(meta(), source, scheme=scheme, max_error=bound, **options)


def error_of(weight: Tensor, scheme: str) -> float:
    spec = spec_of(scheme, weight.dtype)
    made = numerics.dequantize_weight(
        numerics.quantize_weight(weight, spec), spec, weight.shape[1], torch.float32
    )
    return float((made.double() - weight.double()).norm() / weight.double().norm())


def expected(weight: Tensor, scheme: str, bound: float) -> tuple[str, list[tuple[str, float]]]:
    """The scheme that is taken, and those that were not with their errors."""
    tried = []
    while scheme != "none" and error_of(weight, scheme) > bound:
        tried.append((scheme, error_of(weight, scheme)))
        scheme = wider(find_scheme(scheme)).name
    return scheme, tried


@pytest.mark.parametrize(
    ("scheme", "bound"),
    [
        ("int4_channel", 0.11),
        ("int4_channel", 0.004),
        ("int4_channel_asym(refine=clip)", 0.1),
        ("int4_g64", 0.5),
        ("w4a8_g128", 0.1),
        ("mxfp4", 0.05),
        ("nvfp4", 0.05),
        ("fp8_tensor", 0.0264),
        ("int8", 0.008),
    ],
)
def test_each_weight_takes_the_first_scheme_under_the_bound(folder: Path, scheme: str, bound: float) -> None:
    state = load_file(folder / "model.safetensors")
    got = plan(folder, scheme, bound)
    rounds = 1
    for name, turned in MATRICES.items():
        weight = state[name].t() if turned else state[name]
        taken, tried = expected(weight, scheme, bound)
        row = got.weight(name)
        assert row.scheme == taken
        rounds = max(rounds, len(tried) + (taken != "none"))
        if tried:
            names = ", ".join(f"{error:.3g} as {each}" for each, error in tried)
            end = "stays float" if taken == "none" else f"takes {taken}"
            first, rest = names.split(" as ", 1)
            assert f"error {first} over max_error {bound:g} as {rest}: {end}" in row.reason
        else:
            assert "max_error" not in row.reason
    assert got.loading["measuring_rounds"] == rounds


def test_what_is_read_is_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fxquant.checkpoint import FileCheckpoint

    read: list[int] = []
    fill = FileCheckpoint.fill

    def counted(self: FileCheckpoint, pieces: Any) -> None:
        read.append(sum(len(piece.target) for piece in pieces))
        fill(self, pieces)

    monkeypatch.setattr(FileCheckpoint, "fill", counted)
    state = load_file(folder / "model.safetensors")
    loose = plan(folder, "int4_g64", 0.5)
    assert sum(read) == loose.loading["measuring_bytes"] == sum(state[name].nbytes for name in MATRICES)
    assert loose.loading["measuring_reads"] > 1
    read.clear()
    tight = plan(folder, "int4_channel", 0.11)
    assert sum(read) == tight.loading["measuring_bytes"] > loose.loading["measuring_bytes"]
    assert "measured for max_error 0.11:" in str(tight)
    read.clear()
    assert "max_error" not in plan(folder, "int4_channel", None).loading
    assert not read


def test_two_plans_are_the_same(folder: Path) -> None:
    one, two = (plan(folder, "int4_channel", 0.11, load_workers=workers) for workers in (3, 3))
    assert one == two
    assert one.hash == two.hash
    assert one.hash != plan(folder, "int4_channel", 0.1101, load_workers=3).hash
    assert one.constants_hash == plan(folder, "int4_channel", 0.11, load_workers=1).constants_hash
    assert fxquant.Plan.from_json(one.to_json()) == one


def test_a_dict_and_a_budget(folder: Path) -> None:
    files = plan(folder, "int4_channel", 0.11)
    state = load_file(folder / "model.safetensors")
    for other in (
        plan(state, "int4_channel", 0.11),
        plan(folder, "int4_channel", 0.11, host_budget="64MiB"),
        plan(folder, "int4_channel", 0.11, reader="mmap"),
    ):
        assert [row.form for row in other.weights] == [row.form for row in files.weights]


def test_compile_and_lower_follow_the_plan(folder: Path) -> None:
    options: dict[str, Any] = {"scheme": "int4_channel", "max_error": 0.11, "example_inputs": X}
    model = fxquant.compile(meta(), folder, **options)
    report = fxquant.report(model)
    assert all(error.relative < 0.13 for error in report.errors.values())
    assert report.plan.weight("hard.weight").scheme == "int4_g64"
    assert torch.isfinite(model(*X)).all()
    lowered = fxquant.lower(meta(), folder, **options)
    assert [row.form for row in lowered.plan.weights] == [row.form for row in report.plan.weights]


def test_a_cache_hit_gives_the_same_forms(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"scheme": "int4_channel", "example_inputs": X, "cache_dir": tmp_path}
    first, again, other = (
        fxquant.compile(meta(), folder, max_error=bound, **options) for bound in (0.11, 0.11, 0.004)
    )
    origins = [fxquant.report(model).origin for model in (first, again, other)]
    assert [origin.startswith("the cache") for origin in origins] == [False, True, False]
    assert torch.equal(first(*X), again(*X))
    assert fxquant.report(first).errors
    assert not fxquant.report(again).errors  # nothing was quantized


def test_strict_raises_where_nothing_is_good_enough(folder: Path) -> None:
    with pytest.raises(RefusedError, match=r"over max_error 0.001 as int8: stays float"):
        plan(folder, "int8", 0.001, strict=True)


@pytest.mark.parametrize("bound", [0, -1, float("nan"), float("inf"), "0.1", True])
def test_bounds_that_are_none(folder: Path, bound: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_error"):
        plan(folder, "int8", bound)


def test_sources_that_cannot_be_measured(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"there is no checkpoint"):
        plan(None, "int8", 0.1)
    with pytest.raises(ConfigError, match=r"a stream can be read only once"):
        plan(iter(state.items()), "int8", 0.1)
    with pytest.raises(ConfigError, match=r"weights='dummy' reads none"):
        plan(folder, "int8", 0.1, weights="dummy")
    model = fxquant.compile(meta(), folder, scheme="int8", example_inputs=X)
    fxquant.save_checkpoint(model, tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"holds constants; give the original checkpoint"):
        fxquant.plan(meta(), tmp_path / "saved", max_error=0.1, example_inputs=X)


def test_wider_schemes_end_in_floats() -> None:
    assert set(WIDER) | set(WIDER.values()) <= set(SCHEMES)
    for scheme in SCHEMES.values():
        seen = []
        while scheme.weight is not None:
            assert scheme.name not in seen
            seen.append(scheme.name)
            scheme = wider(scheme)  # noqa: PLW2901


def test_the_report_names_the_worst(folder: Path, tmp_path: Path) -> None:
    model = fxquant.compile(meta(), folder, scheme="int4_g64", example_inputs=X)
    report = fxquant.report(model)
    text = str(report)
    worst = max(report.errors, key=lambda fqn: report.errors[fqn].relative)
    lines = [line for line in text.splitlines() if " dB: " in line]
    assert lines[0].startswith(f"  {report.errors[worst].sqnr_db:.1f} dB: {worst} (")
    assert f"{report.errors[worst].sampled_rows} of {report.errors[worst].rows} rows" in lines[0]
    page = report.to_html(tmp_path / "report.html").read_text()
    assert '"sqnr"' in page
    fxquant.reload(model, {k: v * 2 for k, v in load_file(folder / "model.safetensors").items()})
    after = fxquant.report(model).errors
    assert after["easy.weight"].maximum == 2 * report.errors["easy.weight"].maximum
