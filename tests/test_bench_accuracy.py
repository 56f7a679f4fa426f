"""The harness of `benchmarks.accuracy`: its records, bars, table and processes, and one small run of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.accuracy import __main__ as accuracy
from benchmarks.accuracy import own, runner
from benchmarks.accuracy.child import builder
from benchmarks.accuracy.models import layer_inputs, linears, read_subjects, write_texts
from benchmarks.accuracy.peers import PEERS, round_trip, torchao
from benchmarks.accuracy.records import FLOAT, MINILM, SMOLLM2, Record, Results
from benchmarks.accuracy.table import render_table, render_verdicts
from benchmarks.accuracy.verdicts import FAIL, OPEN, PASS, judge
from benchmarks.accuracy.weights import LOSSLESS, RoundTrip, compare_weights
from fxquant.scheme import find_scheme


def language(case: str, perplexity: float, **other: object) -> Record:
    return Record(case=case, model=SMOLLM2, perplexity=perplexity, **other)  # type: ignore[arg-type]


def sentences(case: str, mean: float) -> Record:
    return Record(case=case, model=MINILM, mean=mean, minimum=mean - 0.01, sqnr=30.0)


GOOD = (
    language(FLOAT, 10.0),
    sentences(FLOAT, 1.0),
    language("none", 10.0),
    language("int8", 10.3, sqnr=40.5),
    sentences("int8", 0.99),
    language("torchao:int8", 10.3),
    sentences("torchao:int8", 0.98),
    language("int8_weight_only", 10.02),
    language("quanto:int8_weight_only", 10.01),
    language("int4_g64", 14.0),
    language("torchao:int4_g64", 13.0),
    language("int4_g64(refine=clip)", 12.5),
    language("int4_g64_asym", 12.4),
    language("torchao:int4_g64_asym", 12.2),
    sentences("int4_g64_asym", 0.968),
    sentences("torchao:int4_g64_asym", 0.968),
    language("int4_g64_asym(refine=hqq)", 11.9),
    Record(case="int4_g128", model=SMOLLM2, perplexity=15.0),
    Record(case="torchao:int4_public", model=SMOLLM2, reason="ImportError: Requires mslk"),
)


def changed(case: str, model: str = SMOLLM2, **numbers: object) -> list[Record]:
    assert any((record.case, record.model) == (case, model) for record in GOOD)
    return [replace(r, **numbers) if (r.case, r.model) == (case, model) else r for r in GOOD]  # type: ignore[arg-type]


def statuses(records: object) -> dict[str, str]:
    checks = judge(Results(records))  # type: ignore[arg-type]
    return {check.text.partition(":")[0]: check.status for check in checks}


def test_good_records_pass_every_bar():
    found = statuses(GOOD)
    assert len(found) == 7
    assert set(found.values()) == {PASS}
    assert not any(text.endswith("/ int4_g64") for text in found)  # symmetric int4 is not judged
    assert not accuracy.wrong(Results(GOOD), judge(Results(GOOD)), small=False)


@pytest.mark.parametrize(
    ("records", "bar"),
    [
        (changed("int8", perplexity=10.36), "int8 / torchao"),
        (changed("int8_weight_only", perplexity=10.051), "int8_weight_only / float"),
        (changed("none", perplexity=10.06), "none / float"),
        (changed("int4_g64_asym", MINILM, mean=0.963), "/ int4_g64_asym"),
        (changed("int4_g64_asym(refine=hqq)", perplexity=11.93), "gap of int4_g64_asym"),
        (changed("int4_g64", perplexity=13.7), "gap of int4_g64"),
    ],
)
def test_every_bar_can_fail(records, bar):
    failed = [text for text, status in statuses(records).items() if status == FAIL]
    assert any(bar in text for text in failed)
    results = Results(records)
    assert accuracy.wrong(results, judge(results), small=False)
    assert not accuracy.wrong(results, judge(results), small=True)


def test_a_bar_without_its_numbers_says_why():
    records = changed("torchao:int8", perplexity=None, reason="RuntimeError: no kernel")
    (check,) = [check for check in judge(Results(records)) if "int8 / torchao Int8Dyn" in check.text]
    assert check.status == OPEN
    assert "torchao:int8: RuntimeError: no kernel" in check.text
    assert not accuracy.wrong(Results(records), judge(Results(records)), small=False)  # a peer may be missing


def test_our_own_scheme_without_numbers_fails_the_run():
    records = changed("int8", perplexity=None, reason="ConfigError: unknown")
    for small in (False, True):
        assert accuracy.wrong(Results(records), judge(Results(records)), small=small)


def test_table_has_a_line_per_case_and_a_footnote_per_reason():
    lines = render_table(Results(GOOD)).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(Results(GOOD).cases())
    assert len({line.count("|") for line in table}) == 1
    rows = {line.split(" | ")[1]: line for line in table}
    peer = rows["torchao Int8DynamicActivationInt8WeightConfig"]
    assert "| 10.3000 | 1.0300 | 1.0000 | PASS | 0.98000 | 0.97000 | 0.50 |" in peer
    assert "| - [" in rows["torchao Int4WeightOnlyConfig()"]
    assert any(line.startswith("- [") and "Requires mslk" in line for line in lines)
    assert "not judged [" in rows["torchao IntxWeightOnlyConfig(int4, PerGroup(64))"]
    assert "Q4_1" in lines[-6] + lines[-7]


def test_verdicts_that_failed_come_first():
    lines = render_verdicts(judge(Results(changed("int8_weight_only", perplexity=10.2)))).splitlines()
    assert lines[0].startswith("- FAIL: int8_weight_only / float: 1.02x (bar 1.005x)")


def test_records_keep_what_they_know():
    data = {"case": "int8", "model": SMOLLM2, "perplexity": 2.0, "other": 1}
    record = Record(**Record.known(data))
    assert record.to_dict() == {"case": "int8", "model": SMOLLM2, "perplexity": 2.0}
    assert Results([record]).get("int8", MINILM).reason == "int8 was not run"


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.second = nn.Linear(6, 4, bias=False)
        self.lm_head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.second(self.first(x).relu()))


class TinySubject:
    name = "tiny"

    def __init__(self, inputs: list[Tensor]) -> None:
        self.inputs = inputs

    def calibrate(self, model: nn.Module) -> None:
        for x in self.inputs:
            model(x)


def test_heads_are_left_out():
    assert list(linears(Tiny())) == ["first", "second"]


def test_activation_scales_are_the_absmax_over_127():
    model = Tiny()
    inputs = [torch.full((2, 8), 0.5), torch.full((1, 8), -2.54)]
    found = layer_inputs(TinySubject(inputs), model)  # type: ignore[arg-type]
    hidden = max(model.first(x).relu().abs().max().item() for x in inputs)
    scales = {fqn: given.scale for fqn, given in found.items()}
    assert scales == pytest.approx({"first": 0.02, "second": hidden / 127})
    assert {given.axes for given in found.values()} == {2}
    assert not any(module._forward_pre_hooks for module in model.modules())


def halved(x: Tensor) -> Tensor:
    return x / 2


def test_weights_are_compared_in_decibels():
    exact, model = Tiny(), Tiny()
    model.load_state_dict(exact.state_dict())
    assert compare_weights(model, exact) == {"quantized": 0, "layers": 2}
    model.first = RoundTrip(model.first, lambda w: w, None)  # type: ignore[assignment]
    assert compare_weights(model, exact) == {"sqnr": LOSSLESS, "quantized": 1, "layers": 2}
    model.second = RoundTrip(model.second, lambda w: w * 0.9, None)  # type: ignore[assignment]
    found = compare_weights(model, exact)
    assert found["sqnr"] == pytest.approx((LOSSLESS + 20) / 2, rel=1e-5)
    assert found["quantized"] == 2


def test_round_trip_quantizes_weights_once_and_inputs_each_time():
    model = Tiny()
    exact = model.first(torch.ones(3, 5, 8))
    bias = model.first.bias.detach()
    assert round_trip(lambda: halved, lambda: halved, "why")(model, TinySubject([])) == "why"  # type: ignore[arg-type]
    assert isinstance(model.first, RoundTrip)
    assert isinstance(model.lm_head, nn.Linear)
    found = model.first(torch.ones(3, 5, 8))
    torch.testing.assert_close(found, (exact - bias) / 4 + bias)


class OnlyMultiplies(Tensor):
    """A weight that cannot be dequantized."""

    def dequantize(self) -> Tensor:
        raise NotImplementedError


def test_a_weight_that_only_multiplies_is_read_through_its_product():
    exact, model = Tiny(), Tiny()
    model.load_state_dict(exact.state_dict())
    weight = (model.first.weight.detach() * 0.9).as_subclass(OnlyMultiplies)
    model.first.weight = nn.Parameter(weight, requires_grad=False)
    assert compare_weights(model, exact)["sqnr"] == pytest.approx(20, rel=1e-4)


def test_a_config_that_is_refused_has_a_stand_in_and_tells_why(monkeypatch):
    class Library:
        @staticmethod
        def quantize_(model, config, _filter):
            if config == "late":
                model.first = RoundTrip(model.first, halved, None)
            raise AssertionError("no such device")

    monkeypatch.setitem(sys.modules, "torchao.quantization", Library())
    model = Tiny()
    stand_in = round_trip(lambda: halved, None)
    note = torchao(lambda library: library, otherwise=stand_in)(model, TinySubject([]))  # type: ignore[arg-type]
    assert note.endswith("its config says: no such device")
    assert isinstance(model.second, RoundTrip)
    with pytest.raises(AssertionError, match="no such device"):
        torchao(lambda library: library)(Tiny(), TinySubject([]))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="no such device"):  # a part is quantized already
        torchao(lambda _library: "late", otherwise=stand_in)(Tiny(), TinySubject([]))  # type: ignore[arg-type]


def test_every_scheme_and_every_peer_has_its_place():
    names = own.names()
    assert set(own.REFINED) < set(names)
    assert {peer.beside for peer in PEERS.values()} < set(names)
    assert not set(names) & set(PEERS)
    for name in names:
        find_scheme(name)
    listed = accuracy.cases(names)
    assert len(listed) == len(set(listed)) == 1 + len(names) + len(PEERS)
    assert accuracy.cases(["int8"]) == [FLOAT, "int8", "torchao:int8"]


def test_static_schemes_are_given_scales():
    assert [name for name in own.names() if own.is_static(name)] == ["int8_static"]
    assert own.options("int8", None) == {"scheme": "int8"}
    assert own.options("int8_static", {"a.b": 0.5}) == {
        "scheme": "none",
        "config": {"a.b": {"scheme": "int8_static", "act_scale": 0.5}},
    }


def test_float_case_is_the_float_model():
    exact = Tiny()
    assert builder(FLOAT)(None, exact) == (exact, "")  # type: ignore[arg-type]


def test_versions_of_a_python():
    found = runner.versions(sys.executable, ["torch", "no-such-package"])
    assert set(found) == {"python", "torch"}
    assert runner.versions("/no/such/python", ["torch"]) == {}


def test_a_process_that_says_nothing_gives_reasons(tmp_path):
    (reason,) = {r.reason for r in runner.run(FLOAT, tmp_path / "missing.json", sys.executable, 1)}
    assert reason is not None
    assert reason.startswith("the process ended with 1")
    assert "missing.json" in reason
    (reason,) = {r.reason for r in runner.run(FLOAT, tmp_path, "/no/such/python", 1)}
    assert reason is not None
    assert "does not start" in reason


def test_texts_are_written_once_for_all(tmp_path, smollm2_folder, minilm_folder):
    target = tmp_path / "texts.json"
    digest = write_texts(target, tokens=64, context=32, windows=2, sentences=3)
    assert len(digest) == 64
    language_model, sentence_model = read_subjects(target)
    assert (language_model.where(), sentence_model.where()) == (smollm2_folder, minilm_folder)
    assert len(language_model.ids) == 64  # type: ignore[attr-defined]
    assert [len(window) for window in language_model.calibration] == [32, 32]  # type: ignore[attr-defined]
    assert len(sentence_model.sentences) == 3  # type: ignore[attr-defined]


def test_unknown_schemes_are_refused(capsys):
    with pytest.raises(SystemExit):
        accuracy.parse(["--schemes", "int8,nothing"])
    assert "unknown schemes nothing" in capsys.readouterr().err
    assert accuracy.parse(["--small"]).schemes == accuracy.SMALL_SCHEMES


def test_small_run_end_to_end(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    argv = ["--small", "--threads", "1", "--peers-python", "/no/such/python", "--json", str(out)]
    assert accuracy.main(argv) == 0
    rows = {(row["case"], row["model"]): row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == 2 * len(accuracy.cases(accuracy.SMALL_SCHEMES))
    exact = rows[FLOAT, SMOLLM2]["perplexity"]
    for scheme in accuracy.SMALL_SCHEMES:
        assert abs(math.log(rows[scheme, SMOLLM2]["perplexity"] / exact)) < 0.5
        assert rows[scheme, MINILM]["mean"] > 0.95
        assert rows[scheme, SMOLLM2]["quantized"] == 210
    assert rows["int8_weight_only", MINILM]["sqnr"] > 38
    assert "not installed" in rows["torchao:int8", SMOLLM2]["reason"]
    printed = capsys.readouterr().out
    assert "in bf16" in printed
    assert "| `int8` | torchao Int8DynamicActivationInt8WeightConfig |" in printed


_PRODUCTS = """
import torch, torch.nn.functional as F
from benchmarks.accuracy import half_products
x, w, bias = torch.randn(3, 70), torch.randn(40, 70), torch.randn(40)
half = [part.bfloat16() for part in (x, w, bias)]
with torch.no_grad():
    plain, exact = F.linear(*half), F.linear(x, w, bias)
    half_products.through_float32()
    for operands in (half, half[:2]):
        wide = F.linear(*(part.double() for part in operands))
        made = F.linear(*operands)
        assert made.dtype == torch.bfloat16
        assert ((made.double() - wide).abs() <= wide.abs() * 2**-8 + 1e-4).all()
    assert ((F.linear(*half) - plain).abs() <= plain.abs() * 2**-7).all()
    assert torch.equal(F.linear(x, w, bias), exact)
"""


def test_products_of_bfloat16_through_float32() -> None:
    """In a process of its own: kernels are replaced."""
    subprocess.run([sys.executable, "-c", _PRODUCTS], check=True, timeout=300)
