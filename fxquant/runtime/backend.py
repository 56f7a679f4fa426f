"""Compiles a graph of ``torch.compile``: normalize, rewrite after the forms, bind constants, run.

The constants are inputs of the compiled graph and are read from the arguments of each call: Dynamo
reuses one graph for many layers, so a constant must never be baked into it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.capture import normalize
from fxquant.errors import CaptureError, ConfigError, QuantizedWeightError
from fxquant.form import Form
from fxquant.graph import placeholders
from fxquant.pass_manager import trace
from fxquant.passes import rewrite
from fxquant.passes.uses import OtherUse
from fxquant.passes.weight_uses import weight_uses
from fxquant.runtime.quantized_weight import QuantizedWeight
from fxquant.runtime.state import RunState
from fxquant.target import Target
from fxquant.targets import BACKENDS, choose_target

log = logging.getLogger("fxquant.runtime")

Compiled = Callable[..., Any]
GetConstants = Callable[[int, Any], Sequence[Tensor]]


def compile_graph(
    flat: fx.GraphModule,
    forms: Mapping[int, Form],
    constants_of: GetConstants,
    *,
    target: Target,
    inner: str | Compiled,
    state: RunState,
    disable: Collection[str] = (),
) -> Compiled:
    """Rewrite a normalized graph in place and compile the result with ``inner``.

    ``forms`` gives the form of the placeholders that are quantized weights, by position;
    ``constants_of(position, argument)`` gives their constants at a call.
    """
    names = [str(node.target) for node in placeholders(flat)]
    results = rewrite(
        flat, {names[i]: form for i, form in forms.items()}, target, disable=disable, proven=True
    )
    counts = {result.name: result.rewrites for result in results}
    rewrites = ("quantize_linear", "quantize_experts", "quantize_embedding")
    state.rewritten += sum(counts.get(name, 0) for name in rewrites)
    _count_floats(flat, state)
    trace("run_graph", flat, {"rewrites": counts})
    run = compile_inner(flat, inner)

    def call(*args: Any) -> Any:
        given: list[Any] = []
        for i, arg in enumerate(args):
            if i in forms:
                given.extend(constants_of(i, arg))
            else:
                given.append(arg)
        return run(*given)

    return call


def _count_floats(gm: fx.GraphModule, state: RunState) -> None:
    """Count uses of float values: those of convolutions are as planned, others are fallbacks."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.fxquant.dequantize_weight.default):
        for user in node.users:
            left = _not_convolutions(user) if node.meta["form"].kernel else [user]
            state.rewritten += not left
            for other in left:
                if state.strict:
                    raise QuantizedWeightError(
                        f"strict: {other.target} would compute with the float values of {node.args[0]}"
                    )
                state.fallbacks[f"{node.args[0]} in {other.target} (compiled)"] += 1


def _not_convolutions(floats: fx.Node) -> list[fx.Node]:
    """Uses of the weight of a convolution that are none."""
    return [use.node for use in weight_uses(floats) if not (isinstance(use, OtherUse) and use.conv)]


def check_inner(inner: object) -> None:
    """Raise a ``ConfigError`` for what is no inner compiler, before anything is loaded."""
    if inner == "eager" or callable(inner):
        return
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        if isinstance(inner, str):
            lookup_backend(inner)
            return
    except InvalidBackend as error:
        raise ConfigError(f"inner={inner!r}: torch.compile has no such backend") from error
    raise ConfigError(f"inner={inner!r}: expected 'eager', a backend of torch.compile or a callable")


def compile_inner(gm: fx.GraphModule, inner: str | Compiled) -> Compiled:
    """Hand the rewritten graph to the inner compiler."""
    if inner == "eager":
        return gm.forward
    inputs = [node.meta["val"] for node in placeholders(gm)]
    if callable(inner):
        return inner(gm, inputs)  # type: ignore[no-any-return]
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(inner)(gm, inputs)  # type: ignore[no-any-return]


class ModelBackend:
    """The ``torch.compile`` backend of a model whose weights are quantized already."""

    def __init__(
        self, target: Target, inner: str | Compiled, state: RunState, disable: Collection[str]
    ) -> None:
        self.target = target
        self.inner = inner
        self.state = state
        self.disable = disable

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile one graph; ``inputs`` are not looked at, the graph's own fakes are."""
        self.state.graphs[frame_name()] += 1
        fakes, forms = plain_fakes(gm)
        try:
            return compile_graph(
                normalize(gm, fakes),
                forms,
                _constants,
                target=target_for(self.target, (fakes[i].device.type for i in forms)),
                inner=self.inner,
                state=self.state,
                disable=self.disable,
            )
        except CaptureError as error:
            self.state.unnormalized.append(str(error))
            log.warning("a graph runs without rewriting, through the eager quantized ops: %s", error)
            return gm.forward


def target_for(planned: Target, device_types: Iterable[str]) -> Target:
    """The planned target, or that of the device where the weights were moved to another one."""
    moved = sorted((set(device_types) - {planned.device_type}) & BACKENDS.keys())
    return choose_target(moved[0]) if moved else planned


def _constants(position: int, weight: QuantizedWeight) -> Sequence[Tensor]:
    return weight.constants


def frame_name() -> str:
    """A name for the code object that Dynamo is compiling: ``frame 0``."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return "unknown" if compile_id is None else f"frame {compile_id.frame_id}"


def plain_fakes(gm: fx.GraphModule) -> tuple[list[Any], dict[int, Form]]:
    """A plain fake for each placeholder of a Dynamo graph, and the forms of quantized weights."""
    fakes: list[Any] = []
    forms: dict[int, Form] = {}
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        val = node.meta["example_value"]
        if isinstance(val, QuantizedWeight):
            forms[i] = val.form
            with val.constants[0].fake_mode:  # type: ignore[attr-defined]
                val = torch.empty(val.shape, dtype=val.dtype, device=val.device)
        fakes.append(val)
    return fakes, forms
