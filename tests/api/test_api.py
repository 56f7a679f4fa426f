"""The public verbs: what they return, refuse and leave alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fxquant
from fxquant.errors import (
    CaptureError,
    ConfigError,
    ExtraWeightError,
    MissingBufferError,
    QuantizedWeightError,
    RefusedError,
    WeightMismatchError,
)
from reference import error

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.lm_head = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.first(x)))


def on_meta(factory: Callable[[], nn.Module] = Net) -> nn.Module:
    with fxquant.meta_init():
        return factory().eval()


@pytest.fixture
def reference() -> nn.Module:
    return Net().eval()


def test_a_factory_is_built_on_meta(reference: nn.Module) -> None:
    built = fxquant.compile(lambda: Net().eval(), reference.state_dict(), scheme="int8", example_inputs=(X,))
    with torch.no_grad():
        assert error(built(X), reference(X)) < 0.02


def test_example_inputs_may_be_on_meta(reference: nn.Module) -> None:
    state = reference.state_dict()
    plans = [
        fxquant.plan(on_meta(), state, scheme="int8", example_inputs=given)
        for given in ((X,), (X.to("meta"),), {"x": X.to("meta")}, X.to("meta"))
    ]
    assert {str(plan) for plan in plans} == {str(plans[0])}
    assert "captured: whole model, example_inputs" in str(plans[0])


def test_a_live_model_is_replaced_in_place(reference: nn.Module) -> None:
    live = Net().eval()
    with torch.no_grad():
        live(X)
        result = fxquant.compile(live, reference.state_dict(), scheme="int8", example_inputs=(X,))
        assert result is live
        assert error(live(X), reference(X)) < 0.02


def test_requires_grad_and_attributes_of_float_parameters_are_kept(reference: nn.Module) -> None:
    model = on_meta()
    model.first.bias.requires_grad_(False)
    model.lm_head.weight.tag = "kept"
    model = fxquant.compile(model, reference.state_dict(), scheme="int8", example_inputs=(X,))
    assert not model.first.bias.requires_grad
    assert model.lm_head.bias.requires_grad
    assert model.lm_head.weight.tag == "kept"


def test_heads_stay_float_unless_asked_for() -> None:
    plan = fxquant.plan(on_meta(), scheme="int8")
    assert [w.fqn for w in plan.quantized] == ["first.weight"]
    asked = fxquant.plan(on_meta(), scheme="int8", config={"lm_head": "int8"})
    assert [w.fqn for w in asked.quantized] == ["first.weight", "lm_head.weight"]


def test_without_inputs_modules_are_walked(reference: nn.Module) -> None:
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ self.extra

    odd = Odd().eval()
    model = fxquant.compile(on_meta(Odd), odd.state_dict(), scheme="int8")
    assert "module walk" in model.fxquant_plan.capture
    assert model.fxquant_plan.weight("extra").reason == "use unknown: pass example_inputs"
    with torch.no_grad():
        assert error(model(X), odd(X)) < 0.02
    with pytest.raises(RefusedError, match="example_inputs"):
        fxquant.plan(on_meta(Odd), scheme="int8", strict=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "say which scheme"),
        ({"scheme": "int3"}, "unknown scheme 'int3'"),
        ({"scheme": "checkpoint"}, "the checkpoint is float"),
        ({"scheme": "int8", "placement": "host"}, "reserved"),
        ({"scheme": "int8", "wide": "split"}, "no limit"),
        ({"scheme": "int8", "sceme": 1}, "unknown option 'sceme'"),
        ({"scheme": "int8", "backend": "tpu"}, "backend 'tpu' is not available"),
        ({"scheme": "int8", "device": "cuda"}, "does not belong"),
        ({"scheme": "int8", "ignore": "first"}, "list of patterns"),
        ({"scheme": "int8", "disable_passes": ["nothing"]}, "passes that can be left out are"),
        ({"scheme": "int8", "disable_passes": ["expand_weights"]}, "passes that can be left out are"),
        ({"scheme": "int8", "inner": "nothing"}, "inner='nothing': torch.compile has no such backend"),
        ({"scheme": "int8", "inner": 3}, "inner=3: expected 'eager'"),
        ({"scheme": "int8", "dynamic": "x"}, "dynamic='x': expected True or False"),
        ({"scheme": "int8", "strict": 1}, "strict=1: expected True or False"),
        ({"scheme": "int8", "target": "Ascend910B2"}, "goes with backend='npu'"),
        ({"scheme": "int8", "example_inputs": 3}, "example_inputs"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str, reference: nn.Module) -> None:
    model, state = on_meta(), reference.state_dict()
    for verb in (fxquant.plan, fxquant.compile, fxquant.lower):
        with pytest.raises(ConfigError, match=words):
            verb(model, state, **options)


def test_unused_patterns_and_extra_tensors_are_reported(reference: nn.Module) -> None:
    state = {**reference.state_dict(), "stray.weight": torch.zeros(2)}
    plan = fxquant.plan(on_meta(), state, scheme="int8", ignore=["no.such.layer"], example_inputs=(X,))
    assert plan.unmatched == ("no.such.layer",)
    assert plan.extra == ("stray.weight",)
    assert "no.such.layer" in str(plan)
    assert "stray.weight" in str(plan)
    with pytest.raises(ExtraWeightError, match=r"stray\.weight"):
        fxquant.plan(on_meta(), state, scheme="int8", example_inputs=(X,), strict=True)


def test_quantized_checkpoints_are_refused_not_misread(reference: nn.Module, tmp_path: Path) -> None:
    state = dict(reference.state_dict())
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(ConfigError, match="gptq"):
        fxquant.plan(on_meta(), tmp_path, scheme="int8")
    codes = {**state, "first.weight": torch.zeros(24, 16, dtype=torch.int8)}
    with pytest.raises(WeightMismatchError, match=r"first\.weight.*int8"):
        fxquant.plan(on_meta(), codes, scheme="int8", example_inputs=(X,))


def test_meta_buffers_are_refused_not_filled() -> None:
    class Buffered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(8.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table

    with torch.device("meta"):
        model = Buffered().eval()
    with pytest.raises(MissingBufferError, match="table"):
        fxquant.plan(model, scheme="int8", example_inputs=(X,))


def test_lower_needs_one_graph() -> None:
    class Branching(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="does not export"):
        fxquant.lower(on_meta(Branching), scheme="int8", example_inputs=(X,))


def test_a_model_that_does_not_export_whole_is_planned_by_submodule() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(24, 16) / 4)
            self.down = nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(x @ self.up.t()))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.never = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            return self.never(x) if x.sum() > 0 else self.never(-x)

    reference = Outer().eval()
    model = fxquant.compile(on_meta(Outer), reference.state_dict(), scheme="int8", example_inputs=(X,))
    plan = model.fxquant_plan
    assert "1 submodules" in plan.capture
    assert {w.fqn for w in plan.quantized} == {"inner.up", "inner.down.weight", "never.weight"}
    assert "module walk" in plan.weight("never").uses[0]
    with torch.no_grad():
        assert error(model(X), reference(X)) < 0.02
        assert error(model(-X), reference(-X)) < 0.02
    assert fxquant.report(model).fallbacks == 0


def test_disabled_rewrite_computes_with_floats_and_says_so(reference: nn.Module) -> None:
    model = fxquant.compile(
        on_meta(),
        reference.state_dict(),
        scheme="int8",
        example_inputs=(X,),
        disable_passes=["quantize_linear"],
    )
    with torch.no_grad():
        assert error(model(X), reference(X)) < 0.02
    assert fxquant.report(model).fallbacks == 1


def test_report_needs_a_compiled_model() -> None:
    with pytest.raises(ConfigError, match="was not compiled"):
        fxquant.report(Net())


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # Inductor's imports
@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_inner_compilers(inner: str, reference: nn.Module) -> None:
    model = fxquant.compile(
        on_meta(), reference.state_dict(), scheme="int8", example_inputs=(X,), inner=inner
    )
    plain = fxquant.compile(on_meta(), reference.state_dict(), scheme="int8", example_inputs=(X,))
    with torch.no_grad():
        assert error(model(X), plain(X)) < 1e-5
        assert error(model(X[:2]), plain(X[:2])) < 1e-5
    assert fxquant.report(model).fallbacks == 0


@pytest.mark.parametrize("branching", [False, True], ids=["whole", "by submodule"])
def test_planning_leaves_nothing_in_the_modules(branching: bool) -> None:
    """A forward that caches tensors, sets buffers and counts must find its module untouched."""

    class Caching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.cached: Tensor | None = None
            self.calls = 0
            self.register_buffer("last", torch.zeros(1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.cached = x * 2
            self.last = x.sum().reshape(1)
            if branching and x.sum() > 0:
                return super().forward(self.cached) + self.last
            return super().forward(self.cached) + self.last

    reference = Caching().eval()
    model = on_meta(Caching)
    fxquant.plan(model, reference.state_dict(), scheme="int8", example_inputs=(X,))
    assert model.cached is None
    assert model.calls == 0
    assert torch.equal(model.last, torch.zeros(1))
    assert type(model.last) is Tensor
    model = fxquant.compile(model, reference.state_dict(), scheme="int8", example_inputs=(X,))
    with torch.no_grad():
        assert error(model(X), reference(X)) < 0.02
        assert error(model(-X), reference(-X)) < 0.02


def test_lstm_and_parametrized_weights() -> None:
    """Modules that keep other references to their weights, or compute a weight of several."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 16, batch_first=True)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 8))
            self.last = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.normed(self.lstm(x)[0]))

    x = torch.randn(2, 5, 16)
    reference = Mixed().eval()
    model = fxquant.compile(on_meta(Mixed), reference.state_dict(), scheme="int8", example_inputs=(x,))
    plan = model.fxquant_plan
    assert [w.fqn for w in plan.quantized] == ["last.weight"]
    assert "use unknown" in plan.weight("lstm.weight_ih_l0").reason
    assert "weight_norm" in plan.weight("normed.parametrizations.weight.original1").reason
    with torch.no_grad():
        assert error(model(x), reference(x)) < 0.02


def test_save_pretrained_says_what_to_do(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    reference = BertModel(config).eval()
    with fxquant.meta_init():
        model = BertModel(config).eval()
    model = fxquant.compile(model, reference.state_dict(), scheme="int8")
    with pytest.raises(QuantizedWeightError, match="original checkpoint"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {"x": torch.zeros(4, 16), "twice": True},
        {"x": torch.zeros(3, 16), "twice": False},
        {"x": torch.zeros(3, 16, dtype=torch.float64), "twice": True},
        {"x": torch.zeros(16), "twice": True},
        {"x": 1.0, "twice": True},
    ],
    ids=["size", "argument", "dtype", "rank", "type"],
)
def test_a_lowered_program_refuses_what_it_was_not_lowered_for(given: dict[str, Any]) -> None:
    class Doubling(Net):
        def forward(self, x: Tensor, twice: bool) -> Tensor:
            return super().forward(x * 2 if twice else x)

    state = Doubling().state_dict()
    example = {"x": X, "twice": True}
    lowered = fxquant.lower(on_meta(Doubling), state, scheme="int8", example_inputs=example, dynamic=False)
    lowered.materialize()
    assert lowered(**example).shape == (3, 8)
    with pytest.raises(ConfigError, match="lowered"):
        lowered(**given)


def test_a_lowered_program_of_dynamic_sizes_checks_that_they_agree() -> None:
    class Adding(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + y)

    state = Adding().state_dict()
    lowered = fxquant.lower(on_meta(Adding), state, scheme="int8", example_inputs=(X, X)).materialize()
    assert lowered(X[:2], X[:2]).shape == (2, 8)
    with pytest.raises(ConfigError, match="input y"):
        lowered(X[:2], X)


def test_lower_keeps_inputs_apart_that_were_one_tensor_in_the_example() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.fc(x) - self.fc(y * 2)

    reference = Two().eval()
    lowered = fxquant.lower(on_meta(Two), reference.state_dict(), scheme="int8", example_inputs=(X, X))
    y = torch.randn(3, 16)
    with torch.no_grad():
        assert error(lowered.materialize()(X, y), reference(X, y)) < 0.02


def test_lower_does_not_move_what_is_written_through_a_view() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(16))
            self.fc = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale.clone()
            scale[:4] += x[0, :4]
            return self.fc(x) * 0.1 + scale[:8] * 10

    reference = Writing().eval()
    lowered = fxquant.lower(on_meta(Writing), reference.state_dict(), scheme="int8", example_inputs=(X,))
    lowered.materialize()
    with torch.no_grad():
        for given in (X, -X, X):
            assert error(lowered(given), reference(given)) < 0.01


def test_materialize_takes_what_compile_takes(reference: nn.Module, tmp_path: Path) -> None:
    save_file(dict(reference.state_dict()), tmp_path / "model.safetensors")
    lowered = fxquant.lower(on_meta(), scheme="int8", example_inputs=(X,))
    for source in (reference.state_dict(), tmp_path, iter(reference.state_dict().items())):
        with torch.no_grad():
            assert error(lowered.materialize(source)(X), reference(X)) < 0.02


def test_planning_leaves_nothing_in_caches_of_the_model() -> None:
    class Helper:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []
            self.logger = logging.getLogger("fxquant.tests.helper")

    class Caching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[int, Tensor] = {}
            self.helper = Helper()

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[-1]
            if size not in self.cache:
                self.cache[size] = torch.arange(float(size))
                self.helper.seen.append(self.cache[size])
                logging.getLogger("fxquant.tests.made_while_tracing")
            return super().forward(x + self.cache[size])

    reference = Caching().eval()
    model = on_meta(Caching)
    fxquant.plan(model, reference.state_dict(), scheme="int8", example_inputs=(X,))
    assert model.cache == {}
    assert model.helper.seen == []
    assert "fxquant.tests.made_while_tracing" in logging.root.manager.loggerDict
    model = fxquant.compile(model, reference.state_dict(), scheme="int8", example_inputs=(X,))
    with torch.no_grad():
        assert type(model(X)) is Tensor
        assert error(model(X), reference(X)) < 0.02


@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_a_dict_checkpoint_is_not_shared(scheme: str) -> None:
    donor = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    before = {name: tensor.clone() for name, tensor in donor.state_dict().items()}
    model = on_meta(lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)))
    model = fxquant.compile(model, donor.state_dict(), scheme=scheme, example_inputs=(X,)).train()
    with torch.no_grad():
        model(X)
        model[1].weight.zero_()
    for name, tensor in donor.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_module_walk_knows_linear_like_modules() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.MultiheadAttention(16, 2, batch_first=True)
            self.other = nn.MultiheadAttention(16, 2, kdim=8, vdim=8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.same(x, x, x, need_weights=False)[0]
            return self.other(x, x[..., :8], x[..., 8:], need_weights=False)[0]

    x = torch.randn(2, 5, 16)
    reference = Attention().eval()
    model = fxquant.compile(on_meta(Attention), reference.state_dict(), scheme="int8")
    assert "module walk" in model.fxquant_plan.capture
    assert len(model.fxquant_plan.quantized) == 2 + 4
    with torch.no_grad():
        assert error(model(x), reference(x)) < 0.03
    assert fxquant.report(model).fallbacks == 0


def test_a_lowered_program_keeps_buffers_that_a_stream_does_not_bring() -> None:
    class Buffered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gain", torch.full((8,), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain

    reference = Buffered().eval()
    lowered = fxquant.lower(on_meta(Buffered), scheme="int8", example_inputs=(X,))
    weights = ((name, tensor) for name, tensor in reference.state_dict().items() if name != "gain")
    with torch.no_grad():
        assert error(lowered.materialize(weights)(X), reference(X)) < 0.02
