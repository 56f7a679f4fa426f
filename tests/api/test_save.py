"""``fxquant.save_checkpoint`` and loading what it wrote: the same constants, without quantizing again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import fxquant
from fxquant import numerics
from fxquant.cli import main
from fxquant.errors import (
    CheckpointFileError,
    ConfigError,
    ExtraWeightError,
    FxquantError,
    MissingWeightError,
    WeightMismatchError,
)
from tests.api.lives import FORMS, IDS, Net, compiled, constants, forms, on_meta, run, same, values, write


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    fxquant.save_checkpoint(compiled(values()), tmp_path / "saved")
    return tmp_path / "saved"


def loaded(path: Path, model: nn.Module | None = None, **options: Any) -> Net:
    return fxquant.compile(on_meta() if model is None else model, path, example_inputs=(IDS,), **options)


@pytest.fixture
def no_quantizing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, quantizing fails."""

    def forbid() -> None:
        for name in ("quantize_into", "quantize_weight", "quantize_known_into"):
            monkeypatch.setattr(numerics, name, lambda *args: pytest.fail("quantized again"))

    return forbid


@pytest.mark.parametrize(
    "options",
    [{}, {"scheme": "none", "config": None}, {"config": None}, {"ignore": ["first"]}],
    ids=["table", "none", "float head", "ignored"],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_round_trip(
    options: dict[str, Any], workers: int, tmp_path: Path, no_quantizing: Callable[[], None]
) -> None:
    model = compiled(values(), **options)
    fxquant.save_checkpoint(model, tmp_path / "saved")
    no_quantizing()
    again = loaded(tmp_path / "saved", load_workers=workers)
    assert same(model, again)
    assert forms(model) == forms(again)
    plan, other = model.fxquant_plan, again.fxquant_plan
    assert (plan.scheme, plan.config) == (other.scheme, other.config)
    rows = [(w.fqn, w.form, w.reason, w.scheme, w.resident_bytes) for w in plan.weights]
    assert rows == [(w.fqn, w.form, w.reason, w.scheme, w.resident_bytes) for w in other.weights]
    assert all(not w.transient_bytes for w in other.weights)
    assert torch.equal(run(model), run(again))
    assert fxquant.report(again).fallbacks == 0


def test_saved_again_from_a_saved_folder(saved: Path, tmp_path: Path) -> None:
    model = loaded(saved)
    fxquant.save_checkpoint(model, tmp_path / "again")
    names = sorted(path.name for path in saved.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        if name.endswith(".safetensors"):
            assert (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert same(loaded(tmp_path / "again"), model)


@pytest.mark.parametrize("kind", ["stream", "parts", "dummy", "mmap", "cast", "reloaded"])
def test_models_that_were_made_in_other_ways(kind: str, tmp_path: Path) -> None:
    match kind:
        case "stream":
            model = compiled(iter(values().items()))
        case "parts":
            model = compiled(_parts(values()))
        case "dummy":
            model = compiled(None, weights="dummy")
        case "mmap":
            model = compiled(write(tmp_path / "ckpt"), reader="mmap")
        case "cast":
            model = compiled(values()).half()
        case _:
            model = compiled(values(1))
            fxquant.reload(model, values())
    fxquant.save_checkpoint(model, tmp_path / "saved")
    again = loaded(tmp_path / "saved", on_meta().half() if kind == "cast" else None)
    assert same(model, again)
    assert torch.equal(run(model), run(again))
    if kind in ("stream", "parts", "mmap", "reloaded"):
        assert same(model, compiled(values()))


def _parts(state: dict[str, Tensor]) -> Iterator[tuple[Any, ...]]:
    for name, tensor in state.items():
        if not tensor.dim():
            yield name, tensor
        for start in range(0, len(tensor) if tensor.dim() else 0, 20):
            yield name, tensor[start : start + 20], (start,) + (0,) * (tensor.dim() - 1)


def test_other_readers_see_the_constants(saved: Path) -> None:
    model = loaded(saved)
    found = {
        k: v for path in saved.glob("*.safetensors") for k, v in safetensors.torch.load_file(path).items()
    }
    assert torch.equal(found["embed.weight.table"], model.embed.weight.table)
    assert torch.equal(found["conv.codes"], model.conv.codes)
    assert torch.equal(found["conv.scale"], model.conv.scale)
    assert torch.equal(found["shift"], model.shift)
    assert found["count"] == model.count
    assert "mask" not in found
    assert len(found) == len(constants(model)) - 1  # the buffer that is not persistent


# ------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "options",
    [{"scheme": "none"}, {"config": {"first": "none"}}, {"config": {"head": "int8"}}, {"ignore": ["first"]}],
    ids=str,
)
def test_what_is_stored_cannot_be_chosen_again(options: dict[str, Any], saved: Path) -> None:
    with pytest.raises(ConfigError, match="holds constants of scheme 'int8', which are loaded as they are"):
        loaded(saved, **options)


@pytest.mark.parametrize("scheme", [None, "int8", "checkpoint"])
def test_the_stored_scheme_may_be_named(scheme: str | None, saved: Path) -> None:
    assert forms(loaded(saved, scheme=scheme)) == FORMS


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 65, bias=False)


class More(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(4, 4)


class Fewer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(64))
        del self.shift
        self.register_buffer("shift", torch.zeros(64), persistent=False)


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (Wide, WeightMismatchError, r"last\.weight was saved as torch\.float32 \[64, 64\], the model has"),
        (
            lambda: Net().half(),
            WeightMismatchError,
            r"was saved as torch\.float32 .*, the model has torch\.float16",
        ),
        (More, MissingWeightError, r"holds no constants of 2 weights: more\.weight, more\.bias"),
    ],
)
def test_other_models_are_refused(
    model: Callable[[], nn.Module], error: type[FxquantError], words: str, saved: Path
) -> None:
    with fxquant.meta_init():
        other = model().eval()
    with pytest.raises(error, match=words):
        loaded(saved, other)
    assert all(parameter.is_meta for parameter in other.parameters())


def test_strict_refuses_what_is_left_over(saved: Path) -> None:
    with fxquant.meta_init():
        fewer = Fewer().eval()
    with pytest.raises(ExtraWeightError, match="shift"):
        loaded(saved, fewer, strict=True)
    assert loaded(saved, fewer).fxquant_plan.extra == ("shift",)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Net was not compiled by"):
        fxquant.save_checkpoint(on_meta(), tmp_path / "saved")
    with pytest.raises(ConfigError, match="the only format that is written is 'fxquant'"):
        fxquant.save_checkpoint(compiled(values()), tmp_path / "saved", format="gguf")
    assert not list(tmp_path.iterdir())


def test_overwriting(saved: Path) -> None:
    other = compiled(values(1))
    with pytest.raises(CheckpointFileError, match="exists already"):
        fxquant.save_checkpoint(other, saved)
    assert same(loaded(saved), compiled(values()))
    fxquant.save_checkpoint(other, saved, overwrite=True)
    assert same(loaded(saved), other)
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointFileError, match=r"also holds \['notes.txt'\]"):
        fxquant.save_checkpoint(other, saved, overwrite=True)
    write(saved.parent / "float")
    with pytest.raises(CheckpointFileError, match="is not a folder of fxquant constants"):
        fxquant.save_checkpoint(other, saved.parent / "float", overwrite=True)


def test_a_model_may_overwrite_the_folder_it_came_from(saved: Path) -> None:
    model = loaded(saved)
    fxquant.reload(model, values(1))
    fxquant.save_checkpoint(model, saved, overwrite=True)
    assert same(loaded(saved), compiled(values(1)))


# ------------------------------------------------------------------------------- transformers


def llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        architectures=["LlamaForCausalLM"],
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_transformers_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    model = fxquant.compile(model, model.state_dict(), scheme="int8")
    fxquant.save_checkpoint(model, tmp_path / "saved")
    assert {"config.json", "generation_config.json", "fxquant.json"} <= {
        p.name for p in (tmp_path / "saved").iterdir()
    }
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["model_type"] == "llama"
    with fxquant.meta_init():
        again = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(tmp_path / "saved")).eval()
    again = fxquant.compile(again, tmp_path / "saved")
    assert same(model, again)
    ids = torch.tensor([[1, 5, 9]])
    texts = [each.generate(ids, max_new_tokens=4, do_sample=False) for each in (model, again)]
    assert torch.equal(*texts)
    assert main(["plan", str(tmp_path / "saved")]) == 0
    assert "scheme int8 on cpu, 14 of 21 weights quantized" in capsys.readouterr().out
    fxquant.reload(again, {name: tensor * 2 for name, tensor in llama().state_dict().items()})
    assert not same(model, again)
