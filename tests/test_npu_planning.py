# ruff: noqa: E501 - golden graphs
"""Planning and lowering for an NPU on a machine without one: what cross-compiling sees."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import fxquant
from fxquant.cli import main
from fxquant.errors import ConfigError, RefusedError
from fxquant.graph import dump

A2, WAIVED, DAV_950, DAV_310P = (
    "Ascend910B2,cann=9.0",
    "Ascend910B2,cann=9.1",
    "Ascend950PR_9579,cann=9.1",
    "Ascend310P3,cann=9.0",
)
BF16, HALF = torch.bfloat16, torch.float16


def linear(n: int, k: int, *, bias: bool = False, dtype: torch.dtype = BF16) -> nn.Module:
    return nn.Linear(k, n, bias=bias, dtype=dtype, device="meta").eval()


def options(model: nn.Module, target: str | None, **more: Any) -> dict[str, Any]:
    weight = model.weight
    example = torch.zeros(3, weight.shape[1], dtype=weight.dtype)
    return {"backend": "npu", "target": target, "scheme": "int8", "example_inputs": (example,), **more}


def row(model: nn.Module, target: str, **more: Any) -> Any:
    return fxquant.plan(model, **options(model, target, **more)).weight("weight")


@pytest.mark.parametrize(
    ("target", "n", "k", "form", "words"),
    [
        (A2, 64, 32, "int8.kn", "default scheme"),
        (A2, 65535, 32, "int8.kn", "default scheme"),
        (A2, 65536, 32, "int8.kn/n:32768,32768", "split: parts of at most 65535"),
        (A2, 32, 65536, "int8.kn/k:32768,32768", "split"),
        (A2, 65536, 65536, "int8.kn/n:32768,32768/k:32768,32768", "split"),
        (WAIVED, 65536, 32, "int8.kn", "default scheme"),
        (DAV_950, 131071, 32, "int8.kn", "default scheme"),
        (DAV_310P, 64, 32, "float", "x is bfloat16"),
    ],
)
def test_form_by_target(target: str, n: int, k: int, form: str, words: str) -> None:
    found = row(linear(n, k), target)
    assert found.form == form
    assert words in found.reason


@pytest.mark.parametrize(
    ("wide", "form", "rejected"),
    [
        ("auto", "int8.kn/n:32768,32768", {"as is", "transpose", "host", "float"}),
        ("split", "int8.kn/n:32768,32768", {"as is", "transpose", "host", "float"}),
        ("transpose", "int8", {"as is", "split", "host", "float"}),
        ("host", "float@host", {"as is", "split", "transpose", "float"}),
        ("float", "float", set()),
    ],
)
def test_policies_and_why_not_the_others(wide: str, form: str, rejected: set[str]) -> None:
    plan = fxquant.plan(linear(65536, 32), **options(linear(65536, 32), A2, wide=wide))
    found = plan.weight("weight")
    assert found.form == form
    assert {kind for kind, _ in found.rejected} == rejected
    text = plan.explain("weight")
    assert all(f"not {kind}: " in text for kind in rejected)
    if rejected:
        assert "limit 65535" in dict(found.rejected)["as is"]
    assert fxquant.Plan.from_json(plan.to_json()) == plan


def test_310p_by_dtype_bias_and_size() -> None:
    assert row(linear(64, 32, dtype=HALF), DAV_310P).form == "int8"
    assert "takes no bias" in row(linear(64, 32, dtype=HALF, bias=True), DAV_310P).reason
    assert "not a multiple of 16" in row(linear(65, 32, dtype=HALF), DAV_310P).reason
    with pytest.raises(RefusedError, match="310P has no per-token npu_quant_matmul"):
        row(linear(65, 32, dtype=HALF), DAV_310P, strict=True)


def test_fp32_says_what_it_is_computed_in() -> None:
    assert "computed in bfloat16" in row(linear(64, 32, dtype=torch.float32), A2).reason


def test_plan_names_target_kernels_and_predicts_the_device() -> None:
    plan = fxquant.plan(linear(64, 32), **options(linear(64, 32), A2))
    assert plan.target == "Ascend910B2,cann=9.0.0"
    assert plan.kernels["fxquant::scaled_mm"]["op"] == "npu::npu_quant_matmul"
    assert "not verified on hardware" in plan.kernels["fxquant::scaled_mm"]["reason"]
    assert plan.predicted_peak.keys() >= {"npu"}
    assert plan.hash != fxquant.plan(linear(64, 32), **options(linear(64, 32), WAIVED)).hash


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"target": None}, "no NPU in this process"),
        ({"target": "Ascend910B2"}, "comes the CANN version"),
        ({"target": "H100,cann=9.0"}, "'H100' is not known"),
        ({"target": 3}, "is a text such as"),
        ({"wide": "narrow"}, "wide='narrow'"),
        ({"device": "cpu"}, "does not belong to backend 'npu'"),
    ],
)
def test_bad_options(more: dict[str, Any], words: str) -> None:
    model = linear(64, 32)
    with pytest.raises(ConfigError, match=words):
        fxquant.plan(model, **{**options(model, A2), **more})


def test_compile_without_a_device_says_what_can_be_done() -> None:
    model = linear(64, 32)
    state = {"weight": torch.zeros(64, 32, dtype=BF16)}
    with pytest.raises(ConfigError, match=r"there is no npu in this process.*planned and lowered"):
        fxquant.compile(model, state, **options(model, A2))
    assert model.weight.is_meta
    with pytest.raises(ConfigError, match="no limit on the width"):
        fxquant.plan(model, **{**options(model, None), "backend": "cpu", "wide": "split"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        dtype="bfloat16",
    )
    path = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def test_the_shell_plans_for_a_chip(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["plan", folder, "--backend", "npu", "--target", A2]
    assert main(chosen) == 0
    text = capsys.readouterr().out
    assert "scheme int8 on Ascend910B2,cann=9.0.0, 7 of 12 weights quantized" in text
    assert "int8.kn" in text
    assert main([*chosen, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == "npu"
    assert main([*chosen, "--explain", "model.layers.0.mlp.up_proj"]) == 0
    assert "not split: not needed" not in capsys.readouterr().out
    assert main(["plan", folder, "--backend", "npu"]) == 2
    assert 'pass target="Ascend910B2,cann=9.0"' in capsys.readouterr().err


class Narrow(nn.Module):
    """Linears with a limit of 65535 in reach, over few features."""

    def __init__(self, n: int, k: int, *, bias: bool = True, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(n, k, dtype=dtype, device="meta"))
        self.b = nn.Parameter(torch.empty(n, dtype=dtype, device="meta")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w, self.b)


def lowered(model: nn.Module, *shape: int, dynamic: bool = False, **more: Any) -> fxquant.Lowered:
    x = torch.zeros(shape, dtype=model.w.dtype)
    given = {"backend": "npu", "target": A2, "scheme": "int8", "dynamic": dynamic, **more}
    return fxquant.lower(model, example_inputs=(x,), **given)


class TestGoldens(TestCase):
    maxDiff = None

    def check(self, low: fxquant.Lowered, expected: str) -> None:
        self.assertExpectedInline(dump(low.run_graph), expected, skip=1)

    def test_as_it_is(self) -> None:
        self.check(
            lowered(Narrow(48, 32), 3, 32),
            """\
p_w_codes : int8[32, 48]
p_b : bfloat16[48]
reshape_default : float32[48]
x : bfloat16[3, 32]
%4 = npu.npu_dynamic_quant(x) : (int8[3, 32], float32[3])
%5 = getitem(%4, 0) : int8[3, 32]
%6 = getitem(%4, 1) : float32[3]
%7 = aten.unsqueeze(%6, -1) : float32[3, 1]
%8 = aten.reshape(%7, [-1]) : float32[3]
%9 = npu.npu_quant_matmul(%5, p_w_codes, reshape_default, pertoken_scale=%8, bias=p_b, output_dtype=15) : bfloat16[3, 48]
return [%9]""",
        )

    def test_as_it_is_dynamic(self) -> None:
        self.check(
            lowered(Narrow(48, 32), 2, 3, 32, dynamic=True),
            """\
p_w_codes : int8[32, 48]
p_b : bfloat16[48]
reshape_default : float32[48]
x : bfloat16[s0, s1, 32]
%4 = fxquant_npu.npu_dynamic_quant(x) : (int8[s0, s1, 32], float32[s0, s1])
%5 = getitem(%4, 0) : int8[s0, s1, 32]
%6 = getitem(%4, 1) : float32[s0, s1]
%7 = aten.unsqueeze(%6, -1) : float32[s0, s1, 1]
%8 = aten.reshape(%5, [-1, 32]) : int8[s1*s0, 32]
%9 = aten.reshape(%7, [-1]) : float32[s1*s0]
%10 = fxquant_npu.npu_quant_matmul(%8, p_w_codes, reshape_default, pertoken_scale=%9, bias=p_b, output_dtype=15) : bfloat16[s1*s0, 48]
%11 = aten.sym_size.int(%5, 0) : SymInt
%12 = aten.sym_size.int(%5, 1) : SymInt
%13 = aten.reshape(%10, [%11, %12, 48]) : bfloat16[s0, s1, 48]
return [%13]""",
        )

    def test_split(self) -> None:
        self.check(
            lowered(Narrow(65536, 32), 3, 32),
            """\
p_w_codes_0 : int8[32, 32768]
p_w_codes_1 : int8[32, 32768]
reshape_default : float32[32768]
slice_tensor_2 : bfloat16[32768]
reshape_default_1 : float32[32768]
slice_tensor_5 : bfloat16[32768]
x : bfloat16[3, 32]
%7 = npu.npu_dynamic_quant(x) : (int8[3, 32], float32[3])
%8 = getitem(%7, 0) : int8[3, 32]
%9 = getitem(%7, 1) : float32[3]
%10 = aten.unsqueeze(%9, -1) : float32[3, 1]
%11 = aten.reshape(%10, [-1]) : float32[3]
%12 = npu.npu_quant_matmul(%8, p_w_codes_0, reshape_default, pertoken_scale=%11, bias=slice_tensor_2, output_dtype=15) : bfloat16[3, 32768]
%13 = npu.npu_quant_matmul(%8, p_w_codes_1, reshape_default_1, pertoken_scale=%11, bias=slice_tensor_5, output_dtype=15) : bfloat16[3, 32768]
%14 = aten.cat([%12, %13], -1) : bfloat16[3, 65536]
return [%14]""",
        )

    def test_split_dynamic(self) -> None:
        self.check(
            lowered(Narrow(65536, 32, bias=False), 3, 32, dynamic=True),
            """\
p_w_codes_0 : int8[32, 32768]
p_w_codes_1 : int8[32, 32768]
reshape_default : float32[32768]
reshape_default_1 : float32[32768]
x : bfloat16[s0, 32]
%5 = fxquant_npu.npu_dynamic_quant(x) : (int8[s0, 32], float32[s0])
%6 = getitem(%5, 0) : int8[s0, 32]
%7 = getitem(%5, 1) : float32[s0]
%8 = aten.unsqueeze(%7, -1) : float32[s0, 1]
%9 = aten.reshape(%8, [-1]) : float32[s0]
%10 = fxquant_npu.npu_quant_matmul(%6, p_w_codes_0, reshape_default, pertoken_scale=%9, output_dtype=15) : bfloat16[s0, 32768]
%11 = fxquant_npu.npu_quant_matmul(%6, p_w_codes_1, reshape_default_1, pertoken_scale=%9, output_dtype=15) : bfloat16[s0, 32768]
%12 = aten.cat([%10, %11], -1) : bfloat16[s0, 65536]
return [%12]""",
        )

    def test_load_graph_names_the_parts(self) -> None:
        text = lowered(Narrow(65536, 32), 3, 32).load_graph.dump()
        assert text.endswith("w.codes_0, w.codes_1, w.scale = template 0(w)\nb.value = template 1(b)")

    def test_transpose(self) -> None:
        self.check(
            lowered(Narrow(65536, 32, bias=False), 3, 32, wide="transpose"),
            """\
reshape_default : float32[65536]
t_default : int8[32, 65536]
x : bfloat16[3, 32]
%3 = npu.npu_dynamic_quant(x) : (int8[3, 32], float32[3])
%4 = getitem(%3, 0) : int8[3, 32]
%5 = getitem(%3, 1) : float32[3]
%6 = aten.unsqueeze(%5, -1) : float32[3, 1]
%7 = aten.reshape(%6, [-1]) : float32[3]
%8 = npu.npu_quant_matmul(%4, t_default, reshape_default, pertoken_scale=%7, output_dtype=15) : bfloat16[3, 65536]
return [%8]""",
        )

    def test_parts_of_k(self) -> None:
        self.check(
            lowered(Narrow(48, 65536), 3, 65536),
            """\
p_w_codes_0 : int8[32768, 48]
p_w_codes_1 : int8[32768, 48]
p_b : bfloat16[48]
reshape_default : float32[48]
x : bfloat16[3, 65536]
%5 = npu.npu_dynamic_quant(x) : (int8[3, 65536], float32[3])
%6 = getitem(%5, 0) : int8[3, 65536]
%7 = getitem(%5, 1) : float32[3]
%8 = aten.unsqueeze(%7, -1) : float32[3, 1]
%9 = aten.to.dtype(p_b, float32) : float32[48]
%10 = aten.slice.Tensor(%6, 1, 0, 32768) : int8[3, 32768]
%11 = aten.contiguous(%10) : int8[3, 32768]
%12 = aten.slice.Tensor(%6, 1, 32768, 65536) : int8[3, 32768]
%13 = aten.contiguous(%12) : int8[3, 32768]
%14 = aten.reshape(%8, [-1, 1]) : float32[3, 1]
%15 = aten.new_ones(%14, [1]) : float32[1]
%16 = npu.npu_quant_matmul(%11, p_w_codes_0, %15, output_dtype=3) : int32[3, 48]
%17 = npu.npu_quant_matmul(%13, p_w_codes_1, %15, output_dtype=3) : int32[3, 48]
%18 = aten.add.Tensor(%16, %17) : int32[3, 48]
%19 = aten.to.dtype(%18, float32) : float32[3, 48]
%20 = aten.mul.Tensor(%19, %14) : float32[3, 48]
%21 = aten.mul.Tensor(%20, reshape_default) : float32[3, 48]
%22 = aten.add.Tensor(%21, %9) : float32[3, 48]
%23 = aten.to.dtype(%22, bfloat16) : bfloat16[3, 48]
return [%23]""",
        )

    def test_310p(self) -> None:
        model = Narrow(48, 32, bias=False, dtype=HALF)
        self.check(
            lowered(model, 3, 32, target=DAV_310P),
            """\
p_w_codes : int8[48, 32]
reshape_default : float32[48]
x : float16[3, 32]
%3 = npu.npu_quant_matmul_dequant(x, p_w_codes, reshape_default, quant_mode=pertoken) : float16[3, 48]
return [%3]""",
        )

    def test_fp32(self) -> None:
        self.check(
            lowered(Narrow(48, 32, dtype=torch.float32), 3, 32),
            """\
p_w_codes : int8[32, 48]
p_b : float32[48]
reshape_default : float32[48]
x : float32[3, 32]
%4 = aten.to.dtype(x, bfloat16) : bfloat16[3, 32]
%5 = npu.npu_dynamic_quant(%4) : (int8[3, 32], float32[3])
%6 = getitem(%5, 0) : int8[3, 32]
%7 = getitem(%5, 1) : float32[3]
%8 = aten.unsqueeze(%7, -1) : float32[3, 1]
%9 = aten.reshape(%8, [-1]) : float32[3]
%10 = npu.npu_quant_matmul(%6, p_w_codes, reshape_default, pertoken_scale=%9, bias=p_b, output_dtype=15) : bfloat16[3, 48]
%11 = aten.to.dtype(%10, float32) : float32[3, 48]
return [%11]""",
        )
