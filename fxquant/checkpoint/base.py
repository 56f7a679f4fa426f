"""What a source of weights looks like to the rest of fxquant."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, ClassVar

import torch

from fxquant.checkpoint.nearest import nearest_keys
from fxquant.errors import CheckpointFileError, ConfigError, MissingWeightError

if TYPE_CHECKING:
    from typing_extensions import Self

_EMPTY: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One stored tensor, known without reading its values.

    ``shape`` is the shape of the tensor that ``read`` returns; ``nbytes`` are the bytes it takes
    in the file. ``file`` is relative to the checkpoint's folder and ``offset`` counts from the
    start of that file; both are None for tensors that already are in memory.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: str | None
    offset: int | None


class Checkpoint(ABC):
    """Named tensors that can be listed at once and read one by one.

    A checkpoint can be used as a context manager; ``close`` gives back the open files, and a
    later ``read`` opens them again if they are still the same files.
    """

    streaming: ClassVar[bool] = False
    kind: ClassVar[str] = "tensors in memory"
    """How tensors are read, for the plan."""

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the weights come from, for messages."""

    @property
    @abstractmethod
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by key, ordered by file and then by offset."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Text pairs stored beside the tensors (``__metadata__`` of safetensors)."""
        return MappingProxyType({})

    @property
    def config(self) -> Mapping[str, object]:
        """The parsed ``config.json`` beside the weights, empty if there is none."""
        return _EMPTY

    @property
    def quantization(self) -> Mapping[str, object] | None:
        """How the config says that the stored weights are quantized, None if it does not."""
        return quantization_of(self.config, self.location)

    @property
    def identity(self) -> str:
        """Hex digest over keys, dtypes, shapes, offsets and file sizes; no weight is read."""
        return digest(self.infos, {})

    @abstractmethod
    def read(self, key: str) -> torch.Tensor:
        """The whole tensor, on the CPU."""

    @abstractmethod
    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` (exclusive) along the first dimension, on the CPU."""

    def close(self) -> None:  # noqa: B027 - nothing to give back unless files are open
        """Give back open files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def info(self, key: str) -> TensorInfo:
        """The entry of ``key``; MissingWeightError with the nearest keys if there is none."""
        found = self.infos.get(key)
        if found is None:
            near = ", ".join(nearest_keys(key, self.infos)) or "none"
            raise MissingWeightError(
                f"{self.location} holds no tensor {key!r} ({len(self.infos)} tensors; nearest: {near})"
            )
        return found


def check_rows(info: TensorInfo, start: int, stop: int) -> None:
    """Refuse a range of rows that the tensor does not have."""
    if not info.shape:
        raise ConfigError(f"tensor {info.key!r} has no dimensions, so it has no rows to read")
    if not 0 <= start <= stop <= info.shape[0]:
        raise ConfigError(
            f"rows {start}:{stop} of tensor {info.key!r} do not exist: its shape is {info.shape}"
        )


def quantization_of(config: Mapping[str, object], location: str) -> Mapping[str, object] | None:
    """The quantization part of a config: top level first, then that of its text model."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else _EMPTY):
        for field in ("quantization_config", "compression_config"):
            found = part.get(field)
            if not found:
                continue
            if not isinstance(found, Mapping):
                raise CheckpointFileError(
                    f"{location}: {field} in config.json is {type(found).__name__}, expected an object"
                )
            return found
    return None


def digest(infos: Mapping[str, TensorInfo], sizes: Mapping[str, int]) -> str:
    """Stable digest of a list of tensors and of the sizes of the files that hold them."""
    text = hashlib.sha256(b"fxquant checkpoint 1\n")
    number = {file: index for index, file in enumerate(sizes)}
    text.update(repr(list(sizes.values())).encode())
    for info in infos.values():
        where = None if info.file is None else number[info.file]
        row = (info.key, str(info.dtype), info.shape, info.nbytes, where, info.offset)
        text.update(repr(row).encode("utf-8", "backslashreplace"))
    return text.hexdigest()
