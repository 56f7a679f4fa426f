"""The data of a key map: which keys give which FQN, and how."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fxquant.errors import FxquantError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """Where the values of one FQN come from.

    ``convert`` takes the tensors of ``keys`` in order and returns the tensor in the model's
    layout; None means the single key as it is. The tensors under ``same`` must hold the same
    values. ``rule`` says how the keys were found.
    """

    fqn: str
    keys: tuple[str, ...]
    convert: Callable[..., torch.Tensor] | None
    same: tuple[str, ...]
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """Entries by canonical FQN, and what was left over on both sides.

    ``tied`` gives all names of each missing FQN.
    """

    entries: Mapping[str, KeyEntry]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    notes: tuple[str, ...]
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What one rule says about one name; ``problem`` is raised if this source is used."""

    keys: tuple[str, ...]
    convert: Callable[..., torch.Tensor] | None = None
    same: tuple[str, ...] = ()
    rule: str = "exact"
    problem: FxquantError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one set of rules says about all names.

    ``failures`` holds the reasons why names that the rules know stay without a source.
    """

    title: str
    sources: Mapping[str, Source]
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The names to be found: tied groups, of which each needs one name."""

    groups: tuple[tuple[str, ...], ...]
    required: Collection[str]

    def found(self, sources: Collection[str]) -> tuple[int, int]:
        """How many required groups, and how many others, have a name in ``sources``."""
        required = others = 0
        for group in self.groups:
            if any(name in sources for name in group):
                if group[0] in self.required:
                    required += 1
                else:
                    others += 1
        return required, others

    def complete(self, sources: Collection[str]) -> bool:
        """Whether every required group has a name in ``sources``."""
        return self.found(sources)[0] == len(self.required)


View = Mapping[str, tuple[str, ...]]
"""Keys as a rule sees them -> the stored keys that are spelled so (more than one must be equal)."""

_MAX_LISTED = 4


def listed(keys: Sequence[str]) -> str:
    """Keys for a message: the first few and how many there are."""
    text = ", ".join(keys[:_MAX_LISTED])
    return text if len(keys) <= _MAX_LISTED else f"{text}, ... ({len(keys)} in all)"
