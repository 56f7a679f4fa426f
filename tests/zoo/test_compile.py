"""Every architecture of the zoo, compiled from its checkpoint: same numbers, all linears found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant
from zoo.case import ROUTER, run
from zoo.models import ZOO, ZooCase
from zoo.random_checkpoint import write_checkpoint

BY_NAME = {case.name: case for case in ZOO}

# Relative Frobenius errors. "none" runs the kernels of eager mode on the same values: at most the
# order of a sum may differ, a few units of 2^-24. In bfloat16 the unit is 2^-8, and a sum in another
# order costs one of them. int8 rounds weights and activations by 0.6 % each; test_models shows that
# noise of that size in the weights alone moves no output of the zoo by more than 5 %.
TOLERANCE = {"none": 1e-6, "none, bfloat16": 2**-8, "int8": 6e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A case with its checkpoint on disk and the output that the eager reference gives."""

    case: ZooCase
    folder: Path
    expected: Tensor


def store(case: ZooCase, folder: Path, **options: Any) -> Stored:
    """Write a checkpoint of ``case``; its weights and the eager output are those of float32."""
    reference = write_checkpoint(case, folder, **options)
    return Stored(case=case, folder=folder, expected=run(case, reference))


@pytest.fixture(scope="module")
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return store(request.param, tmp_path_factory.mktemp(request.param.name))


def cases(*names: str) -> pytest.MarkDecorator:
    """Parametrizes ``stored`` over the cases of these names, over all without any."""
    chosen = [BY_NAME[name] for name in names] if names else list(ZOO)
    return pytest.mark.parametrize("stored", chosen, ids=lambda case: case.name, indirect=True)


def compiled(stored: Stored, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """The model of ``stored``, built without weights and compiled from its checkpoint."""
    with fxquant.meta_init():
        model = stored.case.build().to(dtype)
    assert all(p.is_meta for p in model.parameters())
    assert fxquant.compile(model, stored.folder, backend="cpu", **options) is model
    return model


def check_output(stored: Stored, model: nn.Module, tolerance: float) -> None:
    got, expected = run(stored.case, model).float(), stored.expected.float()
    assert (got - expected).norm() / expected.norm() <= tolerance


def check_plan(case: ZooCase, plan: fxquant.Plan) -> None:
    """Exactly the linears are quantized; every other matrix is loaded as it is, with a reason."""
    assert len(plan.quantized) == (case.linears if plan.scheme == "int8" else 0)
    for weight in plan.weights:
        if weight.quantized:
            assert not any(fnmatchcase(weight.fqn, pattern) for pattern in case.floats), weight.fqn
            assert weight.resident_bytes < weight.float_bytes
        elif len(weight.shape) >= 2:
            assert weight.reason, weight.fqn
            assert weight.resident_bytes == weight.float_bytes


def check_run(model: nn.Module) -> None:
    """One graph, in which every use that was planned is rewritten; nothing ran beside it."""
    report = fxquant.report(model)
    assert (report.fallbacks, report.eager_linears, report.unnormalized) == (0, 0, ())
    assert sum(report.graphs.values()) == 1
    assert report.rewritten == report.plan.rewrites["linear"]


# Static sizes for one, symbolic ones for the other: both ways are run, and static ones trace three
# times as fast.
@pytest.mark.parametrize(("scheme", "dynamic"), [("none", False), ("int8", True)], ids=["none", "int8"])
@cases()
def test_compile(stored: Stored, scheme: str, dynamic: bool, capfd: pytest.CaptureFixture[str]) -> None:
    case = stored.case
    model = compiled(stored, scheme=scheme, dynamic=dynamic, example_inputs=case.inputs())
    plan = model.fxquant_plan
    assert "def forward" not in capfd.readouterr().err  # what export prints where it fails
    check_plan(case, plan)
    check_output(stored, model, TOLERANCE[scheme])
    if case.whole:
        assert plan.capture == "whole model, example_inputs"
        check_run(model)
    else:
        assert "submodules" in plan.capture
        assert plan.rewrites["linear"] >= len(plan.quantized)
        assert not any("module walk" in use for weight in plan.quantized for use in weight.uses)
        check_broken_run(model)


def check_broken_run(model: nn.Module) -> None:
    """Several graphs, all rewritten; layers that share a frame share its graph."""
    report = fxquant.report(model)
    assert (report.fallbacks, report.eager_linears, report.unnormalized) == (0, 0, ())
    assert sum(report.graphs.values()) > 1
    assert (report.rewritten > 0) == bool(report.plan.quantized)


@pytest.mark.parametrize("name", [case.name for case in ZOO if ROUTER in case.floats.values()])
def test_routers_are_listed(name: str) -> None:
    """A plan without a checkpoint shows that routers stay float and why, and that experts do not."""
    case = BY_NAME[name]
    with fxquant.meta_init():
        model = case.build()
    plan = fxquant.plan(model, backend="cpu", scheme="int8", example_inputs=case.inputs())
    lines = {line.split()[0]: line for line in str(plan).splitlines() if line.strip()}
    experts = [weight for weight in plan.weights if len(weight.shape) == 3]
    assert experts
    assert all(weight.form.startswith("int8") for weight in experts)
    for weight in matching(plan, ROUTER, case):
        assert weight.float_bytes == 4 * model.get_parameter(weight.fqn).numel()
        assert weight.resident_bytes == weight.float_bytes
        assert (weight.form, weight.scheme) == ("float", "none")
        assert weight.reason in lines[weight.fqn]


def matching(plan: fxquant.Plan, why: str, case: ZooCase) -> Iterator[Any]:
    """The rows of ``plan`` for the floats of ``case`` that have the reason ``why``."""
    patterns = [pattern for pattern, reason in case.floats.items() if reason == why]
    found = [w for w in plan.weights if any(fnmatchcase(w.fqn, pattern) for pattern in patterns)]
    assert found
    yield from found


@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_bfloat16(tmp_path: Path, scheme: str) -> None:
    """A bfloat16 model from a bfloat16 checkpoint, against the same model in eager mode."""
    case = BY_NAME["llama"]
    eager = write_checkpoint(case, tmp_path, dtype=torch.bfloat16).to(torch.bfloat16)
    stored = Stored(case=case, folder=tmp_path, expected=run(case, eager))
    model = compiled(stored, torch.bfloat16, scheme=scheme, example_inputs=case.inputs())
    assert {w.dtype for w in model.fxquant_plan.weights if w.kind == "parameter"} == {"bfloat16"}
    assert run(case, model).dtype == torch.bfloat16
    check_plan(case, model.fxquant_plan)
    check_output(stored, model, TOLERANCE["none, bfloat16" if scheme == "none" else scheme])
    check_run(model)


def test_shards(tmp_path: Path) -> None:
    """The plan names the file of each tensor; the constants are the same as from one file."""
    case = BY_NAME["qwen3_moe"]
    stored = store(case, tmp_path, shards=2)
    model = compiled(stored, scheme="int8", example_inputs=case.inputs())
    files = {Path(part.file).name for w in model.fxquant_plan.weights for part in w.stored if part.file}
    assert files == {path.name for path in tmp_path.glob("*.safetensors")}
    assert len(files) > 1
    check_plan(case, model.fxquant_plan)
    check_output(stored, model, TOLERANCE["int8"])
    check_run(model)


@cases("llama", "bert", "vit", "whisper")
def test_inputs_from_the_config(stored: Stored) -> None:
    """The plan is the same as with example inputs, but for the line that says where they come from."""
    case = stored.case
    model = compiled(stored, scheme="int8")
    plan = model.fxquant_plan
    assert plan.capture == "whole model, inputs built from the model's config"
    check_plan(case, plan)
    with fxquant.meta_init():
        again = case.build()
    given = fxquant.plan(again, stored.folder, backend="cpu", scheme="int8", example_inputs=case.inputs())
    assert plan.diff(given) == f"capture: {plan.capture} -> {given.capture}"
    check_output(stored, model, TOLERANCE["int8"])
    check_run(model)


@cases("flux")
def test_module_walk(stored: Stored) -> None:
    """No inputs and no builder: linear modules are planned by their type, and run time agrees."""
    model = compiled(stored, scheme="int8")
    plan = model.fxquant_plan
    assert plan.capture == "module walk: no example_inputs"
    check_plan(stored.case, plan)
    assert all(weight.reason for weight in plan.weights)
    check_output(stored, model, TOLERANCE["int8"])
    check_run(model)
