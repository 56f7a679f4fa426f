"""Rows of the plan: what becomes of each weight, and what runs each op."""

from __future__ import annotations

from collections.abc import Mapping

from fxquant.checkpoint import Checkpoint, KeyMap, TensorInfo
from fxquant.form import Form
from fxquant.loading import stored_infos
from fxquant.materialize.jobs import Schedule
from fxquant.materialize.recipes import Recipe
from fxquant.materialize.schedule import Scheduler
from fxquant.parameters import WeightGroup
from fxquant.passes.choose_form import CONVOLUTION, LOOKUP, Decision, Use, describe
from fxquant.plan import Stored, WeightPlan
from fxquant.scheme import PRODUCTS, find_scheme
from fxquant.target import Kernel, Target


def plan_rows(
    groups: tuple[WeightGroup, ...],
    keymap: KeyMap,
    checkpoint: Checkpoint | None,
    decisions: Mapping[str, Decision],
    uses: Mapping[str, list[Use]],
    scheduler: Scheduler,
    schedule: Schedule,
) -> tuple[WeightPlan, ...]:
    """A row for each weight."""
    graph = scheduler.graph
    recipes: dict[str, list[Recipe]] = {}
    for recipe in graph.recipes:  # one for each expert
        recipes.setdefault(recipe.fqn, []).append(recipe)
    rows = []
    for group in groups:
        entry, decision, own = keymap.entries[group.fqn], decisions[group.fqn], recipes[group.fqn]
        stored = [_stored(info) for info in stored_infos(entry, group, checkpoint)]
        count = len(entry.keys)
        tilings = [scheduler.tiling(recipe.template, schedule.tile_bytes) for recipe in own]
        rows.append(
            WeightPlan(
                fqn=group.fqn,
                aliases=group.fqns[1:],
                kind="buffer" if group.is_buffer else "parameter",
                shape=tuple(group.tensor.shape),
                dtype=str(group.tensor.dtype).removeprefix("torch."),
                scheme=decision.form.scheme if decision.form else "none",
                form=str(decision.form) if decision.form else "float",
                reason=decision.reason,
                uses=describe(uses[group.fqn]),
                stored=tuple(stored[:count]),
                same=tuple(stored[count:]),
                rule=entry.rule,
                rejected=decision.rejected,
                float_bytes=group.tensor.numel() * group.tensor.element_size(),
                resident_bytes=sum(scheduler.resident(recipe) for recipe in own),
                transient_bytes=max(tiling.peak_bytes for tiling in tilings),
                tiles=sum(len(tiling.tiles) for tiling in tilings),
                whole=next((tiling.reason for tiling in tilings if tiling.reason), ""),
            )
        )
    return tuple(rows)


def rewrites_of(forms: Mapping[str, Form], uses: Mapping[str, list[Use]]) -> dict[str, int]:
    """How many uses compute with codes, by kind; linears always."""
    held = [(form, use) for fqn, form in forms.items() for use in uses[fqn]]
    lookups = sum(use.lookup and not (form.table or form.host) for form, use in held)
    convolutions = sum(use.conv for _, use in held)
    others = {"embedding": lookups, "convolution": convolutions}
    linears = sum(use.k_axis is not None for _, use in held)
    return {"linear": linears, **{kind: count for kind, count in others.items() if count}}


def kernels_of(
    target: Target, forms: Mapping[str, Form], uses: Mapping[str, list[Use]], rewrites: Mapping[str, int]
) -> dict[str, dict[str, str]]:
    """What runs each dialect op in use, and why."""
    multiplied = {
        (form.scheme, use.grouped)
        for fqn, form in forms.items()
        if not (form.host or form.kernel or all(use.lookup for use in uses[fqn]))
        for use in uses[fqn]
    }
    found: dict[str, dict[str, str]] = {}
    for name, grouped in sorted(multiplied):
        scheme = find_scheme(name)
        kernel = target.kernel_for(scheme, grouped=grouped)
        if isinstance(kernel, Kernel):
            op = scheme.grouped_op if grouped else scheme.op
            found.setdefault(op, {"op": kernel.op, "reason": kernel.reason})
    special = {LOOKUP: "embedding", CONVOLUTION: "convolution"}
    others = [op for op in target.kernels if found and op not in (*PRODUCTS, *special)]
    for op in (*others, *(op for op, kind in special.items() if kind in rewrites)):
        kernel = target.kernel_of(op)
        if isinstance(kernel, Kernel):
            found[op] = {"op": kernel.op, "reason": kernel.reason}
    return found


def _stored(info: TensorInfo) -> Stored:
    return Stored(
        key=info.key,
        file=info.file,
        offset=info.offset,
        nbytes=info.nbytes,
        dtype=str(info.dtype).removeprefix("torch."),
        shape=tuple(info.shape),
    )
