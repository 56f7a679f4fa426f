"""``torch.compile(model, backend="fxquant")`` on a live model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxquant.runtime.quantized_weight import QuantizedWeight
from reference import Int8Linears, error

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            torch._dynamo.graph_break()
        return torch.tanh(self.fc(x))


def make(broken: bool = False) -> nn.Sequential:
    return nn.Sequential(*(Block(broken) for _ in range(4))).eval()


def compiled(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    options = {"scheme": "int8", **options}
    function = torch.compile(model, backend="fxquant", options=options)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return function(x)

    return run


def exact(model: nn.Module, x: Tensor, skip: tuple[Tensor, ...] = ()) -> Tensor:
    with torch.no_grad(), Int8Linears(skip=skip):
        return model(x)


@pytest.mark.parametrize("broken", [False, True], ids=["one graph", "a graph for each block"])
def test_computes_the_same_arithmetic(broken: bool) -> None:
    model = make(broken)
    assert torch.equal(compiled(model)(X), exact(model, X))


def test_entry_point_is_registered() -> None:
    assert "fxquant" in torch._dynamo.list_backends(exclude_tags=())


def test_follows_writes_to_the_parameters() -> None:
    model = make()
    run = compiled(model)
    before = run(X)
    with torch.no_grad():
        model[0].fc.weight.mul_(-2)
    assert not torch.equal(run(X), before)
    assert torch.equal(run(X), exact(model, X))


def test_release_replaces_the_floats_and_still_computes() -> None:
    model = make(broken=True)
    expected = exact(model, X)
    run = compiled(model, release=True)
    floats = [weakref.ref(block.fc.weight) for block in model]
    assert torch.equal(run(X), expected)
    assert torch.equal(run(X), expected)
    gc.collect()
    assert all(ref() is None for ref in floats)
    assert all(isinstance(block.fc.weight, QuantizedWeight) for block in model)
    assert torch.equal(run(torch.cat([X, X])), torch.cat([expected, expected]))
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(compiled(twin)(X), expected)


def test_release_of_one_of_two_views_of_one_storage() -> None:
    model = make()
    both = torch.randn(2, 16, 16)
    model[0].fc.weight, model[1].fc.weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    expected = exact(model, X, skip=(model[1].fc.weight,))
    run = compiled(model, release=True, ignore=["1"])
    assert error(run(X), expected) < 1e-6
    assert error(run(X), expected) < 1e-6


def test_replaced_data_is_followed() -> None:
    model = make()
    run = compiled(model)
    run(X)
    model[0].fc.weight.data = torch.randn(16, 16)
    nn.utils.vector_to_parameters(torch.randn(16 * 16), [model[1].fc.weight])
    assert torch.equal(run(X), exact(model, X))


def test_names_and_forms_hold_after_a_graph_break() -> None:
    """One frame serves all blocks; each keeps the form that the config gives to its own name."""
    for ignored in (["1"], ["0", "3"], ["0", "1", "2", "3"]):
        model = make(broken=True)
        skip = tuple(model[int(name)].fc.weight for name in ignored)
        assert error(compiled(model, ignore=ignored)(X), exact(model, X, skip)) < 1e-6


def test_config_and_ignore_by_name() -> None:
    model = make()
    run = compiled(model, config={"2.fc": "none"}, ignore=["0"])
    skip = (model[0].fc.weight, model[2].fc.weight)
    assert error(run(X), exact(model, X, skip)) < 1e-6


def test_tied_head_stays_float() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 16)
            self.fc = nn.Linear(16, 16)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.fc(self.embed(ids)), self.embed.weight)

    model = Tied().eval()
    ids = torch.tensor([1, 2, 3])
    assert error(compiled(model)(ids), exact(model, ids, skip=(model.embed.weight,))) < 1e-6


def test_none_computes_in_float() -> None:
    model = make()
    with torch.no_grad():
        assert torch.equal(compiled(model, scheme="none")(X), model(X))


def test_copies_have_their_own_weights() -> None:
    model = make()
    run = compiled(model)
    run(X)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[1].fc.weight.neg_()
    assert torch.equal(compiled(twin)(X), exact(twin, X))
    assert torch.equal(run(X), exact(model, X))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schema": "int8"}, "unknown options"),
        ({"scheme": "int9"}, "unknown scheme 'int9'; known: none, int8"),
        ({}, "needs options"),
    ],
)
def test_bad_options_raise_with_the_list(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        torch.compile(make(), backend="fxquant", options=options)(X)


def test_strict_raises_with_the_name() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) @ self.fc.weight

    with pytest.raises(Exception, match=r"fc\.weight would stay float: contracted along both axes"):
        compiled(Both(), strict=True)(X)
