"""The keyword arguments that every public verb takes, checked in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import torch

from fxquant import passes
from fxquant.checkpoint import Checkpoint
from fxquant.config import QuantConfig, make_config
from fxquant.errors import ConfigError
from fxquant.planner import Request
from fxquant.target import Target
from fxquant.targets import choose_target


class Options(TypedDict, total=False):
    """Keyword arguments of ``compile``, ``plan`` and ``lower``.

    - ``backend``: target family, ``"cpu"``.
    - ``device``: ``torch.device`` or text; default: the backend's own.
    - ``target``: a ``Target`` to plan for instead of what this machine has.
    - ``scheme``: ``"none"`` (floats as they are) or ``"int8"``. Required for a float checkpoint.
    - ``config``: ``{pattern: scheme}`` or a ``QuantConfig``; the first match wins.
    - ``ignore``: patterns of layers that stay float.
    - ``example_inputs``: a tuple or dict of inputs for one forward; only shapes and dtypes matter.
    - ``dynamic``: whether sizes of inputs may vary between calls (default True).
    - ``inner``: compiler of the rewritten graphs: ``"eager"`` (default), ``"inductor"``, a callable.
    - ``key_map``: ``{FQN: key}`` or a callable, for checkpoints with other names.
    - ``progress``: True, False, None (a bar on a terminal) or a callable that takes a ``Progress``.
    - ``strict``: raise instead of leaving a layer float or ignoring extra tensors.
    - ``disable_passes``: names of passes to leave out, for bisecting.
    """

    backend: str
    device: str | torch.device | None
    target: Target | None
    scheme: str | None
    config: Mapping[str, str | None] | QuantConfig | None
    ignore: Iterable[str] | None
    example_inputs: object
    dynamic: bool
    inner: str | Callable[..., Any]
    key_map: Mapping[str, str] | Callable[[str], str | None] | None
    progress: bool | Callable[..., None] | None
    strict: bool
    disable_passes: Iterable[str]


RESERVED = (
    "wide",
    "placement",
    "host_budget",
    "device_budget",
    "weights",
    "cache_dir",
    "max_error",
    "rotate",
)
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
    disabled = tuple(options.get("disable_passes", ()))
    if not set(disabled) <= set(passes.NAMES):
        raise ConfigError(f"disable_passes: {disabled}; the passes are {', '.join(passes.NAMES)}")
    backend = options.get("backend", "cpu")
    target = choose_target(backend, options.get("target"))
    device = options.get("device")
    place = torch.device(device if device is not None else target.device_type)
    if place.type != target.device_type:
        raise ConfigError(f"device {place} does not belong to backend {backend!r}")
    config = options.get("config")
    scheme = _scheme(options.get("scheme"), config, checkpoint)
    return Request(
        backend=backend,
        device=place,
        target=target,
        config=make_config(scheme, config, options.get("ignore")),
        example_inputs=options.get("example_inputs"),
        dynamic=options.get("dynamic", True),
        key_map=options.get("key_map"),
        strict=options.get("strict", False),
        disable_passes=disabled,
        whole=whole,
    )


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
