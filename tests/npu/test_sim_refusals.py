"""Calls that CANN refuses fail here as on the card, with its error number and the reason."""

from __future__ import annotations

import pytest
import torch

TOKEN = {"output_dtype": torch.float16}


def codes(*shape):
    return torch.zeros(shape, dtype=torch.int8).npu()


def quant_matmul(m=2, k=64, n=32, *, transposed=False, scale=torch.float32, token=True, **given):
    w = codes(n, k).t() if transposed else codes(k, n)
    pertoken = torch.ones(m).npu() if token else None
    arguments = {"output_dtype": torch.bfloat16, "pertoken_scale": pertoken} | given
    return torch.ops.npu.npu_quant_matmul(codes(m, k), w, torch.ones(n, dtype=scale).npu(), **arguments)


@pytest.mark.parametrize(
    ("k", "n", "transposed", "taken"),
    [
        (64, 65535, False, True),
        (64, 65536, False, False),
        (64, 65536, True, True),
        (64, 151936, True, True),
        (65535, 32, True, True),
        (65536, 32, True, False),
        (65536, 32, False, False),
    ],
)
def test_the_limit_is_on_the_innermost_axis(simulate, k, n, transposed, taken):
    simulate("Ascend910B2", "9.0.0")
    if taken:
        assert quant_matmul(1, k, n, transposed=transposed).shape == (1, n)
    else:
        with pytest.raises(RuntimeError, match=r"161002[^$]*65535"):
            quant_matmul(1, k, n, transposed=transposed)


@pytest.mark.parametrize(
    ("soc", "cann", "taken"),
    [
        ("Ascend910B2", "8.5.0", False),
        ("Ascend910B2", "9.0.1", False),
        ("Ascend910B2", "9.1.0", True),
        ("Ascend910_9391", "9.0.0", False),
        ("Ascend910_9391", "9.1.0", True),
        ("Ascend950PR_9579", "9.0.0", True),
    ],
)
def test_the_limit_by_chip_and_version(simulate, soc, cann, taken):
    simulate(soc, cann)
    if taken:
        quant_matmul(1, 64, 70000)
    else:
        with pytest.raises(RuntimeError, match="161002"):
            quant_matmul(1, 64, 70000)


def test_without_pertoken_scale_the_limit_stays(simulate):
    simulate("Ascend910B2", "9.1.0")
    with pytest.raises(RuntimeError, match="161002"):
        quant_matmul(1, 64, 70000, token=False)


def test_nz_of_a_wide_weight(simulate):
    simulate("Ascend910B2", "9.0.0")
    x, scale, token = codes(1, 64), torch.ones(65536).npu(), torch.ones(1).npu()
    wide = torch.ops.npu.npu_format_cast(codes(64, 65536), 29)
    with pytest.raises(RuntimeError, match="161002"):
        torch.ops.npu.npu_quant_matmul(x, wide, scale, pertoken_scale=token, **TOKEN)
    tall = torch.ops.npu.npu_format_cast(codes(65536, 64), 29).t()
    assert torch.ops.npu.npu_quant_matmul(x, tall, scale, pertoken_scale=token, **TOKEN).shape == (1, 65536)


@pytest.mark.parametrize("size", ["m", "k", "n"])
def test_empty_operands(simulate, size):
    with pytest.raises(RuntimeError, match="161002"):
        quant_matmul(**{size: 0})


def test_nz_with_one_column(simulate):
    nz = torch.ops.npu.npu_format_cast(codes(64, 1), 29)
    with pytest.raises(RuntimeError, match="161002"):
        torch.ops.npu.npu_quant_matmul(
            codes(2, 64), nz, torch.ones(1).npu(), pertoken_scale=torch.ones(2).npu(), **TOKEN
        )


def test_pertoken_scale_of_another_length(simulate):
    with pytest.raises(RuntimeError, match="161002"):
        quant_matmul(pertoken_scale=torch.ones(3).npu())


def test_float16_needs_pertoken_scale_with_a_float_bias(simulate):
    with pytest.raises(RuntimeError):
        quant_matmul(token=False, bias=torch.ones(32).npu(), **TOKEN)


def test_the_meta_kernel_runs_first(simulate):
    with pytest.raises(RuntimeError, match="k dim of x1 and x2"):
        torch.ops.npu.npu_quant_matmul(codes(2, 64), codes(32, 32), torch.ones(32).npu(), **TOKEN)


def test_float_operands(simulate):
    x, w = torch.ones(2, 64).npu(), torch.ones(64, 32).npu()
    with pytest.raises(RuntimeError, match="161002"):
        torch.ops.npu.npu_quant_matmul(x, w, torch.ones(32).npu(), **TOKEN)


def test_per_token_is_not_on_310p(simulate):
    simulate("Ascend310P3")
    with pytest.raises(RuntimeError, match="161002"):
        quant_matmul()


@pytest.mark.parametrize("x", [torch.ones(2, 64), torch.ones(64).half()])
def test_dynamic_quant_of_float32_and_of_one_dimension(simulate, x):
    with pytest.raises(RuntimeError, match="161002"):
        torch.ops.npu.npu_dynamic_quant(x.npu())


@pytest.mark.parametrize("soc", ["Ascend910B2", "Ascend910_9391", "Ascend310P3"])
def test_ops_of_950(simulate, soc):
    simulate(soc)
    with pytest.raises(RuntimeError, match="161002"):
        torch.ops.npu.npu_dynamic_mx_quant(torch.ones(2, 64).half().npu(), dst_type=24)


def test_dequant_is_for_310p(simulate):
    with pytest.raises(RuntimeError, match="161002"):
        torch.ops.npu.npu_quant_matmul_dequant(
            torch.ones(2, 64).half().npu(), codes(32, 64), torch.ones(32).npu()
        )


@pytest.mark.parametrize(("k", "n"), [(65536, 32), (64, 65536)])
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_only_limits_both_axes(simulate, k, n, transposed):
    simulate("Ascend910B2", "9.1.0")
    w = codes(n, k).t() if transposed else codes(k, n)
    with pytest.raises(RuntimeError, match="161002"):
        torch.ops.npu.npu_weight_quant_batchmatmul(
            torch.ones(1, k).half().npu(), w, torch.ones(n).half().npu()
        )


def test_weight_only_takes_two_dimensions(simulate):
    with pytest.raises(RuntimeError, match="161002"):
        torch.ops.npu.npu_weight_quant_batchmatmul(
            torch.ones(1, 2, 64).half().npu(), codes(64, 32), torch.ones(32).half().npu()
        )


def test_grouped_matmul_limits_the_innermost_axis(simulate):
    with pytest.raises(RuntimeError, match="161002"):
        torch.ops.npu.npu_grouped_matmul(
            [codes(2, 64)], [codes(2, 64, 65536)], scale=[torch.ones(2, 65536).npu()],
            per_token_scale=[torch.ones(2).npu()], group_list=torch.tensor([1, 2]).npu(),
            split_item=3, group_type=0, output_dtype=5,
        )  # fmt: skip


def test_operands_on_the_host(simulate):
    with pytest.raises(RuntimeError, match="same device"):
        quant_matmul(pertoken_scale=torch.ones(2))
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, 4).npu() @ torch.ones(4, 2)


def test_ops_without_a_reference(simulate):
    with pytest.raises(NotImplementedError, match=r"npu::npu_fast_gelu has no kernel in the simulated NPU"):
        torch.ops.npu.npu_fast_gelu(torch.ones(4).npu())
