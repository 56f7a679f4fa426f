"""Scales and zero points of int4 weights, chosen from the weights alone: no data, no gradients.

Both methods fit ``value = (code - zero) * scale`` to each group of a row, with ``code = clamp(round(value
/ scale + zero))``; symmetric codes lie in -7 to 7 and have no zero, others in -8 to 7. Neither gives a
group a larger squared error than rounding to nearest over the whole range of the group. Scales and zeros
are rounded to the dtype that they are stored in, and compared so; ``hqq`` finds its zeros for the rounded
scale. (Scales that are subnormal float16 are rounded once more, up, when they have their size again.)

``clip`` minimizes the squared error. Its candidates are ranges that leave out a part of the group's own,
at each end by itself. The codes under a range tell the best scale and zero in closed form (the regression
of the values on their codes) and the error that would remain; from the best candidate on, rounding and
fitting take turns.

``hqq`` keeps the scale that the whole range of a group gives and moves the zero alone: H. Badri, A. Shaji,
"Half-Quadratic Quantization of Large Machine Learning Models", 2023. A variable ``e`` for the errors splits
``min sum |error|^p``: ``min sum |e|^p + beta / 2 (value - (code - zero) scale - e)^2`` is solved in turn for
``e`` (a generalized soft threshold) and in closed form for the zero, while ``beta`` grows. Here errors are
in units of the scale, so that a multiple of a weight has the same codes. The paper's are in units of the
weight and, at its ``beta``, mostly below the threshold: ``e`` is 0, and the zero takes up the mean of the
errors. ``beta`` here gives the same; ``e`` holds what is further off than about a step.

R: rows, C: groups of a row, c: values of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fxquant.numerics.integers import INT4_HIGHEST, INT4_LOWEST, INT4_STEPS, as_stored_, smallest_scale
from fxquant.scheme import SCALES, QuantSpec

CHUNK_BYTES = 256 << 10
"""Float32 bytes of a weight that are worked on at a time: the buffers stay in the cache."""

CLIPS = (0.0, 0.03, 0.06, 0.12)
"""Parts of a group's range that a candidate leaves out at an end; every pair is tried."""

SHRINKS = tuple(1 - 0.05 * step for step in range(11))
"""Largest magnitudes that candidates of a symmetric group represent, in units of the group's own."""

FITS = 3
"""Rounds of rounding and fitting after the search."""

BETA, GROWTH, STEPS = 1.0, 1.05, 20
"""Of ``hqq``: the first ``beta``, its growth in a step, the number of steps. ``p`` is 1/2: a square root
is the same in every lane and library, a power is not. With these, errors up to half a step stay whole in
every step, so that a group keeps its mean; with a larger ``beta`` it does not."""

ZEROS = (-24.0, 23.0)
"""Zeros are within: beyond, a zero in bfloat16 would be off by more than a tenth of a code."""

_TINY = torch.finfo(torch.float32).tiny
_SMALLEST = 2.0**-100  # smaller groups stay as rounding to nearest has them: their scales near the smallest
_LARGEST = 2.0**120
_EXPONENT = 0x7F800000
_BUFFERS = 4
_GROUP_TEMPORARIES = 40


class _Fit(NamedTuple):
    """Scales ``[r, C]`` and, of codes that are not symmetric, zeros."""

    scale: Tensor
    zero: Tensor | None


class _Chunk(NamedTuple):
    """Groups ``[r, C, c]`` in units of a power of two for each, and buffers of that shape."""

    values: Tensor
    codes: Tensor
    work: Tensor
    more: Tensor


def choose(blocks: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """Scale and zero, float32 ``[R, C]``, for groups ``[R, C, c]`` of float32 values; no zero if symmetric.

    ``spec`` is of int4 and says how in ``refine``; its scale's dtype holds both. Scales are above zero; zeros
    need not be integers. Rows are independent: a tile of rows has the same bits as in the whole. A group
    with values that are not finite has what rounding to nearest gives it.
    """
    rows, groups, size = blocks.shape
    method = _METHODS.get((spec.refine, spec.zero)) if spec.codes == "int4" else None
    if method is None:
        raise NotImplementedError(f"no refined scales for {spec}")
    scale = torch.empty((rows, groups), dtype=torch.float32, device=blocks.device)
    zero = torch.empty_like(scale) if spec.zero else None
    if blocks.numel() == 0:
        return scale.fill_(smallest_scale(spec.scale)), None if zero is None else zero.zero_()
    shape = (_BUFFERS, _chunk_rows(rows, groups, size), groups, size)
    buffers = torch.empty(shape, dtype=torch.float32, device=blocks.device)
    for start in range(0, rows, buffers.shape[1]):
        stop = min(start + buffers.shape[1], rows)
        chunk = _Chunk(*buffers[:, : stop - start])
        chunk.values.copy_(blocks[start:stop])
        unit, kept = _normalize(chunk.values)
        nearest = _nearest(chunk, spec)
        found = _rounded(method(chunk, nearest, spec.scale), spec.scale)
        better = _squared_error(chunk, found) < _squared_error(chunk, nearest)
        found = _where(better & ~kept, found, nearest)
        as_stored_(torch.mul(found.scale, unit, out=scale[start:stop]).clamp_min_(_TINY), spec.scale)
        if zero is not None and found.zero is not None:
            zero[start:stop] = found.zero
    return scale, zero


def temporary_bytes(shape: tuple[int, int, int], spec: QuantSpec) -> int:
    """At most so many bytes does ``choose`` allocate for blocks of ``shape``, its results included."""
    rows, groups, size = shape
    results = 2 if spec.zero else 1
    chunk = _chunk_rows(rows, groups, size) * groups
    return 4 * (results * rows * groups + chunk * (_BUFFERS * size + _GROUP_TEMPORARIES))


def _chunk_rows(rows: int, groups: int, size: int) -> int:
    return min(rows, max(1, CHUNK_BYTES // max(4 * groups * size, 1)))


def _normalize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Divide groups in place by a power of two near their largest magnitude, so that squares stay finite.

    Returns it, and which groups are to stay as rounding to nearest has them.
    """
    absmax = torch.maximum(values.amax(-1), values.amin(-1).neg_())
    kept = ~(absmax.ge(_SMALLEST) & absmax.isfinite())
    unit = absmax.clamp_(_SMALLEST, _LARGEST).view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32)
    values.div_(unit[..., None])
    return unit, kept


def _nearest(chunk: _Chunk, spec: QuantSpec) -> _Fit:
    """What rounding to nearest uses: the whole range, which contains 0, and an integer zero."""
    low, high = chunk.values.amin(-1), chunk.values.amax(-1)
    if not spec.zero:
        scale = torch.maximum(high, low.neg_()).div_(_SYMMETRIC[1]).clamp_min_(_TINY)
        return _Fit(as_stored_(scale, spec.scale), None)
    scale = high.clamp_min_(0).sub_(low.clamp_max_(0)).div_(INT4_STEPS).clamp_min_(_TINY)
    scale = as_stored_(scale, spec.scale)
    return _Fit(scale, low.neg_().div_(scale).round_().add_(INT4_LOWEST).clamp_(*_ASYMMETRIC))


def _rounded(fit: _Fit, kind: str) -> _Fit:
    """Scale and zero as they are stored."""
    scale = as_stored_(fit.scale, kind)
    if fit.zero is None or kind == "f32":
        return _Fit(scale, fit.zero)
    return _Fit(scale, fit.zero.copy_(fit.zero.to(SCALES[kind])))


_SYMMETRIC, _ASYMMETRIC = (-7, 7), (INT4_LOWEST, INT4_HIGHEST)


def _round(chunk: _Chunk, fit: _Fit) -> None:
    """Put codes, as floats, into ``chunk.codes``."""
    torch.div(chunk.values, fit.scale[..., None], out=chunk.codes)
    if fit.zero is not None:
        chunk.codes.add_(fit.zero[..., None])
    chunk.codes.round_().clamp_(*(_SYMMETRIC if fit.zero is None else _ASYMMETRIC))


def _squared_error(chunk: _Chunk, fit: _Fit) -> Tensor:
    _round(chunk, fit)
    if fit.zero is not None:
        chunk.codes.sub_(fit.zero[..., None])
    chunk.codes.mul_(fit.scale[..., None]).sub_(chunk.values)
    return chunk.codes.mul_(chunk.codes).sum(-1)


def _where(chosen: Tensor, fit: _Fit, other: _Fit) -> _Fit:
    """``fit`` where ``chosen``, else ``other``."""
    scale = torch.where(chosen, fit.scale, other.scale)
    if fit.zero is None or other.zero is None:
        return _Fit(scale, None)
    return _Fit(scale, torch.where(chosen, fit.zero, other.zero))


def _regress(chunk: _Chunk, mean: Tensor | None) -> tuple[_Fit, Tensor, Tensor]:
    """The scale and zero with the least squared error for ``chunk.codes``.

    Also by how much they lower it, against no scale at all, and whether they are admitted. ``mean`` is the
    values' own, None if codes are symmetric.
    """
    size = chunk.values.shape[-1]
    square = torch.mul(chunk.codes, chunk.codes, out=chunk.work).sum(-1)
    product = torch.mul(chunk.codes, chunk.values, out=chunk.work).sum(-1)
    if mean is None:
        scale = product / square.clamp_min_(1)
        return _Fit(scale, None), product.mul_(scale), scale > 0
    total = chunk.codes.sum(-1)
    product.sub_(total * mean)
    middle = total.div_(size)
    square.sub_(middle * middle * size).clamp_min_(0.25)  # at least 1 / 2 unless all codes are the same
    scale = product / square
    zero = middle.sub_(mean / scale)
    return _Fit(scale, zero), product.mul_(scale), (scale > 0) & (zero >= ZEROS[0]) & (zero <= ZEROS[1])


def _refit(chunk: _Chunk, fit: _Fit, mean: Tensor | None) -> _Fit:
    """Round and fit in turn; the squared error never grows."""
    for _ in range(FITS):
        _round(chunk, fit)
        found, _gain, admitted = _regress(chunk, mean)
        fit = _where(admitted, found, fit)
    return fit


def _search(chunk: _Chunk, fit: _Fit, ranges: Iterable[_Fit], mean: Tensor | None) -> _Fit:
    """The best fit that the codes under one of ``ranges`` have."""
    best = torch.zeros_like(fit.scale)
    for candidate in ranges:
        _round(chunk, candidate)
        found, gain, admitted = _regress(chunk, mean)
        better = admitted & (gain > best)
        best = torch.where(better, gain, best)
        fit = _where(better, found, fit)
    return fit


def _clip_symmetric(chunk: _Chunk, nearest: _Fit, _kind: str) -> _Fit:
    ranges = (_Fit(nearest.scale * shrink, None) for shrink in SHRINKS)
    return _refit(chunk, _search(chunk, nearest, ranges, None), None)


def _clip_asymmetric(chunk: _Chunk, nearest: _Fit, _kind: str) -> _Fit:
    mean = chunk.values.mean(-1)
    return _refit(chunk, _search(chunk, nearest, _ranges(chunk), mean), mean)


def _ranges(chunk: _Chunk) -> Iterable[_Fit]:
    return (_clipped(chunk, below, above) for below in CLIPS for above in CLIPS)


def _clipped(chunk: _Chunk, below: float, above: float) -> _Fit:
    """The range of each group less parts at its ends; of values of one sign it reaches half-way to 0."""
    low, high = chunk.values.amin(-1), chunk.values.amax(-1)
    low, high = torch.minimum(low, high / 2), torch.maximum(high, low / 2)
    width = (high - low).clamp_min_(_TINY)
    scale = width * ((1 - below - above) / INT4_STEPS)
    return _Fit(scale, (width * -below).sub_(low).div_(scale).add_(INT4_LOWEST))


def _hqq(chunk: _Chunk, _nearest: _Fit, kind: str) -> _Fit:
    whole = _clipped(chunk, 0, 0)
    found = _Fit(as_stored_(whole.scale, kind), whole.zero)
    beta = BETA
    for _ in range(STEPS):
        found = _half_quadratic(chunk, found, beta)
        beta *= GROWTH
    return found


def _half_quadratic(chunk: _Chunk, fit: _Fit, beta: float) -> _Fit:
    """One step of the zero.

    The soft threshold takes ``e = sign(r) max(|r| - |r|^(p - 1) / beta, 0)`` out of a residual ``r``, so
    that ``sign(r) min(|r|, |r|^(p - 1) / beta)`` of it stays, whose mean the zero takes up.
    """
    assert fit.zero is not None
    residual, codes, limit = chunk.work, chunk.codes, chunk.more
    zero = fit.zero[..., None]
    torch.div(chunk.values, fit.scale[..., None], out=residual)
    torch.add(residual, zero, out=codes).round_().clamp_(*_ASYMMETRIC).sub_(zero)
    residual.sub_(codes)
    torch.abs(residual, out=limit).sqrt_().mul_(beta).reciprocal_()
    torch.minimum(residual, limit, out=residual)
    torch.maximum(residual, limit.neg_(), out=residual)
    return _Fit(fit.scale, (fit.zero - residual.mean(-1)).clamp_(*ZEROS))


_METHODS: dict[tuple[str, bool], Callable[[_Chunk, _Fit, str], _Fit]] = {
    ("clip", False): _clip_symmetric,
    ("clip", True): _clip_asymmetric,
    ("hqq", True): _hqq,
}
