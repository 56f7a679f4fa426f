"""The public verbs: wiring only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from typing_extensions import Unpack

from fxquant.capture_model import untraceable
from fxquant.checkpoint import Checkpoint, open_checkpoint
from fxquant.errors import ConfigError
from fxquant.lowered import Lowered, lower_model
from fxquant.materialize.progress import choose_progress
from fxquant.options import Options, make_request
from fxquant.parameters import meta_init
from fxquant.plan import Plan
from fxquant.planner import make_plan
from fxquant.runtime.shell import Shell, install_weights
from fxquant.runtime.state import RunState

ModelOrFactory = nn.Module | Callable[[], nn.Module]


def plan(model: ModelOrFactory, ckpt: Any = None, **options: Unpack[Options]) -> Plan:
    """Everything that ``compile`` with the same arguments would do; reads headers only.

    ``model``: a module, usually built under ``meta_init()``, or a function that builds one.
    ``ckpt``: a folder, a ``.safetensors`` file, an index file, a dict or an iterable of
    ``(name, tensor)``; None plans from the model's own sizes. ``options``: see ``Options``.
    Allocates no weights. Raises what ``compile`` would raise before loading.
    """
    checkpoint = _opened(ckpt)
    return make_plan(_built(model), checkpoint, make_request(checkpoint, options)).plan


def compile(model: ModelOrFactory, ckpt: Any, **options: Unpack[Options]) -> nn.Module:
    """Plan, load, quantize and place; returns the same module object, ready to run.

    Arguments as for ``plan``. Nothing of ``model`` changes before every weight is loaded, so an
    error leaves it as it was. Keep the plan as ``model.fxquant_plan``; see ``fxquant.report``.
    """
    checkpoint = _opened(ckpt)
    if checkpoint is None:
        raise ConfigError("compile needs a checkpoint; for a live model pass its state_dict()")
    request = make_request(checkpoint, options)
    module = _built(model)
    planned = make_plan(module, checkpoint, request)
    progress = choose_progress(options.get("progress"))
    with checkpoint:
        loaded = planned.load(checkpoint, report=progress)
    kernel = request.target.kernels.get("fxquant::scaled_mm")
    state = RunState(strict=request.strict, kernel=kernel.op if kernel else "")
    install_weights(module, planned.groups, planned.forms, loaded.constants, state)
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
    checkpoint = _opened(ckpt)
    request = make_request(checkpoint, options, whole=True)
    module = _built(model)
    return lower_model(module, checkpoint, make_plan(module, checkpoint, request), request)


def _built(model: ModelOrFactory) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    with meta_init():
        return model()


def _opened(ckpt: Any) -> Checkpoint | None:
    return None if ckpt is None else open_checkpoint(ckpt)
