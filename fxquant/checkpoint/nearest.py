"""Names that resemble a name: the hint part of error texts."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable

_SHORTLIST = 48


def nearest_keys(name: str, keys: Iterable[str], *, count: int = 3) -> tuple[str, ...]:
    """The keys that look most like ``name``, best first, at most ``count``.

    Keys are first ranked by the name components they share with ``name``, so that the slow
    comparison of ``difflib`` sees a short list even for a checkpoint of 100,000 tensors.
    """
    parts = name.split(".")
    wanted = set(parts)

    def shared(key: str) -> tuple[int, int, int]:
        other = key.split(".")
        tail = 0
        for left, right in zip(reversed(parts), reversed(other), strict=False):
            if left != right:
                break
            tail += 1
        return tail, len(wanted.intersection(other)), -abs(len(key) - len(name))

    shortlist = heapq.nlargest(_SHORTLIST, keys, key=shared)
    return tuple(difflib.get_close_matches(name, shortlist, n=count, cutoff=0.5))
