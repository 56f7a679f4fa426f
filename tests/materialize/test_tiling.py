"""What tiles cover: every byte that is read and written, its size, and the bytes it takes to make."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from templates import (
    INT8,
    INT8_T,
    TABLE,
    hold_bytes,
    maxima_of,
    run_tile,
    template,
    values,
    with_results,
)
from test_row_rules import gptq_like, mx_like, rope
from torch import Tensor, fx

from fxquant.materialize.demand import results_of
from fxquant.materialize.meter import LiveBytes
from fxquant.materialize.recipes import Reads, make_template
from fxquant.materialize.tiles import Tiling
from fxquant.materialize.tiling import make_tiling

Case = tuple[fx.GraphModule, list[Tensor]]
W = values(512, 64)


def merged(*given: Tensor) -> Tensor:
    return torch.cat([torch.stack(given[:2]), torch.stack(given[2:])], 1)


def case(tensors: Sequence[Tensor], convert: Callable[..., Tensor] | None = None, **options: object) -> Case:
    return template(tensors, convert, **options), list(tensors)


CASES: dict[str, Callable[[], Case]] = {
    "as it is": lambda: case([W]),
    "cast": lambda: case([W.float()]),
    "int8": lambda: case([W], form=INT8),
    "int8 of float32": lambda: case([W.float()], form=INT8),
    "table": lambda: case([W], form=TABLE),
    "transposed": lambda: case([W], form=INT8_T),
    "tied": lambda: case([W, W], same=1, form=INT8),
    "rope": lambda: case([W], lambda w: rope(w, 16), form=INT8),
    "cat": lambda: case([W[:100], W[100:]], lambda a, b: torch.cat([a, b]), form=INT8),
    "experts": lambda: case([values(64, 32, seed=i) for i in range(4)], merged),
    "lora": lambda: case([W, values(512, 8), values(8, 64)], lambda w, b, a: w + b @ a, form=INT8),
    "mx": lambda: (with_results([W], mx_like), [W]),
    "gptq": lambda: case(
        [torch.ones(64, 64, dtype=torch.int32), values(32, 64)], gptq_like, dtype=torch.bfloat16, form=INT8
    ),
    "not separable": lambda: case([W], lambda w: w.flip(0), form=INT8),
}


@pytest.fixture(params=CASES)
def made(request: pytest.FixtureRequest) -> tuple[fx.GraphModule, list[Tensor], Tiling]:
    gm, tensors = CASES[request.param]()
    with hold_bytes(0):
        return gm, tensors, make_tiling(gm, 4096)


def test_each_byte_is_read_once(made: tuple[fx.GraphModule, list[Tensor], Tiling]) -> None:
    """Held reads once, those of a weight with two passes twice."""
    _, tensors, tiling = made
    for index, tensor in enumerate(tensors):
        counts = torch.zeros(tensor.nbytes, dtype=torch.int32)
        held = False
        for tile in tiling.tiles:
            for part in tile.reads:
                if part.index == index and not (part.held and held):
                    counts[part.start : part.stop] += 1
                    held = part.held
        assert counts.unique().tolist() == [1 + tiling.scans]


def test_each_byte_of_the_constants_is_written_once(
    made: tuple[fx.GraphModule, list[Tensor], Tiling],
) -> None:
    gm, tensors, tiling = made
    shapes = [tuple(val.shape) for val in results_of(gm)]
    counts = [torch.zeros(shape, dtype=torch.int32) for shape in shapes]
    for tile in tiling.tiles:
        for index, where in tile.outs:
            count = counts[index]
            if tile.direct is not None:
                size = tensors[tile.reads[0].index].dtype.itemsize
                count = count.view(-1).narrow(0, tile.direct // size, tile.reads[0].nbytes // size)
            elif where is not None:
                count = count.narrow(where.axis, where.start, where.stop - where.start)
            count += 1
    for index, count in enumerate(counts):
        by_maxima = tiling.scans and index == 1  # the scale, written once all maxima are known
        assert count.unique().tolist() == [0 if by_maxima else 1]


def test_tiles_are_of_the_size_that_was_asked_for(
    made: tuple[fx.GraphModule, list[Tensor], Tiling],
) -> None:
    _, tensors, tiling = made
    if tiling.reason or tiling.tiles[0].direct is not None:
        return
    assert max(tile.read_bytes for tile in tiling.tiles) <= 2 * 4096
    assert len(tiling.tiles) <= 2 * sum(t.nbytes for t in tensors) * (1 + tiling.scans) // 4096 + 4


def test_a_tile_takes_no_more_than_it_says(made: tuple[fx.GraphModule, list[Tensor], Tiling]) -> None:
    """Tensors beside reads, scratch and constants, as they are made."""
    gm, tensors, tiling = made
    outs = [torch.empty(tuple(val.shape), dtype=val.dtype) for val in results_of(gm)]
    maxima = maxima_of(tiling, outs)
    for tile in tiling.tiles:
        meter = LiveBytes()
        run_tile(tile, tensors, outs, maxima, meter)
        peak = meter.peak.get("cpu", 0)
        # Programs that only quantize are not metered, so their maxima are not counted.
        maxima_bytes = [12 * outs[end.outs[-1]].numel() for end in tile.program.ends if end.spec]
        known = tile.transient or sum(maxima_bytes)
        assert peak <= known
        if tile.transient and not tiling.scans:
            assert peak >= tile.transient // 2, "far less than was said"


def test_scratch_is_what_quantizing_needs() -> None:
    """A chunk of float32 for ``quantize_into``, which raises if it has less."""
    gm, tensors = CASES["int8"]()
    for tile in make_tiling(gm, 4096).tiles:
        assert tile.scratch == math.prod(tile.reads[0].shape) * 4
        run_tile(tile, tensors, [torch.empty(512, 64, dtype=torch.int8), torch.empty(512, 1)], None)


def test_stored_constants_are_read_where_they_belong() -> None:
    """Nothing runs; reads are pieces of at most 2 MiB."""
    keys, shapes = ("codes", "scale"), ((3000, 1024), (3000, 1))
    reads = Reads(keys=keys, dtypes=(torch.int8, torch.float32), shapes=shapes, stored=True)
    tiling = make_tiling(make_template("w", reads, dtype=torch.bfloat16, form=INT8), 4096)
    assert [tile.direct for tile in tiling.tiles] == [0, 2 << 20, 0]
    assert all(not tile.program.calls and not tile.transient for tile in tiling.tiles)
    assert tiling.peak_bytes == 0


def test_parts_of_merged_weights_go_straight_to_their_places() -> None:
    gm, _ = CASES["experts"]()
    cat = template([W[:100], W[100:]], lambda a, b: torch.cat([a, b]))
    assert all(tile.direct is not None for tile in make_tiling(cat, 4096).tiles)
    assert all(tile.direct is None for tile in make_tiling(gm, 1024).tiles)
    cast = template([W[:100].float(), W[100:].float()], lambda a, b: torch.cat([a, b]))
    assert all(tile.direct is None for tile in make_tiling(cast, 4096).tiles)


def test_small_weights_are_one_tile_and_columns_are_held_before_they_are_read_twice() -> None:
    gm = template([W], form=INT8_T)
    assert len(make_tiling(gm, W.nbytes).tiles) == 1
    held = make_tiling(gm, W.nbytes // 8)
    assert (len(held.tiles), held.reason) == (1, "columns of [512, 64] do not lie together in the file")
    twice = make_tiling(gm, W.nbytes // 16)
    assert twice.scans
    assert [tile.phase for tile in twice.tiles] == sorted(tile.phase for tile in twice.tiles)


def test_tiles_of_a_piece_share_one_program() -> None:
    """Many tiles cost little memory and planning."""
    gm, _ = CASES["rope"]()
    programs = {id(tile.program) for tile in make_tiling(gm, 1024).tiles}
    assert len(programs) == 1


def test_what_is_read_by_rows_far_apart_is_cut_at_its_borders() -> None:
    """Each tile of a permuted weight reads rows that lie together."""
    gm, _ = CASES["rope"]()
    for tile in make_tiling(gm, 4096).tiles:
        (part,) = tile.reads
        assert part.nbytes == math.prod(part.shape) * part.dtype.itemsize
