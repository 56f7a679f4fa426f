"""Memory, layouts, streams and devices: torch_npu's own code over the stand-ins."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

MIB = 1 << 20
NZ = 29


def needs_two_devices():
    if torch.npu.device_count() < 2:
        pytest.skip("needs two simulated devices: --devices 2")


def test_the_allocator_counts(npu):
    before = torch.npu.memory_allocated()
    x = torch.empty(3 * MIB, dtype=torch.uint8, device=npu)
    assert before + 3 * MIB <= torch.npu.memory_allocated() <= before + 3 * MIB + 1024
    assert torch.npu.memory_reserved() >= torch.npu.memory_allocated()
    del x
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() >= before + 3 * MIB
    torch.npu.reset_peak_memory_stats()
    assert torch.npu.max_memory_allocated() == before


def test_out_of_memory_at_the_capacity(npu, npu_capacity):
    npu_capacity(256)
    kept = torch.empty(200 * MIB, dtype=torch.uint8, device=npu)
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(100 * MIB, dtype=torch.uint8, device=npu)
    del kept
    torch.npu.empty_cache()
    torch.empty(250 * MIB, dtype=torch.uint8, device=npu)
    free, total = torch.npu.mem_get_info()
    assert total == 256 * MIB
    assert free < 6 * MIB


def test_results_are_allocated_on_the_device(npu):
    x = torch.ones(MIB, device=npu)
    before = torch.npu.memory_allocated()
    y = x + 1
    assert torch.npu.memory_allocated() - before >= 4 * MIB
    assert y.cpu().eq(2).all()


def test_aten_equals_the_cpu(npu):
    x, w, b = torch.randn(3, 5, 64), torch.randn(32, 64), torch.randn(32)
    y = torch.nn.functional.layer_norm(torch.nn.functional.linear(x.npu(), w.npu(), b.npu()), (32,))
    want = torch.nn.functional.layer_norm(torch.nn.functional.linear(x, w, b), (32,))
    assert torch.equal(y.cpu(), want)
    y = x.npu()
    assert torch.equal(y.transpose(0, 1)[1:].softmax(-1).cpu(), x.transpose(0, 1)[1:].softmax(-1))
    y.mul_(2).clamp_(max=1)
    assert torch.equal(y.cpu(), (x * 2).clamp(max=1))
    out = torch.empty(3, 5, 32, device=npu)
    assert torch.matmul(y, w.npu().t(), out=out) is out
    assert torch.equal(y.to(torch.bfloat16).cpu(), y.cpu().to(torch.bfloat16))


def test_attention_equals_the_cpu(npu):
    q, k, v = (torch.randn(1, 4, 7, 16) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(
        attention(q.npu(), k.npu(), v.npu(), is_causal=True).cpu(), attention(q, k, v, is_causal=True)
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 32), (17, 33), (3, 40, 70)])
def test_nz_keeps_values(npu, dtype, shape):
    x = torch.randint(-100, 100, shape).to(dtype)
    nz = torch.ops.npu.npu_format_cast(x.npu(), NZ)
    assert torch.ops.npu.get_npu_format(nz) == NZ
    assert nz.shape == x.shape
    assert torch.equal(nz.cpu(), x)
    assert torch.equal(nz.transpose(-1, -2).cpu(), x.transpose(-1, -2))
    back = torch.ops.npu.npu_format_cast(nz, 2)
    assert torch.ops.npu.get_npu_format(back) == 2
    assert torch.equal(back.cpu(), x)


def test_nz_order_is_columns_of_16_by_32_bytes(npu):
    from fxquant.testing.npu_sim.kernels.memory import storage_bytes

    x = torch.arange(20 * 40).remainder(100).to(torch.int8).view(20, 40)
    flat = storage_bytes(torch.ops.npu.npu_format_cast(x.npu(), NZ)).view(torch.int8)
    for row, column in ((0, 0), (0, 31), (1, 0), (15, 5), (16, 0), (19, 33), (3, 39)):
        tile = (column // 32) * 2 + row // 16
        assert flat[tile * 512 + row % 16 * 32 + column % 32] == x[row, column]


def test_nz_takes_values(npu):
    nz = torch.ops.npu.npu_format_cast(torch.zeros(20, 40, dtype=torch.int8).npu(), NZ)
    x = torch.randint(-100, 100, (20, 40)).to(torch.int8)
    nz.copy_(x.npu())
    assert torch.equal(nz.cpu(), x)
    with pytest.raises(NotImplementedError, match="FRACTAL_NZ"):
        nz.add_(1)
    with pytest.raises(NotImplementedError, match="views"):
        nz[4:].cpu()


def test_the_cast_to_nz_is_out_of_place(npu):
    x = torch.zeros(1024, 1024, dtype=torch.int8, device=npu)
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    nz = torch.ops.npu.npu_format_cast(x, NZ)
    assert torch.npu.max_memory_allocated() - before >= MIB
    assert nz.data_ptr() != x.data_ptr()


def test_format_cast_traces(npu):
    with FakeTensorMode() as mode:
        x = torch.empty(20, 40, dtype=torch.int8, device=npu)
        y = torch.ops.npu.npu_format_cast(x, NZ)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert y.fake_mode is mode
    assert torch.ops.npu.npu_format_cast(torch.empty(2, 4, device="meta"), NZ).is_meta


def test_streams_and_events(npu):
    stream = torch.npu.Stream()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.npu.stream(stream):
        x = torch.ones(8, device=npu) + 1
        end.record(stream)
    torch.npu.current_stream().wait_event(end)
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert stream.query()
    assert x.cpu().tolist() == [2.0] * 8


def test_pinned_memory(npu):
    x = torch.randn(64).pin_memory()
    assert x.is_pinned()
    assert not torch.randn(64).is_pinned()
    y = x.to(npu, non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(y.cpu(), x)


def test_two_devices(npu):
    needs_two_devices()
    x = torch.ones(4, MIB, device="npu:1")
    assert torch.npu.memory_allocated(1) >= 16 * MIB
    assert torch.npu.memory_allocated(0) < MIB
    assert (x + 1).device == torch.device("npu:1")
    with torch.npu.device(1):
        assert torch.ones(2, device="npu").device.index == 1
    with pytest.raises(RuntimeError, match=r"same device.*npu:0.*npu:1"):
        x @ torch.ones(MIB, 2, device="npu:0")
    scale = torch.rand(32, device="npu:0")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ops.npu.npu_quant_matmul(
            torch.ones(2, 64, dtype=torch.int8, device="npu:1"),
            torch.ones(64, 32, dtype=torch.int8, device="npu:1"), scale, output_dtype=torch.bfloat16,
        )  # fmt: skip
    assert torch.equal(x.to("npu:0").cpu(), x.cpu())


def test_devices_have_their_own_capacity(npu, npu_capacity):
    needs_two_devices()
    npu_capacity(64)
    kept = [torch.empty(60 * MIB, dtype=torch.uint8, device=f"npu:{i}") for i in range(2)]
    for index in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(30 * MIB, dtype=torch.uint8, device=f"npu:{index}")
    del kept


def test_generators_repeat(npu):
    torch.manual_seed(3)
    a = torch.randn(8, device=npu)
    torch.manual_seed(3)
    assert torch.equal(a, torch.randn(8, device=npu))


def test_modules_move(npu):
    module = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 4), torch.nn.GELU())
    tokens = torch.tensor([[1, 2, 3]])
    want = module(tokens).detach()
    assert torch.equal(module.to(npu)(tokens.npu()).detach().cpu(), want)
    assert {k: v.device.type for k, v in module.state_dict().items()}.popitem()[1] == "npu"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graphs_with_npu_ops_compile(npu, backend):
    def f(x, w, scale):
        codes, token = torch.ops.npu.npu_dynamic_quant(x)
        nz = torch.ops.npu.npu_format_cast(w, NZ)
        return torch.ops.npu.npu_quant_matmul(
            codes, nz, scale, pertoken_scale=token, output_dtype=torch.float16
        )

    x, scale = torch.randn(3, 64).half().npu(), torch.rand(32).npu()
    w = torch.randint(-127, 128, (64, 32)).to(torch.int8).npu()
    assert torch.equal(torch.compile(f, backend=backend, fullgraph=True)(x, w, scale), f(x, w, scale))


def test_files_load_onto_the_device(npu, tmp_path):
    from safetensors.torch import load_file, save_file

    x = torch.randn(3, 64, device=npu)
    save_file({"x": x}, tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors", device="npu:0")["x"], x)
    torch.save(x, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt", weights_only=True), x)
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="cpu", weights_only=True), x.cpu())
