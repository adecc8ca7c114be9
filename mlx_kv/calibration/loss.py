"""What is lost: nats when keys and values are stored in fewer bits, and answers when a budget evicts tokens.

B rows, S tokens, n tokens of a text, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.checks import token_ids
from mlx_kv.cache.codecs import Centre
from mlx_kv.cache.eviction.calibration import Answers, BitsLoss, Calibration
from mlx_kv.calibration.texts import FactQuestions, Talk, fact_questions
from mlx_kv.generation.prefill import prefill_step, read_chunk
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import context_length, vocabulary_of
from mlx_kv.mlxlm.traverse import attention_caches, compact, is_ours, leaves
from mlx_kv.policy import CachePolicy

# --- reading ----------------------------------------------------------------------------------------------------------


def check_length(model: nn.Module, needed: int) -> None:
    """Raises ValueError where so many tokens are more than a model was made for."""
    length = context_length(model)
    if length is not None and needed > length:
        raise ValueError(f"{needed:,} tokens are read, but this model was made for {length:,}: give a shorter context")


def read(model: Callable[..., Any], caches: Sequence[Any], tokens: mx.array, step: int) -> None:
    """Puts tokens (B, S) into caches in chunks of `step` tokens, the last one included.

    Args:
        model: or any function that reads tokens (B, n) into caches.
    """
    for first in range(0, tokens.shape[1], step):
        read_chunk(model, caches, tokens[:, first : first + step])


def read_losses(model: nn.Module, caches: Sequence[Any], text: mx.array, step: int) -> np.ndarray:
    """-log p of each token of texts (B, S + 1) after the first, in nats: (B, S) float32. Logits of one chunk are held.

    Args:
        caches: what the first S tokens are read into.
        step: as for `read`.
    """
    chunk_losses: list[np.ndarray] = []

    def predict(tokens: mx.array, cache: Any) -> None:
        done = sum(chunk.shape[1] for chunk in chunk_losses)
        targets = text[:, done + 1 : done + 1 + tokens.shape[1]]
        chunk_losses.append(np.array(-log_likelihoods(model(tokens, cache=cache), targets)))

    read(predict, caches, text[:, :-1], step)
    return np.concatenate(chunk_losses, axis=1)


def log_likelihoods(logits: mx.array, targets: mx.array) -> mx.array:
    """log p of targets (B, S) under logits (B, S, V), float32 (B, S)."""
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return picked - mx.logsumexp(logits, axis=-1)


# --- bits -------------------------------------------------------------------------------------------------------------

PLAIN = CachePolicy()
MIN_LOSS_TOKENS = 3  # a first one and two losses: the spread of one alone is unknown
TOKENS = 2048  # of all texts together, on which losses are measured
PAIRS = ((4, 4), (5, 4), (6, 4), (8, 4), (6, 6), (8, 8))  # bits of keys and of values
CANDIDATES = tuple(product(PAIRS, (64, 32)))  # with groups of so many


def losses(model: nn.Module, tokens: Sequence[int], policy: CachePolicy = PLAIN, step: int | None = None) -> np.ndarray:
    """-log p of every token of a text after the first, in nats: (n - 1,) float32.

    Logits of one chunk are in memory at a time. Each query sees keys and values as they are stored, its own included.

    Args:
        model: as from `mlx_kv.load`.
        tokens: n of them.
        policy: of the caches that the text is read into.
        step: tokens of a chunk; None is the prefill step of generation.

    Raises:
        ValueError: a text that is too short to measure, or too long for the model; what `make_prompt_cache` refuses;
            token ids outside the vocabulary.
    """
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    if len(tokens) < MIN_LOSS_TOKENS:
        raise ValueError(
            f"a text of {len(tokens)} tokens is too short to measure a loss: give {MIN_LOSS_TOKENS} or more"
        )
    check_length(model, len(tokens) - 1)
    caches = make_prompt_cache(model, policy)
    of_row: np.ndarray = read_losses(model, caches, mx.array([tokens]), prefill_step(model, caches, step))[0]
    return of_row


def bytes_per_token(model: nn.Module, policy: CachePolicy) -> int:
    """Bytes of the keys and values of one token in all layers, scales included, in the model's dtype.

    One token is read and nothing is evaluated. The ring of a residual, of a fixed size, is left out.

    Raises:
        ValueError: the policy cannot store these head dims.
    """
    caches = make_prompt_cache(model, policy)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    return sum(cache.nbytes_live - cache.nbytes_residual for cache in attention_caches(caches))


def mean_and_error(numbers: np.ndarray) -> tuple[float, float]:
    """The mean of numbers (n,), and its standard error."""
    deviation = numbers.std(ddof=1, dtype=np.float64)
    return float(numbers.mean(dtype=np.float64)), float(deviation / math.sqrt(len(numbers)))


def measure_bits(
    model: nn.Module, texts: Sequence[Sequence[int]], progress: Callable[[], None] = lambda: None
) -> tuple[BitsLoss, ...]:
    """What `CANDIDATES` add to the loss of texts, the fewest bytes first; rotated where the head dim allows it.

    Candidates that the model's head dims do not allow, or that are not smaller than plain, are left out.

    Args:
        texts: `TOKENS` of them are read, equally many of each.
        progress: called after each candidate.

    Raises:
        ValueError: as `losses`.
    """
    texts = [text[: TOKENS // len(texts)] for text in texts]
    plain, plain_bytes, measured = [losses(model, text) for text in texts], bytes_per_token(model, PLAIN), []
    for (keys, values), group_size in CANDIDATES:
        for codec in ("rotated", None):
            policy = CachePolicy(bits=(keys, values), group_size=group_size, codec=codec)
            try:
                size = bytes_per_token(model, policy)
            except ValueError:  # it cannot store these head dims
                continue
            if size < plain_bytes:
                added = [losses(model, text, policy) - before for text, before in zip(texts, plain, strict=True)]
                nats, error = mean_and_error(np.concatenate(added))
                measured.append(BitsLoss(keys, values, group_size, codec, size, nats, error))
            break
        progress()
    return tuple(sorted(measured, key=lambda loss: loss.bytes_per_token))


# --- centres of keys --------------------------------------------------------------------------------------------------

MIN_CENTRE_TOKENS = 64  # the mean of fewer depends on the text


def measure_centres(model: nn.Module, tokens: Sequence[int]) -> tuple[Centre | None, ...]:
    """The mean key of each cache of a model over a text, None where a cache has none; 1,000 tokens are enough.

    Raises:
        ValueError: a text that is too short, or too long for the model; token ids outside the vocabulary.
    """
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    if len(tokens) < MIN_CENTRE_TOKENS:
        raise ValueError(
            f"a text of {len(tokens)} tokens is too short to measure keys: give {MIN_CENTRE_TOKENS} or more"
        )
    check_length(model, len(tokens))
    caches = make_prompt_cache(model, PLAIN)
    read(model, caches, mx.array([tokens]), prefill_step(model, caches, None))
    centres: list[Centre | None] = []
    for cache in leaves(caches):
        keys: Any = cache.keys_and_values()[0] if is_ours(cache) and cache.keys is not None else None
        centres.append(None if keys is None else Centre.of(keys))
    return tuple(centres)


# --- answers under a budget -------------------------------------------------------------------------------------------

CONTEXT, CASES = 1024, 4  # tokens of each context, and contexts
KEEP_RECENT = 64  # newest tokens without a fact: every budget keeps as many or fewer in any case
MIN_CONTEXT, FOR_QUESTIONS = 256, 300  # tokens
SHARES = (2, 4, 8)  # a half, a quarter and an eighth of a context are kept


def measure_answers(
    model: nn.Module, tokenizer: Any, calibration: Calibration, progress: Callable[[], None] = lambda: None
) -> Answers | None:
    """The share of right answers about facts in contexts that no calibration reads, by budget; None without English.

    A context is compressed once, before its questions are seen. An answer is right if the model predicts each of its
    tokens from those before.

    Args:
        progress: called after each context.

    Returns:
        For JSON: `context` (tokens), `questions` (their number), `full` (share right with all tokens kept), and
        `budgets`, each with `budget`, and the shares right `before` (the defaults of a budget without a calibration)
        and `after`.
    """
    context = min(CONTEXT, (context_length(model) or CONTEXT + FOR_QUESTIONS) - FOR_QUESTIONS)
    talk = Talk(tokenizer)
    if context < MIN_CONTEXT or not talk.encodes_english():
        return None
    budgets = [context // share for share in SHARES]
    policies = [PLAIN, *(CachePolicy(budget=n, calibration=each) for n in budgets for each in (None, calibration))]
    right, questions = np.zeros(len(policies), np.int64), 0
    for row in range(CASES):
        case = fact_questions(np.random.default_rng(row), talk, context, KEEP_RECENT)
        questions += max(case.answers)
        right += [count_right(model, case, caches) for caches in compressed(model, case.context, policies)]
        progress()
    full, *others = (right / questions).tolist()
    rows = zip(budgets, others[::2], others[1::2], strict=True)
    return {
        "context": context,
        "questions": questions,
        "full": round(full, 4),
        "budgets": [{"budget": n, "before": round(a, 4), "after": round(b, 4)} for n, a, b in rows],
    }


def compressed(model: nn.Module, tokens: Sequence[int], policies: Sequence[CachePolicy]) -> Iterator[list[Any]]:
    """Caches of a context under each policy, the first of which is plain.

    Until a budget evicts, it changes nothing: where all layers attend to all tokens, the context is read once, and
    what was stored is written again.
    """
    plain, context = make_prompt_cache(model, policies[0]), mx.array([tokens])
    read(model, plain, context, prefill_step(model, plain, None))
    whole = all(is_ours(cache) and cache.max_write is None for cache in leaves(plain))
    stored = [cache.keys_and_values() for cache in leaves(plain)] if whole else []
    yield plain
    for policy in policies[1:]:
        caches = make_prompt_cache(model, replace(policy, margin=len(tokens)))
        step = min(policy.max_write, prefill_step(model, caches, None))
        if not whole:
            read(model, caches, context, step)
        for cache, (keys, values) in zip(leaves(caches), stored, strict=False):
            for first in range(0, len(tokens), step):
                cache.update_and_fetch(keys[:, :, first : first + step], values[:, :, first : first + step])
        compact(caches)
        yield caches


def count_right(model: nn.Module, case: FactQuestions, caches: Sequence[Any]) -> int:
    """How many answers the model predicts, each token of them."""
    logits = model(mx.array([case.tokens]), cache=caches)[0, :-1]  # (S - 1, V)
    right = np.array(mx.argmax(logits, axis=-1)) == np.array(case.tokens[1:])
    numbers = np.array(case.answers[1:])
    return sum(bool(right[numbers == n].all()) for n in range(1, numbers.max() + 1))
