"""Planning from a folder of constants: what is stored decides the forms, and nothing is quantized."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fxquant.checkpoint import ConstantsCheckpoint, KeyEntry, KeyMap, StoredWeight, is_constants_folder
from fxquant.config import QuantConfig, make_config, register_reader
from fxquant.errors import (
    ConfigError,
    MissingWeightError,
    RefusedError,
    WeightMismatchError,
)
from fxquant.form import Form
from fxquant.parameters import WeightGroup
from fxquant.passes.choose_form import CONVOLUTION, LOOKUP, Decision, Use
from fxquant.target import Layout, Refusal, Target

RULE = "stored constants"


def stored_config(checkpoint: ConstantsCheckpoint, options: Mapping[str, object]) -> QuantConfig:
    """The config with which the folder was saved; options that ask for another one are refused."""
    held = checkpoint.manifest_plan.get("config")
    parts: Any = held if isinstance(held, Mapping) else {}
    try:
        config = make_config(str(parts["scheme"]), dict(parts["config"]), parts["ignore"])
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{checkpoint.location}: its plan holds no config that can be read: {error}"
        ) from error
    asked = options.get("scheme")
    given = options.get("config")
    if isinstance(given, QuantConfig) and given == config:
        given = None
    if asked not in (None, "checkpoint", config.scheme) or given is not None or options.get("ignore"):
        raise ConfigError(
            f"{checkpoint.location} holds constants of scheme {config.scheme!r}, which are loaded as they "
            "are: leave out scheme, config and ignore, or load the original checkpoint"
        )
    return config


@register_reader
def _read_config(path: str | os.PathLike[str]) -> QuantConfig | None:
    """The config of a folder that ``save_checkpoint`` wrote."""
    if not is_constants_folder(path):
        return None
    with ConstantsCheckpoint(path) as checkpoint:
        return stored_config(checkpoint, {})


def match_stored(groups: Sequence[WeightGroup], checkpoint: ConstantsCheckpoint) -> KeyMap:
    """The stored weight of each group, by any of its names."""
    entries: dict[str, KeyEntry] = {}
    used: set[str] = set()
    for group in groups:
        stored = find_stored(group, checkpoint)
        if stored is None:
            continue
        used.add(stored.fqn)
        _check_fits(group, stored, checkpoint)
        keys = tuple(key for _, key in stored.constants)
        entries[group.fqn] = KeyEntry(fqn=group.fqn, keys=keys, convert=None, same=(), rule=RULE)
    lost = [g.fqn for g in groups if g.persistent and not g.is_buffer and g.fqn not in entries]
    if lost:
        raise MissingWeightError(
            f"{checkpoint.location} holds no constants of {len(lost)} weights: {', '.join(lost[:10])}"
        )
    extra = tuple(fqn for fqn in checkpoint.weights if fqn not in used)
    return KeyMap(entries=entries, missing=(), extra=extra, notes=())


def find_stored(group: WeightGroup, checkpoint: ConstantsCheckpoint) -> StoredWeight | None:
    """What is stored of a weight, under any of its names."""
    return next((checkpoint.weights[name] for name in group.fqns if name in checkpoint.weights), None)


def _check_fits(group: WeightGroup, stored: StoredWeight, checkpoint: ConstantsCheckpoint) -> None:
    if (stored.dtype, stored.shape) != (group.tensor.dtype, tuple(group.tensor.shape)):
        raise WeightMismatchError(
            f"{checkpoint.location}: {group.fqn} was saved as {stored.dtype} {list(stored.shape)}, the model "
            f"has {group.tensor.dtype} {list(group.tensor.shape)}; build it as it was when it was saved"
        )


def decide_stored(
    group: WeightGroup,
    stored: StoredWeight,
    uses: Sequence[Use],
    checkpoint: ConstantsCheckpoint,
    target: Target,
) -> Decision:
    """The stored form, if the target can run it."""
    if stored.form is None:
        return Decision(form=None, reason=_reason(stored, checkpoint))
    if stored.form.host:
        return Decision(form=stored.form, reason=_reason(stored, checkpoint), asked=True)
    layout = _layout(stored.form, tuple(group.tensor.shape), stored.dtype, uses, target)
    reason = _misfit(stored.form, layout)
    if reason:
        raise RefusedError(
            f"{checkpoint.location}: {group.fqn} is stored as {stored.form}, which {target.name} cannot run: "
            f"{reason}. Load the original checkpoint for this target"
        )
    assert isinstance(layout, Layout)
    form = replace(stored.form, nz=layout.nz and stored.form.kn, held=layout.held)
    return Decision(form=form, reason=_reason(stored, checkpoint), asked=True)


def _layout(
    form: Form, shape: tuple[int, ...], dtype: object, uses: Sequence[Use], target: Target
) -> Layout | Refusal:
    """How codes of ``form`` lie on the target, or why it cannot run all of their uses."""
    looked_up = not form.table and any(use.lookup for use in uses)
    for op, needed in ((CONVOLUTION, bool(form.kernel)), (LOOKUP, looked_up)):
        kernel = target.kernel_of(op)
        if needed and isinstance(kernel, Refusal):
            return kernel
    if form.kernel or (looked_up and all(use.lookup for use in uses)):
        return Layout()
    n, k = form.codes_shape(shape)
    if len(shape) == 3:
        one_by_one = any(use.k_axis is not None and not use.grouped for use in uses)
        return target.lay_out_experts(
            form.quantized_as, experts=shape[0], n=n, k=k, dtype=dtype, one_by_one=one_by_one
        )
    return target.lay_out(form.quantized_as, n=n, k=k, dtype=dtype)


def _misfit(form: Form, layout: Layout | Refusal) -> str:
    """Why codes that are stored in ``form`` cannot be used where ``layout`` is right; empty if they can."""
    if isinstance(layout, Refusal):
        return layout.reason
    fewer = len(form.parts_n) < len(layout.parts_n) or len(form.parts_k) < len(layout.parts_k)
    return f"it takes them in more parts ({layout.reason})" if fewer else ""


def _reason(stored: StoredWeight, checkpoint: ConstantsCheckpoint) -> str:
    """The reason in the plan with which the weight was saved."""
    rows = checkpoint.manifest_plan.get("weights")
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, Mapping) and row.get("fqn") == stored.fqn:
            return str(row.get("reason", RULE))[:500]
    return RULE
