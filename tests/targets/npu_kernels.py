# ruff: noqa: A002 - the names of arguments are those of the ops
"""References on the CPU for the NPU's ops, and the door through which small graphs are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxquant import ops as _ops  # noqa: F401 - registers the dialect
from fxquant.graph import placeholders
from fxquant.targets.npu_schemas import ensure_schemas
from fxquant.targets.npu_table import CODES


def dynamic_quant(input: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    assert input.numel()
    x = input.float()
    scale = x.abs().amax(-1) / 127
    return (x / scale[..., None].clamp_min(1e-30)).round().to(torch.int8), scale


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    **_: object,
) -> Tensor:
    assert x1.numel()
    assert x1.is_contiguous()
    if scale.dtype == torch.int64:
        scale = scale.to(torch.int32).view(torch.float32)
    sums = x1.long() @ x2.long()
    assert sums.abs().max() < 2**31
    dtype = getattr(torch, CODES[output_dtype or 1])
    if dtype == torch.int32:
        assert scale.eq(1).all()
        return sums.to(dtype)
    out = sums.float() * scale.float()
    out = out if pertoken_scale is None else out * pertoken_scale[:, None]
    return (out if bias is None else out + bias.float()).to(dtype)


def quant_matmul_dequant(x: Tensor, quantized_weight: Tensor, weight_scale: Tensor, **_: object) -> Tensor:
    codes, scale = dynamic_quant(x)
    return quant_matmul(codes, quantized_weight.t(), weight_scale, pertoken_scale=scale, output_dtype=5)


def weight_quant_batchmatmul(
    x: Tensor, weight: Tensor, antiquant_scale: Tensor, antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None, quant_offset: Tensor | None = None, bias: Tensor | None = None,
    antiquant_group_size: int = 0, *_: object, **__: object,
) -> Tensor:  # fmt: skip
    assert x.numel()
    scale = antiquant_scale.float()
    offset = torch.zeros_like(scale) if antiquant_offset is None else antiquant_offset.float()
    if antiquant_group_size:
        scale = scale.repeat_interleave(antiquant_group_size, 0)[: weight.shape[0]]
        offset = offset.repeat_interleave(antiquant_group_size, 0)[: weight.shape[0]]
    out = x.float() @ ((weight.float() + offset) * scale)
    return (out if bias is None else out + bias.float()).to(x.dtype)


def quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    assert input.numel()
    assert div_mode
    x = input.float() / scales + (0 if zero_points is None else zero_points.float())
    return x.round().clamp(-128, 127).to(torch.int8)


def trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int = 0) -> Tensor:
    return scale.view(torch.int32).to(torch.int64)


def grouped_matmul(
    x: list[Tensor], weight: list[Tensor], *, group_list: Tensor, **kwargs: Any
) -> list[Tensor]:
    ends = group_list.cumsum(0).tolist() if kwargs["group_list_type"] == 1 else group_list.tolist()
    outs, start = [], 0
    for e, end in enumerate(ends):
        rows = slice(start, end)
        out = (x[0][rows].double() @ weight[0][e].double()).float() * kwargs["scale"][0][e].float()
        out = out * kwargs["per_token_scale"][0][rows, None]
        outs.append(out.to(getattr(torch, CODES[kwargs["output_dtype"]])))
        start = end
    return [torch.cat(outs)]


KERNELS: dict[str, Callable[..., object]] = {
    "npu_dynamic_quant": dynamic_quant,
    "npu_quant_matmul": quant_matmul,
    "npu_quant_matmul_dequant": quant_matmul_dequant,
    "npu_weight_quant_batchmatmul": weight_quant_batchmatmul,
    "npu_quantize": quantize,
    "npu_trans_quant_param": trans_quant_param,
    "npu_grouped_matmul": grouped_matmul,
}


def register() -> torch.library.Library:
    """Give the ops their CPU kernels for as long as the library lives."""
    ensure_schemas()
    library = torch.library.Library("npu", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
    return library


def trace(run: Callable[..., object], *inputs: Tensor, dynamic: bool = False) -> fx.GraphModule:
    """The graph of ``run`` in the form that passes see, its placeholders named after the arguments.

    ``dynamic``: the leading dims of the first input are symbolic; those of weights never are.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    free = [DimDynamic.DYNAMIC] * (inputs[0].dim() - 1) if dynamic else []
    sizes = [*free, *[DimDynamic.STATIC] * (inputs[0].dim() - len(free))]
    x = mode.from_tensor(inputs[0], symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    rest = [mode.from_tensor(one, static_shapes=True) for one in inputs[1:]]
    gm = make_fx(run, tracing_mode="fake", pre_dispatch=True)(x, *rest)
    for node, name in zip(placeholders(gm), run.__code__.co_varnames, strict=False):
        node.target = node.name = name
    return gm
