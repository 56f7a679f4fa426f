"""fxquant: quantize PyTorch models while they load, through FX graphs."""

from __future__ import annotations

from fxquant.api import compile, lower, plan, save_checkpoint
from fxquant.config import QuantConfig
from fxquant.lowered import Lowered
from fxquant.options import Options
from fxquant.parameters import meta_init
from fxquant.plan import Plan
from fxquant.reloading import reload
from fxquant.report import Report, report
from fxquant.target import Kernel, Limit, Refusal, Target
from fxquant.version import VERSION

__version__ = VERSION

__all__ = [
    "Kernel",
    "Limit",
    "Lowered",
    "Options",
    "Plan",
    "QuantConfig",
    "Refusal",
    "Report",
    "Target",
    "compile",
    "lower",
    "meta_init",
    "plan",
    "reload",
    "report",
    "save_checkpoint",
]
