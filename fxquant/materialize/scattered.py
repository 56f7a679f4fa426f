"""Codes ``[N, K]`` that lie in several constants, or as ``[K, N]``: written to like one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxquant.form import Form


class Scattered:
    """A matrix made of views of parts of others, each at its place (rows, columns). It can be written."""

    def __init__(self, pieces: Sequence[tuple[slice, slice, Tensor]], shape: tuple[int, int]) -> None:
        self.pieces = tuple(pieces)
        self.shape = shape

    @staticmethod
    def of(form: Form, parts: Sequence[Tensor], n: int, k: int) -> Scattered:
        """The codes of a weight of ``form``, over the constants that hold them."""
        views = [part.t() for part in parts] if form.kn else parts
        pieces = [(*region, view) for region, view in zip(form.code_regions(n, k), views, strict=True)]
        return Scattered(pieces, (n, form.weight.columns(k)))

    def narrow(self, axis: int, start: int, length: int) -> Scattered:
        """A range of rows (``axis`` 0) or columns (1)."""
        stop = start + length
        pieces = []
        for rows, columns, view in self.pieces:
            span = (rows, columns)[axis]
            low, high = max(start, span.start), min(stop, span.stop)
            if low >= high:
                continue
            place = slice(low - start, high - start)
            inner = view.narrow(axis, low - span.start, high - low)
            pieces.append((place, columns, inner) if axis == 0 else (rows, place, inner))
        shape = (length, self.shape[1]) if axis == 0 else (self.shape[0], length)
        return Scattered(pieces, shape)

    def __getitem__(self, rows: slice) -> Scattered:
        start, stop, _ = rows.indices(self.shape[0])
        return self.narrow(0, start, stop - start)

    def take(self, rows: slice) -> Tensor:
        """Some rows as one new tensor; ``rows`` has a start, a stop and a positive step."""
        picked = range(rows.start, rows.stop, rows.step)
        first = self.pieces[0][2]
        out = first.new_empty((len(picked), self.shape[1]))
        for span, columns, view in self.pieces:
            begin = -(-max(span.start - rows.start, 0) // rows.step)
            end = max(begin, -(-max(min(span.stop, rows.stop) - rows.start, 0) // rows.step))
            if begin < end:
                inner = slice(picked[begin] - span.start, picked[end - 1] - span.start + 1, rows.step)
                out[begin:end, columns] = view[inner]
        return out

    def copy_(self, values: Tensor) -> None:
        """Write a matrix of this shape."""
        for rows, columns, view in self.pieces:
            view.copy_(values[rows, columns])


def in_parts(form: Form | None, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The constants of a weight of ``form`` from the results of its template, the codes first."""
    if form is None:
        return tuple(results)
    codes, *others = results
    n, columns = codes.shape
    parts = (codes[region] for region in form.code_regions(n, form.features(columns)))
    return (*(part.t() if form.kn else part for part in parts), *others)
