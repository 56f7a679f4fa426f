"""Weights of any kind: denormals, zeros, outliers, huge values, in every dtype; and the specs to try."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from torch import Tensor

from fxquant.scheme import FULL, SCALES, SCHEMES, QuantSpec

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TINY = torch.finfo(torch.float32).tiny
# Denormals of float32 and float16, both sides of the smallest scale (127 * TINY), the usual, the huge.
MAGNITUDES = (0.0, 1e-45, 1e-40, TINY, 1.4e-36, 1.5e-36, 1e-7, 6e-5, 1e-3, 1.0, 6e4, 1e30)

SCHEME_SPECS = sorted({str(scheme.weight) for scheme in SCHEMES.values() if scheme.weight is not None})
OTHER_SPECS = ["int8[1,32]", "int8[16,*]", "int8[16,32]", "int8[*,*]", "int8[*,32]", "int8[128,128]"]
MORE_SPECS = [
    "int4[2,8]",
    "int4[2,8]zp",
    "int4[1,3]zp",
    "e2m1[1,5]",
    "e2m1[*,*]",
    "e4m3[3,5]",
    "e2m1[1,3]e8m0",
]
HALF_SPECS = [
    "int4[1,32]bf16",
    "int4[1,32]f16",
    "int4[1,*]f16",
    "int4[1,64]bf16zp",
    "int4[1,32]f16zp",
    "int4[1,*]bf16zp",
]
REFINED_SPECS = ["int4[1,32]!clip", "int4[1,32]zp!clip", "int4[1,64]zp!hqq", "int4[1,*]zp!hqq"]
REFINED_SPECS += ["int4[1,32]bf16!clip", "int4[1,32]f16zp!clip", "int4[1,64]bf16zp!hqq"]
RULED_SPECS = [*SCHEME_SPECS, *OTHER_SPECS, *MORE_SPECS, *HALF_SPECS]
"""Whose scales follow from the largest values."""

ALL_SPECS = [*RULED_SPECS, *REFINED_SPECS]

ACT_SPECS = sorted(
    {str(scheme.act) for scheme in SCHEMES.values() if scheme.act is not None and scheme.act.dynamic}
)


def weight_for(w: Tensor, spec: QuantSpec) -> Tensor:
    """A weight that ``spec`` is for: half scales are in the weight's dtype."""
    if not spec.half_scale:
        return w
    limit = torch.finfo(SCALES[spec.scale]).max
    return w.float().clamp(-limit, limit).to(SCALES[spec.scale])


@st.composite
def matrices(draw: st.DrawFn, rows: int = 5, columns: int = 40) -> Tensor:
    """Rows of one magnitude each, some zeros, now and then a single outlier, in any float dtype."""
    n, k = draw(st.integers(0, rows)), draw(st.integers(0, columns))
    dtype = draw(st.sampled_from(FLOATS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    sizes = torch.tensor([draw(st.sampled_from(MAGNITUDES)) for _ in range(n)]).reshape(n, 1)
    w = torch.randn(n, k, generator=generator) * sizes
    w = w * (torch.rand(n, k, generator=generator) < draw(st.sampled_from((0.2, 0.9, 1.0))))
    if n and k and draw(st.booleans()):
        w[draw(st.integers(0, n - 1)), draw(st.integers(0, k - 1))] = draw(st.sampled_from((-1e4, 1e4, 1e30)))
    limit = torch.finfo(dtype).max
    return w.clamp(-limit, limit).to(dtype)


def spread(grid: Tensor, spec: QuantSpec, n: int, k: int) -> Tensor:
    """Values of blocks ``[R, C]`` for each element ``[n, k]``."""
    rows, columns = (
        size or 1 if side == FULL else side for side, size in zip(spec.block, (n, k), strict=True)
    )
    return grid[torch.arange(n) // rows][:, torch.arange(k) // columns]


def normal(n: int, k: int, seed: int = 0) -> Tensor:
    """Gaussian values."""
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
