"""Rows of ``npu_grouped_matmul``: groups of rows, each times the matrix of its expert.

Sources: D as in ``npu_table``; ``GMM`` is gmm/grouped_matmul of CANN's ops-transformer, its
docs/aclnnGroupedMatmulV5.md and its op_api/aclnn_grouped_matmul.cpp.

Weights ``[E, K, N]`` may be transposed views of ``[E, N, K]``, and then so are scales with an axis of K
(GMM; vLLM's plugin for Ascend passes those of mx so). On A2 and A3 a null ``antiquant_offset`` is refused
with 161002 (CheckGroupedMatmulAntiQuant; newer versions take it with int4): symmetric codes have zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxquant.targets.npu_row import DAV_2201, Limit, Row

OP = "npu_grouped_matmul"
GMM = "ops-transformer aclnnGroupedMatmulV5.md"
_A2_A3 = f"D:5906-6017, {GMM}"
_950 = ("950",)

_MOE: dict[str, tuple[object, ...] | str] = {
    "split_item": (2, 3), "group_type": (0,), "group_list_type": (0, 1), "act_type": (0,),
}  # fmt: skip
_W8, _W4 = "int8 [E, K, N] nd t", "int32 [E, K, N/8] nd or [E, K/8, N] t"
_TOKEN = {"per_token_scale": "?float32 [M]"}
_FP8 = "float8_e4m3fn|float8_e5m2"
_E8M0 = "uint8|float8_e8m0fnu"
_MX: dict[str, tuple[object, ...] | str] = {
    "scale_dtype": ("float8_e8m0fnu",), "per_token_scale_dtype": ("float8_e8m0fnu",),
}  # fmt: skip


def _row(
    chips: tuple[str, ...],
    x: str,
    weight: str,
    result: tuple[object, ...],
    operands: Mapping[str, str],
    *where: str,
    **attributes: tuple[object, ...] | str,
) -> Row:
    return Row(
        op=OP, chips=chips, source=GMM if chips == _950 else _A2_A3, where=where,
        operands={"x": x, "weight": weight, "group_list": "int64 [E]", **operands},
        attributes={**_MOE, **attributes, "output_dtype": result},
    )  # fmt: skip


def _int8(
    chips: tuple[str, ...], result: tuple[object, ...], scale: str, bias: str, token: Mapping[str, str]
) -> Row:
    operands = {"scale": f"{scale} [E, N]", "bias": f"?{bias} [E, N]", **token}
    return _row(chips, "int8 [M, K] nd", _W8, result, operands)


def _weight_only(chips: tuple[str, ...], x: str, bias: str, weight: str, scale: str, *where: str) -> Row:
    maybe = "?" if chips == _950 else ""
    operands = {
        "antiquant_scale": f"{x} {scale}",
        "antiquant_offset": f"{maybe}{x} {scale}",
        "bias": f"?{bias} [E, N]",
    }
    return _row(chips, f"{x} [M, K] nd", weight, (None, x), operands, *where)


def _fp8(scale: str, token: str, **attributes: tuple[object, ...] | str) -> Row:
    operands = {"scale": scale, "per_token_scale": token}
    result = ("float16", "bfloat16", "float32")
    return _row(_950, f"{_FP8} [M, K] nd", f"{_FP8} [E, K, N] nd t", result, operands, **attributes)


EXPERT_ROWS: tuple[Row, ...] = (
    *(_int8(chips, (None, "int8"), "int64", "int32", {}) for chips in (DAV_2201, _950)),
    _int8(DAV_2201, ("bfloat16",), "bfloat16", "int32", _TOKEN),
    _int8(DAV_2201, ("float16",), "float32", "int32", _TOKEN),
    _int8(_950, ("bfloat16",), "bfloat16|float32", "int32|bfloat16|float32", _TOKEN),
    _int8(_950, ("float16",), "float32", "int32|float16|float32", _TOKEN),
    *(
        _weight_only(DAV_2201, x, bias, weight, scale, *where)
        for x, bias in (("float16", "float16"), ("bfloat16", "float32"))
        for weight, scale, where in (
            (_W8, "[E, N]", ()),
            (_W4, "[E, N]", ()),
            (_W4, "[E, G, N] any", ("K % G",)),
        )
    ),
    *(
        _weight_only(_950, x, bias, weight, scale)
        for x, bias in (("float16", "float16"), ("bfloat16", "bfloat16|float32"))
        for weight, scale in (
            (_W8, "[E, N]"),
            (_W4, "[E, N]"),
            *((_W4, f"[E, K/{group}, N] any") for group in (32, 64, 128, 256)),
        )
    ),
    _fp8("float32 [E, N]", "float32 [M]"),
    _fp8("float32 [E, ceil(K/128), ceil(N/128)] any", "float32 [M, ceil(K/128)] any"),
    _fp8(f"{_E8M0} [E, ceil(K/64), N, 2] any", f"{_E8M0} [M, ceil(K/64), 2]", **_MX),
    _row(
        _950, "uint8 [M, K/2] nd", "uint8 [E, K/2, N] t", ("float16", "bfloat16", "float32"),
        {"scale": f"{_E8M0} [E, ceil(K/64), N, 2] any", "per_token_scale": f"{_E8M0} [M, ceil(K/64), 2]",
         "bias": "?float32 [E, N]"},
        "4 <= K", **_MX, x_dtype=("float4_e2m1fn_x2",), weight_dtype=("float4_e2m1fn_x2",),
    ),
)  # fmt: skip

EXPERT_LIMITS: tuple[Limit, ...] = (
    *(
        Limit(op=OP, chips=DAV_2201, axis="inner", operand=operand, most=65535, source=f"D:5906, {GMM}")
        for operand in ("x", "weight")
    ),
    Limit(op=OP, chips=(*DAV_2201, *_950), axis="E", most=1024, source=f"D:6017, {GMM}"),
)
