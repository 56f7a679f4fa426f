"""Made-up constants: what a real load gives, in everything but the values."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from templates import values
from torch import Tensor, nn

import fxquant
from fxquant.errors import ConfigError
from fxquant.materialize.meter import LiveBytes
from fxquant.runtime.quantized_weight import QuantizedWeight

IDS = torch.tensor([[1, 2, 3]])
OPTIONS = {"scheme": "int8", "config": {"head": "int8"}, "example_inputs": (IDS,)}


class Net(nn.Module):
    """A table, a transposed weight, vectors, buffers of several dtypes."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        dtype = torch.bfloat16
        self.embed = nn.Embedding(40, width, dtype=dtype)
        self.up = nn.Linear(width, 2 * width, dtype=dtype)
        self.down = nn.Parameter(torch.empty(2 * width, width, dtype=dtype))
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.head = nn.Linear(width, 40, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("gain", torch.full((width,), 0.5, dtype=dtype))
        self.register_buffer("ids", torch.arange(5))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids)) * self.gain
        return self.head(torch.tanh(self.up(x)) @ self.down) + self.ids.sum() * self.mask.sum()


def state() -> dict[str, Tensor]:
    found = Net().state_dict()
    found.pop("head.weight")
    return {key: values(*t.shape, dtype=t.dtype) if t.is_floating_point() else t for key, t in found.items()}


def on_meta() -> Net:
    with fxquant.meta_init():
        return Net().eval()


def dummy(ckpt: object = None, **options: object) -> Net:
    return fxquant.compile(on_meta(), ckpt, weights="dummy", **{**OPTIONS, **options})


@pytest.fixture(params=["none", "file", "dict", "stream"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    if request.param == "file":
        save_file(state(), tmp_path / "model.safetensors")
        return tmp_path
    return {"none": None, "dict": state(), "stream": iter(())}[request.param]


def constants_of(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.constants if isinstance(tensor, QuantizedWeight) else (tensor,)


def told(model: nn.Module) -> dict[str, object]:
    """All that a load decides but the values."""
    return {
        name: (
            type(tensor),
            getattr(tensor, "form", None),
            tensor.shape,
            tensor.dtype,
            [(part.shape, part.dtype, part.stride()) for part in constants_of(tensor)],
        )
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def test_forms_shapes_dtypes_and_bytes_are_those_of_a_load(source: object) -> None:
    loaded = fxquant.compile(on_meta(), state(), **OPTIONS)
    made_up = dummy(source)
    assert told(made_up) == told(loaded)
    one, two = fxquant.report(loaded), fxquant.report(made_up)
    assert one.resident_bytes == two.resident_bytes
    assert [(row.fqn, row.form) for row in one.plan.weights] == [
        (row.fqn, row.form) for row in two.plan.weights
    ]
    assert (two.read_bytes, two.origin) == (0, "made up (weights='dummy')")


def test_it_runs_and_gives_finite_values(source: object) -> None:
    model = dummy(source)
    with torch.no_grad():
        out = model(IDS)
    assert out.shape == (1, 3, 40)
    assert out.isfinite().all()
    assert fxquant.report(model).fallbacks == 0


def test_two_runs_make_up_the_same() -> None:
    torch.manual_seed(1)
    one = dummy()
    torch.manual_seed(2)
    two = dummy()
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    assert all(
        torch.equal(a, b) for p, q in pairs for a, b in zip(constants_of(p), constants_of(q), strict=True)
    )


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    dummy()
    assert torch.equal(torch.rand(4), expected)


def test_buffers_keep_their_values() -> None:
    """With and without a checkpoint: what the model computes in its __init__ is no weight."""
    for model in (dummy(), dummy(state())):
        assert torch.equal(model.gain, torch.full((48,), 0.5, dtype=torch.bfloat16))
        assert torch.equal(model.ids, torch.arange(5))
        assert torch.equal(model.mask, torch.tensor([True, False]))


def test_codes_spread_over_their_range_and_weights_have_the_variance_of_an_init() -> None:
    inputs = (torch.ones(1, 512, dtype=torch.bfloat16),)
    model = fxquant.compile(_large(), weights="dummy", scheme="int8", example_inputs=inputs)
    weight = model[0].weight
    assert isinstance(weight, QuantizedWeight)
    codes, scale = weight.constants
    assert codes.float().abs().mean() > 50
    assert (codes.min(), codes.max()) == (-127, 127)
    floats = codes.float() * scale
    assert floats.var().item() == pytest.approx(1 / 512, rel=0.1)


def _large(size: int = 512, depth: int = 2) -> nn.Module:
    with fxquant.meta_init():
        layers = (nn.Linear(size, size, dtype=torch.bfloat16) for _ in range(depth))
        return nn.Sequential(*layers).to(torch.bfloat16).eval()


def test_there_never_is_a_float_model() -> None:
    """All that exists at any time are the constants, and a few MiB of drawn values."""
    model = _large(1024, 12)
    inputs = (torch.ones(1, 1024, dtype=torch.bfloat16),)
    gc.collect()
    with LiveBytes() as meter:
        model = fxquant.compile(model, weights="dummy", scheme="int8", example_inputs=inputs)
    resident = fxquant.report(model).resident_bytes
    assert resident < meter.peak["cpu"] <= resident + (6 << 20)
    assert fxquant.report(model).measured_peak["cpu"] == resident


@pytest.mark.parametrize("bad", ["random", None, True])
def test_other_kinds_of_weights_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"weights=.*'checkpoint', 'dummy'"):
        fxquant.compile(on_meta(), weights=bad, **OPTIONS)


def test_without_a_checkpoint_weights_must_be_made_up() -> None:
    with pytest.raises(ConfigError, match="needs a checkpoint"):
        fxquant.compile(on_meta(), **OPTIONS)


def test_a_checkpoint_that_does_not_fit_is_refused_all_the_same() -> None:
    broken = {**state(), "up.weight": torch.ones(3, 3)}
    with pytest.raises(fxquant.errors.WeightMismatchError, match=r"up\.weight"):
        dummy(broken)
