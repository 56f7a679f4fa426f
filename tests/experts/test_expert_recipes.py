"""Loading experts one by one: what each reads, in tiles below one expert, from files, memory and streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxquant
from fxquant.capture import make_fake_mode
from fxquant.materialize.experts import cut_experts
from fxquant.materialize.row_rules import NotSeparableError
from fxquant.numerics.experts import quantize_experts
from fxquant.scheme import SCHEMES
from reference import error
from tests.specs import spec_of

E, N, K = 4, 192, 128
KIB = 1 << 10


class Experts(nn.Module):
    """Each token goes to one expert, in blocks of equal size."""

    def __init__(self, shape: tuple[int, ...] = (E, N, K), *, turned: bool = False) -> None:
        super().__init__()
        self.turned = turned
        self.w = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        """``[E, S, K] -> [E, S, N]``."""
        return torch.bmm(x, self.w if self.turned else self.w.mT)


X = torch.randn(E, 3, K)


def values(shape: tuple[int, ...] = (E, N, K)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([0.01, 1.0, 3.0, 100.0])[:, None, None]
    return torch.randn(shape, generator=generator) * spread


def on_meta(turned: bool) -> nn.Module:
    with fxquant.meta_init():
        return Experts((E, K, N) if turned else (E, N, K), turned=turned).eval()


def sources(folder: Path, w: Tensor) -> dict[str, Callable[[], Any]]:
    save_file({"w": w.contiguous()}, folder / "model.safetensors")
    halves = [("w", w[:2], (0, 0, 0)), ("w", w[2:], (2, 0, 0))]
    columns = [("w", w[..., :64].contiguous(), (0, 0, 0)), ("w", w[..., 64:].contiguous(), (0, 0, 64))]
    return {
        "file": lambda: folder,
        "dict": lambda: {"w": w},
        "stream": lambda: iter([("w", w)]),
        "stream in two parts": lambda: iter(halves),
        "stream by columns": lambda: iter(columns),
    }


NAMES = ("file", "dict", "stream", "stream in two parts", "stream by columns", "mmap")


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "int4_g32", "fp8_tensor", "fp8_block", "nvfp4_weight_only"])
def test_constants_from_every_source(tmp_path: Path, source: str, turned: bool, scheme: str) -> None:
    rows = values()
    given = rows.mT.contiguous() if turned else rows
    options: dict[str, Any] = {"reader": "mmap"} if source == "mmap" else {}
    ckpt = sources(tmp_path, given)["file" if source == "mmap" else source]()
    model = fxquant.compile(
        on_meta(turned), ckpt, scheme=scheme, example_inputs=(X,), read_bytes="16KiB", **options
    )
    weight = model.get_parameter("w")
    spec = spec_of(scheme, rows.dtype)
    for got, want in zip(weight.constants, quantize_experts(rows, spec), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert weight.shape == given.shape


def test_tiles_are_smaller_than_an_expert(tmp_path: Path) -> None:
    w = values()
    options: dict[str, Any] = {"scheme": "int8", "example_inputs": (X,), "load_workers": 1}
    save_file({"w": w}, tmp_path / "model.safetensors")
    model = fxquant.compile(on_meta(turned=False), tmp_path, read_bytes="16KiB", **options)
    row = model.fxquant_plan.weight("w")
    one = w[0].nbytes
    assert row.tiles == E * one // (16 * KIB)
    assert row.transient_bytes <= 3 * 16 * KIB < one
    constants = sum(part.nbytes for part in model.get_parameter("w").constants)
    assert row.resident_bytes == constants
    report = fxquant.report(model)
    assert report.measured_peak["cpu"] <= report.plan.predicted_peak["cpu"] <= constants + one


def test_a_budget_below_one_expert_is_kept(tmp_path: Path) -> None:
    w = torch.randn(E, 1024, 1024)
    save_file({"w": w}, tmp_path / "model.safetensors")
    constants = w.numel() + 4 * E * 1024
    options: dict[str, Any] = {"scheme": "int8", "load_workers": 1}
    budget = constants + w[0].nbytes // 2
    with fxquant.meta_init():
        model: nn.Module = Experts((E, 1024, 1024))
    x = torch.randn(E, 2, 1024)
    model = fxquant.compile(model, tmp_path, host_budget=budget, example_inputs=(x,), **options)
    assert fxquant.report(model).measured_peak["cpu"] <= budget


def traced(make: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Any:
    with make_fake_mode(), torch.no_grad():
        return make_fx(lambda *tensors: (make(*tensors),))(*(torch.empty(shape) for shape in shapes))


def stacked(*tensors: Tensor) -> Tensor:
    half = len(tensors) // 2
    return torch.cat([torch.stack(tensors[:half]), torch.stack(tensors[half:])], 1).to(torch.bfloat16)


def interleaved(w: Tensor) -> Tensor:
    return w.view(E, 2, N, K).transpose(1, 2).reshape(E, 2 * N, K)


@pytest.mark.parametrize(
    ("make", "shapes", "reads"),
    [
        (stacked, [(N, K)] * (2 * E), 2),
        (lambda w: w.transpose(1, 2) * 2, [(E, K, N)], 1),
        (interleaved, [(E, 2 * N, K)], 1),
        (lambda a, b: a + b, [(E, N, K), (N, K)], 2),
    ],
    ids=["per-expert keys", "one stored stack", "interleaved", "with a common part"],
)
def test_each_expert_is_made_of_its_own(
    make: Callable[..., Tensor], shapes: list[tuple[int, ...]], reads: int
) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    whole = make(*tensors)
    experts = cut_experts(traced(make, *shapes))
    assert len(experts) == E
    assert len({expert.structure for expert in experts}) == 1
    for i, expert in enumerate(experts):
        assert len(expert.reads) == reads
        given = [tensors[at] if taken is None else tensors[at][taken.index] for at, taken in expert.reads]
        assert torch.equal(expert.make(*given), whole[i])


@pytest.mark.parametrize(
    "make",
    [lambda w: w.flip(0), lambda w: w.roll(1, 0), lambda w: w.permute(1, 0, 2), lambda w: w / w.norm()],
    ids=["flip", "roll", "second axis", "norm of all"],
)
def test_mixed_experts_are_refused(make: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotSeparableError):
        list(cut_experts(traced(make, (E, E, K))))


def test_a_key_for_each_expert_and_one_template() -> None:
    """The load graph as text: which keys each expert is made of."""
    from fxquant.materialize.recipes import LoadGraph, Reads

    graph = LoadGraph()
    keys = tuple(f"{i}.{name}" for name in ("gate", "up") for i in range(2))
    reads = Reads(keys=keys, dtypes=(torch.bfloat16,) * 4, shapes=((3, 8),) * 4, convert=stacked)
    form = fxquant.form.Form(scheme="int8")
    graph.add("w", reads, dtype=torch.bfloat16, form=form, experts=True)
    graph.add("v", reads, dtype=torch.bfloat16, form=form, experts=True)
    assert len(graph.templates) == 1
    assert graph.dump().splitlines()[-4:] == [
        "w[0].codes, w[0].scale = template 0(0.gate, 0.up)",
        "w[1].codes, w[1].scale = template 0(1.gate, 1.up)",
        "v[0].codes, v[0].scale = template 0(0.gate, 0.up)",
        "v[1].codes, v[1].scale = template 0(1.gate, 1.up)",
    ]


def test_mixed_experts_load_all_the_same() -> None:
    """A conversion without a row rule: one recipe for all, whole, with the reason in the plan."""
    from fxquant.materialize.recipes import LoadGraph, Reads, result_vals

    graph = LoadGraph()
    reads = Reads(keys=("w",), dtypes=(torch.float32,), shapes=((E, N, K),), convert=lambda w: w.flip(0))
    recipe = graph.add("w", reads, dtype=torch.float32, form=fxquant.form.Form(scheme="int8"), experts=True)
    assert (recipe.expert, recipe.experts) == (None, 0)
    assert [tuple(val.shape) for val in result_vals(graph.templates[0])] == [(E, N, K), (E, N, 1)]


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.randn(E + 1, N, K)}, tmp_path / "model.safetensors")
    with pytest.raises(fxquant.errors.WeightMismatchError, match=r"\[5, 192, 128\]"):
        fxquant.compile(on_meta(turned=False), tmp_path, scheme="int8", example_inputs=(X,))


def test_reload_and_saved_constants(tmp_path: Path) -> None:
    w = values()
    save_file({"w": w}, tmp_path / "model.safetensors")
    model = fxquant.compile(on_meta(turned=False), tmp_path, scheme="int8", example_inputs=(X,))
    first = model(X)
    fxquant.save_checkpoint(model, tmp_path / "saved")
    again = fxquant.compile(on_meta(turned=False), tmp_path / "saved", example_inputs=(X,))
    assert torch.equal(again(X), first)
    address = [part.data_ptr() for part in model.get_parameter("w").constants]
    fxquant.reload(model, {"w": w.flip(0)})
    assert [part.data_ptr() for part in model.get_parameter("w").constants] == address
    assert torch.equal(model(X.flip(0)), first.flip(0))


def test_dummy_weights() -> None:
    model = fxquant.compile(on_meta(turned=False), scheme="int8", weights="dummy", example_inputs=(X,))
    out = model(X)
    assert out.isfinite().all()
    assert 0.2 < out.std() < 5


@pytest.mark.parametrize(
    ("scheme", "rotate"),
    [("int8", True), ("int4_g32_asym", True), ("w4a8_g128", False), ("fp8_block", False), ("nvfp4", False)],
)
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_other_schemes(scheme: str, rotate: bool, turned: bool) -> None:
    """In a graph, on codes; the values that they stand for are those of the weight by itself."""
    rows = values()
    given = rows.mT.contiguous() if turned else rows
    model = fxquant.compile(
        on_meta(turned), {"w": given}, scheme=scheme, example_inputs=(X,), rotate=rotate, dynamic=False
    )
    got = model(X)
    report = fxquant.report(model)
    assert (report.rewritten, report.fallbacks, report.eager_linears) == (1, 0, 0)
    weight = model.get_parameter("w")
    assert (".rot" in str(weight.form)) == rotate
    floats = weight.dequantize()
    assert error(floats, given) < 0.15
    act = SCHEMES[scheme].act
    bound = 1e-5 if act is None else {4: 0.2}.get(act.type.bits, 0.05)
    for i in range(E):  # experts of every size
        one = floats[i] if turned else floats[i].mT
        assert error(got[i], X[i] @ one) < bound
