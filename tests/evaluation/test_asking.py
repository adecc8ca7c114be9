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

from mlx_kv.cache.eviction.scores import score_names
from mlx_kv.evaluation import asking, reading
from mlx_kv.evaluation.asking import Asked, Questions, answers_of, asked_of, filled, known_anyway, right_of
from mlx_kv.evaluation.contexts import Context
from mlx_kv.evaluation.evaluate import evaluate, tokens_read
from mlx_kv.evaluation.questions.case import Room, Talk
from mlx_kv.evaluation.questions.tasks import QUESTIONS, case_of
from mlx_kv.evaluation.questions.texts import python_texts
from mlx_kv.evaluation.results import Settings
from mlx_kv.mlxlm.traverse import compact

SETTINGS = Settings(budgets=(60,), scores=("key_norm",), rows=1, context=600, seeds=1, seen=(False, True))
CASE = case_of("needles", Talk(Characters("there is one")), python_texts(), Room(600, 16), 0, 0)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return make_model("llama")


def test_questions_that_are_seen_come_before_the_answers_that_are_not() -> None:
    after, before = asked_of(CASE, seen=False), asked_of(CASE, seen=True)
    assert not len(after.before)
    assert after.tokens.tolist() == CASE.apart.tokens
    assert [*before.before, *before.tokens] == CASE.together.tokens
    assert max(after.answers) == max(before.answers) == 4
    assert before.answers[0] == 0


def test_an_answer_is_right_when_all_of_its_tokens_are() -> None:
    def model(tokens: mx.array, cache: Any) -> mx.array:
        return mx.eye(10)[mx.array([[1, 2, 3, 9, 5, 9]])]  # says this after each token

    asked = Asked(np.array([]), np.array([7, 1, 2, 3, 4, 5]), np.array([0, 1, 1, 0, 2, 2]))
    assert right_of(model, asked, []).tolist() == [True, False]  # type: ignore[arg-type]


@pytest.mark.parametrize("seen", [False, True])
def test_a_budget_of_everything_answers_as_the_full_cache_by_every_score(model: Any, seen: bool) -> None:
    wide = replace(SETTINGS, budgets=(1000,), scores=tuple(score_names()))
    full, *others = answers_of(model, CASE, wide.policies(), wide, seen)
    assert len(others) == len(score_names())
    assert full.counted > 0
    assert {(each.right, each.counted) for each in others} == {(full.right, full.counted)}


def test_what_is_compressed_holds_the_question_only_where_it_is_seen(model: Any, monkeypatch: Any) -> None:
    held: list[set[int]] = []

    def watched(caches: Any) -> None:
        held.append({cache.offset for cache in caches})
        compact(caches)
        assert all(cache.positions.shape[2] == 60 for cache in caches if cache.evictor is not None)

    monkeypatch.setattr(asking, "compact", watched)
    list(answers_of(model, CASE, SETTINGS.policies()[1:], SETTINGS, seen=False))
    assert held == [{600}]
    list(answers_of(model, CASE, SETTINGS.policies()[1:], SETTINGS, seen=True))
    assert held[1:] == [{600 + CASE.together.asked}]


def test_a_rolling_budget_compacts_while_it_reads(model: Any) -> None:
    context = Context(model, np.array(CASE.context)[None], SETTINGS)
    rolling = replace(SETTINGS, rolling=True)
    whole, rolled = (filled(context, "key_norm", 60, settings) for settings in (SETTINGS, rolling))
    assert {cache.size() for cache in whole} == {600}
    assert {cache.offset for cache in rolled} == {600}
    assert all(60 <= cache.size() <= 60 + 2 * asking.ROLLING_STEP for cache in rolled)


def test_answers_that_are_right_without_the_context_do_not_count(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(asking, "known_anyway", lambda *_: np.array([True, False, True, False]))
    (each,) = answers_of(model, CASE, [(None, None)], SETTINGS, seen=False)
    assert each.counted == 2
    asked = asked_of(CASE, seen=False)
    monkeypatch.undo()
    alone = known_anyway(model, CASE, asked)
    logits = model(mx.array([[*CASE.alone, *asked.tokens.tolist()]]))[:, len(CASE.alone) :]
    by_hand = right_of(lambda tokens, cache: logits, asked, [])  # type: ignore[arg-type,return-value]
    assert alone.tolist() == by_hand.tolist()


@pytest.mark.parametrize("task", QUESTIONS)
def test_every_task_is_measured(task: str, model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(reading, "context_length", lambda model: None)
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
    assert Questions(Characters(), "needle", SETTINGS, python_texts()).longest > 600
