"""What tensors a model has, by identity: FQNs, ties, owners; and building models without weights."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.nn.utils import stateless
from torch.utils.weak import WeakIdKeyDictionary

from fxquant.errors import ConfigError, MissingBufferError

PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
"""The class whose ``_init_weights`` gives buffers their values; named, since it may not be installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """One parameter or buffer under all its FQNs, the canonical one first."""

    fqns: tuple[str, ...]
    tensor: Tensor
    is_buffer: bool
    persistent: bool

    @property
    def fqn(self) -> str:
        """The canonical FQN."""
        return self.fqns[0]


def weight_groups(model: nn.Module) -> tuple[WeightGroup, ...]:
    """Parameters, then buffers, each once; names that share one tensor object are one group."""
    found: dict[int, tuple[list[str], Tensor, bool]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), ([], parameter, False))[0].append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found.setdefault(id(buffer), ([], buffer, True))[0].append(name)
    lazy = [names[0] for names, tensor, _ in found.values() if is_lazy(tensor)]
    if lazy:
        raise ConfigError(f"{lazy[0]} has no shape yet: give a lazy module its first input before planning")
    persistent = set(model.state_dict(keep_vars=True))
    return tuple(
        WeightGroup(
            fqns=tuple(names),
            tensor=tensor,
            is_buffer=is_buffer,
            persistent=any(name in persistent for name in names),
        )
        for names, tensor, is_buffer in found.values()
    )


def owner_of(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """The module that holds ``fqn``, and the name under which it does."""
    path, _, name = fqn.rpartition(".")
    return model.get_submodule(path), name


@contextlib.contextmanager
def meta_init() -> Iterator[None]:
    """Build modules with parameters on the meta device and real buffers.

    Use it around the model's constructor. Parameters take no memory once registered; buffers
    (rotary tables, position ids, masks), which checkpoints often do not hold, keep the values that
    the constructor gives them. Parameters that are tied while the model is built stay tied. Models
    that other threads build meanwhile are not touched.
    """
    moved = WeakIdKeyDictionary()
    thread = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, param: nn.Parameter) -> nn.Parameter | None:
        if param.is_meta or is_lazy(param) or threading.get_ident() != thread:
            return None
        if param not in moved:
            moved[param] = _on_meta(param)
        return moved[param]  # type: ignore[no-any-return]

    # torch types the hook as one that returns nothing; what it returns takes the parameter's place.
    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    """The same class and attributes; a subclass may have a constructor of its own, so it is not called."""
    meta = torch.Tensor._make_subclass(type(param), param.detach().to("meta"), param.requires_grad)
    meta.__dict__.update(param.__dict__)
    return meta


def repair_buffers(model: nn.Module, held: frozenset[str]) -> tuple[str, ...]:
    """Give buffers on meta, that no checkpoint key holds, the values their initializer would.

    Returns the FQNs that were repaired. diffusers models are rebuilt from their config; elsewhere
    transformers models, also as parts, are re-initialized module by module (``_init_weights``).
    ``MissingBufferError`` lists what stays without a value; nothing is ever filled with zeros, and
    nothing that holds values is written to.
    """
    lost = [name for name in _meta_buffers(model) if name not in held]
    if not lost:
        return ()
    donor = _rebuilt(model)
    if donor is not None:
        _take_buffers(model, donor, lost)
    else:
        _initialize_buffers(model, lost)
    left = [name for name in _meta_buffers(model) if name not in held]
    if left:
        raise MissingBufferError(
            f"buffers on the meta device that no checkpoint key holds: {', '.join(left[:10])}"
            f"{' and more' if len(left) > 10 else ''}. Build the model under fxquant.meta_init(), "
            "which keeps buffers real, instead of torch.device('meta')."
        )
    return tuple(lost)


def _meta_buffers(model: nn.Module) -> list[str]:
    return [name for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta]


def _rebuilt(model: nn.Module) -> nn.Module | None:
    """The same diffusers model, built again from its config with real buffers."""
    if not any(base.__module__.startswith("diffusers.") for base in type(model).__mro__):
        return None
    with meta_init():
        return type(model).from_config(model.config)  # type: ignore[attr-defined,no-any-return]


def _take_buffers(model: nn.Module, donor: nn.Module, lost: list[str]) -> None:
    """Move the donor's buffers over, in the dtype that the model has since been cast to."""
    given = dict(donor.named_buffers(remove_duplicate=False))
    for name in lost:
        owner, key = owner_of(model, name)
        wanted, source = owner._buffers[key], given.get(name)
        assert wanted is not None
        if source is not None and source.shape == wanted.shape:
            owner._buffers[key] = source.to(wanted.dtype)


def _initialize_buffers(model: nn.Module, lost: list[str]) -> None:
    """Run transformers' own ``_init_weights`` on every module, with the lost buffers off meta.

    Everything else is swapped out meanwhile: the initializers write to all that they know.
    """
    undefined: dict[str, Tensor] = {}
    stand_ins = _stand_ins(model)
    for name in lost:
        owner, key = owner_of(model, name)
        buffer = owner._buffers[key]
        assert buffer is not None
        undefined[name] = torch.full_like(buffer, _mark(buffer), device="cpu")
        owner._buffers[key] = undefined[name]
    with torch.no_grad(), stateless._reparametrize_module(model, stand_ins):
        _initialize(model, None)
    for name in lost:
        owner, key = owner_of(model, name)
        buffer = owner._buffers[key]
        if buffer is undefined[name] and _untouched(buffer):
            owner._buffers[key] = buffer.to("meta")


def _stand_ins(model: nn.Module) -> dict[str, Tensor]:
    """Something to write to for each parameter and each buffer with values, by the first of its names.

    Once for each place that holds it: what is swapped twice, under two names of a module, stays.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {prefix + n: p.detach().to("meta") for n, p in module._parameters.items() if p is not None}
        found |= {
            prefix + n: b.clone() for n, b in module._buffers.items() if b is not None and not b.is_meta
        }
    return found


def _initialize(module: nn.Module, initialize: Callable[[nn.Module], None] | None) -> None:
    """Each transformers model initializes its own modules, those of its parts by theirs."""
    if any(f"{base.__module__}.{base.__name__}" == PRETRAINED for base in type(module).__mro__):
        initialize = module._init_weights  # type: ignore[assignment]
    for child in module.children():
        _initialize(child, initialize)
    if initialize is not None:
        initialize(module)


def _mark(buffer: Tensor) -> float | int | bool:
    """A value that tells a buffer nobody wrote: NaN, the smallest integer, True."""
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return float("nan")
    return True if buffer.dtype is torch.bool else torch.iinfo(buffer.dtype).min


def _untouched(buffer: Tensor) -> bool:
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return bool(buffer.isnan().any())
    return bool((buffer == _mark(buffer)).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A module that holds a parameter, and the parameter's FQN from the outermost module down."""

    module: nn.Module
    name: str
    fqn: str


def find_holders(parameters: Iterable[Tensor]) -> dict[int, list[Holder]]:
    """The modules of this process that hold each parameter, by ``id(parameter)``.

    For code that is given a parameter without its model. Names start at modules that no other
    module holds; ``_orig_mod``, which torch.compile puts in, is left out.
    """
    wanted = {id(parameter) for parameter in parameters}
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    modules = [each for each in modules if "_modules" in each.__dict__]
    inner = {id(child) for each in modules for child in each._modules.values()}
    found: dict[int, list[Holder]] = {}
    for root in modules:
        if id(root) in inner:
            continue
        for path, module in root.named_modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in wanted:
                    parts = [part for part in (*path.split("."), name) if part not in ("", "_orig_mod")]
                    holder = Holder(module=module, name=name, fqn=".".join(parts))
                    found.setdefault(id(parameter), []).append(holder)
    return found
