"""Memory of a process, as /proc tells it."""

from __future__ import annotations

from pathlib import Path

_FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile")


def memory(pid: int | str = "self") -> dict[str, float]:
    """MiB by field of /proc/PID/status; an `OSError` once the process is gone."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _FIELDS:
            found[name] = int(value.split()[0]) / 1024
    return found


def reset_peak(pid: int | str) -> None:
    """Make VmHWM of a process start again from what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
