"""Every example runs, on small settings, and prints what it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import chat, custom_module, sentence_embeddings, smollm2


def number(text: str, pattern: str) -> float:
    """Return the number that the one group of `pattern` matches in `text`."""
    match = re.search(pattern, text)
    assert match is not None, f"{pattern!r} is not in:\n{text}"
    return float(match.group(1).replace(",", ""))


def test_chat_names_paris_with_every_block_linear_quantized(smollm2_folder, capsys):
    assert chat.main(["--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert "> What is the capital of France?" in out
    assert "Paris" in out.split("> What is the capital of France?")[1]
    assert "quantized linears: 210 of 210 in the blocks" in out
    assert number(out, r"fallbacks: +(\d+)") == 0
    float_mib, int8_mib = (number(out, rf"{kind} bytes: +([\d.]+) MiB") for kind in ("float", "quantized"))
    # 106.2 M of the 134.5 M parameters are in the blocks' linears: one byte each instead of two.
    assert 0.5 * float_mib < int8_mib < 0.65 * float_mib
    assert number(out, r"peak while loading on cpu: ([\d.]+) MiB") >= int8_mib


@pytest.mark.slow
def test_chat_without_quantization_gives_the_same_answer(smollm2_folder, capsys):
    assert chat.main(["--scheme", "none", "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert "Paris" in out.split("> What is the capital of France?")[1]
    assert "quantized linears: 0 of 210 in the blocks" in out


def test_sentence_embeddings_stay_close(capsys):
    assert sentence_embeddings.main(["--sentences", "5"]) == 0
    out = capsys.readouterr().out
    assert number(out, r"mean ([\d.]+)") >= 0.995
    assert number(out, r"minimum ([\d.]+)") >= 0.98


def test_custom_module_prints_its_plan_and_a_small_error(capsys):
    assert custom_module.main(["--width", "64", "--depth", "1"]) == 0
    out = capsys.readouterr().out
    assert "blocks.0.attention.qkv" in out
    assert number(out, r"quantized (\d+) weights") == 5
    assert 1e-6 < number(out, r"relative error of the output: ([\d.e+-]+)") < 5e-2


def test_checkpoint_is_returned_as_it_is(tmp_path):
    marker = tmp_path / "ready"
    marker.mkdir()
    assert smollm2.checkpoint(marker) == marker
    assert list(marker.iterdir()) == []


def test_failed_build_leaves_nothing(tmp_path, monkeypatch):
    def fail(source: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("no space")

    monkeypatch.setattr(smollm2, "_build", fail)
    with pytest.raises(RuntimeError, match="no space"):
        smollm2.checkpoint(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_concurrent_build_keeps_the_first(tmp_path, monkeypatch):
    target = tmp_path / "model"

    def build(source: Path, folder: Path) -> None:
        (folder / "mine").write_text("")
        target.mkdir()
        (target / "theirs").write_text("")

    monkeypatch.setattr(smollm2, "_build", build)
    assert smollm2.checkpoint(target) == target
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in target.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("module", "call"),
    [(smollm2, smollm2.gguf_file), (sentence_embeddings, sentence_embeddings.model_folder)],
)
def test_missing_package_says_what_to_install(module, call, monkeypatch):
    monkeypatch.setattr(module, "_PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="run pip install --no-deps"):
        call()
