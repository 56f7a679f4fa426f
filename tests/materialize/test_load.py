"""Loading: memory, streams, ties, faults; nothing half-loaded."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fxquant
from fxquant.checkpoint import FileCheckpoint, Piece
from fxquant.errors import MissingWeightError, TiedWeightError, WeightMismatchError
from fxquant.materialize.meter import LiveBytes
from fxquant.runtime.quantized_weight import QuantizedWeight

WIDTH, LAYERS, VOCABULARY = 128, 12, 64


class Net(nn.Module):
    """An embedding, many equal linears and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("gain", torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.gain
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def values(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    state = {k: torch.randn(v.shape, generator=generator) / 11 for k, v in Net().state_dict().items()}
    state.pop("head.weight")
    return {name: tensor.to(dtype) for name, tensor in state.items()}


def on_meta() -> Net:
    with fxquant.meta_init():
        return Net().eval()


def compiled(ckpt: object, **options: object) -> Net:
    return fxquant.compile(on_meta(), ckpt, scheme="int8", example_inputs=(IDS,), **options)


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = values()
    save_file({name: state[name] for name in sorted(state, reverse=True)}, tmp_path / "model.safetensors")
    return tmp_path


def test_live_bytes_stay_under_the_bound(folder: Path) -> None:
    """Never more than the final bytes and two float32 copies of the largest layer."""
    model = on_meta()
    plan = fxquant.plan(model, folder, scheme="int8", example_inputs=(IDS,), load_workers=1)
    with LiveBytes() as meter:
        model = fxquant.compile(model, folder, scheme="int8", example_inputs=(IDS,), load_workers=1)
    assert meter.peak["cpu"] <= plan.resident_bytes + 2 * WIDTH * WIDTH * 4
    assert meter.peak["cpu"] <= fxquant.report(model).measured_peak["cpu"] <= plan.predicted_peak["cpu"]


def test_no_float_copy_of_a_quantized_weight_outlives_its_recipe(folder: Path) -> None:
    before = {id(obj) for obj in gc.get_objects() if issubclass(type(obj), Tensor)}
    model = compiled(folder)
    gc.collect()
    floats = [
        obj
        for obj in gc.get_objects()
        if type(obj) in (Tensor, nn.Parameter)
        and id(obj) not in before
        and obj.is_floating_point()
        and tuple(obj.shape) == (WIDTH, WIDTH)
        and not obj.is_meta
    ]
    assert not floats
    assert sum(isinstance(p, QuantizedWeight) for p in model.parameters()) == LAYERS


def test_dict_iterable_and_file_give_the_same(folder: Path) -> None:
    state = values()
    expected = run(compiled(folder))
    assert torch.equal(run(compiled(state)), expected)
    assert torch.equal(run(compiled(iter(reversed(state.items())))), expected)
    wrapped = ((f"_orig_mod.{name}", tensor.float()) for name, tensor in state.items())
    assert torch.equal(run(compiled(wrapped)), expected)


def test_stream_holds_no_more_than_what_it_was_given() -> None:
    """Tensors of a stream are dropped as soon as their weight is made."""
    alive: list[weakref.ref[Tensor]] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in values().items():
            copied = tensor.clone()
            if name.startswith("layers") and name.endswith("weight"):
                assert sum(ref() is not None for ref in alive) <= 1
                alive.append(weakref.ref(copied))
            yield name, copied
            del copied

    compiled(stream())
    assert len(alive) == LAYERS
    assert all(ref() is None for ref in alive)


def test_stream_brings_persistent_buffers() -> None:
    state = {**values(), "gain": torch.full((WIDTH,), 0.5)}
    model = compiled(iter(state.items()))
    assert torch.equal(model.gain, state["gain"])
    without = {name: tensor for name, tensor in state.items() if name != "gain"}
    assert torch.equal(compiled(iter(without.items())).gain, torch.ones(WIDTH))


def test_stream_with_a_tied_weight_twice() -> None:
    state = values()
    twice = [*state.items(), ("head.weight", state["embed.weight"].clone())]
    assert torch.equal(run(compiled(iter(twice))), run(compiled(state)))
    differing = [*state.items(), ("head.weight", state["embed.weight"] + 1)]
    with pytest.raises(TiedWeightError, match=r"embed\.weight"):
        compiled(iter(differing))


def test_stream_that_ends_early_names_the_weights() -> None:
    state = values()
    state.pop("layers.3.weight")
    with pytest.raises(MissingWeightError, match=r"layers\.3\.weight"):
        compiled(iter(state.items()))


def test_stream_of_another_shape_is_refused() -> None:
    state = {**values(), "layers.3.weight": torch.zeros(WIDTH, WIDTH + 1)}
    with pytest.raises(WeightMismatchError, match=r"layers\.3\.weight"):
        compiled(iter(state.items()))


def test_stream_with_key_map() -> None:
    state = {f"net/{name}": tensor for name, tensor in values().items()}
    model = compiled(iter(state.items()), key_map=lambda fqn: f"net/{fqn}")
    assert torch.equal(run(model), run(compiled(values())))


def test_tied_names_with_different_values_raise(tmp_path: Path) -> None:
    state = values()
    both = {**state, "head.weight": state["embed.weight"] + 1}
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(TiedWeightError, match=r"head\.weight"):
        compiled(tmp_path)


def test_tied_names_with_equal_values_may_hold_nan(tmp_path: Path) -> None:
    state = values()
    state["embed.weight"][3, 5] = float("nan")
    save_file({**state, "head.weight": state["embed.weight"].clone()}, tmp_path / "model.safetensors")
    assert compiled(tmp_path).embed.weight.isnan().sum() == 1


@pytest.mark.parametrize("fault", ["missing", "shape", "dtype"])
def test_faults_leave_the_model_on_meta(fault: str, tmp_path: Path) -> None:
    state = values()
    name = "layers.7.weight"
    if fault == "missing":
        state.pop(name)
    else:
        wrong = torch.zeros(WIDTH, 3) if fault == "shape" else torch.zeros(WIDTH, WIDTH, dtype=torch.int8)
        state[name] = wrong
    save_file(state, tmp_path / "model.safetensors")
    model = on_meta()
    with pytest.raises((MissingWeightError, WeightMismatchError), match=r"layers\.7\.weight"):
        fxquant.compile(model, tmp_path, scheme="int8", example_inputs=(IDS,))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert "fxquant_plan" not in model.__dict__


def test_an_error_while_reading_leaves_the_model_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = FileCheckpoint.fill

    def failing(self: FileCheckpoint, pieces: Sequence[Piece]) -> int:
        if any(piece.key == "layers.2.weight" for piece in pieces):
            raise fxquant.errors.CheckpointFileError("layers.2.weight: broken on purpose")
        return fill(self, pieces)

    monkeypatch.setattr(FileCheckpoint, "fill", failing)
    model = on_meta()
    with pytest.raises(fxquant.errors.CheckpointFileError, match="on purpose"):
        fxquant.compile(model, folder, scheme="int8", example_inputs=(IDS,))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_each_tensor_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[str, int, int]] = []
    fill = FileCheckpoint.fill

    def counted(self: FileCheckpoint, pieces: Sequence[Piece]) -> int:
        reads.extend((piece.key, piece.start, piece.target.nbytes) for piece in pieces)
        return fill(self, pieces)

    monkeypatch.setattr(FileCheckpoint, "fill", counted)
    compiled(folder, config={"head": "int8"}, read_bytes=4096)
    for name, tensor in values().items():
        parts = sorted((start, size) for key, start, size in reads if key == name)
        assert sum(size for _, size in parts) == tensor.nbytes
        assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(parts))
    assert len(reads) > len(values())


def test_templates_are_shared() -> None:
    model = on_meta()
    lowered = fxquant.lower(model, values(), scheme="int8", example_inputs=(IDS,))
    assert len(lowered.load_graph.recipes) == 2 * LAYERS + 2
    assert len(lowered.load_graph.templates) == 3  # the table, the linears, vectors


def test_progress_is_reported(folder: Path) -> None:
    steps = []
    compiled(folder, progress=steps.append)
    assert [step.share for step in steps] == sorted(step.share for step in steps)
    assert steps[-1].done_bytes == steps[-1].total_bytes == sum(t.nbytes for t in values().values())
    assert all(step.tensor for step in steps)
