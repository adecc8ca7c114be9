"""What a way to store keys and values costs a model in quality: how much less likely it finds a text then.

Decides how a text is read (in chunks, each token told what really came before it) and what two readings are compared
by: token by token, so that a difference is known far better than either loss. Knows nothing about which policies are
worth a try, nor about files or tables.
n tokens of a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.checks import token_ids
from mlx_kv.evaluation.reading import Progress, check_length, log_likelihoods
from mlx_kv.generation.prefill import prefill_step, read_chunk
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.policy import CachePolicy

PLAIN = CachePolicy()
LEAST_TOKENS = 3  # one that is given, and two losses: of one alone nobody knows how it scatters


def losses(
    model: nn.Module,
    tokens: Sequence[int],
    policy: CachePolicy = PLAIN,
    step: int | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    """-log p of every token of a text after the first, in nats: (n - 1,) float32.

    One chunk's logits are held at a time. Each token is read as it is stored: also a query's own, and its neighbours.

    Args:
        model: as from `mlx_kv.load`.
        tokens: n of them.
        policy: of the caches that the text is read into.
        step: tokens of a chunk; None is what generation reads at once.
        progress: told after each chunk the tokens read, and all that are read.

    Raises:
        ValueError: a text that is too short to say anything, or too long for the model; what `make_prompt_cache`
            refuses; token ids that the model does not have.
    """
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(f"a text of {len(tokens)} tokens says nothing about a model: give {LEAST_TOKENS} or more")
    count = len(tokens) - 1  # of the last one, only its own probability is asked
    check_length(model, count)
    caches = make_prompt_cache(model, policy)
    step = prefill_step(model, caches, step)
    found: list[np.ndarray] = []

    def reading(rows: mx.array, cache: Any) -> None:
        done = sum(map(len, found))
        targets = mx.array([tokens[done + 1 : done + 1 + rows.shape[1]]])
        found.append(np.array(-log_likelihoods(model(rows, cache=cache), targets)[0]))

    for first in range(0, count, step):
        last = min(first + step, count)
        read_chunk(reading, caches, mx.array([tokens[first:last]]))
        if progress is not None:
            progress(last, count)
    return np.concatenate(found)


def bytes_per_token(model: nn.Module, policy: CachePolicy) -> int:
    """Of keys and values of all layers, scales included, in the model's dtype: one token is read, nothing evaluated.

    What a residual takes beside them, for any number of tokens, is left out.

    Raises:
        ValueError: the policy cannot store these head dims.
    """
    caches = make_prompt_cache(model, policy)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    return sum(cache.nbytes_live - cache.nbytes_residual for cache in attention_caches(caches))


@dataclass(frozen=True)
class AddedLoss:
    """What a policy costs, against caches that keep every token as it is.

    Attributes:
        nats: more loss a token, on average.
        error: the standard error of that, as if tokens were independent.
        bytes_per_token: of all layers, scales included.
    """

    policy: CachePolicy
    nats: float
    error: float
    bytes_per_token: int

    @property
    def ratio(self) -> float:
        """Of the perplexities."""
        return math.exp(self.nats)


class CodecLoss:
    """One text under one model; the plain reading, which all others are compared with, is done once.

    Args:
        model, tokens, step, progress: as in `losses`; each reading tells its own progress.
    """

    def __init__(
        self, model: nn.Module, tokens: Sequence[int], step: int | None = None, progress: Progress | None = None
    ) -> None:
        self._model, self._tokens, self._step, self._progress = model, tokens, step, progress

    @cached_property
    def plain(self) -> np.ndarray:
        """(n - 1,) losses through plain caches."""
        return losses(self._model, self._tokens, PLAIN, self._step, self._progress)

    def added(self, policy: CachePolicy) -> AddedLoss:
        """What a policy costs on this text.

        Raises:
            ValueError: as `losses`.
        """
        size = bytes_per_token(self._model, policy)  # first: it refuses what cannot be stored
        more = losses(self._model, self._tokens, policy, self._step, self._progress) - self.plain
        return AddedLoss(policy, *mean_and_error(more), size)


def mean_and_error(numbers: np.ndarray) -> tuple[float, float]:
    """The mean of (n,) numbers, and its standard error."""
    deviation = numbers.std(ddof=1, dtype=np.float64)
    return float(numbers.mean(dtype=np.float64)), float(deviation / math.sqrt(len(numbers)))
