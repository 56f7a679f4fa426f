"""A quantized weight with experts in Python code outside of compiled graphs: loops, indices, views."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxquant
from fxquant import numerics
from fxquant.errors import QuantizedWeightError
from fxquant.form import Form
from fxquant.numerics.experts import dequantize_experts, quantize_experts
from fxquant.runtime.host_weight import HostWeight
from fxquant.runtime.quantized_weight import QuantizedWeight
from fxquant.scheme import SCHEMES
from reference import error, int8_linear

E, N, K = 4, 24, 32


def weight(scheme: str = "int8", *, transposed: bool = False) -> tuple[QuantizedWeight, Tensor]:
    """The quantized experts, and the float ones in the layout that is claimed."""
    rows = torch.randn(E, N, K) * torch.tensor([0.01, 1.0, 3.0, 100.0])[:, None, None]
    spec = SCHEMES[scheme].weight
    assert spec is not None
    form = Form(scheme=scheme, transposed=transposed)
    quantized = QuantizedWeight(quantize_experts(rows, spec), form, torch.float32)
    return quantized, rows.mT.contiguous() if transposed else rows


def int8_rows(x: Tensor, rows: Tensor) -> Tensor:
    return int8_linear(x, rows)


X = torch.randn(6, K)
IDS = torch.tensor([3, 0, 0, 2, 3, 1])
OFFSETS = torch.tensor([2, 2, 5, 6], dtype=torch.int32)


def by_ids(rows: Tensor) -> Tensor:
    return torch.stack([int8_rows(x, rows[i]) for x, i in zip(X, IDS, strict=True)])


def by_offsets(rows: Tensor) -> Tensor:
    parts = X.split([2, 0, 3, 1])
    return torch.cat([int8_rows(x, w) for x, w in zip(parts, rows, strict=True)])


PLAIN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "one expert": (lambda w: F.linear(X, w[2]), lambda w: int8_rows(X, w[2])),
    "one expert by a tensor": (
        lambda w: F.linear(X, w[torch.tensor(1)]),
        lambda w: int8_rows(X, w[1]),
    ),
    "from the end": (lambda w: F.linear(X, w[-1]), lambda w: int8_rows(X, w[-1])),
    "each": (
        lambda w: torch.stack([F.linear(X, one) for one in w]),
        lambda w: torch.stack([int8_rows(X, one) for one in w]),
    ),
    "unbind": (
        lambda w: torch.stack([F.linear(X, one) for one in w.unbind(0)]),
        lambda w: torch.stack([int8_rows(X, one) for one in w]),
    ),
    "product with the transposed": (lambda w: X @ w[1].t(), lambda w: int8_rows(X, w[1])),
    "indices": (lambda w: torch.bmm(w[IDS], X.unsqueeze(-1)).squeeze(-1), by_ids),
    "grouped": (lambda w: torch._grouped_mm(X, w.transpose(-2, -1), OFFSETS), by_offsets),
    "F.grouped_mm": (lambda w: F.grouped_mm(X, w.mT, offs=OFFSETS), by_offsets),
    "all": (
        lambda w: torch.bmm(X[:4].view(E, 1, K), w.transpose(1, 2)),
        lambda w: torch.stack([int8_rows(X[i : i + 1], w[i]) for i in range(E)]),
    ),
}
TURNED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "one expert": (lambda w: X @ w[2], lambda w: int8_rows(X, w[2].mT)),
    "indices": (lambda w: torch.bmm(X.unsqueeze(1), w[IDS]).squeeze(1), lambda w: by_ids(w.mT)),
    "grouped": (lambda w: torch._grouped_mm(X, w, OFFSETS), lambda w: by_offsets(w.mT)),
}
WAYS = [(name, False) for name in PLAIN] + [(name, True) for name in TURNED]


@pytest.mark.parametrize(("name", "transposed"), WAYS)
@torch.no_grad()
def test_products_run_on_codes(name: str, transposed: bool) -> None:
    run, by_hand = (TURNED if transposed else PLAIN)[name]
    quantized, floats = weight(transposed=transposed)
    got = run(quantized)
    assert type(got) is Tensor
    assert error(got, by_hand(floats)) < 1e-6
    assert quantized.state.fallbacks.total() == 0
    assert quantized.state.eager_linears > 0


@torch.no_grad()
def test_the_fallback_op_of_transformers() -> None:
    from transformers.integrations import moe

    quantized, floats = weight()
    got = torch.ops.transformers.grouped_mm_fallback(X, quantized.transpose(-2, -1), offs=OFFSETS)
    assert moe
    assert error(got, by_offsets(floats)) < 1e-6
    assert quantized.state.fallbacks.total() == 0


@pytest.mark.parametrize("transposed", [False, True])
@torch.no_grad()
def test_other_ops_see_the_float_values_and_are_counted(transposed: bool) -> None:
    quantized, floats = weight(transposed=transposed)
    assert quantized.shape == floats.shape
    got = quantized + 1
    spec = SCHEMES["int8"].weight
    assert spec is not None
    values = dequantize_experts(quantized.whole, spec, K, torch.float32)
    assert torch.equal(got, (values.mT if transposed else values) + 1)
    assert error(got, floats + 1) < 1e-2
    assert quantized.state.fallbacks.total() == 1


@pytest.mark.parametrize("transposed", [False, True])
@torch.no_grad()
def test_views_claim_what_they_are(transposed: bool) -> None:
    quantized, floats = weight(transposed=transposed)
    views: list[Callable[[Tensor], Tensor]] = [
        lambda w: w[1],
        lambda w: w[IDS],
        lambda w: w.mT,
        lambda w: w.transpose(1, 2)[0].t(),
        lambda w: w.unbind(0)[3],
    ]
    for view in views:
        got = view(quantized)
        assert isinstance(got, QuantizedWeight)
        assert got.shape == view(floats).shape
        assert torch.equal(got.dequantize(), view(quantized.dequantize()))
        assert got.state is quantized.state


@torch.no_grad()
def test_copies_and_moves() -> None:
    quantized, floats = weight("int4_g32")
    parameter = quantized.as_parameter()
    again = copy.deepcopy(parameter)
    assert torch.equal(again.dequantize(), quantized.dequantize())
    buffer = io.BytesIO()
    torch.save(parameter, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert torch.equal(loaded.dequantize(), quantized.dequantize())
    parameter.copy_(floats * 2)
    assert error(parameter.dequantize(), floats * 2) < 0.1
    assert parameter.to(torch.bfloat16).shape == (E, N, K)
    with pytest.raises(QuantizedWeightError):
        parameter[0] = 0


class Loop(nn.Module):
    """Experts in a loop that depends on data, as remote code has them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(K, E, bias=False)
        self.w = nn.Parameter(torch.empty(E, N, K))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        out = x.new_zeros(x.shape[0], N)
        for i in chosen.unique().tolist():
            rows = (chosen == i).nonzero().flatten()
            out[rows] = F.linear(x[rows], self.w[i])
        return out


def test_a_loop_that_breaks_the_graph() -> None:
    """The plan does not see the loop; asked for by the walk over modules it stays float, with a reason."""
    state = {"router.weight": torch.randn(E, K), "w": torch.randn(E, N, K)}
    with fxquant.meta_init():
        model = Loop().eval()
    model = fxquant.compile(model, state, scheme="int8", example_inputs=(X,))
    reason = model.fxquant_plan.weight("w").reason
    assert reason.startswith("use unknown")
    assert model(X).shape == (6, N)


def test_indices_are_those_of_the_model() -> None:
    """A negative index counts from the end, in graphs too; one beyond the experts is an error."""

    class ByIndex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(E, N, K))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return torch.bmm(self.w[ids], x.unsqueeze(-1)).squeeze(-1)

    w, ids = torch.randn(E, N, K), torch.tensor([0, -1, 1, -E, E - 1, -2])
    with fxquant.meta_init():
        model = ByIndex().eval()
    model = fxquant.compile(model, {"w": w}, scheme="int8", example_inputs=(X, ids), strict=True)
    with torch.no_grad():
        expected = torch.bmm(w[ids], X.unsqueeze(-1)).squeeze(-1)
        assert error(model(X, ids), expected) < 0.02
        assert fxquant.report(model).rewritten == 1
        for wrong in (E, -E - 1):
            with pytest.raises(IndexError, match=r"out of range|out of bounds"):
                model(X, torch.tensor([0, wrong, 1, 0, 0, 0]))


@pytest.mark.parametrize("shape", [(N, K), (E, N, K)], ids=["a matrix", "experts"])
def test_a_weight_in_main_memory_is_copied_for_every_use(shape: tuple[int, ...]) -> None:
    """It has no codes: views and single experts are made of the copy."""
    value = torch.randn(shape)
    weight = HostWeight(value, torch.device("cpu"))
    torch.testing.assert_close(weight.mT, value.mT)
    torch.testing.assert_close(weight[1], value[1])
    torch.testing.assert_close(weight[torch.tensor([1, 0])], value[[1, 0]])
    torch.testing.assert_close(X @ weight.mT, X @ value.mT)
    torch.testing.assert_close(F.linear(X, weight[-1]), F.linear(X, value[-1]))
    assert not any(isinstance(part, QuantizedWeight) for part in weight.unbind())


def test_products_of_fakes_are_not_counted_as_calls() -> None:
    """A tracer tries a product for its shape."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    quantized, _ = weight()
    with FakeTensorMode() as mode:
        fake = quantized.like(tuple(mode.from_tensor(part) for part in quantized.constants))
        assert (torch.empty(6, K) @ fake[2].mT).shape == (6, N)
        assert torch.bmm(torch.empty(E, 5, K), fake.mT).shape == (E, 5, N)
    assert quantized.state.eager_linears == 0
    X @ quantized[2].mT
    assert quantized.state.eager_linears == 1


@pytest.mark.parametrize("scheme", ["int8", "int4_g32"])
def test_a_trace_does_not_work_through_the_experts(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo asks for shapes: how long that takes does not grow with their number."""
    quantized, _ = weight(scheme)
    mode = FakeTensorMode()

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("an expert was dequantized while tracing")

    fakes = tuple(mode.from_tensor(part) for part in quantized.constants)
    monkeypatch.setattr(numerics, "dequantize_weight", never)
    with mode:
        floats = QuantizedWeight(fakes, quantized.form, torch.float32).dequantize()
    assert (floats.shape, floats.dtype) == ((E, N, K), torch.float32)
