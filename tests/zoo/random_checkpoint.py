"""Checkpoints with random weights, written as the libraries write them for their users."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from zoo.case import ZooCase

# Under this seed no token of a mixture of experts lies so near to the edge between two experts that
# noise of the size of int8 moves it to the other one (test_models holds every case to that).
SEED = 164


def write_checkpoint(
    case: ZooCase, folder: Path | str, dtype: torch.dtype = torch.float32, shards: int = 1
) -> nn.Module:
    """Write a checkpoint of ``case`` in ``dtype`` to ``folder`` and return the float32 reference.

    The files come from the library's own ``save_pretrained``: original key names, one key per
    expert, tied weights once, an index when there is more than one shard. ``shards`` is how many
    files to aim for; the splitting is by whole tensors, so there may be one or two more. The
    reference computes in float32 with exactly the values of the file.
    """
    model = case.build()
    randomize(model)
    params = list(model.parameters())
    for p in params:
        p.data = p.data.to(dtype)
    size = sum(p.numel() * p.element_size() for p in params)
    limit = math.ceil(size / shards) if shards > 1 else "5GB"
    model.save_pretrained(str(folder), max_shard_size=limit)  # type: ignore[operator]
    for p in params:
        p.data = p.data.float()
    return model


@torch.no_grad()
def randomize(model: nn.Module, seed: int = SEED) -> None:
    """Give every parameter of ``model`` a random value that keeps activations of order one.

    Matrices are normal with standard deviation 1 / sqrt(fan in), so that a product keeps the size
    of its input; tables that only feed the model are standard normal. Vectors (norms, biases, decay
    rates, sinks) stay near the value that the model itself gives them.
    """
    generator = torch.Generator().manual_seed(seed)
    owners = {p: (m, name) for m in model.modules() for name, p in m.named_parameters(recurse=False)}
    for p, (module, name) in owners.items():  # a tied table counts as its head's matrix
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(p + 0.1 * noise if p.ndim < 2 else noise * spread(module, name, p))
    for fqn, buffer in model.named_buffers():
        if fqn.endswith("e_score_correction_bias"):  # DeepSeek-V3: learned and stored, yet a buffer
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def spread(module: nn.Module, name: str, p: Tensor) -> float:
    """The standard deviation for the parameter ``name`` of ``module``, of rank >= 2."""
    if isinstance(module, nn.Embedding):
        return 1.0
    if name.endswith("_bias") or name == "scale_shift_table":
        return 0.1
    kind = type(module).__name__
    if kind in ("Conv1D", "GptOssExperts"):  # [..., in, out]
        fan_in = p.shape[-2]
    elif kind.endswith("Experts"):  # [experts, out, in]
        fan_in = p.shape[-1]
    else:  # linear and convolution: [out, in, ...]
        fan_in = p[0].numel()
    # A decided router, as a trained one is: the last expert that it takes weighs little.
    gain = 4.0 if kind.lower().endswith("topkrouter") else 1.0
    return gain / math.sqrt(fan_in)
