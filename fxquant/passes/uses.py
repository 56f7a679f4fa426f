"""What a graph may do with a weight, as ``weight_uses`` finds it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A slice ``[start:stop:step]`` along an axis of the weight as it is stored."""

    axis: int
    start: int
    stop: int
    step: int = 1


Pick = int | fx.Node
"""Which of the experts: an index, or a node that gives indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearUse:
    """``x @ w`` with the weight's ``k_axis`` contracted, after ``cuts``; see ``matmul_operands``.

    Axes are those of one matrix: 0 and 1, also of a weight with experts, one of which is ``expert``.
    """

    node: fx.Node
    k_axis: int
    cuts: tuple[Cut, ...]
    n: int
    k: int
    expert: Pick | None = None
    via: fx.Node | None = None
    """The user of the weight itself through which it gets here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertUse:
    """A product of rows ``x`` with several experts, whose ``k_axis`` is contracted, after ``cuts``.

    Which rows meet which expert: ``offsets``, the end of each expert's rows (``x [S, K]``); ``ids``, the
    expert of each row; or neither, where ``x`` is ``[E, S, K]``. ``swapped``: ``w @ x`` with ``x``
    ``[S, K, 1]``, else ``x`` is ``[S, 1, K]`` where there are ``ids``.
    """

    node: fx.Node
    k_axis: int
    cuts: tuple[Cut, ...]
    n: int
    k: int
    x: fx.Node
    offsets: fx.Node | None = None
    ids: fx.Node | None = None
    swapped: bool = False
    via: fx.Node | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherUse:
    """A use that is no product, with the reason in words."""

    node: fx.Node
    reason: str
    lookup: bool = False
    conv: bool = False
    writes: bool = False
    via: fx.Node | None = None


WeightUse = LinearUse | ExpertUse | OtherUse
