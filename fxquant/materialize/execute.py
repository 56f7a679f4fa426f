"""Runs a schedule: workers read, compute and write tile by tile; an error leaves nothing behind."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fxquant.checkpoint import Checkpoint, FileCheckpoint, MappedCheckpoint, StreamCheckpoint
from fxquant.errors import FxquantError
from fxquant.materialize.errors import Errors, WeightError
from fxquant.materialize.heap import Trimmer, give_back, one_arena
from fxquant.materialize.jobs import LOOKAHEAD, Batch, Job, Schedule
from fxquant.materialize.meter import Account, LiveBytes, anonymous_bytes
from fxquant.materialize.predict import thin
from fxquant.materialize.progress import Progress, Report
from fxquant.materialize.recipes import LoadGraph
from fxquant.materialize.sources import (
    Worker,
    check_source,
    copy_direct,
    land,
    read_batch,
    view_job,
)
from fxquant.materialize.store import Constants, Store
from fxquant.materialize.stream import Arrivals
from fxquant.materialize.workers import forget_locals, one_torch_thread
from fxquant.timeline import Moment

log = logging.getLogger("fxquant.materialize")

NOWHERE = torch.empty(0)
READ_AHEAD = 16
"""Batches that the system is asked for ahead of a slow disk."""

SLOW_READ, FAST_RATE = 5e-4, 1.5e9
"""A read that takes longer than this many seconds, and its bytes at this rate, comes from a disk."""

SAMPLE_SECONDS = 0.01
"""The least time between two readings of the process's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The constants of every weight, what loading them took, and the errors of those that were quantized."""

    constants: Constants
    peak: Mapping[str, int]
    seconds: float
    read_bytes: int
    timeline: tuple[Moment, ...] = ()
    errors: Mapping[str, WeightError] = field(default_factory=dict)
    origin: str = "the checkpoint"


def materialize(
    graph: LoadGraph,
    schedule: Schedule,
    checkpoint: Checkpoint,
    *,
    names: Mapping[str, str] | None = None,
    optional: Collection[str] = (),
    budget: int | None = None,
    into: Mapping[str, Sequence[Tensor]] | None = None,
    device: torch.device | None = None,
    report: Report | None = None,
) -> Loaded:
    """Make every constant. On an error nothing is kept, and the text names the weight and its keys.

    ``names``, ``optional`` and ``budget`` are for streams, see ``Arrivals``. ``into``: constants that
    are written over, by FQN. ``device``: where new ones are made.
    """
    log.info(
        "loading %d weights from %s: %d batches, %d workers, predicted peak %s",
        len(graph.recipes),
        checkpoint.location,
        len(schedule.batches),
        schedule.workers,
        schedule.peak,
    )
    place = device or torch.device("cpu")
    errors = Errors(graph, schedule, place)
    load = Load(schedule, checkpoint, Store(graph, Account(), place, into or {}), errors, report)
    with load.running():
        if isinstance(checkpoint, StreamCheckpoint):
            arrivals = Arrivals(
                graph, schedule, load.store, names=names or {}, optional=optional, budget=budget
            )
            load.run_stream(arrivals, checkpoint)
        else:
            load.run_all(graph)
        loaded = load.result()
    log.info("loaded %d bytes in %.2f s, peak %s", loaded.read_bytes, loaded.seconds, loaded.peak)
    return loaded


class Load:
    """One load in progress."""

    def __init__(
        self,
        schedule: Schedule,
        checkpoint: Checkpoint,
        store: Store,
        errors: Errors,
        report: Report | None = None,
    ) -> None:
        self.schedule = schedule
        self.checkpoint = checkpoint
        self.report = report
        self.store = store
        self.account = store.account
        self.errors = errors
        self.account.add(store.device.type, errors.nbytes)  # to the end
        self.error: BaseException | None = None
        self.started = time.perf_counter()
        self.base = anonymous_bytes()
        self.moments: list[Moment] = []
        self.sampled = 0.0
        self.trimmer = Trimmer()
        self.done_bytes = 0
        self.total_bytes = sum(batch.read_bytes for batch in self.schedule.batches)
        self.changed = threading.Condition(threading.Lock())
        self.next = self.asked = 0
        self.finished = [False] * len(self.schedule.batches)
        self.oldest = 0
        self.left: dict[str, int] = {}
        for batch in self.schedule.batches:
            for job in batch.jobs:
                key = _counter(job)
                self.left[key] = self.left.get(key, 0) + 1

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Set up torch and the heap for the work; on an error nothing is kept."""
        give_back()
        try:
            # Constants made in inference mode could not be written over outside of it.
            with one_torch_thread(), one_arena(), torch.inference_mode(False), torch.no_grad():
                yield
        except BaseException as error:
            self.store.clear()
            self.errors.clear()
            forget_locals(error)
            give_back()
            raise
        give_back()

    def run_all(self, graph: LoadGraph) -> None:
        """Do all batches of a source that can be looked into, which must be as planned and stay so."""
        check_source(graph, self.checkpoint)
        self.run()
        if isinstance(self.checkpoint, FileCheckpoint):
            self.checkpoint.check_unchanged()

    def result(self) -> Loaded:
        """What was made."""
        self._sample(time.perf_counter() - self.started, force=True)
        return Loaded(
            constants=self.store.constants,
            peak=dict(self.account.peak),
            seconds=time.perf_counter() - self.started,
            read_bytes=self.done_bytes,
            timeline=thin(self.moments),
            errors=self.errors.results(self.store.beside_codes),
        )

    def run(self) -> None:
        """Work through all batches; this thread is one of the workers."""
        threads = [
            # With the context of the caller: callbacks of a reload must know that they are in it.
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._work,), name=f"fxquant-load-{i}"
            )
            for i in range(1, self.schedule.workers)
        ]
        try:
            for thread in threads:
                thread.start()
            self._work()
        except BaseException as error:  # noqa: BLE001 - Ctrl-C between two batches; raised below
            self._fail(error)
        self._join([thread for thread in threads if thread.ident is not None])
        if self.error is not None:
            raise self.error

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the workers, whatever interrupts."""
        while any(thread.is_alive() for thread in threads):
            with self._keeping_errors():
                for thread in threads:
                    thread.join()

    @contextlib.contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - kept, and raised by run
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def _work(self) -> None:
        """Take batches until there are none, or one has failed."""
        torch.set_num_threads(1)
        worker = Worker(schedule=self.schedule, account=self.account, device=self.store.device)
        try:
            with torch.no_grad():
                worker.begin()
                while (index := self._claim()) is not None:
                    self._do(index, worker)
                    self._mark(index)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            self._fail(error)
            forget_locals(error)
        finally:
            worker.end()

    def _claim(self) -> int | None:
        """The next batch, once what must be done before it is; its constants are allocated in order."""
        with self.changed:
            index = self.next
            if self.error is not None or index >= len(self.schedule.batches):
                return None
            self.next += 1
            batch = self.schedule.batches[index]
            for job in batch.jobs:
                self.store.allocate(job.recipe)
            while self.error is None and not self._may_begin(index, batch):
                self.changed.wait()
            return None if self.error is not None else index

    def _may_begin(self, index: int, batch: Batch) -> bool:
        if index - self.oldest > self.schedule.workers * LOOKAHEAD:
            return False
        return not any(job.tile.phase and self.left[_first_pass(job)] for job in batch.jobs)

    def _read_ahead(self, index: int, checkpoint: FileCheckpoint) -> None:
        """Ask for the batches behind ``index``: the disk is to be busy while the workers compute."""
        with self.changed:
            first, self.asked = max(index + 1, self.asked), max(index + 1 + READ_AHEAD, self.asked)
            last = self.asked
        for batch in self.schedule.batches[first:last]:
            for job in batch.jobs:
                for part in job.tile.reads:
                    if part.nbytes and not part.held:
                        checkpoint.will_need(job.key(part), job.start(part), part.nbytes)

    def _do(self, index: int, worker: Worker) -> None:
        batch = self.schedule.batches[index]
        own = worker.make_buffer(batch.buffer_bytes) if batch.own else None
        if isinstance(self.checkpoint, FileCheckpoint) and not isinstance(self.checkpoint, MappedCheckpoint):
            started = time.perf_counter()
            tensors = read_batch(batch, self.checkpoint, self.store, own or worker.buffer)
            if time.perf_counter() - started > SLOW_READ + batch.read_bytes / FAST_RATE:
                self._read_ahead(index, self.checkpoint)
            for job, reads in zip(batch.jobs, tensors, strict=True):
                if job.tile.direct is None:
                    self._compute(job, reads, worker.scratch, worker.landing)
                elif reads:
                    self.store.place(job, reads[0])
                reads.clear()
            del tensors
        else:
            for job in batch.jobs:
                self._from_memory(job, worker.scratch)
        if isinstance(self.checkpoint, MappedCheckpoint):
            self.checkpoint.forget(
                [
                    (job.key(part), job.start(part), job.start(part) + part.nbytes)
                    for job in batch.jobs
                    for part in job.tile.reads
                ]
            )
        if own is not None:
            own.close()

    def _from_memory(self, job: Job, scratch: Tensor) -> None:
        """Do a job whose tensors are in memory."""
        keys = {job.key(part) for part in job.tile.reads}
        tensors = {key: self.checkpoint.read(key) for key in keys}
        if job.tile.direct is not None:
            copy_direct(job, tensors[job.key(job.tile.reads[0])], self.store)
        else:
            self._compute(job, view_job(job, tensors), scratch)

    def _compute(self, job: Job, reads: list[Tensor], scratch: Tensor, landing: Tensor = NOWHERE) -> None:
        """Run a job's program into the constants."""
        program = job.tile.program
        moved = 0
        device = self.store.device_of(job.recipe)
        if device.type != "cpu":
            reads, moved = land(reads, device, landing)
            self.account.add(device.type, moved)
        parts, maxima = self.store.parts(job), self.store.maxima(job)
        # Programs without calls make no tensors of note, and a dispatch mode costs time.
        metered = LiveBytes(self.account) if job.tile.transient else contextlib.nullcontext()
        try:
            with metered:
                program.run(reads, parts, scratch, maxima, partial(self.errors.compare, job))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            keys = ", ".join(job.recipe.keys)
            raise FxquantError(f"while making {job.recipe.label} from {keys}: {error}") from error
        finally:
            self.account.add(device.type, -moved)

    def _mark(self, index: int) -> None:
        """Note that a batch is done, and tell."""
        batch = self.schedule.batches[index]
        if log.isEnabledFor(logging.DEBUG):
            names = ", ".join(dict.fromkeys(job.recipe.fqn for job in batch.jobs))
            log.debug("batch %d: %d bytes of %s", index, batch.read_bytes, names)
        with self.changed:
            self.finished[index] = True
            while self.oldest < len(self.finished) and self.finished[self.oldest]:
                self.oldest += 1
            for job in batch.jobs:
                self.left[_counter(job)] -= 1
                if not self.left[_counter(job)] and not self.left.get(job.recipe.label, 0):
                    self.store.done(job.recipe)
            self.done_bytes += batch.read_bytes
            self.tell(batch.jobs[-1].recipe.fqn)
            self.changed.notify_all()

    def tell(self, fqn: str) -> None:
        """Take a sample of the memory if one is due, and report progress."""
        seconds = time.perf_counter() - self.started
        self._sample(seconds)
        if self.report is not None:
            self.report(
                Progress(
                    tensor=fqn,
                    done_bytes=self.done_bytes,
                    total_bytes=max(self.total_bytes, self.done_bytes),
                    seconds=seconds,
                    memory_now=sum(self.account.now.values()),
                    memory_peak=sum(self.account.peak.values()),
                )
            )

    def _sample(self, seconds: float, *, force: bool = False) -> None:
        if not force and seconds - self.sampled < SAMPLE_SECONDS:
            return
        self.sampled = seconds
        now = self.account.recent_process()
        anonymous = None if now is None or self.base is None else now - self.base
        self.moments.append(
            Moment(
                read_bytes=self.done_bytes,
                memory=self.account.recent(),
                seconds=seconds,
                anonymous=anonymous,
            )
        )
        present = anonymous_bytes()  # a peak of before says nothing about what is kept now
        if present is not None and self.base is not None:
            self.trimmer.look(present - self.base, self.account.now.get("cpu", 0), seconds)

    def run_stream(self, arrivals: Arrivals, checkpoint: StreamCheckpoint) -> None:
        """Do each job as soon as what it reads has come."""
        size = self.schedule.scratch_bytes // 4
        scratch = torch.empty(size, dtype=torch.float32, device=self.store.device)
        self.account.add(scratch.device.type, scratch.nbytes)
        for item in checkpoint:
            arrivals.take(item)
            for job, reads in arrivals.ready():
                self._compute(job, reads, scratch)
            arrivals.drop()
            self.done_bytes = arrivals.done_bytes
            self.tell(arrivals.last)
        self.account.add(scratch.device.type, -scratch.nbytes)
        arrivals.finish()
        for fqn in arrivals.missing():
            self.store.constants.pop(fqn, None)


def _counter(job: Job) -> str:
    return _first_pass(job) if not job.tile.phase and job.tile.program.scans else job.recipe.label


def _first_pass(job: Job) -> str:
    return f"{job.recipe.label} (first pass)"
