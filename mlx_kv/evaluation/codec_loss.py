"""The loss that storing keys and values in a codec adds to a model on a text, token by token against plain caches.

n tokens of a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.checks import token_ids
from mlx_kv.evaluation.reading import Progress, check_length, read_losses
from mlx_kv.generation.prefill import prefill_step
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.policy import CachePolicy

PLAIN = CachePolicy()
MIN_TOKENS = 3  # a first one and two losses: the spread of one alone is unknown


def losses(
    model: nn.Module,
    tokens: Sequence[int],
    policy: CachePolicy = PLAIN,
    step: int | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    """-log p of every token of a text after the first, in nats: (n - 1,) float32.

    Logits of one chunk are in memory at a time. Each query sees keys and values as they are stored, its own included.

    Args:
        model: as from `mlx_kv.load`.
        tokens: n of them.
        policy: of the caches that the text is read into.
        step: tokens of a chunk; None is the prefill step of generation.
        progress: called after each chunk with the tokens read, and all that will be read.

    Raises:
        ValueError: a text that is too short to measure, or too long for the model; what `make_prompt_cache` refuses;
            token ids outside the vocabulary.
    """
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    if len(tokens) < MIN_TOKENS:
        raise ValueError(f"a text of {len(tokens)} tokens is too short to measure a loss: give {MIN_TOKENS} or more")
    check_length(model, len(tokens) - 1)
    caches = make_prompt_cache(model, policy)
    found: np.ndarray = read_losses(model, caches, mx.array([tokens]), prefill_step(model, caches, step), progress)[0]
    return found


def bytes_per_token(model: nn.Module, policy: CachePolicy) -> int:
    """Bytes of the keys and values of one token in all layers, scales included, in the model's dtype.

    One token is read and nothing is evaluated. The ring of a residual, of a fixed size, is left out.

    Raises:
        ValueError: the policy cannot store these head dims.
    """
    caches = make_prompt_cache(model, policy)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    return sum(cache.nbytes_live - cache.nbytes_residual for cache in attention_caches(caches))


@dataclass(frozen=True)
class AddedLoss:
    """The loss and memory of a policy, compared with plain caches.

    Attributes:
        nats: added loss per token, the mean over the text.
        error: its standard error, as if tokens were independent.
        bytes_per_token: of all layers, scales included.
    """

    policy: CachePolicy
    nats: float
    error: float
    bytes_per_token: int

    @property
    def ratio(self) -> float:
        """The ratio of perplexities, exp(nats)."""
        return math.exp(self.nats)


class CodecLoss:
    """The losses of policies on one text; the text is read through plain caches once, for all comparisons.

    Args:
        model, tokens, step, progress: as for `losses`; progress starts anew for each policy.
    """

    def __init__(
        self, model: nn.Module, tokens: Sequence[int], step: int | None = None, progress: Progress | None = None
    ) -> None:
        self._model, self._tokens, self._step, self._progress = model, tokens, step, progress

    @cached_property
    def plain(self) -> np.ndarray:
        """Losses with plain caches, (n - 1,)."""
        return losses(self._model, self._tokens, PLAIN, self._step, self._progress)

    def added(self, policy: CachePolicy) -> AddedLoss:
        """Measures a policy on this text.

        Raises:
            ValueError: as `losses`.
        """
        size = bytes_per_token(self._model, policy)  # first: it raises for what cannot be stored
        more = losses(self._model, self._tokens, policy, self._step, self._progress) - self.plain
        return AddedLoss(policy, *mean_and_error(more), size)


def mean_and_error(numbers: np.ndarray) -> tuple[float, float]:
    """The mean of numbers (n,), and its standard error."""
    deviation = numbers.std(ddof=1, dtype=np.float64)
    return float(numbers.mean(dtype=np.float64)), float(deviation / math.sqrt(len(numbers)))
