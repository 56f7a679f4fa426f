"""Every decision about a wide weight runs on its chip and CANN version, and gives right numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxquant
from fxquant.form import Form
from fxquant.numerics import quantize_weight
from fxquant.scheme import QuantSpec

CHIPS = {"A2": "Ascend910B2", "A3": "Ascend910_9391", "950": "Ascend950PR_9579", "310P": "Ascend310P3"}
SIZES = [(n, 32) for n in (65535, 65536, 131070, 131071, 196606)] + [(32, k) for k in (65535, 65536, 70000)]
LIMIT = 65535
HALF, BF16 = torch.float16, torch.bfloat16


def weights(n: int, k: int, dtype: torch.dtype, bias: torch.dtype | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n + k)
    state = {"weight": (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)}
    if bias is not None:
        state["bias"] = torch.randn(n, generator=generator).to(bias)
    return state


def inputs(k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(3, k, generator=torch.Generator().manual_seed(k)).to(dtype)


def expected(x: Tensor, state: dict[str, Tensor], *, token_first: bool) -> Tensor:
    """Exact integer sums, then scales and bias in float32, in the order of the op that stands for it."""
    codes, scale = quantize_weight(state["weight"].float(), QuantSpec.parse("int8[1,*]"))
    token = x.float().abs().amax(-1, keepdim=True) / 127
    x_codes = (x.float() / token).round().double()
    sums = (x_codes @ codes.double().t()).float()
    out = sums * token * scale.t() if token_first else sums * scale.t() * token
    if "bias" in state:
        out = out + state["bias"].float()
    return out.to(x.dtype)


def compiled(state: dict[str, Tensor], graphs: list[Counter[str]], **options: Any) -> nn.Module:
    n, k = state["weight"].shape
    dtype = state["weight"].dtype
    with fxquant.meta_init():
        model = nn.Linear(k, n, bias="bias" in state, dtype=dtype)
        if "bias" in state and state["bias"].dtype != dtype:
            model.bias = nn.Parameter(model.bias.to(state["bias"].dtype))

    def inner(gm: fx.GraphModule, given: object) -> Callable[..., Any]:
        graphs.append(Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function"))
        return gm.forward

    options = {"example_inputs": (inputs(k, dtype),), "inner": inner, **options}
    return fxquant.compile(model, state, scheme="int8", backend="npu", progress=False, **options)


def form_for(n: int, k: int, family: str, cann: str, policy: str) -> str:
    """What the plan is to say, from the issue's words alone."""
    if family == "310P":
        return "int8" if n % 16 == 0 and k % 16 == 0 else "float"
    waived = family in ("A2", "A3") and cann == "9.1.0"
    if family == "950" or waived or max(n, k) <= LIMIT:
        return "int8.kn"
    if policy == "transpose" and n > LIMIT:
        return "int8"
    parts_k = {65536: "32768,32768", 70000: "35008,34992"}
    if k > LIMIT:
        return f"int8{'' if policy == 'transpose' else '.kn'}/k:{parts_k[k]}"
    parts_n = {
        65536: "32768,32768",
        131070: "65535,65535",
        131071: "43696,43696,43679",
        196606: "49152,49152,49152,49150",
    }
    return f"int8.kn/n:{parts_n[n]}"


@pytest.mark.parametrize("policy", ["auto", "split", "transpose"])
@pytest.mark.parametrize("cann", ["8.5.0", "9.0.0", "9.1.0"])
@pytest.mark.parametrize("family", CHIPS)
def test_each_size_runs_as_planned(simulate, family, cann, policy):
    simulate(CHIPS[family], cann)
    for i, (n, k) in enumerate(SIZES):
        dtype = HALF if family == "310P" or i % 2 else BF16
        state = weights(n, k, dtype, None if family == "310P" or i % 3 == 0 else dtype)
        x, graphs = inputs(k, dtype), []
        model = compiled(state, graphs, target=f"{CHIPS[family]},cann={cann}", wide=policy)
        row = model.fxquant_plan.weight("weight")
        assert row.form == form_for(n, k, family, cann, policy), (n, k, row.reason)
        with torch.no_grad():
            out = model(x.npu()).cpu()
        torch.compiler.reset()
        (graph,) = graphs
        if row.form == "float":
            assert "not a multiple of 16" in row.reason
            assert torch.equal(out, F.linear(x, state["weight"]))
            assert not [name for name in graph if name.startswith("npu")]
            continue
        form = Form.parse(row.form)
        token_first = bool(form.parts_k) or family == "310P"
        assert torch.equal(out, expected(x, state, token_first=token_first)), (n, k, row.form)
        parts = max(len(form.parts_n), 1) * max(len(form.parts_k), 1)
        if family == "310P":
            assert graph == {"npu.npu_quant_matmul_dequant.default": 1, "aten.reshape.default": 1}
        else:
            assert graph["npu.npu_quant_matmul.default"] == parts
            assert graph["npu.npu_dynamic_quant.default"] == 1
            assert graph["aten.cat.default"] == (len(form.parts_n) > 1)
            assert not [name for name in graph if name.startswith("fxquant")]


@pytest.mark.parametrize(
    ("dtype", "bias", "words"),
    [(HALF, HALF, "takes no bias"), (BF16, None, "x is bfloat16"), (torch.float32, None, "x is bfloat16")],
    ids=["bias", "bf16", "fp32"],
)
def test_310p_stays_float_with_the_reason(simulate, dtype, bias, words):
    simulate(CHIPS["310P"])
    state, graphs = weights(48, 64, dtype, bias), []
    model = compiled(state, graphs, target="Ascend310P3,cann=9.0.0")
    row = model.fxquant_plan.weight("weight")
    assert row.form == "float"
    assert words in row.reason
    x = inputs(64, dtype)
    with torch.no_grad():
        assert torch.equal(model(x.npu()).cpu(), F.linear(x, *state.values()))


@pytest.mark.parametrize("policy", ["host", "float"])
def test_policies_that_keep_floats(simulate, policy):
    simulate(CHIPS["A2"])
    state, graphs = weights(65536, 32, BF16, None), []
    model = compiled(state, graphs, target="Ascend910B2,cann=9.0.0", wide=policy)
    row = model.fxquant_plan.weight("weight")
    assert row.form == ("float@host" if policy == "host" else "float")
    assert f'wide="{policy}"' in row.reason
    assert model.weight.device.type == "npu"  # what it claims
    held = model.weight.value if policy == "host" else model.weight
    assert held.device.type == ("cpu" if policy == "host" else "npu")
    x = inputs(32, BF16)
    with torch.no_grad():
        assert torch.equal(model(x.npu()).cpu(), F.linear(x, state["weight"]))


def test_the_chip_of_the_device_is_planned_for(simulate):
    simulate(CHIPS["950"])  # torch_npu reads the CANN version once, the chip's name each time
    state = weights(65536, 32, BF16, None)
    model = compiled(state, [])
    assert model.fxquant_plan.target.startswith("Ascend950PR_9579,cann=")
    assert model.fxquant_plan.weight("weight").form == "int8.kn"
