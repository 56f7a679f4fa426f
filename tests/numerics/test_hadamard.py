"""The Hadamard rotation: the matrix it stands for, exact inverses, tiles, blocks, signs."""

from __future__ import annotations

import pytest
import torch

from fxquant.materialize.meter import LiveBytes
from fxquant.numerics.hadamard import CHUNK_BYTES, block_size, hadamard, rotate_weight, signs

SIZES = [(1, 1), (7, 1), (12, 4), (64, 64), (96, 32), (576, 64), (1536, 512), (1024, 1024), (2048, 2048)]


def rows(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))


def sylvester(size: int) -> torch.Tensor:
    """The matrix by its definition: +1 where the indices share an even number of bits."""
    index = torch.arange(size)
    shared = index[:, None] & index
    odd = torch.zeros_like(shared)
    for bit in range(size.bit_length()):
        odd ^= (shared >> bit) & 1
    return (1 - 2 * odd).double() / size**0.5


@pytest.mark.parametrize(("k", "size"), SIZES)
def test_it_is_the_matrix(k: int, size: int) -> None:
    assert block_size(k) == size
    x = rows(3, k)
    expected = x.double() @ torch.block_diag(*[sylvester(size)] * (k // size))
    found = hadamard(x)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-6 * x.abs().max() * max(1, size).bit_length()


@pytest.mark.parametrize("seed", [None, 0, 3])
@pytest.mark.parametrize(("k", "size"), SIZES[:-1])
def test_orthogonal(k: int, size: int, seed: int | None) -> None:
    h = hadamard(torch.eye(k), seed=seed)
    assert (h @ h.t() - torch.eye(k)).abs().max() < 3e-7
    if seed is None:
        assert torch.equal(h, h.t())
        x = rows(4, k)
        assert (hadamard(hadamard(x)) - x).abs().max() < 2e-6 * x.abs().max()


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("block", [1, 4, 64, None])
def test_a_rotated_pair_has_the_same_product(block: int | None, seed: int | None) -> None:
    x, w = rows(9, 192), rows(31, 192)
    found = hadamard(x, block, seed=seed) @ rotate_weight(w, block, seed=seed).t()
    assert torch.allclose(found.double(), x.double() @ w.double().t(), atol=2e-5)


def test_blocks_do_not_mix() -> None:
    x = torch.zeros(1, 96)
    x[0, 40] = 1
    assert (hadamard(x) != 0).nonzero()[:, 1].tolist() == list(range(32, 64))
    assert (hadamard(x, 8) != 0).nonzero()[:, 1].tolist() == list(range(40, 48))


def test_an_outlier_is_spread() -> None:
    x = rows(1, 1024) / 100
    x[0, 17] = 50
    assert hadamard(x).abs().max() < 2


def test_signs_spread_a_constant_and_depend_on_the_seed_alone() -> None:
    x = torch.ones(1, 1024)
    assert hadamard(x)[0, 0] == 32
    assert hadamard(x, seed=0).abs().max() < 6
    assert torch.equal(signs(1000, 7)[:500], signs(500, 7))
    assert not torch.equal(signs(1000, 7), signs(1000, 8))
    assert abs(signs(100_000, 1).mean()) < 0.02
    # Part of the format of a rotated checkpoint: never change it.
    assert signs(12, 0).tolist() == [1, -1, 1, 1, 1, -1, -1, 1, 1, -1, -1, -1]


@pytest.mark.parametrize("seed", [None, 2])
@pytest.mark.parametrize("k", [64, 576, 1536, 4096])
def test_tiles_of_rows_have_the_bits_of_the_whole(k: int, seed: int | None) -> None:
    x = rows(CHUNK_BYTES // (4 * k) * 2 + 3, k)
    whole = hadamard(x, seed=seed)
    for step in (1, 5, 64):
        tiles = [hadamard(x[start : start + step], seed=seed) for start in range(0, 3 * step, step)]
        assert torch.equal(torch.cat(tiles), whole[: 3 * step])
    assert torch.equal(hadamard(x.t().contiguous().t(), seed=seed), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_leading_axes(dtype: torch.dtype) -> None:
    x = rows(6, 64).to(dtype)
    found = hadamard(x.view(2, 3, 64))
    assert (found.shape, found.dtype) == ((2, 3, 64), torch.float32)
    assert torch.equal(found.view(6, 64), hadamard(x.float()))
    assert hadamard(torch.empty(0, 64)).shape == (0, 64)
    assert hadamard(torch.ones(64)).shape == (64,)


def test_large_values_stay_finite_and_small_ones_exact() -> None:
    x = torch.full((1, 64), 4e37)
    assert hadamard(x).isfinite().all()
    assert torch.equal(hadamard(rows(2, 64) * 2**-60), hadamard(rows(2, 64)) * 2**-60)


def test_memory_is_the_result_and_a_few_chunks() -> None:
    x = rows(512, 1536)
    with LiveBytes() as meter:
        hadamard(x, seed=1)
    assert meter.peak["cpu"] <= x.nbytes + 5 * CHUNK_BYTES


@pytest.mark.parametrize("block", [0, 3, 128, -4])
def test_blocks_that_cannot_be_are_refused(block: int) -> None:
    with pytest.raises(ValueError, match=f"a block of {block} is no power of two that divides K=64"):
        hadamard(torch.zeros(1, 64), block)


def test_an_axis_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="no rotation of an axis of 0 values"):
        block_size(0)
