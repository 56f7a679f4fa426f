"""The constants that a compiled model holds: to be saved, and to be written over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fxquant.checkpoint import WeightConstants, constants_in_files
from fxquant.errors import ConfigError, QuantizedWeightError
from fxquant.form import Form
from fxquant.parameters import WeightGroup, owner_of, weight_groups
from fxquant.runtime.quantized_weight import QuantizedWeight
from fxquant.runtime.shell import Shell

Held = dict[str, tuple[WeightGroup, Form | None, tuple[Tensor, ...]]]


def shell_of(model: nn.Module) -> Shell:
    """The shell of a compiled model; ConfigError if it is none."""
    shell = model.__dict__.get("_fxquant_shell")
    if not isinstance(shell, Shell):
        raise ConfigError(f"{type(model).__name__} was not compiled by fxquant.compile")
    return shell


def held_constants(model: nn.Module) -> Held:
    """Group, form and constants of every parameter and persistent buffer, by FQN."""
    found: Held = {}
    for group in weight_groups(model):
        if not group.persistent:
            continue
        owner, name = owner_of(model, group.fqn)
        tensor = getattr(owner, name)
        if isinstance(tensor, QuantizedWeight):
            found[group.fqn] = (group, tensor.form, tensor.constants)
        else:
            found[group.fqn] = (group, None, (tensor.detach(),))
    return found


def constants_to_save(model: nn.Module) -> Mapping[str, WeightConstants]:
    """Every weight of a compiled model, as the writer takes it."""
    shell_of(model)
    return {
        fqn: constants_in_files(form, group.tensor.dtype, tuple(group.tensor.shape), constants)
        for fqn, (group, form, constants) in held_constants(model).items()
    }


def constants_to_fill(held: Held, wanted: Iterable[str]) -> dict[str, tuple[Tensor, ...]]:
    """The constants of ``wanted`` weights, which must be such that bytes can be written into them."""
    found: dict[str, tuple[Tensor, ...]] = {}
    for fqn in wanted:
        _, _, constants = held[fqn]
        odd = [part for part in constants if not part.is_contiguous() or type(part) is not torch.Tensor]
        if odd:
            raise QuantizedWeightError(
                f"{fqn} cannot be reloaded in place: a constant is a {type(odd[0]).__name__} with strides "
                f"{odd[0].stride()}; compile the model again"
            )
        found[fqn] = constants
    return found


def check_apart(sources: Iterable[tuple[str, Tensor]], into: Mapping[str, tuple[Tensor, ...]]) -> None:
    """Refuse new values, by FQN, that lie in memory which is about to be written over."""
    owners: dict[int, list[tuple[str, Tensor]]] = {}
    for fqn, constants in into.items():
        for part in constants:
            owners.setdefault(_place(part), []).append((fqn, part))
    for fqn, source in sources:
        parts = source.constants if isinstance(source, QuantizedWeight) else (source,)
        for owner, written in (pair for part in parts for pair in owners.get(_place(part), ())):
            if owner != fqn or not _same_view(written, parts):
                raise ConfigError(
                    f"the new value of {fqn} lies in the memory of the model's own {owner}, which is "
                    "written over meanwhile: give a clone of it"
                )


def _place(tensor: Tensor) -> int:
    # Of an empty tensor there is nothing to write over.
    return tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)


def _same_view(part: Tensor, others: tuple[Tensor, ...]) -> bool:
    where = (part.data_ptr(), part.shape, part.stride())
    return any((other.data_ptr(), other.shape, other.stride()) == where for other in others)
