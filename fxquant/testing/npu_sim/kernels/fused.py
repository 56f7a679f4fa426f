"""References of element-wise ops that models call by name, and of casts."""

from __future__ import annotations

import torch
from torch import Tensor

from fxquant.testing.npu_sim.kernels.registry import Call, reference


@reference("npu_swiglu")
def swiglu(call: Call) -> Tensor:
    """``silu(first half) * second half``."""
    gate, up = call.input.float().chunk(2, call.dim)
    return (torch.nn.functional.silu(gate) * up).to(call.input.dtype)


@reference("npu_rms_norm")
def rms_norm(call: Call) -> tuple[Tensor, Tensor]:
    """The normalized input and the reciprocal root mean square, float32."""
    x = call.input.float()
    dims = tuple(range(-call.gamma.dim(), 0))
    rstd = torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + call.epsilon)
    return (x * rstd * call.gamma.float()).to(call.input.dtype), rstd


@reference("npu_rotary_mul")
def rotary_mul(call: Call) -> Tensor:
    """``x * cos + rotate_half(x) * sin``."""
    if call.rotary_mode != "half":
        raise NotImplementedError("npu_rotary_mul: the simulated NPU has the mode 'half' only")
    a, b = call.input.chunk(2, -1)
    return (call.input * call.r1 + torch.cat((-b, a), -1) * call.r2).to(call.input.dtype)
