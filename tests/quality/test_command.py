"""`python -m benchmarks.eval`: tables, JSON and a figure; bad input is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.eval.__main__ import evaluate_command
from benchmarks.eval.plots import Panel, columns_of, draw_inspection, quality_against_budget
from mlx_kv.cli import main as package
from mlx_kv.cli import output
from mlx_kv.cli.output import Progress


@pytest.fixture
def call(command: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(output, "LINE_SECONDS", 3600.0)  # however slow the machine is
    monkeypatch.setitem(package.command.commands, "eval", evaluate_command)
    return lambda *arguments: command("eval", *arguments)


FAST = ("--rows", "5", "--seeds", "1", "--context", "200", "--budgets", "100,32", "--scores", "key_diff,recent")


def test_a_table_and_a_figure(call: Any, tmp_path: Path) -> None:
    done = call(*FAST, "--tasks", "passkey,copy,correlation", "--plot", tmp_path / "a.png")
    assert done.code == 0
    assert done.err == f"mlx-kv: wrote {tmp_path / 'a.png'}\n"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    lines = done.out.splitlines()
    assert lines[2].split() == ["passkey,", "accuracy", "in", "%", "32", "100"]
    assert lines[3].split() == ["full", "cache", "100.0", "100.0"]
    assert [line.split()[0] for line in lines[4:6]] == ["key_diff", "recent"]
    copied = lines.index(next(line for line in lines if line.startswith("  copy, accuracy")))
    assert len({len(line) for line in lines[2:6] + lines[copied : copied + 4]}) == 1  # tables stand below each other
    assert "  passkey at 100, accuracy in %  depth 0  depth 0.25" in done.out
    assert "  copy at 100, accuracy in %  first quarter" in done.out
    assert "  attention of questions, rank correlation  " in done.out


def test_several_seeds_have_a_spread(call: Any) -> None:
    done = call(*FAST, "--tasks", "copy", "--seeds", "2")
    assert done.out.count(" ± ") >= 6


@pytest.mark.slow
def test_json(call: Any) -> None:
    done = call(*FAST, "--tasks", "recall,perplexity", "--model", "recall", "--json")
    assert (done.code, done.err) == (0, "")
    answer = json.loads(done.out)
    assert answer["settings"]["budgets"] == [32, 100]
    assert len(answer["results"]) == 5 * 5
    full, *rest = (each for each in answer["results"] if each["task"] == "recall 4")
    assert (full["score"], full["budget"], full["unit"]) == (None, None, "accuracy")
    assert full["mean"] >= 0.95
    assert [(each["score"], each["budget"]) for each in rest[:2]] == [("key_diff", 32), ("key_diff", 100)]
    assert max(each["mean"] for each in rest if each["score"] == "recent" and each["budget"] == 32) <= 0.5
    assert {each["unit"] for each in answer["results"] if each["task"] == "perplexity, one-shot"} == {"nats per token"}


BAD: dict[str, tuple[list[str], str]] = {
    "score": (["--scores", "key_dif"], "there is no score 'key_dif': choose one of"),
    "task": (["--tasks", "passkey,sums"], "there is no task 'sums': choose of passkey, recall"),
    "budget in words": (["--budgets", "64,many"], "'many' is not a budget: give tokens from 1 up"),
    "budget 0": (["--budgets", "0"], "'0' is not a budget"),
    "small budget": (
        ["--budgets", "20"],
        "budget is 20, but 4 sinks and --keep-recent 16 are kept: give a budget from 21",
    ),
    "context": (["--context", "20"], "--context 20, but 4 sinks and --keep-recent 16 are kept anyway"),
    "long context": (
        ["--context", "5000", "--tasks", "passkey"],
        "5,003 tokens are read, but this model was made for 1,024",
    ),
    "short context": (["--context", "64", "--tasks", "recall"], "16 pairs of 48 tokens in all do not fit"),
    "rows": (["--rows", "0"], "--rows 0: give a number from 1 up"),
    "seeds": (["--seeds", "0"], "--seeds 0: give a number from 1 up"),
    "bits": (["--kv-bits", "7"], "--kv-bits 7: "),
    "share": (["--share", "all"], "'all' is not one of"),
    "model": (["--model", "/nowhere"], "/nowhere is neither a directory nor a hub id"),
    "no text": (["--text", "/nowhere.txt"], "'/nowhere.txt' does not exist"),
    "text for nothing": (["--text", "{text}", "--tasks", "copy"], "--text is for the task perplexity"),
    "short text": (["--text", "{text}", "--tasks", "perplexity"], "but 769 are read: give a longer text"),
    "binary text": (["--text", "{binary}", "--tasks", "perplexity"], "is not UTF-8 text"),
    "nothing to draw": (["--plot", "a.png", "--tasks", "correlation"], "--plot draws against budgets"),
    "kind of figure": (["--plot", "a.xyz"], "give a file that ends in .png, .svg, .pdf"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case: str, call: Any, tmp_path: Path) -> None:
    places = {"text": tmp_path / "text", "binary": tmp_path / "binary"}
    places["text"].write_bytes(b"short")
    places["binary"].write_bytes(b"\xff\xfe\x00")
    arguments, message = BAD[case]
    done = call(*(argument.format(**places) for argument in arguments))
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.startswith("mlx-kv: error: ")
    assert done.err.count("\n") == 1


def test_a_column_of_the_figure_is_the_mean_of_its_positions() -> None:
    assert columns_of([0.0, 1.0, 1.0, 1.0, 0.5], 2) == pytest.approx([2 / 3, 0.75])
    assert columns_of([0.25, 0.75], 2) == pytest.approx([0.25, 0.75])


def test_a_figure_has_a_panel_for_each_task_and_one_legend() -> None:
    points = {"recent": [(64, 0.5, 0.1), (128, 0.75, 0.0)], "random": [(64, 0.25, 0.0), (128, 0.5, 0.0)]}
    panels = [Panel("copy", "accuracy, %", 1.0, points), Panel("text", "nats", 0.0, points, is_share=False)]
    for count_ in (1, 2, 5):
        figure = quality_against_budget("a model", 256, (panels * 3)[:count_])
        shown = [axes for axes in figure.axes if axes.axison]
        assert len(shown) == count_
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
        assert [text.get_text() for text in legends[0].get_texts()] == ["full cache", "recent", "random"]
        assert len(legends) == 1
        assert shown[0].get_title(loc="left") == "copy"
        assert shown[0].lines[0].get_ydata()[0] == 100


def test_as_many_scores_as_there_are_can_be_told_apart() -> None:
    points = {f"score {number}": [(64, 0.5, 0.1), (128, 0.75, 0.0)] for number in range(13)}
    figure = quality_against_budget("a model", 256, [Panel("copy", "accuracy, %", 1.0, points)])
    drawn = [line for line in figure.axes[0].lines if line.get_marker() in set("osD^vPX")]
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 13
    assert all(58 < line.get_xdata()[0] < 70 for line in drawn)  # side by side, and still where they belong


def test_questions_are_for_models_that_speak_english_and_layers_for_shares_of_their_own(call: Any) -> None:
    done = call("--tasks", "chat", "--context", "600", "--question", "seen")
    assert "asks in English, which the recall model does not know: give a --model" in done.err


def test_each_table_is_shown_when_its_task_is_done_and_an_interrupt_keeps_what_was_measured(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Progress.step

    def step(self: Progress, what: str) -> None:
        known(self, what)
        if self.done == 8:  # five of the first task, three of the second
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "step", step)
    done = call(*FAST, "--tasks", "passkey,copy,perplexity")
    assert done.code == 130
    assert done.err.strip() == "mlx-kv: interrupted"
    first, second = done.out.split("\n  copy, accuracy in %")
    assert "  passkey at 100, accuracy in %" in first
    rows = [line.split() for line in second.splitlines()[1:4]]
    assert [row[:1] for row in rows] == [["full"], ["key_diff"], []]
    assert "-" not in rows[1]
    assert "Interrupted: 8 of 20 runs were measured." in second
    assert "perplexity, rolling" not in done.out
    told = json.loads(call(*FAST, "--tasks", "passkey,copy", "--json").out)
    assert told["complete"] is False
    assert len(told["results"]) == 8


def test_where_there_is_no_terminal_a_line_says_now_and_then_how_much_is_left(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LINE_SECONDS", 0.0)
    said = call(*FAST, "--tasks", "copy").err.splitlines()
    assert len(said) == 4  # of five runs; with the last, all is said
    assert said[1].startswith("mlx-kv: copy, 2 of 5 runs, about ")
    assert said[1].endswith(" s left")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "about 0 s"), (89, "about 89 s"), (90, "about 2 min"), (7000, "about 1.9 h")]
)
def test_time_is_told_in_round_numbers(seconds: float, words: str) -> None:
    assert output.duration(seconds) == words


def test_it_is_a_module_of_a_checkout() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "benchmarks.eval", "-h"], cwd=root, capture_output=True, text=True)
    assert "python -m benchmarks.eval --tasks copy" in done.stdout


@pytest.mark.parametrize("options", [("--kv-share", "head"), ("--scores", "key_diff,recent", "--attention")])
def test_what_inspect_wrote_is_drawn(options: tuple[str, ...], command: Any, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    prompt = ("--prompt", "import os\n" * 40, "--kv-budget", "40", "--kv-keep-recent", "8", "--kv-margin", "0")
    assert command("inspect", *prompt, *options, "--json", file).code == 0
    figure = draw_inspection(json.loads(file.read_text()))
    title = figure.axes[0].get_title(loc="left")
    assert title.startswith("Tokens held by each head" if "--kv-share" in options else "Tokens kept: reference")
