"""Rules that relate names and keys by spelling alone: exact, transparent wrappers, one prefix."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from fxquant.checkpoint.keymap_types import Answer, Source, View, Wanted

# Components that torch's wrappers put into names without meaning another module: torch.compile,
# FSDP, activation checkpointing.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_MAX_CANDIDATES = 8


def raw_view(keys: Iterable[str]) -> View:
    """Keys as they are stored."""
    return {key: (key,) for key in keys}


def transparent(name: str) -> str:
    """The name without the components that torch's wrappers put in."""
    parts = name.split(".")
    return name if _WRAPPERS.isdisjoint(parts) else ".".join(p for p in parts if p not in _WRAPPERS)


def transparent_view(keys: Iterable[str]) -> View:
    """Keys without the components that torch's wrappers put in."""
    found: dict[str, tuple[str, ...]] = {}
    for key in keys:
        short = transparent(key)
        found[short] = (*found.get(short, ()), key)
    return found


def strip_view(view: View, prefix: str) -> View:
    """Only the keys that start with ``prefix``, without it."""
    return {key[len(prefix) :]: raw for key, raw in view.items() if key.startswith(prefix)}


def match_names(wanted: Wanted, view: View, *, title: str, drop: str = "") -> Answer | None:
    """Each name (less the prefix ``drop``) is taken from the key that is spelled like it.

    None if two groups would be given the same stored key: then the rule cannot be right.
    """
    sources: dict[str, Source] = {}
    owner: dict[str, str] = {}
    for group in wanted.groups:
        for name in group:
            raw = _find(transparent(name).removeprefix(drop), name, view)
            if raw is None:
                continue
            if owner.setdefault(raw[0], group[0]) != group[0]:
                return None
            rule = "exact" if raw[0] == name else title
            sources[name] = Source(keys=raw[:1], same=raw[1:], rule=rule)
    return Answer(title=title, sources=sources)


def _find(short: str, name: str, view: View) -> tuple[str, ...] | None:
    raw = view.get(short)
    if raw is None or name not in raw:
        return raw
    return (name, *(key for key in raw if key != name))


def prefix_votes(wanted: Wanted, view: View) -> Counter[str]:
    """Prefixes that the keys have and the names lack -> how many required groups they find."""
    group_of = {
        transparent(name): group[0]
        for group in wanted.groups
        if group[0] in wanted.required
        for name in group
    }
    found: defaultdict[str, set[str]] = defaultdict(set)
    for key in view:
        for prefix, rest in _cuts(key):
            if rest in group_of:
                found[prefix].add(group_of[rest])
    return Counter({prefix: len(groups) for prefix, groups in found.items()})


def drop_votes(wanted: Wanted, view: View) -> Counter[str]:
    """Prefixes that the names have and the keys lack -> how many names they find.

    A prefix that is one module with bare parameters is not a candidate while other names lie
    outside it: ``fc2.weight`` and a stored ``weight`` may be related or not.
    """
    found: Counter[str] = Counter()
    deep: set[str] = set()
    names = [transparent(name) for group in wanted.groups for name in group]
    for name in names:
        for prefix, rest in _cuts(name):
            if rest in view:
                found[prefix] += 1
                if "." in rest or found[prefix] == len(names):
                    deep.add(prefix)
    return Counter({prefix: count for prefix, count in found.items() if prefix in deep})


def top(votes: Counter[str]) -> list[str]:
    """The candidates with most votes, in a fixed order."""
    ranked = sorted(votes.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    return [prefix for prefix, _ in ranked[:_MAX_CANDIDATES]]


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Every way to cut a name into a prefix of whole components and a rest."""
    at = name.find(".")
    while at >= 0:
        yield name[: at + 1], name[at + 1 :]
        at = name.find(".", at + 1)
