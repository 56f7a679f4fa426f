"""Inputs, biases and ways to use a weight, on the simulated NPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers.pytorch_utils import Conv1D

import fxquant
from fxquant.runtime.quantized_weight import QuantizedWeight

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
DTYPES = [HALF, BF16, FULL]
N, K = 24, 32


class Graphs(list["fx.GraphModule"]):
    """An inner compiler that keeps the rewritten graphs and runs them as they are."""

    def __call__(self, gm: fx.GraphModule, given: object) -> Callable[..., Any]:
        self.append(gm)
        return gm.forward

    def counts(self) -> Counter[str]:
        """Ops of the one graph there is."""
        (gm,) = self
        return Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def values(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    named = [
        *model.named_parameters(),
        *((n, b) for n, b in model.named_buffers() if n in model.state_dict()),
    ]
    return {
        name: (torch.randn(tensor.shape, generator=generator) / 4).to(tensor.dtype) for name, tensor in named
    }


def compiled(make: Callable[[], nn.Module], *example: Tensor, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The model on the NPU, and its float twin on the CPU."""
    twin = make().eval()
    state = values(twin)
    twin.load_state_dict(state, strict=False)  # tied names come once
    with fxquant.meta_init():
        model = make().eval()
    options = {"scheme": "int8", "backend": "npu", "progress": False, "example_inputs": example, **options}
    return fxquant.compile(model, state, **options), twin


def computed(dtype: torch.dtype) -> torch.dtype:
    return HALF if dtype == HALF else BF16


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """int8 linear as the NPU's ops compute it, which know fp16 and bf16 alone."""
    result = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    scale = (weight.float().abs().amax(1) / 127).clamp_min(torch.finfo(FULL).tiny)
    codes = (weight.float() / scale[:, None]).round().double()
    rows = x.to(computed(x.dtype)).float()
    token = rows.abs().amax(-1, keepdim=True) / 127
    out = ((rows / token).round().double() @ codes.t()).float() * scale * token
    out = out if bias is None else out + bias.float()
    return out.to(computed(result)).to(result)


def close(out: Tensor, expected: Tensor, tolerance: float = 0.04) -> bool:
    return bool((out.cpu().float() - expected.float()).norm() <= tolerance * expected.float().norm())


def run(model: nn.Module, *given: Tensor) -> Any:
    with torch.no_grad():
        return model(*given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [None, *DTYPES], ids=str)
def test_every_rank_and_number_of_rows(npu, dtype, bias):
    def make() -> nn.Module:
        model = nn.Linear(K, N, bias=bias is not None, dtype=dtype)
        if bias is not None:
            model.bias = nn.Parameter(model.bias.to(bias), requires_grad=False)
        return model

    graphs = Graphs()
    model, twin = compiled(make, torch.zeros(2, K, dtype=dtype), inner=graphs)
    # Torch's float linear takes a bias of another dtype in a trace only, and promotes.
    result = dtype if bias is None else torch.promote_types(dtype, bias)
    generator = torch.Generator().manual_seed(2)
    for rows in (1, 17, 0):
        for shape in [(K,)] * (rows == 1) + [(rows, K), (2, rows, K), (2, 1, rows, K), (1, 2, rows, 3, K)]:
            x = torch.randn(shape, generator=generator).to(dtype)
            out = run(model, x.to(npu))
            assert (out.shape, out.dtype, out.device) == ((*shape[:-1], N), result, npu)
            assert torch.equal(out.cpu(), exact(x, twin.weight, twin.bias)), shape
    names = {str(node.target) for gm in graphs for node in gm.graph.nodes if node.op == "call_function"}
    assert not {name for name in names if name.startswith("fxquant.") or name == "aten.linear.default"}
    report = fxquant.report(model)
    assert (report.fallbacks, report.eager_linears, report.unnormalized) == (0, 0, ())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_graph_takes_every_batch(npu, dtype):
    graphs = Graphs()
    model, twin = compiled(lambda: nn.Linear(K, N, dtype=dtype), torch.zeros(2, K, dtype=dtype), inner=graphs)
    for rows in (2, 5, 17, 300):
        x = torch.randn(rows, K).to(dtype)
        assert torch.equal(run(model, x.to(npu)).cpu(), exact(x, twin.weight, twin.bias))
    counts = graphs.counts()
    assert (counts["npu.npu_quant_matmul.default"], counts["npu.npu_dynamic_quant.default"]) == (1, 1)


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_noncontiguous_and_expanded_inputs(npu, dtype):
    model, twin = compiled(lambda: nn.Linear(K, N, dtype=dtype), torch.zeros(2, K, dtype=dtype))
    base = torch.randn(K, 6).to(dtype)
    for x in (base.t(), base.t()[::2], base.t()[:1].expand(4, K), base.t().view(2, 3, K).transpose(0, 1)):
        given = x.to(npu) if x.is_contiguous() else base.to(npu).t().as_strided(x.shape, x.stride())
        given = given if x.is_contiguous() or x.stride() == given.stride() else x.to(npu)
        assert torch.equal(run(model, given).cpu(), exact(x, twin.weight, twin.bias))


class Tied(nn.Module):
    """An embedding whose table is the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, K, dtype=HALF)
        self.head = nn.Linear(K, 40, bias=False, dtype=HALF)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def test_tied_head_with_its_table(npu):
    ids = torch.arange(12).view(3, 4)
    graphs = Graphs()
    model, twin = compiled(Tied, ids, config={"head": "int8"}, inner=graphs)
    weight = model.embed.weight
    assert model.head.weight is weight
    assert str(weight.form) == "int8.kn+table"
    out = run(model, ids.to(npu))
    table = twin.embed.weight
    assert torch.equal(weight.table.cpu(), table)
    assert torch.equal(out.cpu(), exact(F.embedding(ids, table), table, None))
    counts = graphs.counts()
    assert (counts["npu.npu_quant_matmul.default"], counts["aten.embedding.default"]) == (1, 1)
    assert torch.equal(model.embed(ids.to(npu)).cpu(), F.embedding(ids, table))  # outside of graphs


def test_conv1d(npu):
    x = torch.randn(2, 3, K).to(BF16)
    graphs = Graphs()
    model, twin = compiled(lambda: Conv1D(N, K).to(BF16), x, inner=graphs)
    assert str(model.weight.form) == "int8.t.kn"
    assert torch.equal(run(model, x.to(npu)).cpu(), exact(x, twin.weight.t(), twin.bias))
    assert graphs.counts()["npu.npu_quant_matmul.default"] == 1


class Attention(nn.Module):
    """q, k and v of one input, in one weight or in three."""

    def __init__(self, *, fused: bool, how: str = "chunk") -> None:
        super().__init__()
        self.how = how
        names = ["qkv"] if fused else ["q", "k", "v"]
        self.names = names
        for name in names:
            setattr(self, name, nn.Linear(K, 3 * K // len(names), dtype=BF16))
        self.out = nn.Linear(K, K, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        parts = [getattr(self, name)(x) for name in self.names]
        if len(parts) == 1:
            parts = list(parts[0].chunk(3, -1) if self.how == "chunk" else parts[0].split(K, -1))
        return self.out(F.scaled_dot_product_attention(*parts))


@pytest.mark.parametrize("how", ["chunk", "split"])
def test_fused_qkv(npu, how):
    x = torch.randn(2, 5, K).to(BF16)
    graphs = Graphs()
    model, twin = compiled(lambda: Attention(fused=True, how=how), x, inner=graphs)
    assert close(run(model, x.to(npu)), run(twin, x))
    counts = graphs.counts()
    assert (counts["npu.npu_quant_matmul.default"], counts["npu.npu_dynamic_quant.default"]) == (2, 2)


def test_q_k_v_share_one_quantization(npu):
    x = torch.randn(2, 5, K).to(BF16)
    graphs = Graphs()
    model, twin = compiled(lambda: Attention(fused=False), x, inner=graphs)
    assert close(run(model, x.to(npu)), run(twin, x))
    counts = graphs.counts()
    assert (counts["npu.npu_quant_matmul.default"], counts["npu.npu_dynamic_quant.default"]) == (4, 2)


class CutWeight(nn.Module):
    """One weight, used in cuts, as in nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3 * N, K, dtype=HALF))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        q, kv = self.weight.split([N, 2 * N])
        return F.linear(x, q), F.linear(y, kv)


def test_cuts_of_one_weight(npu):
    x, y = torch.randn(4, K).to(HALF), torch.randn(5, K).to(HALF)
    graphs = Graphs()
    model, twin = compiled(CutWeight, x, y, inner=graphs)
    assert isinstance(model.weight, QuantizedWeight)
    q, kv = run(model, x.to(npu), y.to(npu))
    assert torch.equal(q.cpu(), exact(x, twin.weight[:N], None))
    assert torch.equal(kv.cpu(), exact(y, twin.weight[N:], None))
    assert graphs.counts()["npu.npu_quant_matmul.default"] == 2


class AdaLN(nn.Module):
    """A wide modulation that is cut into six by everybody who reads it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.mod = nn.Linear(16, 6 * width, dtype=BF16)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, a, b, d = self.mod(F.silu(c)).chunk(6, dim=-1)
        return x + gate * (x * (1 + scale) + shift) + a * b * d


@pytest.mark.parametrize(
    ("width", "form", "cats"),
    [(16128, "int8.kn/n:48384,48384", 0), (13000, "int8.kn/n:39000,39000", 0), (8192, "int8.kn", 0)],
)
def test_adaln_parts_follow_the_cuts(simulate, npu, width, form, cats):
    simulate("Ascend910B2", "9.0.0")
    x, c = torch.randn(2, width).to(BF16), torch.randn(2, 16).to(BF16)
    graphs = Graphs()
    model, twin = compiled(
        lambda: AdaLN(width), x, c, target="Ascend910B2,cann=9.0.0", inner=graphs, dynamic=False
    )
    assert model.fxquant_plan.weight("mod").form == form
    assert close(run(model, x.to(npu), c.to(npu)), run(twin, x, c))
    counts = graphs.counts()
    assert counts["npu.npu_quant_matmul.default"] == max(form.count(",") + 1, 1)
    assert counts["aten.cat.default"] == cats


@pytest.mark.parametrize("make", [nn.Linear, AdaLN], ids=["linear", "adaln"])
def test_weights_land_on_the_second_device(npu, make):
    given = [torch.randn(3, K).to(BF16)]
    if make is AdaLN:
        given = [torch.randn(2, 64).to(BF16), torch.randn(2, 16).to(BF16)]
    second = torch.device("npu:1")

    def build() -> nn.Module:
        model = make(K, N, dtype=BF16) if make is nn.Linear else AdaLN(64)
        model.register_buffer("kept", torch.ones(3), persistent=False)
        model.register_buffer("stored", torch.ones(3))
        return model

    before = torch.npu.memory_allocated(0)
    model, twin = compiled(build, *given, device="npu:1")
    tensors = [*model.parameters(), *model.buffers()]
    held = [
        part
        for tensor in tensors
        for part in (tensor.constants if isinstance(tensor, QuantizedWeight) else (tensor,))
    ]
    assert {tensor.device for tensor in [*tensors, *held]} == {second}
    assert torch.npu.memory_allocated(0) == before
    out = run(model, *(x.to(second) for x in given))
    assert out.device == second
    assert close(out, run(twin, *given))
    assert torch.npu.memory_allocated(0) == before


def test_a_device_that_is_not_there_is_refused(npu):
    with pytest.raises(fxquant.errors.ConfigError, match="npu:7: this process has 2"):
        compiled(lambda: nn.Linear(K, N), torch.zeros(2, K), device="npu:7")
