"""What is fixed for a process: asynchronous streams, the allocator's kind, the command line, the plugin."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.usefixtures("npu")


def run(*arguments, environment=None):
    command = [sys.executable, "-m", "fxquant.testing.npu_sim", *map(str, arguments)]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | (environment or {}),
        timeout=300,
    )


def run_code(code, *settings):
    done = run(*settings, "--", "python", "-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_asynchronous_copies():
    """They overlap with the host and with each other, keep the order of their stream, and wait for events."""
    run_code(
        """
        import time, torch
        from time import perf_counter as now
        MIB = 1 << 20
        host = [torch.full((20 * MIB,), i, dtype=torch.uint8).pin_memory() for i in (1, 2)]
        device = [torch.zeros(20 * MIB, dtype=torch.uint8, device="npu") for _ in range(2)]
        torch.npu.synchronize()

        # the call returns before the copy is done (20 MiB at 40 MiB/s: 0.5 s)
        start = now()
        device[0].copy_(host[0], non_blocking=True)
        issued = now() - start
        event = torch.npu.Event(); event.record()
        assert not event.query(), "done on return"
        torch.npu.synchronize()
        whole = now() - start
        assert issued < 0.4 < 0.49 < whole, (issued, whole)
        assert event.query() and device[0].eq(1).all()

        # two streams overlap; one stream does not
        streams = [torch.npu.Stream(), torch.npu.Stream()]
        start = now()
        for s, d, h in zip(streams, device, host):
            with torch.npu.stream(s):
                d.copy_(h, non_blocking=True)
        torch.npu.synchronize()
        both = now() - start
        start = now()
        with torch.npu.stream(streams[0]):
            for h in host:
                device[0].copy_(h, non_blocking=True)
        torch.npu.synchronize()
        one = now() - start
        assert both < 0.95 < one, (both, one)
        assert device[0].eq(2).all(), "the order of a stream"

        # who does not wait for the other stream sees old bytes; who waits sees the new ones
        device[1].zero_(); torch.npu.synchronize()
        with torch.npu.stream(streams[1]):
            device[1].copy_(host[1], non_blocking=True)
            copied = torch.npu.Event(); copied.record()
        assert int(device[1][-1].cpu()) == 0, "no stale bytes without a wait"
        torch.npu.current_stream().wait_event(copied)
        assert int((device[1] + 0)[-1].cpu()) == 2

        # back to the host
        back = torch.zeros(20 * MIB, dtype=torch.uint8).pin_memory()
        back.copy_(device[1], non_blocking=True)
        assert not back[-1]
        torch.npu.synchronize()
        assert back.eq(2).all()
        """,
        "--copy-rate",
        40,
    )


def test_expandable_segments():
    """Segments grow page by page, so what is reserved stays near what is used; the capacity holds."""
    run_code(
        """
        import torch
        MIB = 1 << 20
        kept = [torch.full((7 * MIB,), i, dtype=torch.uint8, device="npu") for i in range(20)]
        assert torch.npu.memory_reserved() - torch.npu.memory_allocated() < 21 * MIB
        try:
            torch.empty(100 * MIB, dtype=torch.uint8, device="npu")
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("no error past the capacity")
        assert all(int(t[-1]) == i for i, t in enumerate(kept))
        del kept
        torch.npu.empty_cache()
        assert torch.npu.memory_reserved() < 21 * MIB
        torch.empty(180 * MIB, dtype=torch.uint8, device="npu")
        """,
        "--expandable-segments",
        "--memory",
        200,
    )


def test_python_gets_the_kernels_and_the_settings(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "if __name__ == '__main__':\n"
        "    x = torch.ones(2, 4).half().npu()\n"
        "    print(sys.argv[1:], torch.ops.npu.npu_dynamic_quant(x)[0].sum().item())\n"
        "    print(torch.npu.get_device_name(), torch.npu.device_count())\n"
        "    sys.exit(7)\n"
    )
    done = run("--soc", "Ascend910_9391", "--devices", 3, "--", "python", script, "--flag")
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines()[-2:] == ["['--flag'] 1016", "Ascend910_9391 3"]


TESTS = """
import os, torch

def test_uses_the_device(npu, npu_capacity):
    npu_capacity(100)
    assert torch.npu.mem_get_info()[1] == 100 << 20

def test_settings():
    assert os.environ["STUB_CANN_VERSION"] == "8.5.0"
    assert False
"""


def test_pytest_gets_the_plugin(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text(TESTS)
    done = run(
        "--cann",
        "8.5.0",
        "--",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
        "-c",
        os.devnull,
        path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "cann='8.5.0'" in done.stdout


def test_the_plugin_skips_with_the_reason(tmp_path):
    """Without a compiler on the path and with an empty cache."""
    path = tmp_path / "test_it.py"
    path.write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "fxquant.testing.npu_sim.plugin",
        "-rs",
        "-p",
        "no:cacheprovider",
    ]
    environment = os.environ | {
        "PATH": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
        "STUB_CANN_VERSION": "8.5.0",
    }
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-c", os.devnull, str(path)],
        check=False, capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert "1 failed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "gcc is not installed" in done.stdout


def test_concurrent_builders_share_one_result(tmp_path):
    code = (
        "import sys; from pathlib import Path; from fxquant.testing.npu_sim import stub_libraries;"
        "print(stub_libraries(Path(sys.argv[1])))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    folders = {process.communicate(timeout=300)[0].strip() for process in running}
    assert {process.returncode for process in running} == {0}
    assert [str(path) for path in tmp_path.iterdir()] == list(folders)
    assert {"libascendcl.so", "libhccl.so", "libopapi.so"} <= {
        p.name for p in (tmp_path / folders.pop()).iterdir()
    }
