"""The public verbs: wiring only."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo
from typing_extensions import Unpack

from fxquant.capture_model import untraceable
from fxquant.checkpoint import Checkpoint, open_checkpoint, write_constants
from fxquant.errors import ConfigError
from fxquant.experts_forward import unroll_experts
from fxquant.lowered import Lowered, lower_model
from fxquant.materialize.progress import choose_progress
from fxquant.obtain import obtain, saved_plan
from fxquant.options import Options, make_request
from fxquant.parameters import meta_init
from fxquant.plan import Plan
from fxquant.planner import make_plan
from fxquant.runtime.constants import constants_to_save, shell_of
from fxquant.runtime.shell import Shell, install_weights, place_buffers
from fxquant.runtime.state import RunState

ModelOrFactory = nn.Module | Callable[[], nn.Module]


def plan(model: ModelOrFactory, ckpt: Any = None, **options: Unpack[Options]) -> Plan:
    """Everything that ``compile`` with the same arguments would do; reads headers only.

    ``model``: a module, usually built under ``meta_init()``, or a function that builds one.
    ``ckpt``: a folder, a ``.safetensors`` file, an index file, a dict or an iterable of
    ``(name, tensor)``; None plans from the model's own sizes. ``options``: see ``Options``.
    Allocates no weights. Raises what ``compile`` would raise before loading.
    """
    checkpoint = _opened(ckpt, options)
    return make_plan(_built(model), checkpoint, make_request(checkpoint, options)).plan


def compile(model: ModelOrFactory, ckpt: Any = None, **options: Unpack[Options]) -> nn.Module:
    """Plan, load, quantize and place; returns the same module object, ready to run.

    Arguments as for ``plan``. Nothing of ``model`` changes before every weight is loaded, so an
    error leaves it as it was. Keep the plan as ``model.fxquant_plan``; see ``fxquant.report``.
    """
    checkpoint = _opened(ckpt, options)
    request = make_request(checkpoint, options)
    if request.absent:
        raise ConfigError(
            f"there is no {request.device_type} in this process; without it a model can be planned and "
            "lowered (fxquant.plan, fxquant.lower), not compiled"
        )
    module = _built(model)
    planned = make_plan(module, checkpoint, request)
    loaded = obtain(
        planned,
        checkpoint,
        weights=options.get("weights", "checkpoint"),
        cache_dir=options.get("cache_dir"),
        report=choose_progress(options.get("progress")),
    )
    state = RunState(strict=request.strict, kernels=request.target.eager_kernels())
    install_weights(module, planned.groups, planned.forms, loaded.constants, state, request.device)
    place_buffers(module, request.device)
    unroll_experts(module)
    module.__dict__["fxquant_plan"] = planned.plan
    module.__dict__["_fxquant_load"] = replace(loaded, constants={})  # what loading took
    module.__dict__["_fxquant_shell"] = Shell(
        module,
        target=request.target,
        inner=options.get("inner", "eager"),
        dynamic=True if request.dynamic else None,
        state=state,
        traceable=untraceable(module) is None,
        disable_passes=request.disable_passes,
    )
    return module


def lower(model: ModelOrFactory, ckpt: Any = None, **options: Unpack[Options]) -> Lowered:
    """Ahead of time: the rewritten run graph and its load graph, inspectable.

    Arguments as for ``plan``. The model must export as one graph, else ``CaptureError``. Call
    ``materialize()`` on the result, then the result itself like the model.
    """
    checkpoint = _opened(ckpt, options)
    request = make_request(checkpoint, options, whole=True)
    module = _built(model)
    return lower_model(module, checkpoint, make_plan(module, checkpoint, request), request)


@_disable_dynamo
def save_checkpoint(
    model: nn.Module, path: str | os.PathLike[str], format: str = "fxquant", *, overwrite: bool = False
) -> None:
    """Write the constants of a compiled model to a new folder, which ``compile`` loads with plain reads.

    ``format``: ``"fxquant"``, safetensors files and a manifest with the plan and digests; the model's
    ``config.json`` goes along where it has one. Constants are written from where they are, without a
    copy. The folder appears only when it is complete; with ``overwrite=True`` it replaces one that
    this function wrote. On an error nothing is left behind and nothing is changed.
    """
    if format != "fxquant":
        raise ConfigError(f"format={format!r}: the only format that is written is 'fxquant'")
    weights = constants_to_save(model)
    plan = saved_plan(model.__dict__["fxquant_plan"])
    with shell_of(model).gate.forward():  # no reload meanwhile
        write_constants(path, weights, plan, overwrite=overwrite, extras=_configs(model))


def _configs(model: nn.Module) -> dict[str, bytes]:
    """The files that describe a transformers model beside its weights."""
    found = {}
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        to_text = getattr(getattr(model, attribute, None), "to_json_string", None)
        if to_text is not None:
            found[name] = to_text().encode()
    return found


def _built(model: ModelOrFactory) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    with meta_init():
        return model()


def _opened(ckpt: Any, options: Options) -> Checkpoint | None:
    mapped = options.get("reader") == "mmap"
    return None if ckpt is None else open_checkpoint(ckpt, mapped=mapped)
