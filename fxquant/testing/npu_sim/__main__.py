"""Run a command with the simulated NPU: ``python -m fxquant.testing.npu_sim [settings] -- command``.

``pytest`` gets the plugin, ``python`` the kernels; any other command the libraries only, and calls
``npu_sim.install()`` itself. The exit code is the command's.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fxquant.testing import npu_sim
from fxquant.testing.npu_sim.settings import Settings

PLUGIN = "fxquant.testing.npu_sim.plugin"
INSIDE = "--inside"
UNAVAILABLE = 3
"""Exit code where the simulated NPU cannot run."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fxquant.testing.npu_sim", description=(__doc__ or "").partition("\n")[0]
    )
    given = Settings.from_environment()
    parser.add_argument("--soc", default=given.soc, help="chip (default %(default)s)")
    parser.add_argument("--cann", default=given.cann, help="CANN version (default %(default)s)")
    parser.add_argument("--devices", type=int, default=given.devices, help="devices (default %(default)s)")
    parser.add_argument(
        "--memory",
        type=int,
        default=given.memory_mib,
        metavar="MIB",
        help="of one device (default %(default)s)",
    )
    parser.add_argument("--asynchronous", action="store_true", help="streams run on threads of their own")
    parser.add_argument(
        "--copy-rate",
        type=int,
        default=0,
        metavar="MIB_PER_S",
        help="slow copies down (implies --asynchronous)",
    )
    parser.add_argument("--expandable-segments", action="store_true", help="torch_npu's virtual memory")
    parser.add_argument("--trace", action="store_true", help="print the CANN functions that do nothing")
    parser.add_argument("--cache", type=Path, help="where the libraries are kept")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    return parser


def child_environment(arguments: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The environment in which torch_npu finds the stand-ins."""
    settings = Settings(
        soc=arguments.soc,
        cann=arguments.cann,
        devices=arguments.devices,
        memory_mib=arguments.memory,
        asynchronous=arguments.asynchronous or arguments.copy_rate > 0,
        copy_mib_per_s=arguments.copy_rate,
        trace=arguments.trace,
    )
    environment = os.environ | settings.environment()
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    environment.setdefault("OMP_NUM_THREADS", "1")
    if arguments.expandable_segments:
        environment["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:True"
    return environment


def child_command(command: Sequence[str], cache: Path | None) -> list[str]:
    """The command with the plugin (``pytest``) or the kernels (``python``) put in."""
    name, *rest = command
    if Path(name).name in {"pytest", "py.test"}:
        return [sys.executable, "-m", "pytest", "-p", PLUGIN, *rest]
    if Path(name).name in {"python", "python3"} or name == sys.executable:
        if rest[:2] == ["-m", "pytest"]:
            return [sys.executable, "-m", "pytest", "-p", PLUGIN, *rest[2:]]
        where = [] if cache is None else ["--cache", str(cache)]
        return [sys.executable, "-m", "fxquant.testing.npu_sim", INSIDE, *where, "--", *rest]
    return list(command)


def run_inside(arguments: Sequence[str]) -> None:
    """Install the simulated NPU here, then run ``-c code``, ``-m module`` or a script as ``__main__``."""
    split = list(arguments).index("--")
    cache = Path(arguments[1]) if split else None
    npu_sim.install(cache=cache)
    what, *rest = arguments[split + 1 :] or ["-"]
    if what == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
    elif what == "-m":
        sys.argv = rest
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what.startswith("-"):
        raise SystemExit(f"python {what} is not understood here: give a script, -m module or -c code")
    else:
        sys.argv = [what, *rest]
        sys.path.insert(0, str(Path(what).resolve().parent))
        runpy.run_path(what, run_name="__main__")


def main(argv: Sequence[str] | None = None) -> int:
    """Start the command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == INSIDE:
        run_inside(argv[1:])
        return 0
    arguments = _parser().parse_args(argv)
    reason = npu_sim.is_available()
    if reason is not None:
        sys.stderr.write(f"the simulated NPU cannot run: {reason}\n")
        return UNAVAILABLE
    folder = npu_sim.stub_libraries(arguments.cache)
    environment = child_environment(arguments, folder)
    command = child_command(arguments.command, arguments.cache)
    return subprocess.run(command, check=False, env=environment).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
