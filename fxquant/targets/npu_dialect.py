"""Dialect nodes of schemes other than dynamic int8, replaced by the calls of ``npu_products``.

Before: ``weight_only_mm(x, [codes, scale], spec, bias)``, ``scaled_mm`` of codes of ``quantize_act_static``
or of float8 codes, ``block_mm``. After: the NPU's calls on the constants as they are held, for each part
of N. What ``expand_weights`` put between (the scheme's own constants) is left without a use.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import fx
from torch.fx.node import Argument

from fxquant.errors import GraphCheckError
from fxquant.form import HELD, Form
from fxquant.graph import inserting_before, is_call, value
from fxquant.held import FLIP
from fxquant.output_cuts import cuts_of, follow_cuts
from fxquant.scheme import QuantSpec
from fxquant.targets.npu_build import InGraph, Val, joined
from fxquant.targets.npu_chip import NpuChip
from fxquant.targets.npu_eager import compute_dtype
from fxquant.targets.npu_lowering import Rows
from fxquant.targets.npu_products import PRODUCTS, Family, Part, quantized, static, static_codes, weight_only
from fxquant.targets.npu_schemes import every, width_of
from fxquant.targets.npu_wide import even_parts, parts_at_cuts

aten = torch.ops.aten
fxq = torch.ops.fxquant


@dataclass(slots=True, kw_only=True)
class Dialect:
    """Replaces nodes of one graph; quantizations are shared as the graph shares them."""

    gm: fx.GraphModule
    rows: Rows
    chip: NpuChip
    made: dict[fx.Node, tuple[Val, Val]] = field(default_factory=dict)

    def weight_only(self, node: fx.Node) -> None:
        """Replace a ``weight_only_mm``."""
        x, weight, text, bias = cast("fx.Node", node.args[0]), *node.args[1:]
        spec = QuantSpec.parse(cast("str", text))
        constants = dict(zip(spec.names, cast("list[fx.Node]", weight), strict=True))
        held = held_dtype(constants["codes"], compute_dtype(value(x).dtype))
        self._replace(node, x, "weight only", constants, bias, held, value(x).dtype, spec)

    def scaled(self, node: fx.Node) -> bool:
        """Replace a ``scaled_mm`` that is not of int8 codes with dynamic scales; whether it was one."""
        source = source_of(cast("fx.Node", node.args[0]))
        codes, scale = cast("fx.Node", node.args[1]), cast("fx.Node", node.args[3])
        bias, dtype = node.args[4], cast("torch.dtype", node.args[5])
        if is_call(source, fxq.quantize_act_static.default) and value(codes).dtype == torch.int8:
            family: Family = "static"
        elif value(codes).dtype == torch.float8_e4m3fn:
            family = "fp8"
        else:
            return False
        held = held_dtype(codes, compute_dtype(dtype))
        constants = {"codes": codes, "scale": scale}
        self._replace(node, source, family, constants, bias, held, dtype)
        return True

    def block(self, node: fx.Node) -> None:
        """Replace a ``block_mm``."""
        x_codes, _, _, weight, text, _, bias, dtype = node.args
        spec = QuantSpec.parse(cast("str", text))
        constants = dict(zip(spec.names, cast("list[fx.Node]", weight), strict=True))
        family = block_family(spec)
        out = cast("torch.dtype", dtype)
        source = source_of(cast("fx.Node", x_codes))
        self._replace(node, source, family, constants, bias, compute_dtype(out), out)

    def _replace(
        self,
        node: fx.Node,
        source: fx.Node,
        family: Family,
        constants: dict[str, fx.Node],
        bias: Argument,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        spec: QuantSpec | None = None,
    ) -> None:
        """``source``: the float activation, or what quantizes it."""
        b = InGraph(self.gm, self.rows)
        x = cast("fx.Node", source.args[0]) if family != "weight only" else source
        codes = constants["codes"]
        n = value(codes).shape[0]
        cuts = cuts_of(node)
        parts = self._parts_n(codes, family, n)
        outs: list[Val] = []
        if b.none(x):
            with inserting_before(self.gm, node):
                outs = [b.zeros(x, n, out_dtype)]
        else:
            act = (
                self.quantized(source, family, constants, dtype) if family != "weight only" else (None, None)
            )
            with inserting_before(self.gm, node):
                k = _features(codes)
                if family == "weight only":
                    act = (b.matrix(b.cast(x, dtype), k), None)
                for i, (start, stop) in enumerate(every(n, parts)):
                    part = self._part(b, constants, i, (start, stop), len(parts), dtype, family)
                    if isinstance(bias, fx.Node):
                        part = replace(part, bias=b.narrow(bias, 0, start, stop))
                    if family == "weight only":
                        assert spec is not None
                        out = weight_only(b, act[0], part, spec, k)
                    elif family == "static":
                        given = cast("fx.Node", source.args[1])
                        out = static(b, act[0], replace(part, act_scale=given), dtype)
                    else:
                        out = PRODUCTS[family](b, act[0], act[1], part, dtype)
                    outs.append(b.rows_of(b.cast(out, out_dtype), x))
        at_cuts = len(parts) > 1 and parts == parts_at_cuts(n, max(parts), cuts)
        if not (at_cuts and len(outs) > 1 and follow_cuts(self.gm, node, outs)):
            with inserting_before(self.gm, node):
                whole = joined(b, outs)
            node.replace_all_uses_with(whole)
        self.gm.graph.erase_node(node)

    def _parts_n(self, codes: fx.Node, family: Family, n: int) -> tuple[int, ...]:
        form: Form | None = codes.meta.get("form")
        if form is not None:
            return form.parts_n or (n,)
        # A cut of the weight: in parts as its own shape demands.
        limit = width_of(
            "npu_weight_quant_batchmatmul" if family == "weight only" else "npu_quant_matmul", self.chip
        )
        return even_parts(n, limit) if limit is not None and n > limit else (n,)

    def quantized(
        self, source: fx.Node, family: Family, constants: dict[str, fx.Node], dtype: torch.dtype
    ) -> tuple[Val, Val]:
        """Codes ``[M, K]`` and scales of an activation, made once where the graph makes them."""
        if source not in self.made:
            x = cast("fx.Node", source.args[0])
            with inserting_before(self.gm, source):
                b = InGraph(self.gm, self.rows)
                k = _features(constants["codes"])
                if family == "static":
                    steps = _derived(constants["scale"], "act_scales")
                    if steps is None:
                        given = source.args[1]
                        steps = b.call(aten.expand.default, given, [k])
                    steps = b.narrow(steps, 0, 0, k)  # the weight may be cut
                    self.made[source] = static_codes(b, b.matrix(x, k), steps), None
                else:
                    matrix = b.matrix(x if family.startswith("mx") else b.cast(x, dtype), k)
                    self.made[source] = quantized(b, matrix, family)
        return self.made[source]

    def _part(
        self,
        b: InGraph,
        constants: dict[str, fx.Node],
        index: int,
        span: tuple[int, int],
        count: int,
        dtype: torch.dtype,
        family: Family,
    ) -> Part:
        codes, kn = _codes(b, constants["codes"], index, span, count, family)
        found: dict[str, Val] = {}
        for name, node in constants.items():
            if name == "codes":
                continue
            held = held_constant(b, node, name, dtype) if family == "weight only" else node
            whole = value(held).shape[0]
            if whole == 1:
                found[name] = held
            elif family == "fp8 block":
                found[name] = b.narrow(held, 0, span[0] // 128, -(-span[1] // 128))
            else:
                found[name] = b.narrow(held, 0, *span)
        if family == "static":
            found["deq_scale"] = b.narrow(_deq_scale(b, constants["scale"], dtype), 0, *span)
        return Part(codes=codes, kn=kn, **found)


def block_family(spec: QuantSpec) -> Family:
    """How the weights of a ``block_mm`` are multiplied."""
    if spec.scale != "e8m0":
        return "fp8 block"
    return "mx fp8" if spec.codes == "e4m3" else "mx fp4"


def held_dtype(codes: fx.Node, default: torch.dtype) -> torch.dtype:
    """The dtype of the activations that constants are held for; ``default`` where they are not."""
    form: Form | None = codes.meta.get("form")
    return HELD[form.held] if form is not None and form.held else default


def _features(codes: fx.Node) -> int:
    """K of codes ``[..., K]``, of which two may lie in a byte; that of the activation may be symbolic."""
    val = value(codes)
    return int(val.shape[-1]) * (2 if val.dtype == torch.uint8 else 1)


def source_of(x_codes: fx.Node) -> fx.Node:
    """What made these codes of an activation."""
    node = cast("fx.Node", x_codes.args[0]) if is_call(x_codes, operator.getitem) else x_codes
    if not is_call(node, fxq.quantize_act.default, fxq.quantize_act_static.default):
        raise GraphCheckError(f"{x_codes.format_node()}: these codes are not of a quantize_act")
    return node


def _codes(
    b: InGraph, codes: fx.Node, index: int, span: tuple[int, int], count: int, family: Family
) -> tuple[Val, bool]:
    """A part of the codes as it is held, and whether it is ``[K, n]``."""
    part: Val = codes
    if count > 1 and is_call(codes, aten.cat.default) and len(cast("list[fx.Node]", codes.args[0])) == count:
        part = cast("list[fx.Node]", codes.args[0])[index]
    elif count > 1:
        part = b.narrow(codes, 0, *span)
    if family == "static" and is_call(part, aten.t.default):
        return part.args[0], True
    if family == "weight only":
        part = held_constant(b, part, "codes", None)
    return contiguous(b, part), False


def contiguous(b: InGraph, codes: Val) -> Val:
    """Codes that may be a cut of a weight, and strided: the ops do not take that."""
    return codes if value(codes).is_contiguous() else b.call(aten.contiguous.default, codes)


def held_constant(b: InGraph, node: fx.Node, name: str, dtype: torch.dtype | None) -> Val:
    """A constant as the op takes it: what the graph made the scheme's one of, else made of that here."""
    made = node.meta.get("held")
    if made is not None:
        return made if dtype is None else b.cast(made, dtype)
    if is_call(node, aten.slice.Tensor):  # cut as the scheme's one is
        base = held_constant(b, cast("fx.Node", node.args[0]), name, dtype)
        return b.call(aten.slice.Tensor, base, *node.args[1:])
    if name == "codes":
        packed = value(node).dtype == torch.uint8
        return b.call(aten.bitwise_xor.Scalar, node, FLIP) if packed else node
    assert dtype is not None
    return b.cast(b.call(aten.neg.default, node) if name == "zero" else node, dtype)


def _derived(scale: fx.Node, name: str) -> fx.Node | None:
    """A constant that stands beside the scale of the same weight."""
    base = scale
    while is_call(base, aten.slice.Tensor):
        base = cast("fx.Node", base.args[0])
    found = base.meta.get("derived") or {}
    return cast("fx.Node | None", found.get(name))


def _deq_scale(b: InGraph, scale: fx.Node, dtype: torch.dtype) -> Val:
    if is_call(scale, aten.slice.Tensor) and scale.args[1] == 0:
        base = _deq_scale(b, cast("fx.Node", scale.args[0]), dtype)
        return b.call(aten.slice.Tensor, base, *scale.args[1:])
    made = _derived(scale, "deq_scale")
    if made is None:
        raise GraphCheckError(f"{scale.format_node()}: the weight is not held for a static activation")
    return made
