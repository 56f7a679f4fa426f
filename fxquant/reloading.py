"""New weights into the constants of a compiled model, whose addresses stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch._compile import _disable_dynamo

from fxquant.capture import tracing_alone
from fxquant.checkpoint import (
    Checkpoint,
    ConstantsCheckpoint,
    DictCheckpoint,
    KeyMap,
    StreamCheckpoint,
    open_checkpoint,
    require_complete,
    resolve_keys,
)
from fxquant.errors import ConfigError, WeightMismatchError
from fxquant.form import form_in_files
from fxquant.loading import LoadOptions, add_recipe, schedule_for
from fxquant.materialize.execute import Loaded, materialize
from fxquant.materialize.progress import choose_progress
from fxquant.materialize.recipes import LoadGraph
from fxquant.materialize.schedule import Scheduler, usable_workers
from fxquant.materialize.sources import check_source
from fxquant.runtime.constants import Held, check_apart, constants_to_fill, held_constants, shell_of
from fxquant.stored import find_stored, match_stored

KeyMapping = Mapping[str, str] | Callable[[str], str | None]


@_disable_dynamo  # a hook of a compiled forward may call it
def reload(
    model: nn.Module,
    ckpt: object,
    *,
    key_map: KeyMapping | None = None,
    load_workers: int | None = None,
    progress: bool | Callable[..., None] | None = None,
) -> None:
    """Read new weights into the constants of ``model``, which ``fxquant.compile`` returned.

    ``ckpt``: what ``compile`` takes, or a folder that ``save_checkpoint`` wrote. Names, shapes, dtypes
    and forms must be those that the model has, else an error is raised and nothing changes.
    Constants keep their addresses, so compiled graphs stay valid. Forwards in other threads finish
    first, and new ones wait. If reading fails half-way the model holds a mixture: forwards raise
    ``QuantizedWeightError`` until a reload succeeds.
    """
    shell = shell_of(model)
    checkpoint = open_checkpoint(ckpt)
    if isinstance(checkpoint, StreamCheckpoint):
        raise ConfigError("reload needs a checkpoint that can be looked into first: files or a dict")
    options = LoadOptions(workers=load_workers or usable_workers())
    report = choose_progress(progress)
    # Recipes are traced inside of the gate too: a forward that meets a trace of another thread fails.
    with checkpoint, shell.gate.reload(), torch.no_grad():
        held = held_constants(model)
        device = _device_of(held)
        with tracing_alone():
            graph = _load_graph(model, held, checkpoint, key_map)
            scheduler = Scheduler(graph, checkpoint.infos)
            schedule = schedule_for(scheduler, checkpoint, device.type, options)
        into = constants_to_fill(held, (recipe.fqn for recipe in graph.recipes))
        check_source(graph, checkpoint)
        if isinstance(checkpoint, DictCheckpoint):
            sources = ((recipe.fqn, checkpoint.read(key)) for recipe in graph.recipes for key in recipe.keys)
            check_apart(sources, into)
        shell.gate.broken = (
            "the last reload of this model failed half-way, so its weights are a mixture of old and new "
            "ones: reload it again, or compile it again"
        )
        loaded = materialize(graph, schedule, checkpoint, into=into, device=device, report=report)
        shell.gate.broken = ""
        _note(model, checkpoint, loaded)


def _device_of(held: Held) -> torch.device:
    """Where constants are made: the device that holds some, besides weights that stay in main memory."""
    devices = [part.device for *_, parts in held.values() for part in parts]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _note(model: nn.Module, checkpoint: Checkpoint, loaded: Loaded) -> None:
    """Let plan and report tell of the new weights."""
    plan = model.__dict__["fxquant_plan"]
    model.__dict__["fxquant_plan"] = replace(plan, checkpoint=checkpoint.identity)
    model.__dict__["_fxquant_load"] = replace(loaded, constants={})


def _load_graph(
    model: nn.Module, held: Held, checkpoint: Checkpoint, key_map: KeyMapping | None
) -> LoadGraph:
    """The recipes that give every weight its present form."""
    keymap = _keys(model, held, checkpoint, key_map)
    graph = LoadGraph()
    for fqn, entry in keymap.entries.items():
        group, form, _ = held[fqn]
        if isinstance(checkpoint, ConstantsCheckpoint):
            stored = find_stored(group, checkpoint)
            assert stored is not None
            if form_in_files(stored.form) != form_in_files(form):
                raise WeightMismatchError(
                    f"{checkpoint.location}: {fqn} is stored as {stored.form or 'float'}, the model holds it "
                    f"as {form or 'float'}; reload a folder that was saved with the same forms"
                )
        add_recipe(graph, group, entry, checkpoint, form)
    return graph


def _keys(model: nn.Module, held: Held, checkpoint: Checkpoint, key_map: KeyMapping | None) -> KeyMap:
    groups = [group for group, _, _ in held.values()]
    if isinstance(checkpoint, ConstantsCheckpoint):
        return match_stored(groups, checkpoint)
    keymap = resolve_keys(
        [group.fqns for group in groups],
        checkpoint,
        key_map=key_map,
        model=model,
        optional={group.fqn for group in groups if group.is_buffer},
    )
    require_complete(keymap, checkpoint)
    return keymap
