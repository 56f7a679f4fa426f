"""What a rule about an NPU op is: a row of the table, a limit, a waiver of one.

An operand's text is ``dtypes [dims] layouts or [dims] layouts``. ``?`` in front: it may be absent;
an operand that a row does not name must be. ``=x``: the dtype of operand ``x``. Dims are symbols,
numbers, ``A|B``, ``K/8`` (packed: K is 8 times the size), ``ceil(K/64)``; ``...`` is any leading dims.
Layouts: ``nd`` contiguous, ``t`` the transposed view of a contiguous tensor, ``nz`` FRACTAL_NZ made from
the shape as passed, ``nz.t`` the transposed view of a FRACTAL_NZ tensor, ``any`` any strides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One combination of operands and attributes that an op takes on ``chips``.

    ``attributes`` lists the values that each may have (a string alone binds a symbol); one that is
    not listed must have its default. ``where`` are conditions on symbols: ``"K % 8"``, ``"32 <= G"``.
    """

    op: str
    chips: tuple[str, ...]
    operands: Mapping[str, str]
    attributes: Mapping[str, tuple[object, ...] | str] = field(default_factory=dict)
    where: tuple[str, ...] = ()
    max_rank: int = 8
    source: str
    verified: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """From CANN ``since`` on a limit does not hold for operands of these dtypes, 1-D those in ``flat``."""

    since: tuple[int, int, int]
    dtypes: Mapping[str, str]
    flat: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Sizes that ``op`` takes on an axis: a symbol, or ``inner``, the innermost of ``operand`` in memory."""

    op: str
    chips: tuple[str, ...]
    axis: str
    operand: str = ""
    layouts: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None
    waiver: Waiver | None = None
    source: str
    verified: bool = False


DAV_2201 = ("A2", "A3")
ALL = ("A2", "A3", "950", "310P")
