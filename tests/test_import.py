"""What `import fxquant` costs: no optional dependency, no device context."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Everything that `import fxquant` may import beyond `import torch`: itself, its one other dependency, the
# standard library, and what torch itself requires (some of it only once torch.export or torch.fx needs it).
OWN = {"fxquant", "safetensors"}
OF_TORCH = {
    "filelock",
    "fsspec",
    "functorch",
    "jinja2",
    "markupsafe",
    "mpmath",
    "networkx",
    "numpy",
    "sympy",
    "torch",
    "torchgen",
    "typing_extensions",
}

PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import fxquant
seconds = time.perf_counter() - start
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({
    "new": sorted(new),
    "seconds": seconds,
    "cuda": torch.cuda.is_initialized(),
    "xpu": torch.xpu.is_initialized(),
    "threads": __import__("threading").active_count(),
}))
"""


@pytest.fixture(scope="module")
def probe():
    """Return what a fresh interpreter saw when it imported fxquant, warnings being errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_imports_only_torch_and_safetensors(probe):
    print(f"import fxquant: {probe['seconds']:.2f} s over import torch")
    own_internals = {name for name in probe["new"] if name.startswith("_")}  # of the standard library
    unexpected = set(probe["new"]) - OWN - OF_TORCH - set(sys.stdlib_module_names) - own_internals
    assert unexpected == set()
    assert "fxquant" in probe["new"]


def test_makes_no_device_context_and_starts_no_thread(probe):
    assert probe["cuda"] is False
    assert probe["xpu"] is False
    assert probe["threads"] == 1


@pytest.mark.parametrize("name", ["transformers", "diffusers", "accelerate", "gguf", "numpy"])
def test_optional_dependencies_are_allowed_to_be_absent(name):
    block = f"import sys; sys.modules[{name!r}] = None; import fxquant; print(fxquant.__name__)"
    # torch itself warns when numpy is absent.
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fxquant"
