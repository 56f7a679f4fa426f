"""The runner of passes: it cleans up, checks, counts, stamps, logs and dumps; and the dump itself."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher

import fxquant
from fxquant.capture import capture
from fxquant.errors import ConfigError, GraphCheckError
from fxquant.form import Form
from fxquant.graph import call, count_calls, dump, placeholders
from fxquant.pass_manager import PassResult, check, pass_name, run_passes
from fxquant.passes import rewrite
from fxquant.target import Kernel, Target

aten = torch.ops.aten
CPU = torch.device("cpu")
EXACT = "fxquant::scaled_mm"
TARGET = Target(
    name="toy", device_type="cpu", kernels={EXACT: Kernel(op="fxquant_cpu::scaled_mm", reason="test")}
)


class Net(nn.Module):
    """Two linears that share their input, one cut of a weight, a head that stays float."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.qkv = nn.Parameter(torch.empty(24, 8))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.q(x) + self.k(x)).chunk(2, -1)
        v = nn.functional.linear(x, self.qkv[16:24])
        return self.head(torch.cat([second, first, v], -1)) * x.shape[0]


def captured(*, dynamic: bool = True) -> fx.GraphModule:
    with fxquant.meta_init():
        model = Net()
    return capture(model, (torch.zeros(2, 3, 8),), {}, device=CPU, dynamic=dynamic).gm


FORMS = {name: Form(scheme="int8") for name in ("p_q_weight", "p_k_weight", "p_qkv")}
NAMES = [
    "expand_weights",
    "quantize_linear",
    "quantize_experts",
    "quantize_embedding",
    "share_quantize_act",
    "lower_to_target",
]


def counts(gm: fx.GraphModule) -> tuple[int, ...]:
    ops = count_calls(gm)
    names = ("aten.linear", "fxquant.quantize_act", "fxquant.scaled_mm", "fxquant_cpu.scaled_mm")
    return tuple(ops.get(name, 0) for name in names)


# --------------------------------------------------------------------------------------- the runner


def test_rewrites_are_counted() -> None:
    gm = captured()
    assert counts(gm) == (4, 0, 0, 0)
    results = rewrite(gm, FORMS, TARGET)
    assert {result.name: result.rewrites for result in results} == dict(
        zip(NAMES, (3, 3, 0, 0, 2, 3), strict=True)
    )
    assert counts(gm) == (1, 1, 0, 3)
    assert [result.rewrites for result in rewrite(captured(), {}, TARGET)] == [0] * len(NAMES)


DISABLED = {
    "expand_weights": (4, 0, 0, 0),
    "quantize_linear": (4, 0, 0, 0),
    "quantize_experts": (1, 1, 0, 3),
    "quantize_embedding": (1, 1, 0, 3),
    "share_quantize_act": (1, 3, 0, 3),
    "lower_to_target": (1, 1, 3, 0),
}


@pytest.mark.parametrize("name", NAMES)
def test_each_pass_can_be_disabled_by_name(name: str) -> None:
    gm = captured()
    results = rewrite(gm, FORMS, TARGET, disable=[name])
    assert [result.name for result in results] == [other for other in NAMES if other != name]
    assert counts(gm) == DISABLED[name]


def test_disabling_is_an_option_of_the_verbs() -> None:
    with fxquant.meta_init():
        model = Net()
    options: dict[str, Any] = {"scheme": "int8", "example_inputs": (torch.zeros(2, 3, 8),), "target": TARGET}
    low = fxquant.lower(model, None, disable_passes=["lower_to_target"], **options)
    assert counts(low.run_graph)[2:] == (4, 0)
    with pytest.raises(ConfigError, match="split_wide.*" + ", ".join(NAMES[1:])):
        fxquant.lower(model, None, disable_passes=["split_wide"], **options)


def insert_relu(gm: fx.GraphModule) -> int:
    """Append a relu to the graph's result, properly."""
    output = gm.graph.output_node()
    (result,) = output.args[0]
    with gm.graph.inserting_before(output):
        output.args = ((call(gm, aten.relu.default, (result,)),),)
    return 1


def with_new_node(target: Callable[..., Any], *args: Any) -> Callable[[fx.GraphModule], int]:
    """Make a pass that returns ``target(result, *args)`` and forgets its value."""

    def forget(gm: fx.GraphModule) -> int:
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            output.args = ((gm.graph.call_function(target, (output.args[0][0], *args)),),)
        return 1

    return forget


def test_unknown_names_are_refused_before_anything_runs() -> None:
    gm = captured()
    before = dump(gm)
    with pytest.raises(ConfigError, match=r"\['a', 'b'\]; known: insert_relu"):
        run_passes(gm, (insert_relu,), disable=["b", "insert_relu", "a"])
    assert dump(gm) == before


@pytest.mark.parametrize(("target", "args"), [(aten.relu.default, ()), (operator.getitem, (0,))])
def test_a_pass_that_forgets_a_value_is_found_out(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with pytest.raises(GraphCheckError, match=r"after pass forget: node .* has no meta\['val'\]"):
        run_passes(captured(), (with_new_node(target, *args),))


def test_an_input_without_a_value_is_found_out_and_ops_without_a_result_need_none() -> None:
    gm = captured()
    first, second = placeholders(gm)[:2]
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(torch.ops.fxquant.check_same.default, (first, second, "both"))
    check(gm, after="nothing")
    del first.meta["val"]
    with pytest.raises(GraphCheckError, match=rf"after pass nothing.*{first.name}"):
        check(gm, after="nothing")


def test_new_nodes_bear_the_name_of_their_pass() -> None:
    gm = captured()
    old = set(gm.graph.nodes)
    rewrite(gm, FORMS, TARGET)
    run_passes(gm, (insert_relu,))
    stamps = {(str(node.target), node.meta.get("fxquant_pass")) for node in gm.graph.nodes if node not in old}
    weights = ("p_q_weight", "p_k_weight", "p_qkv")
    assert stamps == {
        *((f"{weight}_codes", "expand_weights") for weight in weights),
        *((f"{weight}_scale", "expand_weights") for weight in weights),
        ("fxquant.quantize_act.default", "quantize_linear"),
        ("fxquant_cpu.scaled_mm.default", "quantize_linear"),
        ("aten.slice.Tensor", "quantize_linear"),
        (str(operator.getitem), "quantize_linear"),
        ("aten.relu.default", "insert_relu"),
    }
    assert not any("fxquant_pass" in node.meta for node in gm.graph.nodes if node in old)


def test_the_runner_cleans_up() -> None:
    gm = captured()
    size = len(gm.graph.nodes)

    def leave_dead_code(module: fx.GraphModule) -> int:
        with module.graph.inserting_before(module.graph.output_node()):
            call(module, aten.relu.default, (placeholders(module)[0],))
        return 0

    (result,) = run_passes(gm, (leave_dead_code,))
    assert (result.name, result.rewrites) == ("leave_dead_code", 0)
    assert len(gm.graph.nodes) == size
    run_passes(gm, (insert_relu,))
    given = [torch.randn(tuple(int(side) for side in node.meta["val"].shape)) for node in placeholders(gm)]
    assert "relu" in gm.code
    assert gm(*given)[0].min() >= 0


def test_a_broken_graph_does_not_pass() -> None:
    def use_before_definition(gm: fx.GraphModule) -> int:
        first = placeholders(gm)[0]
        gm.graph.output_node().prev.append(first)
        return 1

    with pytest.raises(RuntimeError, match="used before it has been defined"):
        run_passes(captured(), (use_before_definition,))


def test_names_of_passes() -> None:
    assert pass_name(insert_relu) == "insert_relu"
    assert pass_name(partial(insert_relu)) == "insert_relu"
    assert PassResult(name="a", rewrites=1, seconds=0.0).rewrites == 1


def test_each_pass_is_logged_with_its_diff(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fxquant.passes"):
        run_passes(captured(), (insert_relu, lambda gm: 0))
    records = [record for record in caplog.records if record.name == "fxquant.passes"]
    assert [record.levelname for record in records] == ["INFO", "DEBUG", "INFO"]
    assert records[0].getMessage().startswith("insert_relu: 1 rewrites")
    assert "--- before insert_relu\n+++ after insert_relu" in records[1].getMessage()
    assert "\n+%" in records[1].getMessage()
    assert "aten.relu" in records[1].getMessage()


# ------------------------------------------------------------------------------- values stay true


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), [str(side) for side in value.shape], [str(side) for side in value.stride()]
    if isinstance(value, (tuple, list)):
        return [described(part) for part in value]
    return str(value)


def untrue(gm: fx.GraphModule) -> list[str]:
    """The calls whose ``meta["val"]`` is not what the op gives for the values of its operands."""
    found = []
    mode = placeholders(gm)[0].meta["val"].fake_mode
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        # The dispatcher decomposes for symbolic sizes: torch 2.11's linear does not take them.
        with enable_python_dispatcher(), mode, torch.no_grad():
            value = node.target(*args, **kwargs)
        if described(value) != described(node.meta["val"]):
            found.append(f"{node.name}: {described(value)} is not {described(node.meta['val'])}")
    return found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("upto", range(5))
def test_every_value_is_true_after_every_pass(upto: int, dynamic: bool) -> None:
    gm = captured(dynamic=dynamic)
    rewrite(gm, FORMS, TARGET, disable=NAMES[upto:])
    assert untrue(gm) == []


def test_an_untrue_value_would_be_seen() -> None:
    gm = captured(dynamic=False)
    linear = next(iter(gm.graph.find_nodes(op="call_function", target=aten.linear.default)))
    linear.meta["val"] = linear.meta["val"].to(torch.bfloat16)
    assert len(untrue(gm)) > 0


# ---------------------------------------------------------------------------------------- the dump


def test_dump() -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            a, b = torch.split(x, [2, 6], -1)
            return a.to(torch.bfloat16), torch.sum(b, dim=0, keepdim=True) + y.shape[0]

    given = (torch.zeros(4, 8), torch.zeros(5, 2))
    assert dump(capture(Small(), given, {}, device=CPU, dynamic=False).gm).splitlines() == [
        "x : float32[4, 8]",
        "y : float32[5, 2]",
        "%2 = aten.split_with_sizes(x, [2, 6], -1) : (float32[4, 2], float32[4, 6])",
        "%3 = getitem(%2, 0) : float32[4, 2]",
        "%4 = getitem(%2, 1) : float32[4, 6]",
        "%5 = aten.to.dtype(%3, bfloat16) : bfloat16[4, 2]",
        "%6 = aten.sum.dim_IntList(%4, [0], True) : float32[1, 6]",
        "%7 = aten.add.Tensor(%6, 5) : float32[1, 6]",
        "return [%5, %7]",
    ]
    dynamic = dump(capture(Small(), given, {}, device=CPU).gm).splitlines()
    assert dynamic[:2] == ["x : float32[s0, 8]", "y : float32[s1, s2]"]
    assert "%7 = aten.sym_size.int(y, 0) : SymInt" in dynamic


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_dump_is_the_same_for_every_capture(dynamic: bool) -> None:
    first, second = captured(dynamic=dynamic), captured(dynamic=dynamic)
    assert dump(first) == dump(second)
    rewrite(first, FORMS, TARGET)
    rewrite(second, FORMS, TARGET)
    assert dump(first) == dump(second) != dump(captured(dynamic=dynamic))


def test_the_dump_does_not_depend_on_names_of_nodes() -> None:
    gm = captured()
    before = dump(gm)
    for i, node in enumerate(gm.graph.nodes):
        node.name = f"renamed_{i}"
    gm.recompile()
    assert dump(gm) == before
    insert_relu(gm)
    assert dump(gm) != before
