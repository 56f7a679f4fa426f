"""What stands in a parameter's place after loading: scheme, layout, parts."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import torch

from fxquant.errors import ConfigError
from fxquant.scheme import QuantSpec, Scheme, find_scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What stands in a parameter's place after loading, and how its uses are to be rewritten.

    Codes are ``[N, K]`` whatever the parameter's own layout: ``transposed`` says that the parameter is
    ``[K, N]`` (GPT-2's Conv1D). ``table`` says that the exact floats are kept beside the codes, for the
    look-ups of an embedding that shares them with a quantized head. ``kn``: codes lie in memory as
    ``[K, N]``. ``nz``: on an NPU they are cast to FRACTAL_NZ, its blocked layout. ``parts_n`` and
    ``parts_k``: the sizes into which N and K are cut, each part a constant of its own (empty: one
    part). ``odd_k``: K is odd, and the last byte of packed codes holds one. ``rotated``: the codes are of
    the weight rotated along K, and activations are rotated before they meet it. ``HOST`` is the form of a
    float weight that stays in main memory and is copied to the device for each call.
    """

    scheme: str
    transposed: bool = False
    table: bool = False
    kn: bool = False
    nz: bool = False
    odd_k: bool = False
    rotated: bool = False
    parts_n: tuple[int, ...] = ()
    parts_k: tuple[int, ...] = ()

    @property
    def host(self) -> bool:
        """Whether it is a float weight in main memory."""
        return self.scheme == "none"

    @property
    def quantized_as(self) -> Scheme:
        """The scheme, a row of the table."""
        return find_scheme(self.scheme)

    @property
    def weight(self) -> QuantSpec:
        """The spec of the codes."""
        spec = find_scheme(self.scheme).weight
        assert spec is not None
        return spec

    @property
    def act(self) -> QuantSpec | None:
        """The spec of the activation that the codes are multiplied with; None: floats."""
        return find_scheme(self.scheme).act

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
        table = ("table",) if self.table else ()
        return (*self.codes, *self.weight.names[1:], *table, *self.given)

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the constants that are not made of the weight: the scale of a static activation."""
        return ("act_scale",) if self.act is not None and self.act.static else ()

    def regions(self, n: int, k: int) -> tuple[tuple[slice, slice], ...]:
        """Rows and columns of the codes ``[N, K]`` that each part holds."""
        rows, columns = _slices(self.parts_n or (n,)), _slices(self.parts_k or (k,))
        return tuple((row, column) for row in rows for column in columns)

    def code_regions(self, n: int, k: int) -> tuple[tuple[slice, slice], ...]:
        """The same in the tensor of codes, where two may lie in a byte."""
        step = 2 if self.weight.packed else 1
        return tuple(
            (row, slice(column.start // step, -(-column.stop // step))) for row, column in self.regions(n, k)
        )

    def features(self, columns: int) -> int:
        """K of codes that take so many columns."""
        return 2 * columns - self.odd_k if self.weight.packed else columns

    def part_shapes(self, n: int, k: int) -> tuple[tuple[int, int], ...]:
        """Shapes of the constants that hold the codes ``[N, K]``."""
        spec = self.weight
        sizes = ((r.stop - r.start, spec.columns(c.stop - c.start)) for r, c in self.regions(n, k))
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
        whole = self.weight.constants(n, k)
        codes_dtype, _ = whole.pop("codes")
        sizes = self.part_shapes(n, k)
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            name: (codes_dtype, size) for name, size in zip(self.codes, sizes, strict=True)
        }
        found |= whole
        if self.table:
            found["table"] = (dtype, shape)
        return {**found, **dict.fromkeys(self.given, (torch.float32, (1,)))}

    def __str__(self) -> str:
        if self.host:
            return HOST_TEXT
        parts = "".join(
            f"/{axis}:{','.join(map(str, sizes))}"
            for axis, sizes in (("n", self.parts_n), ("k", self.parts_k))
            if sizes
        )
        flags = {"t": self.transposed, "kn": self.kn, "nz": self.nz, "odd": self.odd_k, "rot": self.rotated}
        text = "".join(f".{flag}" for flag, is_set in flags.items() if is_set)
        return f"{self.scheme}{text}{parts}{'+table' if self.table else ''}"

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
            odd_k=bool(match["odd"]),
            rotated=bool(match["rot"]),
            parts_n=_sizes(match["n"]),
            parts_k=_sizes(match["k"]),
        )


HOST_TEXT = "float@host"
HOST = Form(scheme="none")

_FORM = re.compile(
    r"(?P<scheme>[a-z0-9_]+(\(refine=[a-z]+\))?)"
    r"(?P<transposed>\.t)?(?P<kn>\.kn)?(?P<nz>\.nz)?(?P<odd>\.odd)?(?P<rot>\.rot)?"
    r"(/n:(?P<n>[\d,]+))?(/k:(?P<k>[\d,]+))?(?P<table>\+table)?"
)


def _sizes(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part) if text else ()


def _slices(sizes: tuple[int, ...]) -> list[slice]:
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
