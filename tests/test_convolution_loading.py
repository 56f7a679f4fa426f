"""Convolution weights as codes: loading in every way, saving, the text of the forms, hostile manifests."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fxquant
from fxquant.checkpoint.constants import expected_constants, seal
from fxquant.errors import CheckpointFileError, ConfigError, WeightMismatchError
from fxquant.form import Form
from fxquant.runtime.quantized_weight import QuantizedWeight
from reference import error
from tests.test_convolutions import IMAGE, STEP, W8, Net, Unet, call


def file_of(folder: Path, state: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors")
    return folder


CONFIG = {"re:(conv_.*|down|mid)": W8, "point": "int4_g32", "time": "int8"}


def load(ckpt: object, **options: Any) -> Any:
    with fxquant.meta_init():
        model = Unet().eval()
    options = {"scheme": "none", "config": CONFIG, "example_inputs": (IMAGE, STEP), **options}
    return fxquant.compile(model, ckpt, **options)


def test_every_way_of_loading_gives_the_same_constants(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in Unet().state_dict().items()}
    folder = file_of(tmp_path / "ckpt", state)
    model = load(folder)
    parts = (
        part
        for name, value in state.items()
        for part in (
            [(name, value[i : i + 2], (i,) + (0,) * (value.dim() - 1)) for i in range(0, len(value), 2)]
        )
    )
    others = {
        "memory": load(state),
        "channels_last": load(
            {k: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in state.items()}
        ),
        "stream": load(iter(state.items())),
        "parts": load(parts),
        "mmap": load(folder, reader="mmap"),
        "small tiles": load(folder, read_bytes=4096),
    }
    for name, other in others.items():
        for fqn, weight in model.named_parameters():
            found = other.get_parameter(fqn)
            if isinstance(weight, QuantizedWeight):
                assert all(map(torch.equal, weight.constants, found.constants)), (name, fqn)
            else:
                assert torch.equal(weight, found), (name, fqn)
    dummy = load(None, weights="dummy")
    assert call(dummy, IMAGE, STEP).isfinite().all()
    assert dummy.conv_in.weight.form == model.conv_in.weight.form


def test_a_large_kernel_loads_in_tiles(tmp_path: Path) -> None:
    make = lambda: Net(lambda: nn.Conv2d(64, 512, 7))  # noqa: E731
    folder = file_of(tmp_path / "ckpt", {k: v.clone() for k, v in make().state_dict().items()})
    with fxquant.meta_init():
        model = make()
    plan = fxquant.plan(model, folder, scheme="none", config={"conv": W8}, read_bytes=1 << 20)
    row = plan.weight("conv.weight")
    assert row.tiles >= 6
    assert row.transient_bytes < 3 << 20
    assert not row.whole


def test_life(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in Unet().state_dict().items()}
    model = load(state)
    out = call(model, IMAGE, STEP)
    fxquant.save_checkpoint(model, tmp_path / "saved")
    again = load(tmp_path / "saved", scheme=None, config=None)
    assert torch.equal(call(again, IMAGE, STEP), out)
    assert torch.equal(call(copy.deepcopy(again), IMAGE, STEP), out)
    fxquant.reload(model, {name: value / 2 for name, value in state.items()})
    assert not torch.equal(call(model, IMAGE, STEP), out)
    fxquant.reload(model, tmp_path / "saved")
    assert torch.equal(call(model, IMAGE, STEP), out)
    model.conv_in.weight.data.sum()  # reads floats
    with torch.no_grad():
        model.conv_in.weight.copy_(state["conv_in.weight"])
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(call(again, IMAGE, STEP), out)
    model.to(memory_format=torch.channels_last)
    assert error(call(model, IMAGE, STEP), out) < 1e-5
    half = call(model.bfloat16(), IMAGE.bfloat16(), STEP.bfloat16())
    assert half.dtype == torch.bfloat16
    assert error(half, out) < 0.03
    assert fxquant.report(model).fallbacks <= 1


def test_another_kernel_in_the_checkpoint_is_an_error() -> None:
    """Of as many elements for each channel, so that only the kernel's own shape tells."""
    state = {"conv.weight": torch.randn(8, 6, 3, 1), "conv.bias": torch.randn(8)}
    with fxquant.meta_init():
        model = Net(lambda: nn.Conv2d(6, 8, (1, 3)))
    options: dict[str, Any] = {"scheme": "none", "config": {"conv": W8}}
    with pytest.raises(WeightMismatchError, match=r"conv.weight .* kernel of \[1, 3\]"):
        fxquant.plan(model, state, **options)
    with pytest.raises(WeightMismatchError, match="has shape"):
        fxquant.plan(model, {**state, "conv.weight": torch.randn(8, 5, 1, 3)}, **options)


# ------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize("text", [f"{W8}.conv3", f"{W8}.conv16x16", "int4_g32(refine=clip).conv1x2x3.odd"])
def test_the_text_of_a_form_is_read_back(text: str) -> None:
    form = Form.parse(text)
    assert str(form) == text
    assert form.own_shape(*form.codes_shape((8, 5, *form.kernel))) == (8, 5, *form.kernel)


BAD_TEXTS = ["conv", "conv0", "conv03", "conv3x", "conv3x3x3x3", "conv-1", "conv3.conv3", "conv" + "9" * 5000]


@pytest.mark.parametrize("flag", [*BAD_TEXTS, "t.conv3", "conv3/n:" + "9" * 5000])
def test_other_texts_are_no_forms(flag: str) -> None:
    with pytest.raises(ConfigError):
        Form.parse(f"{W8}.{flag}")


MISFITS = [
    (f"{W8}.conv3x3", (8, 6, 3)),
    (f"{W8}.conv3x3", (8, 6, 3, 1)),
    (f"{W8}.conv3x3", (8, 54)),
    (W8, (8, 6, 3, 3)),
    (f"{W8}.conv3x3.t", (8, 6, 3, 3)),
    (f"{W8}.conv3x3.rot", (8, 6, 3, 3)),
    (f"{W8}.conv3x3/n:4,4", (8, 6, 3, 3)),
    (f"{W8}.conv3x3+table", (8, 6, 3, 3)),
    ("int8.conv3x3", (8, 6, 3, 3)),
    ("int4_g32.conv3x3.odd", (8, 6, 3, 3)),
]


@pytest.mark.parametrize(("text", "shape"), MISFITS)
def test_forms_that_a_shape_cannot_have(text: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        expected_constants(Form.parse(text), torch.float32, shape)


@pytest.mark.parametrize("form", ["int8.conv3x3", f"{W8}.conv9x1", W8, f"{W8}.conv3x3.kn", f"{W8}.conv0x3"])
def test_hostile_manifests_are_refused(form: str, tmp_path: Path) -> None:
    fxquant.save_checkpoint(load(Unet().state_dict()), tmp_path / "saved")
    path = tmp_path / "saved" / "fxquant.json"
    table = json.loads(path.read_bytes())
    table["weights"]["conv_in.weight"]["form"] = form
    del table["sha256"]
    path.write_bytes(seal(table))
    with pytest.raises(CheckpointFileError, match="conv_in"):
        load(tmp_path / "saved", scheme=None, config=None)
