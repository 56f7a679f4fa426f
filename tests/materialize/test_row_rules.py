"""Row rules: tiles of every size give what the template gives as a whole, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import (
    INT8,
    INT8_T,
    TABLE,
    TABLE_T,
    check_tiled,
    hold_bytes,
    run_tiling,
    template,
    values,
    with_results,
)
from torch import Tensor, fx

from fxquant.errors import TiedWeightError
from fxquant.materialize.row_rules import RULES, shape_of
from fxquant.materialize.tiling import make_tiling
from fxquant.scheme import QuantSpec

BF16 = torch.bfloat16
SMALL = settings(max_examples=12)
TILES = st.sampled_from([96, 128, 200, 512, 1000, 2048, 8192, 1 << 16])
N = st.integers(1, 40)
FORMS = st.sampled_from([None, INT8, TABLE])


def rope(w: Tensor, heads: int) -> Tensor:
    n, k = w.shape
    return w.view(heads, 2, n // heads // 2, k).transpose(1, 2).reshape(n, k)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda w: w.float(),
    "transpose": lambda w: w.t().contiguous().t(),
    "permute": lambda w: w.view(8, -1, w.shape[1]).permute(1, 0, 2).permute(1, 0, 2).reshape(w.shape),
    "rope": lambda w: rope(w, 4),
    "unrope": lambda w: w.view(4, -1, 2, w.shape[1]).transpose(1, 2).reshape(w.shape),
    "heads split off": lambda w: w.view(8, -1, w.shape[1])[:, :1].reshape(-1, w.shape[1]),
    "slice": lambda w: w[3:-2],
    "slice of columns": lambda w: w[:, 2:7],
    "step": lambda w: w[::2],
    "step with offset": lambda w: w[1:-1:3],
    "step over columns": lambda w: w[:, ::3],
    "steps joined": lambda w: torch.cat([w[::2], w[1::2]]),
    "select": lambda w: w[None][0],
    "select within rows": lambda w: w.view(-1, 8, w.shape[1])[:, 2],
    "chunk": lambda w: w.chunk(2)[1],
    "chunk of columns": lambda w: w.chunk(2, 1)[0],
    "split": lambda w: w.split([5, w.shape[0] - 5])[1],
    "split of columns": lambda w: w.split([1, w.shape[1] - 1], 1)[1],
    "rolled": lambda w: torch.cat([-w[5:], w[:5]]),
    "same twice": lambda w: torch.cat([w, w]),
    "expand": lambda w: w[:, None].expand(-1, 3, -1).reshape(-1, w.shape[1]),
    "bits": lambda w: w.view(torch.int16).view(BF16),
    "bits of other sizes": lambda w: w.view(torch.uint8).view(BF16),
}


@pytest.mark.parametrize("name", VIEWS)
@SMALL
@given(groups=st.integers(1, 6), k=st.integers(8, 40), tile=TILES, form=FORMS)
def test_views(name: str, groups: int, k: int, tile: int, form: object) -> None:
    w = values(groups * 8, k)
    gm = template([w], VIEWS[name], form=form)
    check_tiled(gm, [w], tile)


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_cut(name: str) -> None:
    """Each of them has tiles: none falls back to the whole."""
    w = values(512, 64)
    tiling = check_tiled(template([w], VIEWS[name], form=INT8), [w], 4096)
    assert len(tiling.tiles) > 2, tiling.reason


@SMALL
@given(sizes=st.lists(st.integers(0, 30), min_size=2, max_size=4), tile=TILES, form=FORMS)
def test_cat_along(sizes: list[int], tile: int, form: object) -> None:
    parts = [values(n, 24) for n in sizes]
    check_tiled(template(parts, lambda *p: torch.cat(p), form=form), parts, tile)


@SMALL
@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4), n=N, tile=TILES)
def test_cat_across(sizes: list[int], n: int, tile: int) -> None:
    parts = [values(n, k) for k in sizes]
    check_tiled(template(parts, lambda *p: torch.cat(p, 1), form=INT8), parts, tile)


@SMALL
@given(experts=st.integers(2, 5), n=N, tile=TILES, dtype=st.sampled_from([BF16, torch.float32]))
def test_stack_of_experts(experts: int, n: int, tile: int, dtype: torch.dtype) -> None:
    parts = [values(n, 16, dtype=dtype, seed=i) for i in range(2 * experts)]

    def merged(*given: Tensor) -> Tensor:
        return torch.cat([torch.stack(given[:experts]), torch.stack(given[experts:])], 1)

    check_tiled(template(parts[:experts], lambda *p: torch.stack(p)), parts[:experts], tile)
    check_tiled(template(parts, merged), parts, tile)


@SMALL
@given(n=N, tile=TILES)
def test_cat_that_casts_some_of_its_inputs(n: int, tile: int) -> None:
    parts = [values(n, 16), values(n, 16, dtype=torch.float32)]
    check_tiled(template(parts, lambda *p: torch.cat(p)), parts, tile)


@SMALL
@given(n=N, k=st.integers(1, 40), tile=TILES, form=FORMS)
def test_weight_norm(n: int, k: int, tile: int, form: object) -> None:
    parts = [values(n, k), values(n, 1)]

    def convert(v: Tensor, g: Tensor) -> Tensor:
        return (v.float() * (g.float() / v.float().norm(dim=1, keepdim=True))).to(BF16)

    check_tiled(template(parts, convert, form=form), parts, tile)


@pytest.mark.parametrize("form", [None, INT8])
def test_lora_reads_its_small_side_once(form: object) -> None:
    parts = [values(256, 64), values(256, 8).sign(), values(8, 64).sign()]  # exact in any order
    tiling = check_tiled(template(parts, lambda w, b, a: w + b @ a, form=form), parts, 2048)
    assert len(tiling.tiles) > 4
    assert tiling.held_bytes == parts[2].nbytes
    assert {part.index for tile in tiling.tiles for part in tile.reads if part.held} == {2}


@SMALL
@given(n=N, rank=st.sampled_from([1, 8, 33, 64]), tile=TILES)
def test_lora_by_tiles_differs_at_most_by_rounding(n: int, rank: int, tile: int) -> None:
    """The order in which a product is summed depends on its number of rows, as it does in torch."""
    parts = [values(n, 64), values(n, rank), values(rank, 64)]
    gm = template(parts, lambda w, b, a: w + b @ a)
    (got,) = run_tiling(gm, make_tiling(gm, tile), parts)
    (again,) = run_tiling(gm, make_tiling(gm, tile), parts)
    assert torch.equal(got, again)
    torch.testing.assert_close(got, gm(*parts)[0], rtol=2**-6, atol=2**-5)


def quantized(block: tuple[int, int]) -> Callable[[Tensor], list[Tensor]]:
    spec = str(QuantSpec(block=block))
    return lambda w: torch.ops.fxquant.quantize_weight(w, spec)


BLOCKS = [(1, 0), (1, 16), (4, 8), (8, 0), (0, 8), (0, 0), (1, 1)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["as stored", "transposed"])
@settings(max_examples=6)
@given(rows=st.integers(1, 5), tile=TILES)
def test_granularities(block: tuple[int, int], turned: bool, rows: int, tile: int) -> None:
    w = values(rows * 16, 32)
    make = quantized(block)
    gm = with_results([w], lambda w: make(w.t() if turned else w))
    check_tiled(gm, [w], tile)
    with hold_bytes(0):  # read twice, not held whole
        check_tiled(gm, [w], tile)


@pytest.mark.parametrize("form", [INT8_T, TABLE_T], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@SMALL
@given(k=N, n=st.integers(1, 40), tile=TILES)
def test_two_passes(form: object, dtype: torch.dtype, k: int, n: int, tile: int) -> None:
    w = values(k, n, dtype=dtype)
    with hold_bytes(0):
        tiling = check_tiled(template([w], form=form), [w], tile)
    assert tiling.scans == (len(tiling.tiles) > 1)


def mx_like(w: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 32 with a power-of-two scale, two 4-bit codes in a byte."""
    n, k = w.shape
    blocks = w.float().reshape(n, k // 32, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30))) - 2
    codes = torch.round(blocks / torch.exp2(exponent)).clamp(-7, 7).to(torch.int32) + 8
    codes = codes.reshape(n, k // 2, 2)
    packed = (codes[..., 0] | (codes[..., 1] << 4)).to(torch.uint8)
    return packed, (exponent.squeeze(-1) + 127).to(torch.uint8)


@SMALL
@given(n=N, blocks=st.integers(1, 3), tile=TILES)
def test_mx_like(n: int, blocks: int, tile: int) -> None:
    w = values(n, blocks * 32)
    check_tiled(with_results([w], mx_like), [w], tile)


def gptq_like(q: Tensor, scales: Tensor) -> Tensor:
    """Eight 4-bit values of each int32, along the rows; a scale for each group of 16 rows."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = ((q[:, None, :] >> shifts[None, :, None]) & 15) - 8
    codes = codes.reshape(q.shape[0] * 8, q.shape[1])
    spread = scales[:, None].expand(-1, 16, -1).reshape(codes.shape)
    return codes.to(BF16) * spread


@pytest.mark.parametrize("form", [None, INT8])
@SMALL
@given(groups=st.integers(1, 5), k=st.integers(1, 33), tile=TILES)
def test_gptq_like(form: object, groups: int, k: int, tile: int) -> None:
    q = torch.randint(-(2**31), 2**31 - 1, (groups * 2, k), dtype=torch.int32)
    parts = [q, values(groups, k)]
    check_tiled(template(parts, gptq_like, form=form), parts, tile)


def test_gptq_like_is_cut_at_whole_groups() -> None:
    parts = [torch.ones(64, 32, dtype=torch.int32), values(32, 32)]
    tiling = check_tiled(template(parts, gptq_like, form=INT8), parts, 1024)
    assert len(tiling.tiles) > 4
    assert all(tile.reads[0].shape[0] % 2 == 0 for tile in tiling.tiles)


@SMALL
@given(n=N, tile=TILES, form=FORMS)
def test_tied_names_are_compared_by_tiles(n: int, tile: int, form: object) -> None:
    w = values(n, 24)
    gm = template([w, w.clone()], same=1, form=form)
    tiling = check_tiled(gm, [w, w.clone()], tile)
    assert all(len(part.reads) == 2 for part in tiling.tiles)


@pytest.mark.parametrize("row", [0, 17, 39])
def test_tied_names_that_differ_in_one_tile(row: int) -> None:
    w, other = values(40, 24), values(40, 24)
    other[row, 3] += 1
    gm = template([w, other], same=1, form=INT8)
    with pytest.raises(TiedWeightError, match="different values"):
        run_tiling(gm, make_tiling(gm, 128), [w, other])


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (1, 4096), (4096, 1), (2, 4096), (1, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("form", [None, INT8, TABLE, INT8_T, TABLE_T], ids=str)
def test_odd_shapes(shape: tuple[int, int], form: object) -> None:
    for dtype in (BF16, torch.float32):
        w = values(*shape, dtype=dtype)
        check_tiled(template([w], form=form), [w], 512)


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.int64, torch.bool], ids=str)
def test_scalars_and_vectors(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (1000,), (0,)):
        w = (values(*shape, dtype=torch.float32) * 3).to(dtype)
        check_tiled(template([w], dtype=dtype if dtype != torch.float32 else BF16), [w], 128)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", [INT8, TABLE, INT8_T], ids=str)
def test_values_that_are_not_finite(bad: float, form: object) -> None:
    w = values(64, 32)
    w[3, 5], w[40, 1] = bad, -bad
    with hold_bytes(0):
        assert len(check_tiled(template([w], form=form), [w], 256).tiles) > 4


NO_RULE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "flip": (lambda w: w.flip(0), "aten.flip"),
    "roll": (lambda w: w.roll(1, 0), "aten.roll"),
    "cumsum": (lambda w: w.cumsum(0), "aten.cumsum"),
    "unbind": (lambda w: torch.cat(w.view(4, 16, -1).unbind(0)), "aten.unbind"),
    "sort": (lambda w: w.sort(0).values, "aten.sort"),
    "in place": (lambda w: w.clone().mul_(2), "aten.mul_.Tensor writes in place"),
    "mixed rows": (lambda w: w - w.mean(0), "r0 is needed in two different parts"),
    "square": (lambda w: w @ w, "with itself"),
}


@pytest.mark.parametrize("name", NO_RULE)
def test_what_runs_whole_says_why(name: str) -> None:
    convert, reason = NO_RULE[name]
    w = values(64, 64)
    tiling = check_tiled(template([w], convert, form=INT8), [w], 512)
    assert len(tiling.tiles) == 1
    assert reason in tiling.reason


def test_writes_into_new_tensors_are_kept() -> None:
    """An op whose result nobody uses may still be what fills the constant."""

    def swapped(w: Tensor) -> Tensor:
        out = torch.empty_like(w)
        out[:32] = w[32:]
        out[32:] = w[:32]
        return out

    w = values(64, 64)
    check_tiled(template([w], swapped, form=INT8), [w], 512)


def test_tensors_of_the_template_itself() -> None:
    """A look-up table, for example."""
    w = values(64, 16)
    tiling = check_tiled(template([w], lambda w: w * torch.tensor([1.0, 2.0] * 8)), [w], 512)
    assert len(tiling.tiles) > 2


def test_rules_agree_with_the_shapes() -> None:
    """A rule for an op asks for ranges within its inputs, whatever the axis."""

    def convert(w: Tensor) -> Tensor:
        return (w.view(4, 8, 6).permute(2, 0, 1)[1::2].transpose(0, 2) * 2).sum(0)

    gm = template([values(32, 6)], convert)
    seen = 0
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in RULES:
            seen += _ranges_fit(node)
    assert seen > 8


def _ranges_fit(node: fx.Node) -> int:
    from fxquant.materialize.row_rules import NotSeparableError, Range

    seen = 0
    for axis, size in enumerate(shape_of(node)):
        for start in range(size):
            try:
                part = RULES[node.target](node, Range(axis, start, start + 1))
            except NotSeparableError:
                continue
            for given_node, wanted in part.ranges.items():
                if wanted is not None:
                    assert 0 <= wanted.start < wanted.stop <= shape_of(given_node)[wanted.axis]
                    seen += 1
    return seen
