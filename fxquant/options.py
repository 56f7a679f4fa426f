"""The keyword arguments that every public verb takes, checked in one place."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import torch

from fxquant import passes
from fxquant.checkpoint import Checkpoint, ConstantsCheckpoint
from fxquant.config import QuantConfig, make_config
from fxquant.errors import ConfigError
from fxquant.loading import LoadOptions
from fxquant.materialize.budget import READ_BYTES, Budgets
from fxquant.materialize.schedule import usable_workers
from fxquant.planner import Request
from fxquant.runtime.backend import check_inner
from fxquant.stored import stored_config
from fxquant.target import Target
from fxquant.targets import choose_target


class Options(TypedDict, total=False):
    """Keyword arguments of ``compile``, ``plan`` and ``lower``.

    - ``backend``: target family, ``"cpu"`` or ``"npu"``.
    - ``device``: ``torch.device`` or text, such as ``"npu:1"``; default: the backend's own.
    - ``target``: what to plan for instead of what this machine has: a text such as
      ``"Ascend910B2,cann=9.0"``, or a ``Target``. Without the device one can plan and lower.
    - ``wide``: layers that the NPU's limit of 65535 refuses: ``"auto"`` (as they are, else split),
      ``"split"``, ``"transpose"`` (keep ``[n, k]``; not verified on hardware), ``"host"`` (floats in
      main memory, copied for each call), ``"float"``.
    - ``weight_format``: ``"nd"`` (default) or ``"nz"``: on an NPU, cast codes to FRACTAL_NZ while they are
      loaded, where its matmul takes that; the plan tells where it does not. Not verified on hardware.
    - ``scheme``: ``"none"`` (floats as they are), ``"int8"`` or another that ``fxquant schemes`` lists.
      Required for a float checkpoint.
    - ``config``: ``{pattern: scheme}`` or a ``QuantConfig``; the first match wins.
    - ``ignore``: patterns of layers that stay float.
    - ``example_inputs``: a tuple or dict of inputs for one forward; only shapes and dtypes matter, and
      tensors may be on meta.
    - ``dynamic``: whether sizes of inputs may vary between calls (default True).
    - ``inner``: compiler of the rewritten graphs: ``"eager"`` (default), ``"inductor"``, a callable.
    - ``key_map``: ``{FQN: key}`` or a callable, for checkpoints with other names.
    - ``progress``: True, False, None (a bar on a terminal) or a callable that takes a ``Progress``.
    - ``strict``: raise instead of leaving a layer float or ignoring extra tensors.
    - ``rotate``: True rotates weights and activations along K by Hadamard matrices, in blocks of the
      largest power of two that divides K: outliers are spread, at the cost of an op for each input.
    - ``max_error``: the largest relative error ``||w - dequantized|| / ||w||`` (Frobenius norm) that a
      quantized weight may have, such as 0.05. While it is planned every weight is read, in tiles; one above
      the bound takes the next wider scheme (``scheme.WIDER``), else stays float, with the reason in the plan.
      Default: no bound. For float checkpoints that can be read twice, not for streams.
    - ``disable_passes``: names of passes to leave out, for bisecting.
    - ``host_budget``, ``device_budget``: the most that loading may hold in main memory and on the
      device: bytes, or text such as ``"2GiB"``. ``BudgetError`` tells the smallest that can be kept.
    - ``load_workers``: threads that load; default: torch's threads, at most 8.
    - ``read_bytes``: size of one read (default ``"2MiB"``); larger is better on network disks.
    - ``reader``: ``"pread"`` (default: positioned reads) or ``"mmap"`` (a mapping of the files: no
      copy, but the pages that are mapped count as the process's memory, and a file that is cut short
      meanwhile kills it).
    - ``weights``: ``"checkpoint"`` (default) or ``"dummy"``: made-up constants of the planned forms and
      sizes, for profiling; no weight is read, and the checkpoint may be left out.
    - ``cache_dir``: a folder that keeps constants between starts. The second start with the same files
      and the same plan only reads them. For checkpoints in files.
    """

    backend: str
    device: str | torch.device | None
    target: Target | str | None
    wide: str
    weight_format: str
    scheme: str | None
    config: Mapping[str, str | None] | QuantConfig | None
    ignore: Iterable[str] | None
    example_inputs: object
    dynamic: bool
    inner: str | Callable[..., Any]
    key_map: Mapping[str, str] | Callable[[str], str | None] | None
    progress: bool | Callable[..., None] | None
    strict: bool
    rotate: bool
    max_error: float | None
    disable_passes: Iterable[str]
    host_budget: int | str | None
    device_budget: int | str | None
    load_workers: int | None
    read_bytes: int | str | None
    reader: str
    weights: str
    cache_dir: str | os.PathLike[str] | None


RESERVED = ("placement",)
"""Names that later releases give a meaning; until then they are refused, never ignored."""


def check_options(options: Mapping[str, object]) -> None:
    """Raise a ``ConfigError`` for names that are unknown or not built yet."""
    known = Options.__annotations__
    for name in options:
        if name in RESERVED:
            raise ConfigError(f"option {name!r} is reserved and not built yet")
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known: {', '.join(known)}")


def make_request(
    checkpoint: Checkpoint | None, options: Mapping[str, Any], *, whole: bool = False
) -> Request:
    """The checked arguments of planning."""
    check_options(options)
    _check_choice("reader", options, ("pread", "mmap"))
    _check_choice("weights", options, ("checkpoint", "dummy"))
    check_inner(options.get("inner", "eager"))
    disabled = _disabled(options.get("disable_passes", ()))
    backend = options.get("backend", "cpu")
    _check_choice("weight_format", options, ("nd", "nz"))
    target = choose_target(
        backend,
        options.get("target"),
        wide=options.get("wide", "auto"),
        weight_format=options.get("weight_format", "nd"),
    )
    place, absent = _place(backend, target, options.get("device"))
    if isinstance(checkpoint, ConstantsCheckpoint):
        config = stored_config(checkpoint, options)
    else:
        scheme = _scheme(options.get("scheme"), options.get("config"), checkpoint)
        config = make_config(scheme, options.get("config"), options.get("ignore"))
    return Request(
        backend=backend,
        device=place,
        absent=absent,
        target=target,
        config=config,
        example_inputs=options.get("example_inputs"),
        dynamic=_flag("dynamic", options, default=True),
        key_map=options.get("key_map"),
        strict=_flag("strict", options),
        rotate=_flag("rotate", options),
        max_error=_max_error(options, checkpoint),
        disable_passes=disabled,
        whole=whole,
        load=load_options(options),
    )


def _max_error(options: Mapping[str, Any], checkpoint: Checkpoint | None) -> float | None:
    """The bound, if the checkpoint's weights can be measured before they are loaded."""
    bound = options.get("max_error")
    if bound is None:
        return None
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not 0 < bound < math.inf:
        raise ConfigError(f"max_error={bound!r}: expected a positive number, such as 0.05")
    why = ""
    if checkpoint is None:
        why = "there is no checkpoint"
    elif checkpoint.streaming:
        why = "a stream can be read only once; give files or a dict"
    elif isinstance(checkpoint, ConstantsCheckpoint):
        why = f"{checkpoint.location} holds constants; give the original checkpoint"
    elif options.get("weights") == "dummy":
        why = "weights='dummy' reads none"
    if why:
        raise ConfigError(f"max_error={bound:g} measures the weights while it plans, but {why}")
    return float(bound)


def _flag(name: str, options: Mapping[str, Any], *, default: bool = False) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected True or False")
    return value


def _disabled(given: Iterable[str]) -> tuple[str, ...]:
    """Passes to leave out. The weights' constants are what graphs are made of, so that one stays."""
    disabled = tuple(given)
    known = [name for name in passes.NAMES if name != "expand_weights"]
    if not set(disabled) <= set(known):
        raise ConfigError(f"disable_passes: {disabled}; passes that can be left out are {', '.join(known)}")
    return disabled


def _check_choice(name: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    value = options.get(name, known[0])
    if value not in known:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, known))}")


def _place(backend: str, target: Target, device: object) -> tuple[torch.device, bool]:
    """The device, and whether it is absent: then the CPU stands in for it while graphs are traced."""
    wanted = str(device) if device is not None else target.device_type
    if wanted.partition(":")[0] != target.device_type:
        raise ConfigError(f"device {wanted} does not belong to backend {backend!r}")
    module = getattr(torch, target.device_type, None)
    here = target.device_type == "cpu" or (module is not None and module.is_available())
    index = torch.device(wanted).index if here else None
    if index is not None and module is not None and index >= module.device_count():
        raise ConfigError(f"device {wanted}: this process has {module.device_count()} of that type")
    return torch.device(wanted if here else "cpu"), not here


def load_options(options: Mapping[str, Any]) -> LoadOptions:
    """The checked arguments of loading."""
    return LoadOptions(
        budgets=Budgets(
            host=parse_bytes("host_budget", options.get("host_budget")),
            device=parse_bytes("device_budget", options.get("device_budget")),
        ),
        workers=_workers(options.get("load_workers")),
        read_bytes=_read_bytes(options.get("read_bytes")),
    )


_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", re.IGNORECASE)


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """A number of bytes from an int or a text such as ``"1.5GiB"``; ConfigError names the option."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{name}={value!r} is not a size: give bytes, or a text such as '2GiB' or '500MB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _workers(value: object) -> int:
    if value is None:
        return usable_workers()
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 256:
        raise ConfigError(f"load_workers={value!r}: expected a number of threads, 1 to 256")
    return value


def _read_bytes(value: int | str | None) -> int:
    size = READ_BYTES if value is None else parse_bytes("read_bytes", value)
    assert size is not None
    if not 4096 <= size <= 2**30:
        raise ConfigError(f"read_bytes={value!r}: expected 4 KiB to 1 GiB")
    return size


def _scheme(scheme: str | None, config: object, checkpoint: Checkpoint | None) -> str:
    """The scheme that was asked for; a quantized checkpoint is refused, since none is read yet."""
    held = checkpoint.quantization if checkpoint is not None else None
    if checkpoint is not None and held is not None:
        raise ConfigError(
            f"{checkpoint.location}: the checkpoint is quantized (quant_method "
            f"{held.get('quant_method', 'unknown')!r}); quantized checkpoints are not read yet. "
            "Give the float checkpoint."
        )
    if scheme == "checkpoint":
        raise ConfigError("scheme='checkpoint', but the checkpoint is float; say for example scheme='int8'")
    if scheme is not None:
        return scheme
    if isinstance(config, QuantConfig):
        return config.scheme
    raise ConfigError("the checkpoint is float: say which scheme, for example scheme='int8' or 'none'")
