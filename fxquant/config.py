"""Which scheme for which FQN.

Names match as whole components. A pattern is an exact FQN, a prefix of components, any run of
components (``in_proj`` matches ``blocks.3.in_proj``, ``blocks.1`` never ``blocks.10``), a glob, or
``re:`` with a regular expression that must match the whole name. Each pattern is tried against the
parameter's FQN and against the name of the module that owns it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from fxquant.errors import ConfigError
from fxquant.scheme import Scheme, find_scheme

HEADS = ("lm_head",)
"""Modules of these names stay float unless a config entry asks for them (as in transformers, vLLM)."""


def name_matches(pattern: str, fqn: str) -> bool:
    """Whether ``pattern`` takes the parameter ``fqn`` or the module that owns it."""
    owner = fqn.rpartition(".")[0]
    names = (fqn, owner) if owner else (fqn,)
    if pattern.startswith("re:"):
        return any(re.fullmatch(pattern[3:], name) for name in names)
    if any(sign in pattern for sign in "*?["):
        return any(fnmatchcase(name, pattern) for name in names)
    return f".{pattern}." in f".{fqn}."


def _check_pattern(pattern: object) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"a pattern must be a non-empty text, got {pattern!r}")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    return pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The scheme that a config gives to a weight, with the reason in words."""

    scheme: Scheme
    reason: str
    asked: bool
    """Whether a config entry, not only the default, asked for the scheme."""
    act_scale: float | None = None
    """The scale of the activation, for schemes that need it given."""
    lookups: bool = False
    """Whether an entry asks for codes in look-ups of a weight that products share."""
    lookup_reason: str = ""
    """The entry that does, or why another one cannot have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """A default scheme, entries ``(pattern, scheme)`` of which the first match wins, and ignores.

    ``act_scales``: by pattern, the scale of the activation of layers whose scheme is static.
    """

    scheme: str
    entries: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()
    act_scales: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        find_scheme(self.scheme)
        given: set[str] = set()
        for pattern, scheme in self.entries:
            if _check_pattern(pattern) in given:
                raise ConfigError(f"config has two entries for {pattern!r}; the second would never be used")
            given.add(pattern)
            find_scheme(scheme)
        for pattern in self.ignore:
            _check_pattern(pattern)
        schemes = dict(self.entries)
        for pattern, scale in self.act_scales:
            act = find_scheme(schemes[pattern]).act if pattern in schemes else None
            if act is None or not act.static:
                raise ConfigError(f"config {pattern!r}: scheme {schemes.get(pattern)!r} takes no act_scale")
            if not (0 < scale < math.inf):
                raise ConfigError(f"config {pattern!r}: act_scale must be a positive number, got {scale!r}")

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> QuantConfig:
        """From ``{"scheme": name, "config": {pattern: scheme}, "ignore": [pattern]}``.

        An entry of ``config`` is the name of a scheme, None for floats, or a mapping such as
        ``{"scheme": "int8_static", "act_scale": 0.02}``.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"a config must be a mapping with 'scheme', got {data!r}")
        unknown = [key for key in data if key not in ("scheme", "config", "ignore")]
        if unknown:
            raise ConfigError(f"unknown entries {unknown}; known: scheme, config, ignore")
        scheme = data.get("scheme")
        if not isinstance(scheme, str):
            raise ConfigError(f"'scheme' must be the name of a scheme, got {scheme!r}")
        return make_config(scheme, data.get("config"), data.get("ignore"))

    @staticmethod
    def from_checkpoint(path: str | os.PathLike[str]) -> QuantConfig:
        """The config that a quantized checkpoint was made with; ConfigError if it tells none.

        Formats bring their readers (``register_reader``); there is one for folders that
        ``save_checkpoint`` wrote.
        """
        for reader in _READERS:
            found = reader(path)
            if found is not None:
                return found
        raise ConfigError(f"{os.fspath(path)}: no config of a quantized checkpoint that can be read here")

    def to_dict(self) -> dict[str, object]:
        """The inverse of ``from_dict``."""
        scales = dict(self.act_scales)
        config: dict[str, object] = {
            pattern: {"scheme": scheme, "act_scale": scales[pattern]} if pattern in scales else scheme
            for pattern, scheme in self.entries
        }
        return {"scheme": self.scheme, "config": config, "ignore": list(self.ignore)}

    def choose(self, fqns: Iterable[str], embeddings: Collection[str] = ()) -> Choice:
        """The scheme of a weight that is known under ``fqns`` (several where it is tied).

        ``embeddings``: those of the names by which it is only looked up. Of a weight that is tied to a head
        the head's names choose the scheme, if an entry takes them; an entry that takes a name of the
        embedding asks for codes in look-ups too.
        """
        names = tuple(fqns)
        for pattern in self.ignore:
            if any(name_matches(pattern, name) for name in names):
                return _float(f"ignored by {pattern!r}", asked=True)
        lookup = self._entry(name for name in names if name in embeddings)
        entry = self._entry(name for name in names if name not in embeddings) or lookup
        if entry is not None:
            return self._asked(entry, lookup)
        if self.scheme == "none":
            return _float("scheme none", asked=False)
        for name in names:
            head = name.rpartition(".")[0].rpartition(".")[2]
            if head in HEADS:
                return _float(f"{head}: heads stay float unless a config entry asks", asked=False)
        return Choice(scheme=find_scheme(self.scheme), reason="default scheme", asked=False)

    def _entry(self, names: Iterable[str]) -> tuple[str, str] | None:
        """The first entry that takes one of ``names``."""
        known = tuple(names)
        return next((e for e in self.entries if any(name_matches(e[0], name) for name in known)), None)

    def _asked(self, entry: tuple[str, str], lookup: tuple[str, str] | None) -> Choice:
        pattern, scheme = entry
        if scheme == "none":
            return _float(f"config {pattern!r} asks for none", asked=True)
        found = find_scheme(scheme)
        choice = Choice(
            scheme=found,
            reason=f"config {pattern!r}",
            asked=True,
            act_scale=dict(self.act_scales).get(pattern),
        )
        if lookup is None:
            return choice
        asks = f"config {lookup[0]!r}"
        if find_scheme(lookup[1]).weight == found.weight:
            return replace(choice, lookups=True, lookup_reason=asks)
        return replace(choice, lookup_reason=f"{asks} asks for {lookup[1]}, the codes are {scheme}")

    def choose_for_parts(
        self, fqns: Iterable[str], parts: Sequence[str], embeddings: Collection[str] = ()
    ) -> Choice:
        """The scheme of a weight that is made of several stored ones, known under the names ``parts``.

        Entries may name the fused weight, or its parts; parts that disagree are an error.
        """
        names = tuple(fqns)
        whole = self.choose(names, embeddings)
        if len(parts) < 2 or any(name_matches(p, name) for p in self.patterns for name in names):
            return whole
        chosen = {part: self.choose((part,)) for part in parts}
        if len({(choice.scheme, choice.act_scale) for choice in chosen.values()}) > 1:
            told = ", ".join(f"{part}: {choice.scheme.name}" for part, choice in chosen.items())
            raise ConfigError(
                f"{names[0]} is made of parts for which the config asks different things ({told}); give them "
                f"one scheme, or name {names[0]} itself"
            )
        return next(iter(chosen.values()))

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns, of entries and of ``ignore``."""
        return (*(pattern for pattern, _ in self.entries), *self.ignore)

    def unmatched(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """The patterns that take none of ``fqns``."""
        names = tuple(fqns)
        return tuple(p for p in self.patterns if not any(name_matches(p, name) for name in names))


Reader = Callable[[str | os.PathLike[str]], QuantConfig | None]
_READERS: list[Reader] = []


def register_reader(reader: Reader) -> Reader:
    """Let ``QuantConfig.from_checkpoint`` try ``reader``, which gives None for other formats."""
    _READERS.append(reader)
    return reader


def _float(reason: str, *, asked: bool) -> Choice:
    return Choice(scheme=find_scheme("none"), reason=reason, asked=asked)


def make_config(scheme: str, config: object = None, ignore: object = None) -> QuantConfig:
    """A checked ``QuantConfig`` from the ``scheme``, ``config`` and ``ignore`` arguments."""
    if isinstance(config, QuantConfig):
        if ignore is not None:
            raise ConfigError("give `ignore` inside the QuantConfig, or both as plain arguments")
        if scheme != config.scheme:
            raise ConfigError(f"scheme={scheme!r}, but the QuantConfig's own scheme is {config.scheme!r}")
        return config
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"`config` must map patterns to schemes, got {type(config).__name__}")
    entries, scales = [], []
    for pattern, entry in (config or {}).items():
        name, scale = _read_entry(_check_pattern(pattern), entry)
        entries.append((pattern, "none" if name is None else name))
        if scale is not None:
            scales.append((pattern, scale))
    if isinstance(ignore, str) or not (ignore is None or isinstance(ignore, Iterable)):
        raise ConfigError(f"`ignore` must be a list of patterns, got {ignore!r}")
    patterns = tuple(_check_pattern(pattern) for pattern in (ignore or ()))
    return QuantConfig(scheme=scheme, entries=tuple(entries), ignore=patterns, act_scales=tuple(scales))


def _read_entry(pattern: str, entry: object) -> tuple[str | None, float | None]:
    """The scheme and the scale of the activation that an entry names."""
    if entry is None or isinstance(entry, str):
        return entry, None
    if not isinstance(entry, Mapping) or not isinstance(entry.get("scheme"), str):
        raise ConfigError(f"config {pattern!r}: a scheme is a name or a mapping with 'scheme', got {entry!r}")
    unknown = [key for key in entry if key not in ("scheme", "act_scale")]
    if unknown:
        raise ConfigError(f"config {pattern!r}: unknown entries {unknown}; known: scheme, act_scale")
    scale = entry.get("act_scale")
    if scale is None:
        return entry["scheme"], None
    try:  # a number, or a tensor of one element
        return entry["scheme"], float(scale)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"config {pattern!r}: act_scale must be one number, got {scale!r}") from error
