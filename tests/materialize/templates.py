"""Hand-made recipes, made through the same door as production, and a driver that runs their tiles."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor, fx

from fxquant.checkpoint import FileCheckpoint
from fxquant.form import Form
from fxquant.graph import placeholders
from fxquant.materialize import tiling as tilings
from fxquant.materialize.demand import results_of
from fxquant.materialize.program import ABSMAX, CODES, Maxima
from fxquant.materialize.recipes import LoadGraph, Reads, make_template
from fxquant.materialize.row_rules import WHOLE
from fxquant.materialize.tiles import ReadPart, Tile, Tiling
from fxquant.materialize.tiling import make_tiling
from fxquant.numerics import same_values

Convert = Callable[..., Tensor]
INT8, INT8_T = Form(scheme="int8"), Form(scheme="int8", transposed=True)
TABLE, TABLE_T = Form(scheme="int8", table=True), Form(scheme="int8", transposed=True, table=True)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Random floats."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def reads_of(tensors: Sequence[Tensor], convert: Convert | None = None, *, same: int = 0) -> Reads:
    """Reads of ``tensors`` under the keys k0, k1, ..."""
    return Reads(
        keys=tuple(f"k{i}" for i in range(len(tensors))),
        dtypes=tuple(tensor.dtype for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        convert=convert,
        same=same,
    )


def template(
    tensors: Sequence[Tensor],
    convert: Convert | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    form: Form | None = None,
    same: int = 0,
) -> fx.GraphModule:
    """The template of one weight."""
    return make_template("w", reads_of(tensors, convert, same=same), dtype=dtype, form=form)


def with_results(tensors: Sequence[Tensor], results: Callable[..., tuple[Tensor, ...]]) -> fx.GraphModule:
    """A template with any constants: such as later schemes will make, traced as production does."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from fxquant.capture import make_fake_mode

    with make_fake_mode(), torch.no_grad():
        fakes = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        gm = make_fx(results)(*fakes)
    for i, node in enumerate(placeholders(gm)):
        node.target = node.name = f"r{i}"
    gm.recompile()
    return gm


@contextlib.contextmanager
def hold_bytes(size: int) -> Iterator[None]:
    """Sources over ``size`` bytes are read twice rather than held."""
    before, tilings.HOLD_BYTES = tilings.HOLD_BYTES, size
    try:
        yield
    finally:
        tilings.HOLD_BYTES = before


def part_of(part: ReadPart, tensor: Tensor) -> Tensor:
    """The bytes that a tile reads, cut out of the tensor's bytes as a file would give them."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat[part.start : part.stop].clone().view(part.dtype).view(part.shape)


def run_tile(
    tile: Tile,
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor],
    maxima: Maxima | None,
    meter: contextlib.AbstractContextManager[object] | None = None,
) -> None:
    """Run one tile into ``outs``, its program under ``meter``."""
    reads = [part_of(part, tensors[part.index]) for part in tile.reads]
    if tile.direct is not None:
        flat = outs[tile.outs[0][0]].view(-1).view(torch.uint8)
        flat[tile.direct : tile.direct + tile.reads[0].nbytes] = reads[0].view(-1).view(torch.uint8)
        return
    parts = {
        index: outs[index]
        if where is WHOLE
        else outs[index].narrow(where.axis, where.start, where.stop - where.start)
        for index, where in tile.outs
    }
    scratch = torch.empty(tile.scratch // 4)
    with meter or contextlib.nullcontext():
        tile.program.run(reads, parts, scratch, maxima)


def maxima_of(tiling: Tiling, outs: Sequence[Tensor]) -> Maxima | None:
    """What the tiles of a weight share, if its scales span several tiles."""
    ends = [end for tile in tiling.tiles for end in tile.program.ends if end.kind in (ABSMAX, CODES)]
    return Maxima(outs[ends[0].outs[1]], threading.Lock()) if ends else None


def run_tiling(gm: fx.GraphModule, tiling: Tiling, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The constants by tiles, each in its turn. What no tile writes is seen: it stays 77."""
    outs = [torch.full(tuple(val.shape), 77).to(val.dtype) for val in results_of(gm)]
    maxima = maxima_of(tiling, outs)
    for tile in tiling.tiles:
        run_tile(tile, tensors, outs, maxima)
    return outs


def check_tiled(gm: fx.GraphModule, tensors: Sequence[Tensor], tile_bytes: int) -> Tiling:
    """Tiles must give what the template gives as a whole, to the bit."""
    tiling = make_tiling(gm, tile_bytes)
    expected = gm(*tensors)
    got = run_tiling(gm, tiling, tensors)
    assert len(got) == len(expected)
    for index, (one, two) in enumerate(zip(expected, got, strict=True)):
        assert one.dtype == two.dtype
        assert same_values(one, two), f"constant {index} differs with {len(tiling.tiles)} tiles"
    return tiling


def graph_of(
    *recipes: tuple[str, Sequence[str], Convert | None, Form | None], **tensors: Tensor
) -> LoadGraph:
    """A load graph: ``(fqn, keys, convert, form)`` over named tensors."""
    graph = LoadGraph()
    for fqn, keys, convert, form in recipes:
        given = [tensors[key] for key in keys]
        reads = Reads(
            keys=tuple(keys),
            dtypes=tuple(tensor.dtype for tensor in given),
            shapes=tuple(tuple(tensor.shape) for tensor in given),
            convert=convert,
        )
        graph.add(fqn, reads, dtype=torch.bfloat16, form=form)
    return graph


def saved(path: object, tensors: dict[str, Tensor], **options: object) -> FileCheckpoint:
    """A checkpoint file of ``tensors``."""
    save_file(tensors, str(path))
    return FileCheckpoint(str(path), **options)
