"""The specs that weights of a dtype have in a scheme."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxquant.scheme import QuantSpec, find_scheme


def spec_of(scheme: str, dtype: torch.dtype = torch.float32) -> QuantSpec:
    """The spec of the codes of weights of ``dtype``; int4 has scales of that dtype."""
    spec = find_scheme(scheme).weight
    assert spec is not None
    return replace(spec, scale=spec.half_scales(dtype) or spec.scale)
