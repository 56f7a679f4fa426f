"""Cuts the work of a template into tiles of rows.

Ranges are demanded backwards, from the constants through the row rules to the reads. What has no
rule, or mixes the axis with others, runs on the whole: one tile. Scales that span the axis take two
passes: the first finds the maxima, the second writes codes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor, fx

from fxquant.graph import placeholders, value
from fxquant.materialize.demand import demand, find_ends, results_of, walk
from fxquant.materialize.program import ABSMAX, CODES, COPY, Call, End, Program
from fxquant.materialize.row_rules import WHOLE, CrossingError, GrainError, NotSeparableError, Part, Range
from fxquant.materialize.tiles import ReadPart, Tile, Tiling, finished_tile, read_part, whole_tile, writes
from fxquant.scheme import FULL, QuantSpec

fxq = torch.ops.fxquant
aten = torch.ops.aten

HOLD_BYTES = 16 << 20
"""A source of at most so many bytes is held whole rather than read twice."""

DIRECT_BYTES = 2 << 20
"""Bytes of one read that goes straight into a constant."""

MAX_TRIES = 16

Reads = tuple[ReadPart, ...]
Outs = tuple[tuple[int, Range | None], ...]


class Cutter:
    """Makes tiles of one template along one axis of its first constant.

    ``turned``: a float constant beside the codes has its axes in the other order.
    """

    def __init__(self, gm: fx.GraphModule, axis: int, *, turned: bool = False) -> None:
        self.gm = gm
        self.axis = axis
        self.turned = turned
        self.ends = find_ends(gm)
        self.inputs = placeholders(gm)
        self.results = [cast("Tensor", part) for part in results_of(gm)]
        first = self.ends[0]
        whole = self.results[0] if first.spec is None else cast("Tensor", value(first.source))
        self.length = int(whole.shape[axis])
        self.scan = any(end.spec is not None and _scans(end.spec, axis) for end in self.ends)

    def read_bytes(self, start: int, stop: int) -> int:
        """Bytes of ranges that a tile of these rows reads; NotSeparableError if there is none."""
        reads, _ = self.places(start, stop)
        return sum(part.nbytes for part in reads if part.range is not WHOLE)

    def places(self, start: int, stop: int, phase: int = 0) -> tuple[Reads, Outs]:
        """What the tile of rows ``start`` to ``stop`` reads and writes."""
        seeds, _, outs = self._plan(start, stop, phase)
        demands, _ = walk(self.gm, seeds)
        return self._reads(demands), tuple(outs)

    def _reads(self, demands: Mapping[fx.Node, Range | None]) -> Reads:
        return tuple(
            read_part(i, node, demands[node]) for i, node in enumerate(self.inputs) if node in demands
        )

    def tile(self, start: int, stop: int, phase: int = 0) -> Tile:
        """The tile of rows ``start`` to ``stop``."""
        seeds, ends, outs = self._plan(start, stop, phase)
        demands, parts_of = walk(self.gm, seeds)
        return self._made(tuple(ends), demands, parts_of, tuple(outs), phase)

    def _plan(
        self, start: int, stop: int, phase: int
    ) -> tuple[dict[fx.Node, Range | None], list[End], list[tuple[int, Range | None]]]:
        """What a tile starts from: ranges of the ends' sources, the ends, the parts of constants."""
        seeds: dict[fx.Node, Range | None] = {}
        outs: list[tuple[int, Range | None]] = []
        ends: list[End] = []
        for end in self.ends:
            if end.spec is None and phase:
                continue  # written in the first pass
            wanted, parts = self._wanted(end, start, stop)
            demand(seeds, end.source, wanted)
            kind = end.kind if not self.scan or end.spec is None else (CODES if phase else ABSMAX)
            ends.append(End(kind=kind, source=end.source, outs=end.outs, spec=end.spec))
            if kind == CODES:  # the maxima give one of them
                known = end.outs[end.spec.names.index(end.spec.scanned)] if end.spec else None
                parts = [part for part in parts if part[0] != known]
            outs += [] if kind == ABSMAX else parts
        return seeds, ends, outs

    def _wanted(self, end: End, start: int, stop: int) -> tuple[Range, list[tuple[int, Range | None]]]:
        """The range of an end's source, and the parts of the constants that it fills."""
        if end.spec is None:
            index = end.outs[0]
            axis = 1 - self.axis if self.turned and index else self.axis
            return Range(axis, start, stop), [(index, Range(axis, start, stop))]
        spec, size = end.spec, int(cast("Tensor", value(end.source)).shape[self.axis])
        wanted = Range(self.axis, start, stop)
        parts: list[tuple[int, Range | None]] = []
        for name, index in zip(spec.names, end.outs, strict=True):
            side = _side(spec, name, self.axis)
            if side == FULL:
                parts.append((index, WHOLE))
                continue
            if start % side or (stop % side and stop != size):
                raise GrainError(side, stop - start)
            parts.append((index, Range(self.axis, start // side, -(-stop // side))))
        return wanted, parts

    def _made(
        self,
        ends: tuple[End, ...],
        demands: Mapping[fx.Node, Range | None],
        parts_of: Mapping[fx.Node, Part],
        outs: tuple[tuple[int, Range | None], ...],
        phase: int,
    ) -> Tile:
        names: dict[fx.Node, fx.Node] = {}
        calls = []
        for node in self.gm.graph.nodes:
            part = parts_of.get(node)
            if part is None:
                continue
            if part.target is None:
                (given,) = part.ranges
                names[node] = names.get(given, given)
                continue
            args, kwargs = fx.node.map_arg((part.args, dict(part.kwargs)), lambda n: names.get(n, n))
            calls.append(Call(node=node, target=part.target, args=args, kwargs=kwargs))
        ends = tuple(
            End(kind=end.kind, source=names.get(end.source, end.source), outs=end.outs, spec=end.spec)
            for end in ends
        )
        reads = self._reads(demands)
        inputs = tuple((part.index, self.inputs[part.index]) for part in reads)
        return finished_tile(inputs, calls, ends, reads, outs, phase)


def _scans(spec: QuantSpec, axis: int) -> bool:
    """Whether tiles along ``axis`` need maxima of the whole; NotSeparableError if that is not enough."""
    spans = spec.block[axis] == FULL
    if spans and (spec.zero or spec.refine):
        raise NotSeparableError(f"{spec}: zero points and refined scales need the whole of their blocks")
    return spans or spec.two_level


def _side(spec: QuantSpec, name: str, axis: int) -> int:
    """How many rows or columns of the weight one of a constant stands for; FULL: all of them."""
    if name == "global_scale":
        return FULL
    if name == "codes":
        return 2 if axis == 1 and spec.packed else 1
    return spec.block[axis]


def make_tiling(gm: fx.GraphModule, tile_bytes: int) -> Tiling:
    """The tiles of a template, of about ``tile_bytes`` bytes of reads each."""
    direct = tuple(_direct_tiles(gm))
    if direct:
        return Tiling(tiles=direct)
    whole = whole_tile(gm)
    written = next((node.target for node in gm.graph.nodes if writes(node)), None)
    if written is not None:
        return Tiling(tiles=(whole,), reason=f"{written} writes in place")
    shape = tuple(results_of(gm)[0].shape)
    if not shape or whole.read_bytes <= tile_bytes or 0 in shape:
        return Tiling(tiles=(whole,))
    hold = whole.read_bytes <= min(HOLD_BYTES, 8 * tile_bytes)
    reasons = []
    for axis in range(min(len(shape), 2)):
        for turned in (False, True):
            try:
                cutter = Cutter(gm, axis, turned=turned)
                if cutter.scan and hold:
                    reasons.append("small enough to be held whole")
                    continue
                return Tiling(tiles=_with_held(tuple(_cut(cutter, tile_bytes))))
            except NotSeparableError as error:
                reasons.append(str(error))
    return Tiling(tiles=(whole,), reason=reasons[0])


def _direct_tiles(gm: fx.GraphModule) -> Iterator[Tile]:
    """Tiles of a template that computes nothing: each constant is a stored tensor as it is."""
    ends, inputs = find_ends(gm), placeholders(gm)
    dtypes = [result.dtype for result in results_of(gm)]
    sources = [end.source for end in ends]
    plain = set(sources) == set(inputs) and len(sources) == len(inputs)
    checked = bool(gm.graph.find_nodes(op="call_function", target=fxq.check_same.default))
    if (
        not plain
        or checked
        or any(cast("Tensor", value(end.source)).dtype != dtypes[end.outs[0]] for end in ends)
    ):
        return
    for end in ends:
        index = inputs.index(end.source)
        whole = read_part(index, end.source, WHOLE)
        program = Program(inputs=((index, end.source),), calls=(), ends=(end,))
        for start in range(0, max(whole.nbytes, 1), DIRECT_BYTES):
            part = replace(whole, start=start, stop=min(start + DIRECT_BYTES, whole.stop))
            yield Tile(program=program, reads=(part,), outs=((end.outs[0], WHOLE),), direct=start)


def _cut(cutter: Cutter, tile_bytes: int) -> Iterator[Tile]:
    """Tiles over the whole axis: within pieces that come from one input, at multiples of the grain."""
    pieces, grain = _pieces(cutter)
    for phase in (0, 1) if cutter.scan else (0,):
        for low, high in pieces:
            rows = max(1, tile_bytes * grain // max(cutter.read_bytes(low, min(low + grain, high)), 1))
            step = max(grain, rows // grain * grain)
            for tile in _equal_tiles(cutter, low, step, (high - low) // step, phase):
                yield _as_direct(tile, cutter)
            rest = high - (high - low) % step
            if rest < high:
                yield _as_direct(cutter.tile(rest, high, phase), cutter)


def _with_held(tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """The tiles, with the reads that several of them need whole marked as held."""
    computed = [tile for tile in tiles if tile.direct is None]
    counts = Counter(part.index for tile in computed for part in tile.reads if part.range is WHOLE)
    held = {index for index, count in counts.items() if count > 1}
    if not held:
        return tiles
    return tuple(
        replace(tile, reads=tuple(replace(part, held=part.index in held) for part in tile.reads))
        if tile.direct is None
        else tile
        for tile in tiles
    )


def _equal_tiles(cutter: Cutter, low: int, step: int, count: int, phase: int) -> Iterator[Tile]:
    """``count`` tiles of ``step`` rows: one program, each as far from the one before as the second is."""
    if not count:
        return
    first = cutter.tile(low, low + step, phase)
    yield first
    if count == 1:
        return
    reads, outs = cutter.places(low + step, low + 2 * step, phase)
    for times in range(1, count):
        yield replace(
            first,
            reads=tuple(_moved_read(a, b, times) for a, b in zip(first.reads, reads, strict=True)),
            outs=tuple((i, _moved(a, b, times)) for (i, a), (_, b) in zip(first.outs, outs, strict=True)),
        )


def _moved_read(first: ReadPart, second: ReadPart, times: int) -> ReadPart:
    """The read ``times`` as far from the first as the second is."""
    by = (second.start - first.start) * times
    moved = _moved(first.range, second.range, times)
    return replace(first, range=moved, start=first.start + by, stop=first.stop + by)


def _moved(first: Range | None, second: Range | None, times: int) -> Range | None:
    if first is WHOLE or second is WHOLE:
        return WHOLE
    by = (second.start - first.start) * times
    return Range(first.axis, first.start + by, first.stop + by)


_KEEPS_ORDER = (aten.unsqueeze.default, aten.reshape.default)


def _as_direct(tile: Tile, cutter: Cutter) -> Tile:
    """The tile with ``direct`` set if its bytes go unchanged into one place."""
    ends, reads = tile.program.ends, tile.reads
    if len(ends) != 1 or ends[0].kind != COPY or len(reads) != 1:
        return tile
    ((index, part),) = tile.outs
    out = cutter.results[index]
    keeps = all(call.target in _KEEPS_ORDER for call in tile.program.calls)
    if not keeps or reads[0].dtype != out.dtype or part is WHOLE or math.prod(out.shape[: part.axis]) != 1:
        return tile
    row = math.prod(int(size) for size in out.shape[part.axis + 1 :]) * out.dtype.itemsize
    return replace(tile, direct=part.start * row, outs=((index, WHOLE),))


def _pieces(cutter: Cutter) -> tuple[list[tuple[int, int]], int]:
    """Pieces of the axis that tiles do not cross, and the grain of tiles in them."""
    pieces, grain = [(0, cutter.length)], 1
    done: list[tuple[int, int]] = []
    while pieces:
        low, high = pieces.pop()
        try:
            cutter.read_bytes(low, high)
        except CrossingError as crossing:
            inner = [low + point * (high - low) for point in crossing.points]
            if any(point.denominator != 1 for point in inner):
                raise NotSeparableError("borders between inputs lie within a row") from crossing
            points = [low, *(int(point) for point in inner), high]
            pieces += [pair for pair in itertools.pairwise(points) if pair[0] < pair[1]]
            continue
        if high - low < cutter.length or grain == 1:
            grain = _grain(cutter, low, high, grain)
        done.append((low, high))
    return sorted(done), grain


def _grain(cutter: Cutter, low: int, high: int, grain: int) -> int:
    """The smallest multiple of ``grain`` that a tile of the piece can have."""
    for _ in range(MAX_TRIES):
        if low + grain >= high:
            return grain
        try:
            cutter.read_bytes(low, low + grain)
        except GrainError as error:
            ratio = Fraction(error.span, grain)
            needed = ratio.denominator * error.grain // math.gcd(error.grain, ratio.numerator)
            grain = math.lcm(grain, needed) if grain % needed else grain * 2
        else:
            return grain
    raise NotSeparableError("no size of tiles fits")
