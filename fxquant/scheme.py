"""How a weight and its activation are represented: data, not code.

A new scheme is one row of ``SCHEMES``; its numerics are one function in ``numerics`` and its lowering
one entry per target.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fxquant.errors import ConfigError

FULL = 0
"""A block side that spans its whole axis."""

REFINEMENTS = ("clip", "hqq")
"""Ways to choose the scales of 4-bit weights without data: see ``numerics.refine``."""

_SPEC = re.compile(
    r"(?P<codes>int8|int4|e4m3|e2m1)\[(?P<rows>\d+|\*),(?P<k>\d+|\*)\](?P<scale>e8m0|e4m3|bf16|f16)?(?P<zero>zp)?"
    r"(?P<when>dyn|static)?(!(?P<refine>[a-z]+))?"
)


@dataclass(frozen=True, slots=True)
class CodeType:
    """What codes are: ``top`` is the largest magnitude, ``bits`` their width, ``dtype`` how they are held.

    Codes of 4 bits lie two to a byte along K, the even one in the low half.
    """

    top: float
    bits: int
    dtype: torch.dtype
    is_float: bool = False


CODES: Mapping[str, CodeType] = {
    "int8": CodeType(127, 8, torch.int8),
    "int4": CodeType(7, 4, torch.uint8),
    "e4m3": CodeType(448, 8, torch.float8_e4m3fn, is_float=True),
    "e2m1": CodeType(6, 4, torch.uint8, is_float=True),
}
"""``int8``: -127 to 127. ``int4``: -7 to 7, with a zero point -8 to 7, held as code + 8. ``e4m3`` and
``e2m1``: floats of 8 and 4 bits (OCP), held as their bits."""

SCALES: Mapping[str, torch.dtype] = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}
"""Dtypes of scales. ``e8m0``: powers of two. ``e4m3``: in units of a float32 scale for the whole tensor."""

HALF_NAMES: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""Names of the dtypes of half precision, in specs and forms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """Codes with a scale for each ``block`` of a ``[rows, K]`` tensor; blocks at the edges may be smaller.

    ``block=(1, FULL)`` is per channel for a weight and per token for an activation. ``zero``: a zero
    point for each block beside the scale. ``dynamic``: of an activation whose scales are found at run
    time; ``static``: whose scale is given. The canonical text, ``str(spec)``, travels in op schemas:
    ``int8[1,*]``, ``int8[1,*]dyn``, ``int4[1,64]bf16zp!hqq``, ``e4m3[1,32]e8m0dyn``. The specs of schemes
    have float32 scales; that of a weight may have others, see ``half_scales``.
    """

    codes: str = "int8"
    block: tuple[int, int]
    scale: str = "f32"
    zero: bool = False
    dynamic: bool = False
    static: bool = False
    refine: str = ""

    @property
    def type(self) -> CodeType:
        """What the codes are."""
        return CODES[self.codes]

    @property
    def top(self) -> float:
        """The largest magnitude of a code; the range is symmetric, so -128 is never produced."""
        return self.type.top

    @property
    def packed(self) -> bool:
        """Whether two codes lie in a byte."""
        return self.type.bits == 4

    @property
    def per_row(self) -> bool:
        """Whether it is symmetric, with one float32 scale for each row or one for all."""
        return self.block in ((1, FULL), (FULL, FULL)) and self.scale == "f32" and not self.zero

    @property
    def half_scale(self) -> bool:
        """Whether scales and zero points are bfloat16 or float16."""
        return self.scale in HALF_NAMES.values()

    @property
    def float_scale(self) -> bool:
        """Whether a scale is the float that codes are multiplied by, of whatever dtype."""
        return self.scale == "f32" or self.half_scale

    @property
    def two_level(self) -> bool:
        """Whether scales of blocks are in units of a scale for the whole tensor."""
        return self.scale == "e4m3"

    @property
    def scanned(self) -> str:
        """The constant that a first pass over a weight gives, where that takes two."""
        return "global_scale" if self.two_level else "scale"

    @property
    def plain(self) -> QuantSpec:
        """What matters once codes exist: how scales were chosen does not."""
        return replace(self, refine="")

    def half_scales(self, dtype: torch.dtype) -> str:
        """``scale`` of the spec that weights of ``dtype`` have instead; empty where it is this one.

        Int4 has scales and zero points of the weight's dtype.
        """
        return HALF_NAMES.get(dtype, "") if self.codes == "int4" else ""

    def constants(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each constant of a weight ``[n, k]``, the codes first."""
        grid = self.grid(n, k)
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "codes": (self.type.dtype, (n, self.columns(k))),
            "scale": (SCALES[self.scale], grid),
        }
        if self.zero:
            found["zero"] = (SCALES[self.scale], grid)
        if self.two_level:
            found["global_scale"] = (torch.float32, (1, 1))
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the constants of a weight, in order."""
        return tuple(self.constants(1, 1))

    def columns(self, k: int) -> int:
        """Elements of a row of ``k`` codes as they are held."""
        return -(-k // 2) if self.packed else k

    def grid(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the scales of ``[n, k]``; an empty tensor still has one scale for each row."""
        rows, columns = self.block
        return (
            min(n, 1) if rows == FULL else -(-n // rows),
            1 if columns == FULL else max(1, -(-k // columns)),
        )

    def __str__(self) -> str:
        rows, k = ("*" if side == FULL else str(side) for side in self.block)
        scale = "" if self.scale == "f32" else self.scale
        when = "dyn" if self.dynamic else "static" if self.static else ""
        refine = f"!{self.refine}" if self.refine else ""
        return f"{self.codes}[{rows},{k}]{scale}{'zp' if self.zero else ''}{when}{refine}"

    @staticmethod
    @functools.cache  # every call of an op has its spec as text
    def parse(text: str) -> QuantSpec:
        """The inverse of ``str``."""
        match = _SPEC.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not a quantization spec such as 'int8[1,*]'")
        rows, k = (FULL if match[side] == "*" else int(match[side]) for side in ("rows", "k"))
        return QuantSpec(
            codes=match["codes"],
            block=(rows, k),
            scale=match["scale"] or "f32",
            zero=bool(match["zero"]),
            dynamic=match["when"] == "dyn",
            static=match["when"] == "static",
            refine=match["refine"] or "",
        )


FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_MATMULS = ("scaled_mm", "block_mm", "weight_only_mm")
PRODUCTS = tuple(f"fxquant::{prefix}{name}" for prefix in ("", "grouped_") for name in _MATMULS)
"""Dialect ops that multiply with codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A named pair of representations: the weight's and, unless it is weight only, the activation's."""

    name: str
    weight: QuantSpec | None
    act: QuantSpec | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATS
    note: str

    @property
    def op(self) -> str:
        """The dialect op that multiplies with such a weight."""
        if self.act is None or self.weight is None:
            return "fxquant::weight_only_mm"
        plain = self.weight.per_row and self.act.per_row
        return "fxquant::scaled_mm" if plain else "fxquant::block_mm"

    @property
    def grouped_op(self) -> str:
        """The dialect op that multiplies groups of rows with such weights of experts."""
        return self.op.replace("::", "::grouped_")

    @property
    def refinable(self) -> bool:
        """Whether ``(refine=...)`` may follow the name."""
        return self.weight is not None and self.weight.codes == "int4"


def _spec(text: str) -> QuantSpec:
    return QuantSpec.parse(text)


def _int4(name: str, block: str) -> tuple[Scheme, Scheme]:
    what = "channel" if block == "*" else f"group of {block} along K"
    return (
        Scheme(
            name=f"int4_{name}", weight=_spec(f"int4[1,{block}]"), note=f"W4A16: -7 to 7, a scale per {what}"
        ),
        Scheme(
            name=f"int4_{name}_asym",
            weight=_spec(f"int4[1,{block}]zp"),
            note=f"W4A16: -8 to 7, a scale and a zero point per {what}",
        ),
    )


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="none", weight=None, note="weights as the model declares them"),
        Scheme(
            name="int8",
            weight=_spec("int8[1,*]"),
            act=_spec("int8[1,*]dyn"),
            note="W8A8: symmetric int8, a scale per output channel and per token",
        ),
        Scheme(
            name="int8_static",
            weight=_spec("int8[1,*]"),
            act=_spec("int8[*,*]static"),
            note="W8A8: int8 per channel, one given scale for the activation of a layer",
        ),
        Scheme(
            name="int8_weight_only",
            weight=_spec("int8[1,*]"),
            note="W8A16: symmetric int8, a scale per output channel",
        ),
        *_int4("g32", "32"),
        *_int4("g64", "64"),
        *_int4("g128", "128"),
        *_int4("channel", "*"),
        Scheme(
            name="w4a8_g128",
            weight=_spec("int4[1,128]"),
            act=_spec("int8[1,*]dyn"),
            note="W4A8: int4 with a scale per group of 128 along K, int8 per token",
        ),
        Scheme(
            name="fp8",
            weight=_spec("e4m3[1,*]"),
            act=_spec("e4m3[1,*]dyn"),
            note="W8A8: float8 e4m3, a scale per output channel and per token",
        ),
        Scheme(
            name="fp8_tensor",
            weight=_spec("e4m3[*,*]"),
            act=_spec("e4m3[*,*]dyn"),
            note="W8A8: float8 e4m3, one scale for the weight and one for the activation",
        ),
        Scheme(
            name="fp8_block",
            weight=_spec("e4m3[128,128]"),
            act=_spec("e4m3[1,128]dyn"),
            note="W8A8: float8 e4m3, a scale per 128 x 128 weights and per 128 features of a token",
        ),
        Scheme(
            name="mxfp8",
            weight=_spec("e4m3[1,32]e8m0"),
            act=_spec("e4m3[1,32]e8m0dyn"),
            note="W8A8: OCP MXFP8 (e4m3), a power of two per 32 along K",
        ),
        Scheme(
            name="mxfp4",
            weight=_spec("e2m1[1,32]e8m0"),
            act=_spec("e2m1[1,32]e8m0dyn"),
            note="W4A4: OCP MXFP4, a power of two per 32 along K",
        ),
        Scheme(
            name="mxfp4_weight_only",
            weight=_spec("e2m1[1,32]e8m0"),
            note="W4A16: OCP MXFP4 weights, as gpt-oss has them",
        ),
        Scheme(
            name="nvfp4",
            weight=_spec("e2m1[1,16]e4m3"),
            act=_spec("e2m1[1,16]e4m3dyn"),
            note="W4A4: NVFP4, an e4m3 scale per 16 along K; a float32 one per weight and per token",
        ),
        Scheme(
            name="nvfp4_weight_only",
            weight=_spec("e2m1[1,16]e4m3"),
            note="W4A16: NVFP4 weights, an e4m3 scale per 16 along K and a float32 one per weight",
        ),
    )
}

WIDER: Mapping[str, str] = {
    "int4_channel": "int4_g128",
    "int4_g128": "int4_g64",
    "int4_g64": "int4_g32",
    "int4_g32": "int8_weight_only",
    "int4_channel_asym": "int4_g128_asym",
    "int4_g128_asym": "int4_g64_asym",
    "int4_g64_asym": "int4_g32_asym",
    "int4_g32_asym": "int8_weight_only",
    "w4a8_g128": "int8",
    "mxfp4": "mxfp8",
    "mxfp4_weight_only": "int8_weight_only",
    "nvfp4": "fp8",
    "nvfp4_weight_only": "int8_weight_only",
    "fp8_tensor": "fp8",
}
"""What a weight with too large an error takes instead, see ``max_error``; of others there is no wider one."""


def weight_only(scheme: Scheme) -> Scheme | None:
    """The scheme of the same weights for uses that do not quantize activations, if there is one."""
    if scheme.act is None or scheme.weight is None:
        return scheme
    rows = (row for row in SCHEMES.values() if row.act is None and row.weight == scheme.weight.plain)
    found = next(rows, None)
    if found is None or not scheme.weight.refine:
        return found
    return find_scheme(f"{found.name}(refine={scheme.weight.refine})")


def wider(scheme: Scheme) -> Scheme:
    """The next scheme with smaller errors, refined in the same way where it can be; ``none`` at the end."""
    name, _, how = scheme.name.partition("(")
    found = SCHEMES[WIDER.get(name, "none")]
    return find_scheme(f"{found.name}({how}") if how and found.refinable else found


_REFINED = re.compile(r"(?P<name>[a-z0-9_]+)\(refine=(?P<how>[a-z]+)\)")


def find_scheme(name: str) -> Scheme:
    """The row of the table, or a ``ConfigError`` that lists what there is.

    ``"int4_g64_asym(refine=hqq)"`` is the row ``int4_g64_asym`` with scales that are refined at load time.
    """
    if isinstance(name, str) and name in SCHEMES:
        return SCHEMES[name]
    refined = _REFINED.fullmatch(name) if isinstance(name, str) else None
    if refined is None or refined["name"] not in SCHEMES:
        raise ConfigError(f"unknown scheme {name!r}; known: {', '.join(SCHEMES)}")
    scheme = SCHEMES[refined["name"]]
    if not scheme.refinable or refined["how"] not in REFINEMENTS:
        able = ", ".join(row.name for row in SCHEMES.values() if row.refinable)
        raise ConfigError(f"scheme {name!r}: refine is one of {', '.join(REFINEMENTS)}, for {able}")
    assert scheme.weight is not None
    if refined["how"] == "hqq" and not scheme.weight.zero:
        raise ConfigError(f"scheme {name!r}: hqq moves the zero point, so it takes the _asym forms")
    weight = replace(scheme.weight, refine=refined["how"])
    return replace(scheme, name=name, weight=weight, note=f"{scheme.note}; {refined['how']}")
