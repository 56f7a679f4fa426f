"""Mixtures of experts of transformers, compiled from per-expert checkpoints: each way to run the experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import ByHand, quantized_names, round_weights
from torch import Tensor, nn

import fxquant
from reference import error
from zoo.case import ZooCase, run
from zoo.models import ZOO
from zoo.random_checkpoint import write_checkpoint

MOE = {case.name: case for case in ZOO if case.name in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")}
WAYS = ("eager", "grouped_mm", "batched_mm")

# Codes and sums are the same; sums over experts and scales have other orders: units of 2^-24, which may
# move an activation from one code to the next.
SAME = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A case with its checkpoint, and what the quantized model gives by hand."""

    case: ZooCase
    folder: Path
    names: set[str]
    expected: dict[str, Tensor]


@pytest.fixture(scope="module", params=MOE)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    case = MOE[request.param]
    folder = tmp_path_factory.mktemp(case.name)
    model: Any = write_checkpoint(case, folder)
    model.set_experts_implementation("eager")
    names = quantized_names(model)
    with ByHand(model, names) as mode:
        expected = {"int8": run(case, model)}
    assert mode.products > len(names)  # several experts are hit
    round_weights(model)
    expected["int8_weight_only"] = run(case, model)
    return Stored(case=case, folder=folder, names=names, expected=expected)


def compiled(stored: Stored, way: str, scheme: str, **options: Any) -> Any:
    with fxquant.meta_init():
        model: Any = stored.case.build()
    model.set_experts_implementation(way)
    return fxquant.compile(
        model, stored.folder, scheme=scheme, example_inputs=stored.case.inputs(), **options
    )


def check_run(model: nn.Module) -> None:
    """One graph, in which all that was planned is rewritten; nothing ran beside it."""
    report = fxquant.report(model)
    assert (report.fallbacks, report.eager_linears, report.unnormalized) == (0, 0, ())
    assert sum(report.graphs.values()) == 1
    assert report.rewritten == report.plan.rewrites["linear"]


@pytest.mark.parametrize(
    ("way", "scheme"), [*((way, "int8") for way in WAYS), ("grouped_mm", "int8_weight_only")]
)
def test_same_numbers_as_by_hand(stored: Stored, way: str, scheme: str) -> None:
    model = compiled(stored, way, scheme)
    plan = model.fxquant_plan
    assert {weight.fqn for weight in plan.quantized} == stored.names
    assert error(run(stored.case, model), stored.expected[scheme]) < SAME
    check_run(model)
    replaced = any("'fxquant'" in note for note in plan.notes)
    assert replaced == (way == "eager")
    assert model.config._experts_implementation == ("fxquant" if way == "eager" else way)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_bfloat16(tmp_path: Path) -> None:
    """The product of the experts is another op here: ``aten._grouped_mm``."""
    case = MOE["mixtral"]
    eager: Any = write_checkpoint(case, tmp_path, dtype=torch.bfloat16).to(torch.bfloat16)
    eager.set_experts_implementation("eager")
    with ByHand(eager, quantized_names(eager)):
        expected = run(case, eager)
    with fxquant.meta_init():
        model: Any = case.build().to(torch.bfloat16)
    model = fxquant.compile(model, tmp_path, scheme="int8", example_inputs=case.inputs())
    experts = model.fxquant_plan.weight("model.layers.0.mlp.experts.down_proj")
    assert experts.uses == ("aten._grouped_mm",)
    got = run(case, model)
    assert got.dtype == torch.bfloat16
    assert error(got, expected) < 2e-2  # sums of experts in another order, and units of 2^-8
    check_run(model)


def test_plan_tells_of_experts_and_routers(stored: Stored) -> None:
    with fxquant.meta_init():
        model: Any = stored.case.build()
    model.set_experts_implementation("eager")
    inputs = stored.case.inputs()
    plan = fxquant.plan(model, stored.folder, scheme="int8", example_inputs=inputs, strict=True)
    assert model.config._experts_implementation == "eager"  # a plan changes nothing
    experts = [w for w in plan.weights if ".experts." in w.fqn and len(w.shape) == 3]
    assert experts
    for weight in experts:
        assert weight.form in ("int8", "int8.t")
        assert weight.form.endswith(".t") == (stored.case.name == "gpt_oss")
        assert weight.tiles == weight.shape[0]  # small experts: one tile for each
        count = weight.shape[0] * weight.shape[1] * weight.shape[2]
        rows = weight.shape[0] * weight.shape[2 if weight.form.endswith(".t") else 1]
        assert weight.resident_bytes == count + 4 * rows
        assert weight.transient_bytes < weight.float_bytes
    routers = [w for w in plan.weights if w.reason.startswith("router")]
    assert len(routers) == len(experts) // 2
    assert not any(router.quantized for router in routers)


def test_a_router_is_quantized_if_an_entry_asks(stored: Stored) -> None:
    name = "router" if stored.case.name == "gpt_oss" else "gate"
    config = {f"mlp.{name}.weight": "int8"}
    model = compiled(stored, "grouped_mm", "int8", config=config)
    routers = [weight for weight in model.fxquant_plan.quantized if weight.fqn.endswith(f"mlp.{name}.weight")]
    assert len(routers) == (1 if stored.case.name == "deepseek_v3" else 2)
    assert run(stored.case, model).isfinite().all()
    check_run(model)


def test_ignored_experts_stay_float(stored: Stored) -> None:
    model = compiled(stored, "eager", "int8", ignore=["experts"])
    names = {weight.fqn for weight in model.fxquant_plan.quantized}
    assert names == {name for name in stored.names if ".experts." not in name}
    assert run(stored.case, model).isfinite().all()
    check_run(model)
