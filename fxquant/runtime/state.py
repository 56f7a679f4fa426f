"""What happened at run time: counters that the quantized weights and the compiled graphs share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor


@dataclass(slots=True)
class RunState:
    """Counts for one model.

    ``graphs`` compiled graphs by frame; ``rewritten`` products, look-ups and convolutions with codes in them;
    ``eager_linears`` quantized calls outside compiled graphs (same arithmetic);
    ``fallbacks`` uses that computed with float values of a quantized weight, by weight and op;
    ``unnormalized`` graphs that run without rewriting, with the reason (they call the eager ops);
    ``kernels`` for dialect ops, those that the plan chose for calls outside of graphs.
    """

    graphs: Counter[str] = field(default_factory=Counter)
    rewritten: int = 0
    eager_linears: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    unnormalized: list[str] = field(default_factory=list)
    strict: bool = False
    kernels: dict[str, str] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, object]) -> RunState:
        """A copy of a model counts for itself, from zero."""
        copied = RunState(strict=self.strict, kernels=dict(self.kernels))
        return cast("RunState", memo.setdefault(id(self), copied))

    def __reduce__(self) -> tuple[type[RunState], tuple[()], tuple[bool, dict[str, str]]]:
        return RunState, (), (self.strict, self.kernels)

    def __setstate__(self, settings: tuple[bool, dict[str, str]]) -> None:
        self.strict, self.kernels = settings

    @property
    def recompiles(self) -> int:
        """Graphs beyond the first of each frame."""
        return sum(count - 1 for count in self.graphs.values())


def is_traced(constant: Tensor) -> bool:
    """Whether a constant only stands for one, while a graph is traced."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return constant.is_meta or isinstance(constant, (FakeTensor, FunctionalTensor))
