"""transformers models: the same tensors as from_pretrained, from the keys that it writes and read."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    DeepseekV3Config,
    Dinov2Config,
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
    Wav2Vec2Config,
    conversion_mapping,
)
from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming

from fxquant.checkpoint import Checkpoint, KeyMap, open_checkpoint, require_complete, resolve_keys
from fxquant.errors import KeyMapError, MissingWeightError, WeightMismatchError

TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
# Twelve experts: by text, 10 would come before 2.
MIXTRAL = MixtralConfig(**TEXT, num_local_experts=12, num_experts_per_tok=2)
QWEN3_MOE = Qwen3MoeConfig(**TEXT, **EXPERTS, num_experts=12, head_dim=8)
QWEN2_MOE = Qwen2MoeConfig(**TEXT, **EXPERTS, num_experts=4, shared_expert_intermediate_size=8)
DEEPSEEK = DeepseekV3Config(
    **TEXT,
    **EXPERTS,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    kv_lora_rank=4,
    q_lora_rank=4,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
)
LLAMA = LlamaConfig(**TEXT)
MERGED = "transformers: MergeModulelist+Concatenate"


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def on_meta(auto: Any, config: Any) -> Any:
    with torch.device("meta"):
        return auto.from_config(config)


def resolve(model: Any, checkpoint: Checkpoint) -> KeyMap:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    buffers = [name for name, _ in model.named_buffers()]
    names = [tuple(group) for group in groups.values()] + [(name,) for name in buffers]
    return resolve_keys(names, checkpoint, model=model, optional=buffers)


def values(keymap: KeyMap, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    found = {}
    for fqn, entry in keymap.entries.items():
        tensors = [checkpoint.read(key) for key in entry.keys]
        found[fqn] = entry.convert(*tensors) if entry.convert else tensors[0]
    return found


def check_equals_from_pretrained(auto: Any, config: Any, folder: Path) -> KeyMap:
    """Resolve on meta, read and convert, and compare with the model that transformers loads."""
    expected = auto.from_pretrained(folder).state_dict()
    checkpoint = open_checkpoint(folder)
    keymap = resolve(on_meta(auto, config), checkpoint)
    require_complete(keymap, checkpoint)
    for fqn, value in values(keymap, checkpoint).items():
        assert torch.equal(value, expected[fqn]), fqn
    return keymap


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    save_file({key: value.clone() for key, value in tensors.items()}, path, metadata={"format": "pt"})


def rename(folder: Path, rules: Mapping[str, str]) -> None:
    """Rename the stored keys; the first pattern that is found in a key counts."""

    def spell(key: str) -> str:
        found = next((rule for rule in rules.items() if re.search(rule[0], key)), None)
        return re.sub(*found, key) if found else key

    rewrite(folder, lambda tensors: {spell(key): value for key, value in tensors.items()})


# --------------------------------------------------------------------------------- experts


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (MIXTRAL, "model.layers.0.block_sparse_moe.experts.11.w1.weight"),
        (QWEN3_MOE, "model.layers.0.mlp.experts.11.gate_proj.weight"),
        (QWEN2_MOE, "model.layers.1.mlp.experts.3.up_proj.weight"),
        (DEEPSEEK, "model.layers.1.mlp.experts.3.down_proj.weight"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_experts_are_merged_as_by_from_pretrained(config: Any, key: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert key in open_checkpoint(tmp_path).infos
    keymap = check_equals_from_pretrained(AutoModelForCausalLM, config, tmp_path)
    entry = keymap.entries["model.layers.1.mlp.experts.gate_up_proj"]
    assert entry.rule == MERGED
    assert len(entry.keys) == 2 * keymap_experts(config)
    assert keymap.extra == ()


def keymap_experts(config: Any) -> int:
    return int(
        getattr(config, "num_local_experts", None)
        or getattr(config, "n_routed_experts", None)
        or config.num_experts
    )


def test_conversion_is_traced_to_plain_operations(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(MIXTRAL).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    entry = resolve(on_meta(AutoModelForCausalLM, MIXTRAL), checkpoint).entries[
        "model.layers.0.mlp.experts.gate_up_proj"
    ]
    assert entry.convert is not None
    tensors = [checkpoint.read(key) for key in entry.keys]
    graph = make_fx(entry.convert)(*tensors)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    aten = torch.ops.aten
    assert called == [aten.stack.default, aten.stack.default, aten.cat.default]
    assert torch.equal(graph(*tensors), entry.convert(*tensors))


def test_equal_templates_stand_for_equal_conversions(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(QWEN3_MOE).save_pretrained(tmp_path)
    entries = resolve(on_meta(AutoModelForCausalLM, QWEN3_MOE), open_checkpoint(tmp_path)).entries
    templates = {
        name: getattr(entries[f"model.layers.{layer}.mlp.experts.{name}"].convert, "template")  # noqa: B009
        for layer in (0, 1)
        for name in ("gate_up_proj", "down_proj")
    }
    again = getattr(entries["model.layers.0.mlp.experts.gate_up_proj"].convert, "template")  # noqa: B009
    assert templates["gate_up_proj"] == again
    assert hash(templates["gate_up_proj"]) == hash(again)
    assert templates["gate_up_proj"] != templates["down_proj"]


def test_wrapped_training_checkpoint_of_experts(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for prefix in ("module.", "_orig_mod.", "_orig_mod.module."):
        wrapped = open_checkpoint({prefix + key: checkpoint.read(key) for key in checkpoint.infos})
        keymap = resolve(on_meta(AutoModelForCausalLM, MIXTRAL), wrapped)
        require_complete(keymap, wrapped)
        for fqn, value in values(keymap, wrapped).items():
            assert torch.equal(value, model.state_dict()[fqn]), fqn


def test_state_dict_in_the_layout_of_the_model() -> None:
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    checkpoint = open_checkpoint(model.state_dict())
    keymap = resolve(on_meta(AutoModelForCausalLM, MIXTRAL), checkpoint)
    assert {entry.rule for entry in keymap.entries.values()} == {"exact"}
    assert keymap.missing == ()


NAMES = ("w1", "w2", "w3")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"7": "12"}, "is stored 12 times, but not for 7"),  # the stack would have 12, each behind 7 moved up
        ({"7": "07"}, "is stored 12 times, but not for 7"),
        ({"7": ""}, "is stored 11 times, but not for 7"),
    ],
)
@pytest.mark.parametrize("names", [("w1",), NAMES])
def test_lost_expert_is_told_before_anything_is_read(
    changed: dict[str, str], reason: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(MIXTRAL).save_pretrained(tmp_path)
    ((old, new),) = changed.items()
    place = "model.layers.1.block_sparse_moe.experts"
    moved = {f"{place}.{old}.{name}.weight": new and f"{place}.{new}.{name}.weight" for name in names}
    rewrite(tmp_path, lambda tensors: {moved.get(k, k): v for k, v in tensors.items() if moved.get(k, k)})
    checkpoint = open_checkpoint(tmp_path)
    keymap = resolve(on_meta(AutoModelForCausalLM, MIXTRAL), checkpoint)
    with pytest.raises(
        MissingWeightError, match=f"experts.gate_up_proj: .*Concatenate of .* failed: .*{reason}"
    ):
        require_complete(keymap, checkpoint)


def test_fewer_experts_than_the_model_has(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(MIXTRAL).save_pretrained(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {k: v for k, v in tensors.items() if ".1.block_sparse_moe.experts.11." not in k},
    )
    with pytest.raises(
        WeightMismatchError, match=r"of 22 stored tensors .*gives shape \(11, 48, 16\).*\(12, 48, 16\)"
    ):
        resolve(on_meta(AutoModelForCausalLM, MIXTRAL), open_checkpoint(tmp_path))


def test_experts_stored_in_both_layouts_are_not_guessed_between(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    model.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    rewrite(tmp_path, lambda tensors: {**tensors, name: model.state_dict()[name]})
    with pytest.raises(KeyMapError, match=f"{name} is stored twice"):
        resolve(on_meta(AutoModelForCausalLM, MIXTRAL), open_checkpoint(tmp_path))


def test_entries_do_not_keep_the_model_alive(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(MIXTRAL).save_pretrained(tmp_path)
    model = on_meta(AutoModelForCausalLM, MIXTRAL)
    keymap = resolve(model, open_checkpoint(tmp_path))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert keymap.entries


# ------------------------------------------------------------------- renames, splits, transposes


def test_one_fused_key_fills_several_parameters(tmp_path: Path) -> None:
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=8, patch_size=4
    )
    config.use_swiglu_ffn = True
    AutoModel.from_config(config).save_pretrained(tmp_path)
    keymap = check_equals_from_pretrained(AutoModel, config, tmp_path)
    shared: dict[tuple[str, ...], list[str]] = {}
    for fqn, entry in keymap.entries.items():
        if entry.rule == "transformers: Chunk":
            shared.setdefault(entry.keys, []).append(fqn)
    assert shared
    assert all(len(keys) == 1 and len(fqns) == 2 for keys, fqns in shared.items())
    assert keymap.extra == ()


def test_experts_of_a_vision_language_model_are_transposed(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
    text = {**TEXT, **EXPERTS, "num_experts": 4, "head_dim": 8}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    keymap = check_equals_from_pretrained(AutoModelForImageTextToText, config, tmp_path)
    rules = {entry.rule for entry in keymap.entries.values()}
    assert "transformers: Transpose" in rules


def test_old_names_of_a_vision_language_model(tmp_path: Path) -> None:
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2}
    text = {
        **TEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    config = Qwen2VLConfig(text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    rename(tmp_path, {r"^model\.visual\.": "visual.", r"^model\.language_model\.": "model."})
    assert {"visual.patch_embed.proj.weight", "model.norm.weight"} <= open_checkpoint(tmp_path).infos.keys()
    keymap = check_equals_from_pretrained(AutoModelForImageTextToText, config, tmp_path)
    assert keymap.entries["model.language_model.norm.weight"].keys == ("model.norm.weight",)
    assert keymap.entries["model.language_model.norm.weight"].rule == "transformers: renamed"
    assert keymap.extra == ()


def test_old_names_of_llava(tmp_path: Path) -> None:
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
    }
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 16}
    config = LlavaConfig(text_config=LLAMA, vision_config=vision, vision_feature_layer=-1)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    rename(
        tmp_path,
        {
            r"^lm_head": "language_model.lm_head",
            r"^model\.language_model\.": "language_model.model.",
            r"^model\.(vision_tower|multi_modal_projector)": r"\1",
        },
    )
    keymap = check_equals_from_pretrained(AutoModelForImageTextToText, config, tmp_path)
    assert keymap.entries["lm_head.weight"].keys == ("language_model.lm_head.weight",)
    checkpoint = open_checkpoint(tmp_path)
    wrapped = open_checkpoint({f"module.{key}": checkpoint.read(key) for key in checkpoint.infos})
    keymap = resolve(on_meta(AutoModelForImageTextToText, config), wrapped)
    assert keymap.missing == ()
    assert keymap.entries["lm_head.weight"].keys == ("module.language_model.lm_head.weight",)


def test_older_transformers_without_conversions_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(AutoModelForCausalLM, LLAMA)
    checkpoint = open_checkpoint(model.state_dict())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    keymap = resolve(model, checkpoint)
    assert keymap.missing == ()
    assert any("no conversion mapping" in note for note in keymap.notes)


def test_gamma_and_beta_of_old_checkpoints(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    AutoModel.from_config(config).save_pretrained(tmp_path)
    rename(tmp_path, {r"LayerNorm\.weight": "LayerNorm.gamma", r"LayerNorm\.bias": "LayerNorm.beta"})
    keymap = check_equals_from_pretrained(AutoModel, config, tmp_path)
    assert keymap.entries["embeddings.LayerNorm.weight"].keys == ("embeddings.LayerNorm.gamma",)


def test_weight_norm_of_old_checkpoints(tmp_path: Path) -> None:
    config = Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8,),
        conv_kernel=(2,),
        conv_stride=(2,),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    AutoModel.from_config(config).save_pretrained(tmp_path)
    base = "encoder.pos_conv_embed.conv"
    rename(
        tmp_path,
        {
            r"\.parametrizations\.weight\.original0": ".weight_g",
            r"\.parametrizations\.weight\.original1": ".weight_v",
        },
    )
    assert f"{base}.weight_g" in open_checkpoint(tmp_path).infos
    keymap = check_equals_from_pretrained(AutoModel, config, tmp_path)
    assert keymap.entries[f"{base}.parametrizations.weight.original0"].keys == (f"{base}.weight_g",)


def with_conversions(monkeypatch: pytest.MonkeyPatch, *added: Any) -> None:
    """Let transformers know more conversions."""
    real = conversion_mapping.get_model_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_model_conversion_mapping",
        lambda model: [*real(model), *copy.deepcopy(added)],
    )


@pytest.mark.parametrize("stored", ["first release", "model layout"])
def test_converter_of_a_name_to_itself_is_judged_by_the_shape(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = "mlp.down_proj.weight"
    with_conversions(monkeypatch, WeightConverter(pattern, pattern, [Transpose(0, 1)]))
    model = AutoModelForCausalLM.from_config(LLAMA)
    name = "model.layers.0.mlp.down_proj.weight"
    flip = stored == "first release"
    tensors = {
        key: value.T if flip and pattern in key else value for key, value in model.state_dict().items()
    }
    checkpoint = open_checkpoint(tensors)
    keymap = resolve(on_meta(AutoModelForCausalLM, LLAMA), checkpoint)
    assert keymap.entries[name].rule == ("transformers: Transpose" if flip else "exact")
    assert torch.equal(values(keymap, checkpoint)[name], model.state_dict()[name])


def test_rename_that_leads_nowhere_is_not_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AutoModelForCausalLM.from_config(MIXTRAL).save_pretrained(tmp_path)
    with_conversions(monkeypatch, WeightRenaming("input_layernorm", "no_such_norm"))
    keymap = resolve(on_meta(AutoModelForCausalLM, MIXTRAL), open_checkpoint(tmp_path))
    assert keymap.missing == ()
    assert keymap.entries["model.layers.0.input_layernorm.weight"].rule == "exact"


# ------------------------------------------------------------------------- base models and heads


def test_base_model_from_a_checkpoint_with_a_head(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(tmp_path)
    keymap = check_equals_from_pretrained(AutoModel, LLAMA, tmp_path)
    assert keymap.extra == ("lm_head.weight",)


def test_head_is_missing_in_the_checkpoint_of_a_base_model(tmp_path: Path) -> None:
    AutoModel.from_config(LLAMA).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    keymap = resolve(on_meta(AutoModelForCausalLM, LLAMA), checkpoint)
    assert keymap.missing == ("lm_head.weight",)
    assert keymap.entries["model.norm.weight"].keys == ("norm.weight",)


def test_tied_head_is_not_missing(tmp_path: Path) -> None:
    config = LlamaConfig(**TEXT, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in open_checkpoint(tmp_path).infos
    keymap = check_equals_from_pretrained(AutoModelForCausalLM, config, tmp_path)
    assert keymap.missing == ()


def test_keys_that_the_class_ignores_are_no_extras(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(tmp_path)
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, lambda tensors: {**tensors, old: torch.ones(4), "other": torch.ones(1)})
    keymap = resolve(on_meta(AutoModelForCausalLM, LLAMA), open_checkpoint(tmp_path))
    assert keymap.extra == ("other",)
    assert any("1 stored tensors are ignored" in note for note in keymap.notes)


def test_two_old_spellings_of_one_weight_must_be_equal(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "norm.weight": tensors["model.norm.weight"]})
    entry = resolve(on_meta(AutoModelForCausalLM, LLAMA), open_checkpoint(tmp_path)).entries[
        "model.norm.weight"
    ]
    assert (entry.keys, entry.same) == (("model.norm.weight",), ("norm.weight",))


def test_hostile_keys_do_not_break_the_order() -> None:
    model = AutoModelForCausalLM.from_config(LLAMA)
    strange = ["a.\u00b2", "b." + "9" * 5000, "", ".", "..weight"]
    keymap = resolve(
        model, open_checkpoint({**model.state_dict(), **{key: torch.ones(1) for key in strange}})
    )
    assert keymap.missing == ()
    assert set(keymap.extra) == set(strange)
