"""What stands in a parameter's place after loading: scheme, layout, parts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fxquant.errors import ConfigError
from fxquant.scheme import HALF_NAMES, SCALES, QuantSpec, Scheme, find_scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What stands in a parameter's place after loading, and how its uses are to be rewritten.

    Codes are ``[N, K]`` whatever the parameter's own layout: ``transposed`` says that the parameter is
    ``[K, N]`` (GPT-2's Conv1D). Of experts, ``[E, N, K]``, the constants have an axis in front, too.
    ``table`` says that the exact floats are kept beside the codes, for the
    look-ups of an embedding that shares them with a quantized head. ``kn``: codes lie in memory as
    ``[K, N]``. ``nz``: on an NPU they are cast to FRACTAL_NZ, its blocked layout. ``parts_n`` and
    ``parts_k``: the sizes into which N and K are cut, each part a constant of its own (empty: one
    part). ``odd_k``: K is odd, and the last byte of packed codes holds one. ``kernel``: the parameter is
    that of a convolution, ``[N, K / prod(kernel), *kernel]``. ``rotated``: the codes are of the weight
    rotated along K, and activations are rotated before they meet it. ``scales``: scales and zero points
    are bfloat16 or float16, not the scheme's float32. ``held``: constants are as the ops
    of a target take them for activations of this dtype, see ``held``. ``HOST`` is the form of a float
    weight that stays in main memory and is copied to the device for each call.
    """

    scheme: str
    transposed: bool = False
    table: bool = False
    kn: bool = False
    nz: bool = False
    odd_k: bool = False
    rotated: bool = False
    scales: str = ""
    held: str = ""
    parts_n: tuple[int, ...] = ()
    parts_k: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()

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
        return replace(spec, scale=self.scales) if self.scales else spec

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
        return (*self.codes, *self.weight.names[1:], *table, *self.given, *self.derived)

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the constants that are not made of the weight: the scale of a static activation."""
        return ("act_scale",) if self.act is not None and self.act.static else ()

    @property
    def derived(self) -> tuple[str, ...]:
        """Names of the constants that are made of others, for the ops of a target."""
        return ("act_scales", "deq_scale") if self.held and self.given else ()

    @property
    def held_dtype(self) -> torch.dtype:
        """The dtype that ``held`` names."""
        return HELD[self.held]

    @property
    def in_files(self) -> Form:
        """The form as files have it: layouts of a device are not stored."""
        return replace(self, nz=False, held="")

    @property
    def in_one_part(self) -> Form:
        """The form whose codes have the same values, ``[N, K]`` in one part, as the scheme has them."""
        return replace(self.in_files, kn=False, parts_n=(), parts_k=())

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

    def whole_size(self, parts: Sequence[Sequence[int]]) -> tuple[int, int]:
        """N and K of codes whose constants have these shapes, perhaps with an axis of experts in front."""
        width = max(len(self.parts_k), 1)
        n_axis, k_axis = (-1, -2) if self.kn else (-2, -1)
        columns = sum(part[k_axis] for part in parts[:width])
        return sum(part[n_axis] for part in parts[::width]), self.features(columns)

    def codes_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """N and K of a parameter of ``shape``, which may have an axis of experts before them."""
        if self.kernel:
            return shape[0], math.prod(shape[1:])
        first, second = shape[-2:]
        return (second, first) if self.transposed else (first, second)

    def own_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Shape of the parameter, or of one of its experts, whose codes are ``[n, k]``."""
        if self.kernel:
            return (n, k // math.prod(self.kernel), *self.kernel)
        return (k, n) if self.transposed else (n, k)

    def as_matrix(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the parameter's shape as ``[N, K]``, or ``[E, N, K]``."""
        if self.kernel:
            return values.reshape(values.shape[0], -1)
        return _turned(values) if self.transposed else values

    def as_parameter(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse of ``as_matrix``."""
        if self.kernel:
            return values.view(self.own_shape(*values.shape))
        return _turned(values) if self.transposed else values

    def shapes(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each constant of a parameter of ``shape`` and ``dtype``."""
        if self.host:
            return {"value": (dtype, shape)}
        n, k = self.codes_shape(shape)
        whole = self.weight.constants(n, k)
        codes_dtype, _ = whole.pop("codes")
        sizes = dict(zip(self.codes, self.part_shapes(n, k), strict=True))
        every = {**{name: (codes_dtype, size) for name, size in sizes.items()}, **whole}
        lead = () if self.kernel else shape[:-2]  # of experts
        found = {name: (part, (*lead, *size)) for name, (part, size) in every.items()}
        if self.table:
            found["table"] = (dtype, shape)
        found |= dict.fromkeys(self.given, (torch.float32, (1,)))
        if self.held and self.act is None:
            found |= {name: (self.held_dtype, found[name][1]) for name in self.weight.names[1:]}
        if self.derived:
            packed = torch.int64 if self.held_dtype == torch.float16 else torch.float32
            found |= {"act_scales": (torch.float32, (k,)), "deq_scale": (packed, (n,))}
        return found

    def __str__(self) -> str:
        if self.host:
            return HOST_TEXT
        parts = "".join(
            f"/{axis}:{','.join(map(str, sizes))}"
            for axis, sizes in (("n", self.parts_n), ("k", self.parts_k))
            if sizes
        )
        flags = {"t": self.transposed, "kn": self.kn, "nz": self.nz, "odd": self.odd_k, "rot": self.rotated}
        flags[f"s_{self.scales}"], flags[self.held] = bool(self.scales), bool(self.held)
        text = "".join(f".{flag}" for flag, is_set in flags.items() if is_set)
        kernel = f".conv{'x'.join(map(str, self.kernel))}" if self.kernel else ""
        return f"{self.scheme}{kernel}{text}{parts}{'+table' if self.table else ''}"

    @staticmethod
    def parse(text: str) -> Form:
        """The inverse of ``str``."""
        if text == HOST_TEXT:
            return HOST
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not a form such as 'int8.t+table' or 'int8.kn/n:48384,48384'")
        scheme = find_scheme(match["scheme"])
        spec, scales = scheme.weight, match["scales"]
        if scales and (spec is None or not spec.half_scales(SCALES[scales])):
            raise ConfigError(f"{text!r} is not a form: scheme {scheme.name} has no scales in half precision")
        return Form(
            scheme=scheme.name,
            transposed=bool(match["transposed"]),
            table=bool(match["table"]),
            kn=bool(match["kn"]),
            nz=bool(match["nz"]),
            odd_k=bool(match["odd"]),
            rotated=bool(match["rot"]),
            scales=scales or "",
            held=match["held"] or "",
            parts_n=_sizes(match["n"]),
            parts_k=_sizes(match["k"]),
            kernel=tuple(int(size) for size in match["kernel"].split("x")) if match["kernel"] else (),
        )


def form_in_files(form: Form | None) -> Form | None:
    """The form as files have it; None is a weight that stays float."""
    return None if form is None else form.in_files


HELD = {name: dtype for dtype, name in HALF_NAMES.items()}
"""What ``Form.held`` may be."""

HOST_TEXT = "float@host"
HOST = Form(scheme="none")

_FORM = re.compile(
    r"(?P<scheme>[a-z0-9_]+(\(refine=[a-z]+\))?)"
    r"(\.conv(?P<kernel>[1-9]\d{0,8}(x[1-9]\d{0,8}){0,2}))?"
    r"(?P<transposed>\.t)?(?P<kn>\.kn)?(?P<nz>\.nz)?(?P<odd>\.odd)?(?P<rot>\.rot)?"
    r"(\.s_(?P<scales>bf16|f16))?(\.(?P<held>bf16|f16))?"
    r"(/n:(?P<n>\d{1,18}(,\d{1,18})*))?(/k:(?P<k>\d{1,18}(,\d{1,18})*))?(?P<table>\+table)?"
)


def _turned(values: torch.Tensor) -> torch.Tensor:
    return values.mT if values.dim() > 2 else values.t()  # t: templates of loading show it


def _sizes(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",")) if text else ()


def _slices(sizes: tuple[int, ...]) -> list[slice]:
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
