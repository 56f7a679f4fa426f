"""When memory that the C library keeps is given back in the middle of a load."""

from __future__ import annotations

import pytest

from fxquant.materialize import heap

MIB = 1 << 20


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        ([(100, 93, 0.1)], 0),  # little is kept
        ([(100, 91, 0.1)], 1),
        ([(2000, 1985, 0.1)], 0),  # less than a hundredth of what is alive
        ([(2000, 1975, 0.1)], 1),
        ([(100, 50, 0.1), (100, 50, 0.11), (100, 50, 0.13)], 2),  # not time after time
        ([(50, 100, 0.1)], 0),  # allocated, not touched yet
    ],
)
def test_trimmer(
    monkeypatch: pytest.MonkeyPatch, moments: list[tuple[int, int, float]], expected: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(heap, "give_back", lambda: calls.append(None))
    trimmer = heap.Trimmer()
    for process, alive, seconds in moments:
        trimmer.look(process * MIB, alive * MIB, seconds)
    assert len(calls) == expected
