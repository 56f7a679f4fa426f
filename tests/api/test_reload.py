"""``fxquant.reload``: the same constants with new values, or nothing changes, or the model says so."""

from __future__ import annotations

import copy
import errno
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant.checkpoint import FileCheckpoint
from fxquant.errors import (
    ConfigError,
    FxquantError,
    MissingWeightError,
    QuantizedWeightError,
    WeightMismatchError,
)
from tests.api.lives import (
    FORMS,
    IDS,
    addresses,
    compiled,
    constants,
    forms,
    on_meta,
    run,
    same,
    values,
    write,
)
from tests.materialize.faulty_files import FaultyFiles, fails

BROKEN = "the last reload of this model failed half-way"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "one", 1)


def half_way(folder: Path) -> FileCheckpoint:
    """A checkpoint whose last read fails."""
    counted = FaultyFiles()
    fxquant.reload(compiled(values()), FileCheckpoint(folder, files=counted), load_workers=1)
    at = counted.counts["preadv"] - 1
    return FileCheckpoint(folder, files=FaultyFiles("preadv", at, fails(errno.EIO)))


@pytest.mark.parametrize("workers", [1, 3])
def test_every_kind_of_constant_follows_at_its_address(workers: int, folder: Path, tmp_path: Path) -> None:
    model = compiled(values())
    assert forms(model) == FORMS
    old, places = run(model), addresses(model)
    fxquant.save_checkpoint(compiled(values(2)), tmp_path / "saved")
    for source, seed in (
        (folder, 1),
        (values(2), 2),
        (folder / "model.safetensors", 1),
        (tmp_path / "saved", 2),
        (values(), 0),
    ):
        fxquant.reload(model, source, load_workers=workers)
        fresh = compiled(values(seed))
        assert same(model, fresh)
        assert addresses(model) == places
        assert torch.equal(run(model), run(fresh))
    assert torch.equal(run(model), old)
    assert model.head.weight is model.embed.weight
    report = fxquant.report(model)
    assert (report.recompiles, report.fallbacks) == (0, 0)


def test_outside_of_graphs(folder: Path) -> None:
    model, fresh = compiled(values()), compiled(values(1))
    x = torch.randn(2, 64)
    before = model.last(x)
    fxquant.reload(model, folder)
    assert torch.equal(model.last(x), fresh.last(x))
    assert not torch.equal(model.last(x), before)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_scales_shrink_and_grow(scale: float) -> None:
    """Nothing of the old maxima stays, also where scales span several tiles."""
    wide = nn.Module()
    wide.weight = nn.Parameter(torch.randn(3000, 512))
    wide.forward = lambda x: x @ wide.weight
    state = {"weight": torch.randn(3000, 512)}
    options = {"scheme": "int8", "example_inputs": (torch.randn(2, 3000),), "read_bytes": 4096}
    model = fxquant.compile(wide.eval(), state, **options)
    assert str(model.weight.form) == "int8.t"
    new = {"weight": state["weight"] * scale}
    fxquant.reload(model, new, load_workers=2)
    codes, scales = fxquant.numerics.quantize_weight(new["weight"].t(), model.weight.form.weight)
    assert torch.equal(model.weight.codes, codes)
    assert torch.equal(model.weight.scale, scales)


def test_plan_and_report_follow(folder: Path) -> None:
    model = compiled(write(folder.parent / "zero"))
    before = model.fxquant_plan
    fxquant.reload(model, folder)
    assert model.fxquant_plan.checkpoint == FileCheckpoint(folder).identity
    assert model.fxquant_plan.weights == before.weights
    assert fxquant.report(model).read_bytes > 0


def test_float_schemes_and_dtypes(folder: Path) -> None:
    model = compiled(values(), on_meta().bfloat16(), scheme="none", config=None)
    places = addresses(model)
    fxquant.reload(model, folder)
    assert same(model, compiled(values(1), on_meta().bfloat16(), scheme="none", config=None))
    assert addresses(model) == places


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, lambda model: model.to("cpu")])
def test_after_the_model_was_cast(cast: Callable[[nn.Module], nn.Module], folder: Path) -> None:
    """The weights are those of a model that was cast before it was compiled."""
    model = cast(compiled(values()))
    old = run(model)
    fxquant.reload(model, folder)
    with fxquant.meta_init():
        fresh = on_meta()
    fresh = compiled(values(1), fresh if old.dtype == torch.float32 else cast(fresh))
    assert same(model, fresh)
    assert torch.equal(run(model), run(fresh))


def test_made_in_inference_mode(folder: Path) -> None:
    with torch.inference_mode():
        model = compiled(values())
    fxquant.reload(model, folder)
    fxquant.reload(model, values(1))
    assert same(model, compiled(values(1)))
    with torch.inference_mode():
        fxquant.reload(model, values(2))
    assert same(model, compiled(values(2)))


def test_buffers_that_are_not_in_the_checkpoint_stay() -> None:
    model = compiled(values())
    partial = {name: tensor for name, tensor in values(1).items() if name not in ("gain", "count")}
    fxquant.reload(model, partial)
    assert torch.equal(model.gain, values()["gain"])
    assert same(model, compiled({**values(1), "gain": values()["gain"], "count": values()["count"]}))


# ------------------------------------------------------------------------------- refused


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in values(1).items() if key != name}


REFUSED: dict[str, tuple[Callable[[], object], type[FxquantError], str]] = {
    "missing": (lambda: without("last.weight"), MissingWeightError, r"last\.weight"),
    "shape": (lambda: {**values(1), "conv": torch.zeros(64, 96)}, WeightMismatchError, "conv has shape"),
    "shape of a bias": (
        lambda: {**values(1), "first.bias": torch.zeros(95)},
        WeightMismatchError,
        "first.bias",
    ),
    "dtype": (
        lambda: {**values(1), "first.weight": torch.zeros(96, 64, dtype=torch.int8)},
        WeightMismatchError,
        "stored as torch.int8",
    ),
    "dtype of a buffer": (lambda: {**values(1), "count": torch.tensor(2.0)}, WeightMismatchError, "count"),
    "meta": (
        lambda: {**values(1), "last.weight": torch.empty(64, 64, device="meta")},
        MissingWeightError,
        "on meta",
    ),
    "stream": (lambda: iter(values(1).items()), ConfigError, "reload needs a checkpoint"),
    "no checkpoint": (lambda: 7, ConfigError, "ckpt is of type int"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_changes_nothing(what: str) -> None:
    source, error, words = REFUSED[what]
    model = compiled(values())
    before = [part.clone() for part in constants(model)]
    plan = model.fxquant_plan
    with pytest.raises(error, match=words):
        fxquant.reload(model, source())
    assert all(torch.equal(a, b) for a, b in zip(constants(model), before, strict=True))
    assert model.fxquant_plan is plan
    run(model)


@pytest.mark.parametrize(
    "options", [{"scheme": "none", "config": None}, {"config": None}, {"ignore": ["last"]}]
)
def test_saved_with_other_forms(options: dict[str, Any], tmp_path: Path) -> None:
    fxquant.save_checkpoint(compiled(values(1), **options), tmp_path / "saved")
    model = compiled(values())
    with pytest.raises(WeightMismatchError, match=r"is stored as .*, the model holds it as"):
        fxquant.reload(model, tmp_path / "saved")
    assert same(model, compiled(values()))


def test_saved_in_another_dtype(tmp_path: Path) -> None:
    fxquant.save_checkpoint(compiled(values(1), on_meta().half()), tmp_path / "saved")
    model = compiled(values())
    with pytest.raises(WeightMismatchError, match=r"was saved as torch\.float16"):
        fxquant.reload(model, tmp_path / "saved")
    assert same(model, compiled(values()))


def test_values_in_the_memory_of_other_weights(folder: Path) -> None:
    """What is written over must not be read from: swapped floats would become equal."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
            self.square = nn.Parameter(torch.arange(4.0).view(2, 2))

    model = fxquant.compile(Two(), Two().state_dict(), scheme="none")
    own = model.state_dict()
    fxquant.reload(model, own)
    assert torch.equal(model.square, torch.arange(4.0).view(2, 2))
    for other in ({"p": own["q"], "q": own["p"]}, {"square": own["square"].t()}):
        with pytest.raises(ConfigError, match="lies in the memory of the model's own"):
            fxquant.reload(model, {**own, **other})
    fxquant.reload(model, {"square": own["square"], "p": own["q"].clone(), "q": own["p"].clone()})
    assert (model.p[0], model.q[0]) == (1, 0)


def test_state_dicts_of_compiled_models() -> None:
    """Codes stand for floats, which quantize to the same codes again."""
    model, other = compiled(values()), compiled(values(1))
    fxquant.reload(model, model.state_dict())
    assert torch.equal(model.last.weight.codes, compiled(values()).last.weight.codes)
    fxquant.reload(model, other.state_dict())
    assert torch.equal(model.last.weight.codes, other.last.weight.codes)
    assert torch.allclose(run(model), run(other))


def test_a_model_that_is_not_compiled() -> None:
    with pytest.raises(ConfigError, match="Net was not compiled by"):
        fxquant.reload(on_meta(), values())


def test_a_parameter_that_cannot_be_filled() -> None:
    model = compiled(values())
    model.first.bias = nn.Parameter(torch.zeros(96, 2)[:, 0])
    with pytest.raises(QuantizedWeightError, match=r"first\.bias cannot be reloaded in place"):
        fxquant.reload(model, values(1))
    run(model)


# ------------------------------------------------------------------------------- half-way


def test_half_way(folder: Path, tmp_path: Path) -> None:
    model = compiled(values())
    run(model)
    with pytest.raises(FxquantError, match="Input/output error"):
        fxquant.reload(model, half_way(folder), load_workers=1)
    for broken in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(QuantizedWeightError, match=BROKEN):
            run(broken)
        with pytest.raises(QuantizedWeightError, match=BROKEN):
            fxquant.save_checkpoint(broken, tmp_path / "saved")
        with pytest.raises(MissingWeightError):
            fxquant.reload(broken, without("last.weight"))
        with pytest.raises(QuantizedWeightError, match=BROKEN):
            run(broken)
        fxquant.reload(broken, folder)
        assert torch.equal(run(broken), run(compiled(values(1))))
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_callback_that_raises(error: type[BaseException]) -> None:
    def progress(step: Any) -> None:
        raise error("on purpose")

    model = compiled(values())
    with pytest.raises(error, match="on purpose"):
        fxquant.reload(model, values(1), progress=progress)
    with pytest.raises(QuantizedWeightError, match=BROKEN):
        run(model)
    fxquant.reload(model, values(1))
    assert same(model, compiled(values(1)))


# ------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_reloaded_alone(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = compiled(values())
    other = duplicate(model)
    fxquant.reload(other, values(1))
    assert same(model, compiled(values()))
    assert torch.equal(run(other), run(compiled(values(1))))
    fxquant.reload(model, values(2))
    assert same(other, compiled(values(1)))
    assert torch.equal(model(IDS), run(compiled(values(2))))
