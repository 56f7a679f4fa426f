"""The order of loading, and the peak that it will have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxquant.checkpoint import TensorInfo
from fxquant.materialize.recipes import LoadGraph, Recipe, result_vals, transient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Recipes that share reads: each of ``keys`` is read once for all of them."""

    recipes: tuple[Recipe, ...]
    keys: tuple[str, ...]


def make_units(graph: LoadGraph, infos: Mapping[str, TensorInfo]) -> tuple[Unit, ...]:
    """Units in file order of their first key (in the recipes' order where the source has none)."""
    parent: dict[str, str] = {}

    def find(key: str) -> str:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for recipe in graph.recipes:
        for key in recipe.keys:
            parent[find(key)] = find(recipe.keys[0])
    grouped: dict[str, list[Recipe]] = {}
    for recipe in graph.recipes:
        grouped.setdefault(find(recipe.keys[0]), []).append(recipe)
    place = {key: i for i, key in enumerate(infos)}
    units = []
    for recipes in grouped.values():
        keys = {key: None for recipe in recipes for key in recipe.keys}
        ordered = sorted(keys, key=lambda key: place.get(key, 0))
        units.append(Unit(recipes=tuple(recipes), keys=tuple(ordered)))
    return tuple(sorted(units, key=lambda unit: min(place.get(key, 0) for key in unit.keys)))


def resident_bytes(graph: LoadGraph, recipe: Recipe) -> int:
    """Bytes of the recipe's constants."""
    return sum(val.nbytes for val in result_vals(graph.templates[recipe.template]))


def predict_peak(graph: LoadGraph, units: tuple[Unit, ...], *, reads_owned: bool = True) -> int:
    """Bytes alive at once while the units run one after the other, by liveness.

    ``reads_owned=False``: the source's tensors are in memory anyway and are not counted.
    """
    transients = [transient_bytes(gm, reads_owned=reads_owned) for gm in graph.templates]
    resident, peak = 0, 0
    for unit in units:
        reads = _shared_reads(graph, unit) if reads_owned else 0
        for recipe in unit.recipes:
            resident += resident_bytes(graph, recipe)
            peak = max(peak, resident + reads + transients[recipe.template])
    return max(peak, resident)


def _shared_reads(graph: LoadGraph, unit: Unit) -> int:
    """Bytes of reads that outlive the recipe that is running, because another needs them too."""
    if len(unit.recipes) == 1:
        return 0
    sizes: dict[str, int] = {}
    for recipe in unit.recipes:
        inputs = graph.templates[recipe.template].graph.find_nodes(op="placeholder")
        sizes.update(zip(recipe.keys, (node.meta["val"].nbytes for node in inputs), strict=True))
    return sum(sizes.values())
