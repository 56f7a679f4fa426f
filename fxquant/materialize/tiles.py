"""One tile of the work of a template, as data; the whole of it as one tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from fxquant.graph import placeholders, value
from fxquant.materialize.demand import find_ends, results_of, whole_part
from fxquant.materialize.program import QUANTIZE, Call, End, Program, measure_on_fakes, scratch_bytes
from fxquant.materialize.row_rules import WHOLE, NotSeparableError, Range

fxq = torch.ops.fxquant


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPart:
    """A part of one read: its position, the range, and the bytes and shape of that range.

    ``held``: several tiles need the same part, so it is read once and kept for them.
    """

    index: int
    range: Range | None
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    held: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One tile: what it reads, what runs, which parts of the constants it writes.

    ``transient`` and ``scratch`` are bytes beside the reads; ``phase`` is 1 for tiles of a second
    pass, which need every tile of the first. ``direct``: the bytes of the only read are those of the
    constant ``outs[0]`` from this offset on, and nothing runs.
    """

    program: Program
    reads: tuple[ReadPart, ...]
    outs: tuple[tuple[int, Range | None], ...]
    transient: int = 0
    scratch: int = 0
    phase: int = 0
    direct: int | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes that this tile alone reads."""
        return sum(part.nbytes for part in self.reads if not part.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """All tiles of a template, and why it has only one if it is not separable."""

    tiles: tuple[Tile, ...]
    reason: str = ""

    @property
    def held_bytes(self) -> int:
        """Bytes of reads that are kept for several tiles."""
        held = {part.index: part.nbytes for tile in self.tiles for part in tile.reads if part.held}
        return sum(held.values())

    @property
    def peak_bytes(self) -> int:
        """Bytes beside the constants while one worker makes them."""
        own = (
            tile.transient + tile.scratch + (tile.read_bytes if tile.direct is None else 0)
            for tile in self.tiles
        )
        return self.held_bytes + max(own)

    @property
    def scans(self) -> bool:
        """Whether the source is read twice."""
        return any(tile.phase for tile in self.tiles)


def read_part(index: int, node: fx.Node, wanted: Range | None) -> ReadPart:
    """The bytes of a range of a stored tensor, which must lie together."""
    stored = cast("Tensor", value(node))
    shape = tuple(int(size) for size in stored.shape)
    total = math.prod(shape) * stored.dtype.itemsize
    if wanted is WHOLE or (wanted.start, wanted.stop) == (0, shape[wanted.axis]):
        return ReadPart(index=index, range=WHOLE, start=0, stop=total, shape=shape, dtype=stored.dtype)
    if math.prod(shape[: wanted.axis]) != 1:
        raise NotSeparableError(f"columns of {list(shape)} do not lie together in the file")
    row = math.prod(shape[wanted.axis + 1 :]) * stored.dtype.itemsize
    part = (*shape[: wanted.axis], wanted.stop - wanted.start, *shape[wanted.axis + 1 :])
    start, stop = wanted.start * row, wanted.stop * row
    return ReadPart(index=index, range=wanted, start=start, stop=stop, shape=part, dtype=stored.dtype)


def finished_tile(
    inputs: tuple[tuple[int, fx.Node], ...],
    calls: list[Call],
    ends: tuple[End, ...],
    reads: tuple[ReadPart, ...],
    outs: tuple[tuple[int, Range | None], ...],
    phase: int,
) -> Tile:
    """The tile with its last uses and its bytes."""
    kept = {end.source for end in ends}
    last: dict[fx.Node, int] = {}
    for i, call in enumerate(calls):
        used: list[fx.Node] = []
        fx.node.map_arg((call.args, dict(call.kwargs)), used.append)
        last.update(dict.fromkeys(used, i))
    done = [
        Call(
            node=call.node,
            target=call.target,
            args=call.args,
            kwargs=call.kwargs,
            last=tuple(n for n, at in last.items() if at == i and n not in kept),
        )
        for i, call in enumerate(calls)
    ]
    program = Program(inputs=inputs, calls=tuple(done), ends=ends)
    transient, shapes = measure_on_fakes(program, [(part.shape, part.dtype) for part in reads])
    scratch = scratch_bytes(program, shapes)
    return Tile(program=program, reads=reads, outs=outs, transient=transient, scratch=scratch, phase=phase)


def whole_tile(gm: fx.GraphModule) -> Tile:
    """The template as one tile."""
    inputs = placeholders(gm)
    ends = find_ends(gm)
    replaced = {node.args[0] for node in cast("Any", gm.graph.output_node().args[0]) if _ends_at(node, ends)}
    needed = {end.source for end in ends}
    calls = []
    for node in gm.graph.nodes:
        skipped = node in replaced or (node.args and node.args[0] in replaced)
        unused = not node.users and node.target is not fxq.check_same.default and not writes(node)
        lost = node not in needed and all(user.op == "output" for user in node.users) and bool(node.users)
        if node.op in ("call_function", "get_attr") and not (skipped or unused or lost):
            part = whole_part(gm, node)
            assert part.target is not None
            calls.append(Call(node=node, target=part.target, args=part.args, kwargs=part.kwargs))
    reads = tuple(read_part(i, node, WHOLE) for i, node in enumerate(inputs))
    outs = tuple((i, WHOLE) for i in range(len(results_of(gm))))
    return finished_tile(tuple(enumerate(inputs)), calls, ends, reads, outs, 0)


def writes(node: fx.Node) -> bool:
    """Whether a node writes into one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _ends_at(node: fx.Node, ends: Sequence[End]) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.target is not fxq.quantize_weight.default:
        return False
    return any(end.kind == QUANTIZE and source.args[0] is end.source for end in ends)
