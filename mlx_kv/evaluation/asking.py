"""What a language model still answers of a case when its cache keeps only part of the context.

Decides when a context is compressed, before its questions are seen or after, and which answers count: those that the
model does not give without the context, since they show nothing about a cache. Knows nothing about what is asked, nor
what is said of several cases.
B rows (one here), Q tokens of questions and answers, A answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.evaluation.contexts import Context, read
from mlx_kv.evaluation.questions.case import Case, Room, Talk
from mlx_kv.evaluation.questions.tasks import case_of
from mlx_kv.evaluation.questions.texts import Texts
from mlx_kv.evaluation.results import Measurement, Settings
from mlx_kv.evaluation.tasks import RecallLanguage, find_language
from mlx_kv.generation.prefill import read_chunk
from mlx_kv.generation.rereading import NOTHING_ASKED, Instructions
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.traverse import attention_caches, compact

ROLLING_STEP = 32  # and where a budget rolls: a cache then holds it, up to so many more, and those just read
Policy = tuple[str | None, int | None]  # a score and a budget; the full cache has neither


@dataclass(frozen=True)
class Asked:
    """What is read after a context was compressed.

    Attributes:
        before: (P,) tokens that were read before that: a question, where it is seen.
        tokens, answers: (Q,) the rest, and which answer each token belongs to, from 1 up; 0 is none.
    """

    before: np.ndarray
    tokens: np.ndarray
    answers: np.ndarray


@dataclass(frozen=True)
class Answered:
    """What came of a case under one policy.

    Attributes:
        right, counted: answers that were right, of so many that count.
        seconds: that it took to fill the caches, to compress them, and to ask.
        slots: of the longest head of a layer after that, in the mean over layers: what memory is allocated for.
    """

    score: str | None
    budget: int | None
    right: int
    counted: int
    seconds: tuple[float, float, float]
    slots: float


def asked_of(case: Case, seen: bool) -> Asked:
    """Questions one by one, after compression; or where they are seen all of them before it, and then the replies."""
    turns = case.together if seen else case.apart
    tokens, answers, before = np.array(turns.tokens), np.array(turns.answers), turns.asked if seen else 0
    return Asked(tokens[:before], tokens[before:], answers[before:])


def right_of(model: nn.Module, asked: Asked, caches: list[Any]) -> np.ndarray:
    """(A,) bool: whether each answer is what the model would say, every token of it, those before it given."""
    logits = model(mx.array(asked.tokens[None]), cache=caches)  # (1, Q, V)
    right = np.array(mx.argmax(logits[0, :-1], axis=-1)) == asked.tokens[1:]
    numbers = asked.answers[1:]  # the first token is given
    return np.array([right[numbers == n].all() for n in range(1, int(asked.answers.max(initial=0)) + 1)], bool)


def known_anyway(model: nn.Module, case: Case, asked: Asked) -> np.ndarray:
    """(A,) bool: which answers are right without the context, after nothing but its instruction."""
    caches = make_prompt_cache(model)
    read(model, mx.array([[*case.alone, *asked.before.tolist()]]), caches)
    return right_of(model, asked, caches)


def filled(context: Context, score: str | None, budget: int | None, settings: Settings) -> list[Any]:
    """Caches of a context under a policy: not compressed yet, or if the budget rolls, read step by step."""
    if not settings.rolling or score is None:
        return context.caches(settings.policy(score, budget))
    caches = make_prompt_cache(context.model, settings.policy(score, budget, margin=ROLLING_STEP))
    for first in range(0, context.tokens.shape[1], ROLLING_STEP):
        read_chunk(context.model, caches, context.tokens[:, first : first + ROLLING_STEP])
    return caches


def answers_of(
    model: nn.Module,
    case: Case,
    policies: Iterable[Policy],
    settings: Settings,
    seen: bool,
    instructions: Instructions = NOTHING_ASKED,
) -> Iterator[Answered]:
    """One case under each policy; the context is read once for all of them, and the questions too if they are seen.

    Args:
        seen: whether the questions are read before the context is compressed.
        instructions: for scores that want the context to be read twice.
    """
    asked = asked_of(case, seen)
    context = Context(model, np.array([[*case.context, *asked.before.tolist()]]), settings, instructions)
    counts = ~known_anyway(model, case, asked)
    for score, budget in policies:
        times = [time.perf_counter()]
        caches = filled(context, score, budget, settings)
        mx.eval([cache.state for cache in caches])
        times.append(time.perf_counter())
        compact(caches)
        mx.eval([cache.state for cache in caches])
        times.append(time.perf_counter())
        ends = [row.end for cache in attention_caches(caches) for row in cache.view.rows]
        right = right_of(model, asked, caches) & counts
        times.append(time.perf_counter())
        mean = sum(ends) / max(1, len(ends))
        filling, compacting, answering = np.diff(times).tolist()
        yield Answered(score, budget, int(right.sum()), int(counts.sum()), (filling, compacting, answering), mean)


class Questions:
    """A task that puts questions to a language model.

    Raises:
        ValueError: a context that is too short for the task; a tokenizer that knows no English.
    """

    def __init__(self, tokenizer: Any, task: str, settings: Settings, texts: Texts) -> None:
        self.task, self.settings = task, settings
        self._tokenizer, self._talk, self._texts = tokenizer, Talk(tokenizer), texts
        self._room = Room(settings.context, settings.keep_recent)
        if isinstance(find_language(tokenizer), RecallLanguage):
            raise ValueError(f"the task {task} asks in English, which the recall model does not know: give a --model")
        first = self.case(0, 0)
        self.longest = settings.context + max(len(first.apart.tokens), len(first.together.tokens))

    def case(self, seed: int, row: int) -> Case:
        return case_of(self.task, self._talk, self._texts, self._room, seed, row)

    def measurements(self, model: nn.Module) -> Iterator[Measurement]:
        """Each seed under every policy, after all of the seed's rows."""
        policies = self.settings.policies()
        instructions = Instructions.of(self._tokenizer, model)
        for seed in range(self.settings.seeds):
            for seen in self.settings.seen:
                found: dict[Policy, list[Answered]] = {policy: [] for policy in policies}
                for row in range(self.settings.rows):
                    case = self.case(seed, row)
                    for each in answers_of(model, case, policies, self.settings, seen, instructions):
                        found[each.score, each.budget].append(each)
                for (score, budget), answered in found.items():
                    counted = sum(each.counted for each in answered)
                    if not counted:
                        raise ValueError(f"no answer of the task {self.task} needs its context: ask for more rows")
                    value = sum(each.right for each in answered) / counted
                    yield Measurement(name_of(self.task, seen), "accuracy", score, budget, seed, value)

    def tokens_read(self) -> list[int]:
        """For each measurement, in their order, how many tokens are read for it."""
        asked = self.longest - self.settings.context
        first = self.settings.rows * (self.longest + asked)
        later = self.settings.rows * (self.longest if self.settings.rolling else asked)
        return self.settings.seeds * len(self.settings.seen) * [first, *(len(self.settings.policies()) - 1) * [later]]


def name_of(task: str, seen: bool) -> str:
    return f"{task}, question seen" if seen else task
