"""Whether tensors hold the same values."""

from __future__ import annotations

import torch
from torch import Tensor


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold equal values, a NaN being equal to a NaN; ``b`` in the dtype of ``a``."""
    if a.shape != b.shape:
        return False
    b = b.to(a.dtype)
    if a.is_floating_point() and a.dtype.itemsize == 1:  # floats that cannot be compared as they are
        if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return True
        a, b = a.to(torch.float32), b.to(torch.float32)
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
