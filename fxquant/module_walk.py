"""What the types of modules say of a weight, where no captured graph shows its uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from fxquant.parameters import owner_of
from fxquant.passes.choose_form import Use

LISTS = (nn.ModuleList, nn.ModuleDict)
WALKED = "in no captured graph, planned by module walk"


def embedding_names(model: nn.Module, fqns: Iterable[str]) -> tuple[str, ...]:
    """Those of the names of a weight that belong to an ``nn.Embedding``."""
    return tuple(fqn for fqn in fqns if isinstance(owner_of(model, fqn)[0], nn.Embedding))


def walked_uses(model: nn.Module, fqn: str, *, traced: bool) -> list[Use]:
    """Uses of a parameter after its owner: linear-like modules, embeddings, convolutions."""
    owner, name = owner_of(model, fqn)
    kind = type(owner).__name__
    if name.endswith("proj_weight") and isinstance(owner, nn.MultiheadAttention):
        return [Use(op=f"nn.MultiheadAttention ({WALKED})", k_axis=1)]
    if name != "weight":
        return [_unknown(traced=traced)]
    match owner:
        case nn.Linear():
            use = Use(op=f"nn.Linear ({WALKED})", k_axis=1)
        case nn.Embedding():
            use = _embedding(owner)
        case nn.EmbeddingBag():
            use = Use(op="nn.EmbeddingBag", k_axis=None, refusal="used by an embedding bag, which sums rows")
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            use = Use(op=f"nn.{kind} ({WALKED})", k_axis=None, refusal="convolution", conv=True)
        case nn.ConvTranspose1d() | nn.ConvTranspose2d() | nn.ConvTranspose3d():
            use = Use(op=f"nn.{kind}", k_axis=None, refusal="used by a transposed convolution")
        case _ if kind == "Conv1D" and hasattr(owner, "nf"):
            use = Use(op=f"Conv1D ({WALKED})", k_axis=0)
        case _:
            use = _unknown(traced=traced)
    return [use]


def routes_beside_experts(model: nn.Module, fqn: str, givers: Iterable[str]) -> str:
    """How a linear routes of which no graph shows who takes its outputs; empty where it does not.

    Told by their number: one for each expert beside one of ``givers``, the modules that give the outputs.
    Experts are the modules of a list or dict, or the matrices of a parameter ``[E, N, K]``.
    """
    shape = model.get_parameter(fqn).shape
    counts = {count for giver in givers if giver for count in _experts_beside(model, giver)}
    routes = len(shape) == 2 and shape[0] > 1 and shape[0] in counts
    return "as many outputs as experts beside it" if routes else ""


def _experts_beside(model: nn.Module, giver: str) -> Iterator[int]:
    """Numbers of experts that the module above ``giver`` holds, or one of its other children."""
    own, above = model.get_submodule(giver), model.get_submodule(giver.rpartition(".")[0])
    others = [child for child in above.children() if child is not own]
    for child in others:
        lists = (found for found in (child, *child.children()) if isinstance(found, LISTS))
        yield from map(len, lists)
    for module in (above, *others):
        yield from (p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3)


def _unknown(*, traced: bool) -> Use:
    why = "not in any captured graph" if traced else "pass example_inputs"
    return Use(op="unknown", k_axis=None, refusal=f"use unknown: {why}")


def _embedding(owner: nn.Embedding) -> Use:
    if owner.max_norm is not None:
        return Use(op="nn.Embedding", k_axis=None, refusal="written in place by look-ups (max_norm)")
    return Use(op="nn.Embedding", k_axis=None, refusal="embedding look-up", lookup=True)
