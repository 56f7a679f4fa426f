"""Where the constants of a plan come from: the checkpoint, the cache of an earlier start, or nowhere."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fxquant.capture import tracing_alone
from fxquant.checkpoint import (
    Cache,
    Checkpoint,
    ConstantsCheckpoint,
    FileCheckpoint,
    KeyEntry,
    WeightConstants,
    constants_in_files,
)
from fxquant.errors import CheckpointFileError, ConfigError, FxquantError
from fxquant.form import form_in_files
from fxquant.loading import add_recipe, schedule_for
from fxquant.materialize.dummy import dummy_constants
from fxquant.materialize.execute import Loaded, materialize
from fxquant.materialize.jobs import Schedule
from fxquant.materialize.recipes import LoadGraph
from fxquant.materialize.schedule import Scheduler
from fxquant.materialize.store import Constants
from fxquant.planner import Planned
from fxquant.stored import RULE

log = logging.getLogger("fxquant.checkpoint")

Report = Callable[..., None]

KEY = "cache_key"
"""Where the manifest of a cached entry holds its key, so that one under another name is noticed."""


def obtain(
    planned: Planned,
    checkpoint: Checkpoint | None,
    *,
    weights: str = "checkpoint",
    cache_dir: str | os.PathLike[str] | None = None,
    report: Report | None = None,
) -> Loaded:
    """The constants that were planned; ``origin`` of the result says where they come from."""
    if weights == "dummy":
        if cache_dir is not None:
            raise ConfigError("weights='dummy' makes constants up: there is nothing to keep in cache_dir")
        buffers = {g.fqn: g.tensor for g in planned.groups if g.is_buffer and not g.tensor.is_meta}
        loaded = dummy_constants(planned.graph, planned.request.device, buffers)
        return replace(loaded, origin="made up (weights='dummy')")
    if checkpoint is None:
        raise ConfigError("compile needs a checkpoint; for a live model pass its state_dict()")
    with checkpoint:
        if cache_dir is None:
            return planned.load(checkpoint, report=report)
        return _through_cache(planned, checkpoint, Cache(cache_dir), report)


def _through_cache(planned: Planned, checkpoint: Checkpoint, cache: Cache, report: Report | None) -> Loaded:
    if not isinstance(checkpoint, FileCheckpoint) or isinstance(checkpoint, ConstantsCheckpoint):
        raise ConfigError(
            f"cache_dir is for float checkpoints in files, not for {checkpoint.location}: there is "
            "nothing to gain, or no way to tell whether it changed"
        )
    key = hashlib.sha256(f"{planned.plan.constants_hash} {checkpoint.fingerprint()}".encode()).hexdigest()
    found = cache.find(key)
    dropped = ""
    if found is not None:
        try:
            with found:
                if found.manifest_plan.get(KEY) != key:
                    raise CheckpointFileError(f"{found.location} was stored under another name")
                loaded = _load_stored(planned, found, report)
            return replace(loaded, origin=f"the cache, {cache.folder / key}")
        except FxquantError as error:
            log.warning("the cached constants in %s are dropped: %s", cache.folder / key, error)
            cache.drop(key)
            dropped = f"; a damaged cache entry was dropped ({error})"
    loaded = planned.load(checkpoint, report=report)
    try:
        cache.store(key, _to_store(planned, loaded.constants), {**saved_plan(planned.plan), KEY: key})
    except FxquantError as error:
        log.warning("the constants are not cached: %s", error)
        return replace(loaded, origin=f"{loaded.origin}{dropped}; not cached: {error}")
    return replace(loaded, origin=f"{loaded.origin}{dropped}; cached in {cache.folder / key}")


def _load_stored(planned: Planned, stored: ConstantsCheckpoint, report: Report | None) -> Loaded:
    """Read the constants of an earlier start, which must be those that are planned now."""
    with tracing_alone():
        graph, schedule = _plan_stored(planned, stored)
    return materialize(graph, schedule, stored, device=planned.request.device, report=report)


def _plan_stored(planned: Planned, stored: ConstantsCheckpoint) -> tuple[LoadGraph, Schedule]:
    graph = LoadGraph()
    for group in planned.groups:
        entry = stored.weights.get(group.fqn)
        form = planned.forms.get(group.fqn)
        if entry is None or entry.form != form_in_files(form):
            raise CheckpointFileError(
                f"{stored.location} holds {group.fqn} as {entry.form if entry else None}, planned is {form}"
            )
        keys = tuple(key for _, key in entry.constants)
        row = KeyEntry(fqn=group.fqn, keys=keys, convert=None, same=(), rule=RULE)
        add_recipe(graph, group, row, stored, form)
    request = planned.request
    return graph, schedule_for(Scheduler(graph, stored.infos), stored, request.device_type, request.load)


def _to_store(planned: Planned, constants: Constants) -> Mapping[str, WeightConstants]:
    return {
        group.fqn: constants_in_files(
            planned.forms.get(group.fqn),
            group.tensor.dtype,
            tuple(group.tensor.shape),
            constants[group.fqn],
        )
        for group in planned.groups
    }


def saved_plan(plan: Any) -> Mapping[str, Any]:
    """A plan as the object that is stored beside constants."""
    found: Mapping[str, Any] = json.loads(plan.to_json())
    return found
