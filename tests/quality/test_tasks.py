"""What is asked lies in a context where it should, and never where every policy keeps it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.eval import tasks

SHAPE = tasks.ContextShape(rows=4, context=256, sinks=4, keep_recent=16)


def test_what_is_asked_for_lies_in_the_context_outside_of_what_is_always_kept() -> None:
    language = tasks.RecallLanguage()
    for pairs in (1, 4, 16):
        trial = tasks.recall(np.random.default_rng(0), language, SHAPE, pairs)
        assert trial.context.shape == (4, 256)
        assert trial.questions.shape == trial.answers.shape == (4, 3 * pairs)
        assert (trial.context[:, 0] == tasks.END).all()
        protected = np.hstack([trial.context[:, 1:4], trial.context[:, -16:]])
        assert (protected >= tasks.FIRST_FILLER).all()
        for context, questions in zip(trial.context, trial.questions, strict=True):
            text = "".join(f" {token} " for token in context)
            for _, key, value in questions.reshape(-1, 3):
                assert text.count(f" {tasks.SET}  {key}  {value} ") == 1


def test_a_passkey_stands_at_its_depth() -> None:
    shape = tasks.ContextShape(rows=50, context=512, sinks=4, keep_recent=16)
    trial = tasks.passkey(np.random.default_rng(0), tasks.RecallLanguage(), shape)
    starts = (trial.context == tasks.SET).argmax(axis=1)
    assert trial.parts is not None
    for start, part in zip(starts, trial.parts[:, 0], strict=True):
        assert abs(start - 4 - tasks.DEPTHS[part] * (512 - 4 - 16 - 3)) <= 512 // 64 + 1
    assert len(set(starts)) > len(tasks.DEPTHS)
    assert trial.names == ("depth 0", "depth 0.25", "depth 0.5", "depth 0.75", "depth 0.95")


def test_a_copy_has_an_answer_for_each_token_and_four_quarters() -> None:
    trial = tasks.copy(np.random.default_rng(0), tasks.RecallLanguage(), SHAPE)
    assert trial.answers.tolist() == [list(range(33))] * 4
    assert trial.parts is not None
    assert trial.parts.tolist() == [[0] * 8 + [1] * 8 + [2] * 8 + [3] * 8] * 4
    for context, questions in zip(trial.context, trial.questions, strict=True):
        start = context.tolist().index(tasks.COPY) + 1
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
