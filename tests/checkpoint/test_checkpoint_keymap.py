"""Names and keys: every spelling that can be told for sure, and a refusal of all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxquant.checkpoint import Checkpoint, KeyMap, open_checkpoint, require_complete, resolve_keys
from fxquant.errors import ConfigError, KeyMapError, MissingWeightError

# A layer that really is called "module".
NAMES = ("blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "module.weight")
GROUPS = tuple((name,) for name in NAMES)
SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "plain": lambda k: k,
    "compiled": lambda k: "_orig_mod." + k,
    "ddp": lambda k: "module." + k,
    "both": lambda k: "_orig_mod.module." + k,
    "other order": lambda k: "module._orig_mod." + k,
    "inner": lambda k: "model." + k,
    "vl": lambda k: "model.language_model." + k,
    "transformer": lambda k: "transformer." + k,
    "peft": lambda k: "base_model.model." + k,
    "regional": lambda k: k.replace("blocks.0.", "blocks.0._orig_mod."),
    "checkpointed": lambda k: k.replace("blocks.1.", "blocks.1._checkpoint_wrapped_module."),
    "fsdp": lambda k: "_fsdp_wrapped_module." + k,
}


def stored(keys: Iterable[str]) -> Checkpoint:
    return open_checkpoint({key: torch.empty(1) for key in keys})


def chosen(keymap: KeyMap) -> dict[str, tuple[str, ...]]:
    return {fqn: entry.keys for fqn, entry in keymap.entries.items()}


# ------------------------------------------------------------------------------------- spellings


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_model_in_many_spellings(spelling: str) -> None:
    spell = SPELLINGS[spelling]
    checkpoint = stored(["visual.patch.weight", *map(spell, NAMES)])
    keymap = resolve_keys(GROUPS, checkpoint)
    assert chosen(keymap) == {name: (spell(name),) for name in NAMES}
    assert keymap.missing == ()
    assert keymap.extra == ("visual.patch.weight",)
    assert all(entry.convert is None for entry in keymap.entries.values())
    require_complete(keymap, checkpoint)


def test_rules_are_told() -> None:
    rules = {
        spelling: {entry.rule for entry in resolve_keys(GROUPS, stored(map(spell, NAMES))).entries.values()}
        for spelling, spell in SPELLINGS.items()
    }
    assert rules["plain"] == {"exact"}
    assert rules["regional"] == {"exact", "wrapper components ('_orig_mod') removed"}
    assert rules["both"] == rules["ddp"] == {"prefix 'module.' removed"}
    assert rules["vl"] == {"prefix 'model.language_model.' removed"}


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "model.", "net.inner."])
def test_prefix_that_only_the_model_has(wrapper: str) -> None:
    groups = [(wrapper + name,) for name in NAMES]
    keymap = resolve_keys(groups, stored(NAMES))
    assert chosen(keymap) == {wrapper + name: (name,) for name in NAMES}


def test_prefix_that_a_part_of_the_model_has() -> None:
    groups = [("model.layers.0.weight",), ("model.embed.weight",), ("lm_head.weight",)]
    keymap = resolve_keys(groups, stored(["layers.0.weight", "embed.weight", "lm_head.weight"]))
    assert chosen(keymap) == {
        "model.layers.0.weight": ("layers.0.weight",),
        "model.embed.weight": ("embed.weight",),
        "lm_head.weight": ("lm_head.weight",),
    }
    assert keymap.entries["model.embed.weight"].rule == "prefix 'model.' added"
    assert keymap.entries["lm_head.weight"].rule == "exact"


def test_exact_names_win_over_copies_under_a_prefix() -> None:
    keymap = resolve_keys(GROUPS, stored([*NAMES, *("ema." + name for name in NAMES)]))
    assert chosen(keymap) == {name: (name,) for name in NAMES}
    assert keymap.extra == tuple("ema." + name for name in NAMES)


def test_a_partial_exact_match_does_not_win_over_a_full_prefix() -> None:
    groups = [("weight",), ("module.weight",)]
    keymap = resolve_keys(groups, stored(["module.weight", "module.module.weight"]))
    assert chosen(keymap) == {"weight": ("module.weight",), "module.weight": ("module.module.weight",)}


def test_two_full_answers_are_not_guessed_between() -> None:
    keys = ["model." + name for name in NAMES] + ["ema." + name for name in NAMES]
    with pytest.raises(KeyMapError) as caught:
        resolve_keys(GROUPS, stored(keys))
    for words in ("prefix 'ema.' removed", "prefix 'model.' removed", "ema.blocks.0.weight", "key_map"):
        assert words in str(caught.value)


def test_two_full_answers_with_different_tied_names() -> None:
    keys = ["a.embed.weight", "b.head.weight", "a.fc.weight", "b.fc.weight"]
    with pytest.raises(KeyMapError, match="two ways"):
        resolve_keys([("embed.weight", "head.weight"), ("fc.weight",)], stored(keys))


def test_one_stored_tensor_is_not_given_to_two_weights() -> None:
    keymap = resolve_keys([("model.fc.weight",), ("fc.weight",)], stored(["fc.weight"]))
    assert chosen(keymap) == {"fc.weight": ("fc.weight",)}
    assert keymap.missing == ("model.fc.weight",)


def test_a_bare_parameter_is_not_taken_for_a_layer() -> None:
    keymap = resolve_keys([("fc1.weight",), ("fc2.weight",)], stored(["fc1.weight", "weight"]))
    assert keymap.missing == ("fc2.weight",)


def test_renamed_layers_are_not_guessed() -> None:
    keymap = resolve_keys([("a.weight",), ("b.weight",)], stored(["a.weight", "c.weight"]))
    assert keymap.missing == ("b.weight",)


def test_both_spellings_of_a_compiled_layer_must_be_equal() -> None:
    keymap = resolve_keys(
        [("a.weight",), ("b.weight",)], stored(["a._orig_mod.weight", "b.weight", "b._orig_mod.weight"])
    )
    assert keymap.entries["b.weight"].keys == ("b.weight",)
    assert keymap.entries["b.weight"].same == ("b._orig_mod.weight",)
    assert keymap.extra == ()


@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b", "0", "module", "model"]), min_size=1, max_size=3),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["", "module.", "model.", "_orig_mod.", "x.y."]),
)
def test_a_global_prefix_never_misplaces_a_tensor(parts: list[list[str]], prefix: str) -> None:
    names = list(dict.fromkeys(".".join([*part, "weight"]) for part in parts))
    try:
        keymap = resolve_keys([(name,) for name in names], stored(prefix + name for name in names))
    except KeyMapError:
        return
    assert chosen(keymap) == {name: (prefix + name,) for name in names}


# ------------------------------------------------------------------------------------- tied names


TIED = [("embed.weight", "lm_head.weight"), ("mix.weight",)]


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("name", ["embed.weight", "lm_head.weight"])
def test_any_tied_name_may_be_the_stored_one(name: str, prefix: str) -> None:
    keymap = resolve_keys(TIED, stored([prefix + name, prefix + "mix.weight"]))
    entry = keymap.entries["embed.weight"]
    assert (entry.fqn, entry.keys, entry.same) == ("embed.weight", (prefix + name,), ())
    assert keymap.missing == ()


def test_all_tied_names_stored_must_be_equal() -> None:
    keymap = resolve_keys(TIED, stored(["lm_head.weight", "embed.weight", "mix.weight"]))
    assert keymap.entries["embed.weight"].keys == ("embed.weight",)
    assert keymap.entries["embed.weight"].same == ("lm_head.weight",)
    assert keymap.extra == ()


def test_alias_in_the_metadata_is_only_information() -> None:
    keymap = resolve_keys(TIED, stored(["mix.weight"]))
    assert keymap.missing == ("embed.weight",)


# --------------------------------------------------------------------------------- the user's map


def test_key_map_comes_first_and_the_rest_falls_through() -> None:
    checkpoint = stored(["tok", "lm_head.weight", "mix.weight"])
    for key_map in ({"embed.weight": "tok"}, {"embed.weight": "tok"}.get):
        entry = resolve_keys(TIED, checkpoint, key_map=key_map).entries["embed.weight"]
        assert (entry.keys, entry.same, entry.rule) == (("tok",), ("lm_head.weight",), "key_map")


def test_key_map_of_a_tied_name() -> None:
    keymap = resolve_keys(TIED, stored(["tok", "mix.weight"]), key_map={"lm_head.weight": "tok"})
    assert keymap.entries["embed.weight"].keys == ("tok",)
    assert keymap.missing == ()


def test_key_map_of_a_tied_name_counts_before_a_stored_name() -> None:
    checkpoint = stored(["embed.weight", "tok", "mix.weight"])
    entry = resolve_keys(TIED, checkpoint, key_map={"lm_head.weight": "tok"}).entries["embed.weight"]
    assert (entry.keys, entry.same, entry.rule) == (("tok",), ("embed.weight",), "key_map")


def test_key_map_does_not_keep_a_prefix_from_being_found() -> None:
    keymap = resolve_keys(TIED, stored(["tok", "model.mix.weight"]), key_map={"embed.weight": "tok"})
    assert chosen(keymap) == {"embed.weight": ("tok",), "mix.weight": ("model.mix.weight",)}


def test_key_map_may_read_one_key_for_two_weights() -> None:
    groups = [("embed.weight",), ("lm_head.weight",)]
    keymap = resolve_keys(groups, stored(["embed.weight"]), key_map={"lm_head.weight": "embed.weight"})
    assert chosen(keymap) == {name: ("embed.weight",) for (name,) in groups}


@pytest.mark.parametrize(
    ("key_map", "kind", "words"),
    [
        (
            {"embd.weight": "embed.weight"},
            KeyMapError,
            r"no weight 'embd.weight' \(nearest names: embed.weight",
        ),
        (
            {"embed.weight": "embd.weight"},
            KeyMapError,
            r"no key 'embd.weight' for 'embed.weight' \(nearest keys: embed",
        ),
        (lambda fqn: fqn + "x", KeyMapError, "no key 'embed.weightx'"),
        (lambda fqn: 3, ConfigError, "gives 3 for 'embed.weight'"),
        ([("embed.weight", "x")], ConfigError, "expected a dict"),
    ],
)
def test_key_map_that_names_what_does_not_exist(key_map: object, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        resolve_keys(TIED, stored(["embed.weight", "mix.weight"]), key_map=key_map)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ optional and missing


def test_optional_names_may_be_missing_and_are_found_if_stored() -> None:
    groups = [("fc.weight",), ("bn.running_mean",), ("rotary.inv_freq",)]
    optional = {"bn.running_mean", "rotary.inv_freq"}
    keymap = resolve_keys(groups, stored(["module.fc.weight", "module.bn.running_mean"]), optional=optional)
    assert chosen(keymap) == {
        "fc.weight": ("module.fc.weight",),
        "bn.running_mean": ("module.bn.running_mean",),
    }
    assert keymap.missing == ()


def test_prefix_is_found_for_optional_names_when_the_user_maps_all_others() -> None:
    groups = [("fc.weight",), ("bn.running_mean",)]
    checkpoint = stored(["w", "module.bn.running_mean"])
    keymap = resolve_keys(groups, checkpoint, key_map={"fc.weight": "w"}, optional={"bn.running_mean"})
    assert chosen(keymap)["bn.running_mean"] == ("module.bn.running_mean",)


def test_missing_weights_are_told_with_tied_names_and_nearest_keys() -> None:
    checkpoint = stored(["embeds.weight", "mix.weight"])
    with pytest.raises(MissingWeightError) as caught:
        require_complete(resolve_keys(TIED, checkpoint), checkpoint)
    text = str(caught.value)
    assert "lacks 1 of the model's weights" in text
    assert "embed.weight = lm_head.weight (nearest keys: embeds.weight" in text
    assert checkpoint.location in text
    assert "key_map" in text


def test_at_most_ten_missing_weights_are_listed() -> None:
    checkpoint = stored(["other"])
    with pytest.raises(MissingWeightError, match="lacks 40 of") as caught:
        require_complete(resolve_keys([(f"layers.{i}.weight",) for i in range(40)], checkpoint), checkpoint)
    assert "layers.9.weight" in str(caught.value)
    assert "layers.10.weight" not in str(caught.value)
    assert "and 30 more" in str(caught.value)


def test_the_best_partial_answer_is_reported() -> None:
    keymap = resolve_keys([*GROUPS, ("head.weight",)], stored("model." + name for name in NAMES))
    assert keymap.missing == ("head.weight",)
    assert chosen(keymap) == {name: ("model." + name,) for name in NAMES}


def test_empty_model_and_empty_checkpoint() -> None:
    assert resolve_keys([], stored(["a"])).extra == ("a",)
    assert resolve_keys(GROUPS, stored([])).missing == NAMES


def test_keys_of_a_stream_are_not_known() -> None:
    with pytest.raises(ConfigError, match="not known before it is read"):
        resolve_keys(GROUPS, open_checkpoint([]))


def test_order_follows_the_groups_and_the_file() -> None:
    keys = ["z", *reversed(NAMES), "y"]
    keymap = resolve_keys(GROUPS, stored(keys))
    assert tuple(keymap.entries) == NAMES
    assert keymap.extra == ("z", "y")
    assert resolve_keys(GROUPS, stored(keys)) == keymap
