"""The one door from a model to the graph that all passes work on: flat pre-dispatch ATen.

``capture`` traces a whole module ahead of time, on tensors that hold no memory; ``normalize`` brings
a graph of ``torch.compile`` to the same form. Why these steps: docs/design.md, section 1.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxquant.errors import CaptureError
from fxquant.kept import kept_attributes, kept_registration_hooks
from fxquant.process_setting import ProcessSetting

log = logging.getLogger("fxquant.capture")

ParamKey = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A module as a graph whose placeholders are its tensors, then its tensor inputs.

    ``tensors`` maps the placeholders of parameters and buffers to FQNs relative to the root model.
    ``in_spec`` and ``out_spec`` are pytree specs of ``(args, kwargs)`` and of the result;
    ``inputs`` says for each leaf of the input its placeholder's name, or None for a constant leaf,
    whose value is then in ``leaves``.
    """

    gm: fx.GraphModule
    where: str
    tensors: Mapping[str, str]
    inputs: tuple[str | None, ...]
    leaves: tuple[object, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec


def make_fake_mode() -> Any:
    """A fake mode that export accepts, with a fresh shape environment."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv(tracked_fakes=[])
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, export=True)


@contextlib.contextmanager
def tracing_alone() -> Iterator[None]:
    """Trace graphs alone in this process: torch keeps marks of a trace in globals.

    Two traces side by side fail, and may leave a mark behind that makes every compiled model of the
    process fail. Dynamo compiles under the same lock.
    """
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:
        yield


def trace_flat(function: Callable[..., Any], args: Sequence[Any], fake_mode: Any) -> fx.GraphModule:
    """``make_fx(pre_dispatch=True)`` under the fake mode of the arguments.

    The mode and the Python dispatcher must both be entered: factory functions without tensor
    arguments, and composite C++ ops, would otherwise fix every symbolic size to its example.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake_mode, enable_python_dispatcher():
        gm = make_fx(function, pre_dispatch=True, _error_on_data_dependent_ops=False)(*args)
    assert isinstance(gm, fx.GraphModule)
    _strip(gm)
    return gm


def _strip(gm: fx.GraphModule) -> None:
    """Drop checks that tracing adds and that say nothing about the model."""
    for node in gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
    ):
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


@contextlib.contextmanager
def quiet_fast_paths() -> Iterator[None]:
    """Keep nn.MultiheadAttention off its opaque inference op, so that its linears are visible."""
    with _fast_path.changed(False):
        yield


_fast_path = ProcessSetting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled)


@contextlib.contextmanager
def fake_tensors_in(model: nn.Module, fake_mode: Any, device: torch.device) -> Iterator[None]:
    """Swap the model's parameters for fake ones on ``device``, and its buffers for fakes of them."""
    from torch.nn.utils import stateless

    memo: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            with fake_mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            is_param = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if is_param else empty
        return memo[id(tensor)]

    named = {**_named_parameters(model), **_meta_buffers(model)}
    fakes = {name: fake(tensor) for name, tensor in named.items()}
    swapped = stateless._reparametrize_module(model, fakes)
    with kept_registration_hooks(), kept_attributes(model), swapped:
        yield


@contextlib.contextmanager
def quiet_failure() -> Iterator[None]:
    """Keep to the debug log what torch prints about a graph that breaks off, which is no error here.

    Export prints the whole graph so far to stderr, and the fake mode logs the traceback of the op.
    """
    printed = io.StringIO()
    op_log = logging.getLogger("torch._subclasses.fake_tensor")
    silent, op_log.disabled = op_log.disabled, not log.isEnabledFor(logging.DEBUG)
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except Exception:
        log.debug("%s", printed.getvalue())
        raise
    else:
        sys.stderr.write(printed.getvalue())
    finally:
        op_log.disabled = silent


def _named_parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def _meta_buffers(model: nn.Module) -> dict[str, Tensor]:
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if buffer.is_meta}


def _dynamic_shapes(args: Any, dynamic: bool) -> Any:
    from torch.export import Dim

    def dims(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not dynamic:
            return None
        return tuple(Dim.AUTO if size >= 2 else Dim.STATIC for size in leaf.shape)

    return pytree.tree_map(dims, args)


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    dynamic: bool = True,
    where: str = "",
    runnable: bool = True,
) -> Captured:
    """Trace ``model(*args, **kwargs)`` without memory for weights; ``CaptureError`` where it fails.

    ``runnable=False`` is for looking at uses alone: an exported graph that is flat already is taken as
    it is, which saves the second of two traces.
    """
    fake_mode = make_fake_mode()
    args, kwargs = _distinct_tensors((args, dict(kwargs)))
    try:
        with torch.no_grad(), quiet_fast_paths(), fake_tensors_in(model, fake_mode, device):
            program = _export(model, args, dict(kwargs), fake_mode, dynamic)
            if not runnable and _is_flat(program.graph):
                return _as_exported(program, where)
            return _flatten(program, fake_mode, where)
    except Exception as error:
        text = str(error).strip().splitlines()
        first = text[0] if text else ""
        raise CaptureError(
            f"{where or 'the model'} does not export: {type(error).__name__}: {first}"
        ) from error


def _distinct_tensors(inputs: Any) -> Any:
    """The inputs with a copy of each tensor that is given twice: it stands for two inputs, not one."""
    seen: set[int] = set()

    def distinct(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        known = id(leaf) in seen
        seen.add(id(leaf))
        return leaf.clone() if known else leaf

    return pytree.tree_map(distinct, inputs)


def _export(model: nn.Module, args: Any, kwargs: Any, fake_mode: Any, dynamic: bool) -> Any:
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(fake_mode)), quiet_failure():
        return torch.export.export(
            model,
            args,
            kwargs,
            dynamic_shapes=_combined(model, args, kwargs, dynamic),
            strict=False,
        )


def _combined(model: nn.Module, args: Any, kwargs: Any, dynamic: bool) -> Any:
    """Dynamic shapes by argument name, as export wants them for positional and keyword inputs."""
    import inspect

    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return {name: _dynamic_shapes(value, dynamic) for name, value in bound.arguments.items()}


def _is_flat(graph: fx.Graph) -> bool:
    """Whether export hid nothing (autocast and no_grad regions) in wrapper ops."""
    return not any(
        node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator)
        for node in graph.nodes
    )


def _as_exported(program: Any, where: str) -> Captured:
    """The exported program's own graph."""
    from torch.export.graph_signature import InputKind

    specs = program.graph_signature.input_specs
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    prefix = f"{where}." if where else ""
    gm = fx.GraphModule(program.graph_module, program.graph)
    _strip(gm)
    return Captured(
        gm=gm,
        where=where,
        tensors={spec.arg.name: prefix + spec.target for spec in specs if spec.kind in kinds},
        inputs=(),
        leaves=(),
        in_spec=program.call_spec.in_spec,
        out_spec=program.call_spec.out_spec,
    )


def _flatten(program: Any, fake_mode: Any, where: str) -> Captured:
    """The exported program as one flat graph over explicit tensors and inputs."""
    from torch.export.graph_signature import InputKind
    from torch.nn.utils import stateless

    module = program.module(check_guards=False)
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    specs = program.graph_signature.input_specs
    named = [
        (spec.arg.name, spec.target)
        for spec in specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target in _owned(module)
    ]
    tensors = dict(named)
    leaves = [(s.arg.name, nodes[s.arg.name].meta["val"]) for s in specs if s.kind is InputKind.USER_INPUT]
    traced = [name for name, val in leaves if isinstance(val, (Tensor, torch.SymInt))]
    values = [nodes[name].meta["val"] for name in (*tensors, *traced)]
    out_spec: list[pytree.TreeSpec] = []

    def flat(*tensors_and_inputs: Any) -> Any:
        given = dict(zip((*tensors, *traced), tensors_and_inputs, strict=True))
        inputs = [given.get(name, val) for name, val in leaves]
        args, kwargs = pytree.tree_unflatten(inputs, program.call_spec.in_spec)
        swapped = {fqn: given[name] for name, fqn in tensors.items()}
        with stateless._reparametrize_module(module, swapped):
            result = module(*args, **kwargs)
        flat_result, spec = pytree.tree_flatten(result)
        out_spec[:] = [spec]
        return flat_result

    gm = trace_flat(flat, values, fake_mode)
    rename_placeholders(gm, (*tensors, *traced))
    prefix = f"{where}." if where else ""
    return Captured(
        gm=gm,
        where=where,
        tensors={name: prefix + fqn for name, fqn in tensors.items()},
        inputs=tuple(name if name in traced else None for name, _ in leaves),
        leaves=tuple(None if name in traced else val for name, val in leaves),
        in_spec=program.call_spec.in_spec,
        out_spec=out_spec[0],
    )


def _owned(module: nn.Module) -> set[str]:
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {name for name, _ in (*parameters, *buffers)}


def rename_placeholders(gm: fx.GraphModule, names: Sequence[str]) -> None:
    """Give the placeholders of a traced graph the names of what they stand for."""
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = name
        node.name = name
    gm.recompile()


def _fake_mode_of(gm: fx.GraphModule, args: Sequence[Any]) -> Any:
    """The fake mode of ``args``; where those are numbers alone, of a tensor made in the graph."""
    inner = (node.meta.get("example_value") for node in gm.graph.nodes)
    modes = (getattr(value, "fake_mode", None) for value in (*args, *inner))
    return next((mode for mode in modes if mode is not None), contextlib.nullcontext())


class _EnteringAutocast(fx.Interpreter):
    """Runs a graph and really enters its autocast regions.

    While tracing, torch records the calls that enter and leave a region without doing either, and
    the values of the ops in it would have the wrong dtype.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.outer: list[tuple[str, bool, torch.dtype, bool]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if target is torch.amp.autocast_mode._enter_autocast:
            self._enter(*args, **kwargs)
        elif target is torch.amp.autocast_mode._exit_autocast:
            set_autocast(*self.outer.pop())
        return result

    def _enter(
        self,
        device: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        _cache_enabled: bool | None = None,
    ) -> None:
        before = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        self.outer.append((device, *before, torch.is_autocast_cache_enabled()))
        # A cached cast would be recorded once and reused where it does not dominate.
        set_autocast(device, enabled, dtype or before[1], False)


def set_autocast(device: str, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
    """Set the autocast state of ``device``, and whether casts of weights are cached."""
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cache)


@contextlib.contextmanager
def kept_autocast() -> Iterator[None]:
    """Restore the autocast state, also when a traced region is never left."""
    devices = ("cpu", "cuda")
    saved = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    cache = torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        for device, enabled, dtype in saved:
            set_autocast(device, enabled, dtype, cache)


def normalize(gm: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """A graph of ``torch.compile`` in the same flat form; ``args`` are fakes for its placeholders."""
    mode = _fake_mode_of(gm, args)
    names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
    try:
        with quiet_fast_paths(), kept_autocast():
            flat = trace_flat(lambda *given: _EnteringAutocast(gm).run(*given), args, mode)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise CaptureError(f"graph cannot be normalized: {type(error).__name__}: {first}") from error
    rename_placeholders(flat, names)
    return flat
