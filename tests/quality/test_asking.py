"""Cases under policies: read once, the same as if each policy had read them, and compressed when they should be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from characters import Characters
from tiny_models import make_model

from benchmarks.eval import measure as evaluation
from benchmarks.eval.contexts import Context
from benchmarks.eval.measure import answers_of, evaluate, fill, right_answers, right_without_context, tokens_read
from benchmarks.eval.questions import QUESTIONS, Room, Talk, case_of, python_texts, replies_after_all, trial_of
from benchmarks.eval.results import Settings
from mlx_kv.cache.eviction.scores import score_names
from mlx_kv.calibration import loss
from mlx_kv.mlxlm.traverse import compact

SETTINGS = Settings(budgets=(60,), scores=("key_norm",), rows=1, context=600, seeds=1, seen=(False, True))
TALK = Talk(Characters("there is one"))
CASE = case_of("needles", TALK, python_texts(), Room(600, 16), 0, 0)
UNSEEN, SEEN = trial_of(TALK, CASE, seen=False), trial_of(TALK, CASE, seen=True)
QUESTIONS_SEEN, REPLIES = replies_after_all(TALK, CASE.asks)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return make_model("llama")


def test_questions_that_are_seen_come_before_the_answers_that_are_not() -> None:
    after, before = UNSEEN, SEEN
    assert after.context.tolist() == [CASE.context]
    assert after.questions.tolist() == [CASE.turns.tokens]
    assert after.alone is not None
    assert after.alone.tolist() == [CASE.instruction]
    assert np.hstack([before.context, before.questions]).tolist() == [CASE.context + QUESTIONS_SEEN + REPLIES.tokens]
    assert before.questions.shape == before.answers.shape
    assert before.context.shape == (1, 600 + len(QUESTIONS_SEEN))
    assert before.alone is not None
    assert before.alone.tolist() == [CASE.instruction + QUESTIONS_SEEN]
    assert after.answers.max() == before.answers.max() == 4
    assert before.answers[0, 0] == 0


def test_every_answer_of_made_up_words_counts(model: Any) -> None:
    (each,) = answers_of(model, replace(UNSEEN, alone=None), [(None, None)], SETTINGS)
    assert each.counts.shape == each.right.shape == (1, 4)
    assert each.counts.all()


@pytest.mark.parametrize("seen", [False, True])
def test_a_budget_of_everything_answers_as_the_full_cache_by_every_score(model: Any, seen: bool) -> None:
    wide = replace(SETTINGS, budgets=(1000,), scores=tuple(score_names()))
    full, *others = answers_of(model, trial_of(TALK, CASE, seen), wide.policies(), wide)
    assert len(others) == len(score_names())
    assert full.counts.any()
    for each in others:
        np.testing.assert_array_equal(each.right, full.right)
        np.testing.assert_array_equal(each.counts, full.counts)


def test_what_is_compressed_holds_the_question_only_where_it_is_seen(model: Any, monkeypatch: Any) -> None:
    held: list[set[int]] = []

    def watched(caches: Any) -> None:
        held.append({cache.offset for cache in caches})
        compact(caches)
        assert all(cache.positions.shape[2] == 60 for cache in caches if cache.evictor is not None)

    monkeypatch.setattr(evaluation, "compact", watched)
    list(answers_of(model, UNSEEN, SETTINGS.policies()[1:], SETTINGS))
    assert held == [{600}]
    list(answers_of(model, SEEN, SETTINGS.policies()[1:], SETTINGS))
    assert held[1:] == [{600 + len(QUESTIONS_SEEN)}]


def test_a_rolling_budget_compacts_while_it_reads(model: Any) -> None:
    context = Context(model, np.array(CASE.context)[None], SETTINGS)
    rolling = replace(SETTINGS, rolling=True)
    whole, rolled = (fill(context, "key_norm", 60, settings) for settings in (SETTINGS, rolling))
    assert {cache.size() for cache in whole} == {600}
    assert {cache.offset for cache in rolled} == {600}
    assert all(60 <= cache.size() <= 60 + 2 * evaluation.ROLLING_STEP for cache in rolled)


def test_answers_that_are_right_without_the_context_do_not_count(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(evaluation, "right_without_context", lambda *_: np.array([[True, False, True, False]]))
    (each,) = answers_of(model, UNSEEN, [(None, None)], SETTINGS)
    assert each.counts.tolist() == [[False, True, False, True]]
    monkeypatch.undo()
    alone = right_without_context(model, UNSEEN)
    logits = model(mx.array([CASE.instruction + CASE.turns.tokens]))[:, len(CASE.instruction) :]
    by_hand = right_answers(lambda tokens, cache: logits, UNSEEN, [])  # type: ignore[arg-type,return-value]
    assert alone.tolist() == by_hand.tolist()


def test_accuracy_is_the_share_of_the_answers_that_count(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(loss, "context_length", lambda model: None)
    monkeypatch.setattr(evaluation, "right_answers", lambda *_: np.array([[False, True, False, True]]))
    for known, value in (([True, False, True, False], 1.0), ([False] * 4, 0.5), ([True, False, False, True], 0.5)):
        monkeypatch.setattr(evaluation, "right_without_context", lambda *_, known=known: np.array([known]))
        found = list(evaluate(model, Characters(), "needles", replace(SETTINGS, rows=2)))
        assert {(each.task, each.score) for each in found} == {
            (task, score) for task in ("needles", "needles, question seen") for score in (None, "key_norm")
        }
        assert {each.value for each in found} == {value}
    monkeypatch.setattr(evaluation, "right_without_context", lambda *_: np.array([[True] * 4]))
    with pytest.raises(ValueError, match="no answer of the task needles needs its context: ask for more rows"):
        list(evaluate(model, Characters(), "needles", SETTINGS))


@pytest.mark.parametrize("task", QUESTIONS)
def test_every_task_is_measured(task: str, model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(loss, "context_length", lambda model: None)
    settings = replace(SETTINGS, context=1000, seeds=2)
    found = list(evaluate(model, Characters(), task, settings))
    assert len(found) == len(tokens_read(Characters(), task, settings)) == 2 * 2 * 2
    assert all(0 <= each.value <= 1 for each in found)
    assert {each.task for each in found} == {task, f"{task}, question seen"}


def test_what_speaks_no_english_is_refused(recall_model: Any) -> None:
    with pytest.raises(ValueError, match="the task chat asks in English, which the recall model does not know"):
        evaluate(*recall_model, "chat", SETTINGS)
    with pytest.raises(ValueError, match="tokens are read, but this model was made for"):
        evaluate(make_model("llama"), Characters(), "chat", replace(SETTINGS, context=10**5))
    first, *_ = tokens_read(Characters(), "needle", SETTINGS)
    assert first > 600
