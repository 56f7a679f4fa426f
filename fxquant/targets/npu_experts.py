"""Products with experts on the NPU: which schemes a chip takes, and their calls of ``npu_grouped_matmul``.

Before: ``grouped_scaled_mm(x_codes [S, K], w_codes [E, N, K], x_scale, w_scale, offsets, dtype)``,
``grouped_block_mm``, or ``grouped_weight_only_mm(x [S, K], [w_codes, w_scale], spec, offsets)``.
After: ``npu_grouped_matmul`` on the transposed view ``[E, K, N]`` of the codes, with cumulative groups.
Rows behind the last group are not written by a device. The rules are in ``npu_expert_rows``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch
from torch import fx
from torch.fx.node import Argument

from fxquant.form import HELD
from fxquant.graph import inserting_before, is_call, value
from fxquant.numerics import INT32_K
from fxquant.scheme import HALF_NAMES, QuantSpec, Scheme
from fxquant.target import Layout, Refusal
from fxquant.targets.npu_build import InGraph, Val
from fxquant.targets.npu_chip import NpuChip
from fxquant.targets.npu_dialect import (
    Dialect,
    block_family,
    contiguous,
    held_constant,
    held_dtype,
    source_of,
)
from fxquant.targets.npu_eager import AS_BF16, compute_dtype
from fxquant.targets.npu_expert_rows import GMM, OP
from fxquant.targets.npu_fakes import E8M0, dtype_code
from fxquant.targets.npu_products import E2M1, PER_INT32, Family, group_of
from fxquant.targets.npu_row import DAV_2201
from fxquant.targets.npu_rules import Operand
from fxquant.targets.npu_schemes import PROBE, Question, calls_of, family_of, refusal_of_calls
from fxquant.targets.npu_wide import Call

aten = torch.ops.aten

ExpertFamily = Family | Literal["int8"]
"""How codes of experts are multiplied: those of single weights, and int8 with dynamic scales."""

F32 = torch.float32


def expert_family(scheme: Scheme) -> ExpertFamily | Refusal:
    """How experts of a scheme are multiplied on an NPU, or why no op has its arithmetic on any chip."""
    if scheme.name == "int8":
        return "int8"
    if scheme.act is not None and scheme.act.static:
        return Refusal(reason="a static activation has one scale for the rows of all experts")
    return family_of(scheme)


def expert_calls(asked: Question, experts: int, chip: NpuChip) -> list[Call] | Refusal:
    """The calls that ``experts`` matrices ``[n, k]`` stand for, or what no table says of them."""
    family = expert_family(asked.scheme)
    if isinstance(family, Refusal):
        return family
    n, k, dtype = asked.n, asked.k, asked.dtype
    group_list = {"group_list": Operand(shape=(experts,), dtype=torch.int64)}
    attributes: dict[str, object] = {"split_item": 3, "group_type": 0, "output_dtype": dtype}
    if family == "int8":
        if k > INT32_K:
            return Refusal(reason=f"K = {k} overflows int32 sums (at most {INT32_K})")
        operands = {
            "x": Operand(shape=(None, k), dtype=torch.int8),
            "weight": Operand(shape=(experts, k, n), dtype=torch.int8, layout="t"),
            "scale": Operand(shape=(experts, n), dtype=_int8_scale(dtype, chip)),
            "per_token_scale": Operand(shape=(None,), dtype=F32),
        }
        quantize: Call = ("npu_dynamic_quant", {"input": Operand(shape=(None, k), dtype=dtype)}, {})
        return [quantize, (OP, operands | group_list, attributes)]
    single = calls_of(asked)
    if isinstance(single, Refusal):
        return single
    if family == "weight only":
        found = _weight_only(asked, experts, chip)
        return found if isinstance(found, Refusal) else [(OP, found | group_list, attributes)]
    # Codes and scales of one weight, with an axis of experts.
    quantize, (_, one, options) = single
    operands = {"x": one["x1"], "per_token_scale": one["pertoken_scale"]}
    for name, new in (("x2", "weight"), ("scale", "scale")):
        operands[new] = replace(one[name], shape=(experts, *one[name].shape))
    for name, new in _ATTRIBUTES.items():
        if name in options:
            attributes[new] = options[name]
    return [quantize, (OP, operands | group_list, attributes)]


_ATTRIBUTES = {
    "scale_dtype": "scale_dtype",
    "pertoken_scale_dtype": "per_token_scale_dtype",
    "x1_dtype": "x_dtype",
    "x2_dtype": "weight_dtype",
}
"""Attributes of ``npu_quant_matmul``, and what they are called here."""


def _int8_scale(dtype: torch.dtype, chip: NpuChip) -> torch.dtype:
    """The dtype of the weight's scales beside those of rows: A2 and A3 want the result's for bfloat16."""
    return torch.bfloat16 if dtype == torch.bfloat16 and chip.family in DAV_2201 else F32


def _weight_only(asked: Question, experts: int, chip: NpuChip) -> dict[str, Operand] | Refusal:
    n, k, spec = asked.n, asked.k, asked.scheme.weight
    assert spec is not None
    group = group_of(spec, k)
    if group and k % group:
        return Refusal(reason=f"K = {k} is not a multiple of {group}, and groups are equal ({GMM})")
    if spec.zero and group and chip.family in DAV_2201:
        return Refusal(reason=f"{OP} on {chip.family} takes a zero point per channel, not per group ({GMM})")
    weight = Operand(shape=(experts, k, n), dtype=torch.int8, layout="t")
    if spec.packed:
        weight = Operand(shape=(experts, k // PER_INT32, n), dtype=torch.int32, layout="t")
    shape = (experts, k // group, n) if group else (experts, n)
    scale = Operand(shape=shape, dtype=asked.dtype, layout="t" if group else "nd")
    operands = {"x": Operand(shape=(None, k), dtype=asked.dtype), "weight": weight, "antiquant_scale": scale}
    if spec.zero or chip.family in DAV_2201:
        operands["antiquant_offset"] = scale
    return operands


def refusal_of_experts(asked: Question, experts: int, chip: NpuChip) -> Refusal | None:
    """Why ``chip`` does not take products with such experts; None where it does."""
    return refusal_of_calls(expert_calls(asked, experts, chip), chip)


def refusal_of_scheme(scheme: Scheme, chip: NpuChip) -> Refusal | None:
    """Why ``chip`` does not take experts of ``scheme`` at all, in float16 or bfloat16."""
    n, k = PROBE
    refused = None
    for dtype in HELD.values():
        asked = Question(scheme=scheme, n=n, k=k, dtype=dtype)
        refused = refusal_of_experts(asked, 2, chip)
        if refused is None:
            return None
    return refused


def arrange_experts(
    asked: Question, experts: int, chip: NpuChip, *, full: bool, nz: bool
) -> Layout | Refusal:
    """Codes of experts are ``[E, N, K]``, whatever was asked; ``full``: the model is float32."""
    refused = refusal_of_experts(asked, experts, chip)
    if refused is not None:
        return refused
    notes = ["experts apart"]
    notes += [AS_BF16] if full else []
    notes += [f"not in FRACTAL_NZ: {OP} is used with ND alone"] if nz else []
    held = HALF_NAMES[asked.dtype] if expert_family(asked.scheme) == "weight only" else ""
    return Layout(held=held, reason="; ".join(notes))


@dataclass(slots=True, kw_only=True)
class Experts:
    """Replaces the dialect's products with experts in the graph of ``dialect``, in the order of the graph."""

    dialect: Dialect
    zeros: dict[tuple[tuple[int, ...], torch.dtype], Val] = field(default_factory=dict)
    """Offsets of symmetric codes, one for all weights of a shape."""
    ends: dict[fx.Node, Val] = field(default_factory=dict)
    """Offsets of rows as the op takes them, one for all products with them."""

    def replace_all(self) -> int:
        """Replace them; how many there were."""
        fxq = torch.ops.fxquant
        rules = {
            fxq.grouped_scaled_mm.default: self.scaled,
            fxq.grouped_block_mm.default: self.block,
            fxq.grouped_weight_only_mm.default: self.weight_only,
        }
        nodes = [node for node in self.dialect.gm.graph.nodes if is_call(node, *rules)]
        for node in nodes:
            rules[node.target](node)
        return len(nodes)

    def scaled(self, node: fx.Node) -> None:
        """Replace a ``grouped_scaled_mm``, of int8 or float8 codes."""
        x_codes, codes, x_scale, scale, offsets = cast("tuple[fx.Node, ...]", node.args[:5])
        dtype = compute_dtype(node.args[5])
        if value(codes).dtype != torch.int8:
            self._floats(node, x_codes, {"codes": codes, "scale": scale}, "fp8", offsets, dtype)
            return
        with inserting_before(self.dialect.gm, node):
            b = self._build()
            factors = {
                "scale": b.cast(b.call(aten.squeeze.dim, scale, -1), _int8_scale(dtype, self.dialect.chip)),
                "per_token_scale": b.call(aten.reshape.default, x_scale, [-1]),
            }
            out = self._product(b, node, x_codes, codes, offsets, dtype, factors)
        self._give(node, out)

    def block(self, node: fx.Node) -> None:
        """Replace a ``grouped_block_mm``."""
        x_codes, _, _, weight, text, _, offsets, out = node.args
        spec = QuantSpec.parse(cast("str", text))
        constants = dict(zip(spec.names, cast("list[fx.Node]", weight), strict=True))
        family = block_family(spec)
        given = cast("fx.Node", x_codes), constants, family, cast("fx.Node", offsets)
        self._floats(node, *given, compute_dtype(out))

    def weight_only(self, node: fx.Node) -> None:
        """Replace a ``grouped_weight_only_mm``."""
        x, weight, text, offsets = cast("tuple[fx.Node, list[fx.Node], str, fx.Node]", node.args)
        spec = QuantSpec.parse(text)
        constants = dict(zip(spec.names, weight, strict=True))
        dtype = held_dtype(constants["codes"], compute_dtype(value(node).dtype))
        with inserting_before(self.dialect.gm, node):
            b = self._build()
            codes = contiguous(b, held_constant(b, constants["codes"], "codes", None))
            if spec.packed:  # as for single weights: eight codes along K are an int32
                codes = b.call(aten.view.dtype, codes, torch.int32)
            factors = {
                role: _by_column(b, held_constant(b, constants[name], name, dtype))
                for name, role in (("scale", "antiquant_scale"), ("zero", "antiquant_offset"))
                if name in constants
            }
            if not spec.zero and self.dialect.chip.family in DAV_2201:
                factors["antiquant_offset"] = self._zeros(b, factors["antiquant_scale"])
            out = self._product(b, node, b.cast(x, dtype), codes, offsets, dtype, factors)
        self._give(node, out)

    def _floats(
        self,
        node: fx.Node,
        x_codes: fx.Node,
        constants: dict[str, fx.Node],
        family: Family,
        offsets: fx.Node,
        dtype: torch.dtype,
    ) -> None:
        """Codes that are floats of 8 or 4 bits."""
        rows, factors, more = cast("Val", x_codes), {}, {}
        if not self.dialect.rows.none(x_codes):
            rows, factors["per_token_scale"] = self.dialect.quantized(
                source_of(x_codes), family, constants, dtype
            )
        with inserting_before(self.dialect.gm, node):
            b, scale = self._build(), cast("Val", constants["scale"])
            if family == "fp8":
                scale = b.call(aten.squeeze.dim, scale, -1)
            elif family == "fp8 block":
                scale = b.call(aten.transpose.int, scale, 1, 2)
            else:
                experts, n, blocks = value(scale).shape
                pairs = b.call(aten.view.default, scale, [experts, n, blocks // 2, 2])
                scale = b.call(aten.transpose.int, pairs, 1, 2)
                more = {"scale_dtype": E8M0, "per_token_scale_dtype": E8M0}
            if family == "mx fp4":
                more |= {"x_dtype": E2M1, "weight_dtype": E2M1}
            factors["scale"] = scale
            out = self._product(b, node, rows, constants["codes"], offsets, dtype, factors, more)
        self._give(node, out)

    def _build(self) -> InGraph:
        return InGraph(self.dialect.gm, self.dialect.rows)

    def _zeros(self, b: InGraph, like: Val) -> Val:
        shape, dtype = tuple(int(size) for size in b.value(like).shape), b.value(like).dtype
        if (shape, dtype) not in self.zeros:
            self.zeros[shape, dtype] = b.call(aten.new_zeros.default, like, list(shape))
        return self.zeros[shape, dtype]

    def _product(
        self,
        b: InGraph,
        node: fx.Node,
        x: Val,
        codes: Val,
        offsets: fx.Node,
        dtype: torch.dtype,
        factors: Mapping[str, Val],
        more: Mapping[str, Argument] | None = None,
    ) -> Val:
        """``x [S, K]`` times codes ``[E, N, K]`` in ``dtype``, scaled by ``factors``; cast as ``node`` is."""
        out_dtype = value(node).dtype
        if b.none(x):
            return b.zeros(x, int(value(node).shape[1]), out_dtype)
        if offsets not in self.ends:
            self.ends[offsets] = b.cast(offsets, torch.int64)
        turned = b.call(aten.transpose.int, contiguous(b, codes), 1, 2)
        made = b.npu(
            OP, x, [x], [turned], **{name: [factor] for name, factor in factors.items()},
            group_list=self.ends[offsets], split_item=3, group_type=0, group_list_type=0,
            output_dtype=dtype_code(dtype), **(more or {}),
        )  # fmt: skip
        (out,) = b.items(made, 1)
        return b.cast(out, out_dtype)

    def _give(self, node: fx.Node, out: Val) -> None:
        node.replace_all_uses_with(out)
        self.dialect.gm.graph.erase_node(node)


def _by_column(b: InGraph, parameter: Val) -> Val:
    """``[E, n, G]`` as the op takes it: ``[E, G, n]``, or ``[E, n]`` of one for each row."""
    if b.value(parameter).shape[-1] == 1:
        return b.call(aten.squeeze.dim, parameter, -1)
    return b.call(aten.transpose.int, parameter, 1, 2)
