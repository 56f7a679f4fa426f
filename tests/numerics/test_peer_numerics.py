"""Against torchao, compressed-tensors and optimum-quanto; ``make test-peers`` has them installed.

Given the same scales, codes are the same: bit for bit, but for quotients next to a tie where the other
multiplies by a reciprocal. With scales of each one's own rule, weights are about as exact.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fxquant import numerics
from fxquant.numerics.packing import unpack
from fxquant.scheme import QuantSpec
from tests.numerics.matrices import normal

N, K = 128, 512
WEIGHTS = {
    "gaussian": normal(N, K) * 0.02,
    "rows": normal(N, K, 1) * torch.logspace(-4, 1, N)[:, None],
    "outliers": normal(N, K, 2) * (1 + 30 * (normal(N, K, 3) > 3)),
    "bfloat16": (normal(N, K, 4) * 0.05).to(torch.bfloat16).float(),
}
kinds = pytest.mark.parametrize("kind", WEIGHTS)


def module(name: str) -> Any:
    """A module of a peer; skips where its package is missing, unless ``REQUIRE_PEERS`` is set."""
    package = name.split(".", 1)[0]
    if importlib.util.find_spec(package) is None and "REQUIRE_PEERS" not in os.environ:
        pytest.skip(f"{package} is not installed: make test-peers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.fixture
def torchao() -> Any:
    return module("torchao.quantization.quant_primitives")


@pytest.fixture
def ct() -> Any:
    module("compressed_tensors")
    return module("compressed_tensors.quantization.lifecycle.forward")


def known_codes(w: Tensor, text: str, known: Tensor) -> Tensor:
    """Our codes for given scales, one to an element."""
    spec = QuantSpec.parse(text)
    dtype, shape = spec.constants(*w.shape)["codes"]
    codes = torch.empty(shape, dtype=dtype)
    numerics.quantize_known_into(w, spec, known, (codes,), numerics.scratch_for(w, spec))
    if spec.codes == "int4":
        return unpack(codes, spec, w.shape[1], torch.int8)
    return codes


def few(kind: str) -> float:
    """The part of codes that may be next to a tie: bfloat16 weights have many exact ones."""
    return 3e-3 if kind == "bfloat16" else 1e-4


def check_ties(ours: Tensor, theirs: Tensor, quotient: Tensor, kind: str) -> None:
    """Codes that differ are few, and next to a tie."""
    off = ours.double() != theirs.double()
    assert ((ours.double() - theirs.double()).abs() <= 1).all()
    apart = (quotient[off] - quotient[off].floor() - 0.5).abs()
    assert (apart <= quotient[off].abs() * 2.0**-22).all()
    assert off.double().mean() < few(kind)


def each(grid: Tensor, k: int = K) -> Tensor:
    """Scales of groups for each column."""
    return grid.double().repeat_interleave(k // grid.shape[1], 1)


@kinds
def test_int8_of_torchao(torchao: Any, kind: str) -> None:
    w = WEIGHTS[kind]
    kwargs = {"quant_min": -127, "quant_max": 127, "eps": 1e-30}
    scale, zero = torchao.choose_qparams_affine(
        w, torchao.MappingType.SYMMETRIC, (1, K), torch.int8, **kwargs
    )
    theirs = torchao.quantize_affine(w, (1, K), scale, zero, torch.int8, -127, 127)
    codes, own = numerics.quantize_weight(w, QuantSpec.parse("int8[1,*]"))
    assert torch.equal(own, scale.view(N, 1))
    check_ties(codes, theirs, w.double() / each(own), kind)


@kinds
@pytest.mark.parametrize("group", [32, 128, K])
def test_int4_of_torchao(torchao: Any, kind: str, group: int) -> None:
    w, block = WEIGHTS[kind], (1, group)
    symmetric = torchao.MappingType.SYMMETRIC
    scale, zero = torchao.choose_qparams_affine(w, symmetric, block, torch.int8, -7, 7, eps=1e-30)
    theirs = torchao.quantize_affine(w, block, scale, zero, torch.int8, -7, 7)
    scale = scale.view(N, -1)
    check_ties(known_codes(w, f"int4[1,{group}]", scale), theirs, w.double() / each(scale), kind)

    uneven = torchao.MappingType.ASYMMETRIC
    scale, zero = torchao.choose_qparams_affine(w, uneven, block, torch.int8, -8, 7, eps=1e-30)
    theirs = torchao.quantize_affine(w, block, scale, zero, torch.int8, -8, 7)
    scale, zero = scale.view(N, -1), zero.view(N, -1).float()
    ours = known_codes(w, f"int4[1,{group}]zp", torch.stack([scale, zero]))
    # The zero point is added before we round, after they do: a sum of float32, and ties.
    quotient = w.double() / each(scale)
    off = ours.double() != theirs.double()
    assert ((quotient[off] - quotient[off].floor() - 0.5).abs() <= 2.0**-19).all()
    assert off.double().mean() < few(kind)


@kinds
@pytest.mark.parametrize("block", [(1, K), (N, K), (128, 128)])
def test_e4m3_of_torchao(torchao: Any, kind: str, block: tuple[int, int]) -> None:
    w = WEIGHTS[kind]
    text = {(1, K): "e4m3[1,*]", (N, K): "e4m3[*,*]"}.get(block, "e4m3[128,128]")
    scale = torchao._choose_scale_float8(w, block)
    theirs = torchao._quantize_affine_float8(w, scale)
    codes, own = numerics.quantize_weight(w, QuantSpec.parse(text))
    assert torch.equal(own, scale)
    assert numerics.same_values(codes, theirs)


@kinds
def test_mx_of_torchao(kind: str) -> None:
    mx = module("torchao.prototype.mx_formats.mx_tensor")
    w = WEIGHTS[kind]
    for text, dtype in (("e4m3[1,32]e8m0", torch.float8_e4m3fn), ("e2m1[1,32]e8m0", torch.float4_e2m1fn_x2)):
        scale, codes = mx.to_mx(w, dtype, 32)
        own_codes, own_scale = numerics.quantize_weight(w, QuantSpec.parse(text))
        assert torch.equal(own_scale.view(torch.uint8), scale.view(torch.uint8))
        assert torch.equal(own_codes.view(torch.uint8), codes.view(torch.uint8))
        x_codes, x_scale = numerics.quantize_act(w, QuantSpec.parse(text + "dyn"))
        assert torch.equal(x_codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(x_scale.view(torch.uint8), scale.view(torch.uint8))


@kinds
def test_nvfp4_of_torchao(kind: str) -> None:
    nvfp4 = module("torchao.prototype.mx_formats.nvfp4_tensor")
    w = WEIGHTS[kind]
    unit = nvfp4.per_tensor_amax_to_scale(w.abs().amax())
    scale, codes = nvfp4.nvfp4_quantize(w, per_tensor_scale=unit)
    spec = QuantSpec.parse("e2m1[1,16]e4m3")
    own_codes, own_scale, own_unit = numerics.quantize_weight(w, spec)
    assert own_unit.item() == unit.item()
    # Theirs are at least the smallest normal e4m3, ours may be subnormal.
    same = (own_scale.float() == scale.view(N, -1).float()).repeat_interleave(8, 1)
    assert (own_scale.float() <= scale.view(N, -1).float())[~same[:, ::8]].all()
    off = (own_codes != codes) & same
    assert off.double().mean() < few(kind)  # next to ties: they multiply by a reciprocal
    assert same.double().mean() > (0.6 if kind == "rows" else 0.999)


def args(ct: Any, **kwargs: Any) -> Any:
    return ct.QuantizationArgs(**kwargs)


@kinds
def test_integers_of_compressed_tensors(ct: Any, kind: str) -> None:
    helpers = module("compressed_tensors.quantization.utils.helpers")
    w = WEIGHTS[kind]
    for group in (32, 128):
        blocks = w.view(N, -1, group)
        for symmetric in (True, False):
            how = args(ct, num_bits=4, symmetric=symmetric, strategy="group", group_size=group)
            scale, zero = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), how)
            theirs = ct.quantize(w, scale, zero, how)
            if symmetric:
                ours = known_codes(w, f"int4[1,{group}]", scale)
                theirs = theirs.clamp(-7, 7)  # -8 is theirs alone
            else:
                ours = known_codes(w, f"int4[1,{group}]zp", torch.stack([scale, zero.float()]))
            off = ours.double() != theirs.double()
            quotient = w.double() / each(scale)
            assert ((quotient[off] - quotient[off].floor() - 0.5).abs() <= 2.0**-19).all()
            assert off.double().mean() < few(kind)
    how = args(ct, num_bits=8, symmetric=True, strategy="channel")
    scale, zero = helpers.calculate_qparams(w.amin(1, keepdim=True), w.amax(1, keepdim=True), how)
    theirs = ct.quantize(w, scale, zero, how)
    assert torch.equal(known_codes(w, "int8[1,*]", scale).double(), theirs.double().clamp(-127, 127))


@kinds
def test_floats_of_compressed_tensors(ct: Any, kind: str) -> None:
    helpers = module("compressed_tensors.quantization.utils.helpers")
    w = WEIGHTS[kind]
    how = args(ct, num_bits=8, type="float", symmetric=True, strategy="channel")
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    scale, zero = helpers.calculate_qparams(low, high, how)
    theirs = ct.quantize(w, scale, zero, how, dtype=torch.float8_e4m3fn)
    codes, own = numerics.quantize_weight(w, QuantSpec.parse("e4m3[1,*]"))
    assert torch.equal(own, scale)
    assert numerics.same_values(codes, theirs)

    how = args(
        ct,
        num_bits=4,
        type="float",
        symmetric=True,
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )
    unit = helpers.generate_gparam(w.amin(), w.amax())  # 2688 / absmax: the inverse of ours
    blocks = w.view(N, -1, 16)
    scale, zero = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), how, global_scale=unit)
    theirs = ct.quantize(w, scale, zero, how, global_scale=unit)
    spec = QuantSpec.parse("e2m1[1,16]e4m3")
    own_codes, own_scale, own_unit = numerics.quantize_weight(w, spec)
    assert own_unit.item() == pytest.approx(1 / unit.item(), rel=1e-6)
    # Their scale of a block is a product, ours a quotient: next to a tie of e4m3 they differ.
    same = own_scale.float() == scale.float()
    assert same.double().mean() > 0.999
    values = unpack(own_codes, spec, K)
    off = (values.double() != theirs.double()) & same.repeat_interleave(16, 1)
    assert off.double().mean() < few(kind)


def decibels(w: Tensor, got: Tensor) -> float:
    return 10 * math.log10(
        w.double().square().sum().item() / (got.double() - w.double()).square().sum().item()
    )


def ours(w: Tensor, text: str) -> float:
    spec = QuantSpec.parse(text)
    parts = numerics.quantize_weight(w, spec)
    return decibels(w, numerics.dequantize_weight(parts, spec, w.shape[1], torch.float32))


EIGHT = ("int8[1,*]", "e4m3[1,*]", "e4m3[*,*]", "e4m3[128,128]", "e4m3[1,32]e8m0")


def slack(text: str) -> float:
    """Decibels that we may be below: a symmetric int4 code of theirs goes to -8."""
    if text in EIGHT:
        return 0.1
    return 0.7 if text.startswith("int4") and not text.endswith("zp") else 0.1


@pytest.mark.parametrize("group", [32, 64, 128, K])
def test_exactness_beside_torchao(torchao: Any, group: int, record_property: Any) -> None:
    w, block = WEIGHTS["gaussian"], (1, group)
    name = "*" if group == K else str(group)
    for text, mapping, dtype, low, high in (
        (f"int8[1,{name}]", torchao.MappingType.SYMMETRIC, torch.int8, -128, 127),
        (f"int4[1,{name}]", torchao.MappingType.SYMMETRIC, torch.int8, -8, 7),
        (f"int4[1,{name}]zp", torchao.MappingType.ASYMMETRIC, torch.int8, -8, 7),
    ):
        scale, zero = torchao.choose_qparams_affine(w, mapping, block, dtype, low, high)
        codes = torchao.quantize_affine(w, block, scale, zero, dtype, low, high)
        values = torchao.dequantize_affine(codes, block, scale, zero, dtype, low, high)
        mine, theirs = ours(w, text), decibels(w, values)
        record_property(text, f"{mine:.2f} dB, torchao {theirs:.2f} dB")
        print(f"{text}: {mine:.2f} dB, torchao {theirs:.2f} dB")
        assert mine >= theirs - slack(text)


@pytest.mark.parametrize("text", ["e4m3[1,*]", "e4m3[*,*]", "e4m3[128,128]"])
def test_exactness_of_e4m3_beside_torchao(torchao: Any, text: str) -> None:
    w = WEIGHTS["gaussian"]
    block = {"e4m3[1,*]": (1, K), "e4m3[*,*]": (N, K)}.get(text, (128, 128))
    scale = torchao._choose_scale_float8(w, block)
    values = torchao._dequantize_affine_float8(torchao._quantize_affine_float8(w, scale), scale)
    print(f"{text}: {ours(w, text):.2f} dB, torchao {decibels(w, values):.2f} dB")
    assert ours(w, text) >= decibels(w, values) - slack(text)


@pytest.mark.parametrize("mode", ["FLOOR", "RCEIL", "EVEN", "CEIL"])
def test_exactness_of_mx_beside_torchao(mode: str) -> None:
    """Theirs by default is the OCP rule too; the others are shown, and not asked for."""
    mx = module("torchao.prototype.mx_formats.mx_tensor")
    w = WEIGHTS["gaussian"]
    for text, dtype in (("e4m3[1,32]e8m0", torch.float8_e4m3fn), ("e2m1[1,32]e8m0", torch.float4_e2m1fn_x2)):
        scale, codes = mx.to_mx(w, dtype, 32, mx.ScaleCalculationMode[mode])
        parts = (
            codes.view(torch.uint8).view(QuantSpec.parse(text).type.dtype),
            scale.view(torch.uint8).view(N, -1),
        )
        values = numerics.dequantize_weight(parts, QuantSpec.parse(text), K, torch.float32)
        print(f"{text}: {ours(w, text):.2f} dB, torchao {mode} {decibels(w, values):.2f} dB")
        if mode == "FLOOR":
            assert ours(w, text) >= decibels(w, values) - slack(text)


def test_exactness_of_nvfp4_beside_torchao() -> None:
    nvfp4 = module("torchao.prototype.mx_formats.nvfp4_tensor")
    w = WEIGHTS["gaussian"]
    unit = nvfp4.per_tensor_amax_to_scale(w.abs().amax())
    scale, codes = nvfp4.nvfp4_quantize(w, per_tensor_scale=unit)
    spec = QuantSpec.parse("e2m1[1,16]e4m3")
    values = numerics.dequantize_weight((codes, scale.view(N, -1), unit.view(1, 1)), spec, K, torch.float32)
    print(f"{spec}: {ours(w, str(spec)):.2f} dB, torchao {decibels(w, values):.2f} dB")
    assert ours(w, str(spec)) >= decibels(w, values) - 0.1


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_exactness_of_int4_beside_compressed_tensors(ct: Any, group: int, symmetric: bool) -> None:
    helpers = module("compressed_tensors.quantization.utils.helpers")
    w = WEIGHTS["gaussian"]
    how = args(ct, num_bits=4, symmetric=symmetric, strategy="group", group_size=group)
    blocks = w.view(N, -1, group)
    scale, zero = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), how)
    values = ct.fake_quantize(w, scale, zero, how)
    text = f"int4[1,{group}]" if symmetric else f"int4[1,{group}]zp"
    print(f"{text}: {ours(w, text):.2f} dB, compressed-tensors {decibels(w, values):.2f} dB")
    assert ours(w, text) >= decibels(w, values) - slack(text)


@pytest.mark.parametrize("name", ["qint8", "qint4", "qfloat8"])
def test_exactness_beside_quanto(name: str) -> None:
    quanto = module("optimum.quanto")
    w = WEIGHTS["gaussian"]
    kind = getattr(quanto, name)
    if name == "qint4":
        text, optimizer = "int4[1,128]zp", quanto.MaxOptimizer()
        scale, shift = optimizer(w, kind, 0, 128)
        # Their tensor of 4 bits would build an extension: the op, and its inverse by hand.
        codes = torch.ops.quanto.quantize_affine(w, 4, 0, 128, scale, shift)
        values = (codes * scale - shift).view(w.shape)
    else:
        text = "int8[1,*]" if name == "qint8" else "e4m3[1,*]"
        values = quanto.quantize_weight(w, kind, 0, quanto.AbsmaxOptimizer()(w, kind, 0)).dequantize()
    got = decibels(w, values)
    print(f"{text}: {ours(w, text):.2f} dB, quanto {got:.2f} dB")
    # Shifts of quanto are floats and its ranges need not have 0: up to half a step of 1/15 more.
    assert ours(w, text) >= got - (0.7 if name == "qint4" else slack(text))
