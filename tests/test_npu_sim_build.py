"""The simulated NPU where torch_npu is not installed: settings, command line, building libraries."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fxquant.testing import npu_sim
from fxquant.testing.npu_sim import __main__ as cli
from fxquant.testing.npu_sim import stubs, symbols
from fxquant.testing.npu_sim.settings import Settings

needs_gcc = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in stubs.TOOLS), reason="gcc and binutils are not installed"
)


def test_settings_travel_through_the_environment():
    settings = Settings(
        soc="Ascend910_9391", cann="8.5.0", devices=2, memory_mib=100, asynchronous=True, copy_mib_per_s=7
    )
    assert Settings.from_environment(settings.environment()) == settings
    assert Settings.from_environment({}) == Settings()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"devices": 17}, "devices must be in 0..16"),
        ({"memory_mib": 0}, "must be positive"),
        ({"copy_mib_per_s": -1, "asynchronous": True}, "must be positive"),
        ({"copy_mib_per_s": 5}, "needs asynchronous"),
    ],
)
def test_settings_that_make_no_sense(given, text):
    with pytest.raises(ValueError, match=text):
        Settings(**given)


def test_the_environment_of_a_child(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    arguments = cli._parser().parse_args(["--copy-rate", "5", "--expandable-segments", "--", "pytest", "-q"])
    environment = cli.child_environment(arguments, Path("/stubs"))
    assert environment["LD_LIBRARY_PATH"] == "/stubs:/elsewhere"
    assert environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    settings = Settings.from_environment(environment)
    assert (settings.asynchronous, settings.copy_mib_per_s) == (True, 5)
    assert arguments.command == ["pytest", "-q"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["pytest", "-q"], ["-m", "pytest", "-p", cli.PLUGIN, "-q"]),
        (["python", "-m", "pytest", "x"], ["-m", "pytest", "-p", cli.PLUGIN, "x"]),
        (["python", "a.py", "-x"], ["-m", "fxquant.testing.npu_sim", "--inside", "--", "a.py", "-x"]),
    ],
)
def test_pytest_gets_the_plugin_and_python_the_kernels(command, expected):
    assert cli.child_command(command, None) == [sys.executable, *expected]


def test_other_commands_stay_as_they_are():
    assert cli.child_command(["make", "demo"], None) == ["make", "demo"]


def test_why_it_cannot_run(monkeypatch, capsys):
    monkeypatch.setattr(stubs.importlib.util, "find_spec", lambda name: None)
    reason = npu_sim.is_available()
    assert reason is not None
    assert "torch_npu is not installed" in reason
    assert cli.main(["--", "pytest"]) == cli.UNAVAILABLE
    assert "torch_npu is not installed" in capsys.readouterr().err
    with pytest.raises(npu_sim.SimulatorUnavailable, match="torch_npu is not installed"):
        npu_sim.install()


def test_a_missing_tool_and_a_wheel_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(stubs.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(stubs, "_version", {"torch": "2.12.0", "torch_npu": "2.13.0"}.__getitem__)
    monkeypatch.setattr(stubs.shutil, "which", lambda tool: None if tool == "nm" else tool)
    assert "nm is not installed" in str(npu_sim.is_available())
    monkeypatch.setattr(stubs.shutil, "which", lambda tool: tool)
    assert "torch_npu 2.13.0 does not fit torch 2.12.0" in str(npu_sim.is_available())


def test_the_key_of_the_cache_follows_sources_and_versions(monkeypatch, tmp_path):
    versions = {"torch": "2.13.0", "torch_npu": "2.13.0"}
    monkeypatch.setattr(stubs, "_version", versions.__getitem__)
    first = stubs.cache_key()
    assert first.startswith("torch_npu-2.13.0-")
    versions["torch"] = "2.13.1"
    assert stubs.cache_key() != first
    versions["torch"] = "2.13.0"
    assert stubs.cache_key() == first
    copied = shutil.copytree(stubs.SOURCES, tmp_path / "cann")
    monkeypatch.setattr(stubs, "SOURCES", copied)
    assert stubs.cache_key() == first
    with (copied / "memory.c").open("a") as file:
        file.write("\n")
    assert stubs.cache_key() != first


def test_the_cache_is_built_once_and_a_failed_build_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(stubs, "_version", lambda name: "2.13.0")
    built = []

    def build(out):
        built.append(out)
        if len(built) == 1:
            raise RuntimeError("no space")
        (out / "lib.so").touch()

    monkeypatch.setattr(stubs, "_build", build)
    with pytest.raises(RuntimeError, match="no space"):
        npu_sim.stub_libraries(tmp_path)
    assert not list(tmp_path.iterdir())
    folder = npu_sim.stub_libraries(tmp_path)
    assert [p.name for p in folder.iterdir()] == ["lib.so"]
    assert npu_sim.stub_libraries(tmp_path) == folder
    assert len(built) == 2


def test_a_build_that_another_process_finished_first(monkeypatch, tmp_path):
    monkeypatch.setattr(stubs, "_version", lambda name: "2.13.0")

    def build(out):
        (out / "mine.so").touch()
        other = tmp_path / stubs.cache_key()
        other.mkdir()
        (other / "theirs.so").touch()

    monkeypatch.setattr(stubs, "_build", build)
    folder = npu_sim.stub_libraries(tmp_path)
    assert [p.name for p in folder.iterdir()] == ["theirs.so"]
    assert list(tmp_path.iterdir()) == [folder]


@needs_gcc
def test_symbols_that_a_library_lacks(tmp_path):
    library = tmp_path / "libours.so"
    source = tmp_path / "ours.c"
    source.write_text(
        '#include <stdio.h>\nint absent(void);\nint ours(void) { puts(""); return absent(); }\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert "ours" in symbols.dynamic_symbols(library, "defined")
    missing = symbols.missing_from([library], [])
    assert missing.symbols == {"absent"}
    assert not missing.libraries


@needs_gcc
def test_the_runtime_compiles_and_counts_memory(monkeypatch, tmp_path):
    """The C side by itself: the functions that do nothing answer 0, memory ends at the capacity."""
    library = tmp_path / stubs.CORE
    written = [path for path in stubs.sources() if path.suffix == ".c"]
    stubs._compile(library, written, stubs.do_nothing_source(["hcomFoo", "_ZN3atb3barEv"]), ())
    defined = symbols.dynamic_symbols(library, "defined")
    assert {"hcomFoo", "_ZN3atb3barEv", *stubs.implemented_symbols()} <= defined
    assert "drain_all" not in defined
    runtime = ctypes.CDLL(str(library))
    assert runtime.hcomFoo() == 0
    monkeypatch.setenv("STUB_CANN_MEM_MB", "3")
    pointers = [ctypes.c_void_p(), ctypes.c_void_p()]
    answers = [runtime.aclrtMalloc(ctypes.byref(p), ctypes.c_size_t(2 << 20), 0) for p in pointers]
    assert answers == [0, 207001]
    assert runtime.aclrtFree(pointers[0]) == 0
    assert runtime.aclrtMalloc(ctypes.byref(pointers[1]), ctypes.c_size_t(2 << 20), 0) == 0
    assert runtime.aclrtFree(pointers[1]) == 0


def test_a_build_error_shows_what_the_compiler_said(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    with pytest.raises(RuntimeError, match=r"building libx.so of the simulated NPU failed[^$]*error"):
        stubs._compile(tmp_path / "libx.so", [], "not C", ())


def test_nothing_here_is_loaded_by_the_product():
    ours = "('fxquant.testing', 'torch_npu')"
    code = f"import sys, fxquant; sys.exit(any(m.startswith({ours}) for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
