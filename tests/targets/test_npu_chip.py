"""Chips and CANN versions from texts and from a device."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fxquant.errors import ConfigError
from fxquant.targets.npu_chip import NpuChip, choose_chip, detect_chip, parse_cann, parse_chip


@pytest.mark.parametrize(
    ("soc", "family"),
    [
        ("Ascend910B1", "A2"),
        ("Ascend910B2C", "A2"),
        ("Ascend910B4-1", "A2"),
        ("Ascend910_9391", "A3"),
        ("Ascend950PR_9579", "950"),
        ("Ascend950DT_950x", "950"),
        ("Ascend310P3", "310P"),
    ],
)
def test_names(soc: str, family: str) -> None:
    chip = parse_chip(f"{soc}, cann=9.0")
    assert chip == NpuChip(soc=soc, family=family, cann=(9, 0, 0))  # type: ignore[arg-type]
    assert parse_chip(str(chip)) == chip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Ascend910A,cann=9.0", "chip 'Ascend910A' is not known"),
        ("Ascend310B1,cann=9.0", "is not known. Known: Ascend910B1"),
        ("Ascend910B2", "the CANN version, on which the limits depend; got nothing"),
        ("Ascend910B2,driver=1", "got driver=1"),
        ("Ascend910B2,cann=nine", "CANN version 'nine' is not understood"),
    ],
)
def test_unknown(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_chip(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("9.0", (9, 0, 0)),
        ("9.0.1", (9, 0, 1)),
        ("8.0.RC1", (8, 0, 0)),
        ("9.1.0-beta.3", (9, 0, 99)),
        ("9.1.1-beta.1", (9, 1, 0)),
        ("10.0.0-alpha", (9, 99, 99)),
    ],
)
def test_versions(text: str, version: tuple[int, int, int]) -> None:
    assert parse_cann(text) == version


def with_device(monkeypatch: pytest.MonkeyPatch, soc: str, number: int = 0, available: bool = True) -> None:
    module, npu, utils = (ModuleType(f"torch_npu{part}") for part in ("", ".npu", ".npu.utils"))
    module._C = SimpleNamespace(_npu_get_soc_version=lambda: number)  # type: ignore[attr-defined]
    utils.get_cann_version = lambda: "9.1.0"  # type: ignore[attr-defined]
    for name, part in (("torch_npu", module), ("torch_npu.npu", npu), ("torch_npu.npu.utils", utils)):
        monkeypatch.setitem(sys.modules, name, part)
    device = SimpleNamespace(is_available=lambda: available, get_device_name=lambda: soc)
    monkeypatch.setattr(torch, "npu", device, raising=False)


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with_device(monkeypatch, "Ascend910_9391")
    assert detect_chip() == choose_chip() == parse_chip("Ascend910_9391,cann=9.1.0")
    assert choose_chip("Ascend910B2,cann=9.0").family == "A2"
    with_device(monkeypatch, "a name of its own", 223)
    assert choose_chip().family == "A2"
    with_device(monkeypatch, "a name of its own", 1)
    with pytest.raises(ConfigError, match="no rules are known for the device"):
        detect_chip()
    with_device(monkeypatch, "Ascend910B2", available=False)
    assert detect_chip() is None


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # type: ignore[arg-type]
    assert detect_chip() is None
    with pytest.raises(ConfigError, match="pass target="):
        choose_chip()
    chip = parse_chip("Ascend310P3,cann=8.5")
    assert choose_chip(chip) is chip
