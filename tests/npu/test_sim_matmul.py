"""The references of the matmuls, against arithmetic on Python integers and float64."""

from __future__ import annotations

import pytest
import torch

INT8, INT32 = 1, 3
E2M1, E8M0 = 296, 293


def codes(*shape, low=-127, high=128):
    return torch.randint(low, high, shape).to(torch.int8)


def exact(a, b):
    return a.long() @ b.long()


def rounded(values, dtype):
    """Float64 to an output dtype, one rounding in float32 between as the references have."""
    return values.float().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["kn", "nk.t", "nz"])
def test_per_token(simulate, dtype, layout):
    x, w = codes(5, 70), codes(48, 70)
    scale, token = torch.rand(48) * 1e-3, torch.rand(5)
    right = {"kn": w.t().contiguous().npu, "nk.t": lambda: w.npu().t(), "nz": None}[layout]
    right = torch.ops.npu.npu_format_cast(w.t().contiguous().npu(), 29) if right is None else right()
    y = torch.ops.npu.npu_quant_matmul(
        x.npu(), right, scale.npu(), pertoken_scale=token.npu(), output_dtype=dtype
    )
    want = exact(x, w.t()).float() * scale * token[:, None]
    assert y.device == torch.device("npu:0")
    assert torch.equal(y.cpu(), want.to(dtype))


@pytest.mark.parametrize(
    ("bias", "out"),
    [
        (torch.int32, torch.float16),
        (torch.int32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_bias_of_each_dtype(simulate, bias, out):
    x, w = codes(3, 64), codes(64, 32)
    scale, token = torch.rand(32) * 1e-3, torch.rand(3)
    b = torch.randint(-1000, 1000, (32,)).to(bias)
    y = torch.ops.npu.npu_quant_matmul(
        x.npu(), w.npu(), scale.npu(), pertoken_scale=token.npu(), bias=b.npu(), output_dtype=out
    )
    sums = exact(x, w) + (b.long() if bias is torch.int32 else 0)
    want = sums.float() * scale * token[:, None] + (0 if bias is torch.int32 else b.float())
    assert torch.equal(y.cpu(), want.to(out))


def test_int32_output_is_the_sums(simulate):
    x, w = codes(2, 40, low=127), codes(40, 16, low=127)
    bias = torch.arange(16, dtype=torch.int32)
    y = torch.ops.npu.npu_quant_matmul(
        x.npu(), w.npu(), torch.full((16,), 0.5).npu(), bias=bias.npu(), output_dtype=torch.int32
    )
    assert torch.equal(y.cpu().long(), exact(x, w) + bias)


def test_sums_past_float32_are_exact(simulate):
    """127 * 127 * 60001 is odd and past 2^24."""
    x, w = torch.full((1, 60001), 127, dtype=torch.int8), torch.full((60001, 2), 127, dtype=torch.int8)
    y = torch.ops.npu.npu_quant_matmul(x.npu(), w.npu(), torch.ones(1).npu(), output_dtype=torch.int32)
    assert y.cpu().tolist() == [[127 * 127 * 60001] * 2]


def test_batch_dimensions_broadcast(simulate):
    x, w = codes(2, 1, 3, 32), codes(4, 32, 16)
    scale = torch.rand(16) * 1e-2
    y = torch.ops.npu.npu_quant_matmul(x.npu(), w.npu(), scale.npu(), output_dtype=torch.bfloat16)
    assert y.shape == (2, 4, 3, 16)
    assert torch.equal(y.cpu(), (exact(x, w).float() * scale).bfloat16())


def test_int64_scale_is_the_float_scale_cut_to_19_bits(simulate):
    x, w = codes(4, 64).npu(), codes(64, 32).npu()
    scale = torch.rand(32) * 1e-3
    packed = torch.ops.npu.npu_trans_quant_param(scale.npu())
    by_float = torch.ops.npu.npu_quant_matmul(x, w, scale.npu(), output_dtype=torch.float16)
    by_int64 = torch.ops.npu.npu_quant_matmul(x, w, packed, output_dtype=torch.float16)
    cut = (scale.view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert torch.equal(by_float, by_int64)
    assert torch.equal(by_int64.cpu(), (exact(x.cpu(), w.cpu()).float() * cut).half())


def test_int8_output_adds_the_offset_and_saturates(simulate):
    x, w = codes(4, 64), codes(64, 32)
    scale, offset = torch.full((32,), 2.0**-10), torch.randint(-100, 100, (32,)).float()
    packed = torch.ops.npu.npu_trans_quant_param(scale.npu(), offset.npu())
    y = torch.ops.npu.npu_quant_matmul(x.npu(), w.npu(), scale.npu(), offset=offset.npu())
    want = ((exact(x, w).double() / 1024).round() + offset).clamp(-128, 127).to(torch.int8)
    assert torch.equal(y.cpu(), want)
    assert torch.equal(torch.ops.npu.npu_quant_matmul(x.npu(), w.npu(), packed).cpu(), want)


@pytest.mark.parametrize("transposed", [False, True])
def test_int4(simulate, transposed):
    x, w = codes(4, 64, low=-8, high=8), codes(64, 32, low=-8, high=8)
    scale = torch.full((32,), 0.25)
    pack = torch.ops.npu.npu_convert_weight_to_int4pack
    right = pack(w.t().int().contiguous().npu()).t() if transposed else pack(w.int().npu())
    y = torch.ops.npu.npu_quant_matmul(pack(x.int().npu()), right, scale.npu(), output_dtype=torch.float16)
    assert torch.equal(y.cpu(), (exact(x, w).float() * 0.25).half())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_per_channel_on_950(simulate, dtype):
    simulate("Ascend950PR_9579")
    x, w = torch.randn(4, 64).to(dtype), torch.randn(64, 32).to(dtype)
    scale, token, bias = torch.rand(32), torch.rand(4), torch.randn(32)
    y = torch.ops.npu.npu_quant_matmul(
        x.npu(),
        w.npu(),
        scale.npu(),
        pertoken_scale=token.npu(),
        bias=bias.npu(),
        output_dtype=torch.bfloat16,
    )
    want = (x.double() @ w.double()) * scale * token[:, None] + bias
    torch.testing.assert_close(y.cpu().double(), want, rtol=2**-7, atol=1e-5)


def test_mx_fp8_on_950(simulate):
    """Activation and weight [N, K] quantized by ``npu_dynamic_mx_quant``; the weight passed transposed."""
    simulate("Ascend950PR_9579")
    x, w = torch.randn(4, 96, dtype=torch.bfloat16), torch.randn(96, 32, dtype=torch.bfloat16)
    quant = torch.ops.npu.npu_dynamic_mx_quant
    xq, xs = quant(x.npu(), dst_type=24)
    wq, ws = quant(w.t().contiguous().npu(), dst_type=24)
    wq, ws = wq.t(), ws.transpose(0, 1)
    assert (xs.shape, ws.shape) == ((4, 2, 2), (2, 32, 2))
    y = torch.ops.npu.npu_quant_matmul(
        xq, wq, ws, pertoken_scale=xs, output_dtype=torch.bfloat16,
        scale_dtype=E8M0, pertoken_scale_dtype=E8M0, group_sizes=[1, 1, 32],
    )  # fmt: skip
    left, right = torch.zeros(4, 96).double(), torch.zeros(96, 32).double()
    for k in range(96):
        block = k // 32
        left[:, k] = xq.cpu()[:, k].double() * 2.0 ** (xs.cpu()[:, block // 2, block % 2].double() - 127)
        right[k] = wq.cpu()[k].double() * 2.0 ** (ws.cpu()[block // 2, :, block % 2].double() - 127)
    torch.testing.assert_close(y.cpu().double(), left @ right, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(y.cpu().float(), x.float() @ w.float(), rtol=0.1, atol=1.5)


def test_blocks_of_128_on_950(simulate):
    simulate("Ascend950PR_9579")
    x, w = torch.randn(3, 256).to(torch.float8_e4m3fn), torch.randn(256, 130).to(torch.float8_e4m3fn)
    scale, token = torch.rand(2, 2), torch.rand(3, 2)
    y = torch.ops.npu.npu_quant_matmul(
        x.npu(),
        w.npu(),
        scale.npu(),
        pertoken_scale=token.npu(),
        output_dtype=torch.float32,
        group_sizes=[1, 128, 128],
    )
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :130]
    want = (x.double() * token.repeat_interleave(128, 1)) @ (w.double() * full)
    torch.testing.assert_close(y.cpu().double(), want, rtol=1e-5, atol=1e-5)


def test_mx_fp4_reference(npu):
    """The table does not take fp4 yet; the reference does."""
    from fxquant.testing.npu_sim.kernels import codes as formats
    from fxquant.testing.npu_sim.kernels.registry import REFERENCES, Call

    x, w = torch.randn(4, 64), torch.randn(32, 64)
    xc, wc = formats.fp4_codes(x, E2M1), formats.fp4_codes(w, E2M1)
    ones = torch.full((1,), 127, dtype=torch.uint8)
    call = Call(
        x1=formats.pack_fp4(xc), x2=formats.pack_fp4(wc).t(), scale=ones.expand(1, 32, 2), offset=None,
        pertoken_scale=ones.expand(4, 1, 2), bias=None, output_dtype=6, x1_dtype=E2M1, x2_dtype=E2M1,
        pertoken_scale_dtype=E8M0, scale_dtype=E8M0, group_sizes=[1, 1, 32], y_scale=None,
    )  # fmt: skip
    table = torch.tensor(formats.FP4_VALUES[E2M1])

    def values(c):
        return torch.where(c >= 8, -1.0, 1.0) * table[(c % 8).long()]

    assert torch.equal(
        REFERENCES["npu_quant_matmul"](call), (values(xc).double() @ values(wc).double().t()).float()
    )


def test_dequant_on_310p(simulate):
    simulate("Ascend310P3")
    x, w, scale = torch.randn(5, 64).half(), codes(32, 64), torch.rand(32)
    y = torch.ops.npu.npu_quant_matmul_dequant(x.npu(), w.npu(), scale.npu())
    token = x.float().abs().amax(1, keepdim=True) / 127
    quantized = (x.float() / token).round()
    assert torch.equal(y.cpu(), ((quantized.double() @ w.double().t()).float() * token * scale).half())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weight_only_int8(simulate, dtype, transposed):
    x, w = torch.randn(5, 64).to(dtype), codes(64, 32)
    scale, offset = torch.rand(32).to(dtype), torch.randint(-9, 9, (32,)).to(dtype)
    bias = torch.randn(32).to(torch.float16 if dtype is torch.float16 else torch.float32)
    right = w.t().contiguous().npu().t() if transposed else w.npu()
    y = torch.ops.npu.npu_weight_quant_batchmatmul(
        x.npu(), right, scale.npu(), antiquant_offset=offset.npu(), bias=bias.npu()
    )
    weight = ((w.float() + offset.float()) * scale.float()).to(dtype)
    want = rounded((x.double() @ weight.double()).float() + bias.float(), dtype)
    assert y.dtype == dtype
    assert torch.equal(y.cpu(), want)


@pytest.mark.parametrize("transposed", [False, True])
def test_weight_only_int4_by_group(simulate, transposed):
    x, w = torch.randn(5, 128).bfloat16(), codes(128, 32, low=-8, high=8)
    scale = torch.rand(4, 32).bfloat16()
    pack = torch.ops.npu.npu_convert_weight_to_int4pack
    right = pack(w.t().int().contiguous().npu()).t() if transposed else pack(w.int().npu())
    y = torch.ops.npu.npu_weight_quant_batchmatmul(x.npu(), right, scale.npu(), antiquant_group_size=32)
    weight = (w.float() * scale.float().repeat_interleave(32, 0)).bfloat16()
    assert torch.equal(y.cpu(), rounded(x.double() @ weight.double(), torch.bfloat16))


def test_the_same_bits_on_the_cpu(simulate):
    from fxquant.testing import npu_sim

    x, w, scale = torch.randn(5, 64).half(), codes(32, 64), torch.rand(32)

    def run(x, w, scale):
        q, token = torch.ops.npu.npu_dynamic_quant(x)
        return torch.ops.npu.npu_quant_matmul(
            q, w.t(), scale, pertoken_scale=token, output_dtype=torch.float16
        )

    with npu_sim.on_cpu():
        want = run(x, w, scale)
    assert want.device.type == "cpu"
    assert torch.equal(run(x.npu(), w.npu(), scale.npu()).cpu(), want)
    with pytest.raises(NotImplementedError):
        run(x, w, scale)
