"""Relate the model's names to the checkpoint's keys, without ever guessing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from fxquant.checkpoint.base import Checkpoint
from fxquant.checkpoint.keymap_rules import (
    drop_votes,
    match_names,
    prefix_votes,
    raw_view,
    strip_view,
    top,
    transparent_view,
)
from fxquant.checkpoint.keymap_transformers import TransformersRules, transformers_rules
from fxquant.checkpoint.keymap_types import Answer, KeyEntry, KeyMap, Source, View, Wanted, listed
from fxquant.checkpoint.nearest import nearest_keys
from fxquant.errors import ConfigError, KeyMapError, MissingWeightError

__all__ = ["KeyEntry", "KeyMap", "UserKeyMap", "require_complete", "resolve_keys"]

UserKeyMap = Mapping[str, str] | Callable[[str], str | None]
_MAX_LISTED = 10


def resolve_keys(
    groups: Sequence[tuple[str, ...]],
    checkpoint: Checkpoint,
    *,
    key_map: UserKeyMap | None = None,
    model: torch.nn.Module | None = None,
    optional: Collection[str] = (),
) -> KeyMap:
    """Find the keys of every FQN.

    ``groups`` are tied FQNs, the canonical one first; any name of a group may be the stored one.
    ``optional`` are canonical FQNs that may be missing. The rules, in this order: the user's
    ``key_map`` for the names that it covers; then one rule for all others: exact names (for a
    transformers model: transformers' own conversions), the same without ``_orig_mod`` components,
    one prefix that the keys have, one prefix that the keys lack. If no rule finds all, the one
    that finds most is used and the rest is ``missing``. Raises KeyMapError if two prefixes fit
    equally well, or if ``key_map`` names what does not exist.
    """
    if checkpoint.streaming:
        raise ConfigError(f"the keys of {checkpoint.location} are not known before it is read")
    keys = tuple(checkpoint.infos)
    user = _user_sources(key_map, groups, checkpoint)
    mapped = {group[0] for group in groups if any(name in user for name in group)}
    optional = set(optional)
    open_groups = tuple(group for group in groups if group[0] not in mapped)
    # Where only optional names are left, the rule is chosen by them.
    required = {group[0] for group in open_groups} - optional or {group[0] for group in open_groups}
    wanted = Wanted(groups=tuple(groups), required=required)
    rules, found_notes = transformers_rules(model, checkpoint.infos)
    answer = _choose(wanted, keys, rules, checkpoint.location)
    notes = list(found_notes)
    entries = _entries(wanted.groups, {**answer.sources, **user}, notes)
    missing = tuple(group[0] for group in groups if group[0] not in entries and group[0] not in optional)
    notes += [f"{name}: {reason}" for name, reason in answer.failures.items() if name not in entries]
    used = {key for entry in entries.values() for key in (*entry.keys, *entry.same)}
    extra = _extra([key for key in keys if key not in used], rules, notes)
    tied = {group[0]: group for group in groups if group[0] in set(missing)}
    return KeyMap(entries=entries, missing=missing, extra=extra, notes=tuple(notes), tied=tied)


def require_complete(keymap: KeyMap, checkpoint: Checkpoint) -> None:
    """Raise MissingWeightError, with the nearest keys, if the checkpoint lacks weights."""
    if not keymap.missing:
        return
    unused = keymap.extra or tuple(checkpoint.infos)
    lines = []
    for fqn in keymap.missing[:_MAX_LISTED]:
        names = keymap.tied.get(fqn, (fqn,))
        near = dict.fromkeys(key for name in names for key in nearest_keys(name, unused))
        hint = f"nearest keys: {', '.join(list(near)[:3])}" if near else "no key is like it"
        lines.append(f"  {' = '.join(names)} ({hint})")
    if len(keymap.missing) > _MAX_LISTED:
        lines.append(f"  and {len(keymap.missing) - _MAX_LISTED} more")
    lines += [f"  note: {note}" for note in keymap.notes[:_MAX_LISTED]]
    rules = sorted({entry.rule for entry in keymap.entries.values()})
    raise MissingWeightError(
        f"{checkpoint.location} lacks {len(keymap.missing)} of the model's weights "
        f"({len(keymap.entries)} found by: {', '.join(rules) or 'no rule'}; "
        f"{len(checkpoint.infos)} tensors stored):\n"
        + "\n".join(lines)
        + "\nIf they are stored under other names, pass key_map={FQN: key} or a function of the FQN; "
        "else the checkpoint is incomplete or belongs to another model."
    )


def _user_sources(
    key_map: UserKeyMap | None, groups: Sequence[tuple[str, ...]], checkpoint: Checkpoint
) -> dict[str, Source]:
    if key_map is None:
        return {}
    names = [name for group in groups for name in group]
    if isinstance(key_map, Mapping):
        known = set(names)
        for name in key_map:
            if name not in known:
                near = ", ".join(nearest_keys(str(name), names)) or "none"
                raise KeyMapError(f"key_map: the model has no weight {name!r} (nearest names: {near})")
        chosen = {name: key_map[name] for name in names if name in key_map}
    elif callable(key_map):
        chosen = {name: key for name in names if (key := key_map(name)) is not None}
    else:
        raise ConfigError(
            f"key_map is of type {type(key_map).__name__}, expected a dict of FQN to key or a function"
        )
    for name, key in chosen.items():
        if not isinstance(key, str):
            raise ConfigError(f"key_map gives {key!r} for {name!r}, expected the key as a str")
        if key not in checkpoint.infos:
            near = ", ".join(nearest_keys(key, checkpoint.infos)) or "none"
            raise KeyMapError(
                f"key_map: {checkpoint.location} has no key {key!r} for {name!r} (nearest keys: {near})"
            )
    return {name: Source(keys=(key,), rule="key_map") for name, key in chosen.items()}


def _choose(wanted: Wanted, keys: Sequence[str], rules: TransformersRules | None, location: str) -> Answer:
    """The first rule that finds all; prefixes compete and must not disagree."""
    tried: list[Answer] = []
    for answer in _direct_answers(wanted, keys, rules):
        if wanted.complete(answer.sources):
            return answer
        tried.append(answer)
    complete: list[Answer] = []
    for answer in _prefix_answers(wanted, transparent_view(keys), rules):
        if wanted.complete(answer.sources):
            complete.append(answer)
        tried.append(answer)
    if complete:
        _refuse_disagreement(wanted, complete, location)
        return complete[0]
    return max(tried, key=lambda answer: wanted.found(answer.sources))


def _direct_answers(wanted: Wanted, keys: Sequence[str], rules: TransformersRules | None) -> Iterator[Answer]:
    raw = raw_view(keys)
    if rules:
        yield rules.answer(wanted, raw, title="transformers")
    exact = {name: Source(keys=(name,)) for group in wanted.groups for name in group if name in raw}
    yield Answer(title="exact names", sources=exact)
    short = transparent_view(keys)
    title = "wrapper components ('_orig_mod') removed"
    if rules and short.keys() != raw.keys():
        yield rules.answer(wanted, short, title=title)
    answer = match_names(wanted, short, title=title)
    if answer is not None:
        yield answer


def _prefix_answers(wanted: Wanted, view: View, rules: TransformersRules | None) -> Iterator[Answer]:
    votes = prefix_votes(wanted, view)
    direct = wanted.found({name for group in wanted.groups for name in group if name in view})[0]
    shared = {key.partition(".")[0] for key in view} if rules else set()
    wrapper = [f"{component}." for component in shared] if len(shared) == 1 else []
    for prefix in dict.fromkeys([*top(votes), *wrapper]):
        title = f"prefix {prefix!r} removed"
        stripped = strip_view(view, prefix)
        if rules and votes[prefix] >= direct:
            answer: Answer | None = rules.answer(wanted, stripped, title=title)
            if answer and wanted.complete(answer.sources):
                yield answer
                continue
        answer = match_names(wanted, stripped, title=title)
        if answer is not None:
            yield answer
    for prefix in top(drop_votes(wanted, view)):
        answer = match_names(wanted, view, title=f"prefix {prefix!r} added", drop=prefix)
        if answer is not None:
            yield answer


def _refuse_disagreement(wanted: Wanted, answers: Sequence[Answer], location: str) -> None:
    first = answers[0]
    for other in answers[1:]:
        for group in wanted.groups:
            left, right = _first(group, first.sources), _first(group, other.sources)
            if left and right and left.keys != right.keys:
                raise KeyMapError(
                    f"{location}: the names of the model fit the keys in two ways. With {first.title}, "
                    f"{group[0]} is {listed(left.keys)}; with {other.title}, it is {listed(right.keys)}. "
                    "Pass key_map to say which one is meant"
                )


def _first(group: Sequence[str], sources: Mapping[str, Source]) -> Source | None:
    return next((sources[name] for name in group if name in sources), None)


def _entries(
    groups: Sequence[tuple[str, ...]], sources: Mapping[str, Source], notes: list[str]
) -> dict[str, KeyEntry]:
    entries: dict[str, KeyEntry] = {}
    for group in groups:
        found = [(name, sources[name]) for name in group if name in sources]
        if not found:
            continue
        found.sort(key=lambda item: item[1].rule != "key_map")
        primary = found[0][1]
        if primary.problem is not None:
            raise primary.problem
        same = dict.fromkeys(primary.same)
        for name, source in found[1:]:
            if source.convert is None:
                same.update(dict.fromkeys((*source.keys, *source.same)))
            elif source.keys != primary.keys:
                notes.append(
                    f"{name} is tied to {found[0][0]} and also stored in another layout: not compared"
                )
        entries[group[0]] = KeyEntry(
            fqn=group[0],
            keys=primary.keys,
            convert=primary.convert,
            same=tuple(key for key in same if key not in primary.keys),
            rule=primary.rule,
        )
    return entries


def _extra(keys: Sequence[str], rules: TransformersRules | None, notes: list[str]) -> tuple[str, ...]:
    """The unused keys, less those that the model's class says to ignore."""
    if rules is None or not rules.ignored:
        return tuple(keys)
    pattern = re.compile("|".join(f"(?:{text})" for text in rules.ignored))
    kept = tuple(key for key in keys if not pattern.search(key))
    if len(kept) < len(keys):
        notes.append(f"{len(keys) - len(kept)} stored tensors are ignored, as the model's class asks")
    return kept
