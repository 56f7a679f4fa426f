"""The Ascend NPU as a target: layouts after the 65535 limit, and lowering to its operators.

Rules are in ``npu_table.py`` with their sources; none of them was run on hardware.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Literal, cast

import torch
from torch import fx

from fxquant.errors import ConfigError, RefusedError
from fxquant.graph import is_call, value
from fxquant.grouped_ops import grouped_scaled_mm as _  # noqa: F401 - registers the op
from fxquant.numerics import INT32_K
from fxquant.output_cuts import cuts_of
from fxquant.scheme import SCHEMES, Scheme
from fxquant.target import Kernel, Layout, Refusal, Target
from fxquant.targets.npu_chip import NpuChip, choose_chip, parse_chip
from fxquant.targets.npu_dialect import Dialect
from fxquant.targets.npu_eager import (
    AS_BF16,
    compute_dtype,
)  # and registers the op for calls outside of graphs
from fxquant.targets.npu_expert_rows import OP as EXPERTS_OP
from fxquant.targets.npu_experts import Experts, arrange_experts, refusal_of_scheme
from fxquant.targets.npu_lowering import (
    Rows,
    WeightParts,
    constant_parts,
    lower_quantize_act,
    lower_scaled_mm,
)
from fxquant.targets.npu_schemas import ensure_schemas, planning_for
from fxquant.targets.npu_schemes import WEIGHT_ONLY, Question, arrange_scheme, chips_of, taken_dtypes
from fxquant.targets.npu_wide import MATMUL, POLICIES, Policy, WideDecision, decide, in_nz

aten = torch.ops.aten
fxq = torch.ops.fxquant

ACT = "fxquant::quantize_act"
MM = "fxquant::scaled_mm"

_NO_CODES = Refusal(reason="no codes, so no op that multiplies with them")


def npu_target(target: object = None, *, wide: str = "auto", weight_format: str = "nd") -> Target:
    """The table of a chip: ``"Ascend910B2,cann=9.0"``, an ``NpuChip``, or None for this process's device."""
    if target is not None and not isinstance(target, (str, NpuChip)):
        raise ConfigError(
            f"`target` for backend 'npu' is a text such as 'Ascend910B2,cann=9.0', got {target!r}"
        )
    if wide not in POLICIES:
        raise ConfigError(f"wide={wide!r}: expected one of {', '.join(POLICIES)}")
    chip = parse_chip(target) if isinstance(target, str) else choose_chip(target)
    ensure_schemas()
    policy: Policy = wide
    matmul = npu_kernel(SCHEMES["int8"], chip)
    assert isinstance(matmul, Kernel)
    op = matmul.op
    kernels = {
        ACT: Kernel(op=op if chip.family == "310P" else "npu::npu_dynamic_quant", reason=_why(chip)),
        MM: matmul,
    }
    for scheme in SCHEMES.values():
        found = npu_kernel(scheme, chip)
        if isinstance(found, Kernel):
            kernels.setdefault(scheme.op, found)
        found = grouped_kernel(scheme, chip)
        if isinstance(found, Kernel):
            kernels.setdefault(scheme.grouped_op, found)
    return Target(
        name=str(chip),
        device_type="npu",
        kernels=kernels,
        choose=functools.partial(npu_kernel, chip=chip),
        choose_grouped=functools.partial(grouped_kernel, chip=chip),
        arrange=functools.partial(arrange, chip=chip, policy=policy, nz=weight_format == "nz"),
        lower=functools.partial(lower, chip=chip, policy=policy),
    )


def _why(chip: NpuChip) -> str:
    return f"{chip.soc} with CANN {chip.cann_text}; rules not verified on hardware"


def grouped_kernel(scheme: Scheme, chip: NpuChip) -> Kernel | Refusal:
    """What multiplies with experts of ``scheme``; outside of graphs the reference runs."""
    if scheme.weight is None:
        return _NO_CODES
    refused = refusal_of_scheme(scheme, chip)
    return refused or Kernel(op=f"npu::{EXPERTS_OP}", reason=_why(chip), eager=scheme.grouped_op)


def npu_kernel(scheme: Scheme, chip: NpuChip) -> Kernel | Refusal:
    """What multiplies with weights of ``scheme`` on ``chip``, or why nothing does."""
    if scheme.weight is None:
        return _NO_CODES
    if scheme.name != "int8":
        return _other_kernel(scheme, chip)
    op = "npu::npu_quant_matmul_dequant" if chip.family == "310P" else "npu::npu_quant_matmul"
    return Kernel(op=op, reason=_why(chip), eager="fxquant_npu::linear")


def _other_kernel(scheme: Scheme, chip: NpuChip) -> Kernel | Refusal:
    """The same for schemes other than dynamic int8: the table is asked with a weight of a plain size."""
    taken = taken_dtypes(scheme, chip)
    dtypes = [str(dtype).removeprefix("torch.") for dtype, refusal in taken.items() if refusal is None]
    if not dtypes:
        refused = [refusal for refusal in taken.values() if refusal is not None][-1]
        others = chips_of(scheme)
        return Refusal(reason=f"needs {' or '.join(others)}: {refused.reason}") if others else refused
    note = "" if len(dtypes) == len(taken) else f"{', '.join(dtypes)} alone; "
    op = MATMUL if scheme.act is not None else WEIGHT_ONLY
    return Kernel(op=f"npu::{op}", reason=f"{note}{_why(chip)}", eager="fxquant_npu::linear")


def arrange(
    *,
    scheme: Scheme,
    n: int,
    k: int,
    dtype: object,
    cuts: tuple[int, ...] = (),
    bias: torch.dtype | None = None,
    experts: int = 0,
    chip: NpuChip,
    policy: Policy,
    nz: bool = False,
) -> Layout | Refusal:
    """How the codes of a weight ``[n, k]`` lie on ``chip``; ``nz``: in FRACTAL_NZ where that is taken."""
    asked = Question(scheme=scheme, n=n, k=k, dtype=compute_dtype(dtype), bias=bias)
    if experts:
        return arrange_experts(asked, experts, chip, full=dtype is torch.float32, nz=nz)
    if scheme.name != "int8":
        layout = arrange_scheme(asked, cuts=cuts, chip=chip, policy=policy, nz=nz)
        if isinstance(layout, Refusal) or layout.host or dtype is not torch.float32:
            return layout
        return replace(layout, reason="; ".join(part for part in (layout.reason, AS_BF16) if part))
    decision = decide(n, k, chip=chip, policy=policy, dtype=compute_dtype(dtype), cuts=cuts, bias_dtype=bias)
    if nz:
        decision = in_nz(decision, chip, bias=bias is not None)
    if decision.kind == "host":
        return Layout(host=True, reason=f"host: {decision.reason}", rejected=decision.rejected)
    if not decision.quantized:
        return Refusal(reason=f"{decision.kind}: {decision.reason}")
    reasons = [] if decision.kind == "as is" else [f"{decision.kind}: {decision.reason}"]
    reasons += [decision.format_reason] if decision.format_reason else []
    if dtype is torch.float32:
        reasons.append(AS_BF16)
    return Layout(
        kn=decision.layout == "kn",
        nz=decision.nz,
        parts_n=decision.parts_n if len(decision.parts_n) > 1 else (),
        parts_k=decision.parts_k if len(decision.parts_k) > 1 else (),
        reason="; ".join(reasons),
        rejected=decision.rejected if decision.kind != "as is" else (),
    )


def lower(gm: fx.GraphModule, proven: bool = False, *, chip: NpuChip, policy: Policy) -> int:
    """Replace the dialect's ops by the NPU's; the number of matmuls and quantizations replaced."""
    ensure_schemas()  # an unpickled model's process may have planned nothing
    rows, count = Rows(proven=proven), 0
    with planning_for(chip):
        others = Dialect(gm=gm, rows=rows, chip=chip)
        for node in gm.graph.find_nodes(op="call_function", target=fxq.weight_only_mm.default):
            others.weight_only(node)
            count += 1
        for node in gm.graph.find_nodes(op="call_function", target=fxq.block_mm.default):
            others.block(node)
            count += 1
        for node in gm.graph.find_nodes(op="call_function", target=fxq.scaled_mm.default):
            if others.scaled(node):
                count += 1
                continue
            decision = _decision(node, chip, policy)
            lower_scaled_mm(gm, node, _parts(gm, node, decision), decision, rows)
            count += 1
        count += Experts(dialect=others).replace_all()
        count += len(others.made)
        for node in gm.graph.find_nodes(op="call_function", target=fxq.quantize_act.default):
            if node in others.made:
                continue
            for item in [user for user in node.users if not user.users]:  # npu_quant_matmul_dequant's
                gm.graph.erase_node(item)
            if not node.users:
                gm.graph.erase_node(node)
                continue
            lower_quantize_act(gm, node, compute_dtype(value(node.args[0]).dtype), rows)
            count += 1
    return count


def _decision(node: fx.Node, chip: NpuChip, policy: Policy) -> WideDecision:
    """What was planned for the weight of a ``scaled_mm``: its form holds the layout and the parts."""
    codes, bias = cast("fx.Node", node.args[1]), node.args[4]
    n, k = (int(size) for size in value(codes).shape)
    bias_dtype = value(bias).dtype if isinstance(bias, fx.Node) else None
    decision = decide(
        n,
        k,
        chip=chip,
        policy=policy,
        dtype=compute_dtype(node.args[5]),
        bias_dtype=bias_dtype,
        cuts=cuts_of(node),
    )
    if not decision.quantized and decision.kind == "float":
        raise RefusedError(
            f"{node.format_node()}: the weight is held as codes, and {chip} cannot use them here: "
            f"{decision.reason}. Keep the layer float: ignore=[...] with its name"
        )
    form = codes.meta.get("form")
    if form is None:  # a cut of the weight: as its own shape demands
        return decision
    layout = "kn" if form.kn else ("nk.t" if decision.op == MATMUL else "nk")
    sums = decision.sums or (torch.int32 if k <= INT32_K else torch.float32)
    return replace(
        decision,
        op=decision.op if decision.quantized else MATMUL,
        layout=cast("Literal['kn', 'nk.t', 'nk']", layout),
        parts_n=form.parts_n or (n,),
        follows_cuts=decision.follows_cuts and decision.parts_n == form.parts_n,
        parts_k=form.parts_k or (k,),
        sums=sums if len(form.parts_k) > 1 else None,
    )


def _parts(gm: fx.GraphModule, node: fx.Node, decision: WideDecision) -> WeightParts:
    """The constants of the weight, as they lie; scale and bias cut with them."""
    codes, scale, bias = (cast("fx.Node", node.args[i]) for i in (1, 3, 4))
    with gm.graph.inserting_before(node):
        made = constant_parts(gm, codes, scale, bias, decision)
        held = _held(codes, decision)
    if held is None:
        return made
    return WeightParts(codes=held, scales=made.scales, biases=made.biases)


def _held(codes: fx.Node, decision: WideDecision) -> tuple[tuple[fx.Node, ...], ...] | None:
    """The constants behind ``cat`` and ``t``, in the layout of the decision; None if they are not there."""
    rows = codes.args[0] if is_call(codes, aten.cat.default) and len(decision.parts_n) > 1 else [codes]
    grid = []
    for row in cast("list[fx.Node]", rows):
        wide = is_call(row, aten.cat.default) and len(decision.parts_k) > 1
        parts = cast("list[fx.Node]", row.args[0]) if wide else [row]
        if decision.layout == "kn":
            if not all(is_call(part, aten.t.default) for part in parts):
                return None
            parts = [cast("fx.Node", part.args[0]) for part in parts]
        grid.append(tuple(parts))
    fits = [len(row) for row in grid] == [len(decision.parts_k)] * len(decision.parts_n)
    return tuple(grid) if fits and all(part.op == "placeholder" for row in grid for part in row) else None
