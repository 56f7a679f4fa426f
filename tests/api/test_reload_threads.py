"""Reloads beside forwards, other reloads and other models: never a mixture, a deadlock or a leak."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import _symbolic_trace

import fxquant
from fxquant.errors import QuantizedWeightError
from fxquant.materialize.meter import anonymous_bytes
from tests.api.lives import compiled, run, same, values, write
from tests.materialize.faulty_files import descriptors, live_tensors

SECONDS = 60
"""A test that takes longer hangs."""


class Thread(threading.Thread):
    """A thread whose error shows when it is joined, and that does not keep the process alive."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.work, self.error, self.result = work, None, None  # type: ignore[var-annotated]
        self.start()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001 - raised by ``done``
            self.error = error

    def done(self) -> Any:
        self.join(SECONDS)
        assert not self.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error
        return self.result


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Torch's marks of a trace are global; one that stays breaks every compiled model."""
    threads = torch.get_num_threads()
    yield
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.get_num_threads() == threads
    assert not _symbolic_trace._is_fx_tracing_flag
    assert not torch.compiler.is_compiling()


class Forwards(Thread):
    """Runs a model until ``stop`` is set; every result must be one of ``expected``. Made once it runs."""

    def __init__(self, model: nn.Module, expected: list[torch.Tensor], stop: threading.Event) -> None:
        # A thread that first meets torch while weights are loaded takes over the loader's thread count,
        # and a compiled graph is made anew for each count.
        first = threading.Event()

        def work() -> int:
            count = 0
            while not stop.is_set():
                result = run(model)
                assert any(torch.equal(result, other) for other in expected), "a mixture"
                count += 1
                first.set()
            return count

        super().__init__(work)
        assert first.wait(SECONDS)


def test_forwards_see_old_or_new_weights_and_nothing_between() -> None:
    models = [compiled(values(seed)) for seed in (0, 1)]
    expected = [run(model) for model in models]
    model, other = models
    stop = threading.Event()
    threads = [Forwards(model, expected, stop) for _ in range(2)]
    threads.append(Forwards(other, expected[1:], stop))
    for number in range(40):
        fxquant.reload(model, values((number + 1) % 2), load_workers=1 + number % 3)
    stop.set()
    assert all(thread.done() > 0 for thread in threads)
    assert torch.equal(run(model), expected[0])
    assert fxquant.report(model).recompiles == fxquant.report(other).eager_linears == 0


def test_forwards_that_overlap_do_not_keep_a_reload_out() -> None:
    model = compiled(values())
    model.first.register_forward_hook(torch.compiler.disable(lambda *args: time.sleep(0.02)))
    expected = [run(model), run(compiled(values(1)))]
    stop = threading.Event()
    threads = []
    for _ in range(3):
        threads.append(Forwards(model, expected, stop))
        time.sleep(0.007)
    Thread(lambda: [fxquant.reload(model, values(seed)) for seed in (1, 0, 1)]).done()
    stop.set()
    assert all(thread.done() > 0 for thread in threads)


def test_reloads_one_after_the_other_let_forwards_in() -> None:
    model = compiled(values())
    run(model)
    stop = threading.Event()

    def reloads() -> None:
        while not stop.is_set():
            fxquant.reload(model, values())

    threads = [Thread(reloads) for _ in range(2)]
    forward = Thread(lambda: [run(model) for _ in range(5)])
    forward.done()
    stop.set()
    for thread in threads:
        thread.done()


def test_reloads_at_once_serialize() -> None:
    one, two = compiled(values()), compiled(values())

    def reloads(model: nn.Module, seed: int) -> None:
        for _ in range(10):
            fxquant.reload(model, values(seed), load_workers=2)

    threads = [Thread(lambda m=m, s=s: reloads(m, s)) for m in (one, two) for s in (1, 2)]
    for thread in threads:
        thread.done()
    for model in (one, two):
        assert any(same(model, compiled(values(seed))) for seed in (1, 2))
        run(model)


@pytest.mark.parametrize("place", ["root", "child"])
def test_inside_of_a_forward(place: str) -> None:
    model = compiled(values())
    before = run(model)
    owner = model if place == "root" else model.last
    new = values(1)
    handle = owner.register_forward_hook(lambda *args: fxquant.reload(model, new))
    with pytest.raises(QuantizedWeightError, match="inside of a forward of the same model"):
        Thread(lambda: run(model)).done()
    handle.remove()
    assert torch.equal(run(model), before)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("what", ["forward", "reload", "save"])
def test_inside_of_a_reload(what: str, workers: int) -> None:
    """A progress callback, on whichever thread it runs, must not wait for its own reload."""
    model = compiled(values())
    calls = {
        "forward": lambda: run(model),
        "reload": lambda: fxquant.reload(model, values(1)),
        "save": lambda: fxquant.save_checkpoint(model, Path(tempfile.gettempdir()) / "never"),
    }
    source = values(1)
    load = Thread(
        lambda: fxquant.reload(model, source, load_workers=workers, progress=lambda step: calls[what]())
    )
    with pytest.raises(QuantizedWeightError, match="inside of a reload"):
        load.done()
    fxquant.reload(model, source)
    assert same(model, compiled(values(1)))


def test_other_models_run_inside_of_a_reload() -> None:
    model, other = compiled(values()), compiled(values(2))
    expected, seen = run(other), []
    Thread(
        lambda: fxquant.reload(model, values(1), load_workers=2, progress=lambda s: seen.append(run(other)))
    ).done()
    assert seen
    assert all(torch.equal(each, expected) for each in seen)


def test_saved_while_another_thread_runs_and_reloads(tmp_path: Path) -> None:
    model = compiled(values())
    expected = [run(model), run(compiled(values(1)))]
    stop = threading.Event()

    def reloads() -> None:
        while not stop.is_set():
            for seed in (1, 0):
                fxquant.reload(model, values(seed))

    threads = [Forwards(model, expected, stop), Thread(reloads)]
    for number in range(8):
        fxquant.save_checkpoint(model, tmp_path / str(number))
    stop.set()
    for thread in threads:
        thread.done()
    fresh = [compiled(values(seed)) for seed in (0, 1)]
    for number in range(8):
        saved = compiled(tmp_path / str(number), scheme=None, config=None)
        assert any(same(saved, each) for each in fresh)


def test_fifty_reloads_leave_nothing(tmp_path: Path) -> None:
    sources = [write(tmp_path / str(seed), seed) for seed in (0, 1)]
    model = compiled(sources[0])
    run(model)

    def reloads(count: int) -> None:
        for number in range(count):
            fxquant.reload(model, sources[number % 2], load_workers=2)
            run(model)

    def state() -> tuple[int, int, int, dict[str, int]]:
        gc.collect()
        report = fxquant.report(model)
        return descriptors(), live_tensors(), report.recompiles, dict(report.graphs)

    reloads(6)
    before, base = state(), anonymous_bytes()
    reloads(50)
    assert state() == before
    assert anonymous_bytes() - base < 4 << 20
