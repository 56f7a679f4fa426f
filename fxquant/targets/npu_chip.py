"""Which Ascend chip, and which CANN version runs it.

The rules of the NPU depend on both. They come from the device when there is one, else from a text
such as ``"Ascend910B2,cann=9.0"`` or from the dataclass.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from fxquant.errors import ConfigError

Family = Literal["A2", "A3", "950", "310P"]
"""A2: Atlas A2, 800I A2. A3: Atlas A3. 950: Ascend950PR, Ascend950DT. 310P: Atlas inference series."""

_NAMES: tuple[tuple[str, Family], ...] = (
    (r"Ascend910B([1-4][A-Z]?(-\d)?)?", "A2"),
    (r"Ascend910_93\d\d", "A3"),
    (r"Ascend950(PR|DT)(_\w+)?", "950"),
    (r"Ascend310P\d?", "310P"),
)
_SOC_VERSIONS: tuple[tuple[range, Family], ...] = (
    (range(220, 226), "A2"),
    (range(250, 260), "A3"),
    (range(260, 270), "950"),
    (range(200, 206), "310P"),
)
_CANN = re.compile(r"(?P<major>\d+)\.(?P<minor>\d+)(\.(?P<patch>\d+))?(?P<rest>.*)")
_PRE_RELEASE = re.compile(r"[.-]?(alpha|beta|dev)", re.IGNORECASE)

EXAMPLE = "Ascend910B2,cann=9.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuChip:
    """A chip by its name (``soc``) and family, and the CANN version ``(major, minor, patch)``."""

    soc: str
    family: Family
    cann: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{self.soc},cann={self.cann_text}"

    @property
    def cann_text(self) -> str:
        """``"9.0.1"``."""
        return ".".join(str(part) for part in self.cann)


def family_of(soc: str) -> Family | None:
    """The family that a chip of this name belongs to; None where no rule is known for it."""
    return next((family for pattern, family in _NAMES if re.fullmatch(pattern, soc)), None)


def parse_cann(text: str) -> tuple[int, int, int]:
    """``"9.0"`` -> (9, 0, 0). A pre-release (``9.1.0-beta.3``) counts as the release before it."""
    match = _CANN.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"CANN version {text!r} is not understood; write it as 9.0 or 9.0.1")
    major, minor, patch = int(match["major"]), int(match["minor"]), int(match["patch"] or 0)
    if not _PRE_RELEASE.match(match["rest"]):
        return major, minor, patch
    if patch:
        return major, minor, patch - 1
    return (major, minor - 1, 99) if minor else (major - 1, 99, 99)


def parse_chip(text: str) -> NpuChip:
    """The chip that a text such as ``"Ascend910B2,cann=9.0"`` names; a ``ConfigError`` if unknown."""
    soc, *options = (part.strip() for part in text.split(","))
    family = family_of(soc)
    if family is None:
        raise ConfigError(
            f"target {text!r}: chip {soc!r} is not known. Known: Ascend910B1..B4 (A2), Ascend910_93xx (A3), "
            f"Ascend950PR_*, Ascend950DT_* (950), Ascend310P* (310P). Example: {EXAMPLE!r}"
        )
    if len(options) != 1 or not options[0].startswith("cann="):
        got = ", ".join(options) or "nothing"
        raise ConfigError(
            f"target {text!r}: after the chip comes the CANN version, on which the limits depend; "
            f"got {got}. Example: {EXAMPLE!r}"
        )
    return NpuChip(soc=soc, family=family, cann=parse_cann(options[0].removeprefix("cann=")))


def detect_chip() -> NpuChip | None:
    """The chip of the current device; None where torch_npu is not loaded or sees no device."""
    torch_npu = sys.modules.get("torch_npu")
    npu = cast("Any", getattr(torch, "npu", None))
    if torch_npu is None or npu is None or not npu.is_available():
        return None
    from torch_npu.npu.utils import get_cann_version

    soc = str(npu.get_device_name())
    family = family_of(soc) or _family_by_version(cast("Any", torch_npu))
    if family is None:
        raise ConfigError(f'no rules are known for the device {soc!r}: pass target="{EXAMPLE}"')
    return NpuChip(soc=soc, family=family, cann=parse_cann(str(get_cann_version())))


def _family_by_version(torch_npu: Any) -> Family | None:
    number = int(torch_npu._C._npu_get_soc_version())
    return next((family for numbers, family in _SOC_VERSIONS if number in numbers), None)


def choose_chip(target: str | NpuChip | None = None) -> NpuChip:
    """The chip to plan for: ``target`` if given, else the device's."""
    if isinstance(target, NpuChip):
        return target
    if target is not None:
        return parse_chip(target)
    chip = detect_chip()
    if chip is None:
        raise ConfigError(
            "no NPU in this process (torch_npu is not loaded or sees none): to plan for one, "
            f'pass target="{EXAMPLE}"'
        )
    return chip
