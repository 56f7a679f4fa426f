"""One run of `benchmarks.npu_startup`, inside the simulated NPU. The case is given as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant
from benchmarks import npu_startup_model as models
from benchmarks.loading.files import Entry
from benchmarks.npu_startup_records import FXQUANT, MIB, Case, Record
from fxquant.errors import FxquantError
from fxquant.runtime.quantized_weight import QuantizedWeight

EXACT_FLOAT32 = (1 << 24) // 127**2
ROWS = 512
NPU: Any = getattr(torch, "npu", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model on the device, the tensors that it consists of, and what is known of it."""

    model: nn.Module
    tensors: Iterable[Tensor]
    predicted: float | None = None
    form: str = ""
    seconds: float = 0.0
    host: bool = False


def naive(case: Case, folder: Path) -> Loaded:
    """The float state dict, tensor by tensor, onto the device."""
    state = {key: models.read(entry).to("npu") for key, entry in models.entries(folder).items()}
    model = models.build(case.size)
    model.load_state_dict(state, assign=True)
    return Loaded(model=model, tensors=state.values(), form="float")


class Int8Linear(nn.Module):
    """A linear as torch_npu's users write it: codes `[n, k]`, passed as the `.t()` view."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        codes, scale = torch.ops.npu.npu_dynamic_quant(weight)  # a scale for each row, as for tokens
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., k]` -> `[..., n]`."""
        rows = x.reshape(-1, x.shape[-1])
        codes, token = torch.ops.npu.npu_dynamic_quant(rows)
        out: Tensor = torch.ops.npu.npu_quant_matmul(
            codes, self.codes.t(), self.scale, pertoken_scale=token, bias=self.bias, output_dtype=x.dtype
        )
        return out.view(*x.shape[:-1], -1)


def per_layer(case: Case, folder: Path) -> Loaded:
    """Each float layer onto the device, quantized there, dropped."""
    model, entries = models.build(case.size), models.entries(folder)
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear):
            bias = entries.get(f"{name}.bias")
            held = None if bias is None else models.read(bias).to("npu")
            weight = models.read(entries[f"{name}.weight"]).to("npu")
            model.set_submodule(name, Int8Linear(weight, held))
            del weight
    return Loaded(model=model, tensors=list(model.buffers()), form="int8 [n, k]")


def with_fxquant(case: Case, folder: Path) -> Loaded:
    """`fxquant.compile`, and the plan that it followed."""
    options: dict[str, Any] = {"scheme": "int8", "backend": "npu", "load_workers": case.workers}
    options |= {"example_inputs": models.inputs(case.size), **FXQUANT[case.variant]}
    model = fxquant.compile(models.build(case.size), folder, **options)
    report = fxquant.report(model)
    wide = next(weight for weight in report.plan.weights if weight.fqn == "blocks.0.adaln.weight")
    return Loaded(
        model=model,
        tensors=[part for weight in model.parameters() for part in parts(weight)],
        predicted=report.plan.predicted_peak["npu"] / MIB,
        form=wide.form,
        seconds=report.load_seconds,
        host=not wide.quantized,
    )


def parts(weight: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a parameter consists of."""
    return weight.constants if isinstance(weight, QuantizedWeight) else (weight,)


VARIANTS: dict[str, Callable[[Case, Path], Loaded]] = {
    "naive": naive,
    "per layer": per_layer,
    **dict.fromkeys(FXQUANT, with_fxquant),
}


class Reference(nn.Module):
    """A linear in plain torch on the CPU, from the checkpoint: int8 by row with exact sums, or float."""

    def __init__(self, entry: Entry, bias: Entry | None, *, quantized: bool) -> None:
        super().__init__()
        self.weight = models.read(entry)
        self.bias = None if bias is None else models.read(bias)
        self.quantized = quantized

    def forward(self, x: Tensor) -> Tensor:
        """`[..., k]` -> `[..., n]` in the dtype of x."""
        if not self.quantized:
            return F.linear(x, self.weight, self.bias)
        codes, token = quantized(x)
        # Whole numbers, and so are the sums: no rounding up to 2^24 in float32, 2^53 in float64.
        exact = torch.float32 if x.shape[-1] <= EXACT_FLOAT32 else torch.float64
        outs = []
        for start in range(0, self.weight.shape[0], ROWS):
            w_codes, scale = quantized(self.weight[start : start + ROWS])
            sums = (codes.to(exact) @ w_codes.to(exact).t()).float()
            outs.append(sums * scale.view(-1) * token)
        out = torch.cat(outs, -1)
        return (out if self.bias is None else out + self.bias.float()).to(x.dtype)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of every row, as floats, and its scale `[..., 1]`."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return torch.round(x.float() / scale), scale


def block_error(loaded: Loaded, folder: Path, index: int, states: list[Tensor], condition: Tensor) -> float:
    """How far the output of a block is from what the reference makes of the same input."""
    k = condition.shape[-1]
    entries = models.entries(folder)
    with torch.device("meta"):
        block = models.Block(k)
    for name, _ in list(block.named_children()):
        weight, bias = (entries.get(f"blocks.{index}.{name}.{leaf}") for leaf in ("weight", "bias"))
        assert weight is not None
        floats = loaded.host and weight.shape[0] == models.WIDE
        block.set_submodule(name, Reference(weight, bias, quantized=not floats))
    wanted = block(states[index], condition).float()
    change = (wanted - states[index].float()).norm()
    return float((states[index + 1].float() - wanted).norm() / change)


def run(case: Case, folder: Path) -> Record:
    """Load, measure, run a forward, compare."""
    record = Record(case=case)
    NPU.init()
    NPU.reset_peak_memory_stats()
    started = time.perf_counter()
    try:
        loaded = VARIANTS[case.variant](case, folder)
    except (RuntimeError, FxquantError) as error:
        oom = is_out_of_memory(error)
        text = "OutOfMemoryError" if oom else f"not available: {short(error)}"
        return replace(measured(record), reason=text, oom=oom)
    record = replace(
        measured(record),
        seconds=loaded.seconds or time.perf_counter() - started,
        form=loaded.form,
        predicted=loaded.predicted,
        constants=sum(t.nbytes for t in loaded.tensors if t.device.type == "npu") / MIB,
    )
    wide = [
        t for t in loaded.tensors if models.WIDE in t.shape and t.dtype == torch.bfloat16 and t.dim() == 2
    ]
    if case.variant == "host" and any(t.device.type == "npu" for t in wide):
        return replace(record, reason=f"not available: the wide weights are on the device ({loaded.form})")
    return forwarded(record, loaded, folder) if case.forward else record


def measured(record: Record) -> Record:
    """With what torch.npu says now."""
    gc.collect()
    return replace(
        record,
        max_allocated=NPU.max_memory_allocated() / MIB,
        max_reserved=NPU.max_memory_reserved() / MIB,
        after=NPU.memory_allocated() / MIB,
    )


@torch.no_grad()
def forwarded(record: Record, loaded: Loaded, folder: Path) -> Record:
    """With the outputs of the first and of the last block checked."""
    x, condition = models.inputs(record.case.size)
    NPU.reset_peak_memory_stats()
    started = time.perf_counter()
    try:
        states = [state.cpu() for state in loaded.model(x.to("npu"), condition.to("npu"))]
    except RuntimeError as error:
        return replace(record, failed=f"the forward failed: {short(error)}")
    running = NPU.max_memory_allocated() / MIB
    record = replace(record, forward_s=time.perf_counter() - started, running=running)
    last = record.case.blocks - 1
    errors = {
        f"block {i}": block_error(loaded, folder, i, states, condition) for i in dict.fromkeys((0, last))
    }
    return replace(record, errors=errors)


def short(error: BaseException) -> str:
    """The first part of an error."""
    return re.split(r"\n|;|\. ", str(error), maxsplit=1)[0]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is, or comes from, the device's memory being full."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def main() -> int:
    """Run the case that is given, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", type=lambda text: Case(**json.loads(text)))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.write_text(json.dumps(run(args.case, args.folder).to_dict()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
