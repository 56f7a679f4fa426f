"""What the table of the NPU admits and refuses, with its reasons."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxquant.target import Refusal
from fxquant.targets.npu_chip import NpuChip, parse_chip
from fxquant.targets.npu_rules import Admitted, Operand, admits, layout_of, refusal_of_call
from fxquant.targets.npu_table import CODES, LIMITS, ROWS, SCHEMAS

A2, A2_NEW = parse_chip("Ascend910B2,cann=9.0"), parse_chip("Ascend910B2,cann=9.1")
A3, A950 = parse_chip("Ascend910_9391,cann=9.0"), parse_chip("Ascend950PR_9579,cann=9.0")
P310 = parse_chip("Ascend310P3,cann=9.0")
I8, I32, I64 = torch.int8, torch.int32, torch.int64
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def matmul(
    k: int, n: int, chip: NpuChip, *, layout: str = "nd", m: int | None = None, **options: object
) -> str:
    """``"ok"``, ``"waived"`` or the reason, for the int8 per-token form unless ``options`` say otherwise."""
    dtypes: dict[str, object] = {"scale": F32, "pertoken_scale": F32, "bias": None, "offset": None, **options}
    out = dtypes.pop("out", BF16)
    operands = {
        "x1": Operand(shape=(m, k), dtype=I8),
        "x2": Operand(shape=(k, n), dtype=I8, layout=layout),
    }
    for name, dtype in dtypes.items():
        if dtype is not None:
            shape = (m,) if name == "pertoken_scale" else (n,)
            operands[name] = Operand(shape=shape, dtype=dtype)  # type: ignore[arg-type]
    found = admits("npu_quant_matmul", operands, chip, output_dtype=out)
    if isinstance(found, Refusal):
        return found.reason
    assert not found.verified
    assert found.source
    return "waived" if found.waived else "ok"


def test_limit_is_the_innermost_axis_in_memory() -> None:
    assert matmul(64, 65535, A2) == "ok"
    assert matmul(64, 65536, A2) == (
        "npu_quant_matmul on A2 (Ascend910B2, CANN 9.0.0): axis N, the innermost of x2 in memory, is 65536, "
        "limit 65535; waived from CANN 9.1.0 on for x1 int8, x2 int8, scale float32|bfloat16, "
        "pertoken_scale float32 (D:5001, ops-nn v9.1.0 aclnn_quant_matmul_v4.cpp :545)"
    )
    assert matmul(64, 151936, A2, layout="t") == "ok"
    assert matmul(64, 151936, A3, layout="nz.t") == "ok"
    assert "axis N, the innermost of x2" in matmul(64, 151936, A3, layout="nz")
    assert "axis K, the innermost of x1" in matmul(70000, 64, A2)
    assert "axis K, the innermost of x1" in matmul(70000, 64, A2, layout="t")
    assert matmul(70000, 151936, A950) == "ok"


def test_waiver_depends_on_version_scales_and_chip() -> None:
    assert matmul(70000, 151936, A2_NEW) == "waived"
    assert matmul(70000, 151936, A2_NEW, scale=BF16) == "waived"
    assert matmul(70000, 64, parse_chip("Ascend910B2,cann=9.1.0-beta.3")).startswith("npu_quant_matmul on A2")
    assert "limit 65535" in matmul(70000, 64, A2_NEW, pertoken_scale=None)
    assert "limit 65535" in matmul(70000, 64, A2_NEW, pertoken_scale=None, out=I32)
    assert "limit 65535" in matmul(70000, 64, A2_NEW, pertoken_scale=None, scale=I64, out=F16)
    assert "limit 65535; " not in matmul(70000, 64, P310, pertoken_scale=None, scale=I64, out=F16)


@pytest.mark.parametrize(
    ("chip", "options", "says"),
    [
        (A2, {"out": F16, "bias": F16}, "ok"),
        (A2, {"out": F16, "bias": BF16}, "bias is bfloat16, taken: int32, float16, float32 (D:5020-5027)"),
        (A2, {"out": BF16, "bias": F16}, "bias is float16, taken: int32, bfloat16, float32"),
        (A2, {"out": BF16, "bias": F32}, "ok"),
        (A2, {"out": F32}, "output_dtype is float32, taken: "),
        (A2, {"out": I32}, "takes no pertoken_scale here"),
        (A2, {"out": I32, "pertoken_scale": None, "bias": F32}, "bias is float32, taken: int32"),
        (A2, {"out": F16, "scale": BF16}, "scale is bfloat16"),
        (A2, {"out": None, "scale": I64, "pertoken_scale": None, "offset": F32}, "ok"),
        (P310, {"out": F16}, "takes no pertoken_scale here (D:5004-5027)"),
        (P310, {"out": F16, "pertoken_scale": None, "scale": I64, "bias": I32}, "ok"),
        (P310, {"out": BF16, "pertoken_scale": None}, "output_dtype is bfloat16, taken: "),
        (P310, {"out": F16, "pertoken_scale": None, "layout": "nz"}, "x2 lies as nz, taken: nd, t, nz.t"),
        (A2, {"m": 0}, "axis M is 0, at least 1 (D:4999)"),
    ],
)
def test_dtypes(chip: NpuChip, options: dict[str, object], says: str) -> None:
    assert says in matmul(64, 32, chip, **options)  # type: ignore[arg-type]


def test_other_refusals() -> None:
    assert "axis K is 1, at least 2 (aclnnQuantMatmulWeightNz doc)" in matmul(1, 32, A2, layout="nz")
    assert "x2 lies as strided, taken: nd, t, nz, nz.t" in matmul(64, 32, A2, layout="strided")
    refused = admits("npu_dynamic_mx_quant", {"input": Operand(shape=(4, 64), dtype=F32)}, A2, dst_type=292)
    assert refused == Refusal(
        reason="npu_dynamic_mx_quant on A2 (Ascend910B2, CANN 9.0.0): only on 950 (M:5109, D:17166-17213)"
    )
    absent = admits("npu_nothing", {}, A2)
    assert absent == Refusal(reason="npu_nothing on A2 (Ascend910B2, CANN 9.0.0): the table has no such op")


def call(op: str, *args: object, chip: NpuChip = A2, **kwargs: object) -> str | None:
    refusal = refusal_of_call(op, args, kwargs, chip)
    return None if refusal is None else refusal.reason


def t(*shape: int, dtype: torch.dtype = F16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_calls() -> None:
    x, w = t(17, 64, dtype=I8), t(64, 65536, dtype=I8)
    scales = (t(65536, dtype=F32), {"pertoken_scale": t(17, dtype=F32), "output_dtype": 15})
    assert "axis N, the innermost of x2 in memory, is 65536" in (
        call("npu_quant_matmul", x, w, scales[0], **scales[1]) or ""
    )
    turned = t(65536, 64, dtype=I8).t()
    assert call("npu::npu_quant_matmul", x, turned, scales[0], **scales[1]) is None
    refusal = refusal_of_call(
        "npu_quant_matmul", (x, w, scales[0]), scales[1], A2_NEW, is_nz=lambda one: one is w
    )
    assert refusal is None
    short = {**scales[1], "pertoken_scale": t(16, dtype=F32)}
    assert "axis -1 of pertoken_scale is 16, taken: M, M = 17" in (
        call("npu_quant_matmul", x, turned, scales[0], **short) or ""
    )
    assert "input is float32, taken: float16, bfloat16" in (
        call("npu_dynamic_quant", t(2, 8, dtype=F32)) or ""
    )
    assert "input has rank 1" in (call("npu_dynamic_quant", t(8)) or "")
    assert call("npu_dynamic_quant", t(2, 3, 8), dst_type=torch.int8) is None
    assert call("npu_dynamic_quant", t(2, 3, 8), quant_mode="pertensor") is not None
    assert call("npu_unknown_to_us", t(2)) is None


def test_weight_only() -> None:
    scale = t(32)
    assert call("npu_weight_quant_batchmatmul", t(4, 64), t(64, 32, dtype=I8), scale, bias=t(32)) is None
    bf = {"dtype": BF16}
    reason = call(
        "npu_weight_quant_batchmatmul", t(4, 64, **bf), t(64, 32, dtype=I8), t(32, **bf), bias=t(32, **bf)
    )
    assert "bias is bfloat16, taken: float32" in (reason or "")
    reason = call("npu_weight_quant_batchmatmul", t(4, 64), t(70000, 64, dtype=I8).t(), t(70000))
    assert "axis N is 70000, limit 65535 (D:5464)" in (reason or "")
    grouped = (t(4, 64), t(64, 4, dtype=I32), t(2, 32))
    assert call("npu_weight_quant_batchmatmul", *grouped, antiquant_group_size=32) is None
    reason = call("npu_weight_quant_batchmatmul", *grouped, antiquant_group_size=48)
    assert "G = 48 is not a multiple of 32" in (reason or "")
    reason = call(
        "npu_weight_quant_batchmatmul", t(4, 64), t(64, 4, dtype=I32), t(1, 32), antiquant_group_size=64
    )
    assert "G < K does not hold: 64 < 64" in (reason or "")


def test_dequant_on_310p() -> None:
    x, scale = t(4, 64), t(32, dtype=F32)
    assert call("npu_quant_matmul_dequant", x, t(32, 64, dtype=I8), scale, chip=P310) is None
    assert "only on 310P" in (call("npu_quant_matmul_dequant", x, t(32, 64, dtype=I8), scale) or "")
    reason = call("npu_quant_matmul_dequant", x, t(32, 64, dtype=I8), scale, bias=t(32), chip=P310)
    assert "takes no bias here" in (reason or "")
    reason = call("npu_quant_matmul_dequant", x, t(30, 64, dtype=I8), t(30, dtype=F32), chip=P310)
    assert "N = 30 is not a multiple of 16" in (reason or "")


def experts(*scale: int, k: int = 64, chip: NpuChip = A2, offset: bool = True) -> str | None:
    """Int4 codes of 4 experts times float16 rows."""
    given = {"group_list": t(4, dtype=I64), "split_item": 3, "group_type": 0, "antiquant_scale": [t(*scale)]}
    given |= {"antiquant_offset": [t(*scale)]} if offset else {}
    weight = t(4, 32, k // 8, dtype=I32).transpose(1, 2)
    return call("npu_grouped_matmul", [t(8, k)], [weight], chip=chip, **given)


def test_weight_only_experts() -> None:
    assert experts(4, 32) is experts(4, 2, 32) is experts(4, 2, 32, chip=A3) is None
    assert "needs antiquant_offset" in (experts(4, 2, 32, offset=False) or "")
    assert experts(4, 2, 32, chip=A950, offset=False) is None
    assert "K = 96 is not a multiple of 5" in (experts(4, 5, 32, k=96) or "")
    assert experts(4, 6, 32, k=96) is None
    assert "antiquant_scale" in (experts(4, 6, 32, k=96, chip=A950) or "")  # groups of 16
    assert "only on A2, A3, 950" in (experts(4, 32, chip=P310) or "")


def test_grouped_and_mx() -> None:
    x, w, groups = t(8, 64, dtype=I8), t(4, 64, 32, dtype=I8), t(4, dtype=I64)
    options = {"group_list": groups, "split_item": 3, "group_type": 0, "output_dtype": 15}
    token = [t(8, dtype=F32)]
    assert (
        call("npu_grouped_matmul", [x], [w], scale=[t(4, 32, dtype=BF16)], per_token_scale=token, **options)
        is None
    )
    reason = call("npu_grouped_matmul", [x], [w], scale=[t(4, 32, dtype=F32)], **options)
    assert "scale is float32, taken: bfloat16" in (reason or "")
    assert "x holds 2 tensors" in (call("npu_grouped_matmul", [x, x], [w], **options) or "")
    f8, e8 = {"dtype": torch.float8_e4m3fn}, {"dtype": torch.uint8}
    mx = {"pertoken_scale": t(4, 2, 2, **e8), "output_dtype": 15, "group_sizes": [1, 1, 32]}
    mx |= {"scale_dtype": 293, "pertoken_scale_dtype": 293}
    args = (t(4, 100, **f8), t(100, 32, **f8), t(2, 32, 2, **e8))
    assert call("npu_quant_matmul", *args, chip=A950, **mx) is None
    assert call("npu_quant_matmul", *args, chip=A2, **mx) is not None


def test_layouts() -> None:
    assert layout_of(t(3, 4)) == "nd"
    assert layout_of(t(3, 4).t()) == "t"
    assert layout_of(t(3, 1).t()) == "nd"
    assert layout_of(t(3, 8)[:, :4]) == "strided"
    assert layout_of(t(2, 3, 4).mT, nz=True) == "nz.t"
    assert layout_of(t(0, 4)) == "nd"
    assert layout_of(t(5)) == "nd"


def test_every_row_is_sound() -> None:
    for row in ROWS:
        assert row.op in SCHEMAS
        names = {a.name for a in torch._C.parse_schema(f"npu::{row.op}{SCHEMAS[row.op]}").arguments}
        assert row.operands.keys() | row.attributes.keys() <= names, row
        assert row.source
        for values in row.attributes.values():
            for value in values if isinstance(values, tuple) else ():
                assert not isinstance(value, str) or value in {
                    *CODES.values(),
                    "pertoken",
                    "rint",
                    "floor",
                    "round",
                }
    assert all(limit.op in SCHEMAS and limit.source for limit in LIMITS)
    assert {row.op for row in ROWS} == SCHEMAS.keys()
    assert isinstance(
        admits("npu_format_cast", {"input": Operand(shape=(64, 32), dtype=I8)}, A2, acl_format=29), Admitted
    )
