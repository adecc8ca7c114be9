"""How well a model still answers when its cache keeps only part of a context, and how far scores foretell attention.

Decides when a context is compressed (before its questions are seen), and what counts as a right answer. Knows nothing
about files, tables or figures; what is asked is in `tasks`, which policies are compared and what is said of
several seeds in `results`, how attention is counted in `attention`, how a context comes into caches in `contexts`.
B rows, C tokens of context, Q of questions, A answers, L layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.checks import token_ids
from mlx_kv.evaluation import tasks
from mlx_kv.evaluation.asking import ROLLING_STEP, Questions
from mlx_kv.evaluation.attention import attention_received, check_attention, rank_correlation
from mlx_kv.evaluation.contexts import Context
from mlx_kv.evaluation.questions.tasks import QUESTIONS
from mlx_kv.evaluation.questions.texts import python_texts
from mlx_kv.evaluation.reading import check_length, log_likelihoods
from mlx_kv.evaluation.results import Measurement, Settings
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.traverse import attention_caches, compact
from mlx_kv.policy import SINKS, CachePolicy

TASKS = ("passkey", "recall", "copy", "perplexity", "correlation", *QUESTIONS)
JUDGED = 256  # tokens of a text that are predicted from what precedes them, compressed
CORRELATED_PAIRS = 16


# --- what is right ------------------------------------------------------------------------------------------------


def right_answers(model: nn.Module, trial: tasks.Trial, caches: Sequence[Any]) -> np.ndarray:
    """(B, A) bool: whether each answer is what the model would say, every token of it, those before it given."""
    logits = model(mx.array(trial.questions), cache=caches)  # (B, Q, V)
    right = np.array(mx.argmax(logits[:, :-1], axis=-1)) == trial.questions[:, 1:]
    numbers = trial.answers[:, 1:]  # the first token is part of a question
    return np.stack([(right | (numbers != n)).all(axis=1) for n in range(1, trial.parts.shape[1] + 1)], axis=1)


def nats_per_token(logits: mx.array, targets: mx.array) -> float:
    """The mean of -log p(target): logits (B, S, V) and targets (B, S)."""
    return float(-np.array(log_likelihoods(logits, targets)).mean())


def rolling_perplexity(model: nn.Module, tokens: np.ndarray, policy: CachePolicy) -> float:
    """Nats per token of texts (B, T + 1), read in steps; caches evict on their own when the margin is used up."""
    text, caches, total = mx.array(tokens), make_prompt_cache(model, policy), 0.0
    count = text.shape[1] - 1
    for first in range(0, count, ROLLING_STEP):
        last = min(first + ROLLING_STEP, count)
        logits = model(text[:, first:last], cache=caches)
        total += nats_per_token(logits, text[:, first + 1 : last + 1]) * (last - first)
    return total / count


# --- the whole ----------------------------------------------------------------------------------------------------


def measure_answers(
    model: nn.Module, task: str, trial: tasks.Trial, seed: int, settings: Settings
) -> Iterator[Measurement]:
    """One trial under every policy."""
    context = Context(model, trial.context, settings)
    for score, budget in settings.policies():
        caches = context.caches(settings.policy(score, budget))
        compact(caches)
        right = right_answers(model, trial, caches)
        parts = {name: float(right[trial.parts == i].mean()) for i, name in enumerate(trial.names)}
        yield Measurement(
            task, "accuracy", score, budget, seed, float(right.mean()), parts if len(trial.names) > 1 else {}
        )


def measure_perplexity(model: nn.Module, text: np.ndarray, seed: int, settings: Settings) -> Iterator[Measurement]:
    """Texts (B, C + JUDGED + 1) under every policy: with a budget that rolls, and compressed once, after C tokens."""
    context = Context(model, text[:, : settings.context], settings)
    judged = mx.array(text[:, settings.context :])
    for score, budget in settings.policies():
        nats = rolling_perplexity(model, text, settings.policy(score, budget, margin=ROLLING_STEP))
        yield Measurement("perplexity, rolling", "nats per token", score, budget, seed, nats)
        caches = context.caches(settings.policy(score, budget))
        compact(caches)
        nats = nats_per_token(model(judged[:, :-1], cache=caches), judged[:, 1:])
        yield Measurement("perplexity, one-shot", "nats per token", score, budget, seed, nats)


def correlations(context: Context, received: np.ndarray, score: str, settings: Settings) -> dict[str, float]:
    """For each layer, how a score ranks tokens against how attention does, mean of rows; protected tokens left out."""
    caches = context.caches(settings.policy(score, settings.context))
    evictors = [cache.evictor for cache in attention_caches(caches) if cache.evictor is not None]
    inner = slice(SINKS, settings.context - settings.keep_recent)
    found = {}
    for layer, (evictor, each) in enumerate(zip(evictors, received, strict=True)):
        scores = [np.array(evictor.live_scores(row)).mean(axis=0) for row in range(len(each))]  # (C,) of all heads
        rows = [rank_correlation(s[inner], r[inner]) for s, r in zip(scores, each, strict=True)]
        found[f"layer {layer}"] = float(np.mean(rows))
    return found


def measure_correlation(model: nn.Module, trial: tasks.Trial, seed: int, settings: Settings) -> Iterator[Measurement]:
    """One trial, every score against the attention of the full cache."""
    context = Context(model, trial.context, settings)
    of_all, of_questions = attention_received(model, trial.context, trial.questions)
    for score in settings.scores:
        for who, received in (("all that follows", of_all), ("questions", of_questions)):
            parts = correlations(context, received, score, settings)
            mean = statistics.fmean(parts.values())
            yield Measurement(f"attention of {who}", "rank correlation", score, None, seed, mean, parts)


def trials_of(tokenizer: Any, task: str, settings: Settings, seed: int) -> dict[str, tasks.Trial]:
    """The trials of one task, by the names that their measurements have."""
    language, rng = tasks.find_language(tokenizer), np.random.default_rng(seed)
    shape = tasks.ContextShape(settings.rows, settings.context, SINKS, settings.keep_recent)
    if task == "passkey":
        return {"passkey": tasks.passkey(rng, language, shape)}
    if task == "recall":
        return {f"recall {pairs}": tasks.recall(rng, language, shape, pairs) for pairs in tasks.PAIRS}
    if task == "copy":
        return {"copy": tasks.copy(rng, language, shape)}
    return {"attention": tasks.recall(rng, language, replace(shape, rows=settings.few_rows), CORRELATED_PAIRS)}


def evaluate(model: nn.Module, tokenizer: Any, task: str, settings: Settings, text: str = "") -> Iterator[Measurement]:
    """Measures one task, seed after seed, under every policy; `tokens_read` says how many measurements come.

    What can be refused is refused at once; the work is done as measurements are asked for.

    Args:
        model, tokenizer: as from `mlx_kv.mlxlm.loading.load`.
        task: one of `TASKS`.
        text: for perplexity.

    Raises:
        ValueError: an unknown task; a context that is too short for it or too long for the model; a text that is too
            short; a model whose layers take no budget, or hide their attention from the task correlation.
    """
    if task not in TASKS:
        raise ValueError(f"there is no task {task!r}: choose of {', '.join(TASKS)}")
    for score, budget in settings.policies()[:2]:
        make_prompt_cache(model, settings.policy(score, budget))
    if task in QUESTIONS:
        questions = Questions(tokenizer, task, settings, python_texts())
        check_length(model, questions.longest)
        return questions.measurements(model)
    length = settings.context + JUDGED + 1
    if task == "perplexity":
        tokens = token_ids(tokenizer.encode(text, add_special_tokens=False), vocabulary_of(model), "the text")
        tasks.windows(np.random.default_rng(0), tokens, 1, length)
        check_length(model, length - 1)
    else:
        trials = trials_of(tokenizer, task, replace(settings, rows=1), seed=0).values()
        check_length(model, settings.context + max(trial.questions.shape[1] for trial in trials))
    if task == "correlation":
        check_attention(model)

    def measurements() -> Iterator[Measurement]:
        for seed in range(settings.seeds):
            if task == "perplexity":
                texts = tasks.windows(np.random.default_rng(seed), tokens, settings.few_rows, length)
                yield from measure_perplexity(model, texts, seed, settings)
                continue
            for name, trial in trials_of(tokenizer, task, settings, seed).items():
                if task == "correlation":
                    yield from measure_correlation(model, trial, seed, settings)
                else:
                    yield from measure_answers(model, name, trial, seed, settings)

    return measurements()


def tokens_read(tokenizer: Any, task: str, settings: Settings) -> list[int]:
    """For each measurement that `evaluate` gives, in its order, how many tokens are read for it: roughly its time."""
    if task in QUESTIONS:
        return Questions(tokenizer, task, settings, python_texts()).tokens_read()
    later = len(settings.policies()) - 1
    if task == "perplexity":
        rolling, once = (settings.few_rows * tokens for tokens in (settings.context + JUDGED, JUDGED))
        first = settings.few_rows * settings.context + rolling
        return settings.seeds * [first, once, *later * [rolling, once]]
    work = []
    for trial in trials_of(tokenizer, task, replace(settings, rows=1), seed=0).values():
        asked = trial.questions.shape[1]
        if task == "correlation":  # a text is read twice, and then nothing but scores are worked out
            work += [settings.few_rows * (2 * settings.context + asked), *(2 * len(settings.scores) - 1) * [1]]
        else:
            work += [settings.rows * (settings.context + asked), *later * [settings.rows * asked]]
    return settings.seeds * work
