"""The references of the ops that quantize, against their formulas written out."""

from __future__ import annotations

import pytest
import torch

QUINT4X2, E2M1, E1M2 = 16, 296, 297


def unpacked(words):
    """Int4 values of int32 words, one by one."""
    values = [((int(w) >> (4 * i)) & 15) for w in words.flatten() for i in range(8)]
    return torch.tensor([v - 16 if v > 7 else v for v in values]).view(*words.shape[:-1], -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 4, 32)])
def test_dynamic_quant_by_token(simulate, dtype, shape):
    x = torch.randn(shape).to(dtype)
    x[0, 0] = 0
    y, scale = torch.ops.npu.npu_dynamic_quant(x.npu())
    want = x.float().abs().amax(-1) / 127
    assert torch.equal(scale.cpu(), want)
    safe = torch.where(want == 0, 1, want)[..., None]
    assert torch.equal(y.cpu(), (x.float() / safe).round().to(torch.int8))


def test_dynamic_quant_with_smooth_scales(simulate):
    x, smooth = torch.randn(5, 64).half(), torch.rand(64).half()
    y, scale = torch.ops.npu.npu_dynamic_quant(x.npu(), smooth_scales=smooth.npu())
    smoothed = x.float() * smooth.float()
    assert torch.equal(scale.cpu(), smoothed.abs().amax(-1) / 127)
    assert torch.equal(y.cpu(), (smoothed / scale.cpu()[:, None]).round().to(torch.int8))


def test_dynamic_quant_to_int4(simulate):
    x = torch.randn(5, 64).half()
    y, scale = torch.ops.npu.npu_dynamic_quant(x.npu(), dst_type=QUINT4X2)
    assert (y.shape, y.dtype) == ((5, 8), torch.int32)
    assert torch.equal(unpacked(y.cpu()), (x.float() / scale.cpu()[:, None]).round().long())


def test_dynamic_quant_to_fp8_on_950(simulate):
    simulate("Ascend950PR_9579")
    x = torch.randn(5, 64).bfloat16()
    y, scale = torch.ops.npu.npu_dynamic_quant(x.npu(), dst_type=24)
    assert torch.equal(scale.cpu(), x.float().abs().amax(-1) / 448)
    assert torch.equal(y.cpu().float(), (x.float() / scale.cpu()[:, None]).to(torch.float8_e4m3fn).float())


def test_asymmetric(simulate):
    x = torch.randn(5, 64).half() + 2
    y, scale, offset = torch.ops.npu.npu_dynamic_quant_asymmetric(x.npu())
    low, high = x.float().amin(-1), x.float().amax(-1)
    assert torch.equal(scale.cpu(), (high - low) / 255)
    back = (y.cpu().float() - offset.cpu()[:, None]) * scale.cpu()[:, None]
    assert ((back - x.float()).abs() <= scale.cpu()[:, None] * 0.51).all()
    assert (y.cpu().min(), y.cpu().max()) == (-128, 127)


def test_quantize_static(simulate):
    x, scale, zero = torch.randn(5, 16), torch.rand(16) + 0.01, torch.randint(-9, 9, (16,), dtype=torch.int32)
    y = torch.ops.npu.npu_quantize(x.npu(), scale.npu(), zero.npu(), 12, 1)
    assert torch.equal(y.cpu(), (x / scale + zero).round().clamp(-128, 127).to(torch.int8))
    y = torch.ops.npu.npu_quantize(x.npu(), scale.npu(), None, 13, -1)
    assert torch.equal(y.cpu(), (x / scale).round().clamp(0, 255).to(torch.uint8))


def reference(name, **given):
    from fxquant.testing.npu_sim.kernels.registry import REFERENCES, Call

    return REFERENCES[name](Call(**given))


def test_quantize_by_multiplication(npu):
    """Not in the table; the reference has it."""
    x, scale = torch.randn(5, 16), torch.rand(16) * 3
    y = reference(
        "npu_quantize", input=x, scales=scale, zero_points=None, dtype=QUINT4X2, axis=1, div_mode=False
    )
    assert torch.equal(unpacked(y), (x * scale).round().clamp(-8, 7).long())


def test_quantize_with_scales_of_another_length(npu):
    with pytest.raises(RuntimeError, match="scales has 5 values for dimension 1 of 16"):
        reference(
            "npu_quantize",
            input=torch.randn(5, 16),
            scales=torch.rand(5),
            zero_points=None,
            dtype=12,
            axis=1,
            div_mode=True,
        )


@pytest.mark.parametrize("bits", [0x3F801FFF, 0x3F801000, 0x3F803000, 0x3F802001])
@pytest.mark.parametrize("round_mode", [0, 1])
def test_trans_quant_param(simulate, bits, round_mode):
    """Bits 13 to 31 of the scale, bit 46 set; the offset as 9 bits from bit 37 on."""
    scale = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    kept = bits & ~0x1FFF
    rest = bits & 0x1FFF
    if round_mode and (rest > 0x1000 or (rest == 0x1000 and kept & 0x2000)):
        kept += 0x2000
    out = torch.ops.npu.npu_trans_quant_param(scale.npu(), None, round_mode)
    assert out.cpu().item() == kept | 1 << 46
    out = torch.ops.npu.npu_trans_quant_param(scale.npu(), torch.tensor([-3.0]).npu(), round_mode)
    assert out.cpu().item() == kept | 1 << 46 | (-3 & 0x1FF) << 37


def test_blocks_of_128(simulate):
    x = torch.randn(3, 200).half()
    y, scale = torch.ops.npu.npu_dynamic_block_quant(x.npu())
    assert scale.shape == (3, 2)
    for column in range(200):
        s = x.float()[:, column // 128 * 128 : (column // 128 + 1) * 128].abs().amax(1) / 127
        assert torch.equal(scale.cpu()[:, column // 128], s)
        assert torch.equal(y.cpu()[:, column], (x.float()[:, column] / s).round().to(torch.int8))


def test_int4_packing(simulate):
    w = torch.randint(-8, 8, (6, 24), dtype=torch.int32)
    packed = torch.ops.npu.npu_convert_weight_to_int4pack(w.npu())
    assert (packed.shape, packed.dtype) == ((6, 3), torch.int32)
    assert torch.equal(unpacked(packed.cpu()), w.long())


@pytest.mark.parametrize(("dst_type", "emax", "top"), [(24, 8, 448.0), (23, 15, 57344.0)])
def test_mx_fp8_is_the_ocp_rule(simulate, dst_type, emax, top):
    simulate("Ascend950PR_9579")
    x = torch.randn(4, 80) * torch.logspace(-20, 20, 4)[:, None]
    x[1] = 0
    y, scale = torch.ops.npu.npu_dynamic_mx_quant(x.npu(), dst_type=dst_type)
    assert (scale.shape, scale.dtype) == ((4, 2, 2), torch.uint8)
    flat = scale.cpu().flatten(1)
    dtype = torch.float8_e4m3fn if dst_type == 24 else torch.float8_e5m2
    for row in range(4):
        for block in range(3):
            part = x[row, block * 32 : block * 32 + 32].double()
            if not part.any():
                assert flat[row, block] == 0
                continue
            exponent = int(torch.floor(torch.log2(part.abs().max()))) - emax
            assert flat[row, block] == exponent + 127
            want = (part / 2.0**exponent).clamp(-top, top).float().to(dtype)
            assert torch.equal(y.cpu()[row, block * 32 : block * 32 + 32].float(), want.float())
    assert not flat[:, 3].any()


def test_mx_along_another_axis_pairs_blocks(npu):
    """The table takes the last axis only; the reference has any."""
    given = {"round_mode": "rint", "dst_type": 24, "block_size": 32, "scale_alg": 0, "dst_type_max": 0.0}
    x = torch.randn(96, 6).bfloat16()
    y, scale = reference("npu_dynamic_mx_quant", input=x, axis=0, **given)
    yt, scale_t = reference("npu_dynamic_mx_quant", input=x.t(), axis=-1, **given)
    assert scale.shape == (2, 6, 2)
    assert torch.equal(scale, scale_t.transpose(0, 1))
    assert torch.equal(y.float(), yt.t().float())


def test_mx_scale_algorithm_1_never_saturates(simulate):
    simulate("Ascend950PR_9579")
    x = torch.randn(64, 64)
    _, scale = torch.ops.npu.npu_dynamic_mx_quant(x.npu(), dst_type=24, scale_alg=1)
    absmax = x.view(64, 2, 32).abs().amax(-1)
    power = 2.0 ** (scale.cpu().view(64, 2).double() - 127)
    assert (absmax / power <= 448).all()
    assert (absmax / (power / 2) > 448).all()


@pytest.mark.parametrize("kind", [E2M1, E1M2])
@pytest.mark.parametrize("mode", ["rint", "round", "floor"])
def test_fp4_rounding(npu, kind, mode):
    """Against a search over all values."""
    from fxquant.testing.npu_sim.kernels import codes

    values = codes.FP4_VALUES[kind]
    x = torch.cat([torch.linspace(-values[-1], values[-1], 481), torch.tensor([-100.0, 100.0])])
    got = codes.fp4_codes(x, kind, mode)
    for one, code in zip(x.tolist(), got.tolist(), strict=True):
        size = min(abs(one), values[-1])
        below = max(i for i, v in enumerate(values) if v <= size)
        above = min(i for i, v in enumerate(values) if v >= size)
        down, up = size - values[below], values[above] - size
        nearest = {"rint": below if below % 2 == 0 else above, "round": above}
        if mode == "floor":
            want = above if one < 0 else below
        elif down == up:
            want = nearest[mode]
        else:
            want = below if down < up else above
        assert code == want + (8 if one < 0 else 0), (one, code)


def test_fp4_packing(npu):
    from fxquant.testing.npu_sim.kernels import codes

    c = torch.randint(0, 16, (3, 10), dtype=torch.uint8)
    packed = codes.pack_fp4(c)
    assert packed[0, 0] == c[0, 0] + 16 * c[0, 1]
    assert torch.equal(codes.fp4_codes(codes.unpack_fp4(packed, E2M1), E2M1) & 7, c & 7)
