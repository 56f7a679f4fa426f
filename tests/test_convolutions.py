"""Convolution weights as codes: every kind of convolution, the forms, what is refused, loading, saving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxquant
from fxquant.errors import RefusedError
from fxquant.materialize.meter import LiveBytes
from fxquant.runtime.quantized_weight import QuantizedWeight
from reference import error
from zoo.case import CONV, run
from zoo.models import ZOO

W8 = "int8_weight_only"
BY_NAME = {case.name: case for case in ZOO}


def by_hand(weight: Tensor) -> Tensor:
    """What int8 codes of a weight ``[O, I, *kernel]`` stand for, with a scale for each output channel."""
    rows = weight.detach().float().flatten(1)
    scale = rows.abs().amax(1, keepdim=True) / 127
    return ((rows / scale).round() * scale).view(weight.shape).to(weight.dtype)


class Net(nn.Module):
    """One convolution."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv = make()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Unet(nn.Module):
    """Down, up, a skip, a 1x1, a depthwise and a linear for the time step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.time = nn.Linear(4, 16)
        self.mid = nn.Conv2d(16, 16, 3, padding="same", groups=16, dilation=2, padding_mode="circular")
        self.point = nn.Conv2d(16, 16, 1, bias=False)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.conv_out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        skip = torch.relu(self.conv_in(x))
        x = torch.relu(self.down(skip)) + self.time(t)[:, :, None, None]
        x = self.point(torch.relu(self.mid(x)))
        return self.conv_out(torch.cat([self.up(x), skip], 1))


def pair(
    make: Callable[[], nn.Module], inputs: tuple[Tensor, ...], config: dict[str, str], **options: Any
) -> tuple[Any, Any]:
    reference = make().eval().to(inputs[0].dtype)
    with fxquant.meta_init():
        model = make().eval().to(inputs[0].dtype)
    state = {name: value.clone() for name, value in reference.state_dict().items()}
    options = {"scheme": "none", "example_inputs": inputs, **options}
    return reference, fxquant.compile(model, state, config=config, **options)


def call(model: nn.Module, *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(*inputs)


def counts(model: nn.Module) -> tuple[int, int, int]:
    report = fxquant.report(model)
    return report.rewritten, report.eager_linears, report.fallbacks


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "1d": (lambda: nn.Conv1d(6, 8, 3), (2, 6, 20), "conv3"),
    "2d": (lambda: nn.Conv2d(6, 8, (3, 5), stride=2, padding=(1, 2)), (2, 6, 12, 14), "conv3x5"),
    "3d": (lambda: nn.Conv3d(4, 8, (1, 2, 2)), (2, 4, 3, 8, 8), "conv1x2x2"),
    "same": (lambda: nn.Conv1d(6, 8, 4, padding="same"), (2, 6, 20), "conv4"),
    "valid": (lambda: nn.Conv2d(6, 8, 3, padding="valid", bias=False), (2, 6, 9, 9), "conv3x3"),
    "dilated": (lambda: nn.Conv2d(6, 8, 3, dilation=2), (2, 6, 9, 9), "conv3x3"),
    "groups": (lambda: nn.Conv2d(6, 8, 3, groups=2), (2, 6, 9, 9), "conv3x3"),
    "depthwise": (lambda: nn.Conv1d(6, 12, 4, groups=6, padding=3), (2, 6, 20), "conv4"),
    "reflect": (lambda: nn.Conv2d(6, 8, 3, padding=2, padding_mode="reflect"), (2, 6, 9, 9), "conv3x3"),
    "1x1": (lambda: nn.Conv2d(6, 8, 1), (2, 6, 9, 9), "conv1x1"),
    "unbatched": (lambda: nn.Conv2d(6, 8, 3), (6, 9, 9), "conv3x3"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind: str, dtype: torch.dtype) -> None:
    make, shape, form = KINDS[kind]
    x = torch.randn(shape).to(dtype)
    reference, model = pair(lambda: Net(make), (x,), {"conv": W8})
    row = model.fxquant_plan.weight("conv.weight")
    assert (row.form, row.reason) == (f"{W8}.{form}", "config 'conv', floats made for each call")
    assert row.resident_bytes == row.float_bytes // dtype.itemsize + 4 * row.shape[0]
    assert model.fxquant_plan.rewrites == {"linear": 0, "convolution": 1}
    assert list(model.fxquant_plan.kernels) == ["fxquant::dequantize_weight"]
    weight = model.conv.weight
    assert isinstance(weight, QuantizedWeight)
    assert (weight.shape, weight.dtype) == (reference.conv.weight.shape, dtype)
    assert torch.equal(weight.dequantize(), by_hand(reference.conv.weight))
    with torch.no_grad():
        reference.conv.weight.copy_(by_hand(reference.conv.weight))
    expected = call(reference, x)
    assert torch.equal(call(model, x), expected)
    assert counts(model) == (1, 0, 0)
    assert torch.equal(call(model.conv, x), expected)
    assert counts(model) == (1, 1, 0)


@pytest.mark.parametrize(
    "scheme", ["int4_g32", "int4_g64_asym(refine=hqq)", "mxfp4_weight_only", "nvfp4_weight_only"]
)
def test_schemes(scheme: str) -> None:
    x = torch.randn(2, 7, 9, 9)
    reference, model = pair(lambda: Net(lambda: nn.Conv2d(7, 8, 3)), (x,), {"re:.*conv.*": scheme})
    assert model.fxquant_plan.weight("conv").form == f"{scheme}.conv3x3.odd"
    assert error(call(model, x), call(reference, x)) < 0.2
    assert counts(model) == (1, 0, 0)


IMAGE, STEP = torch.randn(2, 3, 16, 16), torch.randn(2, 4)


def test_unet() -> None:
    reference, model = pair(Unet, (IMAGE, STEP), {"re:.*": W8, "time": "int8"}, dynamic=True)
    plan = model.fxquant_plan
    assert plan.rewrites == {"linear": 1, "convolution": 5}
    assert plan.weight("up").form == "float"
    assert "the weight of a transposed convolution is [in, out, *kernel]" in plan.weight("up").reason
    assert error(call(model, IMAGE, STEP), call(reference, IMAGE, STEP)) < 0.03
    assert counts(model) == (6, 0, 0)


def test_floats_of_one_layer_at_a_time() -> None:
    """In the run graph the floats of a layer are made right before its convolution."""
    with fxquant.meta_init():
        model = Unet()
    low = fxquant.lower(model, scheme="none", config={"re:.*": W8}, example_inputs=(IMAGE, STEP))
    names = [node.target for node in low.run_graph.graph.nodes if node.op == "call_function"]
    made = [i for i, name in enumerate(names) if name is torch.ops.fxquant.dequantize_weight.default]
    assert len(made) == 5
    assert all("conv2d" in str(names[i + 2]) for i in made)


def test_memory_of_floats_while_running() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(6)))

    reference = make().eval()
    with fxquant.meta_init():
        model = make().eval()
    x = torch.randn(1, 64, 4, 4)
    options: dict[str, Any] = {
        "scheme": "none",
        "config": {"*": W8},
        "example_inputs": (x,),
        "dynamic": False,
    }
    low = fxquant.lower(model, reference.state_dict(), **options).materialize()
    with torch.no_grad(), LiveBytes() as live:
        got = low(x)
    assert error(got, call(reference, x)) < 0.03
    assert live.peak["cpu"] < 1.5 * 64 * 64 * 9 * 4


def test_only_an_entry_asks() -> None:
    with fxquant.meta_init():
        model = Unet()
    plan = fxquant.plan(model, scheme="int8", example_inputs=(IMAGE, STEP))
    assert [weight.fqn for weight in plan.quantized] == ["time.weight"]
    assert plan.weight("mid").reason == "convolution: stays float unless a config entry asks"


@pytest.mark.parametrize(
    ("scheme", "other"),
    [("int8", W8), ("mxfp4", "mxfp4_weight_only"), ("w4a8_g128", "int4_g128"), ("fp8", W8)],
)
def test_activations_are_not_quantized(scheme: str, other: str) -> None:
    with fxquant.meta_init():
        model = Unet()
    options: dict[str, Any] = {"scheme": "none", "config": {"mid": scheme}, "example_inputs": (IMAGE, STEP)}
    reason = f"weight only for convolutions: use {other}"
    assert reason in fxquant.plan(model, **options).weight("mid").reason
    with pytest.raises(RefusedError, match=reason):
        fxquant.plan(model, strict=True, **options)


class Twice(Net):
    """The weight is used by something else too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.conv.weight.sum()


class Sliced(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.conv.weight[:4])


class AsInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.conv.weight, x)


REFUSED = {Twice: "also used by aten.sum", Sliced: "used by aten.conv2d", AsInput: "used by aten.conv2d"}


@pytest.mark.parametrize("make", REFUSED)
def test_refusals(make: type[Net]) -> None:
    with fxquant.meta_init():
        model = make(lambda: nn.Conv2d(6, 8, 3))
    x = torch.zeros(6, 6, 3, 3) if make is AsInput else torch.zeros(2, 6, 9, 9)
    row = fxquant.plan(model, scheme="none", config={"conv": W8}, example_inputs=(x,)).weight("conv")
    assert row.form == "float"
    assert REFUSED[make] in row.reason


def test_module_walk() -> None:
    with fxquant.meta_init():
        model = Unet()
    plan = fxquant.plan(model, scheme="int8", config={"re:.*(conv|up|mid).*": W8})
    forms = {weight.fqn: weight.form for weight in plan.weights if len(weight.shape) > 1}
    assert forms["conv_in.weight"] == f"{W8}.conv3x3"
    assert (forms["down.weight"], forms["up.weight"]) == ("float", "float")
    assert plan.weight("up").reason == "used by a transposed convolution"


# ----------------------------------------------------------------------------------- eager and live


def test_other_eager_uses_count_as_fallbacks() -> None:
    x = torch.randn(2, 6, 9, 9)
    reference, model = pair(lambda: Net(lambda: nn.Conv2d(6, 6, 3)), (x,), {"conv": W8})
    assert model.conv.weight.sum().isfinite()
    assert counts(model) == (0, 0, 1)
    with torch.no_grad():
        assert (
            error(F.conv_transpose2d(x, model.conv.weight), F.conv_transpose2d(x, reference.conv.weight))
            < 0.02
        )
    assert counts(model) == (0, 0, 2)


def test_a_live_model() -> None:
    model = Unet().eval()
    expected = call(model, IMAGE, STEP)
    options = {"scheme": "int8", "config": {"re:(conv_.*|down|mid|point)": W8}}
    compiled = torch.compile(model, backend="fxquant", options=options)
    assert error(call(compiled, IMAGE, STEP), expected) < 0.03
    with torch.no_grad():
        model.conv_out.weight.mul_(2)
        expected = model(IMAGE, STEP)
    assert error(call(compiled, IMAGE, STEP), expected) < 0.03


# --------------------------------------------------------------------------------------------- zoo


@pytest.mark.parametrize("name", ["unet", "vit"])
def test_a_model_of_the_zoo(name: str) -> None:
    case = BY_NAME[name]
    reference = case.build()
    with fxquant.meta_init():
        model = case.build()
    state = {key: value.clone() for key, value in reference.state_dict().items()}
    config = {pattern: W8 for pattern, reason in case.floats.items() if reason == CONV}
    options: dict[str, Any] = {"scheme": "int8", "config": config, "example_inputs": case.inputs()}
    fxquant.compile(model, state, **options)
    plan = model.fxquant_plan
    kernels = [weight for weight in plan.weights if len(weight.shape) == 4]
    assert kernels
    assert all(".conv" in weight.form for weight in kernels)
    assert len(plan.quantized) == case.linears + len(kernels)
    assert plan.rewrites["convolution"] == len(kernels)
    assert error(run(case, model), run(case, reference)) < 0.06
    assert counts(model) == (sum(plan.rewrites.values()), 0, 0)
