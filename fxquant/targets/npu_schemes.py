"""Which schemes other than dynamic int8 a chip takes, and how their weights lie: the table is asked."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from fxquant.numerics import INT32_K
from fxquant.scheme import HALF_NAMES, Scheme
from fxquant.target import Layout, Refusal
from fxquant.targets.npu_chip import NpuChip
from fxquant.targets.npu_products import BLOCK_GROUPS, MX_GROUPS, PER_INT32, Family, group_of
from fxquant.targets.npu_rules import Operand, admits
from fxquant.targets.npu_table import LIMITS
from fxquant.targets.npu_wide import Call, Policy, even_parts, parts_at_cuts

MATMUL = "npu_quant_matmul"
WEIGHT_ONLY = "npu_weight_quant_batchmatmul"
E4M3, F32 = torch.float8_e4m3fn, torch.float32

PROBE = (256, 512)
"""N and K of a weight that every chip takes if it takes the scheme at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A weight ``[n, k]`` of a scheme; ``dtype``: float16 or bfloat16, what is computed in."""

    scheme: Scheme
    n: int
    k: int
    dtype: torch.dtype
    bias: torch.dtype | None = None
    layout: str = "nd"


FAMILIES: Mapping[tuple[str, str], Family] = {
    ("int8[1,*]", "int8[*,*]static"): "static",
    ("e4m3[1,*]", "e4m3[1,*]dyn"): "fp8",
    ("e4m3[128,128]", "e4m3[1,128]dyn"): "fp8 block",
    ("e4m3[1,32]e8m0", "e4m3[1,32]e8m0dyn"): "mx fp8",
    ("e2m1[1,32]e8m0", "e2m1[1,32]e8m0dyn"): "mx fp4",
}
"""How codes of a weight and an activation are multiplied. Weights alone: int8 and int4."""

_V5 = "ops-nn aclnnQuantMatmulV5.md v9.1.0 :799-946"

WITHOUT_OP: Mapping[tuple[str, str], str] = {
    ("int4[1,128]", "int8[1,*]dyn"): f"{MATMUL} of int8 and int4 codes takes scales for groups of 256 along "
    "K, not 128 (M:4186), on A2 and A3 alone",
    ("e4m3[*,*]", "e4m3[*,*]dyn"): "npu_dynamic_quant gives float8 codes with a scale per token; one for a "
    "whole activation is not documented (D:4654-4754, ops-nn aclnnDynamicQuantV2.md)",
    ("e2m1[1,16]e4m3", "e2m1[1,16]e4m3dyn"): f"{MATMUL} takes fp4 codes with e8m0 scales for 32 along K, not "
    f"e4m3 scales for 16 ({_V5})",
}
"""Why no op has the arithmetic of a scheme, whatever the chip."""


def family_of(scheme: Scheme) -> Family | Refusal:
    """How a scheme is multiplied on an NPU, or why no op has its arithmetic on any chip."""
    weight, act = scheme.weight, scheme.act
    assert weight is not None
    if act is None and not weight.type.is_float:
        return "weight only"
    if act is None:
        return Refusal(reason=f"{WEIGHT_ONLY} takes int8 and int4 codes, not {weight.codes} (D:5409-5470)")
    key = (str(weight.plain), str(act))
    if key in FAMILIES:
        return FAMILIES[key]
    return Refusal(reason=WITHOUT_OP.get(key, f"no row of the table has {weight.plain} codes with {act}"))


def calls_of(asked: Question) -> list[Call] | Refusal:
    """The calls that a weight stands for, or what no table says of it."""
    family = family_of(asked.scheme)
    if isinstance(family, Refusal):
        return family
    if family == "weight only":
        return _weight_only(asked)
    if family == "static":
        return _static(asked)
    return _floats(asked, family)


def _weight_only(asked: Question) -> list[Call] | Refusal:
    n, k, spec = asked.n, asked.k, asked.scheme.weight
    assert spec is not None
    weight = Operand(shape=(k, n), dtype=torch.int8, layout="t")
    if spec.packed:
        if k % PER_INT32:
            return Refusal(
                reason=f"K = {k} is not a multiple of 8, and eight int4 codes are an int32 (D:5009)"
            )
        if n == 1 or k == PER_INT32:
            return Refusal(reason=f"{n} x {k} int4 codes: N and K / 8 of 1 are not taken transposed (D:5470)")
        weight = Operand(shape=(k // PER_INT32, n), dtype=torch.int32, layout="t")
    group = group_of(spec, k)
    scale = Operand(shape=(-(-k // group), n) if group else (n,), dtype=asked.dtype, layout="t")
    operands = {"x": Operand(shape=(None, k), dtype=asked.dtype), "weight": weight, "antiquant_scale": scale}
    if spec.zero:
        operands["antiquant_offset"] = scale
    if asked.bias is not None:
        wanted = F32 if asked.dtype == torch.bfloat16 else torch.float16
        operands["bias"] = Operand(shape=(n,), dtype=wanted)
    return [(WEIGHT_ONLY, operands, {"antiquant_group_size": group} if group else {})]


def _static(asked: Question) -> list[Call] | Refusal:
    n, k, dtype = asked.n, asked.k, asked.dtype
    if k > INT32_K:
        return Refusal(reason=f"K = {k} overflows int32 sums (at most {INT32_K})")
    x = {"input": Operand(shape=(None, k), dtype=dtype), "scales": Operand(shape=(k,), dtype=F32)}
    quantize: Call = ("npu_quantize", dict(x), {"dtype": 12, "axis": 1})
    operands = {
        "x1": Operand(shape=(None, k), dtype=torch.int8),
        "x2": Operand(shape=(k, n), dtype=torch.int8, layout=asked.layout),
    }
    packed = dtype == torch.float16 and asked.bias is None
    operands["scale"] = Operand(shape=(n,), dtype=torch.int64 if packed else F32)
    if asked.bias is not None:
        operands["bias"] = Operand(shape=(n,), dtype=dtype if asked.bias == dtype else F32)
        if dtype == torch.float16:
            operands["pertoken_scale"] = Operand(shape=(None,), dtype=F32)
    calls: list[Call] = [quantize, (MATMUL, operands, {"output_dtype": dtype})]
    if packed:
        calls.append(("npu_trans_quant_param", {"scale": Operand(shape=(n,), dtype=F32)}, {}))
    return calls


def _floats(asked: Question, family: Family) -> list[Call] | Refusal:
    n, k, dtype = asked.n, asked.k, asked.dtype
    x = Operand(shape=(None, k), dtype=dtype)
    codes, columns = (torch.uint8, -(-k // 2)) if family == "mx fp4" else (E4M3, k)
    operands = {
        "x1": Operand(shape=(None, columns), dtype=codes),
        "x2": Operand(shape=(columns, n), dtype=codes, layout="t"),
    }
    attributes: dict[str, object] = {"output_dtype": dtype}
    if asked.bias is not None and family != "fp8 block":
        operands["bias"] = Operand(shape=(n,), dtype=F32)
    if family == "fp8":
        operands["scale"] = Operand(shape=(n,), dtype=F32)
        operands["pertoken_scale"] = Operand(shape=(None,), dtype=F32)
        quantize: Call = ("npu_dynamic_quant", {"input": x}, {"dst_type": E4M3})
    elif family == "fp8 block":
        grid = -(-k // 128)
        operands["scale"] = Operand(shape=(grid, -(-n // 128)), dtype=F32, layout="t")
        operands["pertoken_scale"] = Operand(shape=(None, grid), dtype=F32)
        attributes |= {"group_sizes": BLOCK_GROUPS, "output_dtype": F32 if asked.bias else dtype}
        quantize = ("npu_dynamic_block_quant", {"x": x}, {"dst_type": E4M3})
    else:
        if -(-k // 32) % 2:
            return Refusal(
                reason=f"K = {k} has an odd number of blocks of 32, and exponents come in pairs (M:5109)"
            )
        pairs = -(-k // 64)
        operands["scale"] = Operand(shape=(pairs, n, 2), dtype=torch.float8_e8m0fnu, layout="strided")
        operands["pertoken_scale"] = Operand(shape=(None, pairs, 2), dtype=torch.uint8)
        e8m0 = torch.float8_e8m0fnu
        attributes |= {"group_sizes": MX_GROUPS, "scale_dtype": e8m0, "pertoken_scale_dtype": e8m0}
        kind: object = E4M3
        if family == "mx fp4":
            if k % 2:
                return Refusal(reason=f"K = {k} is odd, and two fp4 codes are a byte (M:5109)")
            if n == 1 or k == 2:
                return Refusal(reason=f"{n} x {k} fp4 codes: N and K / 2 of 1 do not lie transposed ({_V5})")
            kind = "float4_e2m1fn_x2"
            attributes |= {"x1_dtype": kind, "x2_dtype": kind}
        quantize = ("npu_dynamic_mx_quant", {"input": x}, {"dst_type": kind})
    return [quantize, (MATMUL, operands, attributes)]


def refusal_of(asked: Question, chip: NpuChip) -> Refusal | None:
    """Why ``chip`` does not take a weight; None where it does."""
    return refusal_of_calls(calls_of(asked), chip)


def refusal_of_calls(calls: list[Call] | Refusal, chip: NpuChip) -> Refusal | None:
    """Why ``chip`` does not take one of the calls; None where it takes all."""
    if isinstance(calls, Refusal):
        return calls
    for op, operands, attributes in calls:
        found = admits(op, operands, chip, **attributes)
        if isinstance(found, Refusal):
            return found
    return None


def taken_dtypes(scheme: Scheme, chip: NpuChip) -> dict[torch.dtype, Refusal | None]:
    """For each dtype that ops compute in, why ``chip`` does not take weights of ``scheme``."""
    n, k = PROBE
    return {
        dtype: refusal_of(Question(scheme=scheme, n=n, k=k, dtype=dtype), chip)
        for dtype in (torch.bfloat16, torch.float16)
    }


@functools.cache
def chips_of(scheme: Scheme) -> tuple[str, ...]:
    """The families that take ``scheme``."""
    chips = (NpuChip(soc=family, family=family, cann=(9, 1, 0)) for family in ("A2", "A3", "950", "310P"))
    return tuple(chip.family for chip in chips if None in taken_dtypes(scheme, chip).values())


def arrange_scheme(
    asked: Question, *, cuts: tuple[int, ...], chip: NpuChip, policy: Policy, nz: bool
) -> Layout | Refusal:
    """How the codes of a weight lie on ``chip``: in one part, or in parts of N that the ops take."""
    family = family_of(asked.scheme)
    if isinstance(family, Refusal):
        return family
    held = HALF_NAMES[asked.dtype] if family in ("weight only", "static") else ""
    layout = Layout(held=held, kn=family == "static")
    whole = refusal_of(asked, chip)
    reasons = []
    if whole is not None:
        if policy == "host":
            return Layout(host=True, reason=f'host: asked for: wide="host"; {whole.reason}')
        found = _over_the_limit(asked, whole, cuts, chip, policy)
        if isinstance(found, Refusal):
            return found
        layout = replace(found, held=held)
        reasons.append(layout.reason)
    if nz:
        why_not = _refuses_nz(asked, layout.parts_n or (asked.n,), chip, family)
        reasons.append(f"not in FRACTAL_NZ: {why_not}" if why_not else "cast to FRACTAL_NZ")
        layout = replace(layout, nz=not why_not)
    return replace(layout, reason="; ".join(reasons))


def _over_the_limit(
    asked: Question, whole: Refusal, cuts: tuple[int, ...], chip: NpuChip, policy: Policy
) -> Layout | Refusal:
    """The layout of a weight that is refused as it is, for the reason ``whole``."""
    rejected: tuple[tuple[str, str], ...] = (("as is", whole.reason),)
    kn = family_of(asked.scheme) == "static"
    if policy == "transpose":
        turned = refusal_of(replace(asked, layout="t"), chip) if kn else whole
        if turned is None:
            reason = "transpose: kept [n, k] and passed as the .t() view, whose innermost axis is K"
            return Layout(reason=reason, rejected=rejected)
        rejected += (("transpose", turned.reason),)
    parts, how = parts_of(asked, chip, cuts)
    refused = None if len(parts) > 1 else whole
    for n in parts:
        refused = refused or refusal_of(replace(asked, n=n), chip)
    if refused is not None or policy == "float":
        return Refusal(reason=f"float: {(refused or whole).reason}")
    return Layout(kn=kn, parts_n=parts, reason=f"split: {how}", rejected=rejected)


def parts_of(asked: Question, chip: NpuChip, cuts: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The fewest parts of N that the op takes, at the cuts of the graph where that needs no more."""
    limit = width_of(MATMUL if asked.scheme.act is not None else WEIGHT_ONLY, chip)
    if limit is None or asked.n <= limit:
        return (asked.n,), ""
    even, at_cuts = even_parts(asked.n, limit), parts_at_cuts(asked.n, limit, cuts)
    if at_cuts is not None and len(at_cuts) == len(even):
        return at_cuts, f"parts of at most {limit}, at the cuts of the graph: nothing is concatenated"
    return even, f"parts of at most {limit}"


def width_of(op: str, chip: NpuChip) -> int | None:
    """The largest N that ``op`` takes where nothing waives it; None: no limit is known."""
    found = [
        limit.most
        for limit in LIMITS
        if limit.op == op and chip.family in limit.chips and limit.most is not None
        if limit.axis == "N" or (limit.axis == "inner" and limit.operand == "x2")
    ]
    return min(found, default=None)


def _refuses_nz(asked: Question, parts: tuple[int, ...], chip: NpuChip, family: Family) -> str:
    """Why codes are not cast to FRACTAL_NZ; empty if they are."""
    if family == "weight only":
        return f"{WEIGHT_ONLY} takes it in graph mode alone (D:5463)"
    if family != "static":
        return f"{MATMUL} of float8 codes is known for ND alone"
    for n in parts:
        found = refusal_of(replace(asked, n=n, layout="nz"), chip)
        if found is not None:
            return found.reason
    return ""


def every(n: int, parts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Start and stop of each part of N."""
    start = 0
    for size in parts or (n,):
        yield start, start + size
        start += size
