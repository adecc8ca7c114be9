"""A context that is read once, and then lies in caches of any policy.

Decides how what was written while it was read is written again. Until a context is compressed, no policy changes what a
model makes of it. Models with state besides keys and values read it each time. Knows nothing about questions.
B rows, H KV heads, C tokens of context.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.evaluation.results import Settings
from mlx_kv.generation.prefill import prefill_step, read_chunk
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.traverse import is_ours
from mlx_kv.policy import CachePolicy


class RecordingCache:
    """Passes everything on to a cache, and keeps what is written to it."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.written: list[tuple[mx.array, mx.array]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.written.append((keys, values))
        return self.cache.update_and_fetch(keys, values)

    def copied(self) -> RecordingCache:
        made = RecordingCache(copy.deepcopy(self.cache))
        made.written = list(self.written)
        return made


def read(model: nn.Module, tokens: mx.array, caches: Sequence[Any]) -> None:
    """Puts (B, C) tokens through a model, for its caches alone."""
    rows, count = tokens.shape
    step = max(1, prefill_step(model, caches, None) // rows)
    for first in range(0, count, step):
        read_chunk(model, caches, tokens[:, first : first + step])


class Context:
    """A context (B, C) that was read, in caches of any policy.

    Args:
        tokens: (B, C).
    """

    def __init__(self, model: nn.Module, tokens: np.ndarray, settings: Settings) -> None:
        self.model, self.tokens, self.recordings = model, mx.array(tokens), []
        caches = make_prompt_cache(model, settings.policy(None, None))
        if all(is_ours(cache) for cache in caches):
            self.recordings = [RecordingCache(cache) for cache in caches]
            read(model, self.tokens, self.recordings)

    def followed_by(self, tokens: np.ndarray) -> Context:
        """The context of these tokens and (B, Q) more; this one stays as it is."""
        made = copy.copy(self)
        made.tokens = mx.concatenate([self.tokens, mx.array(tokens)], axis=1)
        made.recordings = [recording.copied() for recording in self.recordings]
        if made.recordings:
            read(self.model, mx.array(tokens), made.recordings)
        return made

    def caches(self, policy: CachePolicy) -> list[Any]:
        """All of the context, not compressed yet."""
        caches = make_prompt_cache(self.model, policy)
        if not self.recordings:
            read(self.model, self.tokens, caches)
        for recording, cache in zip(self.recordings, caches, strict=False):
            for keys, values in recording.written:
                cache.update_and_fetch(keys, values)
        return caches
