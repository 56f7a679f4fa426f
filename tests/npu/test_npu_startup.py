"""The start-up peak: 8 blocks and the full-size one of `benchmarks.npu_startup`, a process for each run.

The bars are the benchmark's: 64 MiB beside what stays, a prediction within 3 %, right outputs.
"""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest
import torch

from benchmarks import npu_startup
from benchmarks.loading.models import default_folder
from benchmarks.npu_startup_model import Size, checkpoint, entries, is_complete, read, shapes
from benchmarks.npu_startup_records import FXQUANT, MIB, Case, Record, at_most, cases, judge
from fxquant.materialize.blocks import Blocks

SMALL = cases(small=True)
TINY = Size(blocks=1, k=8)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_start_up_peak(case: Case) -> None:
    record = npu_startup.measure(case, default_folder())
    print(npu_startup.render_table([record]))
    assert [check.text for check in judge(record) if not check.passed] == []
    if case.variant in {"auto", "split", "transpose"}:
        assert bool(record.errors) == case.forward
        assert record.after >= record.constants
    if case.variant == "naive":
        assert record.max_allocated > 0.75 * case.memory
    if case.variant == "split":
        assert "/n:48384,48384" in record.form
    if case.variant in {"auto", "transpose"}:
        assert record.form == {"auto": "int8.kn", "transpose": "int8"}[case.variant]


def test_blocks_are_those_of_the_allocator(npu, npu_capacity):
    npu_capacity(2048)
    gc.collect()  # what other tests left
    random.seed(0)
    exact = [1, 480, 481, 512, 1024, MIB - 32, MIB - 31, MIB, 2 * MIB, 10 * MIB - 32, 10 * MIB, 32 * MIB - 32]
    sizes = [
        *exact,
        *(int(2 ** random.uniform(0, 25)) for _ in range(150)),
        32_514_048,
        32_514_048,
        65_028_096,
    ]
    blocks, kept, before = Blocks("npu"), [], torch.npu.memory_allocated()
    for size in sizes:
        blocks.take(size)
        kept.append(torch.empty(size, dtype=torch.uint8, device=npu))
        assert torch.npu.memory_allocated() - before == blocks.allocated, size


def test_expandable_segments_only_round(monkeypatch):
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    assert [Blocks("npu").take(size) for size in (0, 1, 480, 481, 32_514_244)] == [
        0,
        512,
        512,
        1024,
        32_514_560,
    ]
    assert [Blocks("cuda").take(size) for size in (1, 512, 11 * MIB)] == [512, 512, 12 * MIB]


def test_checkpoint_is_written_once_and_whole(tmp_path):
    said: list[str] = []
    folder = checkpoint(TINY, tmp_path, said.append)
    assert checkpoint(TINY, tmp_path, said.append) == folder
    assert said == ["writing npu_startup_1x8 (once)"]
    found = entries(folder)
    assert {key: entry.shape for key, entry in found.items()} == shapes(TINY)
    assert read(found["blocks.0.adaln.weight"]).float().std() == pytest.approx((1 / 8) ** 0.5, rel=0.02)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert not is_complete(folder, TINY)
    checkpoint(TINY, tmp_path, said.append)
    assert is_complete(folder, TINY)


GOOD = Record(
    case=SMALL[0], max_allocated=560, max_reserved=590, after=550, constants=546, predicted=559,
    errors={"block 0": 0.0},
)  # fmt: skip


def failures(variant: str, *, expandable: bool = False, **values: object) -> list[str]:
    case = replace(SMALL[0], variant=variant, expandable=expandable)
    checks = judge(replace(GOOD, case=case, **values))
    return [check.text.split(" (")[0] for check in checks if not check.passed]


def test_verdicts():
    assert failures("split") == failures("split", expandable=True) == []
    assert failures("split", after=490) == ["max allocated - after 70 MiB"]
    assert failures("split", expandable=True, max_reserved=620) == ["max reserved - constants 74 MiB"]
    assert failures("split", predicted=500) == ["prediction off by 10.71 %"]
    assert failures("split", errors={"block 0": 0.5}) == ["block 0: relative error 0.5"]
    assert failures("split", reason="OutOfMemoryError") == ["OutOfMemoryError"]
    assert failures("host", failed="the forward failed", errors={}) == ["the forward failed"]
    assert failures("nz", reason="refused") == ["refused"]
    assert failures("naive", oom=True) == []
    assert failures("naive") == ["ends in OutOfMemoryError"]
    assert at_most("x", 64, 64).passed


def test_every_variant_is_run():
    assert {case.variant for case in cases(small=False)} == {"naive", "per layer", *FXQUANT}
    assert {case.expandable for case in SMALL if case.variant == "split"} == {False, True}
    assert Record.of(GOOD.to_dict()) == GOOD


def test_json_and_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(npu_startup, "measure", lambda case, root: replace(GOOD, case=case, oom=True))
    out = tmp_path / "out.jsonl"
    assert npu_startup.main(["--small", "--json", str(out)]) == 0
    assert len(out.read_text().splitlines()) == len(SMALL)
    assert "| 8x672 | split | 9.0 | expandable | 560 | 590 | 550 | 546 | 559 |" in capsys.readouterr().out
    assert npu_startup.main(["--small", "--variants", "naive,split"]) == 0
    assert "transpose" not in capsys.readouterr().out
