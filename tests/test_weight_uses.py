"""Every use of a weight: rewritten, or float with the reason; never raw codes, never wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxquant
from reference import error


@dataclass(frozen=True)
class Case:
    """A model over parameters of the given shapes; ``quantized`` names those that take codes."""

    run: Callable[..., Tensor]
    shapes: dict[str, tuple[int, ...]]
    quantized: set[str]
    reasons: dict[str, str] = field(default_factory=dict)
    rewritten: int | None = None
    inputs: tuple[Tensor, ...] = (torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1)),)


def mha(m: nn.Module, x: Tensor) -> Tensor:
    out, _ = F.multi_head_attention_forward(
        x, x, x, 16, 2, m.w, m.b, None, None, False, 0.0, m.o, m.ob, training=False, need_weights=False
    )
    return out


def lookup_and_linear(m: nn.Module, ids: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(F.embedding(ids, m.e), m.w)), m.e)


def packed(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.w.chunk(3)
    return F.linear(x, q) + F.linear(x, k) * F.linear(x, v)


IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])
CASES = {
    "linear": Case(lambda m, x: F.linear(x, m.w, m.b), {"w": (8, 16), "b": (8,)}, {"w"}),
    "matmul_t": Case(lambda m, x: x @ m.w.t(), {"w": (8, 16)}, {"w"}),
    "matmul_T": Case(lambda m, x: x @ m.w.T, {"w": (8, 16)}, {"w"}),
    "matmul_mT": Case(lambda m, x: x @ m.w.mT, {"w": (8, 16)}, {"w"}),
    "transpose": Case(lambda m, x: x @ m.w.transpose(0, 1), {"w": (8, 16)}, {"w"}),
    "permute": Case(lambda m, x: x @ m.w.permute(1, 0), {"w": (8, 16)}, {"w"}),
    "in_out": Case(lambda m, x: x @ m.w, {"w": (16, 8)}, {"w"}),
    "addmm": Case(lambda m, x: torch.addmm(m.b, x.view(-1, 16), m.w), {"w": (16, 8), "b": (8,)}, {"w"}),
    "mm": Case(lambda m, x: torch.mm(x[0], m.w), {"w": (16, 8)}, {"w"}),
    "square": Case(lambda m, x: x @ m.w, {"w": (16, 16)}, {"w"}),
    "vector": Case(lambda m, x: F.linear(x[0, 0], m.w), {"w": (8, 16)}, {"w"}),
    "slice": Case(lambda m, x: F.linear(x, m.w[2:7]), {"w": (8, 16)}, {"w"}),
    "slice_step": Case(lambda m, x: F.linear(x, m.w[::2]), {"w": (8, 16)}, {"w"}),
    "slice_k": Case(lambda m, x: F.linear(x[..., 4:9], m.w[:, 4:9]), {"w": (8, 16)}, {"w"}),
    "slice_both": Case(lambda m, x: F.linear(x[..., :9], m.w[-5:-1, :9]), {"w": (8, 16)}, {"w"}),
    "narrow": Case(lambda m, x: F.linear(x, m.w.narrow(0, 1, 3)), {"w": (8, 16)}, {"w"}),
    "slice_of_t": Case(lambda m, x: x @ m.w.t()[:, 2:5], {"w": (8, 16)}, {"w"}),
    "chunk": Case(packed, {"w": (24, 16)}, {"w"}, rewritten=3),
    "split": Case(lambda m, x: F.linear(x, m.w.split([3, 5])[1]), {"w": (8, 16)}, {"w"}),
    "unbind_row": Case(
        lambda m, x: F.linear(x, m.w) + (x @ m.w[0])[..., None],
        {"w": (8, 16)},
        set(),
        {"w": "also used by aten.select"},
    ),
    "cast": Case(lambda m, x: F.linear(x.bfloat16(), m.w.bfloat16()).float(), {"w": (8, 16)}, {"w"}),
    "shared": Case(lambda m, x: F.linear(F.linear(x, m.w), m.w), {"w": (16, 16)}, {"w"}, rewritten=2),
    "mha": Case(mha, {"w": (48, 16), "b": (48,), "o": (16, 16), "ob": (16,)}, {"w", "o"}),
    "strided_input": Case(lambda m, x: F.linear(x.transpose(0, 1)[::2], m.w), {"w": (8, 16)}, {"w"}),
    "expanded_input": Case(lambda m, x: F.linear(x[:1].expand(4, -1, -1), m.w), {"w": (8, 16)}, {"w"}),
    "empty_batch": Case(lambda m, x: F.linear(x[:0], m.w), {"w": (8, 16)}, {"w"}),
    "five_d": Case(lambda m, x: F.linear(x[None, None], m.w), {"w": (8, 16)}, {"w"}),
    "tied_lookup": Case(
        lookup_and_linear, {"e": (8, 16), "w": (16, 16)}, {"w"}, {"e": "tied to an embedding"}, inputs=(IDS,)
    ),
    "sum_too": Case(
        lambda m, x: F.linear(x, m.w) + m.w.sum(), {"w": (8, 16)}, set(), {"w": "also used by aten.sum"}
    ),
    "both_axes": Case(lambda m, x: F.linear(x, m.w) @ m.w, {"w": (8, 16)}, set(), {"w": "both axes"}),
    "left_operand": Case(
        lambda m, x: m.w @ x[0].t(), {"w": (8, 16)}, set(), {"w": "something else than the weight"}
    ),
    "einsum": Case(
        lambda m, x: torch.einsum("bsk,nk->bsn", x, m.w), {"w": (8, 16)}, set(), {"w": "used by aten.einsum"}
    ),
    "three_d": Case(lambda m, x: F.linear(x, m.w[1]), {"w": (2, 8, 16)}, {"w"}),
    "three_d_rows": Case(
        lambda m, x: F.linear(x, m.w[:, 1]), {"w": (2, 8, 16)}, set(), {"w": "used by aten.select"}
    ),
    "matrix_bias": Case(
        lambda m, x: torch.addmm(m.b, x[0], m.w), {"w": (16, 8), "b": (5, 8)}, set(), {"w": "addend of shape"}
    ),
    "reshaped": Case(
        lambda m, x: F.linear(x, m.w.view(4, 32)[:, :16]), {"w": (8, 16)}, set(), {"w": "used by aten.view"}
    ),
    "only_added": Case(lambda m, x: x + m.w[0], {"w": (8, 16)}, set(), {"w": "cannot take codes"}),
    "one_column": Case(lambda m, x: F.linear(x[..., 3:4], m.w[:, 5:6]), {"w": (8, 16)}, {"w"}),
    "one_row": Case(lambda m, x: F.linear(x, m.w[2:3]), {"w": (8, 16)}, {"w"}),
    "keywords": Case(lambda m, x: F.linear(input=x, weight=m.w, bias=None), {"w": (8, 16)}, {"w"}),
    "scalar_input": Case(
        lambda m, x, s: F.linear(x * s, m.w),
        {"w": (8, 16)},
        {"w"},
        inputs=(torch.ones(3, 16), torch.tensor(0.5)),
    ),
    "in_autocast": Case(lambda m, x: m.under_autocast(x), {"w": (8, 16)}, {"w"}),
}


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.run = case.run
        generator = torch.Generator().manual_seed(2)
        for name, shape in case.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def under_autocast(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, self.w).float()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(self, *inputs)


@pytest.mark.parametrize("name", CASES)
def test_use(name: str) -> None:
    case = CASES[name]
    reference = Model(case).eval()
    with fxquant.meta_init():
        model = Model(case)
    model = fxquant.compile(model.eval(), reference.state_dict(), scheme="int8", example_inputs=case.inputs)
    plan = model.fxquant_plan
    assert {weight.fqn for weight in plan.quantized} == case.quantized
    for fqn, reason in case.reasons.items():
        assert reason in plan.weight(fqn).reason
    with torch.no_grad():
        got, expected = model(*case.inputs), reference(*case.inputs)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert error(got, expected) < (0.03 if case.quantized else 1e-6)
    report = fxquant.report(model)
    assert report.fallbacks == 0
    assert report.eager_linears == 0
    if case.rewritten is not None:
        assert report.rewritten == case.rewritten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tied_table_that_was_asked_for(dtype: torch.dtype) -> None:
    """The look-up stays exact, the head computes with codes."""
    case = CASES["tied_lookup"]
    reference = Model(case).eval().to(dtype)
    with fxquant.meta_init():
        model = Model(case).to(dtype)
    state = reference.state_dict()
    model = fxquant.compile(
        model.eval(), state, scheme="int8", config={"e": "int8"}, example_inputs=case.inputs
    )
    assert model.fxquant_plan.weight("e").form == "int8+table"
    assert model.fxquant_plan.weight("e").resident_bytes == 8 * 16 + 8 * 4 + 8 * 16 * dtype.itemsize
    with torch.no_grad():
        assert error(model(IDS), reference(IDS)) < 0.03
        assert torch.equal(F.embedding(IDS, model.e), F.embedding(IDS, reference.e))
    assert fxquant.report(model).fallbacks == 0


def test_strict_raises_with_the_reason() -> None:
    case = CASES["both_axes"]
    with pytest.raises(fxquant.errors.RefusedError, match=r"w: contracted along both axes"):
        fxquant.plan(Model(case), scheme="int8", example_inputs=case.inputs, strict=True)


def test_target_limit_keeps_a_layer_float() -> None:
    kernel = fxquant.Kernel(op="fxquant::scaled_mm", reason="test")
    limit = fxquant.Limit(op="fxquant::scaled_mm", axis="N", maximum=7, source="test")
    target = fxquant.Target(
        name="tiny", device_type="cpu", kernels={"fxquant::scaled_mm": kernel}, limits=(limit,)
    )
    case = CASES["linear"]
    plan = fxquant.plan(Model(case), scheme="int8", target=target, example_inputs=case.inputs)
    assert plan.weight("w").reason == "fxquant::scaled_mm on tiny takes N <= 7, got N = 8 (test)"


def test_written_weight_is_refused_not_lost() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        m.w.mul_(0.5)
        return F.linear(x, m.w)

    case = Case(run, {"w": (8, 16)}, set())
    plan = fxquant.plan(Model(case), scheme="int8", example_inputs=case.inputs)
    assert "written in place" in plan.weight("w").reason


@pytest.mark.parametrize("eagerly", [False, True])
def test_dtypes_of_autocast_regions(eagerly: bool) -> None:
    """Regions in the forward, under an outer one and without, give the dtypes that eager mode gives."""

    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                inside = self.fc(x)
                with torch.autocast("cpu", enabled=False):
                    off = self.fc(x)
            return inside, off, self.fc(x)

    x = CASES["linear"].inputs[0]
    reference = Regions().eval()
    with fxquant.meta_init():
        model = Regions()
    model = fxquant.compile(model.eval(), reference.state_dict(), scheme="int8", example_inputs=(x,))
    run = model.forward if eagerly else model
    for outer in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=outer):
            got, expected = run(x), reference(x)
        assert [part.dtype for part in got] == [part.dtype for part in expected]
        assert all(error(a, b) < 0.03 for a, b in zip(got, expected, strict=True))
    assert not torch.is_autocast_enabled("cpu")
    assert fxquant.report(model).fallbacks == 0


@pytest.mark.parametrize("grad", [False, True])
def test_transformer_encoder_layer_is_rewritten_with_and_without_gradients(grad: bool) -> None:
    """Its opaque inference path, which torch takes under no_grad, would compute in float."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    reference = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with fxquant.meta_init():
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = CASES["linear"].inputs[0]
    model = fxquant.compile(model.eval(), reference.state_dict(), scheme="int8", example_inputs=(x,))
    with torch.set_grad_enabled(grad):
        assert error(model(x).detach(), reference(x).detach()) < 0.03
    report = fxquant.report(model)
    assert (report.quantized, report.rewritten, report.fallbacks) == (8, 8, 0)
    assert torch.backends.mha.get_fastpath_enabled()
