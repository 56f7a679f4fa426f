"""What a wheel's libraries lack, from their symbol tables (``nm`` and ``readelf`` of binutils)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_IGNORED = re.compile(r"^(_ITM_|__gmon_start__|_ZTH|Py|_Py)")
"""Weak symbols, and those that the interpreter has."""

_SYSTEM = {
    "libc.so.6",
    "libm.so.6",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Symbols that no installed library defines, and libraries that are not installed."""

    symbols: frozenset[str]
    libraries: frozenset[str]


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603


def dynamic_symbols(library: Path, kind: str) -> set[str]:
    """The dynamic symbols of a library that are ``"defined"`` or ``"undefined"``, without versions."""
    lines = _output("nm", "-D", f"--{kind}-only", str(library)).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.strip()}


def needed_libraries(library: Path) -> set[str]:
    """The libraries that one asks the loader for."""
    return set(re.findall(r"\(NEEDED\).*?\[(.+?)\]", _output("readelf", "-d", str(library))))


def system_libraries() -> list[Path]:
    """The runtime libraries of C and C++, as the loader's cache lists them."""
    found: dict[str, Path] = {}
    for line in _output("/sbin/ldconfig", "-p").splitlines():
        match = re.match(r"\s+(\S+) \(.*\) => (\S+)", line)
        if match and match[1] in _SYSTEM:
            found.setdefault(match[1], Path(match[2]))
    return list(found.values())


def missing_from(ours: Iterable[Path], others: Iterable[Path]) -> Missing:
    """What the libraries ``ours`` lack, when ``others`` and the system's are loaded too."""
    ours = list(ours)
    defined: set[str] = set()
    present: set[str] = set()
    for library in [*ours, *others, *system_libraries()]:
        defined |= dynamic_symbols(library, "defined")
        present.add(library.name)
    symbols: set[str] = set()
    libraries: set[str] = set()
    for library in ours:
        symbols |= {s for s in dynamic_symbols(library, "undefined") - defined if not _IGNORED.match(s)}
        libraries |= needed_libraries(library) - present
    return Missing(symbols=frozenset(symbols), libraries=frozenset(libraries))
