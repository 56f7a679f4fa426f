"""The zoo itself: its models run, its counts are true, its checkpoints load and are well-conditioned."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxquant
from zoo.case import run
from zoo.models import ZOO, ZooCase
from zoo.random_checkpoint import randomize, write_checkpoint

MATMULS = {"mm", "addmm", "bmm", "baddbmm", "linear"}
GROUPED = {"_grouped_mm", "grouped_mm_fallback"}
EVERY = pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
BY_NAME = {case.name: case for case in ZOO}


class WeightUses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records by which ATen ops each parameter of ``model`` is read.

    A parameter is known by its storage, so that views, slices, chunks and transposes of it count,
    and so do the linears inside ``nn.MultiheadAttention``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fqn = {p.untyped_storage().data_ptr(): fqn for fqn, p in model.named_parameters()}
        self.ops: dict[str, set[str]] = {fqn: set() for fqn in self._fqn.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in args:
            if isinstance(arg, Tensor) and (fqn := self._fqn.get(arg.untyped_storage().data_ptr())):
                self.ops[fqn].add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def is_router(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("topkrouter")


def linear_weights(case: ZooCase, model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a forward multiplies by, without heads and routers: found by running it."""
    with WeightUses(model) as uses:
        run(case, model)
    return {
        fqn: p
        for fqn, p in model.named_parameters()
        if uses.ops[fqn] & {2: MATMULS, 3: GROUPED}.get(p.ndim, set()) and "embedding" not in uses.ops[fqn]
        if fqn != "lm_head.weight" and not is_router(model.get_submodule(fqn.rpartition(".")[0]))
    }


def stored_keys(folder: Path) -> dict[str, torch.dtype]:
    """Every key in the safetensors files of ``folder``, with its dtype."""
    found: dict[str, torch.dtype] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            found |= {key: f.get_tensor(key).dtype for key in f.keys()}  # noqa: SIM118
    return found


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors among the (possibly nested) inputs ``value``."""
    for item in value.values() if isinstance(value, dict) else [value]:
        if isinstance(item, dict):
            yield from leaves(item)
        elif isinstance(item, Tensor):
            yield item


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(ZOO)


@EVERY
def test_counts(case: ZooCase) -> None:
    """``linears`` is the number found by running, and ``floats`` is exactly the rest of rank >= 2."""
    model = case.build()
    assert not model.training
    linear = linear_weights(case, model)
    assert len(linear) == case.linears, sorted(linear)
    rest = {fqn for fqn, p in model.named_parameters() if p.ndim >= 2} - linear.keys()
    matched = {
        pattern: {f for f in rest | linear.keys() if fnmatchcase(f, pattern)} for pattern in case.floats
    }
    assert set().union(*matched.values()) == rest
    assert all(matched.values()), "a pattern that matches nothing"


@EVERY
def test_builds_on_meta(case: ZooCase) -> None:
    """With the parameters on meta every buffer is real, as in a plain build; the tied stay tied."""
    with fxquant.meta_init():
        bare = case.build()
    plain, again = case.build(), case.build()
    assert all(p.is_meta for p in bare.parameters())
    shapes = {fqn: p.shape for fqn, p in bare.named_parameters()}
    assert shapes == {fqn: p.shape for fqn, p in plain.named_parameters()}
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    buffers = dict(plain.named_buffers())
    assert buffers.keys() == dict(bare.named_buffers()).keys()
    for fqn, buffer in bare.named_buffers():
        assert torch.equal(buffer, buffers[fqn]), fqn
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), again.parameters(), strict=True))


@EVERY
def test_inputs(case: ZooCase) -> None:
    """A first dimension of 0 or 1 would be taken for a constant; two calls give the same values."""
    first, second = list(leaves(case.inputs())), list(leaves(case.inputs()))
    assert all(t.shape[0] >= 2 for t in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@EVERY
def test_round_trip(case: ZooCase, tmp_path: Path) -> None:
    """The library loads the checkpoint that we wrote and computes the same, bit for bit."""
    reference = write_checkpoint(case, tmp_path)
    expected = run(case, reference)
    assert expected.isfinite().all()
    loaded: nn.Module = type(reference).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    torch.testing.assert_close(run(case, loaded.eval()), expected, rtol=0, atol=0)


@EVERY
def test_is_well_conditioned(case: ZooCase) -> None:
    """Weight noise of the size of int8 stays small, so that a bound on the error means something.

    Rounding 64 normal weights to 127 steps of their maximum has a relative error of 0.6 %, the
    activations have as much: together under 1 %, which is the noise here.
    """
    model = case.build()
    randomize(model)
    expected = run(case, model)
    weights = linear_weights(case, model).values()
    originals = [p.detach().clone() for p in weights]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for p, original in zip(weights, originals, strict=True):
            p.data = original * (1 + 0.01 * torch.randn(original.shape, generator=generator))
        assert 1e-3 < (run(case, model) - expected).norm() / expected.norm() < 5e-2


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [
        ("llama", "lm_head.weight", "model.lm_head.weight"),
        ("qwen2", "model.embed_tokens.weight", "lm_head.weight"),
        ("t5", "shared.weight", "encoder.embed_tokens.weight"),
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.7.gate_proj.weight",
            "model.layers.1.mlp.experts.gate_up_proj",
        ),
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.3.w2.weight",
            "model.layers.1.mlp.experts.down_proj",
        ),
        (
            "deepseek_v3",
            "model.layers.1.mlp.gate.e_score_correction_bias",
            "model.layers.1.mlp.experts.down_proj",
        ),
        (
            "gpt_oss",
            "model.layers.1.mlp.experts.gate_up_proj_bias",
            "model.layers.1.mlp.experts.0.up_proj.weight",
        ),
    ],
)
def test_checkpoint_keys_are_the_original_ones(tmp_path: Path, name: str, present: str, absent: str) -> None:
    write_checkpoint(BY_NAME[name], tmp_path)
    keys = stored_keys(tmp_path)
    assert present in keys
    assert absent not in keys


@pytest.mark.parametrize("name", ["qwen3_moe", "flux"])
def test_shards_and_dtype(tmp_path: Path, name: str) -> None:
    """Several files with an index, in bfloat16; the reference has the rounded values in float32."""
    case = BY_NAME[name]
    reference = write_checkpoint(case, tmp_path, dtype=torch.bfloat16, shards=3)
    assert 3 <= len(list(tmp_path.glob("*.safetensors"))) <= 5
    assert len(list(tmp_path.glob("*.safetensors.index.json"))) == 1
    assert set(stored_keys(tmp_path).values()) == {torch.bfloat16}
    assert {p.dtype for p in reference.parameters()} == {torch.float32}
    loaded = type(reference).from_pretrained(tmp_path, torch_dtype=torch.float32)  # type: ignore[attr-defined]
    torch.testing.assert_close(run(case, loaded.eval()), run(case, reference), rtol=0, atol=0)
