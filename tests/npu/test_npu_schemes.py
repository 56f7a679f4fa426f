"""Schemes other than dynamic int8, end to end on the simulated NPU: numbers, inputs, storage.

The rules know the chip that a test sets (``simulate``), as does the plan (``target``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scheme_numbers import BF16, FULL, HALF, ULP, computed, reference, weight_only
from torch import Tensor, nn

import fxquant
from fxquant import numerics
from fxquant.scheme import find_scheme

N, K = 24, 128
A2, A3, A950, A310P = "Ascend910B2", "Ascend910_9391", "Ascend950PR_9579", "Ascend310P3"


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


EVERY = [(K,), (1, K), (17, K), (0, K), (2, 3, K), (2, 1, 3, K), (1, 2, 3, 1, K), (2, 0, K)]
SOME = [(17, K), (0, K), (2, 3, K)]


def inputs(dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


CASES = [
    *((scheme, dtype, bias) for scheme in ("int8_weight_only", "int8_static") for dtype in (HALF, BF16)
      for bias in (False, True)),
    ("int8_weight_only", FULL, True), ("int8_static", FULL, True), ("int4_g32", BF16, True),
    ("int4_g32", HALF, True), ("int4_g32", FULL, False), ("int4_g64", BF16, False),
    ("int4_g32_asym", BF16, True), ("int4_g32_asym", HALF, False), ("int4_channel", HALF, True),
    ("int4_channel_asym", BF16, False), ("int4_g64_asym(refine=hqq)", BF16, False),
    ("int4_g128(refine=clip)", BF16, True),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "dtype", "bias"), CASES, ids=str)
def test_numbers_of_every_input(simulate, npu, scheme, dtype, bias):
    state = state_of(make(bias, dtype))
    model = compiled(state, torch.zeros(2, K, dtype=dtype), scheme, A2, bias=bias)
    every = bias and scheme in ("int8_static", "int4_g32") and dtype == HALF
    for x in inputs(dtype, EVERY if every else SOME):
        want = expected(scheme, x, state)
        for call in (model, model.forward):  # in the graph, and outside of it
            out = run(call, x)
            assert (out.shape, out.dtype) == (want.shape, x.dtype)
            assert torch.equal(out, want), (x.shape, (out.float() - want.float()).abs().max())
    report = fxquant.report(model)
    assert (report.fallbacks, report.unnormalized) == (0, ())


@pytest.mark.parametrize("dtype", [HALF, BF16, FULL], ids=str)
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "mxfp8", "mxfp4"])
def test_numbers_on_950(simulate, npu, scheme, dtype):
    simulate(A950)
    bias = dtype != HALF
    state = state_of(make(bias, dtype))
    model = compiled(state, torch.zeros(2, K, dtype=dtype), scheme, A950, bias=bias)
    for x in inputs(dtype, EVERY if (scheme, dtype) == ("mxfp8", BF16) else SOME):
        want = reference(scheme, x, state["weight"], state.get("bias"))
        for call in (model, model.forward):
            out = run(call, x)
            assert (out.shape, out.dtype) == (want.shape, x.dtype)
            torch.testing.assert_close(out, want, rtol=ULP[dtype], atol=ULP[dtype] / 8)
    report = fxquant.report(model)
    assert (report.fallbacks, report.unnormalized) == (0, ())


@pytest.mark.parametrize(("scheme", "bias"), [("int8_weight_only", True), ("int8_static", False)])
def test_numbers_on_310p(simulate, npu, scheme, bias):
    simulate(A310P)
    state = state_of(make(bias, HALF))
    model = compiled(state, torch.zeros(2, K, dtype=HALF), scheme, A310P, bias=bias)
    assert model.fxquant_plan.weight("weight").form.startswith(scheme)
    for x in inputs(HALF, SOME):
        for call in (model, model.forward):
            assert torch.equal(run(call, x), expected(scheme, x, state))


AHEAD = [
    ("int8_weight_only", A2), ("int4_g32_asym", A3), ("int8_static", A2), ("fp8", A950), ("fp8_block", A950),
    ("mxfp8", A950), ("mxfp4", A950),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "chip"), AHEAD)
def test_the_program_ahead_of_time(simulate, npu, scheme, chip):
    """One exported graph for every number of rows, none among them."""
    simulate(chip)
    state = state_of(make(True, BF16))
    with fxquant.meta_init():
        model = make(True, BF16).eval()
    config = {"re:.*": {"scheme": scheme, "act_scale": 0.05}} if scheme == "int8_static" else None
    lowered = fxquant.lower(
        model, state, backend="npu", scheme=scheme, config=config, target=f"{chip},cann=9.0",
        example_inputs=(torch.zeros(3, K, dtype=BF16, device=npu),), dynamic=True,
    ).materialize()  # fmt: skip
    of_codes = scheme.startswith("int")
    for x in inputs(BF16, [(17, K), (1, K), (0, K)]):
        want = (
            expected(scheme, x, state)
            if of_codes
            else reference(scheme, x, state["weight"], state.get("bias"))
        )
        torch.testing.assert_close(run(lowered, x), want, rtol=0 if of_codes else ULP[BF16], atol=2.0**-10)


def test_a_scheme_that_the_chip_does_not_take_stays_float(simulate, npu):
    state = state_of(make(True, BF16))
    model = compiled(state, torch.zeros(2, K, dtype=BF16), "mxfp8", A2)
    row = model.fxquant_plan.weight("weight")
    assert row.form == "float"
    assert row.reason.startswith("needs 950: npu_dynamic_mx_quant on A2")
    with pytest.raises(fxquant.errors.RefusedError, match="needs 950"):
        compiled(state, torch.zeros(2, K, dtype=BF16), "mxfp8", A2, strict=True)
