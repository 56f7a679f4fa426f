"""Quantized look-ups: rows of the codes, only where a config entry asks; tied heads; what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import opcheck

import fxquant
from fxquant import numerics
from fxquant.errors import QuantizedWeightError, RefusedError
from fxquant.materialize.meter import LiveBytes
from fxquant.scheme import SCHEMES, QuantSpec
from reference import error

fxq = torch.ops.fxquant
IDS = torch.tensor([[1, 2, 3, 49], [4, 5, 0, 0]])
SPECS = sorted({str(scheme.weight.plain) for scheme in SCHEMES.values() if scheme.weight is not None})


def by_hand(weight: Tensor, top: int, group: int) -> Tensor:
    """What symmetric integer codes of a weight stand for, with a scale for each ``group`` of a row."""
    blocks = weight.float().unflatten(1, (-1, group or weight.shape[1]))
    scale = blocks.abs().amax(-1, keepdim=True) / top
    scale = scale.to(weight.dtype).float() if group else scale  # of int4 in the weight's dtype
    return ((blocks / scale).round() * scale).flatten(1)


class Lookup(nn.Module):
    """An embedding, with what ``nn.Embedding`` takes, and a linear behind it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64, **options)
        self.fc = nn.Linear(64, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.embed(ids))


class Tied(nn.Module):
    """A table that the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.fc = nn.Linear(64, 64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(self.embed(ids))))


def pair(make: Any, scheme: str = "none", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """An eager model, and the same compiled from its weights."""
    reference = make().eval().to(dtype)
    with fxquant.meta_init():
        model = make().eval().to(dtype)
    state = {name: value.clone() for name, value in reference.state_dict().items()}
    options = {"example_inputs": (IDS,), **options}
    return reference, fxquant.compile(model, state, scheme=scheme, **options)


def run(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids)


def counts(model: nn.Module) -> tuple[int, int, int]:
    report = fxquant.report(model)
    return report.rewritten, report.eager_linears, report.fallbacks


# ------------------------------------------------------------------------------------------- the op


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("k", [96, 37])
def test_rows_are_those_of_the_whole(spec: str, k: int) -> None:
    parts = numerics.quantize_weight(torch.randn(200, k), QuantSpec.parse(spec))
    ids = torch.randint(0, 200, (3, 5))
    for dtype in (torch.float32, torch.bfloat16):
        whole = fxq.dequantize_weight(list(parts), spec, k, dtype)
        for indices in (ids, ids.int(), ids[0, 0], ids[:0], ids.t()[::2], torch.full((4,), 199)):
            got = fxq.embedding_dequant(indices, list(parts), spec, k, dtype)
            assert torch.equal(got, whole[indices.long()])
            assert got.dtype == dtype
    checks = ["test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    if all(part.dtype.itemsize != 1 or not part.is_floating_point() for part in parts):
        checks.append("test_schema")  # multiplies its operands, which float8 cannot
    opcheck(fxq.embedding_dequant.default, (ids, list(parts), spec, k, torch.float32), test_utils=checks)


def test_many_indices_are_worked_on_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxquant.numerics.blocks.TILE_BYTES", 3 * 64 * 4)
    parts = numerics.quantize_weight(torch.randn(50, 64), QuantSpec.parse("int4[1,32]zp"))
    ids = torch.randint(0, 50, (2, 50))
    whole = fxq.dequantize_weight(list(parts), "int4[1,32]zp", 64, torch.float32)
    assert torch.equal(fxq.embedding_dequant(ids, list(parts), "int4[1,32]zp", 64, torch.float32), whole[ids])


@pytest.mark.parametrize("spec", ["int8[1,*]", "int4[1,64]zp", "e2m1[1,16]e4m3"])
def test_the_whole_table_is_never_made(spec: str) -> None:
    n, k = 5000, 256
    parts = numerics.quantize_weight(torch.randn(n, k), QuantSpec.parse(spec))
    with LiveBytes() as live:
        numerics.embedding_rows(IDS, parts, QuantSpec.parse(spec), k, torch.float32)
    assert live.peak["cpu"] < 6 * IDS.numel() * k * 4 < n * k / 8


@pytest.mark.parametrize("index", [50, -1])
def test_an_index_out_of_range_is_an_error(index: int) -> None:
    _, model = pair(Lookup, config={"embed": "int4_g32"})
    ids = torch.tensor([[1, index]])
    with pytest.raises(IndexError):
        run(model, ids)
    with pytest.raises(IndexError):
        F.embedding(ids, model.embed.weight)


def test_operands_are_checked() -> None:
    parts = list(numerics.quantize_weight(torch.randn(5, 8), QuantSpec.parse("int8[1,*]")))
    for ids, k, dtype in ((IDS.float(), 8, torch.float32), (IDS, 9, torch.float32), (IDS, 8, torch.int8)):
        with pytest.raises(RuntimeError, match="fxquant: "):
            fxq.embedding_dequant(ids, parts, "int8[1,*]", k, dtype)


# ------------------------------------------------------------------------------------ models and plans


@pytest.mark.parametrize(("scheme", "top", "group"), [("int8_weight_only", 127, 0), ("int4_g32", 7, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers(scheme: str, top: int, group: int, dtype: torch.dtype) -> None:
    reference, model = pair(Lookup, dtype=dtype, config={"embed": scheme})
    rows = by_hand(reference.embed.weight.detach(), top, group).to(dtype)
    weight = model.fxquant_plan.weight("embed.weight")
    suffix = ".s_bf16" if group and dtype == torch.bfloat16 else ""
    assert (weight.form, weight.reason) == (scheme + suffix, "config 'embed'")
    assert model.fxquant_plan.rewrites == {"linear": 0, "embedding": 1}
    assert list(model.fxquant_plan.kernels) == ["fxquant::embedding_dequant"]
    with torch.no_grad():
        expected = reference.fc(rows[IDS])
    assert torch.equal(run(model), expected)
    assert counts(model) == (1, 0, 0)
    assert torch.equal(F.embedding(IDS, model.embed.weight), rows[IDS])
    assert torch.equal(model.embed(IDS), rows[IDS])
    assert counts(model) == (1, 2, 0)
    assert weight.resident_bytes < weight.float_bytes / (1.5 if dtype == torch.bfloat16 else 3)


def test_only_an_entry_asks() -> None:
    with fxquant.meta_init():
        model = Lookup()
    plan = fxquant.plan(model, scheme="int8", example_inputs=(IDS,))
    row = plan.weight("embed.weight")
    assert (row.form, row.reason) == ("float", "embedding look-up: stays float unless a config entry asks")


@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        ("int8", "int8_weight_only"),
        ("int8_static", "int8_weight_only"),
        ("w4a8_g128", "int4_g128"),
        ("fp8", "fp8"),
    ],
)
def test_the_activation_part_is_ignored(scheme: str, form: str) -> None:
    reference, model = pair(Lookup, config={"embed": scheme})
    row = model.fxquant_plan.weight("embed.weight")
    assert row.form == form
    assert row.reason == f"config 'embed', the activation part of {scheme} is ignored for look-ups"
    assert error(run(model), run(reference)) < 0.15  # 4 bits


def test_options_of_the_module() -> None:
    """padding_idx and what else concerns gradients changes nothing; a cast before the look-up stays."""
    options = {"padding_idx": 0, "sparse": True, "scale_grad_by_freq": True}
    reference, model = pair(lambda: Lookup(**options), config={"embed": "int8_weight_only"})
    assert not reference.embed.weight[0].any()
    rows = by_hand(reference.embed.weight.detach()[1:], 127, 0)
    with torch.no_grad():
        assert torch.equal(run(model, IDS[:1]), reference.fc(rows[IDS[:1] - 1]))
        assert not model.embed(torch.tensor([0])).any()
    half = F.embedding(IDS[:1], model.embed.weight.half())
    assert error(half, rows[IDS[:1] - 1]) < 1e-3


class Renorm(Lookup):
    def __init__(self) -> None:
        super().__init__(max_norm=1.0)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(50, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


class Cut(Lookup):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed.weight[:40])


REFUSED = [
    (Renorm, "written in place by aten.embedding_renorm_", "written in place by look-ups (max_norm)"),
    (Bag, "sums of rows are not computed from codes", "used by an embedding bag, which sums rows"),
    (Cut, "embedding look-up in a part or another order of the weight", None),
]


@pytest.mark.parametrize(("make", "traced", "walked"), REFUSED)
def test_refusals(make: Any, traced: str, walked: str | None) -> None:
    for inputs, reason in (((IDS,), traced), (None, walked)):
        if reason is None:
            continue
        with fxquant.meta_init():
            model = make()
        row = fxquant.plan(model, scheme="none", config={"embed": "int8"}, example_inputs=inputs).weight(
            "embed"
        )
        assert row.form == "float"
        assert reason in row.reason


def test_renorm_in_eager_calls_is_an_error() -> None:
    _, model = pair(Lookup, config={"embed": "int8"})
    with pytest.raises(QuantizedWeightError, match="would write"):
        F.embedding(IDS, model.embed.weight, max_norm=1.0)


def test_a_target_without_the_op_refuses() -> None:
    kernel = fxquant.Kernel(op="fxquant::scaled_mm", reason="test")
    target = fxquant.Target(name="tiny", device_type="cpu", kernels={"fxquant::scaled_mm": kernel})
    options: dict[str, Any] = {"scheme": "none", "target": target, "example_inputs": (IDS,)}
    with fxquant.meta_init():
        model, tied = Lookup(), Tied()
    config = {"embed": "int8"}
    with pytest.raises(RefusedError, match="target tiny has no fxquant::embedding_dequant"):
        fxquant.plan(model, config=config, strict=True, **options)
    row = fxquant.plan(tied, config=config, **options).weight("embed.weight")
    assert row.form == "int8+table"
    assert "kept for look-ups: target tiny has no fxquant::embedding_dequant" in row.reason


# -------------------------------------------------------------------------------------- tied heads

KEPT = "exact float table kept for look-ups"
TIED: list[tuple[dict[str, str | None], str, str]] = [
    ({"head": "int8"}, "int8+table", f"config 'head', {KEPT}"),
    ({"head": "int4_g32"}, "int4_g32+table", f"config 'head', {KEPT}"),
    ({"embed": "int8"}, "int8", "config 'embed', look-ups use the codes too"),
    ({"re:.*": "int8"}, "int8", "config 're:.*', look-ups use the codes too"),
    (
        {"embed": "int8_weight_only", "head": "int8"},
        "int8",
        "config 'head', look-ups use the codes too: config 'embed'",
    ),
    (
        {"head": "int8", "embed": "int4_g32"},
        "int8+table",
        f"config 'head', {KEPT}: config 'embed' asks for int4_g32, the codes are int8",
    ),
    (
        {"head": "int8", "embed": None},
        "int8+table",
        f"config 'head', {KEPT}: config 'embed' asks for none, the codes are int8",
    ),
    ({"head": None, "embed": "int8"}, "float", "config 'head' asks for none"),
]


@pytest.mark.parametrize(("config", "form", "reason"), TIED)
def test_tied(config: dict[str, str | None], form: str, reason: str) -> None:
    with fxquant.meta_init():
        model = Tied()
    row = fxquant.plan(model, scheme="none", config=config, example_inputs=(IDS,)).weight("head.weight")
    assert (row.form, row.reason) == (form, reason)


def test_a_rotated_head_keeps_the_table() -> None:
    with fxquant.meta_init():
        model = Tied()
    options: dict[str, Any] = {"config": {"embed": "int8"}, "rotate": True, "example_inputs": (IDS,)}
    row = fxquant.plan(model, scheme="none", **options).weight("embed")
    assert row.form == "int8.rot+table"
    assert f"{KEPT}: the codes are rotated" in row.reason


@pytest.mark.parametrize("scheme", ["int8_weight_only", "int4_g32_asym"])
def test_tied_to_codes_alone(scheme: str) -> None:
    """Look-ups and the head see the same values."""
    reference, model = pair(Tied, config={"embed": scheme})
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.table is None
    assert model.fxquant_plan.rewrites == {"linear": 1, "embedding": 1}
    out = run(model)
    values = model.embed.weight.dequantize()
    with torch.no_grad():
        reference.embed.weight.copy_(values)
    assert error(out, run(reference)) < 1e-5
    assert counts(model) == (2, 0, 0)
    assert torch.equal(model.embed(IDS), values[IDS])


# -------------------------------------------------------------------------------------- module life


def test_life(tmp_path: Path) -> None:
    config = {"embed": "int4_g32"}
    reference, model = pair(Tied, config=config)
    out = run(model)
    fxquant.save_checkpoint(model, tmp_path / "saved")
    with fxquant.meta_init():
        again = Tied().eval()
    again = fxquant.compile(again, tmp_path / "saved", example_inputs=(IDS,))
    assert again.fxquant_plan.weight("embed").form == "int4_g32"
    assert torch.equal(run(again), out)
    assert torch.equal(run(copy.deepcopy(model)), out)
    doubled = {name: 2 * value for name, value in reference.state_dict().items()}
    fxquant.reload(model, doubled)
    _, other = pair(Tied, config=config)
    fxquant.reload(other, doubled)
    assert torch.equal(run(model), run(other))
    assert not torch.equal(run(model), out)
    torch.save(again.state_dict(), tmp_path / "state.pt")
    model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(run(model), out)
    half = again.half()
    assert half.embed(IDS).dtype == torch.float16
    assert error(run(half), out) < 1e-2
    assert fxquant.report(half).fallbacks == 0


def test_a_live_model() -> None:
    model = Tied().eval()
    options = {"scheme": "none", "config": {"embed": "int8_weight_only"}, "strict": True, "release": True}
    expected = run(model)
    compiled = torch.compile(model, backend="fxquant", options=options)
    assert error(run(compiled), expected) < 0.02
    assert str(model.embed.weight.form) == "int8_weight_only"
    assert model.head.weight is model.embed.weight
    assert error(run(compiled), expected) < 0.02
