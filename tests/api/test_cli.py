"""The shell verbs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from fxquant.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
    )
    path = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_plan_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--ignore", "o_proj"]) == 0
    text = capsys.readouterr().out
    assert "scheme int8 on cpu, 6 of 12 weights quantized" in text
    assert "ignored by 'o_proj'" in text


def test_plan_json_and_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["scheme"] == "int8"
    assert main(["plan", str(folder), "--explain", "model.layers.0.mlp.up_proj"]) == 0
    assert "read: model.layers.0.mlp.up_proj.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["plan", "/no/such/folder"], "no file or folder"), (["plan", "FOLDER", "--scheme", "int9"], "int9")],
)
def test_errors_are_one_line_and_exit_2(
    folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(folder) if argument == "FOLDER" else argument for argument in arguments]
    assert main(given) == 2
    assert words in capsys.readouterr().err


def test_python_dash_m() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "fxquant", "--version"], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "0.1.0.dev0"
