"""Which scheme for which layer: refined names, scales, fused parts, configs of checkpoints, rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant.cli import main
from fxquant.config import QuantConfig, make_config
from fxquant.errors import ConfigError, RefusedError
from fxquant.form import Form
from fxquant.scheme import REFINEMENTS, SCHEMES, QuantSpec, find_scheme
from tests.schemes.models import ALL, X, compiled, error, reference, run, state, weights


@pytest.mark.parametrize("name", ALL)
def test_texts_are_read_back(name: str) -> None:
    scheme = find_scheme(name)
    for spec in (scheme.weight, scheme.act):
        assert spec is None or QuantSpec.parse(str(spec)) == spec
    form = Form(scheme=name, transposed=True, odd_k=True, rotated=True, parts_n=(16, 3), table=True)
    assert Form.parse(str(form)) == form
    assert find_scheme(find_scheme(name).name) == scheme


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("int5", "known: none, int8"),
        ("int8(refine=clip)", "for int4_g32"),
        ("int4_g64(refine=magic)", "refine is one of clip, hqq"),
        ("int4_g64(refine=hqq)", "hqq moves the zero point"),
        (None, "unknown scheme None"),
    ],
)
def test_unknown_names_are_refused(name: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_scheme(name)
    assert REFINEMENTS == ("clip", "hqq")


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"scheme": "int8", "act_scale": 0.1}, "takes no act_scale"),
        ({"scheme": "int8_static", "act_scale": 0.0}, "positive number"),
        ({"scheme": "int8_static", "act_scale": float("nan")}, "positive number"),
        ({"scheme": "int8_static", "act_scale": torch.ones(2)}, "one number"),
        ({"scheme": "int8_static", "act_scale": "big"}, "one number"),
        ({"scheme": "int8_static", "scale": 1}, "unknown entries"),
        ({"act_scale": 1}, "a mapping with 'scheme'"),
        (7, "a mapping with 'scheme'"),
    ],
)
def test_bad_entries_are_refused(entry: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_config("int8", {"first": entry})


def test_a_static_scheme_without_a_scale_stays_float() -> None:
    given = {"scheme": "int8_static", "act_scale": torch.tensor([4 / 127])}
    model = compiled("int8_static", config={"first": given})
    assert set(weights(model)) == {"first.weight"}
    rows = {row.fqn: row for row in model.fxquant_plan.weights}
    assert "act_scale 0.031" in rows["first.weight"].reason
    assert "needs the activation's scale" in rows["ragged.weight"].reason
    with pytest.raises(RefusedError, match="needs the activation's scale"):
        compiled("int8_static", config={"first": given}, strict=True)
    config = QuantConfig.from_dict({"scheme": "int8", "config": {"first": given}})
    assert QuantConfig.from_dict(config.to_dict()) == config


def test_layers_mix_schemes() -> None:
    model = compiled("int8", config={"first": "fp8", "ragged": "int4_g64_asym(refine=clip)", "conv": None})
    forms = {name: str(weight.form) for name, weight in weights(model).items()}
    assert forms == {
        "first.weight": "fp8",
        "ragged.weight": "int4_g64_asym(refine=clip).odd",
        "fused": "int8",
    }
    assert error(run(model), reference(state())) < 0.2
    assert set(model.fxquant_plan.kernels) >= {"fxquant::scaled_mm", "fxquant::weight_only_mm"}


def test_the_config_of_a_checkpoint(tmp_path: Path) -> None:
    model = compiled("int8", config={"first": "int4_g32"}, ignore=["conv"])
    fxquant.save_checkpoint(model, tmp_path / "saved")
    config = QuantConfig.from_checkpoint(tmp_path / "saved")
    assert config == QuantConfig(scheme="int8", entries=(("first", "int4_g32"),), ignore=("conv",))
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="no config of a quantized checkpoint"):
            QuantConfig.from_checkpoint(path)


def test_parts_of_a_fused_weight() -> None:
    config = make_config("int8", {"gate_proj": "fp8", "up_proj": "fp8"})
    parts = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    assert config.choose_for_parts(["mlp.gate_up"], parts).scheme.name == "fp8"
    assert config.choose_for_parts(["mlp.gate_up"], parts[:1]).scheme.name == "int8"
    config = make_config("int8", {"gate_proj": "fp8"})
    with pytest.raises(ConfigError, match=r"mlp\.gate_up is made of parts .*gate_proj.weight: fp8"):
        config.choose_for_parts(["mlp.gate_up"], parts)
    config = make_config("int8", {"gate_up": "int4_g32", "gate_proj": "fp8"})
    assert config.choose_for_parts(["mlp.gate_up"], parts).scheme.name == "int4_g32"


def outlying() -> dict[str, Tensor]:
    values = state()
    values["first.weight"][:, 3] *= 30
    return values


@pytest.mark.parametrize("name", ["int8", "int4_channel", "w4a8_g128", "int8_weight_only"])
def test_rotation_spreads_outliers(name: str) -> None:
    x = X.clone()
    x[..., 7] *= 20
    want = reference(outlying(), x)
    plain, rotated = (compiled(name, outlying(), rotate=on) for on in (False, True))
    assert str(rotated.first.weight.form).endswith(".rot")
    assert rotated.ragged.weight.form.rotated is False  # K is odd
    assert "not rotated: K is odd" in rotated.fxquant_plan.explain("ragged")
    assert error(rotated.first.weight.dequantize(), outlying()["first.weight"]) < 0.7 * error(
        plain.first.weight.dequantize(), outlying()["first.weight"]
    )
    assert error(run(rotated, x), want) < error(run(plain, x), want)
    with torch.no_grad():
        assert error(rotated.first(x), nn.functional.linear(x, *_first())) < 0.2


def _first() -> tuple[Tensor, Tensor]:
    return outlying()["first.weight"], outlying()["first.bias"]


def test_rotation_is_checked() -> None:
    with pytest.raises(ConfigError, match="expected True or False"):
        compiled("int8", rotate="yes")


def test_the_table_of_schemes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schemes", "--target", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[::2]] == [n for n in SCHEMES if n != "none"]
    assert all(line.startswith("  cpu  fxquant") and line.endswith(")") for line in lines[1::2])
