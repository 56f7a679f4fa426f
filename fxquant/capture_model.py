"""Captures a whole model for the plan: in one graph, or as the submodules that can be.

Three steps, after the design: the user's example inputs; inputs built from the model's config;
a walk over modules, where nothing is traced.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxquant.capture import (
    Captured,
    capture,
    fake_tensors_in,
    make_fake_mode,
    quiet_failure,
    quiet_fast_paths,
)
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
        graph = capture(model, args, kwargs, device=device, dynamic=dynamic, runnable=whole)
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
    """Capture each outermost submodule that traces, on the inputs that a fake run gives it.

    Where one fails, others of its kind would too (the blocks of a tower): those are not tried.
    """
    seen = _record_inputs(model, args, kwargs, device)
    graphs: list[Captured] = []
    done: list[str] = []
    failed: set[tuple[object, ...]] = set()
    for name, (sub_args, sub_kwargs) in sorted(seen.items(), key=lambda item: item[0].count(".")):
        if not name or any(name.startswith(f"{above}.") for above in done):
            continue
        module = model.get_submodule(name)
        kind = (type(module), *_shapes((sub_args, sub_kwargs)))
        if kind in failed or not any(True for _ in module.parameters()):
            continue
        try:
            graphs.append(
                capture(
                    module, sub_args, sub_kwargs, device=device, dynamic=dynamic, where=name, runnable=False
                )
            )
            done.append(name)
        except CaptureError as error:
            log.debug("%s", error)
            failed.add(kind)
    how = f"{len(graphs)} submodules; the rest by module walk"
    return ModelCapture(graphs=tuple(graphs), how=how, problems=(problem,))


def _shapes(inputs: object) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _record_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Run the model as far as it goes; the first inputs of each module, as tensors without values.

    Weights are fake and inputs are real: what the inputs alone decide, such as loops over the sizes
    of images, takes its course, and whatever meets a weight is fake.
    """
    seen: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def empty(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.empty(tuple(int(size) for size in leaf.shape), dtype=leaf.dtype)
        return leaf

    def hook_for(name: str) -> Any:
        def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if name not in seen:
                seen[name] = pytree.tree_map(empty, (given, named))

        return hook

    handles = [
        module.register_forward_pre_hook(hook_for(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad(), quiet_fast_paths(), quiet_failure(), _stand_ins(model, device):
            own_args, own_kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, dict(kwargs)))
            model(*own_args, **own_kwargs)
    except Exception:
        log.info("the fake run stopped", exc_info=True)
    finally:
        for handle in handles:
            handle.remove()
    return seen


@contextlib.contextmanager
def _stand_ins(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Fakes in the place of the weights, and copies of the buffers, to which a forward may write."""
    from torch.nn.utils import stateless

    copies = {
        name: buffer.clone()
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if not buffer.is_meta
    }
    with (
        fake_tensors_in(model, make_fake_mode(), device),
        stateless._reparametrize_module(model, copies),
    ):
        yield


def untraceable(model: nn.Module) -> str | None:
    """Why Dynamo cannot trace the model at all, or None.

    Dynamo imports the module that defines each class; one that was loaded by path and is not in
    ``sys.modules`` makes it fail with an internal error.
    """
    lost = {type(module).__module__ for module in model.modules()} - sys.modules.keys()
    if not lost:
        return None
    return (
        f"not compiled: the Python module {min(lost)!r}, which defines a part of the model, is not in "
        "sys.modules, so torch.compile cannot trace it; the quantized ops run eagerly"
    )
