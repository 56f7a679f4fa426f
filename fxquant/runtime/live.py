"""The ``torch.compile`` backend ``"fxquant"`` for a live model: it quantizes from the parameters.

Dynamo reuses one graph for many layers, so the form of each parameter is looked up at each call, by
identity, and the graph is compiled once for each combination of forms that occurs. Constants are
kept beside the parameter and made anew when it is written to.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from fxquant.capture import normalize, tracing_alone
from fxquant.config import QuantConfig, make_config
from fxquant.errors import CaptureError, ConfigError, QuantizedWeightError
from fxquant.form import Form
from fxquant.graph import placeholders
from fxquant.parameters import find_holders
from fxquant.passes.choose_form import Use, choose_form
from fxquant.passes.weight_uses import weight_uses
from fxquant.runtime.backend import Compiled, compile_graph, log, plain_fakes
from fxquant.runtime.float_values import quantize_values
from fxquant.runtime.quantized_weight import QuantizedWeight
from fxquant.runtime.shell import put_tensor
from fxquant.runtime.state import RunState
from fxquant.target import Target
from fxquant.targets import BACKENDS, choose_target

OPTIONS = ("scheme", "config", "ignore", "inner", "release", "strict", "target")


@dataclass(slots=True, kw_only=True)
class LiveWeight:
    """What is known of a parameter: its names, its constants and the values they were made from.

    ``embeddings``: those of the names that belong to an ``nn.Embedding``.
    """

    names: tuple[str, ...]
    embeddings: tuple[str, ...] = ()
    constants: dict[Form, tuple[tuple[object, ...], tuple[Tensor, ...]]] = field(default_factory=dict)


def _version(parameter: Tensor) -> tuple[object, ...]:
    """Changes with every write through the parameter, and when ``.data`` is replaced."""
    return parameter._version, parameter.data_ptr(), parameter.dtype


class LiveWeights:
    """What is known of the parameters of this process, by identity."""

    def __init__(self) -> None:
        self.held = WeakIdKeyDictionary()

    def learn(self, parameters: Sequence[Tensor]) -> None:
        """Find the names of parameters that are new."""
        new = [parameter for parameter in parameters if parameter not in self.held]
        holders = find_holders(new) if new else {}
        for parameter in new:
            found = holders.get(id(parameter), ())
            tables = tuple(holder.fqn for holder in found if isinstance(holder.module, nn.Embedding))
            names = tuple(holder.fqn for holder in found)
            self.held[parameter] = LiveWeight(names=names, embeddings=tables)

    def of(self, parameter: Tensor) -> LiveWeight:
        """What is known of ``parameter``, which was learned."""
        weight: LiveWeight = self.held[parameter]
        return weight

    def constants(self, parameter: Tensor, form: Form) -> tuple[Tensor, ...]:
        """The constants of ``parameter`` in ``form``, made now where they are missing or stale."""
        known = self.of(parameter).constants
        version = _version(parameter)
        if form not in known or known[form][0] != version:
            with torch.no_grad():
                known[form] = (version, tuple(quantize_values(parameter, form).values()))
        return known[form][1]


_LIVE = LiveWeights()
"""One for the process: ``torch.compile`` calls the backend anew for each graph."""


@dataclass(slots=True, kw_only=True)
class LiveGraph:
    """A graph of Dynamo, compiled for each combination of forms with which it is called."""

    gm: fx.GraphModule
    flat: fx.GraphModule | None
    """The normalized graph, which each variant copies; None where it cannot be normalized."""
    uses: Mapping[int, Sequence[Use]]
    fixed: Mapping[int, Form]
    config: QuantConfig | None
    target: Target
    state: RunState
    inner: str | Compiled
    release: bool
    variants: dict[tuple[Form | None, ...], Compiled] = field(default_factory=dict)
    chosen: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def __call__(self, *args: Any) -> Any:
        """Run the variant for the forms of ``args``."""
        self.choose({i: args[i] for i in self.uses})
        forms = {i: self.chosen[args[i]] for i in self.uses}
        key = tuple(forms.values())
        if key not in self.variants:
            self.variants[key] = self._compile({i: form for i, form in forms.items() if form is not None})
        result = self.variants[key](*args)
        if self.release:
            release({i: args[i] for i, form in forms.items() if form is not None}, forms)
        return result

    def choose(self, parameters: Mapping[int, Tensor]) -> None:
        """Choose the forms of parameters that this graph has not seen, by position."""
        new = {i: parameter for i, parameter in parameters.items() if parameter not in self.chosen}
        _LIVE.learn(list(new.values()))
        for i, parameter in new.items():
            self.chosen[parameter] = self._form(parameter, self.uses[i])

    def _form(self, parameter: Tensor, uses: Sequence[Use]) -> Form | None:
        assert self.config is not None
        known = _LIVE.of(parameter)
        names = known.names or ("(a parameter that no module holds)",)
        choice = self.config.choose(names, known.embeddings)
        decision = choose_form(uses, parameter.shape, parameter.dtype, choice, self.target)
        if decision.form is None:
            log.info("%s stays float: %s", names[0], decision.reason)
            if self.state.strict and decision.asked:
                raise QuantizedWeightError(f"strict: {names[0]} would stay float: {decision.reason}")
        elif parameter.requires_grad and torch.is_grad_enabled():
            log.warning("%s is quantized and gets no gradient: use torch.no_grad() or ignore", names[0])
        return decision.form

    def _compile(self, forms: Mapping[int, Form]) -> Compiled:
        if self.flat is None:
            return self.gm.forward
        with tracing_alone():  # this is a call of the graph: Dynamo has let go of the lock
            return compile_graph(
                fx.GraphModule(self.flat, copy.deepcopy(self.flat.graph)),
                {**self.fixed, **forms},
                self._constants,
                target=self.target,
                inner=self.inner,
                state=self.state,
            )

    def _constants(self, position: int, argument: Any) -> Sequence[Tensor]:
        if isinstance(argument, QuantizedWeight):
            return argument.constants
        return _LIVE.constants(argument, self.chosen[argument])


def release(parameters: Mapping[int, Tensor], forms: Mapping[int, Form | None]) -> None:
    """Put the constants in the place of float parameters in every module that holds them."""
    holders = find_holders(parameters.values())
    for i, parameter in parameters.items():
        form = forms[i]
        assert form is not None
        weight = QuantizedWeight(_LIVE.constants(parameter, form), form, parameter.dtype).as_parameter()
        for holder in holders.get(id(parameter), ()):  # none: an argument of the user's own
            put_tensor(holder.module, holder.name, weight)


def fxquant_backend(
    gm: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: None = None
) -> Compiled:
    """``torch.compile(model, backend="fxquant", options={"scheme": "int8"})``.

    Options: ``scheme`` (required), ``config``, ``ignore``, ``inner``, ``strict``, ``target`` as in
    ``fxquant.compile``; what is planned for is the device that the parameters are on. Names are FQNs
    from the outermost module that holds the parameter. With ``release`` the constants replace the float
    parameters in their modules after the first call, which compiles once more. Writes to a parameter
    are followed, except those made in place through ``.data``, which leave no trace. A model from
    ``fxquant.compile`` needs no options.
    """
    settings = dict(options or {})
    unknown = set(settings) - set(OPTIONS)
    if unknown:
        raise ConfigError(f"unknown options {sorted(unknown)}; known: {', '.join(OPTIONS)}")
    fakes, fixed = plain_fakes(gm)
    config = _config(settings, bool(fixed))
    strict = settings.get("strict", False)
    flat = _normalized(gm, fakes, strict=strict)
    positions = _parameters(inputs) if config is not None else {}
    graph = LiveGraph(
        gm=gm,
        flat=flat,
        uses=_uses(flat, positions),
        fixed=fixed,
        config=config,
        target=_target(settings.get("target"), (fakes[i].device.type for i in (*positions, *fixed))),
        state=RunState(strict=strict),
        inner=settings.get("inner", "eager"),
        release=settings.get("release", False),
    )
    graph.choose({i: inputs[i] for i in graph.uses})
    return graph


def _config(settings: Mapping[str, Any], quantized: bool) -> QuantConfig | None:
    if "scheme" not in settings:
        if quantized:
            return None
        raise ConfigError("backend 'fxquant' needs options={'scheme': ...}, for example 'int8'")
    return make_config(settings["scheme"], settings.get("config"), settings.get("ignore"))


def _target(given: object, device_types: Iterable[str]) -> Target:
    """The table of the device where the weights are; the CPU's, whose ops run anywhere, where it has none.

    A graph that also has weights in main memory is one of the device.
    """
    found = (set(device_types) & BACKENDS.keys()) - {"cpu"}
    return choose_target(min(found, default="cpu"), given)


def _parameters(inputs: Sequence[Any]) -> dict[int, Tensor]:
    """The float matrices, experts and kernels among a graph's inputs that are parameters, by position."""
    return {
        i: given
        for i, given in enumerate(inputs)
        if isinstance(given, nn.Parameter)
        and not isinstance(given, QuantizedWeight)
        and 2 <= given.dim() <= 5
    }


def _normalized(gm: fx.GraphModule, fakes: Sequence[Any], *, strict: bool) -> fx.GraphModule | None:
    try:
        return normalize(gm, fakes)
    except CaptureError as error:
        if strict:
            raise
        log.warning("a graph runs as it is, in float: %s", error)
        return None


def _uses(flat: fx.GraphModule | None, positions: Iterable[int]) -> dict[int, list[Use]]:
    if flat is None:
        return {}
    nodes = placeholders(flat)
    return {i: [Use.of(use) for use in weight_uses(nodes[i])] for i in positions}
