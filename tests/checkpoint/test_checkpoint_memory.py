"""Weights that are tensors already, and the choice of the kind of source."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxquant.checkpoint import DictCheckpoint, StreamCheckpoint, open_checkpoint
from fxquant.errors import ConfigError, MissingWeightError

A = torch.arange(6.0).reshape(3, 2)


def test_dict_hands_out_the_tensors_themselves() -> None:
    checkpoint = open_checkpoint({"a": A, "b": A.to(torch.int8)})
    assert isinstance(checkpoint, DictCheckpoint)
    assert checkpoint.read("a") is A
    rows = checkpoint.read_rows("a", 1, 3)
    assert torch.equal(rows, A[1:3])
    assert rows.data_ptr() == A[1:].data_ptr()
    info = checkpoint.infos["a"]
    assert (info.dtype, info.shape, info.nbytes, info.file, info.offset) == (
        torch.float32,
        (3, 2),
        24,
        None,
        None,
    )
    assert (checkpoint.config, checkpoint.metadata, checkpoint.quantization) == ({}, {}, None)


def test_parameters_are_detached_without_a_copy() -> None:
    parameter = torch.nn.Parameter(A.clone())
    tensor = open_checkpoint({"a": parameter}).read("a")
    assert not tensor.requires_grad
    assert tensor.data_ptr() == parameter.data_ptr()


def test_meta_tensors_can_be_listed_but_not_read() -> None:
    checkpoint = open_checkpoint({"a": A.to("meta")})
    assert checkpoint.infos["a"].shape == (3, 2)
    with pytest.raises(MissingWeightError, match="'a' of the dict is on meta"):
        checkpoint.read("a")


def test_tensor_taken_out_of_the_dict() -> None:
    source = {"a": A}
    checkpoint = open_checkpoint(source)
    del source["a"]
    with pytest.raises(MissingWeightError, match="taken out of the dict"):
        checkpoint.read("a")


@pytest.mark.parametrize("rows", [(-1, 1), (2, 1), (0, 4)])
def test_rows_that_do_not_exist(rows: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"do not exist: its shape is \(3, 2\)"):
        open_checkpoint({"a": A}).read_rows("a", *rows)


def test_identity_of_a_dict_follows_names_dtypes_and_shapes() -> None:
    sources = [{"a": A}, {"b": A}, {"a": A.half()}, {"a": A.T}]
    assert len({open_checkpoint(source).identity for source in sources}) == len(sources)
    assert open_checkpoint({"a": A}).identity == open_checkpoint({"a": A + 1}).identity


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({1: A}, "key 1 of type int"),
        ({"a": 3}, "'a' is of type int, expected a tensor"),
        ({"state_dict": {"a": A}}, r"pass ckpt\['state_dict'\]"),
    ],
)
def test_dict_that_is_no_state_dict(source: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(source)


def test_stream_is_read_once_in_its_order() -> None:
    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield "b", A
        yield "a", A + 1

    checkpoint = open_checkpoint(pairs())
    assert isinstance(checkpoint, StreamCheckpoint)
    assert checkpoint.streaming
    assert not checkpoint.infos
    assert [item.name for item in checkpoint] == ["b", "a"]
    with pytest.raises(ConfigError, match="can be read once"):
        iter(checkpoint)


def test_stream_cannot_be_read_by_name() -> None:
    checkpoint = open_checkpoint([("a", A)])
    with pytest.raises(ConfigError, match="cannot be read by name"):
        checkpoint.read("a")
    with pytest.raises(ConfigError, match="cannot be read from a stream"):
        checkpoint.read_rows("a", 0, 1)


@pytest.mark.parametrize("item", ["a", ("a",), ("a", 1), (1, A), A, ("a", A, (-1,)), ("a", A, 0)])
def test_stream_of_something_else(item: object) -> None:
    checkpoint = open_checkpoint([("first", A), item])
    assert isinstance(checkpoint, StreamCheckpoint)
    with pytest.raises(ConfigError, match="item 1 of the stream"):
        list(checkpoint)


def test_open_checkpoint_is_given_back() -> None:
    checkpoint = open_checkpoint({"a": A})
    assert open_checkpoint(checkpoint) is checkpoint


@pytest.mark.parametrize("source", [None, 3, b"bytes", A, torch.nn.Sequential(torch.nn.Linear(2, 2))])
def test_what_is_no_checkpoint(source: object) -> None:
    with pytest.raises(ConfigError, match="ckpt is"):
        open_checkpoint(source)


def test_import_does_not_need_transformers() -> None:
    code = "import fxquant.checkpoint, sys; print('transformers' in sys.modules)"
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert result.stdout.strip() == "False"
