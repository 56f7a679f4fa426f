"""The CPU's int8 kernel is trusted after a self-test only; the fallback is exact and shows in the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxquant
from fxquant.errors import ConfigError
from fxquant.targets import choose_target
from fxquant.targets.cpu import cpu_target, int8_kernel, int_mm_fault

REAL = torch._int_mm
EXACT, FAST = "fxquant::scaled_mm", "fxquant_cpu::scaled_mm"


@pytest.fixture(autouse=True)
def _fresh_self_test() -> Iterator[None]:
    cpu_target.cache_clear()
    int8_kernel.cache_clear()
    yield
    cpu_target.cache_clear()
    int8_kernel.cache_clear()


def saturating(a: Tensor, b: Tensor) -> Tensor:
    """Products of ``a`` made unsigned, added in pairs in int16 that saturates, as without VNNI."""
    products = (a.int() + 128)[:, :, None] * b.int()[None]
    pairs = F.pad(products, (0, 0, 0, a.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
    return (pairs.clamp(-(2**15), 2**15 - 1).sum(1) - 128 * b.int().sum(0)).int()


def in_float32(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).int()


def in_bfloat16(a: Tensor, b: Tensor) -> Tensor:
    return (a.bfloat16() @ b.bfloat16()).int()


def wrong_for_single_rows(a: Tensor, b: Tensor) -> Tensor:
    return REAL(a, b) + (a.shape[0] == 1)


def unsigned(a: Tensor, b: Tensor) -> Tensor:
    return ((a.int() & 255) @ b.int()).int()


def absent(a: Tensor, b: Tensor) -> Tensor:
    raise RuntimeError("_int_mm is not built\nwith a second line")


WRONG = [saturating, in_float32, in_bfloat16, wrong_for_single_rows, unsigned, absent]


def model() -> nn.Module:
    with fxquant.meta_init():
        return nn.Sequential(nn.Linear(1056, 40, bias=False))


def weight() -> Tensor:
    """Rows of one magnitude each, so that int8 per channel holds them exactly."""
    signs = torch.where(torch.rand(40, 1056) < 0.5, -1.0, 1.0)
    signs[:8] = 1
    return signs * torch.logspace(-2, 1, 40)[:, None]


@pytest.mark.parametrize("kernel", WRONG)
def test_a_wrong_kernel_is_found_out(kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_int_mm", kernel)
    fault = int_mm_fault()
    assert fault is not None
    assert "\n" not in fault
    row = cpu_target().kernels[EXACT]
    assert row.op == EXACT
    assert row.reason == f"exact reference: {fault}"
    plan = fxquant.plan(model(), None, scheme="int8")
    assert plan.kernels == {EXACT: {"op": EXACT, "reason": row.reason}}
    assert fault in str(plan)

    w, x = weight(), torch.ones(3, 1056)
    net = fxquant.compile(model(), {"0.weight": w}, scheme="int8", example_inputs=(x,))
    want = (x.double() @ w.double().t()).float()
    with torch.no_grad():
        for got in (net(x), F.linear(x, net[0].weight)):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert fxquant.report(net).rewritten == 1


def test_a_right_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def exact(a: Tensor, b: Tensor) -> Tensor:
        seen.append((a.shape[0], b.shape[1], a.shape[1]))
        return (a.long() @ b.long()).int()

    monkeypatch.setattr(torch, "_int_mm", exact)
    assert cpu_target().kernels[EXACT].op == FAST
    assert cpu_target() is cpu_target()
    assert max(k for _, _, k in seen) * 127**2 > 2**24
    assert {m == 1 for m, _, _ in seen} == {True, False}
    assert {k % 2 for _, _, k in seen} == {0, 1}
    low = fxquant.lower(model(), {"0.weight": weight()}, scheme="int8", example_inputs=(torch.ones(3, 1056),))
    assert "fxquant_cpu.scaled_mm" in low.dump()
    seen.clear()
    low.materialize()(torch.ones(3, 1056))
    assert seen == [(3, 40, 1056)]


def test_the_self_test_does_not_depend_on_the_callers_modes() -> None:
    expected = int_mm_fault()
    with torch.device("meta"):
        assert int_mm_fault() == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert int_mm_fault() == expected


def test_limits_and_missing_ops_are_refused_with_their_reason() -> None:
    target = cpu_target()
    assert isinstance(target.admits(EXACT, n=1, k=133_144), fxquant.Kernel)
    refusal = target.admits(EXACT, n=1, k=133_145)
    assert isinstance(refusal, fxquant.Refusal)
    assert "takes K <= 133144, got K = 133145 (int32 sums of 127 * 127)" in refusal.reason
    absent_op = target.admits("fxquant::unknown", n=1, k=1)
    assert absent_op == fxquant.Refusal(reason="target cpu has no fxquant::unknown")


def test_choice_of_the_target() -> None:
    assert choose_target("cpu") is cpu_target()
    mine = fxquant.Target(name="mine", device_type="cpu", kernels={})
    assert choose_target("cpu", mine) is mine
    plan = fxquant.plan(model(), None, scheme="int8", target=mine)
    assert not plan.quantized
    assert plan.weight("0").reason == "target mine has no fxquant::scaled_mm"
    with pytest.raises(ConfigError, match="available: cpu"):
        choose_target("tpu")
    with pytest.raises(ConfigError, match=r"must be a fxquant\.Target"):
        choose_target("cpu", "Ascend910B2")


# Printed as JSON by a process of its own: oneDNN reads the variable once, when it is loaded.
PROBE = """
import json, torch, fxquant
from torch import nn
K, N = 1056, 40
g = torch.Generator().manual_seed(21)
sign = lambda *shape: torch.randint(0, 2, shape, generator=g) * 2.0 - 1
w, x = torch.ones(N, K), torch.ones(6, K)
w[8:], w[4:8], x[2:], x[1] = sign(N - 8, K), -1, sign(4, K), -1
w *= torch.logspace(-2, 1, N)[:, None]
x *= torch.tensor([3.0, 0.5, 1.0, 20.0, 0.1, 7.0])[:, None]
want = x.double() @ w.double().t()
with fxquant.meta_init():
    net = nn.Linear(K, N, bias=False)
plan = fxquant.plan(net, {"weight": w}, scheme="int8", example_inputs=(x,))
low = fxquant.lower(net, {"weight": w}, scheme="int8", example_inputs=(x,)).materialize()
net = fxquant.compile(net, {"weight": w}, scheme="int8", example_inputs=(x,))
with torch.no_grad():
    outs = {"lowered": low(x), "compiled": net(x), "eager": nn.functional.linear(x, net.weight)}
report = fxquant.report(net)
full = torch.full((32, 64), 127, dtype=torch.int8)
print(json.dumps({
    "kernel": plan.kernels["fxquant::scaled_mm"],
    "text": plan.summary(),
    "ran": low.dump().count("fxquant_cpu.scaled_mm"),
    "errors": {name: ((out - want).norm() / want.norm()).item() for name, out in outs.items()},
    "right": bool((torch._int_mm(full, full.t()) == 127 * 127 * 64).all()),
    "counts": [report.rewritten, report.eager_linears, report.fallbacks],
}))
"""


@pytest.mark.parametrize("isa", [None, "AVX2", "AVX512_CORE"])
def test_int8_extremes_are_exact_under_each_instruction_set(isa: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "DNNL_MAX_CPU_ISA"}
    env |= {} if isa is None else {"DNNL_MAX_CPU_ISA": isa}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False, env=env, cwd=root
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    print(isa, seen)
    assert max(seen["errors"].values()) < 1e-5
    assert seen["counts"] == [1, 1, 0]
    kernel = seen["kernel"]
    assert f"{kernel['op']} ({kernel['reason']})" in seen["text"]
    assert kernel["op"] == (FAST if seen["right"] else EXACT)
    assert seen["ran"] == (1 if seen["right"] else 0)
    assert kernel["reason"].startswith("torch._int_mm passed" if seen["right"] else "exact reference: ")
