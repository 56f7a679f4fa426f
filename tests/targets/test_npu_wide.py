"""What becomes of wide weights: the whole decision table, and its soundness part by part."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxquant.errors import ConfigError
from fxquant.numerics import INT32_K
from fxquant.targets.npu_chip import NpuChip, parse_chip
from fxquant.targets.npu_rules import Admitted, admits, inner_limit
from fxquant.targets.npu_wide import (
    POLICIES,
    Policy,
    WideDecision,
    calls,
    decide,
    even_parts,
    parts_at_cuts,
    unverified,
)

GOLDEN = Path(__file__).with_name("npu_wide.txt")
SIZES_N = (65535, 65536, 131070, 131071, 196606)
SIZES_K = (65535, 65536, 70000)
VERSIONS = ("8.5", "9.0", "9.1")
SOCS = {"A2": "Ascend910B2", "A3": "Ascend910_9391", "950": "Ascend950PR_9579", "310P": "Ascend310P3"}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
A2 = parse_chip("Ascend910B2,cann=9.0")


def chip_of(family: str, cann: str) -> NpuChip:
    return parse_chip(f"{SOCS[family]},cann={cann}")


def check(n: int, k: int, chip: NpuChip, decision: WideDecision, *, bias: bool) -> None:
    """Every part is admitted by the table; the parts make up the weight; every alternative has a reason."""
    made = list(calls(decision, bias=bias))
    for op, operands, attributes in made:
        assert isinstance(admits(op, operands, chip, **attributes), Admitted), (n, k, chip, decision)
    assert bool(made) == decision.quantized == (decision.kind in ("as is", "split", "transpose"))
    assert sum(decision.parts_n) == n
    assert sum(decision.parts_k) == k
    assert max(decision.parts_k) <= INT32_K or not decision.quantized
    assert (decision.sums is not None) == (len(decision.parts_k) > 1)
    assert {kind for kind, reason in decision.rejected if reason} | {decision.kind} == {
        "as is", "split", "transpose", "host", "float",
    }  # fmt: skip
    assert decision.reason
    assert decision.unverified


def table() -> str:
    """A block for each different set of decisions, headed by what shares it."""
    blocks: dict[str, dict[str, str]] = {}
    for family, cann, policy in itertools.product(SOCS, VERSIONS, POLICIES):
        lines = []
        for n, k in itertools.product(SIZES_N, SIZES_K):
            decision = decide(n, k, chip=chip_of(family, cann), policy=policy, dtype=F16)
            check(n, k, chip_of(family, cann), decision, bias=False)
            lines.append(f"  {n} x {k}  {decision}")
        heads = blocks.setdefault("\n".join(lines), {})
        chip = f"{family} cann={cann}"
        heads[chip] = f"{heads[chip]}|{policy}" if chip in heads else f"wide={policy}"
    return "\n".join(
        "\n".join([*(f"{chip} {policies}" for chip, policies in heads.items()), text, ""])
        for text, heads in blocks.items()
    )


def test_whole_table() -> None:
    text = table()
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


sizes = st.one_of(st.integers(1, 140_000), st.sampled_from([*SIZES_N, 2 * INT32_K, 16, 65520, 400_000]))


@given(
    n=sizes, k=sizes, family=st.sampled_from(sorted(SOCS)), cann=st.sampled_from(VERSIONS),
    policy=st.sampled_from(POLICIES), dtype=st.sampled_from([F16, BF16]),
    bias=st.sampled_from([None, F16, BF16, F32]),
)  # fmt: skip
def test_every_decision_is_admitted(
    n: int, k: int, family: str, cann: str, policy: Policy, dtype: torch.dtype, bias: torch.dtype | None
) -> None:
    chip = chip_of(family, cann)
    decision = decide(n, k, chip=chip, policy=policy, dtype=dtype, bias_dtype=bias)
    check(n, k, chip, decision, bias=bias is not None)
    if family != "310P" and policy in ("auto", "split", "transpose"):
        assert decision.quantized
    limit = inner_limit("npu_quant_matmul", chip)
    if decision.kind == "split" and limit is not None:
        assert len(decision.parts_n) == -(-n // limit)
    assert len(unverified(decision, chip)) == decision.quantized


def test_reasons() -> None:
    split = decide(96768, 672, chip=A2)
    assert str(split) == "split: npu_quant_matmul kn n=48384+48384"
    reasons = dict(split.rejected)
    assert reasons["as is"].startswith(
        "npu_quant_matmul on A2 (Ascend910B2, CANN 9.0.0): axis N, the innermost"
    )
    assert reasons["transpose"] == 'only when asked: wide="transpose"'
    assert reasons["host"] == 'only when asked: wide="host"'
    assert reasons["float"] == "comes after split"
    turned = decide(96768, 672, chip=A2, policy="transpose")
    assert str(turned) == "transpose: npu_quant_matmul nk.t"
    assert dict(turned.rejected)["split"] == 'wide="transpose" was asked for'
    small = decide(64, 64, chip=A2, policy="host")
    assert small.kind == "as is"
    assert dict(small.rejected)["host"] == "not needed: admitted as it is"
    assert decide(96768, 672, chip=A2, policy="host").kind == "host"
    waived = decide(96768, 672, chip=parse_chip("Ascend910B2,cann=9.1"))
    assert waived.reason == (
        "admitted as it is; limit waived (ops-nn 482ad6c6e, aclnnQuantMatmulV4.md v9.1.0 :305-306)"
    )
    plain = decide(96768, 672, chip=A2, quantized=False)
    assert (plain.kind, plain.op, plain.reason) == (
        "as is",
        "aten.linear",
        "no limit is known for the float matmul",
    )


def test_310p() -> None:
    chip = parse_chip("Ascend310P3,cann=9.0")
    good = decide(65536, 70000, chip=chip, dtype=F16)
    assert str(good) == "as is: npu_quant_matmul_dequant nk"
    for options, says in (
        ({"dtype": BF16}, "x is bfloat16, taken: float16"),
        ({"dtype": F16, "bias_dtype": F16}, "takes no bias here"),
    ):
        decision = decide(64, 64, chip=chip, **options)  # type: ignore[arg-type]
        assert decision.kind == "float"
        assert decision.reason.startswith(
            "310P has no per-token npu_quant_matmul; npu_quant_matmul_dequant on 310P"
        )
        assert says in decision.reason
    assert "N = 65535 is not a multiple of 16" in decide(65535, 64, chip=chip, dtype=F16).reason


def test_wide_k() -> None:
    short = decide(64, 70000, chip=A2)
    assert str(short) == "split: npu_quant_matmul kn k=35008+34992 int32"
    assert str(decide(64, INT32_K, chip=A2)).endswith(" int32")
    assert str(decide(64, INT32_K + 1, chip=A2)).endswith(" float32")
    assert str(decide(131071, 70000, chip=A2, policy="transpose")) == (
        "transpose: npu_quant_matmul nk.t k=35008+34992 int32"
    )
    # The waiver is for the per-token form alone: int32 parts of a K that overflows are cut in N too.
    new = parse_chip("Ascend910B2,cann=9.1")
    assert str(decide(70000, 70000, chip=new)) == "as is: npu_quant_matmul kn"
    assert len(decide(70000, INT32_K + 1, chip=new).parts_n) == 2


def test_cuts() -> None:
    chunks = [16128 * i for i in range(1, 6)]
    decision = decide(96768, 672, chip=A2, cuts=chunks)
    assert decision.follows_cuts
    assert decision.parts_n == (48384, 48384)
    assert decision.reason == "parts of at most 65535, at the cuts of the graph: nothing is concatenated"
    assert not decide(96768, 672, chip=A2).follows_cuts
    # Cuts that would need a third part are not followed.
    awkward = decide(96768, 672, chip=A2, cuts=[10000, 80000])
    assert not awkward.follows_cuts
    assert awkward.reason.endswith("would need more parts, so the results are concatenated")
    assert awkward.parts_n == (48384, 48384)
    assert parts_at_cuts(96768, 65535, [10000, 80000]) is None
    assert parts_at_cuts(100, 40, [30, 60, 70]) == (30, 30, 40)
    assert parts_at_cuts(100, 100, []) == (100,)
    assert not decide(640, 672, chip=A2, cuts=[320]).follows_cuts


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (65535, (65535,)),
        (65536, (32768, 32768)),
        (131055, (65520, 65535)),
        (131060, (65530, 65530)),
        (131070, (65535, 65535)),
        (131071, (43696, 43696, 43679)),
    ],
)
def test_parts(size: int, parts: tuple[int, ...]) -> None:
    assert even_parts(size, 65535) == parts


@given(size=st.integers(1, 10**6), limit=st.sampled_from([1, 15, 16, 17, 100, 65535]))
def test_parts_are_few_and_near_equal(size: int, limit: int) -> None:
    if size // limit > 10**4:
        return
    parts = even_parts(size, limit)
    assert sum(parts) == size
    assert len(parts) == -(-size // limit)
    assert 0 < min(parts) <= max(parts) <= limit


def test_bias_dtypes() -> None:
    def bias(dtype: torch.dtype, given: torch.dtype, k: int = 64) -> torch.dtype | None:
        return decide(64, k, chip=A2, dtype=dtype, bias_dtype=given).bias_dtype

    assert bias(F16, F16) is F16
    assert bias(BF16, BF16) is BF16
    assert bias(F16, BF16) is bias(BF16, F16) is bias(BF16, F32) is bias(F16, torch.float64) is F32
    assert bias(F16, F16, k=70000) is F32


def test_arguments() -> None:
    with pytest.raises(ConfigError, match="wide='fast' is not one of auto, split"):
        decide(1, 1, chip=A2, policy="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="compute in float16 or bfloat16"):
        decide(1, 1, chip=A2, dtype=F32)
    with pytest.raises(ConfigError, match="is empty"):
        decide(0, 1, chip=A2)
