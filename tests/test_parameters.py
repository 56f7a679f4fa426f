"""Building models without weights, and giving back the buffers of models that were built without any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import Self

import fxquant
from fxquant.errors import ConfigError, MissingBufferError
from fxquant.parameters import owner_of, repair_buffers, weight_groups

# ------------------------------------------------------------------------------------- meta_init


class Net(nn.Module):
    """Parameters of several kinds, ties of each kind, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.fc.weight
        self.same = self.fc
        shared = nn.Parameter(torch.ones(3), requires_grad=False)
        self.first, self.second = nn.ParameterList([shared]), nn.ParameterDict({"w": shared})
        self.register_parameter("none", None)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(5.0).outer(torch.ones(2)))
        self.register_buffer("ids", torch.arange(4), persistent=False)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


def built() -> Net:
    with fxquant.meta_init():
        return Net()


def test_parameters_are_on_meta_and_buffers_are_real() -> None:
    net, real = built(), Net()
    assert all(parameter.is_meta for parameter in net.parameters())
    wanted = dict(real.named_parameters())
    for name, parameter in net.named_parameters():
        assert type(parameter) is nn.Parameter
        assert (parameter.shape, parameter.dtype) == (wanted[name].shape, wanted[name].dtype)
        assert parameter.requires_grad == wanted[name].requires_grad
        assert parameter.stride() == wanted[name].stride()
    buffers = dict(net.named_buffers())
    assert buffers.keys() == dict(real.named_buffers()).keys()
    for name, buffer in real.named_buffers():
        assert buffers[name].device.type == "cpu"
        assert buffers[name].dtype == buffer.dtype
        assert torch.equal(buffers[name], buffer)
    assert list(net.state_dict()) == list(real.state_dict())
    assert net.none is None


def test_ties_are_kept() -> None:
    net = built()
    assert net.tied.weight is net.fc.weight
    assert net.first[0] is net.second["w"]
    assert not net.first[0].requires_grad
    groups = {group.fqn: group for group in weight_groups(net)}
    assert groups["fc.weight"].fqns == ("fc.weight", "tied.weight", "same.weight")
    assert groups["fc.bias"].fqns == ("fc.bias", "same.bias")
    assert groups["first.0"].fqns == ("first.0", "second.w")
    assert (groups["table"].is_buffer, groups["table"].persistent) == (True, True)
    assert (groups["ids"].is_buffer, groups["ids"].persistent) == (True, False)
    assert len(groups) == len({id(t) for t in (*net.parameters(), *net.buffers())})
    assert owner_of(net, "second.w") == (net.second, "w")


def test_one_real_parameter_in_modules_of_its_own() -> None:
    parameter = nn.Parameter(torch.ones(2))
    one, two = nn.Module(), nn.Module()
    with fxquant.meta_init():
        one.w = parameter
        two.w = parameter
        two.also = one.w
    assert one.w is two.w is two.also
    assert one.w.is_meta
    assert parameter.tolist() == [1, 1]


class Loaded(nn.Parameter):
    """A parameter class with a constructor and attributes of its own."""

    loader: Callable[[], str]

    def __new__(cls, data: Tensor, loader: Callable[[], str], **kwargs: Any) -> Self:
        return super().__new__(cls, data, **kwargs)

    def __init__(self, data: Tensor, loader: Callable[[], str], **kwargs: Any) -> None:
        self.loader = loader


def test_class_and_attributes_of_a_parameter_are_kept() -> None:
    module = nn.Module()
    plain = nn.Parameter(torch.ones(2))
    plain.partition_dim = 1
    with fxquant.meta_init():
        module.special = Loaded(torch.ones(2, dtype=torch.float16), lambda: "here", requires_grad=False)
        module.plain = plain
        module.weight = nn.Buffer(torch.ones(2))
    assert type(module.special) is Loaded
    assert module.special.loader() == "here"
    assert (module.special.is_meta, module.special.dtype) == (True, torch.float16)
    assert not module.special.requires_grad
    assert module.plain.partition_dim == 1
    assert module.weight.tolist() == [1, 1]


def test_modules_that_keep_their_own_lists_and_parametrizations() -> None:
    with fxquant.meta_init():
        lstm = nn.LSTM(4, 4)
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        lazy = nn.LazyLinear(4)
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
    assert all(a is b for a, b in zip(lstm._flat_weights, lstm.parameters(), strict=True))
    for module in (lstm, normed, encoder):
        assert all(parameter.is_meta for parameter in module.parameters())
    with pytest.raises(ConfigError, match="weight has no shape yet"):
        fxquant.plan(lazy, None, scheme="int8")


def device_of_new() -> str:
    return nn.Linear(2, 2).weight.device.type


def test_nested_contexts() -> None:
    one, two = nn.Module(), nn.Module()
    with fxquant.meta_init():
        parameter = nn.Parameter(torch.ones(2))
        one.w = parameter
        with fxquant.meta_init():
            two.w = parameter
            assert device_of_new() == "meta"
        assert device_of_new() == "meta"
    assert one.w is two.w
    assert device_of_new() == "cpu"


def test_everything_is_as_before_after_an_error() -> None:
    with pytest.raises(ValueError, match="num_heads"), fxquant.meta_init():
        nn.MultiheadAttention(0, 0)
    assert device_of_new() == "cpu"


def test_errors_of_registration_are_torchs_own() -> None:
    module = nn.Module()
    with fxquant.meta_init():
        with pytest.raises(TypeError, match="cannot assign"):
            module.register_parameter("w", torch.ones(2))
        with pytest.raises(KeyError, match="parameter name can"):
            module.register_parameter("a.b", nn.Parameter(torch.ones(2)))
    assert not module._parameters


def test_other_threads_build_as_usual() -> None:
    seen: list[str] = []
    with fxquant.meta_init():
        thread = threading.Thread(target=lambda: seen.append(device_of_new()))
        thread.start()
        thread.join()
        assert device_of_new() == "meta"
    assert seen == ["cpu"]


def test_contexts_of_two_threads_may_end_in_any_order() -> None:
    entered, left = threading.Event(), threading.Event()
    seen: list[str] = []

    def first() -> None:
        with fxquant.meta_init():
            entered.set()
            left.wait(60)
            seen.append(device_of_new())
        seen.append(device_of_new())

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(60)
    with fxquant.meta_init():
        assert device_of_new() == "meta"
    left.set()
    thread.join(60)
    assert seen == ["meta", "cpu"]
    assert device_of_new() == "cpu"


# -------------------------------------------------------------------------------- repair_buffers

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **options))


def gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8))


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**SIZES, "max_position_embeddings": 12}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=VISION))


def llava() -> nn.Module:
    """A CLIP tower, whose buffers only CLIP's own initializer knows, in a model of another family."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**SIZES))
    return LlavaForConditionalGeneration(config)


class Wrapped(nn.Module):
    """A module of the user's around a transformers model, which stands under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = llama()
        self.alias = self.backbone


def pixart() -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        cross_attention_dim=16,
        sample_size=8,
        caption_channels=8,
    )


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=1,
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama with scaled rope": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "gemma3": gemma3,
    "clip": clip,
    "llava": llava,
    "wrapped llama": Wrapped,
    "pixart": pixart,
    "wan": wan,
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_buffers_are_those_of_a_real_build(name: str, dtype: torch.dtype | None) -> None:
    real = MODELS[name]()
    with torch.device("meta"):
        model = MODELS[name]()
    assert all(buffer.is_meta for buffer in model.buffers())
    if dtype is not None:
        real, model = (nn.Module.to(m, dtype) for m in (real, model))
    parameters = [id(parameter) for parameter in model.parameters()]
    repaired = repair_buffers(model, frozenset())
    wanted = dict(real.named_buffers(remove_duplicate=False))
    got = dict(model.named_buffers(remove_duplicate=False))
    assert set(repaired) == wanted.keys() == got.keys() != set()
    for key, buffer in wanted.items():
        assert (got[key].device.type, got[key].dtype) == ("cpu", buffer.dtype), key
        assert torch.equal(got[key], buffer), key
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert all(parameter.is_meta for parameter in model.parameters())
    assert repair_buffers(model, frozenset()) == ()


def test_what_the_checkpoint_holds_is_left_to_it() -> None:
    with torch.device("meta"):
        model = llama()
    held = next(iter(dict(model.named_buffers())))
    repaired = repair_buffers(model, frozenset({held}))
    assert held not in repaired
    assert len(repaired) == len(dict(model.named_buffers())) - 1
    assert model.get_buffer(held).is_meta


def test_nothing_that_holds_values_is_written_to() -> None:
    model = clip()
    lost, kept = "vision_model.embeddings.position_ids", "text_model.embeddings.position_ids"
    want = model.get_buffer(lost).clone()
    weights = {name: value.clone() for name, value in model.named_parameters()}
    model.get_buffer(kept).copy_(torch.arange(12).flip(0))
    owner, key = owner_of(model, lost)
    owner._buffers[key] = owner._buffers[key].to("meta")
    assert repair_buffers(model, frozenset()) == (lost,)
    assert torch.equal(model.get_buffer(lost), want)
    assert model.get_buffer(kept).flatten().tolist() == list(range(11, -1, -1))
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)
        self.register_buffer("steps", torch.arange(4), persistent=False)
        self.register_buffer("flags", torch.tensor([True, False]), persistent=False)
        self.register_buffer("bytes", torch.tensor([1], dtype=torch.uint8), persistent=False)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale

    def _init_weights(self) -> None:
        raise AssertionError("a method of the user's that happens to have the name")


def test_buffers_that_nobody_can_fill_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = Masked()
    with pytest.raises(MissingBufferError, match=r"mask, steps, flags, bytes\. Build.*meta_init"):
        repair_buffers(model, frozenset({"scale"}))
    assert all(buffer.is_meta for buffer in model.buffers())
    state = {name: torch.ones(value.shape) for name, value in Masked().state_dict().items()}
    for verb in (fxquant.plan, fxquant.compile, fxquant.lower):
        with pytest.raises(MissingBufferError, match="mask"):
            verb(model, state, scheme="int8", example_inputs=(torch.zeros(2, 4),))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_buffer_of_the_users_inside_a_known_model_is_refused_too() -> None:
    for build in (llama, wan):
        with torch.device("meta"):
            model = build()
            model.register_buffer("mine", torch.ones(3), persistent=False)
        with pytest.raises(MissingBufferError, match=r"holds: mine\. Build"):
            repair_buffers(model, frozenset())
        assert model.mine.is_meta


def test_many_lost_buffers_are_cut_short() -> None:
    model = nn.Module()
    for i in range(12):
        model.register_buffer(f"b{i}", torch.ones(1, device="meta"))
    with pytest.raises(MissingBufferError, match=r"b0, b1, .*b9 and more"):
        repair_buffers(model, frozenset())
