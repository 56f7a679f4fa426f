"""The HTML page: the data is all there, hostile names stay text, and a browser draws it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxquant
from fxquant.plan import Plan
from fxquant.timeline import Moment
from fxquant.views.html import MAX_POINTS, SCRIPTS, embed, page, page_data, thin, write_page

MIB = 1 << 20
HOSTILE = "</script><img src=x onerror=alert(1)>&lt;\u2028\u202e'\"@DATA@"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)
FLAGS = (
    "--headless",
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1366,900",
    "--virtual-time-budget=2000",
    "--dump-dom",
)

needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser found: none of {', '.join(BROWSERS)}")


def net() -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (16, 32, 48):
        layers += [nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16), nn.LayerNorm(16)]
    return nn.Sequential(*layers).eval()


def a_plan(**parts: Any) -> Plan:
    model = net()
    with fxquant.meta_init():
        empty = net()
    values = dict(model.state_dict())
    plan = fxquant.plan(empty, values, scheme="int8", example_inputs=(torch.ones(2, 16),))
    return replace(plan, **parts)


def a_report() -> Any:
    with fxquant.meta_init():
        empty = net()
    model = fxquant.compile(
        empty, dict(net().state_dict()), scheme="int8", example_inputs=(torch.ones(2, 16),)
    )
    report = fxquant.report(model)
    plan = replace(report.plan, timeline=staircase(20), loading={"workers": 2, "host_budget": 30 * MIB})
    measured = tuple(
        replace(moment, seconds=index / 10, anonymous=25 * MIB)
        for index, moment in enumerate(staircase(20, 99))
    )
    return replace(report, plan=plan, timeline=measured, measured_anonymous=25 * MIB)


def staircase(steps: int, percent: int = 100) -> tuple[Moment, ...]:
    """Memory that grows by 1 MiB a step and is 2 MiB higher while a step lasts."""
    return tuple(
        Moment(read_bytes=step * 2 * MIB, memory={"cpu": size * MIB * percent // 100})
        for step in range(steps)
        for size in (step + 2, step)
    )


def data_of(text: str) -> Any:
    blocks = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert len(blocks) == 1
    return json.loads(blocks[0])


def rows_of(data: Any) -> list[dict[str, Any]]:
    return [dict(zip(data["columns"], row, strict=True)) for row in data["weights"]]


# -------------------------------------------------------------------------------- without a browser


def test_every_weight_is_in_the_page() -> None:
    plan = a_plan()
    data = data_of(page(plan))
    rows = rows_of(data)
    assert [row["fqn"] for row in rows] == [weight.fqn for weight in plan.weights]
    for row, weight in zip(rows, plan.weights, strict=True):
        for name in ("form", "quantized", "reason"):
            assert row[name] == getattr(weight, name)
        assert (tuple(row["shape"]), tuple(row["aliases"])) == (weight.shape, weight.aliases)
        for name in ("float", "resident", "transient"):
            assert row[name] == getattr(weight, f"{name}_bytes")
        assert row["files"] == ["memory"]
    assert (data["hash"], data["float"], data["resident"]) == (
        plan.hash,
        plan.float_bytes,
        plan.resident_bytes,
    )
    assert data["report"] is None


def test_the_page_of_a_report_has_what_was_measured() -> None:
    report = a_report()
    data = data_of(page(report.plan, report))
    assert data["report"]["peak"] == dict(report.measured_peak)
    assert data["report"]["anonymous"] == 25 * MIB
    assert data["report"]["seconds"] == report.load_seconds
    (chart,) = data["charts"]
    assert chart["device"] == "cpu"
    assert chart["budgets"] == {"host budget": 30 * MIB}
    assert chart["resident"] == report.plan.resident_bytes
    assert len(chart["predicted"]) == len(chart["measured"]) == len(chart["anonymous"]) == 40
    assert chart["measured"][-1] == [38 * MIB, 19 * MIB * 99 // 100, 3.9]


def test_each_device_has_its_own_chart_and_budget() -> None:
    moments = tuple(
        Moment(read_bytes=step, memory={"cuda": step, **({"cpu": 7} if step == 1 else {})})
        for step in range(3)
    )
    loading = {"host_budget": 8, "device_budget": 9}
    plan = a_plan(
        backend="cuda", timeline=moments, predicted_peak={"npu": 1, "cuda": 2, "cpu": 7}, loading=loading
    )
    cpu, cuda, npu = page_data(plan)["charts"]
    assert (cpu["device"], cpu["budgets"], cpu["predicted"]) == (
        "cpu",
        {"host budget": 8},
        [[0, 0], [1, 7], [2, 0]],
    )
    assert (cuda["device"], cuda["budgets"], cuda["resident"]) == ("cuda", {"device budget": 9}, 2)
    assert (npu["predicted"], npu["resident"]) == ([], None)


@pytest.mark.parametrize("count", [0, 1, 2, MAX_POINTS, MAX_POINTS + 1, 7001])
def test_thinning_keeps_the_ends_and_the_peak(count: int) -> None:
    points: list[list[float]] = [[at, (at * 7919) % 1000] for at in range(count)]
    if count > 5:
        points[count // 3][1] = 10**9
    kept = thin(points)
    assert len(kept) <= MAX_POINTS
    assert kept == sorted(kept, key=lambda point: point[0])
    if count:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert max(point[1] for point in kept) == max(point[1] for point in points)
    if count <= MAX_POINTS:
        assert kept == points


def test_values_that_json_lacks_become_text() -> None:
    loading = {"rate": float("nan"), "folder": Path("a"), "order": ("x", 1), "nested": {"host": None}}
    assert data_of(page(a_plan(loading={}), None))["loading"] == {}
    assert json.loads(embed(loading)) == {
        "rate": "nan",
        "folder": "a",
        "order": ["x", 1],
        "nested": {"host": None},
    }


def hostile_plan() -> Plan:
    plan = a_plan()
    bad = replace(plan.weights[0], fqn=HOSTILE, aliases=(HOSTILE,), reason=HOSTILE, form=HOSTILE)
    return replace(
        plan,
        weights=(bad, *plan.weights[1:]),
        checkpoint=HOSTILE,
        capture=HOSTILE + "\ud800",
        notes=(HOSTILE,),
        unmatched=(HOSTILE,),
        extra=(HOSTILE,),
        loading={HOSTILE: HOSTILE},
        kernels={HOSTILE: {"op": HOSTILE, "reason": HOSTILE}},
        predicted_peak={HOSTILE: 3},
        timeline=(Moment(read_bytes=1, memory={HOSTILE: 3}),),
    )


def test_hostile_names_stay_inside_of_the_data() -> None:
    clean, text = page(a_plan()), page(hostile_plan())
    assert text.isascii()
    for mark in ("<script", "</script", "<img", "<style"):
        assert text.count(mark) == clean.count(mark), mark
    data = data_of(text)
    assert data["weights"][0][0] == HOSTILE
    assert data["loading"] == {HOSTILE: HOSTILE}


def test_the_page_needs_no_network() -> None:
    text = page(a_plan())
    assert set(re.findall(r"[a-z]+://[^\s\"'<>]*", text)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"\b(?:src|href)=\"([^\"]*)\"", text) == ["data:,"]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|\.innerHTML|insertAdjacent", text)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]


def test_the_parts_are_small_ascii_files() -> None:
    for name in (*SCRIPTS, "page.css", "page.html"):
        text = resources.files("fxquant.views").joinpath(name).read_text(encoding="ascii")
        assert len(text.splitlines()) <= 400, name
        if name in SCRIPTS:
            assert "</" not in text
            assert "<!--" not in text


def test_the_file_is_replaced_only_when_it_is_complete(tmp_path: Path) -> None:
    plan = a_plan()
    target = tmp_path / "plan.html"
    assert write_page(str(target), plan) == target
    assert target.read_text(encoding="utf-8") == page(plan)
    assert write_page(target, replace(plan, notes=("second",))) == target
    assert "second" in target.read_text(encoding="utf-8")
    with pytest.raises(FileNotFoundError):
        write_page(tmp_path / "missing" / "plan.html", plan)
    with pytest.raises(OSError, match="irectory"):
        write_page(tmp_path, plan)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]


# ----------------------------------------------------------------------------------- in a browser

Dump = Callable[..., str]


@pytest.fixture
def dump(tmp_path: Path) -> Dump:
    """Give a function from a page's text, and the fragment of its URL, to the DOM it becomes."""

    def run(text: str, fragment: str = "") -> str:
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        for attempt in range(2):  # a browser that starts on a busy machine may miss its own deadlines
            profile = tmp_path / f"profile{attempt}"
            command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", f"{file.as_uri()}{fragment}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            shutil.rmtree(profile, ignore_errors=True)
            if "<main" in done.stdout:
                return done.stdout.split('<script type="application/json"')[0]
        raise AssertionError(f"the browser gave no page: {done.stderr[-2000:]}")

    return run


def acting(text: str, script: str) -> str:
    """Add a script of the test to the page, without the policy that would forbid it."""
    free = re.sub(r"<meta http-equiv=[^>]*>", "", text)
    return free.replace("</body>", f"<script>{{{script}}}</script></body>")


def names_of(dom: str) -> list[str]:
    cells = re.findall(r'<th scope="row" class="name">(.*?)</th>', dom, re.DOTALL)
    return [html.unescape(re.sub(r"<wbr>", "", cell).split("<span")[0]) for cell in cells]


def assert_drawn(dom: str) -> None:
    assert "data-error" not in dom
    assert 'data-ready="true"' in dom


@needs_browser
def test_a_browser_draws_the_report(dump: Dump) -> None:
    report = a_report()
    dom = dump(page(report.plan, report))
    assert_drawn(dom)
    assert names_of(dom) == [weight.fqn for weight in report.plan.weights]
    for line in ("predicted", "measured", "anonymous"):
        assert re.search(rf'<path class="line {line}" d="M\d', dom), line
    assert dom.count('class="line resident"') == dom.count('class="line budget"') == 2  # legend and chart
    assert "NaN" not in dom
    assert "undefined" not in dom
    assert dom.count('class="bar quantized"') + dom.count('class="bar float"') == 12
    assert re.search(r"<dt>host budget</dt><dd>30\.0 MiB \(31,457,280 bytes\)</dd>", dom)
    assert ">25.0 MiB<" in dom


@needs_browser
def test_a_fragment_sets_search_order_filter_and_theme(dump: Dump) -> None:
    plan = a_plan()
    dom = dump(page(plan), "#q=WEIGHT&sort=resident&dir=desc&only=quantized&theme=dark")
    assert_drawn(dom)
    wanted = [w for w in plan.weights if w.quantized and "weight" in w.fqn]
    wanted.sort(key=lambda weight: -weight.resident_bytes)
    assert names_of(dom) == [weight.fqn for weight in wanted]
    assert 'data-theme="dark"' in dom
    assert re.search(r'data-key="resident" aria-sort="descending"', dom)
    assert dom.count('aria-sort="none"') == 11
    assert f">{len(wanted)} of {len(plan.weights)}</output>" in dom


@needs_browser
def test_a_reader_can_search_sort_and_ask_for_values(dump: Dump) -> None:
    plan = a_plan(timeline=staircase(20))
    script = """
      const seen = [];
      const log = (text) => seen.push(text);
      const click = (key) => document.querySelector(`th[data-key="${key}"] button`).click();
      const first = () => document.querySelector("tbody th.name").textContent;
      const search = document.getElementById("search");
      for (let turn = 0; turn < 3; turn += 1) { click("float"); log(`${first()} ${location.hash}`); }
      document.querySelector('.chip[data-kind="float"]').click();
      log(document.querySelector("output").textContent);
      search.value = "bias"; search.dispatchEvent(new Event("input"));
      log(document.querySelector("output").textContent);
      search.value = "no such"; search.dispatchEvent(new Event("input"));
      log(document.querySelector(".layers tbody").textContent);
      const plot = document.querySelector(".plot");
      plot.dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
      log(document.querySelector(".tip").textContent);
      plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
      log(document.querySelector(".tip").textContent);
      const before = document.documentElement.dataset.theme;
      document.querySelector(".theme").click();
      log(`${before} ${document.documentElement.dataset.theme}`);
      const wide = document.documentElement;
      log(`${wide.scrollWidth <= wide.clientWidth}`);
      const main = document.getElementById("page");
      main.dataset.seen = JSON.stringify(seen);
    """
    dom = dump(acting(page(plan), script))
    assert_drawn(dom)
    found = re.search(r'data-seen="([^"]*)"', dom)
    assert found is not None
    seen = json.loads(html.unescape(found[1]))
    by_size = sorted(plan.weights, key=lambda weight: weight.float_bytes)
    largest = max(weight.float_bytes for weight in plan.weights)
    first_largest = next(weight.fqn for weight in plan.weights if weight.float_bytes == largest)
    assert seen[:3] == [
        f"{first_largest} #sort=float&dir=desc",
        f"{by_size[0].fqn} #sort=float&dir=asc",
        f"{plan.weights[0].fqn} ",
    ]
    floats = [weight for weight in plan.weights if not weight.quantized]
    assert seen[3] == f"{len(floats)} of {len(plan.weights)}"
    assert seen[4] == f"{sum('bias' in w.fqn for w in floats)} of {len(plan.weights)}"
    assert seen[5] == "No weight matches."
    assert "38.0 MiB" in seen[6]
    assert "22,020,096 bytes" in seen[6]  # 21 MiB: the higher of two moments at one place
    assert "2,097,152 bytes" in seen[7]
    assert sorted(seen[8].split()) == ["dark", "light"]
    assert seen[9] == "true"


@needs_browser
def test_hostile_names_are_shown_as_text(dump: Dump) -> None:
    dom = dump(page(hostile_plan()))
    assert_drawn(dom)
    assert "<img" not in dom
    assert "\u202e" not in dom
    assert names_of(dom)[0] == HOSTILE.replace("\u2028", r"\u2028").replace("\u202e", r"\u202e")


@needs_browser
def test_the_policy_forbids_other_scripts(dump: Dump) -> None:
    evil = "<script>document.documentElement.dataset.evil = '1'</script></body>"
    dom = dump(page(a_plan()).replace("</body>", evil))
    assert_drawn(dom)
    assert "data-evil" not in dom


@needs_browser
@pytest.mark.parametrize("moments", [0, 1, 5000])
def test_any_number_of_moments_and_weights(dump: Dump, moments: int) -> None:
    plan = a_plan(timeline=staircase(moments)[:moments])
    if moments == 0:
        plan = replace(plan, weights=(), predicted_peak={}, kernels={}, rewrites={})
    if moments == 5000:
        many = tuple(replace(plan.weights[0], fqn=f"layers.{index}.weight") for index in range(moments))
        plan = replace(plan, weights=many)
    dom = dump(page(plan))
    assert_drawn(dom)
    assert "NaN" not in dom
    assert len(names_of(dom)) == {0: 0, 1: len(plan.weights), 5000: 300}[moments]
    assert dom.count('class="plot"') == (moments > 0)
    assert dom.count('<path class="line predicted"') == (moments > 1)
