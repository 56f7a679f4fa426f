"""Makes the Plan: names, uses, forms, recipes and their order, before a byte of weights is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fxquant.capture import tracing_alone
from fxquant.capture_model import ModelCapture, capture_model, untraceable
from fxquant.checkpoint import (
    Checkpoint,
    ConstantsCheckpoint,
    KeyEntry,
    KeyMap,
    require_complete,
    resolve_keys,
)
from fxquant.config import Choice, QuantConfig
from fxquant.errors import ExtraWeightError, RefusedError
from fxquant.experts_forward import NAME, unrolled_experts
from fxquant.form import Form
from fxquant.loading import (
    LoadOptions,
    add_recipe,
    describe_loading,
    is_in_memory,
    schedule_for,
)
from fxquant.materialize.execute import Loaded, materialize
from fxquant.materialize.heap import give_back
from fxquant.materialize.jobs import Schedule
from fxquant.materialize.progress import Report
from fxquant.materialize.recipes import LoadGraph
from fxquant.materialize.schedule import Scheduler
from fxquant.max_error import Asked, keep_max_error
from fxquant.module_walk import embedding_names, routes_beside_experts, walked_uses
from fxquant.parameters import WeightGroup, repair_buffers, weight_groups
from fxquant.passes.choose_form import Decision, Use, choose_form
from fxquant.passes.routers import is_returned
from fxquant.passes.weight_uses import weight_uses
from fxquant.plan import Plan
from fxquant.plan_rows import kernels_of, plan_rows, rewrites_of
from fxquant.stored import decide_stored, find_stored, match_stored
from fxquant.target import Target

UNROLLED = f"experts: implementation {NAME!r}, rows in groups, in the place of a loop that does not trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of ``compile``, ``plan`` and ``lower`` after checking."""

    backend: str
    device: torch.device
    absent: bool = False
    """The target's device is not in this machine; ``device`` stands in while graphs are traced."""
    target: Target
    config: QuantConfig
    example_inputs: object = None
    dynamic: bool = True
    key_map: Mapping[str, str] | Callable[[str], str | None] | None = None
    strict: bool = False
    rotate: bool = False
    max_error: float | None = None
    disable_passes: tuple[str, ...] = ()
    whole: bool = False
    load: LoadOptions = field(default_factory=LoadOptions)

    @property
    def device_type(self) -> str:
        """The type of the device that is planned for, also where it is absent."""
        return self.target.device_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what is needed to carry it out."""

    plan: Plan
    request: Request
    groups: tuple[WeightGroup, ...]
    forms: Mapping[str, Form]
    graph: LoadGraph
    schedule: Schedule
    in_memory: bool
    capture: ModelCapture
    names: Mapping[str, str]
    """Every name under which a stream may bring a key -> the key."""

    def load(self, checkpoint: Checkpoint, *, report: Report | None = None) -> Loaded:
        """Make the constants; buffers that a stream does not bring keep the values they have."""
        buffers = {group.fqn: group for group in self.groups if group.is_buffer}
        schedule = self.schedule
        if is_in_memory(checkpoint) != self.in_memory:  # another kind of source than was planned with
            with tracing_alone():
                scheduler = Scheduler(self.graph, checkpoint.infos)
                schedule = schedule_for(scheduler, checkpoint, self.request.device_type, self.request.load)
        loaded = materialize(
            self.graph,
            schedule,
            checkpoint,
            names=self.names,
            optional=buffers,
            budget=self.request.load.budgets.by_device(self.request.device_type).get("cpu"),
            device=self.request.device,
            report=report,
        )
        for fqn in buffers.keys() - loaded.constants.keys():
            loaded.constants[fqn] = (buffers[fqn].tensor,)
        return loaded


def make_plan(model: nn.Module, checkpoint: Checkpoint | None, request: Request) -> Planned:
    """Plan ``model``; ``checkpoint=None`` plans from the model's own sizes."""
    with tracing_alone():
        planned = _make_plan(model, checkpoint, request)
    give_back()
    return planned


def _make_plan(model: nn.Module, checkpoint: Checkpoint | None, request: Request) -> Planned:
    groups, keymap = _match_keys(model, checkpoint, request)
    loaded = tuple(group for group in groups if group.fqn in keymap.entries)
    # Forms do not depend on sizes of inputs, and a static trace takes less than half the time. Nor do
    # they depend on the device, and inputs and buffers are on the CPU before a model is loaded.
    with unrolled_experts(model) as unrolled:
        capture = capture_model(
            model,
            request.example_inputs,
            device=request.device if request.whole else torch.device("cpu"),
            dynamic=request.dynamic and request.whole,
            whole=request.whole,
        )
    uses = _uses(model, groups, capture)
    decisions = {
        group.fqn: _decide(model, group, keymap.entries[group.fqn], uses[group.fqn], checkpoint, request)
        for group in loaded
    }
    decisions, measured = _bounded(model, loaded, keymap, uses, decisions, checkpoint, request)
    _check_strict(decisions, request, capture)
    forms = {fqn: decision.form for fqn, decision in decisions.items() if decision.form is not None}
    graph = LoadGraph()
    for group in loaded:
        given = dict(decisions[group.fqn].given)
        add_recipe(graph, group, keymap.entries[group.fqn], checkpoint, forms.get(group.fqn), given)
    scheduler = Scheduler(graph, checkpoint.infos if checkpoint else {})
    schedule = schedule_for(scheduler, checkpoint, request.device_type, request.load)
    rows = plan_rows(loaded, keymap, checkpoint, decisions, uses, scheduler, schedule)
    rewrites = rewrites_of(forms, uses)
    plan = Plan(
        backend=request.backend,
        target=request.target.name,
        scheme=request.config.scheme,
        config=_json_config(request.config),
        checkpoint=_identity(checkpoint),
        capture=capture.how,
        weights=rows,
        order=tuple(dict.fromkeys(job.recipe.fqn for batch in schedule.batches for job in batch.jobs)),
        kernels=kernels_of(request.target, forms, uses, rewrites),
        rewrites=rewrites,
        unmatched=request.config.unmatched(_names(groups, keymap)),
        extra=keymap.extra,
        notes=(*keymap.notes, *((UNROLLED,) if unrolled else ()), *_run_notes(model, capture)),
        predicted_peak=schedule.peak,
        timeline=schedule.timeline,
        loading={**describe_loading(schedule, checkpoint, request.load), **measured},
    )
    names = {name: keymap.entries[g.fqn].keys[0] for g in loaded for name in g.fqns}
    return Planned(
        plan=plan,
        request=request,
        groups=loaded,
        forms=forms,
        graph=graph,
        schedule=schedule,
        in_memory=is_in_memory(checkpoint),
        capture=capture if request.whole else replace(capture, graphs=()),  # only lower() needs them
        names=names,
    )


def _json_config(config: QuantConfig) -> dict[str, Any]:
    return {
        "scheme": config.scheme,
        "config": [list(e) for e in config.entries],
        "ignore": list(config.ignore),
    }


def _identity(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return "none: planned from the model's own sizes"
    return "stream" if checkpoint.streaming else checkpoint.identity


def _match_keys(
    model: nn.Module, checkpoint: Checkpoint | None, request: Request
) -> tuple[tuple[WeightGroup, ...], KeyMap]:
    """The model's tensors, after repair of its buffers, and the keys that hold them."""
    groups = weight_groups(model)
    if isinstance(checkpoint, ConstantsCheckpoint):
        keymap = match_stored([group for group in groups if group.persistent], checkpoint)
        return _repaired(model, groups, keymap, checkpoint, request)
    if checkpoint is None or checkpoint.streaming:
        entries = {g.fqn: _own_entry(g, request) for g in groups if g.persistent}
        repair_buffers(model, frozenset())
        return weight_groups(model), KeyMap(entries=entries, missing=(), extra=(), notes=())
    wanted = [group for group in groups if group.persistent]
    optional = {group.fqn for group in wanted if group.is_buffer}
    keymap = resolve_keys(
        [group.fqns for group in wanted],
        checkpoint,
        key_map=request.key_map,
        model=model,
        optional=optional,
    )
    require_complete(keymap, checkpoint)
    return _repaired(model, groups, keymap, checkpoint, request)


def _repaired(
    model: nn.Module,
    groups: tuple[WeightGroup, ...],
    keymap: KeyMap,
    checkpoint: Checkpoint,
    request: Request,
) -> tuple[tuple[WeightGroup, ...], KeyMap]:
    """The groups once buffers that no key holds have their values."""
    wanted = [group for group in groups if group.persistent]
    held = frozenset(name for g in wanted if g.fqn in keymap.entries for name in g.fqns)
    repair_buffers(model, held)
    if request.strict and keymap.extra:
        raise ExtraWeightError(
            f"strict: {checkpoint.location} holds {len(keymap.extra)} tensors that the model does not "
            f"use: {', '.join(keymap.extra[:10])}"
        )
    return weight_groups(model), keymap


def _names(groups: Iterable[WeightGroup], keymap: KeyMap) -> Iterator[str]:
    """What patterns may match: names of the model, and of the parts of weights that are put together."""
    for group in groups:
        yield from group.fqns
    for entry in keymap.entries.values():
        if len(entry.keys) > 1:
            yield from entry.keys


def _own_entry(group: WeightGroup, request: Request) -> KeyEntry:
    """An entry for a source whose keys are not known yet: the user's key, else the model's name."""
    key_map = request.key_map
    mapped = None
    if key_map is not None:
        given = [key_map(name) if callable(key_map) else key_map.get(name) for name in group.fqns]
        mapped = next((key for key in given if key is not None), None)
    rule = "the model's own name" if mapped is None else "key_map"
    return KeyEntry(fqn=group.fqn, keys=(mapped or group.fqn,), convert=None, same=(), rule=rule)


def _uses(model: nn.Module, groups: tuple[WeightGroup, ...], capture: ModelCapture) -> dict[str, list[Use]]:
    """Uses of every tensor by canonical FQN, from the captured graphs, else by its owner's type."""
    canonical = {name: group.fqn for group in groups for name in group.fqns}
    uses: dict[str, list[Use]] = {group.fqn: [] for group in groups}
    givers: dict[str, tuple[str, ...]] = {}  # modules that give what is made of a weight to nobody in a graph
    for captured in capture.graphs:
        for node in captured.gm.graph.find_nodes(op="placeholder"):
            name = captured.tensors.get(str(node.target))
            if name in canonical:
                found = weight_uses(node)
                uses[canonical[name]] += [Use.of(use) for use in found]
                if captured.where and any(is_returned(use.node) for use in found):
                    givers[canonical[name]] = (captured.where,)
    traced = bool(capture.graphs or capture.problems)
    for group in groups:
        if not uses[group.fqn]:
            uses[group.fqn] = [use for name in group.fqns for use in walked_uses(model, name, traced=traced)]
            owner = group.fqn.rpartition(".")[0]
            givers[group.fqn] = (owner, owner.rpartition(".")[0])
    for fqn, where in givers.items():
        if any(use.k_axis == 1 for use in uses[fqn]):
            routes = routes_beside_experts(model, fqn, where)
            uses[fqn] = [replace(use, routes=use.routes or routes) for use in uses[fqn]]
    return uses


def _decide(
    model: nn.Module,
    group: WeightGroup,
    entry: KeyEntry,
    uses: list[Use],
    checkpoint: Checkpoint | None,
    request: Request,
) -> Decision:
    if group.is_buffer:
        return Decision(form=None, reason="buffer")
    if isinstance(checkpoint, ConstantsCheckpoint):
        stored = find_stored(group, checkpoint)
        assert stored is not None
        return decide_stored(group, stored, uses, checkpoint, request.target)
    return _form_for(_choice(model, group, entry, request), group, uses, request)


def _choice(model: nn.Module, group: WeightGroup, entry: KeyEntry, request: Request) -> Choice:
    return request.config.choose_for_parts(group.fqns, entry.keys, embedding_names(model, group.fqns))


def _form_for(choice: Choice, group: WeightGroup, uses: list[Use], request: Request) -> Decision:
    return choose_form(
        uses, tuple(group.tensor.shape), group.tensor.dtype, choice, request.target, rotate=request.rotate
    )


def _bounded(
    model: nn.Module,
    groups: tuple[WeightGroup, ...],
    keymap: KeyMap,
    uses: Mapping[str, list[Use]],
    decisions: dict[str, Decision],
    checkpoint: Checkpoint | None,
    request: Request,
) -> tuple[dict[str, Decision], Mapping[str, int | float]]:
    """The decisions under ``max_error``, and what was read for them."""
    if request.max_error is None:
        return decisions, {}
    assert checkpoint is not None
    weights = {
        group.fqn: Asked(
            group=group,
            entry=keymap.entries[group.fqn],
            choice=_choice(model, group, keymap.entries[group.fqn], request),
            decision=decisions[group.fqn],
            decide=partial(_form_for, group=group, uses=uses[group.fqn], request=request),
        )
        for group in groups
        if not group.is_buffer
    }
    found = keep_max_error(request.max_error, weights, checkpoint, request.load)
    return {**decisions, **found.decisions}, found.measured


def _check_strict(decisions: Mapping[str, Decision], request: Request, capture: ModelCapture) -> None:
    if not request.strict:
        return
    refused = {fqn: d.reason for fqn, d in decisions.items() if d.asked and d.form is None}
    if refused:
        lines = "\n".join(f"  {fqn}: {reason}" for fqn, reason in list(refused.items())[:10])
        raise RefusedError(f"strict: {len(refused)} weights would stay float:\n{lines}")
    if not capture.graphs:
        raise RefusedError("strict: the model was not traced; pass example_inputs=...")


def _run_notes(model: nn.Module, capture: ModelCapture) -> tuple[str, ...]:
    lost = untraceable(model)
    # Addresses in the text of an error would make two plans of the same model differ.
    texts = (re.sub(r"0x[0-9a-f]+", "0x...", problem) for problem in capture.problems)
    problems = tuple(f"not captured whole: {text}" for text in texts)
    return problems if lost is None else (*problems, lost)
