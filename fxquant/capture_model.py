"""Captures a whole model for the plan: in one graph, or as the submodules that can be.

Three steps, after the design: the user's example inputs; inputs built from the model's config;
a walk over modules, where nothing is traced.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxquant.capture import Captured, capture, fake_tensors_in, make_fake_mode, quiet_fast_paths
from fxquant.errors import CaptureError
from fxquant.model_inputs import build_inputs, normalize_inputs

log = logging.getLogger("fxquant.capture")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCapture:
    """The captured graphs, how they came about, and what could not be traced."""

    graphs: tuple[Captured, ...]
    how: str
    problems: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether one graph holds the whole model."""
        return len(self.graphs) == 1 and not self.graphs[0].where


def capture_model(
    model: nn.Module,
    example_inputs: object,
    *,
    device: torch.device,
    dynamic: bool,
    whole: bool = False,
) -> ModelCapture:
    """Capture ``model`` for planning; with ``whole`` anything but one graph raises ``CaptureError``."""
    given = example_inputs is not None
    inputs = normalize_inputs(example_inputs) if given else ((), build_inputs(model))
    args, kwargs = inputs
    if kwargs is None:
        if whole:
            raise CaptureError("no example inputs and no builder for this model: pass example_inputs=...")
        return ModelCapture(graphs=(), how="module walk: no example_inputs")
    source = "example_inputs" if given else "inputs built from the model's config"
    try:
        graph = capture(model, args, kwargs, device=device, dynamic=dynamic)
        return ModelCapture(graphs=(graph,), how=f"whole model, {source}")
    except CaptureError as error:
        if whole:
            raise
        log.info("%s; capturing submodules", error)
        return _by_submodule(model, args, kwargs, str(error), device=device, dynamic=dynamic)


def _by_submodule(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    problem: str,
    *,
    device: torch.device,
    dynamic: bool,
) -> ModelCapture:
    """Capture each outermost submodule that traces, on the inputs that a fake run gives it."""
    seen = _record_inputs(model, args, kwargs, device)
    graphs: list[Captured] = []
    done: list[str] = []
    for name, (sub_args, sub_kwargs) in sorted(seen.items(), key=lambda item: item[0].count(".")):
        if not name or any(name.startswith(f"{above}.") for above in done):
            continue
        module = model.get_submodule(name)
        if not any(True for _ in module.parameters()):
            continue
        try:
            graphs.append(
                capture(module, sub_args, sub_kwargs, device=device, dynamic=dynamic, where=name)
            )
            done.append(name)
        except CaptureError as error:
            log.debug("%s", error)
    how = f"{len(graphs)} submodules; the rest by module walk"
    return ModelCapture(graphs=tuple(graphs), how=how, problems=(problem,))


def _record_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Run the model on fakes as far as it goes; the first inputs of each module, as empty tensors."""
    seen: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    mode = make_fake_mode()

    def real(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.zeros(tuple(int(size) for size in leaf.shape), dtype=leaf.dtype)
        return leaf

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if name not in seen:
                with torch._subclasses.fake_tensor.unset_fake_temporarily():
                    seen[name] = pytree.tree_map(real, (given, named))

        return hook

    handles = [
        module.register_forward_pre_hook(hook_for(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad(), quiet_fast_paths(), fake_tensors_in(model, mode, device), mode:
            fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, dict(kwargs)))
            model(*fakes[0], **fakes[1])
    except Exception as error:
        log.info("the fake run stopped: %s", str(error).splitlines()[0] if str(error) else error)
    finally:
        for handle in handles:
            handle.remove()
    return seen
