"""Output heads: every scheme by a config entry, tied and untied; embeddings of real architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant.scheme import SCHEMES
from reference import error
from tests.test_embeddings import IDS, Tied, counts, pair
from tests.test_embeddings import run as call
from zoo.case import run
from zoo.models import ZOO

BY_NAME = {case.name: case for case in ZOO}
SCHEMES_OF_WEIGHTS = [name for name, scheme in SCHEMES.items() if scheme.weight is not None]
TOLERANCE = {8: 0.06, 4: 0.25}
"""By the bits of the activation, of inputs and weights that are normal: the step is 1 / 127 of the largest
value for int8, 1 / 16 of the value for float8, 1 / 4 for e2m1."""


class Untied(Tied):
    """A head with weights and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 50)


@pytest.mark.parametrize("make", [Tied, Untied])
@pytest.mark.parametrize("scheme", SCHEMES_OF_WEIGHTS)
def test_every_scheme(scheme: str, make: type[Tied]) -> None:
    static = scheme == "int8_static"
    entry: Any = {"scheme": scheme, "act_scale": 1 / 127} if static else scheme
    reference, model = pair(make, config={"head": entry})
    row = model.fxquant_plan.weight("head.weight")
    tied = make is Tied
    assert row.form == scheme + ("+table" if tied else "")
    assert row.reason.startswith("config 'head'")
    assert model.fxquant_plan.rewrites == {"linear": 1}
    assert [weight.fqn for weight in model.fxquant_plan.quantized] == [row.fqn]
    out = call(model)
    assert counts(model) == (1, 0, 0)
    table = reference.embed.weight.detach().clone()
    assert torch.equal(model.embed(IDS), table[IDS])
    reference.embed = nn.Embedding.from_pretrained(table)  # look-ups stay exact, tied or not
    with torch.no_grad():
        reference.head.weight = nn.Parameter(model.head.weight.dequantize())
    act = SCHEMES[scheme].act
    assert error(out, call(reference)) < (1e-5 if act is None else TOLERANCE[act.type.bits])
    assert error(model.head.weight.dequantize(), table if tied else model.head.weight.dequantize()) < 0.2


def test_the_default_scheme_leaves_a_head_alone() -> None:
    case = BY_NAME["llama"]
    with fxquant.meta_init():
        model = case.build()
    plan = fxquant.plan(model, scheme="int8", example_inputs=case.inputs())
    assert plan.weight("lm_head").reason == "lm_head: heads stay float unless a config entry asks"


def test_a_static_head_without_its_scale() -> None:
    with fxquant.meta_init():
        model = Tied()
    options: dict[str, Any] = {"scheme": "none", "config": {"head": "int8_static"}, "example_inputs": (IDS,)}
    row = fxquant.plan(model, **options).weight("head")
    assert row.form == "float"
    assert "needs the activation's scale" in row.reason


def compiled(name: str, config: dict[str, str]) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    case = BY_NAME[name]
    reference = case.build()
    with fxquant.meta_init():
        model = case.build()
    state = {key: value.clone() for key, value in reference.state_dict().items()}
    options: dict[str, Any] = {"scheme": "int8", "config": config, "example_inputs": case.inputs()}
    fxquant.compile(model, state, **options)
    return reference, model, run(case, reference), run(case, model)


ZOO_CASES: list[tuple[str, dict[str, str], dict[str, str], int, float]] = [
    ("gpt2", {"lm_head": "int4_g32"}, {"transformer.wte": "int4_g32+table"}, 9, 0.25),
    (
        "gpt2",
        {"wte": "int8", "wpe": "int8"},
        {"transformer.wte": "int8", "wpe": "int8_weight_only"},
        11,
        0.06,
    ),
    (
        "llama",
        {"lm_head": "fp8", "embed_tokens": "int8"},
        {"lm_head": "fp8", "embed_tokens": "int8_weight_only"},
        16,
        0.06,
    ),
]


@pytest.mark.parametrize(("name", "config", "forms", "uses", "tolerance"), ZOO_CASES)
def test_architectures(
    name: str, config: dict[str, str], forms: dict[str, str], uses: int, tolerance: float
) -> None:
    _, model, expected, got = compiled(name, config)
    plan = model.fxquant_plan
    found = {
        short: weight.form for short in forms for weight in plan.weights if f"{short}.weight" in weight.fqn
    }
    assert found == forms
    assert sum(plan.rewrites.values()) == uses
    assert counts(model) == (uses, 0, 0)
    assert error(got, expected) < tolerance
