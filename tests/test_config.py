"""Which scheme for which name: the matching rules, what wins, what is reported, what is refused."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given
from torch import nn

import fxquant
from fxquant.config import QuantConfig, make_config, name_matches
from fxquant.errors import ConfigError
from fxquant.form import Form
from fxquant.scheme import SCHEMES, find_scheme

MATCHES = {
    # an exact FQN, the name of the module that owns it, a prefix of components
    "blocks.1.fc.weight": ["blocks.1.fc.weight"],
    "blocks.1.fc": ["blocks.1.fc.weight", "blocks.1.fc.bias"],
    "blocks.1": ["blocks.1.fc.weight", "blocks.1.in_proj.weight"],
    "blocks": ["blocks.1.fc.weight", "blocks.10.fc.weight"],
    # any run of whole components
    "in_proj": ["blocks.1.in_proj.weight", "in_proj", "in_proj.weight"],
    "1.fc": ["blocks.1.fc.weight"],
    "fc.weight": ["blocks.1.fc.weight"],
    # globs over the whole name of the parameter or of its owner
    "blocks.*.fc": ["blocks.1.fc.weight", "blocks.1.mlp.fc.weight"],
    "*.fc.weight": ["blocks.1.fc.weight"],
    "blocks.?": ["blocks.1.weight"],
    "blocks.[0-4].fc": ["blocks.1.fc.weight"],
    "*": ["anything", "a.b.c"],
    # regular expressions over the whole name of either
    "re:.*visual.*": ["model.visual.0.weight"],
    r"re:blocks\.\d\.fc": ["blocks.1.fc.weight"],
    r"re:blocks\.\d+\.fc\.(weight|bias)": ["blocks.10.fc.weight"],
}
MISSES = {
    "blocks.1.fc.weight": ["blocks.1.fc.bias", "model.blocks.1.fc.weight_scale"],
    "blocks.1": ["blocks.10.fc.weight", "blocks.11.fc.weight", "myblocks.1.fc.weight"],
    "block": ["blocks.1.fc.weight"],
    "proj": ["blocks.1.in_proj.weight"],
    "fc.1": ["blocks.1.fc.weight"],
    "blocks.fc": ["blocks.1.fc.weight"],
    "blocks.?": ["blocks.10.weight"],
    "blocks.[0-4].fc": ["blocks.7.fc.weight"],
    "*.fc": ["fc.weight"],
    "BLOCKS": ["blocks.1.fc.weight"],
    "re:visual": ["model.visual.0.weight"],
    r"re:blocks\.1": ["blocks.10.weight"],
    "re:": ["a.b"],
    ".": ["a.b"],
}


@pytest.mark.parametrize("pattern", MATCHES)
def test_matches(pattern: str) -> None:
    assert [fqn for fqn in MATCHES[pattern] if not name_matches(pattern, fqn)] == []


@pytest.mark.parametrize("pattern", MISSES)
def test_does_not_match(pattern: str) -> None:
    assert [fqn for fqn in MISSES[pattern] if name_matches(pattern, fqn)] == []


COMPONENTS = st.lists(st.text("ab1_", min_size=1, max_size=3), min_size=1, max_size=5)


@given(COMPONENTS, COMPONENTS)
def test_a_plain_pattern_is_a_run_of_components(pattern: list[str], fqn: list[str]) -> None:
    runs = [fqn[i : i + len(pattern)] for i in range(len(fqn))]
    assert name_matches(".".join(pattern), ".".join(fqn)) == (pattern in runs)


@given(COMPONENTS)
def test_each_name_matches_itself_its_owner_and_their_escaped_form(parts: list[str]) -> None:
    fqn, owner = ".".join(parts), ".".join(parts[:-1])
    for name in filter(None, (fqn, owner)):
        assert name_matches(name, fqn)
        assert name_matches(f"re:{re.escape(name)}", fqn)


def test_first_match_wins_and_ignore_comes_before_config() -> None:
    config = make_config("int8", {"blocks.1.fc": "none", "blocks.1": "int8", "blocks": None}, ["re:.*bias"])
    wanted = {
        "blocks.1.fc.weight": ("none", True, "config 'blocks.1.fc' asks for none"),
        "blocks.1.in.weight": ("int8", True, "config 'blocks.1'"),
        "blocks.2.fc.weight": ("none", True, "config 'blocks' asks for none"),
        "head.weight": ("int8", False, "default scheme"),
        "blocks.1.bias": ("none", True, "ignored by 're:.*bias'"),
    }
    chosen = {fqn: config.choose([fqn]) for fqn in wanted}
    assert {fqn: (c.scheme.name, c.asked, c.reason) for fqn, c in chosen.items()} == wanted


def test_default_none_and_one_layer_asked_for() -> None:
    config = make_config("none", {"fc": "int8"})
    assert config.choose(["fc.weight"]).scheme.name == "int8"
    other = config.choose(["other.weight"])
    assert (other.scheme.name, other.asked, other.reason) == ("none", False, "scheme none")


def test_heads_stay_float_unless_asked_for() -> None:
    plain = make_config("int8").choose(["model.lm_head.weight"])
    assert (plain.scheme.name, plain.asked) == ("none", False)
    assert plain.reason == "lm_head: heads stay float unless a config entry asks"
    tied = make_config("int8").choose(["embed.weight", "lm_head.weight"])
    assert tied.scheme.name == "none"
    asked = make_config("int8", {"lm_head": "int8"}).choose(["embed.weight", "lm_head.weight"])
    assert (asked.scheme.name, asked.asked) == ("int8", True)
    assert make_config("int8").choose(["lm_head.norm.weight"]).scheme.name == "int8"
    assert make_config("int8").choose(["my_lm_head.weight"]).scheme.name == "int8"


def test_a_tied_weight_is_known_under_all_its_names() -> None:
    names = ["first.weight", "second.weight"]
    assert make_config("int8", {"second": "none"}).choose(names).scheme.name == "none"
    assert make_config("int8", None, ["second"]).choose(names).reason == "ignored by 'second'"


def test_unmatched_patterns_are_reported() -> None:
    config = make_config("int8", {"a": "int8", "no.such": "none"}, ["re:nothing", "a.b", "*.x"])
    assert config.unmatched(["a.b.weight"]) == ("no.such", "re:nothing", "*.x")
    with fxquant.meta_init():
        model = nn.Sequential(nn.Linear(4, 4))
    plan = fxquant.plan(model, None, scheme="int8", ignore=["0.fc", "0"])
    assert plan.unmatched == ("0.fc",)
    assert "pattern matches nothing: 0.fc" in str(plan)


BAD = {
    "unknown scheme": ({"scheme": "int3"}, "unknown scheme 'int3'; known: none, int8"),
    "no scheme": ({"config": {}}, "'scheme' must be the name of a scheme, got None"),
    "scheme of another type": ({"scheme": 8}, "'scheme' must be"),
    "unknown entry": ({"scheme": "int8", "ignored": []}, "'ignored'.*known: scheme, config, ignore"),
    "unknown entries of several types": ({"scheme": "int8", 1: 2, "b": 3}, r"\[1, 'b'\].*known: scheme"),
    "not a mapping": (["int8"], "must be a mapping"),
    "nothing": (None, "must be a mapping"),
    "config as a list": (
        {"scheme": "int8", "config": ["a"]},
        "`config` must map patterns to schemes, got list",
    ),
    "config with a scheme of another type": (
        {"scheme": "int8", "config": {"a": 8}},
        "'a': a scheme is a name",
    ),
    "config with an unknown scheme": ({"scheme": "int8", "config": {"a": "w4"}}, "'w4'; known: none, int8"),
    "config with an empty scheme": ({"scheme": "int8", "config": {"a": ""}}, "unknown scheme ''; known"),
    "config with an empty pattern": ({"scheme": "int8", "config": {"": "int8"}}, "non-empty text, got ''"),
    "config with a pattern that is no text": ({"scheme": "int8", "config": {3: "int8"}}, "text, got 3"),
    "config with a bad expression": (
        {"scheme": "int8", "config": {"re:(": "int8"}},
        r"'re:\(' is not a regular expression: ",
    ),
    "ignore as a text": ({"scheme": "int8", "ignore": "fc"}, "`ignore` must be a list of patterns, got 'fc'"),
    "ignore as a number": ({"scheme": "int8", "ignore": 3}, "`ignore` must be a list"),
    "ignore with a number": ({"scheme": "int8", "ignore": ["fc", 3]}, "text, got 3"),
    "ignore as bytes": ({"scheme": "int8", "ignore": b"fc"}, "text, got 102"),
    "ignore with a bad expression": ({"scheme": "int8", "ignore": ["re:*"]}, r"'re:\*' is not a regular"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_what_is_known(case: str) -> None:
    data, text = BAD[case]
    with pytest.raises(ConfigError, match=text):
        QuantConfig.from_dict(data)


def test_contradictions_are_refused() -> None:
    config = QuantConfig(scheme="int8", ignore=("fc",))
    assert make_config("int8", config) is config
    with pytest.raises(ConfigError, match="inside the QuantConfig"):
        make_config("int8", config, ["other"])
    with pytest.raises(ConfigError, match="scheme='none', but the QuantConfig's own scheme is 'int8'"):
        make_config("none", config)
    with pytest.raises(ConfigError, match="two entries for 'a'"):
        QuantConfig(scheme="int8", entries=(("a", "int8"), ("a", "none")))


@pytest.mark.parametrize("bad", [["int8"], {"int8": 1}, 8, b"int8"])
def test_a_scheme_that_is_no_name_is_refused_by_the_verbs(bad: object) -> None:
    with pytest.raises(ConfigError, match="known: none, int8"):
        fxquant.plan(nn.Linear(4, 4), None, scheme=bad)


PATTERNS = st.one_of(
    COMPONENTS.map(".".join),
    st.sampled_from(["*.fc", "re:a.*", "blocks.[01]", "?"]),
    st.text(min_size=1, max_size=4),
).filter(lambda pattern: not pattern.startswith("re:") or pattern == "re:a.*")


@given(
    st.sampled_from(sorted(SCHEMES)),
    st.dictionaries(PATTERNS, st.sampled_from(sorted(SCHEMES)), max_size=4),
    st.lists(PATTERNS, max_size=3),
    COMPONENTS.map(".".join),
)
def test_dict_round_trip(scheme: str, entries: dict[str, str], ignore: list[str], fqn: str) -> None:
    data = {"scheme": scheme, "config": entries, "ignore": ignore}
    config = QuantConfig.from_dict(data)
    assert config.to_dict() == data
    assert list(config.to_dict()["config"]) == list(entries)
    again = QuantConfig.from_dict(config.to_dict())
    assert again == config
    assert again.choose([fqn]) == config.choose([fqn])
    assert all(not name_matches(pattern, fqn) for pattern in config.unmatched([fqn]))


def test_a_generator_is_a_list_of_patterns() -> None:
    assert make_config("int8", None, (name for name in ("a", "b"))).ignore == ("a", "b")


FORMS = ["int8", "int8.t", "int8+table", "int8.t+table", "int4_g64.t.s_bf16.f16+table"]
NO_FORMS = ["int8.x", "int8+tables", "w4", "", "int8+table.t", "int8.s_bf16", "none.s_f16", "int4_g64.s_f32"]


@pytest.mark.parametrize("text", FORMS)
def test_form_text_round_trip(text: str) -> None:
    form = Form.parse(text)
    assert str(form) == text
    assert (form.transposed, form.table) == (".t" in text, "+table" in text)


@pytest.mark.parametrize("text", NO_FORMS)
def test_bad_form_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Form.parse(text)


def test_scheme_table() -> None:
    assert all(name == find_scheme(name).name == scheme.name for name, scheme in SCHEMES.items())
