"""The reference of ``npu_grouped_matmul``, on the device and, past what the table takes, by itself."""

from __future__ import annotations

import pytest
import torch

M, K, N, E = 9, 64, 32, 3
SIZES = [4, 0, 5]


def codes(*shape):
    return torch.randint(-127, 128, shape).to(torch.int8)


def group_list(kind):
    values = torch.tensor(SIZES)
    return values if kind == 1 else values.cumsum(0)


def by_group(x, w):
    return torch.cat([a.double() @ b.double() for a, b in zip(x.split(SIZES), w, strict=True)])


def rows_of(values):
    return values.repeat_interleave(torch.tensor(SIZES), 0)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_int8_experts(simulate, kind, transposed):
    x, w = codes(M, K), codes(E, K, N)
    scale, token = torch.rand(E, N).bfloat16(), torch.rand(M)
    right = w.transpose(1, 2).contiguous().npu().transpose(1, 2) if transposed else w.npu()
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x.npu()], [right], scale=[scale.npu()], per_token_scale=[token.npu()],
        group_list=group_list(kind).npu(), split_item=3, group_type=0, group_list_type=kind, output_dtype=15,
    )  # fmt: skip
    want = by_group(x, w).float() * rows_of(scale.float()) * token[:, None]
    assert torch.equal(y.cpu(), want.bfloat16())


def test_weight_only_experts(simulate):
    x, w, scale = torch.randn(M, K).half(), codes(E, K, N), torch.rand(E, N).half()
    offset = torch.zeros(E, N).half().npu()
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x.npu()], [w.npu()], antiquant_scale=[scale.npu()], antiquant_offset=[offset],
        group_list=group_list(1).npu(), split_item=2, group_type=0, group_list_type=1,
    )  # fmt: skip
    weight = (w.float() * scale.float()[:, None]).half()
    assert torch.equal(y.cpu(), by_group(x, weight).float().half())


def call(**given):
    from fxquant.testing.npu_sim.kernels.registry import REFERENCES, Call

    empty = dict.fromkeys(
        (
            "bias",
            "scale",
            "antiquant_scale",
            "antiquant_offset",
            "per_token_scale",
            "group_list",
            "group_type",
        )
    )
    rest = {"split_item": 0, "group_list_type": 0, "act_type": 0, "output_dtype": None}
    return REFERENCES["npu_grouped_matmul"](Call(**(empty | rest | given)))


def test_lists_of_floats(npu):
    xs = [torch.randn(m, K) for m in (2, 3)]
    ws = [torch.randn(K, n) for n in (8, 16)]
    bias = [torch.randn(n) for n in (8, 16)]
    outs = call(x=xs, weight=ws, bias=bias, group_type=-1)
    assert [tuple(o.shape) for o in outs] == [(2, 8), (3, 16)]
    for x, w, b, out in zip(xs, ws, bias, outs, strict=True):
        torch.testing.assert_close(out, torch.addmm(b, x, w))


@pytest.mark.parametrize("split_item", [1, 3])
def test_one_x_and_a_list_of_ends(npu, split_item):
    x, ws = torch.randn(M, K), [torch.randn(K, N) for _ in range(E)]
    outs = call(x=[x], weight=ws, group_list=[4, 4, 9], split_item=split_item)
    assert len(outs) == (E if split_item == 1 else 1)
    torch.testing.assert_close(torch.cat(outs).double(), by_group(x, torch.stack(ws)))


def test_activation_and_int8_output(npu):
    x, w = codes(M, K), codes(E, K, N)
    scale, token = torch.full((E, N), 1e-3), torch.rand(M)
    (y,) = call(
        x=[x], weight=[w], scale=[scale], per_token_scale=[token], group_list=group_list(0),
        split_item=3, group_type=0, act_type=1, output_dtype=5,
    )  # fmt: skip
    want = (by_group(x, w).float() * 1e-3 * token[:, None]).relu().half()
    assert torch.equal(y, want)


def test_rows_after_the_last_group_are_zero(npu):
    x, w = torch.randn(M + 2, K), torch.randn(E, K, N)
    (y,) = call(x=[x], weight=[w], group_list=group_list(0), split_item=3, group_type=0)
    assert y.shape == (M + 2, N)
    assert not y[M:].any()


def test_a_group_list_that_does_not_fit(npu):
    with pytest.raises(RuntimeError, match="161002"):
        call(x=[torch.randn(4, K)], weight=[torch.randn(E, K, N)], group_list=group_list(0), split_item=3)
