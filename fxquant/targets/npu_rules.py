"""Whether a chip takes a call of an NPU op: the table applied to shapes, dtypes and layouts.

The same rules serve the planner (``admits``), fakes and the simulator (``refusal_of_call``), so a
plan that breaks one fails in a test as it would on the card. Sizes that are not plain integers are
not known yet and pass.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxquant.target import Refusal
from fxquant.targets.npu_chip import NpuChip
from fxquant.targets.npu_row import Limit, Row, Waiver
from fxquant.targets.npu_table import CODES, DTYPE_ATTRIBUTES, LIMITS, ROWS, SCHEMAS

Size = Any
"""A number, or a symbolic size or None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor as it is passed: logical shape, dtype, and how it lies in memory (see ``npu_row``)."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    layout: str = "nd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The table's "yes": the row that matched, and the waiver of a limit if one was needed."""

    row: Row
    waived: str = ""

    @property
    def source(self) -> str:
        """Where the row, and the waiver if any, are documented."""
        return f"{self.row.source}; {self.waived}" if self.waived else self.row.source

    @property
    def verified(self) -> bool:
        """Whether this was run on hardware."""
        return self.row.verified


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pattern:
    """A parsed text of a row's operand: ``alternatives`` are (leading dims, dims, layouts)."""

    optional: bool
    dtypes: tuple[str, ...]
    alternatives: tuple[tuple[bool, tuple[str, ...], tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Miss:
    """Why a row does not match, and how far it did."""

    depth: tuple[int, int]
    reason: str
    source: str


@dataclass(slots=True, kw_only=True)
class _Match:
    """Sizes of symbols, for each operand the dims that matched, and how many checks passed."""

    sizes: dict[str, Size]
    dims: dict[str, tuple[str, ...]]
    passed: int = 0


@functools.cache
def _pattern(text: str) -> _Pattern:
    optional = text.startswith("?")
    dtypes, _, shapes = text.removeprefix("?").partition(" ")
    alternatives = []
    for part in re.split(r" or (?=\[)", shapes):
        dims, _, layouts = part.removeprefix("[").partition("]")
        names = tuple(dim.strip() for dim in dims.split(","))
        leading = names[0] == "..."
        alternatives.append((leading, names[leading:], tuple(layouts.split()) or ("any",)))
    return _Pattern(optional=optional, dtypes=tuple(dtypes.split("|")), alternatives=tuple(alternatives))


@functools.cache
def _arguments(op: str) -> tuple[tuple[str, str, object], ...]:
    """Name, type and default of each argument of ``npu::op``."""
    schema = torch._C.parse_schema(f"npu::{op}{SCHEMAS[op]}")
    return tuple((a.name, str(a.type), a.default_value) for a in schema.arguments)


def dtype_name(value: object) -> str:
    """``torch.int8``, ``1`` or ``"int8"`` -> ``"int8"``."""
    if isinstance(value, int):
        return CODES.get(value, f"code {value}")
    return str(value).removeprefix("torch.")


def _canonical(name: str, value: object) -> object:
    if name in DTYPE_ATTRIBUTES and value is not None:
        return dtype_name(value)
    return tuple(value) if isinstance(value, list) else value


def admits(
    op: str, operands: Mapping[str, Operand], chip: NpuChip, **attributes: object
) -> Admitted | Refusal:
    """Whether ``chip`` takes ``op`` with these operands and attributes (those not given: defaults)."""
    where = f"{op} on {chip.family} ({chip.soc}, CANN {chip.cann_text})"
    rows = [row for row in ROWS if row.op == op]
    if not rows:
        return Refusal(reason=f"{where}: the table has no such op")
    here = [row for row in rows if chip.family in row.chips]
    if not here:
        chips = ", ".join(dict.fromkeys(name for row in rows for name in row.chips))
        return Refusal(reason=f"{where}: only on {chips} ({rows[0].source})")
    misses = []
    for row in here:
        found = _match(row, operands, attributes)
        if isinstance(found, _Match):
            waived = _check_limits(op, operands, chip, found)
            if isinstance(waived, Refusal):
                return Refusal(reason=f"{where}: {waived.reason}")
            return Admitted(row=row, waived=waived)
        misses.append(found)
    nearest = max(misses, key=lambda miss: miss.depth)
    return Refusal(reason=f"{where}: {nearest.reason} ({nearest.source})")


def _match(row: Row, operands: Mapping[str, Operand], attributes: Mapping[str, object]) -> _Match | _Miss:
    found = _Match(sizes={}, dims={})
    stages: tuple[Callable[[], str], ...] = (
        lambda: _match_attributes(row, attributes, found),
        lambda: _match_presence(row, operands, found),
        lambda: _match_dtypes(row, operands, found),
        lambda: _match_shapes(row, operands, found),
        lambda: _match_where(row, found),
    )
    for depth, stage in enumerate(stages):
        reason = stage()
        if reason:
            return _Miss(depth=(depth, found.passed), reason=reason, source=row.source)
    return found


def _match_attributes(row: Row, attributes: Mapping[str, object], found: _Match) -> str:
    names = {name for name, kind, _ in _arguments(row.op) if "Tensor" not in kind}
    unknown = attributes.keys() - names
    if unknown:
        return f"no attribute {', '.join(sorted(unknown))}"
    for name, kind, default in _arguments(row.op):
        if "Tensor" in kind:
            continue
        value = _canonical(name, attributes.get(name, default))
        allowed = row.attributes.get(name, (_canonical(name, default),))
        if isinstance(allowed, str):
            found.sizes[allowed] = value
        elif value not in allowed:
            return f"{name} is {value}, taken: {', '.join(str(one) for one in allowed)}"
    return ""


def _match_presence(row: Row, operands: Mapping[str, Operand], found: _Match) -> str:
    found.passed += len(operands.keys() & row.operands.keys())
    extra = operands.keys() - row.operands.keys()
    if extra:
        return f"takes no {', '.join(sorted(extra))} here"
    missing = [n for n, text in row.operands.items() if n not in operands and not _pattern(text).optional]
    return f"needs {', '.join(missing)}" if missing else ""


def _match_dtypes(row: Row, operands: Mapping[str, Operand], found: _Match) -> str:
    for name, text in row.operands.items():
        if name not in operands:
            continue
        dtypes = _pattern(text).dtypes
        if dtypes[0].startswith("="):
            dtypes = (dtype_name(operands[dtypes[0][1:]].dtype),)
        if dtype_name(operands[name].dtype) not in dtypes:
            return f"{name} is {dtype_name(operands[name].dtype)}, taken: {', '.join(dtypes)}"
        found.passed += 1
    return ""


def _match_shapes(row: Row, operands: Mapping[str, Operand], found: _Match) -> str:
    for name, text in row.operands.items():
        operand = operands.get(name)
        if operand is None:
            continue
        reason = ""
        for leading, dims, layouts in _pattern(text).alternatives:
            sizes = dict(found.sizes)
            reason = _match_dims(row, name, operand, (leading, dims, layouts), sizes)
            if not reason:
                found.sizes, found.dims[name] = sizes, dims
                found.passed += 1
                break
        if reason:
            return reason
    return ""


def _match_dims(
    row: Row,
    name: str,
    operand: Operand,
    alternative: tuple[bool, tuple[str, ...], tuple[str, ...]],
    sizes: dict[str, Size],
) -> str:
    leading, dims, layouts = alternative
    rank = len(operand.shape)
    if rank != len(dims) and not (leading and len(dims) < rank <= row.max_rank):
        most = f" to {row.max_rank}" if leading else ""
        return f"{name} has rank {rank}, taken: {len(dims)}{most}"
    if "any" not in layouts and operand.layout not in layouts:
        return f"{name} lies as {operand.layout}, taken: {', '.join(layouts)}"
    for axis, (dim, size) in enumerate(zip(dims, operand.shape[rank - len(dims) :], strict=True)):
        if isinstance(size, int) and not any(_fits(option, size, sizes) for option in dim.split("|")):
            known = {s: v for s, v in sizes.items() if re.search(rf"\b{s}\b", dim) and v is not None}
            wanted = ", ".join([dim, *(f"{s} = {v}" for s, v in known.items())])
            return f"axis {axis - len(dims)} of {name} is {size}, taken: {wanted}"
        if not isinstance(size, int) and dim.isalpha():
            sizes.setdefault(dim, None)
    return ""


def _fits(dim: str, size: int, sizes: dict[str, Size]) -> bool:
    """Whether ``size`` is what ``dim`` says; a symbol that is not known yet gets its size from it."""
    if dim.isdigit():
        return size == int(dim)
    ceil = re.fullmatch(r"ceil\((\w+)/(\w+)\)", dim)
    if ceil is not None:
        total, part = sizes.get(ceil[1]), int(ceil[2]) if ceil[2].isdigit() else sizes.get(ceil[2])
        return not isinstance(total, int) or not isinstance(part, int) or size == -(-total // max(part, 1))
    symbol, _, factor = dim.partition("/")
    size *= int(factor or 1)
    if sizes.get(symbol) is None:
        sizes[symbol] = size
    return bool(sizes[symbol] == size)


def _match_where(row: Row, found: _Match) -> str:
    for text in row.where:
        left, operator, right = text.split()
        a, b = (int(side) if side.isdigit() else found.sizes.get(side) for side in (left, right))
        if not isinstance(a, int) or not isinstance(b, int):
            continue
        if operator == "%" and b and a % b:
            return f"{left} = {a} is not a multiple of {b}"
        if (operator == "<=" and a > b) or (operator == "<" and a >= b):
            return f"{text} does not hold: {a} {operator} {b}"
    return ""


def _check_limits(op: str, operands: Mapping[str, Operand], chip: NpuChip, found: _Match) -> str | Refusal:
    """The source of the waiver that was needed, if any, or the refusal."""
    waived = ""
    for limit in LIMITS:
        if limit.op != op or chip.family not in limit.chips:
            continue
        operand = operands.get(limit.operand)
        if limit.operand and (operand is None or (limit.layouts and operand.layout not in limit.layouts)):
            continue
        axis, size = _axis(limit, operands, found)
        if not isinstance(size, int):
            continue
        if size < limit.least:
            return Refusal(reason=f"axis {axis} is {size}, at least {limit.least} ({limit.source})")
        if limit.most is None or size <= limit.most:
            continue
        if limit.waiver is not None and _holds(limit.waiver, operands, chip):
            waived = limit.waiver.source
            continue
        return Refusal(reason=_over(limit, axis, size))
    return waived


def _axis(limit: Limit, operands: Mapping[str, Operand], found: _Match) -> tuple[str, Size]:
    """Name and size of the axis that a limit is about."""
    if limit.axis != "inner":
        return limit.axis, found.sizes.get(limit.axis)
    layout = operands[limit.operand].layout
    dim = found.dims[limit.operand][-2 if layout in ("t", "nz.t") else -1].partition("/")[0]
    return dim, found.sizes.get(dim)


def _over(limit: Limit, axis: str, size: int) -> str:
    inner = f", the innermost of {limit.operand} in memory," if limit.axis == "inner" else ""
    since = limit.waiver.since if limit.waiver is not None else None
    later = ""
    if limit.waiver is not None and since is not None:
        forms = ", ".join(f"{name} {dtype}" for name, dtype in limit.waiver.dtypes.items())
        later = f"; waived from CANN {'.'.join(map(str, since))} on for {forms}"
    return f"axis {axis}{inner} is {size}, limit {limit.most}{later} ({limit.source})"


def _holds(waiver: Waiver, operands: Mapping[str, Operand], chip: NpuChip) -> bool:
    if chip.cann < waiver.since or not waiver.dtypes.keys() <= operands.keys():
        return False
    return all(
        dtype_name(operands[name].dtype) in dtypes.split("|") for name, dtypes in waiver.dtypes.items()
    ) and all(len(operands[name].shape) == 1 for name in waiver.flat)


def inner_limit(op: str, chip: NpuChip) -> int | None:
    """The largest innermost axis that ``op`` takes where nothing waives it; None: no limit is known."""
    found = [
        x.most
        for x in LIMITS
        if x.op == op and chip.family in x.chips and x.axis == "inner" and not x.layouts
    ]
    return min((most for most in found if most is not None), default=None)


# ---- calls ----------------------------------------------------------------------------------


def layout_of(tensor: Tensor, *, nz: bool = False) -> str:
    """How a tensor lies in memory, from its strides: ``nd``, ``t``, ``strided``; ``nz``, ``nz.t``."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if _contiguous(shape, stride):
        return "nz" if nz else "nd"
    swapped = [(*values[:-2], values[-1], values[-2]) for values in (shape, stride) if len(values) > 1]
    if swapped and _contiguous(*swapped):
        return "nz.t" if nz else "t"
    return "strided"


def _contiguous(shape: Sequence[Size], stride: Sequence[Size]) -> bool:
    expected: Size = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if isinstance(size, int) and size == 0:
            return True
        if isinstance(size, int) and size == 1:
            continue
        if isinstance(step, int) and isinstance(expected, int) and step != expected:
            return False
        expected = expected * size if isinstance(size, int) and isinstance(expected, int) else None
    return True


def _never(_: Tensor) -> bool:
    return False


def operand_of(tensor: Tensor, is_nz: Callable[[Tensor], bool] = _never) -> Operand:
    """The operand that a tensor (real, meta or fake) is."""
    layout = layout_of(tensor, nz=is_nz(tensor))
    return Operand(shape=tuple(tensor.shape), dtype=tensor.dtype, layout=layout)


def refusal_of_call(
    op: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    chip: NpuChip,
    *,
    is_nz: Callable[[Tensor], bool] = _never,
) -> Refusal | None:
    """Why ``chip`` would refuse a call with these tensors; None where it takes it or no rule is known.

    ``op`` with or without ``npu::``; ``is_nz`` tells which tensors hold FRACTAL_NZ. Of list operands
    the table knows lists of one tensor.
    """
    op = op.removeprefix("npu::").partition(".")[0]
    if op not in SCHEMAS:
        return None
    arguments = _arguments(op)
    given = {name: value for (name, _, _), value in zip(arguments, args, strict=False)} | dict(kwargs)
    operands, attributes = {}, {}
    for name, kind, _ in arguments:
        value = given.get(name)
        if "Tensor" not in kind:
            if name in given:
                attributes[name] = value
            continue
        if isinstance(value, (list, tuple)):
            if len(value) != 1:
                return Refusal(reason=f"{op}: {name} holds {len(value)} tensors; the table has lists of one")
            value = value[0]
        if value is not None:
            operands[name] = operand_of(value, is_nz)
    found = admits(op, operands, chip, **attributes)
    return found if isinstance(found, Refusal) else None
