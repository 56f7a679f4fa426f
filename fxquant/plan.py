"""The Plan: everything decided before a byte of weights is read, as data, text and JSON."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fxquant.errors import ConfigError
from fxquant.timeline import Moment
from fxquant.version import VERSION
from fxquant.views.html import write_page

FORMAT = 1
"""Version of the JSON."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of the checkpoint: its key, where its bytes are, and what they hold."""

    key: str
    file: str | None
    offset: int | None
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """What becomes of one parameter or buffer.

    ``form`` is ``float``, ``float@host`` or the text of a ``Form``; ``reason`` says why, ``rejected``
    why not other forms that the target knows. ``stored`` are the tensors it is made of, by ``rule``;
    ``same`` are keys of tied names whose values must be equal.
    ``resident_bytes`` stay after loading; ``transient_bytes`` are needed on top of them by each
    worker that makes the weight, in so many ``tiles``; ``whole`` says why it is not tiled.
    """

    fqn: str
    aliases: tuple[str, ...] = ()
    kind: str = "parameter"
    shape: tuple[int, ...]
    dtype: str
    scheme: str
    form: str
    reason: str
    uses: tuple[str, ...] = ()
    stored: tuple[Stored, ...] = ()
    same: tuple[Stored, ...] = ()
    rule: str = ""
    rejected: tuple[tuple[str, str], ...] = ()
    float_bytes: int = 0
    resident_bytes: int = 0
    transient_bytes: int = 0
    tiles: int = 1
    whole: str = ""

    @property
    def quantized(self) -> bool:
        """Whether the weight is held as codes."""
        return not self.form.startswith("float")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole of what loading and running will do. Two runs with the same input give equal plans.

    ``order`` is the order of loading; ``kernels`` says for each dialect op what runs it and why;
    ``rewrites`` counts ops of the captured graphs before and after; ``notes`` are warnings.
    """

    backend: str
    target: str
    scheme: str
    config: Mapping[str, Any]
    checkpoint: str
    capture: str
    weights: tuple[WeightPlan, ...]
    order: tuple[str, ...]
    kernels: Mapping[str, Mapping[str, str]]
    rewrites: Mapping[str, int] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    predicted_peak: Mapping[str, int] = field(default_factory=dict)
    """Device -> bytes of weights, constants and load buffers that are alive at once while loading."""
    timeline: tuple[Moment, ...] = ()
    """Predicted memory over the bytes that have been read."""
    loading: Mapping[str, Any] = field(default_factory=dict)
    """How the weights are read: source, workers, reads, buffers, budgets."""
    format: int = FORMAT

    @property
    def hash(self) -> str:
        """A stable digest of the plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def quantized(self) -> tuple[WeightPlan, ...]:
        """The weights that are held as codes."""
        return tuple(weight for weight in self.weights if weight.quantized)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights after loading."""
        return sum(weight.resident_bytes for weight in self.weights)

    @property
    def float_bytes(self) -> int:
        """Bytes of all weights in the model's own dtypes."""
        return sum(weight.float_bytes for weight in self.weights)

    def weight(self, fqn: str) -> WeightPlan:
        """The row of ``fqn``, also by an alias or by the name of the module that owns it."""
        for weight in self.weights:
            names = (weight.fqn, *weight.aliases)
            if fqn in names or f"{fqn}.weight" in names:
                return weight
        raise ConfigError(f"the plan has no weight {fqn!r}")

    def explain(self, fqn: str) -> str:
        """In words, what becomes of one weight and why."""
        weight = self.weight(fqn)
        lines = [
            f"{weight.fqn}: {list(weight.shape)} {weight.dtype} -> {weight.form}",
            f"  why: {weight.reason}",
        ]
        lines += [f"  not {kind}: {reason}" for kind, reason in weight.rejected]
        if weight.aliases:
            lines.append(f"  tied with: {', '.join(weight.aliases)}")
        if weight.uses:
            lines.append(f"  used as: {', '.join(weight.uses)}")
        for stored in weight.stored:
            place = f"{stored.file} at {stored.offset}" if stored.file else "memory"
            lines.append(
                f"  read: {stored.key} {list(stored.shape)} {stored.dtype}, {stored.nbytes} bytes, {place}"
            )
        lines += [f"  must equal: {stored.key}" for stored in weight.same]
        if weight.rule:
            lines.append(f"  name rule: {weight.rule}")
        lines.append(
            f"  bytes: {weight.float_bytes} as float, {weight.resident_bytes} after loading, "
            f"{weight.transient_bytes} more while loading, in {weight.tiles} tiles"
            + (f" (not tiled: {weight.whole})" if weight.whole else "")
        )
        return "\n".join(lines)

    @property
    def constants_hash(self) -> str:
        """A digest of all that decides the values of the constants: with the files, the cache's key."""
        rows = [
            (w.fqn, w.shape, w.dtype, w.form, w.rule, [asdict(s) for s in (*w.stored, *w.same)])
            for w in self.weights
        ]
        text = json.dumps([FORMAT, VERSION, self.checkpoint, rows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def summary(self) -> str:
        """The plan in a few lines."""
        count = f"{len(self.quantized)} of {len(self.weights)} weights quantized"
        lines = [
            f"fxquant plan: scheme {self.scheme} on {self.target}, {count}",
            f"  bytes: {_mib(self.float_bytes)} float -> {_mib(self.resident_bytes)} resident",
            *(f"  predicted peak on {device}: {_mib(size)}" for device, size in self.predicted_peak.items()),
            *_measuring(self.loading),
            f"  captured: {self.capture}",
            *(f"  {op}: {row['op']} ({row['reason']})" for op, row in self.kernels.items()),
            *(f"  pattern matches nothing: {pattern}" for pattern in self.unmatched),
        ]
        if self.extra:
            shown = ", ".join(self.extra[:5]) + (" ..." if len(self.extra) > 5 else "")
            lines.append(f"  {len(self.extra)} checkpoint tensors are not used: {shown}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        rows = [("weight", "shape", "dtype", "form", "MiB", "reason")]
        small = [w for w in self.weights if len(w.shape) < 2 and not w.quantized]
        for weight in self.weights:
            if weight in small:
                continue
            name = weight.fqn + "".join(f" = {alias}" for alias in weight.aliases)
            size = f"{weight.float_bytes / MIB:.1f} -> {weight.resident_bytes / MIB:.1f}"
            shape = "x".join(str(side) for side in weight.shape)
            rows.append((name, shape, weight.dtype, weight.form, size, weight.reason))
        if small:
            total = sum(w.resident_bytes for w in small) / MIB
            rows.append(
                (f"{len(small)} of rank < 2", "", "", "float", f"{total:.1f}", "norms, biases, buffers")
            )
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        table = [
            "  ".join([*(c.ljust(w) for c, w in zip(row[:5], widths, strict=True)), row[5]]) for row in rows
        ]
        return "\n".join([self.summary(), "", *table])

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as one page for a browser, which needs no network; returns its path."""
        return write_page(path, self)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, one text for equal plans."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of ``to_json``."""
        try:
            data = json.loads(text)
            if data.get("format") != FORMAT:
                raise ConfigError(f"plan format {data.get('format')!r} is not {FORMAT}")
            data["weights"] = tuple(_weight_from(row) for row in data["weights"])
            data["timeline"] = tuple(Moment(**row) for row in data["timeline"])
            for name in ("order", "unmatched", "extra", "notes"):
                data[name] = tuple(data[name])
            return Plan(**data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"not the JSON of a plan: {error}") from error

    def diff(self, other: Plan) -> str:
        """What differs, a line each; empty for equal plans."""
        lines = []
        for name in (part.name for part in fields(self) if part.name != "weights"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                lines.append(f"{name}: {_change(mine, theirs)}")
        mine_by, theirs_by = ({w.fqn: w for w in plan.weights} for plan in (self, other))
        for fqn in sorted(mine_by.keys() | theirs_by.keys()):
            one, two = mine_by.get(fqn), theirs_by.get(fqn)
            if one is None or two is None:
                lines.append(f"{fqn}: only in the {'second' if one is None else 'first'} plan")
                continue
            before, after = asdict(one), asdict(two)
            lines += [
                f"{fqn}: {key} {before[key]} -> {after[key]}" for key in before if before[key] != after[key]
            ]
        return "\n".join(lines)


def _change(mine: object, theirs: object) -> str:
    """Both values; of lists, which may be long, three items from where they part."""
    if not isinstance(mine, tuple) or not isinstance(theirs, tuple):
        return f"{mine} -> {theirs}"
    at = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=False)))
    return f"{list(mine[at : at + 3])} -> {list(theirs[at : at + 3])} from item {at} on"


def _measuring(loading: Mapping[str, Any]) -> Iterator[str]:
    """A line on what was read to plan under ``max_error``."""
    if "max_error" in loading:
        yield (
            f"  measured for max_error {loading['max_error']:g}: {_mib(loading['measuring_bytes'])} more, "
            f"{loading['measuring_reads']} reads, {loading['measuring_rounds']} rounds"
        )


def _weight_from(row: dict[str, Any]) -> WeightPlan:
    row = dict(row)
    for name in ("stored", "same"):
        row[name] = tuple(Stored(**{**part, "shape": tuple(part["shape"])}) for part in row[name])
    for name in ("aliases", "uses", "shape"):
        row[name] = tuple(row[name])
    row["rejected"] = tuple((kind, reason) for kind, reason in row["rejected"])
    return WeightPlan(**row)


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
