"""Experts in the lives that a model has: generated text, copies, the torch.compile backend, ahead of time."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import ByHand, quantized_names

import fxquant
from reference import error
from zoo.case import ZooCase, run
from zoo.models import ZOO
from zoo.random_checkpoint import randomize, write_checkpoint

CASE: ZooCase = next(case for case in ZOO if case.name == "mixtral")
SAME = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mixtral")
    write_checkpoint(CASE, place)
    return place


def compiled(folder: Path, way: str = "eager", **options: Any) -> Any:
    with fxquant.meta_init():
        model: Any = CASE.build()
    model.set_experts_implementation(way)
    return fxquant.compile(model, folder, scheme="int8", example_inputs=CASE.inputs(), **options)


def by_hand() -> Any:
    """The float model, in whose eager loop ``ByHand`` finds the weights."""
    model: Any = CASE.build()
    randomize(model)
    model.set_experts_implementation("eager")
    return model


def test_generate_and_copies(folder: Path) -> None:
    model = compiled(folder)
    prompt = CASE.inputs()["input_ids"]
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(prompt, **how)
    reference = by_hand()
    with ByHand(reference, quantized_names(reference)):
        assert torch.equal(tokens, reference.generate(prompt, **how))
    report = fxquant.report(model)
    assert (report.fallbacks, report.eager_linears, report.unnormalized) == (0, 0, ())
    expected = run(CASE, model)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert again.config._experts_implementation == "fxquant"
    assert torch.equal(run(CASE, again), expected)


@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm"])
def test_live_backend(way: str) -> None:
    model = by_hand()
    with ByHand(model, quantized_names(model)):
        expected = run(CASE, model)
    model.set_experts_implementation(way)
    model.compile(backend="fxquant", options={"scheme": "int8", "strict": True})
    assert error(run(CASE, model), expected) < SAME


def test_release_puts_constants_in_place() -> None:
    model = by_hand()
    with ByHand(model, quantized_names(model)):
        expected = run(CASE, model)
    model.set_experts_implementation("grouped_mm")
    model.compile(backend="fxquant", options={"scheme": "int8", "release": True})
    for _ in range(2):
        assert error(run(CASE, model), expected) < SAME
    experts = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert type(experts.data).__name__ == "QuantizedWeight" or hasattr(experts, "form")


def test_ahead_of_time(folder: Path) -> None:
    with fxquant.meta_init():
        model: Any = CASE.build()
    model.set_experts_implementation("eager")
    low = fxquant.lower(model, folder, scheme="int8", example_inputs=CASE.inputs())
    text = low.dump()
    assert text.count("grouped_scaled_mm(") == 4
    assert "dequantize_weight" not in text
    assert text.count("template") < 100
    reference = by_hand()
    with ByHand(reference, quantized_names(reference)):
        expected = run(CASE, reference)
    got = low.materialize()(**CASE.inputs()).logits
    assert error(got, expected) < SAME


def test_saved_and_reloaded(folder: Path, tmp_path: Path) -> None:
    model = compiled(folder)
    expected = run(CASE, model)
    fxquant.save_checkpoint(model, tmp_path / "saved")
    with fxquant.meta_init():
        again: Any = CASE.build()
    again = fxquant.compile(again, tmp_path / "saved", example_inputs=CASE.inputs())
    assert torch.equal(run(CASE, again), expected)
    fxquant.reload(model, folder)
    assert torch.equal(run(CASE, model), expected)
