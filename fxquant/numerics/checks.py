"""Which specs there are numerics for."""

from __future__ import annotations

from fxquant.scheme import FULL, QuantSpec

_SCALES = {
    "int8": ("f32",),
    "int4": ("f32", "bf16", "f16"),
    "e4m3": ("f32", "e8m0"),
    "e2m1": ("f32", "e8m0", "e4m3"),
}
"""Scales of codes."""


def check_weight_spec(spec: QuantSpec) -> None:
    """Refuse a spec of a weight that there are no numerics for."""
    zero = spec.zero and spec.codes != "int4"
    refined = spec.refine and (spec.codes != "int4" or spec.block[0] != 1)
    if spec.scale not in _SCALES[spec.codes] or zero or refined or spec.static or spec.dynamic:
        raise NotImplementedError(f"no reference numerics for a weight of {spec}")


def check_act_spec(spec: QuantSpec) -> None:
    """Refuse a spec of an activation that there are no numerics for."""
    rows = spec.block[0] == 1 or (spec.block == (FULL, FULL) and spec.scale == "f32")
    if spec.scale not in _SCALES[spec.codes] or spec.zero or spec.refine or spec.codes == "int4" or not rows:
        raise NotImplementedError(f"no reference numerics for an activation of {spec}")
