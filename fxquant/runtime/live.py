"""The ``torch.compile`` backend ``"fxquant"`` for a live model: it quantizes from the parameters.

Forms are chosen for each parameter when a graph first uses it. Constants are kept beside the
parameter, found again by identity at each call (Dynamo reuses one graph for many layers), and made
anew when the parameter is written to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from fxquant.capture import normalize
from fxquant.config import QuantConfig, make_config
from fxquant.errors import CaptureError, ConfigError, QuantizedWeightError
from fxquant.graph import placeholders
from fxquant.passes.choose_form import Decision, Use, choose_form
from fxquant.passes.weight_uses import weight_uses
from fxquant.runtime.backend import Compiled, compile_graph, log, plain_fakes
from fxquant.runtime.quantized_weight import QuantizedWeight, quantize_values
from fxquant.runtime.state import RunState
from fxquant.scheme import Form
from fxquant.target import Target
from fxquant.targets import choose_target

OPTIONS = ("scheme", "config", "ignore", "inner", "release", "strict", "target")


@dataclass(slots=True)
class LiveWeight:
    """A parameter's constants, and the version of its values that they were made from."""

    form: Form
    constants: tuple[Tensor, ...]
    version: int
    released: bool = False


@dataclass(slots=True)
class LiveWeights:
    """The constants of parameters by identity, for one set of options."""

    release: bool
    held: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def constants(self, parameter: Tensor, form: Form) -> tuple[Tensor, ...]:
        """The constants of ``parameter`` in ``form``, made now where they are missing or stale."""
        weight: LiveWeight | None = self.held.get(parameter)  # type: ignore[no-untyped-call]
        if weight is not None and weight.released:
            if weight.form != form:
                raise QuantizedWeightError(f"a released parameter is held as {weight.form}, not {form}")
            return weight.constants
        if weight is None or weight.form != form or weight.version != parameter._version:
            with torch.no_grad():
                parts = quantize_values(parameter, form)
            weight = LiveWeight(form=form, constants=parts, version=parameter._version)
            if self.release:
                parameter.untyped_storage().resize_(0)
                weight.released = True
            self.held[parameter] = weight
        return weight.constants

    def form_of(self, parameter: Tensor) -> Form | None:
        """The form in which a released parameter is held; its floats are gone."""
        weight: LiveWeight | None = self.held.get(parameter)  # type: ignore[no-untyped-call]
        return weight.form if weight is not None and weight.released else None


_LIVE: dict[str, LiveWeights] = {}
"""Constants by the text of the options, since ``torch.compile`` calls the backend anew for each graph."""


def fxquant_backend(
    gm: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: None = None
) -> Compiled:
    """``torch.compile(model, backend="fxquant", options={"scheme": "int8"})``.

    Options: ``scheme`` (required), ``config``, ``ignore``, ``inner``, ``strict``, ``target`` as in
    ``fxquant.compile``; names are relative to the compiled module. ``release`` frees the float
    parameters once they are quantized. A model from ``fxquant.compile`` needs no options.
    """
    settings = dict(options or {})
    unknown = set(settings) - set(OPTIONS)
    if unknown:
        raise ConfigError(f"unknown options {sorted(unknown)}; known: {', '.join(OPTIONS)}")
    target = choose_target("cpu", settings.get("target"))
    state = RunState(strict=settings.get("strict", False))
    fakes, held = plain_fakes(gm)
    config = _config(settings, bool(held))
    live = _LIVE.setdefault(
        repr(sorted(settings.items(), key=str)), LiveWeights(settings.get("release", False))
    )
    forms = dict(held)
    try:
        if config is not None:
            forms |= choose_live_forms(gm, fakes, inputs, config, target, live, strict=state.strict)
        return compile_graph(
            gm,
            fakes,
            forms,
            _constants_from(live, forms),
            target=target,
            inner=settings.get("inner", "eager"),
            state=state,
        )
    except CaptureError as error:
        if state.strict:
            raise
        log.warning("a graph runs as it is, in float: %s", error)
        return gm.forward


def _config(settings: Mapping[str, Any], quantized: bool) -> QuantConfig | None:
    if "scheme" not in settings:
        if quantized:
            return None
        raise ConfigError("backend 'fxquant' needs options={'scheme': ...}, for example 'int8'")
    return make_config(settings["scheme"], settings.get("config"), settings.get("ignore"))


def _constants_from(live: LiveWeights, forms: Mapping[int, Form]) -> Callable[[int, Any], Sequence[Tensor]]:
    def constants(position: int, argument: Any) -> Sequence[Tensor]:
        if isinstance(argument, QuantizedWeight):
            return argument.constants
        return live.constants(argument, forms[position])

    return constants


def choose_live_forms(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    inputs: Sequence[Any],
    config: QuantConfig,
    target: Target,
    live: LiveWeights,
    *,
    strict: bool,
) -> dict[int, Form]:
    """The form of each float parameter among a graph's inputs, by position."""
    flat = normalize(gm, fakes)
    names = [_source_name(node) for node in gm.graph.find_nodes(op="placeholder")]
    forms: dict[int, Form] = {}
    for i, (node, given) in enumerate(zip(placeholders(flat), inputs, strict=True)):
        if isinstance(given, QuantizedWeight) or not isinstance(given, nn.Parameter):
            continue
        form = live.form_of(given)
        if form is None:
            uses = [Use.of(use) for use in weight_uses(node)] if given.dim() == 2 else []
            decision = choose_form(uses, given.shape, given.dtype, config.choose([names[i]]), target)
            _check(names[i], decision, strict)
            form = decision.form
        if form is not None:
            forms[i] = form
    return forms


def _check(name: str, decision: Decision, strict: bool) -> None:
    if decision.form is None:
        log.info("%s stays float: %s", name, decision.reason)
        if strict and decision.asked:
            raise QuantizedWeightError(f"strict: {name} would stay float: {decision.reason}")


def _source_name(node: fx.Node) -> str:
    """A parameter's name relative to the frame that is compiled, from Dynamo's source.

    ``L['self']._modules['layers']._modules['0']._parameters['weight']`` -> ``layers.0.weight``.
    """
    import re

    source = getattr(node.meta.get("grapharg"), "source", None)
    text = source.name if source is not None else str(node.target)
    text = text() if callable(text) else text
    parts = re.findall(r"_(?:modules|parameters|buffers)\['([^']+)'\]", text)
    return ".".join(part for part in parts if part != "_orig_mod") or str(node.target)
