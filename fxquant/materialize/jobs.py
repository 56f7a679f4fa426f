"""What a load consists of: tiles of recipes, in batches, in an order."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxquant.materialize.recipes import Recipe
from fxquant.materialize.tiles import ReadPart, Tile
from fxquant.timeline import Moment

LOOKAHEAD = 4
"""How many batches, for each worker, may be begun before the oldest one is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One tile of one recipe."""

    recipe: Recipe
    tile: Tile

    def key(self, part: ReadPart) -> str:
        """The stored tensor that a part is of."""
        return self.recipe.keys[part.index]

    def start(self, part: ReadPart) -> int:
        """The first byte of a part in the stored tensor."""
        return self.recipe.start(part.index) + part.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Jobs that one worker does after one read.

    ``shared``: the jobs need the same tensors, each of which is read once for all of them.
    ``buffer_bytes`` go through a buffer: the worker's, or one of the batch's ``own`` where it needs
    more than tiles do. ``transient`` are bytes of values in between and of an own buffer.
    """

    jobs: tuple[Job, ...]
    read_bytes: int
    buffer_bytes: int
    transient: int
    shared: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Batches in their order, and what each worker holds while it works on them."""

    batches: tuple[Batch, ...]
    workers: int
    tile_bytes: int
    buffer_bytes: int
    scratch_bytes: int
    order: str
    reads: int
    device: str = "cpu"
    timeline: tuple[Moment, ...] = field(default=(), repr=False)

    @property
    def peak(self) -> dict[str, int]:
        """Predicted peak by device type."""
        peak: dict[str, int] = {self.device: 0}
        for moment in self.timeline:
            for device, size in moment.memory.items():
                peak[device] = max(peak.get(device, 0), size)
        return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a schedule is made for. ``in_memory``: the source's tensors are in memory anyway."""

    workers: int
    tile_bytes: int
    order: str = "file"
    device: str = "cpu"
    in_memory: bool = False
