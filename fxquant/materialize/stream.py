"""Weights that arrive as a stream of ``(name, tensor)``: which unit is complete when."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor, fx

from fxquant.checkpoint.keymap_rules import transparent
from fxquant.errors import MissingWeightError, WeightMismatchError
from fxquant.graph import placeholders, value
from fxquant.materialize.recipes import LoadGraph
from fxquant.materialize.schedule import Unit

log = logging.getLogger("fxquant.materialize")


def stream_units(
    graph: LoadGraph,
    units: tuple[Unit, ...],
    pairs: Iterable[tuple[str, Tensor]],
    names: Mapping[str, str],
    optional: Collection[str],
) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
    """Each unit once all its keys have come; once more when a tied name brings its values again.

    ``names`` maps every name under which a key may come to the key. A float tensor of another dtype
    than planned is cast. Units of which every recipe is in ``optional`` may stay out.
    """
    of_key = {key: unit for unit in units for key in unit.keys}
    expected = {key: node for unit in units for key, node in _placeholders(graph, unit)}
    held: dict[str, Tensor] = {}
    complete: set[str] = set()
    for name, tensor in pairs:
        key = names.get(transparent(name), transparent(name))
        unit = of_key.get(key)
        if unit is None:
            log.info("the stream's tensor %s is not used", name)
            continue
        held[key] = _as_planned(name, tensor, expected[key])
        if all(key in held for key in unit.keys):
            complete.update(unit.keys)
            yield unit, {key: held.pop(key) for key in unit.keys}
    late = [unit for unit in units if not complete.issuperset(unit.keys)]
    lost = [r.fqn for unit in late for r in unit.recipes if r.fqn not in optional]
    if lost:
        raise MissingWeightError(
            f"the stream of tensors ended without what {len(lost)} weights need: {', '.join(lost[:10])}"
        )


def _placeholders(graph: LoadGraph, unit: Unit) -> Iterator[tuple[str, fx.Node]]:
    for recipe in unit.recipes:
        yield from zip(recipe.keys, placeholders(graph.templates[recipe.template]), strict=True)


def _as_planned(name: str, tensor: Tensor, node: fx.Node) -> Tensor:
    """The tensor in the dtype that was planned; its shape must be the planned one."""
    planned: Tensor = value(node)
    if tensor.shape != planned.shape or tensor.is_floating_point() != planned.is_floating_point():
        raise WeightMismatchError(
            f"the stream's tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, "
            f"expected {planned.dtype} {list(planned.shape)}"
        )
    return tensor.to(planned.dtype)
