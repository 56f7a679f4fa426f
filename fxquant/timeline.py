"""Memory over the course of a load: what was predicted and what was measured, in one shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Memory once ``read_bytes`` bytes of the checkpoint have been read.

    ``memory``: bytes of weights, constants and load buffers that are alive, by device type.
    Measured moments also have ``seconds`` since the load began and ``anonymous``, the most anonymous
    resident memory in bytes that the process was seen to have since the moment before, over what it had
    when the load began (None where the system does not tell).
    """

    read_bytes: int
    memory: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None
    anonymous: int | None = None
