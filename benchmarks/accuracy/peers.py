"""The peers' schemes: torchao's and optimum-quanto's, as data.

They run under their own Python (`--peers-python`), which need not have fxquant. Their packages are
imported by name: the development environment does not have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.models import HEADS, Subject, layer_inputs, linears
from benchmarks.accuracy.weights import RoundTrip, restored

INT4: torch.dtype = vars(torch)["int4"]  # the stubs lack it
Quantize = Callable[[nn.Module, Subject], str]
"""Quantizes a float model in place; what it says is a note for the table, empty if there is none."""
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One scheme of one peer. `beside`: the scheme of fxquant that it stands next to.

    `unlike` says why the two are shown together but not judged; empty where they are the same scheme.
    """

    name: str
    beside: str
    title: str
    quantize: Quantize
    unlike: str = ""

    @property
    def package(self) -> str:
        """The distribution that it needs."""
        return {"torchao": "torchao", "quanto": "optimum-quanto"}[self.name.partition(":")[0]]


def is_quantized(module: nn.Module, fqn: str) -> bool:
    """The layers that every scheme quantizes."""
    return type(module) is nn.Linear and fqn.rpartition(".")[2] not in HEADS


def torchao(
    make: Callable[[Any], Any], module: str = "torchao.quantization", otherwise: Quantize | None = None
) -> Quantize:
    """`quantize_` with the config that `make` finds in `module`.

    `otherwise` is used where the config is refused; the note tells the refusal.
    """

    def quantize(model: nn.Module, subject: Subject) -> str:
        library = import_module("torchao.quantization")
        layers = list(linears(model))
        try:
            library.quantize_(model, make(import_module(module)), is_quantized)
        except (AssertionError, RuntimeError, ValueError, ImportError) as error:
            touched = any(restored(model.get_submodule(fqn)) is not None for fqn in layers)
            if otherwise is None or touched:
                raise
            otherwise(model, subject)
            return f"its quantizers with a float product; its config says: {error}"
        return ""

    return quantize


def round_trip(weight: Callable[[], Change], act: Callable[[], Change] | None, note: str = "") -> Quantize:
    """Weights, and inputs at run time, through a peer's format and back."""

    def quantize(model: nn.Module, _subject: Subject) -> str:
        for fqn, layer in linears(model).items():
            model.set_submodule(fqn, RoundTrip(layer, weight(), None if act is None else act()))
        return note

    return quantize


def _float8(granularity: Callable[[Any], Any]) -> Change:
    library = import_module("torchao.quantization")
    chosen = granularity(library)

    def change(x: Tensor) -> Tensor:
        there: Any = library.Float8Tensor.from_hp(x, granularity=chosen)
        back: Tensor = there.dequantize()
        return back

    return change


def _mx(dtype: torch.dtype, mode: str) -> Change:
    library = import_module("torchao.prototype.mx_formats.mx_tensor")
    scaling = library.ScaleCalculationMode(mode)

    def change(x: Tensor) -> Tensor:
        there: Any = library.MXTensor.to_mx(x.contiguous(), dtype, block_size=32, scaling_mode=scaling)
        back: Tensor = there.dequantize(x.dtype)
        return back

    return change


def _nvfp4() -> Change:
    library = import_module("torchao.prototype.mx_formats.nvfp4_tensor")

    def change(x: Tensor) -> Tensor:
        whole = library.per_tensor_amax_to_scale(x.abs().max())
        there: Any = library.NVFP4Tensor.to_nvfp4(x.contiguous(), per_tensor_scale=whole)
        back: Tensor = there.dequantize(x.dtype)
        return back

    return change


def torchao_static(model: nn.Module, subject: Subject) -> str:
    """The int8 of torchao with the scales of activations that fxquant is given too."""
    library = import_module("torchao.quantization")
    granularity = [library.PerTensor(), library.PerRow()]
    configs = {
        fqn: library.Int8StaticActivationInt8WeightConfig(
            act_quant_scale=torch.full([1] * given.axes, given.scale), granularity=granularity
        )
        for fqn, given in layer_inputs(subject, model).items()
    }
    library.quantize_(model, library.FqnToConfig(fqn_to_config=configs), filter_fn=None)
    return ""


def quanto(weights: str, activations: str | None = None) -> Quantize:
    """optimum-quanto: quantize, calibrate where activations are quantized too, freeze."""

    def quantize(model: nn.Module, subject: Subject) -> str:
        library = import_module("optimum.quanto")
        library.quantize(
            model, weights=weights, activations=activations, include=list(linears(model)), exclude=None
        )
        if activations is not None:
            with library.Calibration():
                subject.calibrate(model)
        library.freeze(model)
        return ""

    return quantize


def _int4(group: int | None, *, asymmetric: bool = False, hqq: bool = False) -> Quantize:
    """The int4 weights of torchao with integer zero points."""

    def make(library: Any) -> Any:
        options: dict[str, Any] = {}
        if hqq:
            algorithms = import_module(
                "torchao.quantization.quantize_.workflows.intx.intx_choose_qparams_algorithm"
            )
            options["intx_choose_qparams_algorithm"] = algorithms.IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY
        mapping = library.MappingType.ASYMMETRIC if asymmetric else library.MappingType.SYMMETRIC
        granularity = library.PerAxis(0) if group is None else library.PerGroup(group)
        return library.IntxWeightOnlyConfig(INT4, granularity, mapping, **options)

    return torchao(make)


def _tinygemm(group: int, algorithm: str = "TINYGEMM") -> Quantize:
    """The int4 weights of torchao with float zero points, for the CPU's tinygemm kernel."""

    def make(library: Any) -> Any:
        algorithms = import_module("torchao.quantization.quantize_.workflows").Int4ChooseQParamsAlgorithm
        return library.PrototypeInt4WeightOnlyConfig(
            group_size=group, int4_choose_qparams_algorithm=algorithms[algorithm]
        )

    return torchao(make, "torchao.prototype.quantization.int4")


def _float8_dynamic(act: Callable[[Any], Any], weight: Callable[[Any], Any]) -> Quantize:
    def make(library: Any) -> Any:
        return library.Float8DynamicActivationFloat8WeightConfig(granularity=[act(library), weight(library)])

    return torchao(make, otherwise=round_trip(partial(_float8, weight), partial(_float8, act)))


E4M3, E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
EMULATED = "its quantizers with a float product, which is what KernelPreference.EMULATED computes"
NO_CONFIG = "its quantizer with a float product; it has no such config"
SYMMETRIC = "symmetric int4: its codes reach from -8 to 7, the rules for scales differ"
MX_RULES = (("floor", ""), ("rceil", "another rule for scales, its default; ours is the OCP's, FLOOR"))
WEIGHTS_ALONE = "its activations are not quantized"
NOT_FOUND = "shown for the reason"

_INT4_GROUPS = tuple(
    peer
    for group in (32, 64, 128)
    for peer in (
        Peer(
            name=f"torchao:int4_g{group}",
            beside=f"int4_g{group}",
            title=f"torchao IntxWeightOnlyConfig(int4, PerGroup({group}))",
            quantize=_int4(group),
            unlike=SYMMETRIC,
        ),
        Peer(
            name=f"torchao:int4_g{group}_asym",
            beside=f"int4_g{group}_asym",
            title=f"torchao IntxWeightOnlyConfig(int4, PerGroup({group}), ASYMMETRIC)",
            quantize=_int4(group, asymmetric=True),
        ),
        Peer(
            name=f"torchao:tinygemm_g{group}",
            beside=f"int4_g{group}_asym",
            title=f"torchao PrototypeInt4WeightOnlyConfig(group_size={group})",
            quantize=_tinygemm(group),
        ),
    )
)

_ALL = (
    Peer(
        name="torchao:int8",
        beside="int8",
        title="torchao Int8DynamicActivationInt8WeightConfig",
        quantize=torchao(lambda library: library.Int8DynamicActivationInt8WeightConfig()),
    ),
    Peer(
        name="torchao:int8_static",
        beside="int8_static",
        title="torchao Int8StaticActivationInt8WeightConfig",
        quantize=torchao_static,
    ),
    Peer(
        name="quanto:int8_static",
        beside="int8_static",
        title="quanto qint8, activations qint8",
        quantize=quanto("qint8", "qint8"),
        unlike="it calibrates in its own way and quantizes outputs too",
    ),
    Peer(
        name="torchao:int8_weight_only",
        beside="int8_weight_only",
        title="torchao Int8WeightOnlyConfig",
        quantize=torchao(lambda library: library.Int8WeightOnlyConfig()),
    ),
    Peer(
        name="quanto:int8_weight_only",
        beside="int8_weight_only",
        title="quanto qint8",
        quantize=quanto("qint8"),
    ),
    *_INT4_GROUPS,
    Peer(
        name="torchao:int4_public",
        beside="int4_g128",
        title="torchao Int4WeightOnlyConfig()",
        quantize=torchao(lambda library: library.Int4WeightOnlyConfig()),
        unlike=NOT_FOUND,
    ),
    Peer(
        name="torchao:int4_tile_packed",
        beside="int4_g128_asym",
        title="torchao Int4WeightOnlyConfig(tile_packed_to_4d)",
        quantize=torchao(
            lambda library: library.Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d")
        ),
        unlike=NOT_FOUND,
    ),
    Peer(
        name="quanto:int4",
        beside="int4_g128_asym",
        title="quanto qint4",
        quantize=quanto("qint4"),
        unlike="it takes groups of 96 where K = 576",
    ),
    Peer(
        name="torchao:int4_channel",
        beside="int4_channel",
        title="torchao IntxWeightOnlyConfig(int4, PerAxis(0))",
        quantize=_int4(None),
        unlike=SYMMETRIC,
    ),
    Peer(
        name="torchao:int4_channel_asym",
        beside="int4_channel_asym",
        title="torchao IntxWeightOnlyConfig(int4, PerAxis(0), ASYMMETRIC)",
        quantize=_int4(None, asymmetric=True),
    ),
    Peer(
        name="torchao:int4_g64_hqq",
        beside="int4_g64(refine=clip)",
        title="torchao IntxWeightOnlyConfig(int4, PerGroup(64), HQQ_SCALE_ONLY)",
        quantize=_int4(64, hqq=True),
        unlike=SYMMETRIC,
    ),
    Peer(
        name="torchao:tinygemm_g64_hqq",
        beside="int4_g64_asym(refine=hqq)",
        title="torchao PrototypeInt4WeightOnlyConfig(group_size=64, HQQ)",
        quantize=_tinygemm(64, "HQQ"),
    ),
    Peer(
        name="torchao:w4a8",
        beside="w4a8_g128",
        title="torchao Int8DynamicActivationIntxWeightConfig(int4, PerGroup(128))",
        quantize=torchao(
            lambda library: library.Int8DynamicActivationIntxWeightConfig(INT4, library.PerGroup(128))
        ),
        unlike="its activations have zero points",
    ),
    Peer(
        name="torchao:w4a8_cpu",
        beside="w4a8_g128",
        title="torchao prototype Int8DynamicActivationInt4WeightConfig(group_size=128)",
        quantize=torchao(
            lambda library: library.Int8DynamicActivationInt4WeightConfig(group_size=128),
            "torchao.prototype.quantization.int4",
        ),
        unlike=NOT_FOUND,
    ),
    Peer(
        name="torchao:fp8",
        beside="fp8",
        title="torchao Float8DynamicActivationFloat8WeightConfig(PerRow)",
        quantize=_float8_dynamic(lambda library: library.PerRow(), lambda library: library.PerRow()),
    ),
    Peer(
        name="torchao:fp8_weight_only",
        beside="fp8",
        title="torchao Float8WeightOnlyConfig",
        quantize=torchao(lambda library: library.Float8WeightOnlyConfig()),
        unlike=WEIGHTS_ALONE,
    ),
    Peer(
        name="quanto:fp8_weight_only",
        beside="fp8",
        title="quanto qfloat8",
        quantize=quanto("qfloat8"),
        unlike=WEIGHTS_ALONE,
    ),
    Peer(
        name="torchao:fp8_tensor",
        beside="fp8_tensor",
        title="torchao Float8DynamicActivationFloat8WeightConfig(PerTensor)",
        quantize=_float8_dynamic(lambda library: library.PerTensor(), lambda library: library.PerTensor()),
    ),
    Peer(
        name="torchao:fp8_block",
        beside="fp8_block",
        title="torchao Float8DynamicActivationFloat8WeightConfig([1, 128] x [128, 128])",
        quantize=_float8_dynamic(
            lambda library: library.PerBlock([1, 128]), lambda library: library.PerBlock([128, 128])
        ),
    ),
    *(
        Peer(
            name=f"torchao:{scheme}_{mode}",
            beside=scheme,
            title=f"torchao MXDynamicActivationMXWeightConfig({what}, {mode.upper()})",
            quantize=round_trip(partial(_mx, dtype, mode), partial(_mx, dtype, mode), EMULATED),
            unlike=unlike,
        )
        for scheme, what, dtype in (("mxfp8", "e4m3", E4M3), ("mxfp4", "e2m1", E2M1))
        for mode, unlike in MX_RULES
    ),
    *(
        Peer(
            name=f"torchao:mxfp4_weight_only_{mode}",
            beside="mxfp4_weight_only",
            title=f"torchao MXTensor(e2m1, {mode.upper()})",
            quantize=round_trip(partial(_mx, E2M1, mode), None, NO_CONFIG),
            unlike=unlike,
        )
        for mode, unlike in MX_RULES
    ),
    Peer(
        name="torchao:nvfp4",
        beside="nvfp4",
        title="torchao NVFP4DynamicActivationNVFP4WeightConfig",
        quantize=torchao(
            lambda library: library.NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False),
            "torchao.prototype.mx_formats",
            round_trip(_nvfp4, _nvfp4),
        ),
    ),
    Peer(
        name="torchao:nvfp4_weight_only",
        beside="nvfp4_weight_only",
        title="torchao NVFP4WeightOnlyConfig",
        quantize=torchao(
            lambda library: library.NVFP4WeightOnlyConfig(),
            "torchao.prototype.mx_formats.inference_workflow",
        ),
    ),
)

PEERS: Mapping[str, Peer] = {peer.name: peer for peer in _ALL}
