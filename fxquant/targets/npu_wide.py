"""What becomes of a weight ``[n, k]`` on an NPU: as it is, in parts, transposed, on the host, float.

Decided when planning, from shape and target alone, by asking the table for each part. Sizes are those
of one rank. Parts of N are ranges of output features, whose results are concatenated; parts of K are
ranges of input features, whose int32 results are summed before the scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fxquant.errors import ConfigError
from fxquant.numerics import INT32_K
from fxquant.target import Refusal
from fxquant.targets.npu_chip import NpuChip
from fxquant.targets.npu_rules import Admitted, Operand, admits, inner_limit

Kind = Literal["as is", "split", "transpose", "host", "float"]
Policy = Literal["auto", "split", "transpose", "host", "float"]
Layout = Literal["kn", "nk.t", "nk"]

POLICIES: tuple[Policy, ...] = ("auto", "split", "transpose", "host", "float")
ALIGNED = 16
"""Parts start at multiples of this where that needs no more parts (rows of a FRACTAL_NZ tile)."""

MATMUL = "npu_quant_matmul"
DEQUANT = "npu_quant_matmul_dequant"
FLOAT = "aten.linear"
_ON_310P = "310P has no per-token npu_quant_matmul"

Call = tuple[str, dict[str, Operand], dict[str, object]]
"""Op, operands and attributes, as ``admits`` takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WideDecision:
    """The form of one weight on one chip, with the reason, and why the alternatives were not taken.

    ``layout``: how codes are kept, ``kn`` ``[k, n]`` contiguous, ``nk.t`` ``[n, k]`` passed as the
    ``.t()`` view, ``nk`` ``[n, k]`` passed as it is. ``sums``: dtype in which the parts of K are summed,
    None where K is whole. ``dtype``: of activations and results of the op. ``bias_dtype``: the dtype
    that a bias is to be cast to at load time. ``nz``: codes are cast to FRACTAL_NZ at load time, with
    ``format_reason`` or, where they are not although that was asked for, why. ``follows_cuts``: parts
    of N are whole pieces of what the graph cuts the output into, so that nothing needs to be
    concatenated.
    """

    kind: Kind
    op: str
    layout: Layout = "nk"
    parts_n: tuple[int, ...]
    parts_k: tuple[int, ...]
    follows_cuts: bool = False
    sums: torch.dtype | None = None
    dtype: torch.dtype = torch.bfloat16
    bias_dtype: torch.dtype | None = None
    nz: bool = False
    format_reason: str = ""
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    unverified: bool = True

    @property
    def quantized(self) -> bool:
        """Whether the weight is held as codes."""
        return self.op in (MATMUL, DEQUANT)

    def __str__(self) -> str:
        parts = "" if len(self.parts_n) == 1 else f" n={'+'.join(map(str, self.parts_n))}"
        if len(self.parts_k) > 1:
            parts += f" k={'+'.join(map(str, self.parts_k))} {str(self.sums).removeprefix('torch.')}"
        cuts = " at cuts" if self.follows_cuts else ""
        return f"{self.kind}: {self.op} {self.layout}{parts}{cuts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """The question: what is decided about."""

    n: int
    k: int
    chip: NpuChip
    dtype: torch.dtype
    bias_dtype: torch.dtype | None
    cuts: tuple[int, ...]


def decide(
    n: int,
    k: int,
    *,
    chip: NpuChip,
    policy: Policy = "auto",
    quantized: bool = True,
    bias_dtype: torch.dtype | None = None,
    cuts: Sequence[int] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> WideDecision:
    """The form of a weight of ``n`` output and ``k`` input features; int8 per channel if ``quantized``.

    ``cuts``: offsets in N where the graph cuts the output anyway. ``dtype``: float16 or bfloat16, what
    the op computes with and gives. ``auto`` takes the weight as it is, else split; the other policies
    are taken only when asked, and only for a weight that is not admitted as it is.
    """
    if policy not in POLICIES:
        raise ConfigError(f"wide={policy!r} is not one of {', '.join(POLICIES)}")
    if dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(f"the NPU's quantized ops compute in float16 or bfloat16, got {dtype}")
    if n < 1 or k < 1:
        raise ConfigError(f"a weight of {n} x {k} is empty")
    weight = _Weight(n=n, k=k, chip=chip, dtype=dtype, bias_dtype=bias_dtype, cuts=tuple(sorted(set(cuts))))
    if not quantized:
        return _float(weight, "as is", "no limit is known for the float matmul", ())
    return _decide_quantized(weight, policy)


def _decide_quantized(weight: _Weight, policy: Policy) -> WideDecision:
    order: dict[Policy, tuple[Kind, ...]] = {
        "auto": ("as is", "split"), "split": ("as is", "split"), "transpose": ("as is", "transpose"),
        "host": ("as is", "host"), "float": ("as is", "float"),
    }  # fmt: skip
    makers = {"as is": _as_it_is, "split": _split, "transpose": _transposed}
    tried: dict[str, WideDecision | Refusal] = {}
    for kind in order[policy]:
        if kind in makers:
            tried[kind] = makers[kind](weight)
        else:
            reason = f'asked for: wide="{policy}"; not admitted as it is'
            tried[kind] = _float(weight, kind, reason, ())
        if isinstance(tried[kind], WideDecision):
            break
    taken = next((made for made in tried.values() if isinstance(made, WideDecision)), None)
    if taken is None:
        first = next(made for made in tried.values() if isinstance(made, Refusal))
        taken = _float(weight, "float", first.reason, ())
    return _with_reasons(weight, taken, tried, policy)


def _with_reasons(
    weight: _Weight, taken: WideDecision, tried: dict[str, WideDecision | Refusal], policy: Policy
) -> WideDecision:
    """``taken`` with the reason why each other alternative was not."""
    rejected = []
    for kind in ("as is", "split", "transpose", "host", "float"):
        made = tried.get(kind)
        if kind == taken.kind:
            continue
        if isinstance(made, Refusal):
            rejected.append((kind, made.reason))
        elif taken.kind == "as is":
            rejected.append((kind, "not needed: admitted as it is"))
        elif kind == "transpose" and isinstance(_transposed(weight), Refusal):
            rejected.append((kind, "would be refused too"))
        elif kind == "split" and policy != "auto":
            rejected.append((kind, f'wide="{policy}" was asked for'))
        elif kind in ("transpose", "host"):
            rejected.append((kind, f'only when asked: wide="{kind}"'))
        else:
            rejected.append((kind, f"comes after {taken.kind}"))
    return replace(taken, rejected=tuple(rejected))


def _float(weight: _Weight, kind: Kind, reason: str, rejected: tuple[tuple[str, str], ...]) -> WideDecision:
    return WideDecision(
        kind=kind, op=FLOAT, parts_n=(weight.n,), parts_k=(weight.k,), dtype=weight.dtype,
        bias_dtype=weight.bias_dtype, reason=reason, rejected=rejected,
    )  # fmt: skip


def _as_it_is(weight: _Weight) -> WideDecision | Refusal:
    if weight.chip.family != "310P":
        return _admitted(weight, "as is", MATMUL, "kn", (weight.n,), (weight.k,), "admitted as it is")
    reason = f"{_ON_310P}; {DEQUANT} quantizes by itself"
    made = _admitted(weight, "as is", DEQUANT, "nk", (weight.n,), (weight.k,), reason)
    return Refusal(reason=f"{_ON_310P}; {made.reason}") if isinstance(made, Refusal) else made


def _split(weight: _Weight) -> WideDecision | Refusal:
    if weight.chip.family == "310P":
        return Refusal(reason=_ON_310P)
    limit = inner_limit(MATMUL, weight.chip)
    parts_k = even_parts(weight.k, min(limit or INT32_K, INT32_K))
    parts_n = even_parts(weight.n, limit or weight.n)
    at_cuts = parts_at_cuts(weight.n, limit or weight.n, weight.cuts)
    follows = at_cuts is not None and len(at_cuts) == len(parts_n) > 1
    parts_n = at_cuts if at_cuts is not None and follows else parts_n
    reason = f"parts of at most {limit or INT32_K}"
    if follows:
        reason += ", at the cuts of the graph: nothing is concatenated"
    elif weight.cuts and len(parts_n) > 1:
        reason += "; the cuts of the graph would need more parts, so the results are concatenated"
    return _admitted(weight, "split", MATMUL, "kn", parts_n, parts_k, reason, follows_cuts=follows)


def _transposed(weight: _Weight) -> WideDecision | Refusal:
    if weight.chip.family == "310P":
        return Refusal(reason=_ON_310P)
    limit = inner_limit(MATMUL, weight.chip)
    parts_k = even_parts(weight.k, min(limit or INT32_K, INT32_K))
    reason = "kept [n, k] and passed as the .t() view, whose innermost axis is K"
    return _admitted(weight, "transpose", MATMUL, "nk.t", (weight.n,), parts_k, reason)


def _admitted(
    weight: _Weight,
    kind: Kind,
    op: str,
    layout: Layout,
    parts_n: tuple[int, ...],
    parts_k: tuple[int, ...],
    reason: str,
    *,
    follows_cuts: bool = False,
) -> WideDecision | Refusal:
    """The decision for these parts, if the table admits each of them."""
    if max(parts_k) > INT32_K:
        return Refusal(reason=f"K = {max(parts_k)} overflows int32 sums (at most {INT32_K})")
    sums = None
    if len(parts_k) > 1:
        sums = torch.int32 if weight.k <= INT32_K else torch.float32
    decision = WideDecision(
        kind=kind, op=op, layout=layout, parts_n=parts_n, parts_k=parts_k, follows_cuts=follows_cuts,
        sums=sums, dtype=weight.dtype, bias_dtype=_bias_dtype(weight, sums), reason=reason,
    )  # fmt: skip
    sources, verified = [], True
    for name, operands, attributes in calls(decision, bias=weight.bias_dtype is not None):
        found = admits(name, operands, weight.chip, **attributes)
        if isinstance(found, Refusal):
            return found
        sources += [found.waived] if found.waived else []
        verified = verified and found.verified
    notes = f"{reason}; limit waived ({sources[0]})" if sources else reason
    return replace(decision, reason=notes, unverified=not verified)


def _bias_dtype(weight: _Weight, sums: torch.dtype | None) -> torch.dtype | None:
    """The bias's own dtype where the op takes it, else float32; float32 where it is added after the sums."""
    if weight.bias_dtype is None or (sums is None and weight.bias_dtype is weight.dtype):
        return weight.bias_dtype
    return torch.float32


def in_nz(decision: WideDecision, chip: NpuChip, *, bias: bool) -> WideDecision:
    """The decision with codes in FRACTAL_NZ if each of its calls takes that, else with the reason."""
    if not decision.quantized:
        return decision
    if decision.op != MATMUL or decision.layout != "kn":
        kept = f"{decision.op} of {decision.layout} codes"
        return replace(decision, format_reason=f"not in FRACTAL_NZ: {kept} is known for ND alone")
    cast = replace(decision, nz=True, format_reason="cast to FRACTAL_NZ")
    for name, operands, attributes in calls(cast, bias=bias):
        found = admits(name, operands, chip, **attributes)
        if isinstance(found, Refusal):
            return replace(decision, format_reason=f"not in FRACTAL_NZ: {found.reason}")
    return cast


def calls(decision: WideDecision, *, bias: bool) -> Iterator[Call]:
    """The op calls that ``decision`` stands for, one for each part; none where the weight is float."""
    if not decision.quantized:
        return
    for n in decision.parts_n:
        for k in decision.parts_k:
            yield _call(decision, n, k, bias)


def _call(decision: WideDecision, n: int, k: int, bias: bool) -> Call:
    scale = Operand(shape=(n,), dtype=torch.float32)
    added = {}
    if bias and decision.bias_dtype is not None and decision.sums is None:
        added = {"bias": Operand(shape=(n,), dtype=decision.bias_dtype)}
    if decision.op == DEQUANT:
        x = Operand(shape=(None, k), dtype=decision.dtype)
        w = Operand(shape=(n, k), dtype=torch.int8)
        return DEQUANT, {"x": x, "quantized_weight": w, "weight_scale": scale, **added}, {}
    layout = "t" if decision.layout == "nk.t" else "nz" if decision.nz else "nd"
    operands = {
        "x1": Operand(shape=(None, k), dtype=torch.int8),
        "x2": Operand(shape=(k, n), dtype=torch.int8, layout=layout),
    }
    if decision.sums is not None:
        one = Operand(shape=(1,), dtype=torch.float32)
        return MATMUL, {**operands, "scale": one}, {"output_dtype": torch.int32}
    token = Operand(shape=(None,), dtype=torch.float32)
    operands |= {"scale": scale, "pertoken_scale": token, **added}
    return MATMUL, operands, {"output_dtype": decision.dtype}


def even_parts(size: int, limit: int) -> tuple[int, ...]:
    """The fewest near-equal parts of at most ``limit``, at multiples of 16 where that needs no more.

    65535 itself is not cut by a limit of 65535; 131070 gives two parts of 65535, which are not aligned.
    """
    count = -(-size // limit)
    step = -(-size // count)
    step = min(-(-step // ALIGNED) * ALIGNED, limit // ALIGNED * ALIGNED)
    last = size - step * (count - 1)
    if step and 0 < last <= limit:
        return (*[step] * (count - 1), last)
    base, more = divmod(size, count)
    return tuple(base + (i < more) for i in range(count))


def parts_at_cuts(size: int, limit: int, cuts: Sequence[int]) -> tuple[int, ...] | None:
    """The fewest parts of at most ``limit`` that end at ``cuts``, their largest being smallest; or None."""
    ends = [*(cut for cut in sorted(set(cuts)) if 0 < cut < size), size]
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for end in ends:
        options = [
            (count + 1, max(largest, end - start), (*parts, end - start))
            for start, (count, largest, parts) in best.items()
            if end - start <= limit
        ]
        if options:
            best[end] = min(options)
    return best[size][2] if size in best else None


def unverified(decision: WideDecision, chip: NpuChip) -> tuple[str, ...]:
    """Sources of the rules that a decision rests on and that were never tried on hardware."""
    found = []
    for name, operands, attributes in calls(decision, bias=decision.bias_dtype is not None):
        answer = admits(name, operands, chip, **attributes)
        if isinstance(answer, Admitted) and not answer.verified:
            found.append(f"{name}: {answer.source}")
    return tuple(dict.fromkeys(found))
