"""Reference numerics on tensors: quantize, dequantize, multiply. No FX, no registration.

Shape suffixes: M tokens (any leading dimensions), N output features, K input features. A weight is a tuple
of constants in the order of ``spec.names``: codes, scale, then a zero point or a scale for all.

The rule of each format, and by how much the largest value of a block can be off, relative to itself:

========  ============================================================  =======================
codes     scale                                                         error of the largest
========  ============================================================  =======================
int8      float32: absmax / 127                                         2^-23
int4      float32: absmax / 7                                           2^-23
int4 zp   float32: (max - min) / 15, and a zero point                   half a step: see below
e4m3      float32: absmax / 448                                         2^-23
e4m3      e8m0: 2^(floor(log2(absmax)) - 8), the OCP rule, saturates    1/8 (448 for up to 512)
e2m1      e8m0: 2^(floor(log2(absmax)) - 2), the OCP rule, saturates    1/4 (6 for up to 8)
e2m1      e4m3 of absmax / 6 / g, with a float32 g = absmax(all)/2688   1/16; 1/3 where the e4m3
                                                                        scale is subnormal
========  ============================================================  =======================

With a zero point the range is made to include 0, and the zero point is rounded to an integer, which moves
both ends by up to half a step of 1/15 of the range; the end that leaves 0 to 15 saturates.
"""

from __future__ import annotations

from fxquant.numerics.activations import quantize_act, quantize_act_static
from fxquant.numerics.blocks import (
    TILE_BYTES,
    block_of,
    chunk_rows,
    scale_shape,
    scan_shape,
    scratch_for,
)
from fxquant.numerics.checks import check_act_spec, check_weight_spec
from fxquant.numerics.compare import same_values
from fxquant.numerics.decode import dequantize_weight, embedding_rows
from fxquant.numerics.deviation import (
    can_clip,
    compare_rows,
    floor_of,
    sample_ranges,
    sqnr_db,
    told_by,
    unit_of_largest,
    zero_rows,
)
from fxquant.numerics.deviation import temporary_bytes as comparing_bytes
from fxquant.numerics.hadamard import block_size, hadamard
from fxquant.numerics.integers import scale_of
from fxquant.numerics.matmul import (
    EXACT_K,
    INT32_K,
    apply_scales,
    block_mm,
    int_matmul,
    scaled_sums,
    weight_only_mm,
)
from fxquant.numerics.scales import known_constants, scale_from_absmax
from fxquant.numerics.weights import (
    Writable,
    absmax_into,
    quantize_into,
    quantize_known_into,
    quantize_weight,
    temporary_bytes,
)

__all__ = [
    "EXACT_K",
    "INT32_K",
    "TILE_BYTES",
    "Writable",
    "absmax_into",
    "apply_scales",
    "block_mm",
    "block_of",
    "block_size",
    "can_clip",
    "check_act_spec",
    "check_weight_spec",
    "chunk_rows",
    "compare_rows",
    "comparing_bytes",
    "dequantize_weight",
    "embedding_rows",
    "floor_of",
    "hadamard",
    "int_matmul",
    "known_constants",
    "quantize_act",
    "quantize_act_static",
    "quantize_into",
    "quantize_known_into",
    "quantize_weight",
    "same_values",
    "sample_ranges",
    "scale_from_absmax",
    "scale_of",
    "scale_shape",
    "scaled_sums",
    "scan_shape",
    "scratch_for",
    "sqnr_db",
    "temporary_bytes",
    "told_by",
    "unit_of_largest",
    "weight_only_mm",
    "zero_rows",
]
