"""Puts constants into the user's module, and keeps it the user's module.

The module is compiled in place: ``model(...)``, ``generate()`` and pipelines call it as before.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fxquant.capture import quiet_fast_paths
from fxquant.errors import QuantizedWeightError
from fxquant.experts_forward import register_experts
from fxquant.form import Form
from fxquant.ops import FLOATS
from fxquant.parameters import WeightGroup, owner_of
from fxquant.runtime.backend import Compiled, ModelBackend
from fxquant.runtime.gate import Gate
from fxquant.runtime.host_weight import HostWeight
from fxquant.runtime.quantized_weight import QuantizedWeight, keep_out_of_dynamo
from fxquant.runtime.state import RunState
from fxquant.target import Target

RECOMPILE_LIMIT = 32


def install_weights(
    model: nn.Module,
    groups: tuple[WeightGroup, ...],
    forms: Mapping[str, Form],
    constants: Mapping[str, tuple[Tensor, ...]],
    state: RunState,
    device: torch.device,
) -> None:
    """Replace every loaded parameter and buffer, under all its names."""
    for group in groups:
        if group.fqn not in constants:
            continue
        new = _installed(group, forms.get(group.fqn), constants[group.fqn], state, device)
        for fqn in group.fqns:
            owner, name = owner_of(model, fqn)
            put_tensor(owner, name, new)
    if forms:
        model.__dict__["_apply"] = ApplyQuantized(model)
    if forms and hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = refuse_save_pretrained


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers that no checkpoint holds (rotary tables, masks) to ``device``."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            there = buffer.device.type == device.type and device.index in (None, buffer.device.index)
            if not there:
                put_tensor(module, name, moved.setdefault(id(buffer), buffer.to(device)))


def put_tensor(owner: nn.Module, name: str, new: Tensor) -> None:
    """Put a parameter or buffer into the module that holds it."""
    setattr(owner, name, new)  # not the dict: nn.LSTM keeps a list of its weights up to date
    if isinstance(new, QuantizedWeight):
        owner.__dict__["_apply"] = ApplyQuantized(owner)


def _installed(
    group: WeightGroup,
    form: Form | None,
    constants: tuple[Tensor, ...],
    state: RunState,
    device: torch.device,
) -> Tensor:
    if form is not None and form.host:
        return HostWeight(constants[0], device, state).as_parameter()
    if form is not None:
        return QuantizedWeight(constants, form, group.tensor.dtype, state).as_parameter()
    if group.is_buffer:
        return constants[0]
    parameter = nn.Parameter(constants[0], requires_grad=group.tensor.requires_grad)
    parameter.__dict__.update(group.tensor.__dict__)
    return parameter


def refuse_save_pretrained(*args: Any, **kwargs: Any) -> None:
    """Stands for ``save_pretrained`` on a quantized model."""
    raise QuantizedWeightError(
        "save_pretrained writes float checkpoints, and this model holds quantized constants. "
        "Keep the original checkpoint, or save the constants with fxquant.save_checkpoint(model, path)."
    )


class ApplyQuantized:
    """``nn.Module._apply`` for a module with quantized weights; it stands in the instance.

    The stock method swaps tensors of wrapper subclasses in place, which fails once Dynamo guards
    hold weak references to them. This one replaces the Parameter, once for all its tied names.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Apply ``fn`` to all tensors of the module; refused before any of them where it cannot be."""
        module = self.module
        with torch.no_grad():
            _check_dtype(fn(torch.empty(0)).dtype)
        parameters: dict[str, Any] = module._parameters
        held = {name: value for name, value in parameters.items() if isinstance(value, QuantizedWeight)}
        for name in held:
            parameters[name] = None
        try:
            type(module)._apply(module, fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            parameters.update(held)
        for name, weight in held.items():
            parameters[name] = _converted(weight, fn)
        return module


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise QuantizedWeightError(
            "the module holds quantized weights, which can be moved to a device and cast to float32, "
            f"bfloat16 or float16, not to {dtype}"
        )


def _converted(weight: QuantizedWeight, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """``fn(weight)``, the same object for every module that holds ``weight``."""
    known = weight.__dict__.get("_converted")
    if known is not None and known[0]() is fn:
        done: nn.Parameter | None = known[1]()
        if done is not None:
            return done
    with torch.no_grad():
        new = fn(weight)
    assert isinstance(new, QuantizedWeight)
    parameter = new.as_parameter()
    # Weak, and on the new weight too: a module under two parents is visited twice.
    mark = (weakref.ref(fn), weakref.ref(parameter))
    weight.__dict__["_converted"] = parameter.__dict__["_converted"] = mark
    return parameter


class Shell:
    """Compiles a module in place, and again each copy and unpickled copy of it.

    It stands in the module as ``_fxquant_shell``. A copy gets a shell of its own while it is being
    built, so that its call runs graphs over its own weights and its own counters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        target: Target,
        inner: str | Compiled,
        dynamic: bool | None,
        state: RunState,
        traceable: bool,
        disable_passes: tuple[str, ...],
        gate: Gate | None = None,
    ) -> None:
        self.model = model
        self.target = target
        self.inner = inner
        self.dynamic = dynamic
        self.state = state
        self.traceable = traceable
        self.disable_passes = disable_passes
        self.gate = gate or Gate()
        register_experts()  # a pickled model may ask for them
        call = model._call_impl
        if traceable:
            keep_out_of_dynamo()
            backend = ModelBackend(target, inner, state, disable_passes)
            call = torch.compile(_entry(model), backend=backend, dynamic=dynamic, **_limit())
        model.__dict__["_compiled_call_impl"] = _with_settings(call, self.gate)

    def _settings(self) -> dict[str, Any]:
        names = ("target", "inner", "dynamic", "traceable", "disable_passes")
        return {name: getattr(self, name) for name in names}

    def __deepcopy__(self, memo: dict[int, Any]) -> Shell:
        copied = memo[id(self.model)]
        state, gate = copy.deepcopy((self.state, self.gate), memo)
        return Shell(copied, state=state, gate=gate, **self._settings())

    def __reduce__(self) -> tuple[Any, ...]:
        given = {"model": self.model, "state": self.state, "gate": self.gate}
        return restore_shell, (), {**given, **self._settings()}

    def __setstate__(self, settings: dict[str, Any]) -> None:
        self.__init__(settings.pop("model"), **settings)  # type: ignore[misc]


def _with_settings(compiled: Callable[..., Any], gate: Gate) -> Callable[..., Any]:
    """Call ``compiled`` under the settings that its tracing needs, and not during a reload.

    Guards on module hooks, which Dynamo leaves out by default: a hook that is added or removed after
    the first call must count. No opaque fast path for attention: its linears would not be seen.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # not is_compiling: another thread's export sets that
            return compiled(*args, **kwargs)
        with (
            gate.forward(),
            torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, **_despite_other_tracers()),
            quiet_fast_paths(),
        ):
            return compiled(*args, **kwargs)

    return call


def _despite_other_tracers() -> dict[str, Any]:
    """Settings with which a compiled model runs while another thread traces.

    Torch's mark of a trace is one for all threads, and compiled code that sees it raises. If this
    thread itself traces, torch decides. Older releases can only run the module uncompiled meanwhile.
    """
    if get_proxy_mode() is not None:
        return {}
    name = "force_compile_during_fx_trace"
    return {name: True} if hasattr(torch._dynamo.config, name) else {"error_on_nested_fx_trace": False}


def restore_shell() -> Shell:
    """Undo ``Shell.__reduce__``; the settings follow, once the module exists."""
    return Shell.__new__(Shell)


def _limit() -> dict[str, Any]:
    """A recompile limit for this model alone: forwards and each kind of cache share one frame.

    Past the limit Dynamo runs a frame eagerly without an error. torch.compile takes the limit as an
    argument from torch 2.13 on; before that the global setting rules.
    """
    takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    return {"recompile_limit": RECOMPILE_LIMIT} if takes_limit else {}


def _entry(model: nn.Module) -> Callable[..., Any]:
    """A frame of our own around the module's call.

    Dynamo skips frames of torch.nn itself, so a bare ``nn.Linear`` or ``nn.Sequential`` as the root
    would capture nothing; and every model needs a code object of its own, since Dynamo counts
    recompiles for each code object.
    """

    def call_module(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    call_module.__code__ = call_module.__code__.replace(co_name=f"call_{type(model).__name__}")
    return call_module
