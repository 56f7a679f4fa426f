"""The rewrites, one per file, and their order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from torch import fx

from fxquant.form import Form
from fxquant.pass_manager import Pass, PassResult, run_passes
from fxquant.passes.expand_weights import expand_weights
from fxquant.passes.lower_to_target import lower_to_target
from fxquant.passes.quantize_embedding import quantize_embedding
from fxquant.passes.quantize_experts import quantize_experts
from fxquant.passes.quantize_linear import quantize_linear
from fxquant.passes.share_quantize_act import share_quantize_act
from fxquant.target import Target

NAMES = (
    "expand_weights",
    "quantize_linear",
    "quantize_experts",
    "quantize_embedding",
    "share_quantize_act",
    "lower_to_target",
)
"""Names of the passes, by which they can be disabled."""


def rewrite(
    gm: fx.GraphModule,
    forms: Mapping[str, Form],
    target: Target,
    *,
    disable: Collection[str] = (),
    proven: bool = False,
) -> tuple[PassResult, ...]:
    """Rewrite ``gm`` in place so that the placeholders named in ``forms`` hold their constants.

    ``proven``: guards outside of the graph hold for its symbolic sizes, as in ``torch.compile``.
    """
    passes: tuple[Pass, ...] = (
        partial(expand_weights, forms=forms),
        quantize_linear,
        quantize_experts,
        quantize_embedding,
        share_quantize_act,
        partial(lower_to_target, target=target, proven=proven),
    )
    return run_passes(gm, passes, disable=disable)
