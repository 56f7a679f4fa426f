"""What happened at run time: counters that the quantized weights and the compiled graphs share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import cast


@dataclass(slots=True)
class RunState:
    """Counts for one model.

    ``graphs`` compiled graphs by frame; ``rewritten`` linear ops rewritten in them;
    ``eager_linears`` quantized linear calls outside compiled graphs (same arithmetic);
    ``fallbacks`` uses that computed with float values of a quantized weight, by weight and op;
    ``unnormalized`` graphs that run without rewriting, with the reason (they call the eager ops);
    ``kernel`` the op that the plan chose for quantized calls outside of graphs.
    """

    graphs: Counter[str] = field(default_factory=Counter)
    rewritten: int = 0
    eager_linears: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    unnormalized: list[str] = field(default_factory=list)
    strict: bool = False
    kernel: str = ""

    def __deepcopy__(self, memo: dict[int, object]) -> RunState:
        """A copy of a model counts for itself, from zero."""
        return cast("RunState", memo.setdefault(id(self), RunState(strict=self.strict, kernel=self.kernel)))

    def __reduce__(self) -> tuple[type[RunState], tuple[()], tuple[bool, str]]:
        return RunState, (), (self.strict, self.kernel)

    def __setstate__(self, settings: tuple[bool, str]) -> None:
        self.strict, self.kernel = settings

    @property
    def recompiles(self) -> int:
        """Graphs beyond the first of each frame."""
        return sum(count - 1 for count in self.graphs.values())
