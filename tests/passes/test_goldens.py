"""Golden graphs: each rewrite on the smallest model that shows it, captured through the production door."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn

import fxquant


class Holder(nn.Module):
    """A model that is one expression over its parameters."""

    def __init__(self, run: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def lowered(model: nn.Module, *inputs: Tensor, dynamic: bool = False, **options: object) -> fxquant.Lowered:
    kernel = fxquant.Kernel(op="fxquant::scaled_mm", reason="golden: no kernel of its own")
    target = fxquant.Target(name="cpu", device_type="cpu", kernels={"fxquant::scaled_mm": kernel})
    options = {"scheme": "int8", "target": target, **options}
    return fxquant.lower(model, example_inputs=inputs, dynamic=dynamic, **options)


X = torch.zeros(2, 4, 16)


class TestGoldens(TestCase):
    def test_linear_static(self) -> None:
        low = lowered(Holder(lambda m, x: F.linear(x, m.w, m.b), w=(8, 16), b=(8,)), X)
        self.assertExpectedInline(
            low.dump(),
            """\
load:
template 0:
  r0 : float32[8, 16]
  %1 = fxquant.quantize_weight(r0, int8[1,*]) : (int8[8, 16], float32[8, 1])
  %2 = getitem(%1, 0) : int8[8, 16]
  %3 = getitem(%1, 1) : float32[8, 1]
  return [%2, %3]
template 1:
  r0 : float32[8]
  return [r0]
w.codes, w.scale = template 0(w)
b.value = template 1(b)
tail:
p_w_codes : int8[8, 16]
p_w_scale : float32[8, 1]
p_b : float32[8]
return [p_w_codes, p_w_scale, p_b]
run:
p_w_codes : int8[8, 16]
p_w_scale : float32[8, 1]
p_b : float32[8]
x : float32[2, 4, 16]
%4 = fxquant.quantize_act(x, int8[1,*]dyn) : (int8[2, 4, 16], float32[2, 4, 1])
%5 = getitem(%4, 0) : int8[2, 4, 16]
%6 = getitem(%4, 1) : float32[2, 4, 1]
%7 = fxquant.scaled_mm(%5, p_w_codes, %6, p_w_scale, p_b, float32) : float32[2, 4, 8]
return [%7]""",
        )

    def test_linear_dynamic(self) -> None:
        low = lowered(Holder(lambda m, x: F.linear(x, m.w), w=(8, 16)), X, dynamic=True)
        self.assertExpectedInline(
            low.dump(),
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
x : float32[s0, s1, 16]
%3 = fxquant.quantize_act(x, int8[1,*]dyn) : (int8[s0, s1, 16], float32[s0, s1, 1])
%4 = getitem(%3, 0) : int8[s0, s1, 16]
%5 = getitem(%3, 1) : float32[s0, s1, 1]
%6 = fxquant.scaled_mm(%4, p_w_codes, %5, p_w_scale, None, float32) : float32[s0, s1, 8]
return [%6]""",
        )

    def test_matmul_with_transposed_view(self) -> None:
        low = lowered(Holder(lambda m, x: x @ m.w.t(), w=(8, 16)), X)
        self.assertExpectedInline(
            low.dump(),
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
x : float32[2, 4, 16]
%3 = fxquant.quantize_act(x, int8[1,*]dyn) : (int8[2, 4, 16], float32[2, 4, 1])
%4 = getitem(%3, 0) : int8[2, 4, 16]
%5 = getitem(%3, 1) : float32[2, 4, 1]
%6 = fxquant.scaled_mm(%4, p_w_codes, %5, p_w_scale, None, float32) : float32[2, 4, 8]
return [%6]""",
        )

    def test_conv1d_addmm_in_out_layout(self) -> None:
        model = Holder(lambda m, x: torch.addmm(m.b, x.view(-1, 16), m.w), w=(16, 8), b=(8,))
        self.assertExpectedInline(
            lowered(model, X).dump(),
            """\
load:
template 0:
  r0 : float32[16, 8]
  %1 = aten.t(r0) : float32[8, 16]
  %2 = fxquant.quantize_weight(%1, int8[1,*]) : (int8[8, 16], float32[8, 1])
  %3 = getitem(%2, 0) : int8[8, 16]
  %4 = getitem(%2, 1) : float32[8, 1]
  return [%3, %4]
template 1:
  r0 : float32[8]
  return [r0]
w.codes, w.scale = template 0(w)
b.value = template 1(b)
tail:
p_w_codes : int8[8, 16]
p_w_scale : float32[8, 1]
p_b : float32[8]
return [p_w_codes, p_w_scale, p_b]
run:
p_w_codes : int8[8, 16]
p_w_scale : float32[8, 1]
p_b : float32[8]
x : float32[2, 4, 16]
%4 = aten.view(x, [-1, 16]) : float32[8, 16]
%5 = fxquant.quantize_act(%4, int8[1,*]dyn) : (int8[8, 16], float32[8, 1])
%6 = getitem(%5, 0) : int8[8, 16]
%7 = getitem(%5, 1) : float32[8, 1]
%8 = fxquant.scaled_mm(%6, p_w_codes, %7, p_w_scale, p_b, float32) : float32[8, 8]
return [%8]""",
        )

    def test_cuts_of_one_weight(self) -> None:
        def run(m: Holder, x: Tensor) -> Tensor:
            q, k = m.w.split([16, 8])
            return F.linear(F.linear(x, q), k)

        self.assertExpectedInline(
            lowered(Holder(run, w=(24, 16)), X).dump(),
            """\
load:
template 0:
  r0 : float32[24, 16]
  %1 = fxquant.quantize_weight(r0, int8[1,*]) : (int8[24, 16], float32[24, 1])
  %2 = getitem(%1, 0) : int8[24, 16]
  %3 = getitem(%1, 1) : float32[24, 1]
  return [%2, %3]
w.codes, w.scale = template 0(w)
tail:
p_w_codes : int8[24, 16]
p_w_scale : float32[24, 1]
%2 = aten.slice.Tensor(p_w_codes, 0, 0, 16, 1) : int8[16, 16]
%3 = aten.slice.Tensor(p_w_scale, 0, 0, 16, 1) : float32[16, 1]
%4 = aten.slice.Tensor(p_w_codes, 0, 16, 24, 1) : int8[8, 16]
%5 = aten.slice.Tensor(p_w_scale, 0, 16, 24, 1) : float32[8, 1]
return [%2, %3, %4, %5]
run:
slice_tensor : int8[16, 16]
slice_tensor_1 : float32[16, 1]
slice_tensor_2 : int8[8, 16]
slice_tensor_3 : float32[8, 1]
x : float32[2, 4, 16]
%5 = fxquant.quantize_act(x, int8[1,*]dyn) : (int8[2, 4, 16], float32[2, 4, 1])
%6 = getitem(%5, 0) : int8[2, 4, 16]
%7 = getitem(%5, 1) : float32[2, 4, 1]
%8 = fxquant.scaled_mm(%6, slice_tensor, %7, slice_tensor_1, None, float32) : float32[2, 4, 16]
%9 = fxquant.quantize_act(%8, int8[1,*]dyn) : (int8[2, 4, 16], float32[2, 4, 1])
%10 = getitem(%9, 0) : int8[2, 4, 16]
%11 = getitem(%9, 1) : float32[2, 4, 1]
%12 = fxquant.scaled_mm(%10, slice_tensor_2, %11, slice_tensor_3, None, float32) : float32[2, 4, 8]
return [%12]""",
        )

    def test_cut_along_k(self) -> None:
        model = Holder(lambda m, x: F.linear(x[..., :4], m.w[:, 4:8]), w=(8, 16))
        self.assertExpectedInline(
            lowered(model, X).dump(),
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
%2 = aten.slice.Tensor(p_w_codes, 1, 4, 8, 1) : int8[8, 4]
return [p_w_scale, %2]
run:
p_w_scale : float32[8, 1]
slice_tensor : int8[8, 4]
x : float32[2, 4, 16]
%3 = aten.slice.Tensor(x, 2, 0, 4) : float32[2, 4, 4]
%4 = fxquant.quantize_act(%3, int8[1,*]dyn) : (int8[2, 4, 4], float32[2, 4, 1])
%5 = getitem(%4, 0) : int8[2, 4, 4]
%6 = getitem(%4, 1) : float32[2, 4, 1]
%7 = fxquant.scaled_mm(%5, slice_tensor, %6, p_w_scale, None, float32) : float32[2, 4, 8]
return [%7]""",
        )

    def test_one_quantization_for_shared_input(self) -> None:
        def run(m: Holder, x: Tensor) -> Tensor:
            return F.linear(x, m.q) + F.linear(x, m.k)

        self.assertExpectedInline(
            lowered(Holder(run, q=(8, 16), k=(8, 16)), X).dump(),
            """\
load:
template 0:
  r0 : float32[8, 16]
  %1 = fxquant.quantize_weight(r0, int8[1,*]) : (int8[8, 16], float32[8, 1])
  %2 = getitem(%1, 0) : int8[8, 16]
  %3 = getitem(%1, 1) : float32[8, 1]
  return [%2, %3]
q.codes, q.scale = template 0(q)
k.codes, k.scale = template 0(k)
tail:
p_q_codes : int8[8, 16]
p_q_scale : float32[8, 1]
p_k_codes : int8[8, 16]
p_k_scale : float32[8, 1]
return [p_q_codes, p_q_scale, p_k_codes, p_k_scale]
run:
p_q_codes : int8[8, 16]
p_q_scale : float32[8, 1]
p_k_codes : int8[8, 16]
p_k_scale : float32[8, 1]
x : float32[2, 4, 16]
%5 = fxquant.quantize_act(x, int8[1,*]dyn) : (int8[2, 4, 16], float32[2, 4, 1])
%6 = getitem(%5, 0) : int8[2, 4, 16]
%7 = getitem(%5, 1) : float32[2, 4, 1]
%8 = fxquant.scaled_mm(%6, p_q_codes, %7, p_q_scale, None, float32) : float32[2, 4, 8]
%9 = getitem(%5, 0) : int8[2, 4, 16]
%10 = getitem(%5, 1) : float32[2, 4, 1]
%11 = fxquant.scaled_mm(%9, p_k_codes, %10, p_k_scale, None, float32) : float32[2, 4, 8]
%12 = aten.add.Tensor(%8, %11) : float32[2, 4, 8]
return [%12]""",
        )

    def test_written_input_is_quantized_again(self) -> None:
        def run(m: Holder, x: Tensor) -> Tensor:
            x = x + 1
            first = F.linear(x, m.q)
            x.mul_(2)
            return first + F.linear(x, m.k)

        low = lowered(Holder(run, q=(8, 16), k=(8, 16)), X)
        assert low.dump().count("fxquant.quantize_act") == 2

    def test_cast_weight(self) -> None:
        def run(m: Holder, x: Tensor) -> Tensor:
            return F.linear(x.half(), m.w.half())

        self.assertExpectedInline(
            lowered(Holder(run, w=(8, 16)), X).dump(),
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
x : float32[2, 4, 16]
%3 = aten.to.dtype(x, float16) : float16[2, 4, 16]
%4 = fxquant.quantize_act(%3, int8[1,*]dyn) : (int8[2, 4, 16], float32[2, 4, 1])
%5 = getitem(%4, 0) : int8[2, 4, 16]
%6 = getitem(%4, 1) : float32[2, 4, 1]
%7 = fxquant.scaled_mm(%5, p_w_codes, %6, p_w_scale, None, float16) : float16[2, 4, 8]
return [%7]""",
        )

    def test_tied_head_that_was_asked_for_keeps_a_table(self) -> None:
        def run(m: Holder, ids: Tensor) -> Tensor:
            return F.linear(F.embedding(ids, m.w), m.w)

        model = Holder(run, w=(8, 16))
        low = lowered(model, torch.zeros(2, 4, dtype=torch.long), config={"w": "int8"})
        self.assertExpectedInline(
            low.dump(),
            """\
load:
template 0:
  r0 : float32[8, 16]
  %1 = fxquant.quantize_weight(r0, int8[1,*]) : (int8[8, 16], float32[8, 1])
  %2 = getitem(%1, 0) : int8[8, 16]
  %3 = getitem(%1, 1) : float32[8, 1]
  return [%2, %3, r0]
w.codes, w.scale, w.table = template 0(w)
tail:
p_w_codes : int8[8, 16]
p_w_scale : float32[8, 1]
p_w_table : float32[8, 16]
return [p_w_codes, p_w_scale, p_w_table]
run:
p_w_codes : int8[8, 16]
p_w_scale : float32[8, 1]
p_w_table : float32[8, 16]
x : int64[2, 4]
%4 = aten.embedding(p_w_table, x) : float32[2, 4, 16]
%5 = fxquant.quantize_act(%4, int8[1,*]dyn) : (int8[2, 4, 16], float32[2, 4, 1])
%6 = getitem(%5, 0) : int8[2, 4, 16]
%7 = getitem(%5, 1) : float32[2, 4, 1]
%8 = fxquant.scaled_mm(%6, p_w_codes, %7, p_w_scale, None, float32) : float32[2, 4, 8]
return [%8]""",
        )

    def test_norm_cast_moves_to_load_time_only_if_it_does_not_grow(self) -> None:
        def run(m: Holder, x: Tensor) -> Tensor:
            return x * m.g.half().float() + m.g

        self.assertExpectedInline(
            lowered(Holder(run, g=(16,)), X).dump(),
            """\
load:
template 0:
  r0 : float32[16]
  return [r0]
g.value = template 0(g)
tail:
p_g : float32[16]
%1 = aten.to.dtype(p_g, float16) : float16[16]
return [p_g, %1]
run:
p_g : float32[16]
to : float16[16]
x : float32[2, 4, 16]
%3 = aten.to.dtype(to, float32) : float32[16]
%4 = aten.mul.Tensor(x, %3) : float32[2, 4, 16]
%5 = aten.add.Tensor(%4, p_g) : float32[2, 4, 16]
return [%5]""",
        )

    def test_kernel_of_the_target(self) -> None:
        kernel = fxquant.Kernel(op="fxquant_cpu::scaled_mm", reason="golden")
        target = fxquant.Target(name="cpu", device_type="cpu", kernels={"fxquant::scaled_mm": kernel})
        low = lowered(Holder(lambda m, x: F.linear(x, m.w), w=(8, 16)), X, target=target)
        assert "fxquant_cpu.scaled_mm(" in low.dump()
        assert "fxquant.scaled_mm(" not in low.dump()
