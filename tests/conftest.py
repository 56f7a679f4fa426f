"""Settings and fixtures shared by all tests."""

from __future__ import annotations

import os
import sys

# Read when the libraries are imported: set before them, for a plain `pytest` as well as for `make test`.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from examples import sentence_embeddings, smollm2

# No deadline: the first example of a test may compile. Derandomized: a run says the same twice.
settings.register_profile(
    "fxquant", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fxquant")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Give each test the same seed, and drop what it compiled.

    Dynamo counts recompiles per code object, so tests of one class of models would use up each other's limit.
    """
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Return the bf16 SmolLM2 checkpoint; it is built once and cached between runs."""
    return smollm2.checkpoint()


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """Return the folder of the MiniLM model in its package."""
    return sentence_embeddings.model_folder()
