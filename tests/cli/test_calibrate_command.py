"""`mlx-kv calibrate`: a file that is found, a summary, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_kv import load_calibration

Command = Callable[..., Any]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(7):
        (folder / f"{index}.txt").write_text(f"import os\n\ndef number_{index}(x):\n    return x + {index}\n" * 8)
    return folder


@pytest.mark.slow
def test_it_writes_a_file_that_is_found(command: Command, model: Path, texts: Path, tmp_path: Path) -> None:
    called = command("calibrate", model, "--texts", texts)
    assert called.code == 0, called.err
    assert called.out == ""
    file = tmp_path / "draft.kvcal.safetensors"
    assert str(file) in called.err
    for word in (
        "texts       ",
        "heads       ",
        "largest     ",
        "fit         R2 ",
        "bits        auto: ",
        "memory      ",
        "file        ",
    ):
        assert word in called.err
    calibration = load_calibration(file)
    assert len(calibration.layers) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"draft", "texts", file.name}


def test_budgets_only_in_json(command: Command, model: Path, texts: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.kvcal.safetensors"
    options = ("--texts", texts, "--budgets-only", "--output", file, "--json")
    called = command("calibrate", "--model", model, *options)
    assert called.code == 0, called.err
    answer = json.loads(called.out)
    assert answer["file"] == str(file)
    assert answer["details"]["texts"] == 1
    assert answer["name"] == load_calibration(file).name
    assert load_calibration(file).layers == ()


@pytest.mark.slow
def test_an_interrupted_run_continues(
    command: Command, model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_kv.cli.output import Progress

    step = Progress.step

    def stop(self: Progress, what: str) -> None:
        step(self, what)
        if self.done == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "step", stop)
        called = command("calibrate", model, "--texts", texts)
    assert called.code == 130
    kept = tmp_path / "draft.kvcal.partial"
    assert f"3 of 7 texts are measured, in {kept}: run the command again to continue" in called.err
    assert kept.is_dir()
    again = command("calibrate", model, "--texts", texts)
    assert again.code == 0, again.err
    assert not kept.exists()
    resumed = load_calibration(tmp_path / "draft.kvcal.safetensors")
    command("calibrate", model, "--texts", texts, "--output", tmp_path / "whole.kvcal.safetensors")
    assert load_calibration(tmp_path / "whole.kvcal.safetensors") == resumed


def test_files_that_are_no_text_are_left_out(command: Command, model: Path, texts: Path) -> None:
    for index in range(7):
        (texts / f"{index}.bin").write_bytes(b"\xff\xfe")
    called = command("calibrate", model, "--texts", texts, "--budgets-only")
    assert called.code == 0
    assert called.err.count("is no UTF-8 text that can be read") == 5
    assert "left out: 2 more files" in called.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one model: mlx-kv calibrate MODEL"),
        (["draft", "--model", "draft"], "got two models: give one"),
        (["draft", "--output", "{tmp}/none/x"], "there is no folder"),
        (["draft", "--output", "{tmp}/texts/0.txt"], "exists and is not a calibration: give another name, or --force"),
        (["draft", "--texts", "{tmp}/none"], "does not exist"),
        (["recall", "--output", "{tmp}/x"], "this tokenizer cannot encode English text"),
    ],
)
def test_what_is_refused(command: Command, texts: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    called = command("calibrate", *(word.replace("{tmp}", str(tmp_path)) for word in arguments))
    assert called.code == 2
    assert words in called.err
    assert len(called.err.splitlines()) == 1


def test_a_directory_without_texts_is_refused(command: Command, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    called = command("calibrate", model, "--texts", tmp_path / "empty")
    assert called.code == 2
    assert "has no file with 64 tokens of UTF-8 text: give a directory of text files" in called.err
