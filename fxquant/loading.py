"""How weights will be read: their recipes, and the schedule that carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from fxquant.checkpoint import (
    Checkpoint,
    DictCheckpoint,
    KeyEntry,
    MappedCheckpoint,
    StreamCheckpoint,
    TensorInfo,
)
from fxquant.errors import WeightMismatchError
from fxquant.form import Form
from fxquant.materialize.budget import READ_BYTES, Budgets, choose_schedule
from fxquant.materialize.jobs import Schedule, Settings
from fxquant.materialize.recipes import LoadGraph, Reads, result_vals
from fxquant.materialize.schedule import Scheduler
from fxquant.parameters import WeightGroup
from fxquant.stored import RULE


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load: budgets in bytes, threads, the size of one read."""

    budgets: Budgets = field(default_factory=Budgets)
    workers: int = 1
    read_bytes: int = READ_BYTES


def is_in_memory(checkpoint: Checkpoint | None) -> bool:
    """Whether a source hands out tensors that are in memory anyway."""
    in_memory = (DictCheckpoint, StreamCheckpoint, MappedCheckpoint)
    return isinstance(checkpoint, in_memory)


def schedule_for(
    scheduler: Scheduler, checkpoint: Checkpoint | None, device: str, options: LoadOptions
) -> Schedule:
    """The schedule for a source, under the budgets; BudgetError if there is none."""
    streaming = checkpoint is not None and checkpoint.streaming
    settings = Settings(
        workers=1 if streaming else options.workers,
        tile_bytes=options.read_bytes,
        device=device,
        in_memory=is_in_memory(checkpoint),
    )
    # What a stream holds back depends on its order, so its budget is kept while it comes.
    return choose_schedule(scheduler, settings, Budgets() if streaming else options.budgets)


def describe_loading(
    schedule: Schedule, checkpoint: Checkpoint | None, options: LoadOptions
) -> dict[str, Any]:
    """How the weights will be read, for the plan."""
    source = "none" if checkpoint is None else checkpoint.kind
    return {
        "source": source,
        "workers": schedule.workers,
        "reads": schedule.reads,
        "read_bytes": schedule.tile_bytes,
        "buffer_bytes": schedule.workers * (schedule.buffer_bytes + schedule.scratch_bytes),
        "order": schedule.order,
        "host_budget": options.budgets.host,
        "device_budget": options.budgets.device,
    }


def add_recipe(
    graph: LoadGraph,
    group: WeightGroup,
    entry: KeyEntry,
    checkpoint: Checkpoint | None,
    form: Form | None,
    given: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Add how a weight is made from the keys of ``entry``; what is stored must fit the weight.

    ``given``: values of the form's constants that are not made of the weight.
    """
    reads = _reads(group, entry, checkpoint)
    experts = group.tensor.dim() == 3 and not (form is not None and form.kernel)
    graph.add(group.fqn, reads, dtype=group.tensor.dtype, form=form, given=given, experts=experts)
    if not reads.stored:  # whose shapes were compared with the form's when they were matched
        _check_shape(graph, group, form, reads, checkpoint)


def _reads(group: WeightGroup, entry: KeyEntry, checkpoint: Checkpoint | None) -> Reads:
    infos = stored_infos(entry, group, checkpoint)
    stored = entry.rule == RULE
    for info in infos:
        if not stored:
            _check_dtype(group, info, checkpoint)
    return Reads(
        keys=(*entry.keys, *entry.same),
        dtypes=tuple(info.dtype for info in infos),
        shapes=tuple(info.shape for info in infos),
        same=len(entry.same),
        convert=entry.convert,
        stored=stored,
    )


def _check_dtype(group: WeightGroup, info: TensorInfo, checkpoint: Checkpoint | None) -> None:
    """Floats may be cast to floats; everything else must be stored as the model has it."""
    wide = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    wanted = group.tensor.dtype
    if info.dtype == wanted or (info.dtype in wide and wanted in wide):
        return
    where = f"{info.file or (checkpoint.location if checkpoint else 'model')}: tensor {info.key!r}"
    raise WeightMismatchError(
        f"{where} is stored as {info.dtype}, but {group.fqn} is {wanted}. If the checkpoint is quantized, "
        "its format is not read yet: give a float checkpoint."
    )


def _check_shape(
    graph: LoadGraph, group: WeightGroup, form: Form | None, reads: Reads, checkpoint: Checkpoint | None
) -> None:
    recipe = graph.recipes[-1]
    got = tuple(result_vals(graph.templates[recipe.template])[0].shape)
    if form is not None and not form.host:
        *lead, n, columns = got
        got = (*lead, *form.own_shape(n, form.features(columns)))
    got = (recipe.experts, *got) if recipe.experts else got
    if got != tuple(group.tensor.shape):
        where = checkpoint.location if checkpoint else "model"
        stored = ", ".join(f"{k} {list(s)}" for k, s in zip(reads.keys, reads.shapes, strict=True))
        raise WeightMismatchError(
            f"{where}: {group.fqn} has shape {list(group.tensor.shape)}, the checkpoint gives {list(got)} "
            f"(from {stored}). Check that the model's config belongs to this checkpoint."
        )


def stored_infos(entry: KeyEntry, group: WeightGroup, checkpoint: Checkpoint | None) -> list[TensorInfo]:
    """What is known of the entry's keys; without a checkpoint, the model's own dtype and shape."""
    keys = (*entry.keys, *entry.same)
    if checkpoint is not None and not checkpoint.streaming:
        return [checkpoint.info(key) for key in keys]
    tensor = group.tensor
    own = {"dtype": tensor.dtype, "shape": tuple(tensor.shape), "nbytes": tensor.nbytes}
    return [TensorInfo(key=key, file=None, offset=None, **own) for key in keys]  # type: ignore[arg-type]
