"""Codes of 4 bits, two to a byte along K: the even column lies in the low half.

With an odd K the high half of a row's last byte holds code 0: 8 of int4, 0 of e2m1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.numerics.floats import E2M1
from fxquant.numerics.integers import INT4_OFFSET
from fxquant.scheme import QuantSpec


def pack_(codes: Tensor, last: int) -> Tensor:
    """Float32 codes 0 to 15 ``[r, K]`` to bytes ``[r, ceil(K / 2)]``, as floats in the even columns.

    ``last`` is the code beside the last column of an odd K.
    """
    k = codes.shape[1]
    low = codes[:, 0::2]
    low[:, : k // 2].add_(codes[:, 1::2], alpha=16)
    if k % 2:
        low[:, -1].add_(16 * last)
    return low


def unpack(packed: Tensor, spec: QuantSpec, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What codes of 4 bits ``[..., ceil(k / 2)]`` stand for, unscaled: ``[..., k]``, float32 or int8."""
    if spec.type.is_float:
        values = [*E2M1, *(-value for value in E2M1)]
    else:
        values = [float(code - INT4_OFFSET) for code in range(16)]
    table = torch.tensor(values, dtype=dtype, device=packed.device)
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], 1)
    # A pair is looked up as one number: rows of two are copied one by one, four times slower.
    numbers = pairs.view(torch.int64 if dtype == torch.float32 else torch.int16).view(256)
    found = numbers.index_select(0, packed.reshape(-1).to(torch.int32)).view(dtype)
    return found.view(*packed.shape[:-1], 2 * packed.shape[-1])[..., :k]
