"""The constants that a compiled model holds: to be saved, and to be written over."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fxquant.checkpoint import WeightConstants
from fxquant.errors import ConfigError, QuantizedWeightError
from fxquant.parameters import WeightGroup, owner_of, weight_groups
from fxquant.runtime.quantized_weight import QuantizedWeight
from fxquant.runtime.shell import Shell
from fxquant.scheme import Form


def shell_of(model: nn.Module) -> Shell:
    """The shell of a compiled model; ConfigError if it is none."""
    shell = model.__dict__.get("_fxquant_shell")
    if not isinstance(shell, Shell):
        raise ConfigError(f"{type(model).__name__} was not compiled by fxquant.compile")
    return shell


def held_constants(model: nn.Module) -> dict[str, tuple[WeightGroup, Form | None, tuple[Tensor, ...]]]:
    """Group, form and constants of every parameter and persistent buffer, by FQN."""
    found: dict[str, tuple[WeightGroup, Form | None, tuple[Tensor, ...]]] = {}
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
        fqn: WeightConstants(
            form=form, dtype=group.tensor.dtype, shape=tuple(group.tensor.shape), tensors=constants
        )
        for fqn, (group, form, constants) in held_constants(model).items()
    }


def constants_to_fill(model: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    """Every weight's constants, which must be such that bytes can be written into them."""
    found: dict[str, tuple[Tensor, ...]] = {}
    for fqn, (_, _, constants) in held_constants(model).items():
        odd = [part for part in constants if not part.is_contiguous() or type(part) is not torch.Tensor]
        if odd:
            raise QuantizedWeightError(
                f"{fqn} cannot be reloaded in place: a constant is a {type(odd[0]).__name__} with strides "
                f"{odd[0].stride()}; compile the model again"
            )
        found[fqn] = constants
    return found
