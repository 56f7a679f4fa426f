"""The harness of `benchmarks.load`: its statistics, its verdicts, its checkpoints, and one run of it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import load
from benchmarks.loading import models, runner
from benchmarks.loading import subject as subject_cases
from benchmarks.loading.cases import CASES, STANDARD, Spec, floor_codes
from benchmarks.loading.files import entries_of, ideal_mib, read_header
from benchmarks.loading.floors import build_kernel, floor_tile, read, read_fresh
from benchmarks.loading.records import Record, Results
from benchmarks.loading.table import render_table, render_verdicts
from benchmarks.loading.verdicts import BIG, FAIL, OPEN, PASS, SMALL, Models, judge
from benchmarks.loading.verify import check_codes, spread

TINY = models.Wide(depth=2, hidden=32, wide=100)
IDEAL = 2000.0


def record(case: str, seconds: float, model: str = "llama2b", **other: object) -> Record:
    numbers: dict[str, object] = {"load_s": seconds, "wall_s": seconds, "ideal": IDEAL, **other}
    return Record(model=model, case=case, **numbers)  # type: ignore[arg-type]


def subject(case: str, seconds: float, model: str = "llama2b", **other: object) -> Record:
    numbers: dict[str, object] = {
        "wall_s": seconds + 5,
        "plan_s": 4.0,
        "plan_anon": 40.0,
        "peak_anon": 2010.0,
        "settled_anon": 2005.0,
        "peak_file": 1.0,
        "predicted": 2011.0,
        "measured": 2009.0,
        "checked": 4,
        "wrong": 0,
    }
    return record(case, seconds, model, **(numbers | other))


GOOD = (
    *(record(case, 1.0) for case in ("floor_tile:t2e", "floor_tile:t2", "read_fresh")),
    record("quanto:qint8", 5.0),
    record("hf:ao_w8a8", 9.0),
    record("read", 2.0, cold=True),
    subject("fxquant:int8", 1.1),
    subject("fxquant:int8", 1.0, repeat=1, peak_anon=2012.0),
    subject("fxquant:int8", 2.1, cold=True),
    subject("fxquant:int8", 0.1, model="llama_small", checked=28),
    subject("fxquant:saved", 1.2),
    subject("fxquant:cache", 1.2),
    subject("fxquant:int8@smallest", 1.5),
    *(subject(c, 1.0, m) for m in BIG.wide for c in ("fxquant:int8", "fxquant:int8@smallest")),
)


def statuses(records: object) -> dict[int, str]:
    return {item.number: item.status for item in judge(Results(records), BIG)}  # type: ignore[arg-type]


def fails(records: object, stand: Models = BIG) -> bool:
    results = Results(records)  # type: ignore[arg-type]
    return load.failed(results, judge(results, stand), small=stand is SMALL)


def changed(case: str, model: str = "llama2b", cold: bool = False, **numbers: object) -> list[Record]:
    found = [(r.case, r.model, r.cold) == (case, model, cold) for r in GOOD]
    assert any(found)
    return [
        replace(r, **numbers) if hit else r  # type: ignore[arg-type]
        for r, hit in zip(GOOD, found, strict=True)
    ]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return models.checkpoint("tiny", tmp_path, TINY)


def test_statistics_leave_out_runs_without_numbers():
    runs = [
        record("read", seconds, repeat=i, peak_anon=peak)
        for i, (seconds, peak) in enumerate([(3.0, 99.0), (1.0, 101.0), (2.0, None)])
    ]
    results = Results([*runs, Record(model="llama2b", case="read", reason="OSError: gone")])
    assert results.median("llama2b", "read", "load_s") == 2.0
    assert results.largest("llama2b", "read", "peak_anon") == 101.0
    assert results.spread("llama2b", "read", "peak_anon") == pytest.approx(0.02)
    assert results.spread("llama2b", "read", "plan_s") is None
    assert results.median("llama2b", "other", "load_s") is None
    assert results.reason("llama2b", "read") == "OSError: gone"
    assert results.why("llama2b", "read") == "llama2b read is not available"
    assert results.why("llama2b", "other", cold=True) == "llama2b other cold was not run"


def test_good_records_pass_every_item():
    assert statuses(GOOD) == dict.fromkeys((1, 2, 3, 4, 5, 6, 9), PASS)
    assert not fails(GOOD)


@pytest.mark.parametrize(
    ("item", "records"),
    [
        (1, changed("fxquant:int8", load_s=1.16)),
        (1, changed("quanto:qint8", wall_s=3.6)),
        (1, changed("hf:ao_w8a8", wall_s=6.2)),
        (1, changed("fxquant:int8", plan_s=10.5)),
        (1, changed("fxquant:int8", wrong=1)),
        (1, changed("fxquant:int8", model="llama_small", wrong=1)),
        (2, changed("fxquant:int8", peak_anon=1.02 * IDEAL + 9)),
        (2, changed("fxquant:int8", settled_anon=1.02 * IDEAL + 9)),
        (2, [*GOOD, subject("fxquant:int8", 1.0, repeat=2, peak_anon=1980.0)]),
        (2, changed("fxquant:int8", peak_file=17.0)),
        (2, changed("fxquant:int8", plan_anon=121.0)),
        (3, changed("fxquant:int8", model="one_big", peak_anon=IDEAL + 33)),
        (4, changed("fxquant:int8@smallest", model="widedit", predicted=2100.0)),
        (4, changed("fxquant:int8", measured=1900.0)),
        (4, changed("fxquant:int8@smallest", wrong=7)),
        (5, changed("fxquant:saved", load_s=1.26)),
        (5, changed("fxquant:cache", wrong=3)),
        (6, changed("fxquant:int8", cold=True, load_s=2.31)),
        (9, changed("floor_tile:t2", load_s=0.9)),
    ],
)
def test_one_bad_number_fails_its_item(item, records):
    found = statuses(records)
    assert found[item] == FAIL
    assert fails(records)


def test_what_was_not_measured_neither_passes_nor_fails():
    gone = Record(model="llama2b", case="fxquant:saved", reason="ConfigError: not built yet")
    records = [*(r for r in GOOD if r.case != "fxquant:saved"), gone]
    found = statuses(records)
    assert found[5] == OPEN
    assert found[1] == PASS
    text = render_verdicts(judge(Results(records), BIG))
    assert "(5) saved constants: not measured (2 PASS, 2 not measured)" in text
    assert "llama2b fxquant:saved is not available" in text
    assert "not available: llama2b fxquant:saved: ConfigError: not built yet" in render_table(
        Results(records)
    )
    assert statuses([]) == dict.fromkeys((1, 2, 3, 4, 5, 6, 9), OPEN)
    one_run = [r for r in GOOD if r.repeat == 0]
    assert statuses(one_run)[2] == OPEN, "variation needs two runs"


def test_small_runs_fail_for_wrong_codes_only():
    slow = subject("fxquant:int8", 9.0, model="llama_small")
    items = judge(Results([slow, record("floor_tile:t2e", 1.0, "llama_small")]), SMALL)
    assert items[0].status == FAIL
    assert not fails([slow], SMALL)
    assert fails([replace(slow, wrong=2)], SMALL)
    assert fails([Record(model="llama_small", case="fxquant:int8", reason="ImportError: broken")], SMALL)


def test_table_has_a_ratio_and_lists_what_is_missing():
    text = render_table(Results([*GOOD, Record(model="one_big", case="floor_tile:t2", reason="no gcc")]))
    assert "quanto:qint8" in text
    assert "5.00 (5.00)" in text
    assert "not available: one_big floor_tile:t2: no gcc" in text


def test_checkpoint_is_reused_only_if_complete(tmp_path, tiny):
    file = next(tiny.glob("*.safetensors"))
    first, written = file.read_bytes(), file.stat().st_mtime_ns
    assert models.checkpoint("tiny", tmp_path, TINY) == tiny
    assert file.stat().st_mtime_ns == written
    file.write_bytes(first[:-1])
    assert not models.is_complete(tiny, TINY)
    assert models.checkpoint("tiny", tmp_path, TINY) == tiny
    assert file.read_bytes() == first, "the same bytes again"
    assert not models.is_complete(tiny, replace(TINY, depth=1))
    (tiny / models.INDEX).unlink()
    assert not models.is_complete(tiny, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_failed_checkpoint_leaves_nothing(tmp_path, monkeypatch):
    def fail(folder: Path, spec: models.Spec) -> None:
        (folder / "half").write_text("")
        raise OSError("no space")

    monkeypatch.setattr(models, "_write", fail)
    with pytest.raises(OSError, match="no space"):
        models.checkpoint("tiny", tmp_path, TINY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama_small", "llama2b"])
def test_shapes_of_a_llama_are_those_of_transformers(name):
    spec = models.MODELS[name]
    with torch.device("meta"):
        state = spec.build().state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == spec.shapes()
    assert list(state) == list(spec.shapes())


def test_sizes_of_the_models():
    count = {
        name: sum(torch.Size(s).numel() for s in spec.shapes().values())
        for name, spec in models.MODELS.items()
    }
    assert round(count["llama2b"] / 1e9, 2) == 1.87
    assert count["one_big"] * 2 == 3 << 29
    assert all(40e6 < 2 * count[name] < 110e6 for name in load.SMALL_MODELS)
    assert max(2 * torch.Size(s).numel() for s in models.MODELS["widedit"].shapes().values()) == 378 << 20


def test_ideal_counts_codes_and_scales_but_heads_stay_float(tiny):
    linears = 2 * (100 * 32 + 4 * 100 + 32 * 32 + 4 * 32)
    biases, head = 2 * 2 * (100 + 32), 2 * (64 * 32 + 64)
    assert ideal_mib(tiny, "int8") * 2**20 == linears + biases + head
    assert ideal_mib(tiny, "none") * 2**20 == sum(e.nbytes for e in entries_of(tiny))


@pytest.mark.parametrize("compiled", [False, True])
def test_floors_make_what_the_definition_says(tiny, tmp_path, compiled):
    kernel = None
    if compiled:
        try:
            kernel = build_kernel(tmp_path)
        except OSError as error:
            pytest.skip(str(error))
    made = floor_tile(tiny, 2, kernel)
    assert set(made) == set(TINY.shapes())
    found = check_codes(tiny, lambda key: floor_codes(made, key), -1)
    assert found["checked"] == 4
    if compiled:  # which multiplies by the reciprocal: a few values differ by one
        assert found["wrong"] <= 0.002 * 2 * (100 + 32) * 32
    else:
        assert found["wrong"] == 0
        codes, scale = made["blocks.0.proj.weight"]
        codes[3, 4] += 1
        scale[5] *= 2
        assert check_codes(tiny, lambda key: floor_codes(made, key), -1) == {"checked": 4, "wrong": 2}
    read(tiny, 2)
    sizes = {key: part.nbytes for key, (part,) in read_fresh(tiny, 2, "int8").items()}
    assert sizes == {entry.key: entry.ideal("int8") for entry in entries_of(tiny)}


def test_weights_without_codes_are_wrong(tiny):
    assert check_codes(tiny, lambda _: None, 1)["wrong"] > 0


def test_layers_to_check_are_spread_and_include_the_largest(tiny):
    entries = [entry for entry in entries_of(tiny) if entry.quantized]
    assert spread(entries, -1) == entries
    keys = [entry.key for entry in spread(entries, 2)]
    assert keys[0] == entries[0].key
    assert keys[-1] == entries[-1].key
    assert max(entries, key=lambda entry: entry.nbytes).key in keys


def test_headers_are_checked_against_the_files(tiny):
    file = next(tiny.glob("*.safetensors"))
    assert {entry.key: entry.shape for entry in read_header(file)} == TINY.shapes()


def test_every_case_of_the_standard_runs_is_known():
    assert set(STANDARD) == set(models.MODELS)
    assert {case for cases in STANDARD.values() for case in cases} <= set(CASES)


def test_a_case_that_raises_is_not_available(tmp_path):
    pythons = runner.Pythons(own=sys.executable, peers=str(tmp_path / "none" / "python"))
    spec = Spec(case="quanto:qint8", model="wide_small", folder=str(tmp_path), threads=1)
    missing = runner.run(spec, pythons, cached=[], cold=False, repeat=0)
    assert missing.reason is not None
    assert "does not start" in missing.reason
    spec = replace(spec, case="floor_tile:t2", extra={"kernel": str(tmp_path / "none.so")})
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    failed = runner.run(spec, pythons, cached=[], cold=False, repeat=0)
    assert failed.reason is not None
    assert "none.so" in failed.reason


class FakeBudgetError(Exception):
    smallest = 123 << 20


class FakeFxquant:
    """Stands in for fxquant: notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object, dict[str, object]]] = []
        self.meta_init = lambda: torch.device("meta")

    def plan(self, _model, ckpt, **options):
        self.calls.append(("plan", ckpt, options))
        if options.get("host_budget") == 1:
            raise FakeBudgetError
        return SimpleNamespace(predicted_peak={"cpu": 5 << 20})

    def compile(self, model, ckpt, **options):
        self.calls.append(("compile", ckpt, options))
        return model

    def save_checkpoint(self, _model, path, **options):
        self.calls.append(("save", path, options))

    def report(self, _model):
        return SimpleNamespace(load_seconds=0.5, measured_peak={"cpu": 6 << 20})


@pytest.fixture
def fake(monkeypatch):
    module = FakeFxquant()
    monkeypatch.setitem(sys.modules, "fxquant", module)
    monkeypatch.setitem(sys.modules, "fxquant.errors", SimpleNamespace(BudgetError=FakeBudgetError))
    monkeypatch.setitem(models.MODELS, "tiny", TINY)
    return module


@pytest.mark.parametrize(
    ("way", "extra", "expected"),
    [
        ("int8", {}, {"scheme": "int8"}),
        ("int8@smallest", {"budget": 3 << 20}, {"scheme": "int8", "host_budget": 3 << 20}),
        ("none", {}, {"scheme": "none"}),
        ("dummy", {}, {"scheme": "int8", "weights": "dummy"}),
        ("cache", {"cache": "there"}, {"scheme": "int8", "cache_dir": "there"}),
        ("saved", {"saved": "there"}, {}),
    ],
)
def test_plan_and_compile_are_given_the_same(fake, tiny, way, extra, expected):
    prepared = subject_cases.prepare(way, "tiny", tiny, extra)
    assert [call[0] for call in fake.calls] == ["plan"]
    model = prepared.load()
    (_, *planned), (name, *compiled) = fake.calls
    assert name == "compile"
    assert planned == compiled
    ckpt, options = planned
    assert ckpt == (Path("there") if way == "saved" else tiny)
    assert options == (expected | {"ignore": ("head",)} if expected else {})
    assert prepared.after(model) == {"load_s": 0.5, "measured": 6.0}
    assert prepared.info["predicted"] == 5.0
    assert prepared.info.get("budget") == (3.0 if way == "int8@smallest" else None)
    assert prepared.codes_of(model, "blocks.0.proj.weight") is None


def test_what_later_runs_need(fake, tiny, tmp_path):
    assert subject_cases.smallest_budget("tiny", tiny) == 123 << 20
    subject_cases.save("tiny", tiny, tmp_path / "saved")
    assert fake.calls[-1] == ("save", tmp_path / "saved", {"format": "fxquant"})
    subject_cases.fill_cache("tiny", tiny, tmp_path / "cache")
    assert fake.calls[-1][2]["cache_dir"] == str(tmp_path / "cache")


def test_a_budget_that_is_not_refused_is_an_error(fake, tiny, monkeypatch):
    monkeypatch.setattr(fake, "plan", lambda *_args, **_options: None)
    with pytest.raises(RuntimeError, match="no BudgetError"):
        subject_cases.smallest_budget("tiny", tiny)


def test_unknown_names_are_refused(capsys):
    for argv in (["--cases", "read,nothing"], ["--models", "nothing"]):
        with pytest.raises(SystemExit):
            load.parse(argv)
        assert "nothing" in capsys.readouterr().err
    assert load.parse(["--cases", "floor_tile"]).cases == {c for c in CASES if c.startswith("floor_tile")}


def test_small_run_end_to_end(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    folder = tmp_path / "ckpt"
    argv = ["--small", "--cases", "read,floor_tile:t1e", "--repeat", "1"]
    assert load.main([*argv, "--ckpt-dir", str(folder), "--json", str(out)]) == 0
    rows = {(row["model"], row["case"]): row for row in map(json.loads, out.read_text().splitlines())}
    assert set(rows) == {("llama_small", "read"), ("llama_small", "floor_tile:t1e"), ("wide_small", "read")}
    tile = rows["llama_small", "floor_tile:t1e"]
    assert (tile["checked"], tile["wrong"]) == (28, 0)
    # Below it by what the process held but did not use before, above by buffers.
    assert 0.9 * tile["ideal"] < tile["peak_anon"] < tile["ideal"] + 24
    assert sorted(path.name for path in folder.iterdir()) == ["llama_small", "wide_small"]
    assert "(1) warm load: not measured" in capsys.readouterr().out
