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
        self.assertExpectedInline(
            dump(model, IDS, "int4_g64", dynamic=False),
            """\
load:
template 0:
  r0 : float32[8, 16]
  %1 = fxquant.quantize_weight(r0, int4[1,64]) : (uint8[8, 8], float32[8, 1])
  %2 = getitem(%1, 0) : uint8[8, 8]
  %3 = getitem(%1, 1) : float32[8, 1]
  return [%2, %3]
w.codes, w.scale = template 0(w)
tail:
p_w_codes : uint8[8, 8]
p_w_scale : float32[8, 1]
return [p_w_codes, p_w_scale]
run:
p_w_codes : uint8[8, 8]
p_w_scale : float32[8, 1]
x : int64[2, 4]
%3 = fxquant.embedding_dequant(x, [p_w_codes, p_w_scale], int4[1,64], 16, float32) : float32[2, 4, 16]
return [%3]""",
        )

    def test_lookup_dynamic_through_a_cast(self) -> None:
        model = Holder(lambda m, ids: F.embedding(ids, m.w.half()), w=(8, 16))
        self.assertExpectedInline(
            dump(model, IDS, "int8"),
            """\
load:
template 0:
  r0 : float32[8, 16]
  %1 = fxquant.quantize_weight(r0, int8[1,*]) : (int8[8, 16], float32[8, 1])
  %2 = getitem(%1, 0) : int8[8, 16]
  %3 = getitem(%1, 1) : float32[8, 1]
  return [%2, %3]
w.codes, w.scale = template 0(w)
tail:
p_w_codes : int8[8, 16]
p_w_scale : float32[8, 1]
return [p_w_codes, p_w_scale]
run:
p_w_codes : int8[8, 16]
p_w_scale : float32[8, 1]
x : int64[s0, s1]
%3 = fxquant.embedding_dequant(x, [p_w_codes, p_w_scale], int8[1,*], 16, float32) : float32[s0, s1, 16]
%4 = aten.to.dtype(%3, float16) : float16[s0, s1, 16]
return [%4]""",
        )

    def test_convolution_static(self) -> None:
        model = Holder(lambda m, x: F.conv2d(x, m.w, m.b, stride=2), w=(8, 3, 3, 3), b=(8,))
        self.assertExpectedInline(
            dump(model, IMAGE, "int8_weight_only", dynamic=False),
            """\
load:
template 0:
  r0 : float32[8, 3, 3, 3]
  %1 = aten.view(r0, [8, -1]) : float32[8, 27]
  %2 = fxquant.quantize_weight(%1, int8[1,*]) : (int8[8, 27], float32[8, 1])
  %3 = getitem(%2, 0) : int8[8, 27]
  %4 = getitem(%2, 1) : float32[8, 1]
  return [%3, %4]
template 1:
  r0 : float32[8]
  return [r0]
w.codes, w.scale = template 0(w)
b.value = template 1(b)
tail:
p_w_codes : int8[8, 27]
p_w_scale : float32[8, 1]
p_b : float32[8]
return [p_w_codes, p_w_scale, p_b]
run:
p_w_codes : int8[8, 27]
p_w_scale : float32[8, 1]
p_b : float32[8]
x : float32[2, 3, 8, 8]
%4 = fxquant.dequantize_weight([p_w_codes, p_w_scale], int8[1,*], 27, float32) : float32[8, 27]
%5 = aten.view(%4, [8, 3, 3, 3]) : float32[8, 3, 3, 3]
%6 = aten.conv2d(x, %5, p_b, [2, 2]) : float32[2, 8, 3, 3]
return [%6]""",
        )

    def test_convolution_dynamic_twice(self) -> None:
        def run(m: Holder, x: Tensor) -> Tensor:
            return F.conv2d(x, m.w, padding="same") + F.conv2d(x.half(), m.w.half(), padding=1)

        model = Holder(run, w=(4, 3, 3, 3))
        self.assertExpectedInline(
            dump(model, IMAGE, "int8_weight_only"),
            """\
load:
template 0:
  r0 : float32[4, 3, 3, 3]
  %1 = aten.view(r0, [4, -1]) : float32[4, 27]
  %2 = fxquant.quantize_weight(%1, int8[1,*]) : (int8[4, 27], float32[4, 1])
  %3 = getitem(%2, 0) : int8[4, 27]
  %4 = getitem(%2, 1) : float32[4, 1]
  return [%3, %4]
w.codes, w.scale = template 0(w)
tail:
p_w_codes : int8[4, 27]
p_w_scale : float32[4, 1]
return [p_w_codes, p_w_scale]
run:
p_w_codes : int8[4, 27]
p_w_scale : float32[4, 1]
x : float32[s0, 3, s1, s2]
%3 = fxquant.dequantize_weight([p_w_codes, p_w_scale], int8[1,*], 27, float32) : float32[4, 27]
%4 = aten.view(%3, [4, 3, 3, 3]) : float32[4, 3, 3, 3]
%5 = aten.conv2d.padding(x, %4, None, [1, 1], same) : float32[s0, 4, s1, s2]
%6 = aten.to.dtype(x, float16) : float16[s0, 3, s1, s2]
%7 = fxquant.dequantize_weight([p_w_codes, p_w_scale], int8[1,*], 27, float32) : float32[4, 27]
%8 = aten.view(%7, [4, 3, 3, 3]) : float32[4, 3, 3, 3]
%9 = aten.to.dtype(%8, float16) : float16[4, 3, 3, 3]
%10 = aten.conv2d(%6, %9, None, [1, 1], [1, 1]) : float16[s0, 4, s1, s2]
%11 = aten.add.Tensor(%5, %10) : float32[s0, 4, s1, s2]
return [%11]""",
        )
