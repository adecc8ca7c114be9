"""`mlx-kv eval`: what is asked lies where it should, the full cache is right, and numbers are what they are called."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny_models import make_model

from mlx_kv.cache.eviction.scores import score_names
from mlx_kv.evaluation import evaluate as evaluation
from mlx_kv.evaluation import recall_tasks, tasks
from mlx_kv.evaluation.evaluate import Context, count, evaluate, right_answers
from mlx_kv.evaluation.results import Measurement, Settings, summary
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.trimming import compact
from mlx_kv.plots.quality import Panel, quality_against_budget

SMALL = Settings(budgets=(64,), scores=("recent",), rows=4, context=256, seeds=1)
SHAPE = tasks.ContextShape(rows=4, context=256, sinks=4, keep_recent=16)


class Letters:
    """A tokenizer of text, a token a character."""

    bos_token_id = 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [2 + ord(letter) % 94 for letter in text]


def accuracy(model: nn.Module, trial: tasks.Trial, settings: Settings, score: str | None, budget: int | None) -> Any:
    caches = Context(model, trial.context, settings).caches(settings.policy(score, budget))
    compact(caches)
    return right_answers(model, trial, caches)


# --- what is asked ------------------------------------------------------------------------------------------------


def test_what_is_asked_for_lies_in_the_context_outside_of_what_is_always_kept() -> None:
    language = tasks.RecallLanguage()
    for pairs in (1, 4, 16):
        trial = tasks.recall(np.random.default_rng(0), language, SHAPE, pairs)
        assert trial.context.shape == (4, 256)
        assert trial.questions.shape == trial.answers.shape == (4, 3 * pairs)
        assert (trial.context[:, 0] == recall_tasks.END).all()
        protected = np.hstack([trial.context[:, 1:4], trial.context[:, -16:]])
        assert (protected >= recall_tasks.FIRST_FILLER).all()
        for context, questions in zip(trial.context, trial.questions, strict=True):
            text = "".join(f" {token} " for token in context)
            for _, key, value in questions.reshape(-1, 3):
                assert text.count(f" {recall_tasks.SET}  {key}  {value} ") == 1


def test_a_passkey_stands_at_its_depth() -> None:
    shape = tasks.ContextShape(rows=50, context=512, sinks=4, keep_recent=16)
    trial = tasks.passkey(np.random.default_rng(0), tasks.RecallLanguage(), shape)
    starts = (trial.context == recall_tasks.SET).argmax(axis=1)
    for start, part in zip(starts, trial.parts[:, 0], strict=True):
        assert abs(start - 4 - tasks.DEPTHS[part] * (512 - 4 - 16 - 3)) <= 512 // 64 + 1
    assert len(set(starts)) > len(tasks.DEPTHS)
    assert trial.names == ("depth 0", "depth 0.25", "depth 0.5", "depth 0.75", "depth 0.95")


def test_a_copy_has_an_answer_for_each_token_and_four_quarters() -> None:
    trial = tasks.copy(np.random.default_rng(0), tasks.RecallLanguage(), SHAPE)
    assert trial.answers.tolist() == [list(range(33))] * 4
    assert trial.parts.tolist() == [[0] * 8 + [1] * 8 + [2] * 8 + [3] * 8] * 4
    for context, questions in zip(trial.context, trial.questions, strict=True):
        start = context.tolist().index(recall_tasks.COPY) + 1
        assert context[start : start + 32].tolist() == questions[1:].tolist()


def test_the_recall_vocabulary_is_recognised_and_other_tokenizers_speak_english(
    recall_model: Any, reference: Any
) -> None:
    assert isinstance(tasks.find_language(recall_model[1]), tasks.RecallLanguage)
    language = tasks.find_language(reference[1])
    assert isinstance(language, tasks.TextLanguage)
    trial = tasks.recall(np.random.default_rng(0), language, SHAPE, 4)
    text = reference[1].decode(trial.context[0].tolist())
    asked = reference[1].decode(trial.questions[0].tolist())
    first = asked.splitlines()[1]
    assert first.startswith("The value of the ")
    assert f"{first}." in text


def test_a_context_that_is_too_short_says_so() -> None:
    with pytest.raises(ValueError, match="32 pairs of 96 tokens in all do not fit into a context of 64"):
        tasks.recall(np.random.default_rng(0), tasks.RecallLanguage(), replace(SHAPE, context=64), 32)
    with pytest.raises(ValueError, match="give one from 32 tokens up"):
        tasks.copy(np.random.default_rng(0), tasks.RecallLanguage(), replace(SHAPE, context=31))
    with pytest.raises(ValueError, match="the text has 5 tokens, but 6 are read"):
        tasks.windows(np.random.default_rng(0), range(5), 1, 6)


# --- what is right ------------------------------------------------------------------------------------------------


def test_an_answer_is_right_when_all_of_its_tokens_are() -> None:
    def model(tokens: mx.array, cache: Any) -> mx.array:
        return mx.eye(10)[mx.array([[1, 2, 3, 9, 5, 9]])]  # says this after each token

    trial = tasks.Trial(
        np.zeros((1, 1)),
        np.array([[7, 1, 2, 3, 4, 5]]),
        np.array([[0, 1, 1, 0, 2, 2]]),
        np.zeros((1, 2)),
    )
    assert right_answers(model, trial, []).tolist() == [[True, False]]  # type: ignore[arg-type]


def test_the_full_cache_recalls(recall_model: Any) -> None:
    trial = tasks.recall(np.random.default_rng(1), tasks.RecallLanguage(), replace(SHAPE, rows=16), 8)
    assert accuracy(recall_model[0], trial, SMALL, None, None).mean() >= 0.95


@pytest.mark.parametrize("bits", [None, 8])
def test_a_budget_of_the_context_is_the_full_cache_for_every_score(recall_model: Any, bits: int | None) -> None:
    model, settings = recall_model[0], replace(SMALL, bits=bits)
    trial = tasks.recall(np.random.default_rng(2), tasks.RecallLanguage(), SHAPE, 16)
    trial = replace(trial, questions=np.random.default_rng(3).integers(256, size=trial.questions.shape))
    logits = []
    for score in (None, *score_names()):
        caches = Context(model, trial.context, settings).caches(settings.policy(score, 256))
        compact(caches)
        logits.append(np.array(model(mx.array(trial.questions), cache=caches)))
    for other in logits[1:]:
        np.testing.assert_array_equal(other, logits[0])


def test_what_is_written_again_is_what_was_read(recall_model: Any) -> None:
    model, policy = recall_model[0], SMALL.policy("key_norm", 64)
    trial = tasks.recall(np.random.default_rng(2), tasks.RecallLanguage(), SHAPE, 4)
    replayed = Context(model, trial.context, SMALL).caches(policy)
    direct = make_prompt_cache(model, policy)
    model(mx.array(trial.context), cache=direct)
    compact(replayed)
    compact(direct)
    for a, b in zip(replayed, direct, strict=True):
        np.testing.assert_array_equal(np.array(a.positions), np.array(b.positions))
        np.testing.assert_array_equal(np.array(a.keys), np.array(b.keys))
    assert replayed[0].positions.shape[2] == 64


def test_recent_tokens_alone_recall_what_is_recent_and_nothing_else(recall_model: Any) -> None:
    shape = replace(SHAPE, rows=20)
    trial = tasks.passkey(np.random.default_rng(4), tasks.RecallLanguage(), shape)
    right = accuracy(recall_model[0], trial, SMALL, "recent", 64)
    assert right[trial.parts == 4].mean() == 1.0  # depth 0.95
    assert right[trial.parts < 3].mean() <= 0.2
    assert accuracy(recall_model[0], trial, SMALL, None, None).mean() == 1.0


def test_nats_of_a_uniform_guess_are_the_logarithm_of_the_vocabulary() -> None:
    logits = mx.zeros((2, 3, 16))
    assert evaluation.nats_per_token(logits, mx.zeros((2, 3), mx.int32)) == pytest.approx(np.log(16))
    sure = 100.0 * mx.eye(16)[mx.array([[1, 2]])]
    assert evaluation.nats_per_token(sure, mx.array([[1, 2]])) == pytest.approx(0, abs=1e-6)
    assert evaluation.nats_per_token(sure, mx.array([[1, 3]])) == pytest.approx(50)


def test_a_rolling_budget_of_everything_is_one_pass_and_a_small_one_evicts(recall_model: Any) -> None:
    model = recall_model[0]
    text = np.random.default_rng(5).integers(256, size=(2, 101))
    whole = evaluation.nats_per_token(model(mx.array(text[:, :-1])), mx.array(text[:, 1:]))
    rolling = [
        evaluation.rolling_perplexity(model, text, SMALL.policy(score, budget, evaluation.ROLLING_STEP))
        for score, budget in ((None, None), ("key_diff", 128), ("key_diff", 21))
    ]
    assert rolling[:2] == pytest.approx([whole, whole], rel=1e-5)
    assert abs(rolling[2] - whole) > 1e-4


# --- the whole ----------------------------------------------------------------------------------------------------


def test_a_summary_compares_with_the_full_cache_seed_by_seed() -> None:
    values = {("full", 0): 2.0, ("full", 1): 4.0, ("recent", 0): 2.5, ("recent", 1): 4.5}
    made = [
        Measurement("t", "nats per token", None if name == "full" else name, None if name == "full" else 8, seed, value)
        for (name, seed), value in values.items()
    ]
    full, recent = summary(made)
    assert (full.mean, full.difference) == (3.0, 0.0)
    assert full.deviation == pytest.approx(np.sqrt(2))
    assert (recent.mean, recent.difference, recent.difference_deviation) == (3.5, 0.5, 0.0)
    assert summary(made[:1])[0].deviation is None


TEXT = "some text, long enough " * 200


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1"])
def test_tasks_run_on_any_model(family: str) -> None:
    """Windows and recurrent layers too; what these models answer means nothing."""
    model = make_model(family)
    settings = Settings(budgets=(40,), scores=("recent",), rows=2, context=200, seeds=1, keep_recent=8)
    for task in ("passkey", "copy", "perplexity"):
        found = list(evaluate(model, Letters(), task, settings, TEXT))
        assert len(found) == count(task, settings)
        assert all(np.isfinite(each.value) for each in found)


def test_every_task_runs_on_a_model_of_text(reference: Any) -> None:
    settings = Settings(budgets=(500,), scores=("key_diff",), rows=1, context=650, seeds=2)
    for task in evaluation.TASKS:
        found = list(evaluate(*reference, task, settings, TEXT))
        assert len(found) == count(task, settings)
        assert {each.seed for each in found} == {0, 1}
        assert all(np.isfinite(each.value) for each in found)
        if task == "perplexity":
            assert all(each.difference != 0 for each in summary(found) if each.score)


def test_what_cannot_be_measured_is_refused_before_anything_is(recall_model: Any) -> None:
    long = replace(SMALL, context=1000)
    for task, settings, message in (
        ("sums", SMALL, "there is no task 'sums'"),
        ("recall", long, "1,096 tokens are read, but this model was made for 1,024"),
        ("perplexity", SMALL, "the text has 0 tokens, but 513 are read"),
        ("perplexity", long, "1,256 tokens are read, but"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(*recall_model, task, settings, 4 * TEXT if settings is long else "")
    with pytest.raises(ValueError, match="head dim 32"):
        evaluate(make_model("llama"), Letters(), "copy", replace(SMALL, bits=8))


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def call(command: Any) -> Any:
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
    assert len({len(line) for line in lines[2:10]}) == 1  # columns stand below each other
    assert "  passkey at 100, accuracy in %  depth 0  depth 0.25" in done.out
    assert "  copy at 100, accuracy in %  first quarter" in done.out
    assert "  attention of questions, rank correlation  " in done.out


def test_several_seeds_have_a_spread(call: Any) -> None:
    done = call(*FAST, "--tasks", "copy", "--seeds", "2")
    assert done.out.count(" ± ") >= 6


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
    "budget in words": (["--budgets", "64,many"], "'many' is no budget: give tokens from 1 up"),
    "budget 0": (["--budgets", "0"], "'0' is no budget"),
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


def test_help_has_examples_and_needs_no_mlx() -> None:
    code = "import sys; from mlx_kv.cli.main import main; sys.argv = ['mlx-kv', 'eval', '--help']; main()"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True)
    assert "mlx-kv eval --tasks copy" in done.stdout
    assert "mlx.core" not in done.stderr


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
