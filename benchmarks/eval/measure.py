"""Measures how well a model still answers when its cache keeps only part of a context.

A task is data: its trials for each seed, and the measure that is taken of them under every policy.
B rows, C tokens of context, Q of questions, A answers, L layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.checks import token_ids
from mlx_kv.calibration.loss import check_length, log_likelihoods, read, read_losses
from mlx_kv.generation.prefill import NO_INSTRUCTIONS, Instructions, prefill_step
from mlx_kv.inspection import check_attention
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.traverse import attention_caches, compact
from mlx_kv.policy import SINKS

from . import tasks
from .attention import attention_received, rank_correlation
from .contexts import Context
from .questions import QUESTIONS, Room, Talk, case_of, python_texts, trial_of
from .results import Measurement, Settings
from .tasks import Trial

JUDGED = 256  # tokens of a text that are predicted after the compressed context
CORRELATED_PAIRS = 16
ROLLING_STEP = 32  # tokens read at once where caches compact while they read; also the margin of their budget
ScoreAndBudget = tuple[str | None, int | None]  # the full cache has neither


@dataclass(frozen=True)
class Material:
    """What the trials of a task are made from.

    Attributes:
        text: token ids, for perplexity.
    """

    tokenizer: Any
    settings: Settings
    text: Sequence[int] = ()

    def draw(self, seed: int, few: bool = False) -> tuple[np.random.Generator, tasks.Language, tasks.ContextShape]:
        """The arguments of `tasks.passkey`, `recall` and `copy`; with `few`, for fewer rows."""
        rows = self.settings.few_rows if few else self.settings.rows
        shape = tasks.ContextShape(rows, self.settings.context, SINKS, self.settings.keep_recent)
        return np.random.default_rng(seed), tasks.find_language(self.tokenizer), shape

    @cached_property
    def talk(self) -> Talk:
        return Talk(self.tokenizer)


# --- trials by the name of their measurements; those of one name are measured together --------------------------------

Trials = Mapping[str, Iterable[Trial]]


def passkey_trials(material: Material, seed: int) -> Trials:
    return {"passkey": [tasks.passkey(*material.draw(seed))]}


def recall_trials(material: Material, seed: int) -> Trials:
    drawn = material.draw(seed)
    return {f"recall {pairs}": [tasks.recall(*drawn, pairs)] for pairs in tasks.PAIRS}


def copy_trials(material: Material, seed: int) -> Trials:
    return {"copy": [tasks.copy(*material.draw(seed))]}


def correlation_trials(material: Material, seed: int) -> Trials:
    return {"attention": [tasks.recall(*material.draw(seed, few=True), CORRELATED_PAIRS)]}


def text_trials(material: Material, seed: int) -> Trials:
    """Windows of a text of C + JUDGED + 1 tokens."""
    settings = material.settings
    rng, length = np.random.default_rng(seed), settings.context + JUDGED + 1
    text = tasks.windows(rng, material.text, settings.few_rows, length)
    context, judged = text[:, : settings.context], text[:, settings.context :]
    return {"perplexity": [Trial(context, judged[:, :-1], np.zeros_like(judged[:, 1:]), targets=judged[:, 1:])]}


def chat_trials(task: str, material: Material, seed: int) -> Trials:
    """Raises ValueError for a tokenizer without English."""
    settings = material.settings
    if isinstance(tasks.find_language(material.tokenizer), tasks.RecallLanguage):
        raise ValueError(f"the task {task} asks in English, which the recall model does not know: give a --model")
    room = Room(settings.context, settings.keep_recent)

    def trials(seen: bool) -> Iterator[Trial]:
        for row in range(settings.rows):
            case = case_of(task, material.talk, python_texts(), room, seed, row)
            yield trial_of(material.talk, case, seen)

    return {task + ", question seen" * seen: trials(seen) for seen in settings.seen}


# --- accuracy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """The answers of one trial under one policy.

    Attributes:
        right, counts: (B, A) bool: whether each answer was right, and whether it counts.
        seconds: to fill the caches, to compress them, and to answer.
        slots: of the longest head of a layer after compression, the mean over layers: what is allocated.
    """

    score: str | None
    budget: int | None
    right: np.ndarray
    counts: np.ndarray
    seconds: tuple[float, float, float]
    slots: float


def right_answers(model: nn.Module, trial: Trial, caches: Sequence[Any]) -> np.ndarray:
    """(B, A) bool: whether the model predicts every token of each answer, given those before it."""
    logits = model(mx.array(trial.questions), cache=caches)  # (B, Q, V)
    right = np.array(mx.argmax(logits[:, :-1], axis=-1)) == trial.questions[:, 1:]
    numbers = trial.answers[:, 1:]
    return np.stack([(right | (numbers != n)).all(axis=1) for n in range(1, int(trial.answers.max()) + 1)], axis=1)


def right_without_context(model: nn.Module, trial: Trial) -> np.ndarray:
    """(B, A) bool: which answers of a chat are right after its instruction alone."""
    assert trial.alone is not None
    caches = make_prompt_cache(model)
    read(model, caches, mx.array(trial.alone), prefill_step(model, caches, None))
    return right_answers(model, trial, caches)


def fill(context: Context, score: str | None, budget: int | None, settings: Settings) -> list[Any]:
    """Caches of a context under a policy, not compressed yet; with `rolling`, read step by step with the budget."""
    if not settings.rolling or score is None:
        return context.caches(settings.policy(score, budget))
    caches = make_prompt_cache(context.model, settings.policy(score, budget, margin=ROLLING_STEP))
    read(context.model, caches, context.tokens, ROLLING_STEP)
    return caches


def answers_of(
    model: nn.Module,
    trial: Trial,
    policies: Iterable[ScoreAndBudget],
    settings: Settings,
    instructions: Instructions = NO_INSTRUCTIONS,
) -> Iterator[Answered]:
    """The answers of one trial under each policy; the context is read once for all of them.

    Args:
        instructions: for scores that read the context twice.
    """
    context = Context(model, trial.context, settings, instructions)
    counts: np.ndarray | None = None if trial.alone is None else ~right_without_context(model, trial)
    for score, budget in policies:
        times = [time.perf_counter()]
        caches = fill(context, score, budget, settings)
        mx.eval([cache.state for cache in caches])
        times.append(time.perf_counter())
        compact(caches)
        mx.eval([cache.state for cache in caches])
        times.append(time.perf_counter())
        ends = [row.end for cache in attention_caches(caches) for row in cache.view.rows]
        right = right_answers(model, trial, caches)
        times.append(time.perf_counter())
        filling, compacting, answering = np.diff(times).tolist()
        counted = np.ones_like(right) if counts is None else counts
        mean = sum(ends) / max(1, len(ends))
        yield Answered(score, budget, right, counted, (filling, compacting, answering), mean)


def accuracies(
    model: nn.Module, material: Material, name: str, trials: Iterable[Trial], seed: int
) -> Iterator[Measurement]:
    """The share of right answers of all trials together; a single trial may have parts."""
    all_trials, settings = list(trials), material.settings
    found: dict[ScoreAndBudget, list[Answered]] = {policy: [] for policy in settings.policies()}
    for number, trial in enumerate(all_trials, start=1):
        chat = trial.alone is not None
        instructions = Instructions.of(material.tokenizer, model) if chat else NO_INSTRUCTIONS
        rolling = replace(settings, rolling=settings.rolling and chat)
        for each in answers_of(model, trial, [*found], rolling, instructions):
            answered = found[each.score, each.budget]
            answered.append(each)
            if number < len(all_trials):
                continue
            right = np.concatenate([one.right[one.counts] for one in answered])
            if not len(right):
                raise ValueError(f"no answer of the task {name} needs its context: ask for more rows")
            parts = {}
            if trial.parts is not None and len(trial.names) > 1:
                parts = {part: float(each.right[trial.parts == i].mean()) for i, part in enumerate(trial.names)}
            yield Measurement(name, "accuracy", each.score, each.budget, seed, float(right.mean()), parts)


def accuracy_work(settings: Settings, sample: Trial) -> list[int]:
    context, asked = sample.context.shape[1], sample.questions.shape[1]
    first, later = context + asked, asked
    if sample.alone is not None:
        first, later = first + asked, first if settings.rolling else asked
    return [settings.rows * first, *(len(settings.policies()) - 1) * [settings.rows * later]]


# --- perplexity -------------------------------------------------------------------------------------------------------


def nats_per_token(logits: mx.array, targets: mx.array) -> float:
    """The mean of -log p(target): logits (B, S, V) and targets (B, S)."""
    return float(-np.array(log_likelihoods(logits, targets)).mean())


def perplexities(
    model: nn.Module, material: Material, name: str, trials: Iterable[Trial], seed: int
) -> Iterator[Measurement]:
    """Nats per token of texts, with a budget that rolls, and compressed once after C tokens."""
    settings = material.settings
    for trial in trials:
        assert trial.targets is not None
        context, targets = Context(model, trial.context, settings), mx.array(trial.targets)
        text = mx.concatenate([mx.array(trial.context), mx.array(trial.questions), targets[:, -1:]], axis=1)
        for score, budget in settings.policies():
            caches = make_prompt_cache(model, settings.policy(score, budget, margin=ROLLING_STEP))
            nats = float(read_losses(model, caches, text, ROLLING_STEP).mean(dtype=np.float64))
            yield Measurement(f"{name}, rolling", "nats per token", score, budget, seed, nats)
            caches = context.caches(settings.policy(score, budget))
            compact(caches)
            nats = nats_per_token(model(mx.array(trial.questions), cache=caches), targets)
            yield Measurement(f"{name}, one-shot", "nats per token", score, budget, seed, nats)


def perplexity_work(settings: Settings, sample: Trial) -> list[int]:
    once = settings.few_rows * sample.questions.shape[1]
    reading = settings.few_rows * sample.context.shape[1]
    rolling = reading + once
    return [reading + rolling, once, *(len(settings.policies()) - 1) * [rolling, once]]


# --- correlation with attention ---------------------------------------------------------------------------------------


def correlations_by_layer(context: Context, received: np.ndarray, score: str, settings: Settings) -> dict[str, float]:
    """For each layer the rank correlation of a score with the attention received (L, B, C), the mean over rows.

    Tokens that are never evicted are left out.
    """
    caches = context.caches(settings.policy(score, settings.context))
    evictors = [cache.evictor for cache in attention_caches(caches) if cache.evictor is not None]
    evictable = slice(SINKS, settings.context - settings.keep_recent)
    found = {}
    for layer, (evictor, attention) in enumerate(zip(evictors, received, strict=True)):
        scores = [np.array(evictor.live_scores(row)).mean(axis=0) for row in range(len(attention))]  # (C,) over heads
        rows = [rank_correlation(s[evictable], a[evictable]) for s, a in zip(scores, attention, strict=True)]
        found[f"layer {layer}"] = float(np.mean(rows))
    return found


def correlations(
    model: nn.Module, material: Material, name: str, trials: Iterable[Trial], seed: int
) -> Iterator[Measurement]:
    """How each score ranks tokens against the attention that they receive with the full cache."""
    settings = material.settings
    for trial in trials:
        context = Context(model, trial.context, settings)
        of_all, of_questions = attention_received(model, trial.context, trial.questions)
        for score in settings.scores:
            for queries, received in (("all that follows", of_all), ("questions", of_questions)):
                parts = correlations_by_layer(context, received, score, settings)
                mean = statistics.fmean(parts.values())
                yield Measurement(f"{name} of {queries}", "rank correlation", score, None, seed, mean, parts)


def correlation_work(settings: Settings, sample: Trial) -> list[int]:
    """The context is read twice; everything after that computes scores only."""
    reading = settings.few_rows * (2 * sample.context.shape[1] + sample.questions.shape[1])
    return [reading, *(2 * len(settings.scores) - 1) * [1]]


# --- tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """What is measured of trials.

    Attributes:
        measurements: (model, material, name, trials of one name, seed) -> measurements under every policy.
        work: (settings, one of these trials) -> for each measurement, how many tokens are read.
    """

    measurements: Callable[[nn.Module, Material, str, Iterable[Trial], int], Iterator[Measurement]]
    work: Callable[[Settings, Trial], list[int]]


@dataclass(frozen=True)
class Task:
    """Trials for each seed, by the name of their measurements, and what is measured of them."""

    trials: Callable[[Material, int], Trials]
    measure: Measure


ACCURACY = Measure(accuracies, accuracy_work)
PERPLEXITY = Measure(perplexities, perplexity_work)
CORRELATION = Measure(correlations, correlation_work)

TASKS = {
    "passkey": Task(passkey_trials, ACCURACY),
    "recall": Task(recall_trials, ACCURACY),
    "copy": Task(copy_trials, ACCURACY),
    "perplexity": Task(text_trials, PERPLEXITY),
    "correlation": Task(correlation_trials, CORRELATION),
    **{name: Task(partial(chat_trials, name), ACCURACY) for name in QUESTIONS},
}


def samples(task: Task, material: Material) -> list[Trial]:
    """One small trial of each name."""
    small = replace(material, settings=replace(material.settings, rows=1))
    return [next(iter(trials)) for trials in task.trials(small, 0).values()]


def evaluate(model: nn.Module, tokenizer: Any, task: str, settings: Settings, text: str = "") -> Iterator[Measurement]:
    """Measures one task, seed after seed, under every policy.

    Arguments are checked at once; measurements are made as the iterator advances.

    Args:
        model, tokenizer: as from `mlx_kv.load`.
        task: one of `TASKS`.
        text: for perplexity.

    Raises:
        ValueError: an unknown task; a context that is too short for it or too long for the model; a text that is too
            short; a model with layers that support no budget, or that hides its attention from the task correlation.
    """
    if task not in TASKS:
        raise ValueError(f"there is no task {task!r}: choose of {', '.join(TASKS)}")
    for score, budget in settings.policies()[:2]:
        make_prompt_cache(model, settings.policy(score, budget))
    chosen, tokens = TASKS[task], []
    if chosen.measure is PERPLEXITY:
        tokens = token_ids(tokenizer.encode(text, add_special_tokens=False), vocabulary_of(model), "the text")
    material = Material(tokenizer, settings, tokens)
    check_length(model, max(each.context.shape[1] + each.questions.shape[1] for each in samples(chosen, material)))
    if chosen.measure is CORRELATION:
        check_attention(model)
    return (
        measurement
        for seed in range(settings.seeds)
        for name, trials in chosen.trials(material, seed).items()
        for measurement in chosen.measure.measurements(model, material, name, trials, seed)
    )


def tokens_read(tokenizer: Any, task: str, settings: Settings) -> list[int]:
    """For each measurement of `evaluate`, in order, how many tokens are read for it: its approximate cost."""
    text = range(settings.context + JUDGED + 1)  # any, of the length that is read
    found = samples(TASKS[task], Material(tokenizer, settings, text))
    return settings.seeds * [count for each in found for count in TASKS[task].measure.work(settings, each)]
