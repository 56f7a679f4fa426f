"""The NPU's ops as data: schemas, dtype combinations, shapes, layouts, limits, each with its source.

Sources: ``D:n`` is line n of torch_npu 2.13.0's ``_op_plugin_docs.py``, ``M:n`` of its
``_meta_registrations.py``; ``ops-nn`` is CANN's operator repository, at a tag. No row was tried on a
device yet (``verified``). What the texts mean: ``npu_row``; experts: ``npu_expert_rows``.
"""

from __future__ import annotations

from fxquant.fractal_nz import FRACTAL_NZ
from fxquant.targets.npu_expert_rows import EXPERT_LIMITS, EXPERT_ROWS
from fxquant.targets.npu_row import ALL, DAV_2201, Limit, Row, Waiver

CODES: dict[int, str] = {
    1: "int8", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 12: "qint8", 13: "quint8", 15: "bfloat16",
    16: "quint4x2", 23: "float8_e5m2", 24: "float8_e4m3fn", 285: "int4", 290: "hifloat8", 291: "float8_e5m2",
    292: "float8_e4m3fn", 293: "float8_e8m0fnu", 296: "float4_e2m1fn_x2", 297: "float4_e1m2fn_x2",
}  # fmt: skip
"""What an ``int`` dtype argument means: a torch ScalarType, or from 285 on a code of torch_npu (M:24-58)."""

DTYPE_ATTRIBUTES = frozenset(
    (
        "output_dtype", "dst_type", "dtype", "x1_dtype", "x2_dtype", "scale_dtype", "pertoken_scale_dtype",
        "x_dtype", "weight_dtype", "per_token_scale_dtype", "customize_dtype", "input_dtype",
    )
)  # fmt: skip
"""Arguments that hold such a code."""

SCHEMAS: dict[str, str] = {
    "npu_quant_matmul": "(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
    "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, "
    "int? x2_dtype=None, int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, "
    "Tensor? y_scale=None) -> Tensor",
    "npu_dynamic_quant": "(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
    'int? dst_type=None, str quant_mode="pertoken", float dst_type_max=0.) -> (Tensor, Tensor)',
    "npu_weight_quant_batchmatmul": "(Tensor x, Tensor weight, Tensor antiquant_scale, "
    "Tensor? antiquant_offset=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? bias=None, "
    "int antiquant_group_size=0, int inner_precise=0, int? weight_dtype=None) -> Tensor",
    "npu_quantize": "(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, "
    "bool div_mode=True) -> Tensor",
    "npu_trans_quant_param": "(Tensor scale, Tensor? offset=None, int? round_mode=0) -> Tensor",
    "npu_grouped_matmul": "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
    "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
    "int? per_token_scale_dtype=None) -> Tensor[]",
    "npu_quant_matmul_dequant": "(Tensor x, Tensor quantized_weight, Tensor weight_scale, *, "
    "Tensor? bias=None, Tensor? x_scale=None, Tensor? x_offset=None, Tensor? smooth_scale=None, "
    'str? quant_mode="pertoken") -> Tensor',
    "npu_dynamic_mx_quant": '(Tensor input, *, int axis=-1, str round_mode="rint", int dst_type=296, '
    "int block_size=32, int? scale_alg=0, float dst_type_max=0., float max_low_bound=0.) -> (Tensor, Tensor)",
    "npu_dynamic_block_quant": '(Tensor x, *, float min_scale=0., str round_mode="rint", int dst_type=1, '
    "int row_block_size=1, int col_block_size=128, float dst_type_max=0.) -> (Tensor y, Tensor scale)",
    "npu_format_cast": "(Tensor input, int acl_format, *, int? customize_dtype=None, "
    "int? input_dtype=None) -> Tensor",
    "npu_convert_weight_to_int4pack": "(Tensor weight, int inner_k_tiles=0) -> Tensor",
}
"""The ops that are emitted, as torch_npu 2.13.0 declares them in its namespace ``npu``."""


_INT8 = {"x1": "int8 [..., M, K] nd t", "x2": "int8 [..., K, N] nd t nz nz.t"}
_INT4 = {"x1": "int32 [..., M, K/8] nd", "x2": "int32 [K, N/8] nd or [K/8, N] t"}
_BIAS = "[N] or [B, 1, N]"
_V5 = "ops-nn aclnnQuantMatmulV5.md v9.1.0 :799-946"


def _int8_rows(chips: tuple[str, ...], source: str) -> tuple[Row, ...]:
    def row(output: tuple[object, ...], scale: str, **operands: str) -> Row:
        return Row(
            op="npu_quant_matmul", chips=chips, operands={**_INT8, "scale": scale, **operands},
            attributes={"output_dtype": output}, max_rank=6, source=source,
        )  # fmt: skip

    floats, token, flat = "float32|bfloat16 [1|N]", "float32 [M]", "?int32 " + _BIAS
    return (
        row(("float16",), "float32|int64 [1|N]", bias=flat),
        row((None, "int8"), "float32|int64 [1|N]", offset="?float32 [1|N]", bias=flat),
        row(("bfloat16",), floats, pertoken_scale="?" + token, bias="?int32|bfloat16|float32 " + _BIAS),
        row(("float16",), "float32 [1|N]", pertoken_scale=token, bias="?int32|float16|float32 " + _BIAS),
        row(("int32",), floats, bias=flat),
    )


_FP8 = {"x1": "float8_e4m3fn|float8_e5m2 [M, K] nd", "x2": "float8_e4m3fn|float8_e5m2 [K, N] nd t"}
_FP8_OUT = ("float16", "bfloat16", "float32")

QUANT_MATMUL: tuple[Row, ...] = (
    *_int8_rows(DAV_2201, "D:5020-5027"),
    *_int8_rows(("950",), _V5),
    Row(
        op="npu_quant_matmul", chips=DAV_2201, max_rank=6, source="D:5009, D:5020-5027",
        operands={**_INT4, "scale": "float32|int64 [1|N]", "bias": "?int32 [N]"},
        attributes={"output_dtype": ("float16",)}, where=("K % 8", "N % 8"),
    ),
    Row(
        op="npu_quant_matmul", chips=DAV_2201, source="M:4186",
        operands={
            "x1": "int8 [M, K] nd", "x2": "int32 [K, N/8] nd nz", "scale": "int64 [K/256, N]",
            "offset": "?float32 [1|N]", "pertoken_scale": "float32 [M, 1]", "bias": "?int32 [N]",
        },
        attributes={"output_dtype": ("float16", "bfloat16")},
    ),
    Row(
        op="npu_quant_matmul", chips=("310P",), max_rank=6, source="D:5004-5027",
        operands={"x1": "int8 [..., M, K] nd t", "x2": "int8 [..., K, N] nd t nz.t",
                  "scale": "float32|int64 [1|N]", "bias": "?int32 " + _BIAS},
        attributes={"output_dtype": ("float16",)},
    ),
    Row(
        op="npu_quant_matmul", chips=("310P",), max_rank=6, source="D:5004-5027",
        operands={"x1": "int8 [..., M, K] nd t", "x2": "int8 [..., K, N] nd t nz.t",
                  "scale": "float32|int64 [1|N]", "offset": "?float32 [1|N]", "bias": "?int32 " + _BIAS},
        attributes={"output_dtype": (None, "int8")},
    ),
    Row(
        op="npu_quant_matmul", chips=("950",), source=_V5,
        operands={**_FP8, "scale": "float32|int64 [1|N]", "pertoken_scale": "?float32 [M]",
                  "bias": "?float32 [N]"},
        attributes={"output_dtype": _FP8_OUT},
    ),
    Row(
        op="npu_quant_matmul", chips=("950",), source=_V5,
        operands={**_FP8, "scale": "uint8|float8_e8m0fnu [ceil(K/64), N, 2] any",
                  "pertoken_scale": "uint8|float8_e8m0fnu [M, ceil(K/64), 2]", "bias": "?float32 [N]"},
        attributes={"output_dtype": _FP8_OUT, "group_sizes": ((1, 1, 32),),
                    "scale_dtype": ("float8_e8m0fnu",), "pertoken_scale_dtype": ("float8_e8m0fnu",)},
    ),
    Row(
        op="npu_quant_matmul", chips=("950",), source=_V5, where=("K % 2",),
        operands={"x1": "uint8 [M, K/2] nd", "x2": "uint8 [K/2, N] t",
                  "scale": "uint8|float8_e8m0fnu [ceil(K/64), N, 2] any",
                  "pertoken_scale": "uint8|float8_e8m0fnu [M, ceil(K/64), 2]", "bias": "?float32 [N]"},
        attributes={"output_dtype": _FP8_OUT, "group_sizes": ((1, 1, 32),),
                    "x1_dtype": ("float4_e2m1fn_x2",), "x2_dtype": ("float4_e2m1fn_x2",),
                    "scale_dtype": ("float8_e8m0fnu",), "pertoken_scale_dtype": ("float8_e8m0fnu",)},
    ),
    Row(
        op="npu_quant_matmul", chips=("950",), source=_V5,
        operands={**_FP8, "scale": "float32 [ceil(K/128), ceil(N/128)] any",
                  "pertoken_scale": "float32 [M, ceil(K/128)] any"},
        attributes={"output_dtype": _FP8_OUT, "group_sizes": ((1, 128, 128),)},
    ),
    Row(
        op="npu_quant_matmul", chips=("950",), source=_V5,
        operands={**_FP8, "scale": "float32 [ceil(K/128), ceil(N/128)] any",
                  "pertoken_scale": "float32 [ceil(M/128), ceil(K/128)] any"},
        attributes={"output_dtype": _FP8_OUT, "group_sizes": ((128, 128, 128),)},
    ),
    Row(
        op="npu_quant_matmul_dequant", chips=("310P",), source="M:4637, ops-nn aclnnQuantMatmulDequant.md",
        operands={"x": "float16 [M, K] nd", "quantized_weight": "int8 [N, K] nd",
                  "weight_scale": "float32 [N]", "smooth_scale": "?float16 [K]"},
        attributes={"quant_mode": (None, "pertoken")}, where=("N % 16", "K % 16"),
    ),
)  # fmt: skip


def _weight_only(chips: tuple[str, ...], x: str, bias: str, source: str) -> tuple[Row, ...]:
    head = {"x": f"{x} [M, K] nd t", "bias": f"?{bias} [N] or [1, N]"}
    whole = "[N] or [1, N] or [1] or [1, 1]"
    group = "[ceil(K/G), N] any"
    int8 = {**head, "weight": "int8 [K, N] nd t"}
    int4 = {**head, "weight": "int32 [K, N/8] nd or [K/8, N] t"}
    rows = []
    for weight in (int8,) if chips == ("310P",) else (int8, int4):
        for shape in (whole,) if chips == ("310P",) else (whole, group):
            attributes: dict[str, tuple[object, ...] | str] = {"inner_precise": (0,)}
            if shape == group:
                attributes["antiquant_group_size"] = "G"
            rows.append(
                Row(
                    op="npu_weight_quant_batchmatmul", chips=chips, source=source, attributes=attributes,
                    operands={**weight, "antiquant_scale": f"=x {shape}", "antiquant_offset": f"?=x {shape}"},
                    where=("G % 32", "32 <= G", "G < K") if shape == group else (),
                )
            )  # fmt: skip
    return tuple(rows)


_V3 = "D:5409-5470, ops-nn aclnnWeightQuantBatchMatmulV3.md"

WEIGHT_ONLY: tuple[Row, ...] = (
    *_weight_only(("A2", "A3", "950"), "float16", "float16", _V3),
    *_weight_only(("A2", "A3", "950"), "bfloat16", "float32", _V3),
    *_weight_only(("310P",), "float16", "float16", "D:5409-5470"),
    Row(
        op="npu_convert_weight_to_int4pack", chips=("A2", "A3", "950"), source="D:5686-5797",
        operands={"weight": "int32 [A, B] nd"}, where=("B % 8",),
    ),
)  # fmt: skip

_FLOATS = "float16|bfloat16"

ACTIVATIONS: tuple[Row, ...] = (
    Row(
        op="npu_dynamic_quant", chips=ALL[:3], source="D:4654-4754",
        operands={"input": f"{_FLOATS} [..., M, K] any", "smooth_scales": "?=input [K]"},
        attributes={"dst_type": (None, "int8")},
    ),
    Row(
        op="npu_dynamic_quant", chips=DAV_2201, source="D:4654-4754",
        operands={"input": f"{_FLOATS} [..., M, K] any", "smooth_scales": "?=input [K]"},
        attributes={"dst_type": ("quint4x2",)}, where=("K % 8",),
    ),
    Row(
        op="npu_dynamic_quant", chips=("950",), source="ops-nn aclnnDynamicQuantV2.md",
        operands={"input": f"{_FLOATS} [..., M, K] any", "smooth_scales": "?=input [K]"},
        attributes={"dst_type": ("float8_e5m2", "float8_e4m3fn", "hifloat8")},
    ),
    Row(
        op="npu_quantize", chips=("A2", "A3", "950"), source="D:11342-11434, ops-nn AscendQuantV3",
        operands={"input": f"float32|{_FLOATS} [M, K] any", "scales": "float32 [K]",
                  "zero_points": "?int8|uint8|int32 [K]"},
        attributes={"dtype": ("qint8", "quint8", "int32"), "axis": (1, -1)},
    ),
    Row(
        op="npu_quantize", chips=("310P",), source="D:11342-11434",
        operands={"input": "float32|float16 [M, K] any", "scales": "float32 [K]",
                  "zero_points": "?int8|uint8|int32 [K]"},
        attributes={"dtype": ("qint8", "quint8", "int32"), "axis": (1, -1)},
    ),
    Row(
        op="npu_trans_quant_param", chips=ALL, source="D:4421-4502",
        operands={"scale": "float32 [1|N] or [1, N]", "offset": "?float32 [1|N] or [1, N]"},
        attributes={"round_mode": (None, 0, 1)},
    ),
    Row(
        op="npu_dynamic_mx_quant", chips=("950",), source="M:5109, D:17166-17213",
        operands={"input": f"float32|{_FLOATS} [..., K] any"},
        attributes={"dst_type": ("float8_e4m3fn", "float8_e5m2"), "scale_alg": (0, 1)},
    ),
    Row(
        op="npu_dynamic_mx_quant", chips=("950",), source="M:5109, D:17166-17213",
        operands={"input": f"float32|{_FLOATS} [..., K] any"}, where=("K % 2",),
        attributes={"dst_type": ("float4_e2m1fn_x2", "float4_e1m2fn_x2"),
                    "round_mode": ("rint", "floor", "round")},
    ),
    Row(
        op="npu_dynamic_block_quant", chips=DAV_2201, source="M:6526, D:14384-14436", max_rank=3,
        operands={"x": f"{_FLOATS} [..., M, K] any"},
        attributes={"dst_type": ("int8",), "row_block_size": (1,), "col_block_size": (128,)},
    ),
    Row(
        op="npu_dynamic_block_quant", chips=("950",), source="ops-nn aclnnDynamicBlockQuantV2.md :201-215",
        operands={"x": f"{_FLOATS} [..., M, K] any"}, max_rank=3,
        attributes={"dst_type": ("float8_e5m2", "float8_e4m3fn", "hifloat8"), "row_block_size": (1, 128)},
    ),
    Row(
        op="npu_format_cast", chips=ALL, source="D:1274",
        operands={"input": "int8|int32|float16|bfloat16|float32 [..., K, N] nd t nz nz.t"},
        attributes={"acl_format": (2, FRACTAL_NZ)},
    ),
)  # fmt: skip

ROWS: tuple[Row, ...] = (*QUANT_MATMUL, *WEIGHT_ONLY, *EXPERT_ROWS, *ACTIVATIONS)

_WIDE = Waiver(
    since=(9, 1, 0),
    dtypes={"x1": "int8", "x2": "int8", "scale": "float32|bfloat16", "pertoken_scale": "float32"},
    flat=("scale", "pertoken_scale"),
    source="ops-nn 482ad6c6e, aclnnQuantMatmulV4.md v9.1.0 :305-306",
)
_NOT_ONE = "aclnnQuantMatmulWeightNz doc"

LIMITS: tuple[Limit, ...] = (
    *EXPERT_LIMITS,
    *(
        Limit(op="npu_quant_matmul", chips=chips, axis="inner", operand=x, most=65535, waiver=waiver,
              source="D:5001, ops-nn v9.1.0 aclnn_quant_matmul_v4.cpp :545")
        for chips, waiver in ((DAV_2201, _WIDE), (("310P",), None))
        for x in ("x1", "x2")
    ),
    *(Limit(op="npu_quant_matmul", chips=ALL, axis=axis, source="D:4999") for axis in "MKN"),
    *(
        Limit(op="npu_quant_matmul", chips=ALL, axis=axis, operand="x2", layouts=("nz", "nz.t"), least=2,
              source=_NOT_ONE)
        for axis in "KN"
    ),
    *(
        Limit(op="npu_quant_matmul_dequant", chips=ALL, axis=axis, source="ops-nn aclnnQuantMatmulDequant.md")
        for axis in "MKN"
    ),
    *(
        Limit(op="npu_weight_quant_batchmatmul", chips=ALL, axis=axis, most=65535, source="D:5464")
        for axis in "KN"
    ),
    Limit(op="npu_weight_quant_batchmatmul", chips=ALL, axis="M", source="D:5464"),
    Limit(op="npu_weight_quant_batchmatmul", chips=ALL, axis="inner", operand="x", layouts=("t",), most=65535,
          source="D:5464"),
    Limit(op="npu_trans_quant_param", chips=ALL, axis="N", source="D:4421-4502"),
)  # fmt: skip
