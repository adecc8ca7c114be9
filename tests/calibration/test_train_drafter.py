"""Training of a head that drafts: it learns, it goes on where it was, and it says what is wrong with its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click.testing
import mlx.core as mx
import pytest
from draft_heads import FEW
from mlx.utils import tree_flatten

import mlx_kv
from mlx_kv.bundled import model_path
from mlx_kv.calibration import drafter
from mlx_kv.calibration.drafter import STATE, is_training, train_drafter
from mlx_kv.calibration.requests import TrainingTexts
from mlx_kv.cli.main import command
from mlx_kv.mlxlm.head_files import find_draft_head, head_file


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    return mlx_kv.load(model_path("reference"))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FEW.items():
        monkeypatch.setattr(drafter, name, value)


def weights(head: Any) -> dict[str, Any]:
    return dict(tree_flatten(head.parameters()))


def test_a_head_is_trained_and_drafts(reference: tuple[Any, Any]) -> None:
    model, tokenizer = reference
    seen: list[tuple[int, int]] = []
    head = train_drafter(
        model, tokenizer, tokens=600, vocabulary=500, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert seen[-1] == (600, 600)
    curve = head.details["acceptance"]
    assert curve[-1][0] == head.details["tokens"] >= 600
    assert all(len(rates) == 3 and 0 <= min(rates) <= max(rates) <= 1 for _, rates in curve)
    assert curve[-1][1][0] > 0.05  # the linear map alone is right of a fifth
    assert head.ids is not None
    assert head.ids.size == 500
    prompt = tokenizer.encode("import os\nimport sys\n\n\ndef main(")
    wanted = [r.token for r in mlx_kv.stream_generate(model, tokenizer, prompt, max_tokens=24)]
    counts = mlx_kv.SpeculationStatistics()
    options: dict[str, Any] = {"statistics": counts, "draft_length": "fixed"}
    told = mlx_kv.speculative_generate(model, head, tokenizer, prompt, 24, **options)
    assert [r.token for r in told] == wanted
    assert (counts.drafter, counts.drafted > 0) == ("mtp", True)


@pytest.mark.slow
def test_an_interrupted_training_goes_on(reference: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = reference
    how: dict[str, Any] = {"tokens": 900, "vocabulary": 500}
    whole = train_drafter(model, tokenizer, **how)
    folder, stops = tmp_path / "part", 2

    def interrupt(done: int, total: int) -> None:
        nonlocal stops
        if stops and (folder / STATE).exists():
            stops -= 1
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train_drafter(model, tokenizer, resume=folder, progress=interrupt, **how)
        assert is_training(folder / STATE)
    (folder / "notes.txt").write_text("mine")
    head = train_drafter(model, tokenizer, resume=folder, progress=interrupt, **how)
    for name, array in weights(whole).items():
        assert mx.allclose(array, weights(head)[name], atol=1e-5).item(), name
    assert head.details == whole.details
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]  # what is not its own stays


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": ["too short"]}, "text 0 has .* tokens, of at least 64"),
        ({"tokens": 0}, "tokens is 0"),
        ({"vocabulary": -1}, "vocabulary is -1"),
        ({"resume": "/nowhere/at/all"}, "there is no folder /nowhere/at"),
    ],
)
def test_what_cannot_be_trained_is_refused(reference: tuple[Any, Any], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_drafter(*reference, **options)


def test_a_file_of_others_is_left_alone(reference: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / STATE).write_text("mine")
    with pytest.raises(ValueError, match="exists and is not a file of a training in progress"):
        train_drafter(*reference, resume=tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is not a directory"):
        train_drafter(*reference, resume=tmp_path / "file")
    assert (tmp_path / STATE).read_text() == (tmp_path / "file").read_text() == "mine"


def test_texts_and_requests_are_drawn_by_number(reference: tuple[Any, Any]) -> None:
    texts, again = TrainingTexts(reference[1]), TrainingTexts(reference[1])
    assert [texts.text(n, 100) for n in range(3)] == [again.text(n, 100) for n in range(3)]
    assert [texts.request(n) for n in range(-3, 3)] == [again.request(n) for n in range(-3, 3)]
    assert len({tuple(texts.request(n)) for n in range(20)}) > 15
    assert all(64 <= len(texts.text(n, 100)) <= 100 for n in range(6))


@pytest.mark.slow
def test_the_command_writes_a_file_that_others_find(reference: tuple[Any, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in Path(model_path("reference")).iterdir():
        (folder / path.name).symlink_to(path)
    run = click.testing.CliRunner().invoke
    done = run(command, ["train-drafter", str(folder), "--tokens", "600", "--vocabulary", "500", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["file"] == str(head_file(folder))
    assert told["tokens"] >= 600
    assert find_draft_head(folder, reference[0]) is not None
    for drafts, name in (("mtp", "mtp"), ("auto", "mtp and suffix")):
        options = ["--model", str(folder), "--prompt", "import os", "--max-tokens", "20", "--json", "--draft", drafts]
        answer = run(command, ["generate", *options])
        assert answer.exit_code == 0, answer.output
        assert json.loads(answer.stdout)["drafter"] == name
    refused = run(command, ["train-drafter", "reference"])
    assert "give --output" in refused.output
    (tmp_path / "x.txt").write_text("mine")
    kept = run(command, ["train-drafter", str(folder), "--output", str(tmp_path / "x.txt")])
    assert "is not a draft head" in kept.output
