"""Settings of the simulated device; they travel as environment variables, which the C side reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

SOC = "STUB_CANN_SOC"
CANN = "STUB_CANN_VERSION"
DEVICES = "STUB_CANN_DEVICES"
MEMORY = "STUB_CANN_MEM_MB"
ASYNC = "STUB_CANN_ASYNC"
COPY_RATE = "STUB_CANN_MBPS"
TRACE = "STUB_CANN_TRACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is simulated.

    Args:
        soc: name of the chip as CANN tells it: Ascend910B2 (A2), Ascend910_9391 (A3),
            Ascend950PR_9579 (950), Ascend310P3 (310P).
        cann: version of CANN that is reported, and whose rules are followed.
        devices: number of devices, at most 16.
        memory_mib: memory of one device. What exceeds it is an out-of-memory error. May be changed
            while a process runs, by its variable.
        asynchronous: streams run on threads of their own. Else each copy is done when its call returns.
        copy_mib_per_s: with ``asynchronous``, what a copy is slowed down to; 0 is as fast as memory.
        trace: print the CANN functions that were called and do nothing, to stderr.
    """

    soc: str = "Ascend910B2"
    cann: str = "9.1.0"
    devices: int = 1
    memory_mib: int = 65536
    asynchronous: bool = False
    copy_mib_per_s: int = 0
    trace: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.devices <= 16:
            raise ValueError(f"devices must be in 0..16, got {self.devices}")
        if self.memory_mib <= 0 or self.copy_mib_per_s < 0:
            raise ValueError(f"sizes and rates must be positive, got {self}")
        if self.copy_mib_per_s and not self.asynchronous:
            raise ValueError("copy_mib_per_s needs asynchronous=True")

    def environment(self) -> dict[str, str]:
        """The variables that stand for these settings."""
        return {
            SOC: self.soc,
            CANN: self.cann,
            DEVICES: str(self.devices),
            MEMORY: str(self.memory_mib),
            ASYNC: str(int(self.asynchronous)),
            COPY_RATE: str(self.copy_mib_per_s),
            TRACE: str(int(self.trace)),
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """The settings that a set of variables stands for; the defaults for those that are missing."""

        def number(name: str, default: int) -> int:
            return int(environment.get(name) or default)

        return cls(
            soc=environment.get(SOC) or cls.default("soc"),
            cann=environment.get(CANN) or cls.default("cann"),
            devices=number(DEVICES, 1),
            memory_mib=number(MEMORY, 65536),
            asynchronous=bool(number(ASYNC, 0)),
            copy_mib_per_s=number(COPY_RATE, 0),
            trace=bool(number(TRACE, 0)),
        )

    @classmethod
    def default(cls, name: str) -> str:
        """The default of a setting that is a text."""
        return str(cls.__dataclass_fields__[name].default)
