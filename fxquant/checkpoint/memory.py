"""Weights that are handed over as tensors: a state dict, or a stream of named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch

from fxquant.checkpoint.base import Checkpoint, TensorInfo, check_rows
from fxquant.errors import ConfigError, MissingWeightError


class DictCheckpoint(Checkpoint):
    """A mapping of names to tensors; ``read`` hands out the tensors themselves, not copies."""

    def __init__(self, mapping: Mapping[str, torch.Tensor]) -> None:
        self._mapping = mapping
        self._infos = {key: _info(key, value) for key, value in mapping.items()}

    @property
    def location(self) -> str:
        """What the weights come from, for messages."""
        return f"a dict of {len(self._infos)} tensors"

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor, in the order of the dict."""
        return MappingProxyType(self._infos)

    def read(self, key: str) -> torch.Tensor:
        """Hand out the tensor itself, detached from autograd; MissingWeightError if it holds no values."""
        self.info(key)
        tensor = self._mapping.get(key)
        if tensor is None:
            raise MissingWeightError(f"tensor {key!r} was taken out of the dict after it was opened")
        if tensor.is_meta:
            raise MissingWeightError(
                f"tensor {key!r} of the dict is on meta and holds no values; give a dict of real tensors"
            )
        return tensor.detach() if tensor.requires_grad else tensor

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Hand out a view of some rows."""
        check_rows(self.info(key), start, stop)
        return self.read(key)[start:stop]


class StreamItem(NamedTuple):
    """A tensor of a stream; ``offsets`` say where a part of it begins along each axis."""

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...] | None = None


class StreamCheckpoint(Checkpoint):
    """Pairs ``(name, tensor)`` or ``(name, tensor, offsets)`` that come in their source's order, once.

    ``infos`` is empty and ``identity`` is the same for every stream: nothing is known before it
    is read.
    """

    streaming: ClassVar[bool] = True
    kind: ClassVar[str] = "a stream of tensors"

    def __init__(self, pairs: Iterable[object]) -> None:
        self._pairs: Iterable[object] | None = pairs

    @property
    def location(self) -> str:
        """What the weights come from, for messages."""
        return "a stream of tensors"

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Empty: nothing is known before the stream is read."""
        return MappingProxyType({})

    def __iter__(self) -> Iterator[StreamItem]:
        """The items, checked one by one; ConfigError at the second time."""
        if self._pairs is None:
            raise ConfigError("this stream of tensors was already read; a stream can be read once")
        pairs, self._pairs = self._pairs, None
        return _checked(pairs)

    def read(self, key: str) -> torch.Tensor:
        """Refused: a stream has no order of its own to look names up in."""
        raise ConfigError(f"{key!r} cannot be read by name from a stream; iterate over the stream")

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Refused, as ``read``."""
        raise ConfigError(f"rows {start}:{stop} of {key!r} cannot be read from a stream; iterate over it")


def _checked(items: Iterable[object]) -> Iterator[StreamItem]:
    for position, item in enumerate(items):
        match item:
            case (str() as name, torch.Tensor() as tensor):
                yield StreamItem(name, tensor)
            case (str() as name, torch.Tensor() as tensor, [*offsets]) if all(map(_is_index, offsets)):
                yield StreamItem(name, tensor, tuple(int(start) for start in offsets))  # type: ignore[call-overload]
            case _:
                raise ConfigError(
                    f"item {position} of the stream of weights is {_kind(item)}, "
                    "expected a pair (name, tensor), or (name, tensor, offsets) for a part of a tensor"
                )


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _info(key: object, value: object) -> TensorInfo:
    if not isinstance(key, str):
        raise ConfigError(f"a checkpoint dict has the key {key!r} of type {type(key).__name__}, expected str")
    if not isinstance(value, torch.Tensor):
        hint = f"; if the weights are inside it, pass ckpt[{key!r}]" if isinstance(value, Mapping) else ""
        raise ConfigError(f"checkpoint dict: {key!r} is {_kind(value)}, expected a tensor{hint}")
    return TensorInfo(
        key=key,
        dtype=value.dtype,
        shape=tuple(value.shape),
        nbytes=value.numel() * value.element_size(),
        file=None,
        offset=None,
    )


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"
