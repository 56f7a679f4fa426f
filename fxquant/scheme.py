"""How a weight and its activation are represented: data, not code.

A new scheme is one row of ``SCHEMES``; its numerics are one function in ``numerics.py`` and its
lowering one entry per target.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import torch

from fxquant.errors import ConfigError

FULL = 0
"""A block side that spans its whole axis."""

_SPEC = re.compile(r"int(?P<bits>\d+)\[(?P<rows>\d+|\*),(?P<k>\d+|\*)\](?P<dynamic>dyn)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """Symmetric integer codes with one float32 scale for each ``block`` of a ``[rows, K]`` tensor.

    ``block=(1, FULL)`` is per channel for a weight and per token for an activation. The canonical
    text, ``str(spec)``, travels in op schemas: ``int8[1,*]``, ``int8[1,*]dyn``.
    """

    bits: int
    block: tuple[int, int]
    dynamic: bool = False

    @property
    def top(self) -> int:
        """The largest code; the range is symmetric, so -128 is never produced."""
        return int(2 ** (self.bits - 1)) - 1

    def __str__(self) -> str:
        rows, k = ("*" if side == FULL else str(side) for side in self.block)
        return f"int{self.bits}[{rows},{k}]{'dyn' if self.dynamic else ''}"

    @staticmethod
    def parse(text: str) -> QuantSpec:
        """The inverse of ``str``."""
        match = _SPEC.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not a quantization spec such as 'int8[1,*]'")
        rows, k = (FULL if match[side] == "*" else int(match[side]) for side in ("rows", "k"))
        return QuantSpec(bits=int(match["bits"]), block=(rows, k), dynamic=bool(match["dynamic"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A named pair of representations: the weight's and, unless it is weight only, the activation's."""

    name: str
    weight: QuantSpec | None
    act: QuantSpec | None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    note: str


_INT8_ROW = QuantSpec(bits=8, block=(1, FULL))

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="none", weight=None, act=None, note="weights as the model declares them"),
        Scheme(
            name="int8",
            weight=_INT8_ROW,
            act=QuantSpec(bits=8, block=(1, FULL), dynamic=True),
            note="W8A8: symmetric int8, a scale per output channel and per token",
        ),
    )
}


def find_scheme(name: str) -> Scheme:
    """The row of the table, or a ``ConfigError`` that lists what there is."""
    if not isinstance(name, str) or name not in SCHEMES:
        raise ConfigError(f"unknown scheme {name!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What stands in a parameter's place after loading, and how its uses are to be rewritten.

    Codes are ``[N, K]`` whatever the parameter's own layout: ``transposed`` says that the parameter is
    ``[K, N]`` (GPT-2's Conv1D). ``table`` says that the exact floats are kept beside the codes, for the
    look-ups of an embedding that shares them with a quantized head. ``kn``: codes lie in memory as
    ``[K, N]``. ``nz``: on an NPU they are cast to FRACTAL_NZ, its blocked layout. ``parts_n`` and
    ``parts_k``: the sizes into which N and K are cut, each part a constant of its own (empty: one
    part). ``HOST`` is the form of a float weight that stays in main memory and is copied to the device
    for each call.
    """

    scheme: str
    transposed: bool = False
    table: bool = False
    kn: bool = False
    nz: bool = False
    parts_n: tuple[int, ...] = ()
    parts_k: tuple[int, ...] = ()

    @property
    def host(self) -> bool:
        """Whether it is a float weight in main memory."""
        return self.scheme == "none"

    @property
    def weight(self) -> QuantSpec:
        """The spec of the codes."""
        spec = find_scheme(self.scheme).weight
        assert spec is not None
        return spec

    @property
    def act(self) -> QuantSpec:
        """The spec of the activation that the codes are multiplied with."""
        spec = find_scheme(self.scheme).act
        assert spec is not None
        return spec

    @property
    def codes(self) -> tuple[str, ...]:
        """Names of the constants that hold codes: parts of N, and in each the parts of K."""
        if self.host:
            return ()
        count = max(len(self.parts_n), 1) * max(len(self.parts_k), 1)
        return ("codes",) if count == 1 else tuple(f"codes_{i}" for i in range(count))

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the constants, in order."""
        if self.host:
            return ("value",)
        return (*self.codes, "scale", "table") if self.table else (*self.codes, "scale")

    def regions(self, n: int, k: int) -> tuple[tuple[slice, slice], ...]:
        """Rows and columns of the codes ``[N, K]`` that each part holds."""
        rows, columns = _slices(self.parts_n or (n,)), _slices(self.parts_k or (k,))
        return tuple((row, column) for row in rows for column in columns)

    def part_shapes(self, n: int, k: int) -> tuple[tuple[int, int], ...]:
        """Shapes of the constants that hold the codes ``[N, K]``."""
        sizes = ((r.stop - r.start, c.stop - c.start) for r, c in self.regions(n, k))
        return tuple(size[::-1] if self.kn else size for size in sizes)

    def codes_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """N and K of a parameter of ``shape``."""
        n, k = shape[::-1] if self.transposed else shape
        return n, k

    def shapes(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each constant of a parameter of ``shape`` and ``dtype``."""
        if self.host:
            return {"value": (dtype, shape)}
        n, k = self.codes_shape(shape)
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, size in zip(self.codes, self.part_shapes(n, k), strict=True):
            found[name] = (torch.int8, size)
        found["scale"] = (torch.float32, (n, 1))
        if self.table:
            found["table"] = (dtype, shape)
        return found

    def __str__(self) -> str:
        if self.host:
            return HOST_TEXT
        parts = "".join(
            f"/{axis}:{','.join(map(str, sizes))}"
            for axis, sizes in (("n", self.parts_n), ("k", self.parts_k))
            if sizes
        )
        flags = f"{'.t' if self.transposed else ''}{'.kn' if self.kn else ''}{'.nz' if self.nz else ''}"
        return f"{self.scheme}{flags}{parts}{'+table' if self.table else ''}"

    @staticmethod
    def parse(text: str) -> Form:
        """The inverse of ``str``."""
        if text == HOST_TEXT:
            return HOST
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not a form such as 'int8.t+table' or 'int8.kn/n:48384,48384'")
        return Form(
            scheme=find_scheme(match["scheme"]).name,
            transposed=bool(match["transposed"]),
            table=bool(match["table"]),
            kn=bool(match["kn"]),
            nz=bool(match["nz"]),
            parts_n=_sizes(match["n"]),
            parts_k=_sizes(match["k"]),
        )


HOST_TEXT = "float@host"
HOST = Form(scheme="none")

_FORM = re.compile(
    r"(?P<scheme>[a-z0-9_]+)(?P<transposed>\.t)?(?P<kn>\.kn)?(?P<nz>\.nz)?"
    r"(/n:(?P<n>[\d,]+))?(/k:(?P<k>[\d,]+))?(?P<table>\+table)?"
)


def _sizes(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part) if text else ()


def _slices(sizes: tuple[int, ...]) -> list[slice]:
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
