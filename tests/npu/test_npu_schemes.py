"""Schemes other than dynamic int8, end to end on the simulated NPU: numbers, inputs, storage.

The rules know the chip that a test sets (``simulate``), as does the plan (``target``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant import numerics
from fxquant.scheme import QuantSpec, find_scheme

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
N, K = 24, 128
A2, A3, A950, A310P = "Ascend910B2", "Ascend910_9391", "Ascend950PR_9579", "Ascend310P3"

WEIGHT_ONLY = [
    "int8_weight_only", "int4_g32", "int4_g64", "int4_g32_asym", "int4_channel", "int4_channel_asym",
    "int4_g64_asym(refine=hqq)", "int4_g128(refine=clip)",
]  # fmt: skip


def make(bias: bool = True, dtype: torch.dtype = BF16, n: int = N, k: int = K) -> nn.Module:
    return nn.Linear(k, n, bias=bias, dtype=dtype)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: (torch.randn(tensor.shape, generator=generator) / 4).to(tensor.dtype)
        for name, tensor in model.state_dict().items()
    }


def compiled(source: Any, example: Tensor, scheme: str, chip: str, **options: Any) -> nn.Module:
    bias = options.pop("bias", True)
    with fxquant.meta_init():
        model = make(bias, example.dtype, options.pop("n", N), example.shape[-1]).eval()
    if scheme == "int8_static":
        options["config"] = {"*": {"scheme": scheme, "act_scale": 0.05}}
    options = {"scheme": scheme, "example_inputs": (example,), "target": f"{chip},cann=9.0", **options}
    return fxquant.compile(model, source, backend="npu", progress=False, **options)


def run(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(x.npu()).cpu()
    return out


def computed(dtype: torch.dtype) -> torch.dtype:
    return HALF if dtype == HALF else BF16


def weight_only(x: Tensor, weight: Tensor, bias: Tensor | None, spec: QuantSpec) -> Tensor:
    """Scales and offsets rounded to the dtype of the op, values too, then a product in float64."""
    dtype = computed(x.dtype)
    codes, scale, *zero = numerics.quantize_weight(weight, spec)
    ones = torch.ones_like(scale)
    floats = numerics.dequantize_weight((codes, ones, *zero), spec, weight.shape[1], FULL)  # u - zero
    columns = spec.block[1] or weight.shape[1]
    wide = scale.to(dtype).float().repeat_interleave(columns, 1)[:, : weight.shape[1]]
    if zero:
        plain = numerics.dequantize_weight((codes, ones, zero[0] * 0), spec, weight.shape[1], FULL)
        offset = (8 - zero[0]).to(dtype).float().repeat_interleave(columns, 1)[:, : weight.shape[1]]
        floats = plain - 8 + offset
    values = (floats * wide).to(dtype)
    out = (x.to(dtype).double() @ values.double().t()).float()
    out = out if bias is None else out + bias.float()
    return out.to(dtype).to(x.dtype)


def static(x: Tensor, weight: Tensor, bias: Tensor | None, act_scale: float = 0.05) -> Tensor:
    """Int8 with one scale; of a float16 product without a bias the op takes the upper 19 bits."""
    dtype = computed(x.dtype)
    spec = find_scheme("int8_static").weight
    codes, scale = numerics.quantize_weight(weight, spec)
    step = torch.tensor(act_scale)
    rows = (x.float() / step).round().clamp(-128, 127)
    sums = (rows.double() @ codes.double().t()).float()
    if dtype == HALF and bias is not None:
        out = sums * scale[:, 0] * step
    else:
        both = scale[:, 0] * step
        if dtype == HALF:
            both = (both.view(torch.int32) & ~0x1FFF).view(FULL)
        out = sums * both
    out = out if bias is None else out + bias.float()
    return out.to(dtype).to(x.dtype)


def expected(scheme: str, x: Tensor, state: dict[str, Tensor]) -> Tensor:
    spec = find_scheme(scheme).weight
    assert spec is not None
    if scheme == "int8_static":
        return static(x, state["weight"], state.get("bias"))
    return weight_only(x, state["weight"], state.get("bias"), spec)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(K,), (1, K), (17, K), (0, K), (2, 3, K), (2, 1, 3, K), (1, 2, 3, 1, K), (2, 0, K)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BF16, FULL], ids=str)
@pytest.mark.parametrize("scheme", [*WEIGHT_ONLY, "int8_static"])
def test_numbers_of_every_input(simulate, npu, scheme, dtype, bias):
    state = state_of(make(bias, dtype))
    model = compiled(state, torch.zeros(2, K, dtype=dtype), scheme, A2, bias=bias)
    for x in inputs(dtype):
        want = expected(scheme, x, state)
        for call in (model, model.forward):  # in the graph, and outside of it
            out = run(call, x)
            assert (out.shape, out.dtype) == (want.shape, x.dtype)
            assert torch.equal(out, want), (x.shape, (out.float() - want.float()).abs().max())
    report = fxquant.report(model)
    assert (report.fallbacks, report.unnormalized) == (0, ())
