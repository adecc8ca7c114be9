"""A text that a model reads: how long it may be, how likely each token was, and who is told how far it is.

Knows nothing about which caches it is read into, nor what a text is read for.
B rows, S tokens, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.mlxlm.loading import context_length

Progress = Callable[[int, int], None]  # told the tokens that are read, and all that there are


def log_likelihoods(logits: mx.array, targets: mx.array) -> mx.array:
    """log p of targets (B, S) under logits (B, S, V), float32 (B, S)."""
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return picked - mx.logsumexp(logits, axis=-1)


def check_length(model: nn.Module, needed: int) -> None:
    """Raises ValueError where so many tokens are more than a model was made for."""
    length = context_length(model)
    if length is not None and needed > length:
        raise ValueError(f"{needed:,} tokens are read, but this model was made for {length:,}: give a shorter context")
