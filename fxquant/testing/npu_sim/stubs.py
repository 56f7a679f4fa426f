"""Stand-ins for the libraries of CANN that the torch_npu wheel links against.

Every symbol that the wheel needs and no installed library defines becomes a function that returns
0 (success). The functions that must do something are written in C, in the folder ``cann``: memory,
copies, streams and events over this process's memory, and what tells chip and version. There are
no compute kernels on this side.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fxquant.testing.npu_sim.symbols import missing_from

SOURCES = Path(__file__).parent / "cann"
CORE = "libascendcl.so"
"""Holds all code; the other libraries have the right name and depend on it."""

TOOLS = ("gcc", "nm", "readelf")

# torch_npu looks these symbols up by name in that very library.
_LIBRARY_OF_PREFIX = {"Hccl": "libhccl.so", "hcom": "libhccl.so", "_ZN3atb": "libatb.so"}

# Opened lazily; without it the wrappers of ops cannot create their descriptors.
_OPENED = ("libopapi.so",)

# Looked up by name at run time, so in no symbol table; doing nothing is right.
_NO_OPS = [
    "aclrtSetDeviceSatMode",
    "aclrtSetOpExecuteTimeOut",
    "aclrtSetOpExecuteTimeOutV2",
    "aclrtSetOpWaitTimeout",
    "aclrtSetStreamFailureMode",
    "aclrtSetStreamOverflowSwitch",
    "aclrtSetStreamAttribute",
    "aclrtSetSysParamOpt",
    "aclrtCtxSetSysParamOpt",
    "aclrtSubscribeReport",
    "aclrtUnSubscribeReport",
    "aclrtCmoAsync",
    "aclrtSetDeviceResLimit",
    "aclrtResetDeviceResLimit",
    "aclrtSetStreamResLimit",
    "aclrtResetStreamResLimit",
    "aclrtUseStreamResInCurrentThread",
    "aclrtUnuseStreamResInCurrentThread",
    "HcclSetConfig",
]

_DEFINITION = re.compile(r"^API [^;{(]*?\b(\w+)\(", flags=re.MULTILINE)


def reason_unavailable() -> str | None:
    """Why the libraries cannot be built and used here, or None."""
    if not sys.platform.startswith("linux"):
        return f"the simulated NPU needs Linux, this is {sys.platform}"
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install 'fxquant[npu-sim]'"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed: the simulated NPU builds libraries with gcc and binutils"
    wheel, torch = _version("torch_npu"), _version("torch")
    if wheel.split(".")[:2] != torch.split(".")[:2]:
        return f"torch_npu {wheel} does not fit torch {torch}: they have the same major and minor version"
    return None


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def default_cache() -> Path:
    """``fxquant/npu_sim`` under ``$XDG_CACHE_HOME``, else under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "fxquant" / "npu_sim"


def sources() -> list[Path]:
    """The C sources and headers."""
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".c", ".h"})


def implemented_symbols() -> set[str]:
    """The functions that the C sources define."""
    return {name for path in sources() for name in _DEFINITION.findall(path.read_text(encoding="ascii"))}


def cache_key() -> str:
    """Changes with the wheel, with torch, and with anything that the result is made of."""
    digest = hashlib.sha256()
    for path in [*sources(), Path(__file__), Path(__file__).with_name("symbols.py")]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    versions = f"{_version('torch')} {platform.machine()} {sys.implementation.cache_tag}"
    digest.update(versions.encode())
    return f"torch_npu-{_version('torch_npu')}-{digest.hexdigest()[:16]}"


def stub_libraries(cache: Path | None = None) -> Path:
    """The folder with the libraries, built on the first call (1.5 s) and kept in ``cache``.

    Several processes may call it at once: each builds in a folder of its own, one of which is
    renamed into place.
    """
    folder = (cache or default_cache()) / cache_key()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as made:
        built = Path(made) / "lib"
        built.mkdir()
        _build(built)
        try:
            built.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    return folder


def _package(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    origin = None if spec is None else spec.origin
    assert origin is not None, f"{name} is not installed"
    return Path(origin).parent


def _build(out: Path) -> None:
    wheel, torch = _package("torch_npu"), _package("torch")
    ours = [*sorted(wheel.glob("lib/*.so")), *sorted(wheel.glob("_C.*.so"))]
    missing = missing_from(ours, sorted(torch.glob("lib/*.so*")))
    generated: dict[str, list[str]] = {
        name: [] for name in (*missing.libraries, CORE, *_LIBRARY_OF_PREFIX.values(), *_OPENED)
    }
    for symbol in sorted((missing.symbols | set(_NO_OPS)) - implemented_symbols()):
        prefixes = (library for prefix, library in _LIBRARY_OF_PREFIX.items() if symbol.startswith(prefix))
        generated[next(prefixes, CORE)].append(symbol)
    written = [path for path in sources() if path.suffix == ".c"]
    _compile(out / CORE, written, do_nothing_source(generated.pop(CORE)), links=())
    for name, symbols in sorted(generated.items()):
        _compile(out / name, (), do_nothing_source(symbols), links=(CORE,))


def do_nothing_source(symbols: Iterable[str]) -> str:
    """C source with a function that returns 0 for each symbol; labels give C++ symbols their name."""
    lines = ["extern void stub_cann_trace(const char *);"]
    for index, symbol in enumerate(symbols):
        body = f'{{ stub_cann_trace("{symbol}"); return 0; }}'
        lines.append(f'long stub_{index}(void) __asm__("{symbol}");')
        lines.append(f'__attribute__((visibility("default"))) long stub_{index}(void) {body}')
    return "\n".join(lines) + "\n"


def _compile(library: Path, written: Iterable[Path], generated: str, links: Iterable[str]) -> None:
    flags = ["-O1", "-g0", "-shared", "-fPIC", "-Wall", "-Wextra", "-pthread", "-fvisibility=hidden"]
    linker = [f"-Wl,-soname,{library.name}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "generated.c"
        source.write_text(generated, encoding="ascii")
        inputs = [*map(str, written), str(source), f"-L{library.parent}", *(f"-l:{name}" for name in links)]
        command = ["gcc", *flags, *linker, f"-I{SOURCES}", "-o", str(library), *inputs]
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"building {library.name} of the simulated NPU failed:\n{done.stderr}")
