"""``torch.compile(model, backend="fxquant")`` on a model that is on the simulated NPU already."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from test_npu_life import FORMS, MIB, Net, compiled, inputs, run, values
from torch import Tensor, nn

from fxquant.runtime.quantized_weight import QuantizedWeight

OPTIONS = {"scheme": "int8"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


def on_npu() -> nn.Module:
    model = Net()
    model.load_state_dict(values(), strict=False)
    return model.eval().to("npu")


def live(model: nn.Module, **options: object) -> Tensor:
    function = torch.compile(model, backend="fxquant", options={**OPTIONS, **options})
    with torch.no_grad():
        return function(inputs().to("npu")).cpu()


@pytest.mark.parametrize("cann", ["9.0.0", "9.1.0"])
def test_the_numbers_are_those_of_compile(simulate: Callable[..., None], cann: str) -> None:
    """In parts where the limit of 65535 asks for them; CANN 9.1.0 is what the device itself tells."""
    simulate("Ascend910B2", cann)
    target = f"Ascend910B2,cann={cann}"
    expected = run(compiled(target=target))
    model = on_npu()
    found = live(model, **({} if cann == "9.1.0" else {"target": target}))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not any(isinstance(parameter, QuantizedWeight) for parameter in model.parameters())


def test_released_floats_are_gone(simulate: Callable[..., None]) -> None:
    simulate("Ascend910B2", "9.0.0")
    expected = run(compiled())
    model = on_npu()
    before = torch.npu.memory_allocated()
    found = live(model, release=True, target="Ascend910B2,cann=9.0.0")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    gc.collect()
    assert torch.npu.memory_allocated() < before - 2 * MIB
    weights = dict(model.named_parameters())
    assert {n: str(p.form) for n, p in weights.items() if isinstance(p, QuantizedWeight)} == FORMS
