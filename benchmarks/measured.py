"""What the records of the benchmarks have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any


class Measured:
    """A base of dataclasses, whose fields are None where nothing was measured."""

    __slots__ = ()

    @classmethod
    def known(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The part of `data` that a record has fields for."""
        names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return {key: value for key, value in data.items() if key in names}

    def to_dict(self) -> dict[str, Any]:
        """What was measured, without what was not."""
        return {key: value for key, value in asdict(self).items() if value is not None}  # type: ignore[call-overload]
