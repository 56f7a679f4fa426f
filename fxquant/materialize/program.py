"""What runs for one tile: calls on parts of tensors, whose results go into constants that exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxquant import numerics
from fxquant.capture import make_fake_mode
from fxquant.scheme import QuantSpec

COPY, QUANTIZE, ABSMAX, CODES = "copy", "quantize", "absmax", "codes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One op; ``last`` are the values that are not needed after it."""

    node: fx.Node
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    last: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Where a value goes.

    ``copy`` into constant ``outs[0]``, cast if need be; ``quantize`` into the constants ``outs`` of
    ``spec``, the codes first. If scales span several tiles: ``absmax`` raises the maxima in a first
    pass, ``codes`` writes the rest with the scales that they give.
    """

    kind: str
    source: fx.Node
    outs: tuple[int, ...]
    spec: QuantSpec | None = None


Compare = Callable[[Tensor, Sequence[Any], Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Calls in order, then the ends. ``inputs`` are the placeholders by position of their read."""

    inputs: tuple[tuple[int, fx.Node], ...]
    calls: tuple[Call, ...]
    ends: tuple[End, ...]

    @property
    def scans(self) -> bool:
        """Whether it is part of a first pass, for the maxima."""
        return any(end.kind == ABSMAX for end in self.ends)

    def compute(
        self, reads: Sequence[Tensor], watch: Callable[[Mapping[fx.Node, Any]], None] | None = None
    ) -> dict[fx.Node, Any]:
        """The values of the ends from the parts that were read, each freed after its last use.

        ``watch`` sees the values that are alive after each call.
        """
        values: dict[fx.Node, Any] = {node: read for (_, node), read in zip(self.inputs, reads, strict=True)}
        for call in self.calls:
            args, kwargs = fx.node.map_arg((call.args, dict(call.kwargs)), values.__getitem__)
            values[call.node] = call.target(*args, **kwargs)
            del args, kwargs
            if watch is not None:
                watch(values)
            for node in call.last:
                del values[node]
        return values

    def run(
        self,
        reads: Sequence[Tensor],
        outs: Mapping[int, Any],
        scratch: Tensor,
        maxima: Maxima | None = None,
        compare: Compare | None = None,
    ) -> None:
        """Compute and write into the parts ``outs`` of the constants (tensors, or ``Scattered`` codes).

        ``compare`` sees what codes are made of, the constants once they are written, and the scratch.
        """
        values = self.compute(reads)
        for end in self.ends:
            value = values[end.source]
            if end.kind == COPY:
                outs[end.outs[0]].copy_(value)
                continue
            assert end.spec is not None
            if end.kind == ABSMAX:
                assert maxima is not None
                maxima.raise_to(value, end.spec, scratch)
                continue
            if end.kind == QUANTIZE:
                parts = [outs[i] for i in end.outs]
                numerics.quantize_into(value, end.spec, parts, scratch)
            else:
                assert maxima is not None
                parts = [outs.get(i, maxima.out) for i in end.outs]
                numerics.quantize_known_into(value, end.spec, maxima.known(end.spec), parts, scratch)
            if compare is not None:
                compare(value, parts, scratch)


class Maxima:
    """The maxima of a weight whose scales span several tiles; ``out`` gets the scales made of them."""

    def __init__(self, out: Tensor, lock: Any) -> None:
        self.lock = lock
        self.absmax = torch.zeros_like(out, dtype=torch.float32)
        self.out = out
        self.done = False

    def raise_to(self, value: Tensor, spec: QuantSpec, scratch: Tensor) -> None:
        """Take the maxima of a part into account."""
        part = torch.zeros_like(self.absmax)
        numerics.absmax_into(value, spec, part, scratch)
        with self.lock:
            torch.maximum(self.absmax, part, out=self.absmax)

    def known(self, spec: QuantSpec) -> Tensor:
        """The scales, once all maxima are known."""
        with self.lock:
            if not self.done:
                self.out.copy_(numerics.scale_from_absmax(self.absmax, spec))
                self.done = True
        return self.out


def scratch_bytes(program: Program, shapes: Mapping[fx.Node, tuple[int, ...]]) -> int:
    """Bytes of float32 scratch that the ends take, by the shapes of their sources."""
    sizes = [0]
    for end in program.ends:
        if end.spec is not None:
            n, k = shapes[end.source]
            # Two rows at least, for comparing what was written with what it was made of.
            sizes.append(max(min(numerics.chunk_rows((n, k), end.spec), n), 2) * k * 4)
    return max(sizes)


def measure_on_fakes(
    program: Program, reads: Sequence[tuple[tuple[int, ...], torch.dtype]]
) -> tuple[int, dict[fx.Node, tuple[int, ...]]]:
    """Bytes of values beside the reads that are alive at once, and the shapes of the ends' sources."""
    with make_fake_mode():
        given = [torch.empty(shape, dtype=dtype) for shape, dtype in reads]
        owned = {tensor.untyped_storage()._cdata for tensor in given}
        alive = [0]
        values = program.compute(given, lambda values: alive.append(_alive(values, owned)))
        peak = max(alive)
        for end in program.ends:
            if end.kind == ABSMAX:
                peak = max(peak, _alive(values, owned) + _pass_bytes(values[end.source], end.spec))
            elif end.spec is not None and (program.calls or end.spec.refine):  # else of no note
                peak = max(peak, _alive(values, owned) + _quantizing_bytes(values[end.source], end.spec))
        shapes = {end.source: tuple(values[end.source].shape) for end in program.ends}
    return peak, shapes


def _pass_bytes(source: Tensor, spec: QuantSpec | None) -> int:
    """Bytes of the maxima of a first pass over a part."""
    assert spec is not None
    n, k = source.shape
    return 12 * math.prod(numerics.scan_shape((n, k), spec))


def _quantizing_bytes(source: Tensor, spec: QuantSpec) -> int:
    """Bytes that quantizing one chunk, or comparing a piece afterwards, takes beside the scratch."""
    n, k = source.shape
    return max(numerics.temporary_bytes((n, k), spec), numerics.comparing_bytes((n, k), spec)) if n else 0


def _alive(values: Mapping[fx.Node, Any], owned: set[int]) -> int:
    """Bytes of the storages behind ``values`` that are not in ``owned``."""
    sizes: dict[int, int] = {}
    for held in values.values():
        for tensor in held if isinstance(held, (tuple, list)) else (held,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(size for identity, size in sizes.items() if identity not in owned)
