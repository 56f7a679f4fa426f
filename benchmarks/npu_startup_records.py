"""What `benchmarks.npu_startup` runs, what was measured, and the bars: data for parent and child."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.npu_startup_model import FULL_SIZE, Size

MIB = 1 << 20
BAR_MIB = 64.0
"""What may be held while loading beside what is held after it."""
PREDICTED = 0.03
OUTPUT_ERROR = 0.01
"""The largest relative difference of a block's output from its reference: bf16 keeps 8 bits."""

BLOCKS, SMALL_BLOCKS, SMALL_K = 50, 8, 672
CAPACITY, SMALL_CAPACITY = 4096, 656
"""MiB of the simulated device. Eight blocks get their share of what fifty have."""

FXQUANT: Mapping[str, Mapping[str, Any]] = {
    "auto": {"wide": "auto"},
    "split": {"wide": "split"},
    "transpose": {"wide": "transpose"},
    "host": {"wide": "host"},
    "nz": {"wide": "split", "weight_format": "nz"},
}
"""Variant -> options of `fxquant.compile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run in a fresh process: a model, how it is loaded, the device, and whether it runs then."""

    variant: str
    blocks: int
    k: int
    memory: int
    cann: str = "9.0.0"
    expandable: bool = False
    workers: int = 2
    soc: str = "Ascend910B2"
    forward: bool = True

    @property
    def size(self) -> Size:
        """The model."""
        return Size(blocks=self.blocks, k=self.k)

    @property
    def name(self) -> str:
        """As messages and tests call it."""
        version = "" if self.cann == "9.0.0" else f" CANN {self.cann}"
        allocator = " expandable" if self.expandable else ""
        return f"{self.size.name} {self.variant}{version}{allocator}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one run measured, in MiB and seconds.

    `reason`: why nothing was loaded; `oom`: that it was the device's memory. `failed`: why no forward ran.
    `max_allocated` and `max_reserved` are of the load, `after` is allocated after it, `constants` the
    sum of nbytes of the tensors that the model then has on the device, `predicted` the plan's peak,
    `running` the most that is allocated in a forward.
    `errors` are relative differences of outputs of blocks from their references on the CPU.
    """

    case: Case
    max_allocated: float = 0.0
    max_reserved: float = 0.0
    after: float = 0.0
    constants: float = 0.0
    predicted: float | None = None
    seconds: float = 0.0
    running: float = 0.0
    forward_s: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)
    form: str = ""
    reason: str = ""
    failed: str = ""
    oom: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Record:
        """The record that `to_dict` made this of."""
        return Record(**{**values, "case": Case(**values["case"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One bar: `passed`, and a text with the numbers."""

    passed: bool
    text: str


def at_most(what: str, value: float, bar: float, unit: str = " MiB") -> Check:
    """Passed if `value <= bar`."""
    return Check(passed=value <= bar, text=f"{what} {value:.4g}{unit} (bar {bar:.4g}{unit})")


def judge(record: Record) -> list[Check]:
    """The bars of a run."""
    variant = record.case.variant
    if variant == "naive":
        return [Check(passed=record.oom, text="ends in OutOfMemoryError")]
    if variant not in FXQUANT:  # what people write: shown, and right if it gets that far
        return [] if record.reason else list(_outputs(record))
    if record.reason:
        return [Check(passed=False, text=record.reason)]
    return [*_memory(record), *_outputs(record)]


def _memory(record: Record) -> Iterator[Check]:
    bar = BAR_MIB
    if record.case.variant == "nz":  # while it is cast, a part lies there twice
        bar += record.case.size.largest_part / MIB
    if record.case.expandable:
        yield at_most("max allocated - constants", record.max_allocated - record.constants, bar)
        yield at_most("max reserved - constants", record.max_reserved - record.constants, bar)
    else:
        yield at_most("max allocated - after", record.max_allocated - record.after, bar)
    if record.predicted is not None:
        off = abs(record.predicted - record.max_allocated) / record.max_allocated
        yield at_most("prediction off by", 100 * off, 100 * PREDICTED, " %")


def _outputs(record: Record) -> Iterator[Check]:
    if record.failed:
        yield Check(passed=False, text=record.failed)
    for name, error in record.errors.items():
        yield at_most(f"{name}: relative error", error, OUTPUT_ERROR, "")


def cases(*, small: bool, blocks: int | None = None, workers: int = 2) -> list[Case]:
    """What is run: the many blocks, then the full-size one."""
    many = blocks or (SMALL_BLOCKS if small else BLOCKS)
    capacity = SMALL_CAPACITY if small else CAPACITY

    def case(variant: str, cann: str = "9.0.0", *, expandable: bool = False, full: bool = False) -> Case:
        return Case(
            variant=variant,
            blocks=FULL_SIZE.blocks if full else many,
            k=FULL_SIZE.k if full else SMALL_K,
            memory=CAPACITY if full else capacity,
            cann=cann,
            expandable=expandable,
            workers=workers,
            forward=full
            or not small
            or (variant in ("split", "host") and not expandable),  # tracing takes most of a small run
        )

    found = [case("naive")]
    found += [case("per layer"), case("per layer", expandable=True)] if not small else []
    for variant in ("split", "transpose"):
        found += [case(variant), case(variant, expandable=True)]
    found += [case("host"), case("nz"), case("nz", expandable=True)]
    if small:
        whole = [case("split", full=True), case("transpose", expandable=True, full=True)]
        return [*found, *whole, case("auto", "9.1.0", full=True)]
    found += [case("auto", "9.1.0")]
    for variant in ("split", "transpose"):
        found += [case(variant, full=True), case(variant, expandable=True, full=True)]
    return [
        *found, case("per layer", full=True), case("host", full=True), case("nz", full=True),
        case("auto", "9.1.0", full=True),
    ]  # fmt: skip
