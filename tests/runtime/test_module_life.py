"""The user's module stays the user's module: what each of its methods does once it is quantized."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant.errors import QuantizedWeightError
from fxquant.runtime.quantized_weight import QuantizedWeight


class Net(nn.Module):
    """Two linears, one of them tied under two names, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.again = nn.Linear(16, 24, bias=False)
        self.again.weight = self.first.weight
        self.norm = nn.LayerNorm(24)
        self.last = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.tanh(self.first(x)) + self.again(x)))


@pytest.fixture
def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {k: torch.randn(v.shape, generator=generator) / 4 for k, v in Net().state_dict().items()}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(4))


def eager(state: dict[str, Tensor]) -> Net:
    net = Net().eval()
    state = {**state, "again.weight": state["first.weight"]}
    net.load_state_dict(state)
    return net


def compiled(state: dict[str, Tensor], scheme: str = "int8", **options: object) -> Net:
    with fxquant.meta_init():
        net = Net()
    given = {name: value for name, value in state.items() if name != "again.weight"}
    example = (torch.zeros(2, 16),)
    return fxquant.compile(net.eval(), given, scheme=scheme, example_inputs=example, **options)


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def close(a: Tensor, b: Tensor, tolerance: float = 0.03) -> bool:
    return bool((a.float() - b.float()).norm() <= tolerance * b.float().norm())


def test_same_object_same_type_and_ties(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled(state)
    assert type(net) is Net
    assert net.again.weight is net.first.weight
    assert isinstance(net.first.weight, QuantizedWeight)
    assert isinstance(net.first.weight, nn.Parameter)
    assert net.first.weight.shape == (24, 16)
    assert net.first.weight.dtype == torch.float32
    assert close(run(net, x), run(eager(state), x))
    report = fxquant.report(net)
    assert report.fallbacks == 0
    assert report.eager_linears == 0
    assert report.rewritten == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_to_dtype_changes_the_claim_and_keeps_the_constants(
    state: dict[str, Tensor], x: Tensor, dtype: torch.dtype
) -> None:
    net = compiled(state)
    run(net, x)
    codes, scale = net.first.weight.codes, net.first.weight.scale
    assert net.to(dtype) is net
    assert net.first.weight.dtype == dtype
    assert net.first.weight.codes.dtype == torch.int8
    assert net.first.weight.scale.dtype == torch.float32
    assert torch.equal(net.first.weight.codes, codes)
    assert torch.equal(net.first.weight.scale, scale)
    assert net.again.weight is net.first.weight
    out = run(net, x.to(dtype))
    assert out.dtype == dtype
    assert close(out, run(eager(state), x), 0.06)
    assert fxquant.report(net).fallbacks == 0


def test_half_and_back_and_to_device(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled(state)
    before = run(net, x)
    net.half().float().to("cpu").cpu()
    assert close(run(net, x), before, 1e-2)
    assert net.again.weight is net.first.weight


def test_to_a_device_that_replaces_parameters(state: dict[str, Tensor]) -> None:
    net = compiled(state).to("meta")
    assert all(parameter.is_meta for parameter in net.parameters())
    assert net.first.weight.codes.is_meta
    assert net.again.weight is net.first.weight


def test_one_module_under_two_parents_is_converted_once(state: dict[str, Tensor], x: Tensor) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.same = nn.ModuleList([self.net.first])

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    with fxquant.meta_init():
        parent = Parent()
    given = {f"net.{name}": value for name, value in state.items() if name != "again.weight"}
    parent = fxquant.compile(parent.eval(), given, scheme="int8", example_inputs=(x,)).half()
    assert parent.net.first.weight is parent.net.again.weight
    assert parent.same[0].weight is parent.net.first.weight
    assert close(run(parent, x.half()), run(eager(state), x))


def test_submodule_to_keeps_quantized(state: dict[str, Tensor]) -> None:
    net = compiled(state)
    net.last.to(torch.bfloat16)
    assert isinstance(net.last.weight, QuantizedWeight)
    assert net.last.bias.dtype == torch.bfloat16


def test_to_integer_dtype_is_refused(state: dict[str, Tensor]) -> None:
    net = compiled(state)
    with pytest.raises((QuantizedWeightError, TypeError)):
        net.to(torch.int32)
    with pytest.raises(QuantizedWeightError, match="float32, bfloat16 or float16"):
        net.double()
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert isinstance(net.first.weight, QuantizedWeight)


def test_deepcopy_computes_from_its_own_weights(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled(state)
    before = run(net, x)
    twin = copy.deepcopy(net)
    assert twin.first.weight is not net.first.weight
    assert twin.first.weight.codes.data_ptr() != net.first.weight.codes.data_ptr()
    assert twin.again.weight is twin.first.weight
    with torch.no_grad():
        net.first.weight.copy_(torch.zeros(24, 16))
    assert torch.equal(run(twin, x), before)
    assert not torch.equal(run(net, x), before)
    assert fxquant.report(twin).rewritten == 3
    assert fxquant.report(twin).eager_linears == 0
    twin.half()
    assert net.first.weight.dtype == torch.float32


def test_pickle_round_trip(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled(state)
    before = run(net, x)
    twin = pickle.loads(pickle.dumps(net))
    assert torch.equal(run(twin, x), before)
    assert twin.again.weight is twin.first.weight
    twin.half()
    assert isinstance(twin.first.weight, QuantizedWeight)
    assert fxquant.report(twin).rewritten == 3


def test_state_dict_round_trip(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled(state)
    before = run(net, x)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert isinstance(saved["first.weight"], QuantizedWeight)
    other = compiled({name: value * 0.5 for name, value in state.items()})
    address = other.first.weight.codes.data_ptr()
    other.load_state_dict(saved)
    assert torch.equal(run(other, x), before)
    assert other.first.weight.codes.data_ptr() == address


def test_load_state_dict_of_floats_quantizes_them(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled({name: value * 0.5 for name, value in state.items()})
    run(net, x)
    floats = {**state, "again.weight": state["first.weight"]}
    net.load_state_dict(floats)
    assert torch.equal(run(net, x), run(compiled(state), x))


def test_load_state_dict_assign_makes_a_float_layer(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled(state)
    run(net, x)
    net.load_state_dict({**state, "again.weight": state["first.weight"]}, assign=True)
    assert close(run(net, x), run(eager(state), x), 1e-5)


@pytest.mark.parametrize("write", ["zero_", "add_", "mul_", "normal_", "fill_"])
def test_writes_in_place_raise(state: dict[str, Tensor], write: str) -> None:
    weight = compiled(state).first.weight
    arguments = (1.0,) if write in ("add_", "mul_", "fill_") else ()
    with torch.no_grad(), pytest.raises(QuantizedWeightError, match="copy_"):
        getattr(weight, write)(*arguments)


def test_data_setter_raises(state: dict[str, Tensor]) -> None:
    weight = compiled(state).first.weight
    with pytest.raises(QuantizedWeightError, match="copy_"):
        weight.data = torch.zeros(24, 16)


def test_index_writes_raise(state: dict[str, Tensor]) -> None:
    weight = compiled(state).first.weight
    with torch.no_grad(), pytest.raises(QuantizedWeightError):
        weight[0] = 0.0


def test_writes_through_views_raise(state: dict[str, Tensor]) -> None:
    weight = compiled(state).first.weight
    floats = weight.dequantize()
    views = (weight[0], weight.t(), weight.view(-1)[3:], weight.chunk(2)[1], weight.unsqueeze(0))
    for view in views:
        with torch.no_grad(), pytest.raises(QuantizedWeightError, match="copy_"):
            view.zero_()
    assert torch.equal(weight[0] * 2, floats[0] * 2)
    assert type(weight[0] * 2) is Tensor
    assert torch.equal(torch.cat(weight.split(5)), floats)


def test_gradients_raise(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled(state)
    with pytest.raises(QuantizedWeightError, match="ignore"):
        net.first.weight.requires_grad_(True)
    with pytest.raises(QuantizedWeightError, match="ignore"):
        net.first.weight.requires_grad = True
    out = net(x.requires_grad_(True))
    with pytest.raises(QuantizedWeightError, match="no_grad"):
        out.sum().backward()


def test_share_memory_and_nbytes(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled(state)
    before = run(net, x)
    net.share_memory()
    assert net.first.weight.codes.is_shared()
    assert torch.equal(run(net, x), before)
    assert net.first.weight.nbytes == 24 * 16 + 24 * 4


def test_other_ops_see_the_floats_and_are_counted(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled(state)
    weight = net.first.weight
    expected = weight.codes.float() * weight.scale
    assert torch.equal(weight + 0, expected)
    assert torch.equal(weight.t() @ torch.ones(24), expected.t() @ torch.ones(24))
    assert fxquant.report(net).fallbacks >= 2
    assert torch.equal(weight.dequantize(), expected)


def test_no_raw_storage(state: dict[str, Tensor]) -> None:
    weight = compiled(state).first.weight
    for access in (weight.untyped_storage, weight.data_ptr, weight.numpy):
        with pytest.raises(QuantizedWeightError, match=r"state_dict"):
            access()


def test_train_and_hooks(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled(state)
    before = run(net, x)
    seen: list[torch.Size] = []
    handle = net.first.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    assert torch.equal(run(net, x), before)
    assert seen == [torch.Size([5, 24])]
    handle.remove()
    net.train()
    assert torch.equal(run(net, x), before)
    net.eval()
    assert fxquant.report(net).fallbacks == 0


@pytest.mark.parametrize(
    "root", [lambda: nn.Linear(16, 8), lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh())]
)
def test_bare_torch_module_as_root_is_compiled(root: object, x: Tensor) -> None:
    reference = root().eval()  # type: ignore[operator]
    with fxquant.meta_init():
        net = root()  # type: ignore[operator]
    net = fxquant.compile(net.eval(), reference.state_dict(), scheme="int8", example_inputs=(x,))
    assert close(run(net, x), run(reference, x))
    report = fxquant.report(net)
    assert (report.rewritten, report.eager_linears, report.fallbacks) == (1, 0, 0)


def test_a_submodule_called_alone_uses_the_quantized_op(state: dict[str, Tensor], x: Tensor) -> None:
    net = compiled(state)
    out = run(net.first, x)
    assert close(out, run(eager(state).first, x))
    report = fxquant.report(net)
    assert report.eager_linears == 1
    assert report.fallbacks == 0


def test_the_eager_path_runs_the_kernel_of_the_plan(state: dict[str, Tensor], x: Tensor) -> None:
    calls: list[str] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    kernel = fxquant.Kernel(op="fxquant::scaled_mm", reason="test")
    target = fxquant.Target(name="reference", device_type="cpu", kernels={"fxquant::scaled_mm": kernel})
    net = compiled(state, target=target)
    with Seen():
        run(net.first, x)
    assert "fxquant.scaled_mm.default" in calls
    assert not any("fxquant_cpu" in call for call in calls)


def test_frame_reuse_reads_each_layers_own_constants(x: Tensor) -> None:
    """One compiled frame serves many layers after a graph break; constants must not be baked in."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return torch.tanh(self.fc(x))

    reference = nn.Sequential(*(Layer() for _ in range(4))).eval()
    with fxquant.meta_init():
        net = nn.Sequential(*(Layer() for _ in range(4)))
    net = fxquant.compile(net.eval(), reference.state_dict(), scheme="int8", config={"1": "none"})
    assert [w.fqn for w in net.fxquant_plan.quantized] == ["0.fc.weight", "2.fc.weight", "3.fc.weight"]
    assert close(run(net, x), run(reference, x))
    assert fxquant.report(net).fallbacks == 0
