"""Golden graphs of weights that are looked up, and of convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor

import fxquant
from tests.passes.test_goldens import Holder

OPS = ("scaled_mm", "embedding_dequant", "dequantize_weight")
TARGET = fxquant.Target(
    name="cpu",
    device_type="cpu",
    kernels={f"fxquant::{op}": fxquant.Kernel(op=f"fxquant::{op}", reason="golden") for op in OPS},
)
IDS = torch.zeros(2, 4, dtype=torch.long)
IMAGE = torch.zeros(2, 3, 8, 8)


def dump(model: Holder, given: Tensor, scheme: str, **options: Any) -> str:
    options = {"scheme": "none", "target": TARGET, "config": {"w": scheme}, **options}
    return fxquant.lower(model, example_inputs=(given,), **options).dump()


class TestGoldens(TestCase):
    def test_lookup_static(self) -> None:
        model = Holder(lambda m, ids: F.embedding(ids, m.w, padding_idx=0), w=(8, 16))
        self.assertExpectedInline(dump(model, IDS, "int4_g64", dynamic=False), "")

    def test_lookup_dynamic_through_a_cast(self) -> None:
        model = Holder(lambda m, ids: F.embedding(ids, m.w.half()), w=(8, 16))
        self.assertExpectedInline(dump(model, IDS, "int8"), "")

    def test_convolution_static(self) -> None:
        model = Holder(lambda m, x: F.conv2d(x, m.w, m.b, stride=2), w=(8, 3, 3, 3), b=(8,))
        self.assertExpectedInline(dump(model, IMAGE, "int8_weight_only", dynamic=False), "")

    def test_convolution_dynamic_twice(self) -> None:
        def run(m: Holder, x: Tensor) -> Tensor:
            return F.conv2d(x, m.w, padding="same") + F.conv2d(x.half(), m.w.half(), padding=1)

        model = Holder(run, w=(4, 3, 3, 3))
        self.assertExpectedInline(dump(model, IMAGE, "int8_weight_only"), "")
