"""Measurements: the full cache is right, a budget loses what it evicts, and numbers are what they are called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny_models import make_model

from benchmarks.eval import measure as evaluation
from benchmarks.eval import tasks
from benchmarks.eval.__main__ import describe_settings
from benchmarks.eval.contexts import Context
from benchmarks.eval.measure import evaluate, right_answers, tokens_read
from benchmarks.eval.results import Measurement, Settings, summary
from mlx_kv.cache.eviction.scores import score_names
from mlx_kv.calibration.loss import read_losses
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.traverse import compact

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


def test_an_answer_is_right_when_all_of_its_tokens_are() -> None:
    def model(tokens: mx.array, cache: Any) -> mx.array:
        return mx.eye(10)[mx.array([[1, 2, 3, 9, 5, 9]])]  # says this after each token

    trial = tasks.Trial(
        np.zeros((1, 1)),
        np.array([[7, 1, 2, 3, 4, 5]]),
        np.array([[0, 1, 1, 0, 2, 2]]),
    )
    assert right_answers(model, trial, []).tolist() == [[True, False]]  # type: ignore[arg-type]


def test_the_full_cache_recalls(recall_model: Any) -> None:
    trial = tasks.recall(np.random.default_rng(1), tasks.RecallLanguage(), replace(SHAPE, rows=16), 8)
    assert accuracy(recall_model[0], trial, SMALL, None, None).mean() >= 0.95


def test_policies_store_as_settings_say() -> None:
    settings = replace(SMALL, bits=(8, 4), codec="rotated")
    for policy in (settings.policy(None, None), settings.policy("recent", 64)):
        assert (policy.bits, policy.codec) == ((8, 4), "rotated")
    assert describe_settings(settings).endswith(", share=layers, 8,4 bits, codec=rotated")
    assert describe_settings(SMALL).endswith(", share=layers")


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.slow
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
    assert trial.parts is not None
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
    rolling = []
    for score, budget in ((None, None), ("key_diff", 128), ("key_diff", 21)):
        caches = make_prompt_cache(model, SMALL.policy(score, budget, evaluation.ROLLING_STEP))
        losses = read_losses(model, caches, mx.array(text), evaluation.ROLLING_STEP)
        assert losses.shape == (2, 100)
        rolling.append(losses.mean())
    assert rolling[:2] == pytest.approx([whole, whole], rel=1e-5)
    assert abs(rolling[2] - whole) > 1e-4


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
        assert len(found) == len(tokens_read(Letters(), task, settings))
        assert all(np.isfinite(each.value) for each in found)


@pytest.mark.slow
def test_every_task_runs_on_a_model_of_text(reference: Any) -> None:
    settings = Settings(budgets=(500,), scores=("key_diff",), rows=1, context=650, seeds=2)
    for task in evaluation.TASKS:
        found = list(evaluate(*reference, task, settings, TEXT))
        assert len(found) == len(tokens_read(reference[1], task, settings))
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
