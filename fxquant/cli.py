"""The shell verbs: ``fxquant plan``, ``fxquant schemes``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

import fxquant
from fxquant.checkpoint import is_constants_folder
from fxquant.errors import ConfigError, FxquantError
from fxquant.targets.support import SHOWN, support_table


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; 0, or 2 with the error on stderr."""
    parser = argparse.ArgumentParser(prog="fxquant", description=fxquant.__doc__)
    parser.add_argument("--version", action="version", version=fxquant.__version__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    _add_plan(verbs)
    _add_schemes(verbs)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except FxquantError as error:
        print(f"fxquant: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _add_plan(verbs: Any) -> None:
    text = "what would become of every weight of a transformers model, from its config and headers alone"
    plan = verbs.add_parser("plan", help=text, description=text)
    plan.add_argument("checkpoint", help="folder with config.json and safetensors")
    plan.add_argument("--scheme", help="default: int8, or what a saved folder holds")
    plan.add_argument("--target", help="what to plan for, such as Ascend910B2,cann=9.0 with --backend npu")
    plan.add_argument("--wide", default="auto", help="auto, split, transpose, host, float")
    plan.add_argument("--html", metavar="FILE", help="also write the plan as a page for a browser")
    plan.add_argument("--backend", default="cpu")
    plan.add_argument("--ignore", action="append", metavar="PATTERN", help="keep layers float; repeatable")
    plan.add_argument("--strict", action="store_true")
    plan.add_argument("--format", choices=("text", "summary", "json"), default="text")
    plan.add_argument("--explain", metavar="FQN", help="explain one weight instead")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    plan = fxquant.plan(
        lambda: build_from_config(Path(arguments.checkpoint)),
        arguments.checkpoint,
        backend=arguments.backend,
        scheme=arguments.scheme or (None if is_constants_folder(arguments.checkpoint) else "int8"),
        target=arguments.target,
        wide=arguments.wide,
        ignore=arguments.ignore,
        strict=arguments.strict,
    )
    if arguments.html:
        plan.to_html(arguments.html)
    if arguments.explain:
        print(plan.explain(arguments.explain))
    else:
        print({"text": plan.__str__, "summary": plan.summary, "json": plan.to_json}[arguments.format]())
    return 0


def _add_schemes(verbs: Any) -> None:
    text = "every scheme, and what runs it on each target"
    schemes = verbs.add_parser("schemes", help=text, description=text)
    schemes.add_argument("--target", action="append", help="an Ascend chip such as Ascend910B2,cann=9.0")
    schemes.add_argument("--experts", action="store_true", help="of experts in place of linears")
    schemes.set_defaults(run=_schemes)


def _schemes(arguments: argparse.Namespace) -> int:
    print(support_table(arguments.target or SHOWN, experts=arguments.experts))
    return 0


def build_from_config(folder: Path) -> nn.Module:
    """The transformers model that ``folder/config.json`` describes, in the dtype that it names."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json; the command line plans transformers checkpoints")
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("the command line needs transformers: pip install fxquant[hf]") from error
    config = transformers.AutoConfig.from_pretrained(folder)
    names = getattr(config, "architectures", None) or []
    known = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    build = known[0]._from_config if known else transformers.AutoModel.from_config
    model: nn.Module = build(config, dtype=config.dtype)
    return model.eval()


if __name__ == "__main__":
    sys.exit(main())
