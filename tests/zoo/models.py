"""``ZOO``: every case, one line per family of architectures."""

from __future__ import annotations

from zoo.case import ZooCase
from zoo.diffusion import DIFFUSION
from zoo.encoders import ENCODERS
from zoo.llms import LLMS
from zoo.vlms import VLMS

__all__ = ["ZOO", "ZooCase"]

ZOO: tuple[ZooCase, ...] = (
    *LLMS,
    *ENCODERS,
    *DIFFUSION,
    *VLMS,
)
