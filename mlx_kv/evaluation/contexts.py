"""A context that is read once, and then lies in caches of any policy.

Decides how what was written while it was read is written again, and what attention was asked then is shown again to
those who want to see it: all of it, or of the last queries as many as any score wants. Until a context is compressed,
no policy changes what a model makes of it. Models with state besides keys and values read it each time, and so does a
score that wants it read twice, for its second time. Knows nothing about questions.
B rows, H KV heads, C tokens of context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.checks import MOST_TOKENS
from mlx_kv.cache.eviction.calibration import FITTED
from mlx_kv.cache.eviction.scores import find_score
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.protocol import Call, Hook
from mlx_kv.evaluation.results import Settings, score_of
from mlx_kv.generation.prefill import prefill_step, read_chunk
from mlx_kv.generation.rereading import NOTHING_ASKED, Instructions, Rereading, hold, wants_rereading
from mlx_kv.mlxlm.attention import AttentionPatch
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.observing import show_attention
from mlx_kv.mlxlm.traverse import is_ours
from mlx_kv.policy import CachePolicy


@dataclass
class Written:
    """What one write put into a cache, and what attention was asked then: (B, Hq, S, D) queries, if they are kept."""

    keys: mx.array
    values: mx.array
    queries: mx.array | None = None
    scale: float = 0.0
    sinks: mx.array | None = None


@dataclass(frozen=True)
class Replayed:
    """A call of attention over a cache that is written again. Nobody needs its answer."""

    queries: mx.array
    keys: Any
    values: Any
    scale: float
    sinks: mx.array | None
    mask: Any = None

    def changed(self, **changes: Any) -> Call:
        return replace(self, **changes)

    def before(self, hook: Hook) -> Call:
        return self

    def forward(self, **changes: Any) -> mx.array:
        return mx.zeros(1)


class RecordingCache:
    """Passes everything on to a cache, and keeps what is written to it, and the queries that then look at it.

    Args:
        queries: so many of the last ones are kept at least; None is all of them.
    """

    def __init__(self, cache: KVCache, queries: int | None = 0) -> None:
        self.cache = cache
        self.written: list[Written] = []
        self._queries = queries

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.written.append(Written(keys, values))
        return self.cache.update_and_fetch(keys, values)

    @property
    def attention_hook(self) -> RecordingCache | None:
        return None if self._queries == 0 else self

    def attend(self, call: Call) -> mx.array:
        last = self.written[-1]
        last.queries, last.scale, last.sinks = call.queries, call.scale, call.sinks
        return call.forward()

    def compute(self) -> None:
        """Computes the queries that are kept, and lets the others go."""
        enough = 0
        for each in reversed(self.written):
            if each.queries is not None:
                enough += each.queries.shape[2]
                mx.eval(each.queries)
                if self._queries is not None and enough - each.queries.shape[2] >= self._queries:
                    each.queries = None

    def write_into(self, cache: KVCache) -> None:
        """All of it again; who wants to see attention is shown what it was asked."""
        for each in self.written:
            keys, values = cache.update_and_fetch(each.keys, each.values)
            hook = cache.attention_hook
            if hook is not None and each.queries is not None:
                mx.eval(hook.attend(Replayed(each.queries, keys, values, each.scale, each.sinks)))


def queries_wanted(scores: Sequence[str]) -> int | None:
    """How many of the last queries any of these scores observes; None is all."""
    observing = (find_score(name).wants for name in map(score_of, scores) if name != FITTED)
    wants = [wants for wants in observing if wants is not None]
    if any(each.received or each.moments for each in wants):
        return None
    return max([each.queries for each in wants], default=0)


def read(model: nn.Module, tokens: mx.array, caches: Sequence[Any]) -> None:
    """Puts (B, C) tokens through a model, for its caches alone."""
    rows, count = tokens.shape
    step = max(1, prefill_step(model, caches, None) // rows)
    for first in range(0, count, step):
        read_chunk(model, caches, tokens[:, first : first + step])
        for cache in caches:
            if isinstance(cache, RecordingCache):
                cache.compute()


class Context:
    """A context (B, C) that was read, in caches of any policy.

    Args:
        tokens: (B, C).
        instructions: for scores that want it to be read twice.
    """

    def __init__(
        self, model: nn.Module, tokens: np.ndarray, settings: Settings, instructions: Instructions = NOTHING_ASKED
    ) -> None:
        self.model, self.tokens, self.recordings = model, mx.array(tokens), []
        self._instructions = instructions
        self._filled: tuple[CachePolicy, list[Any]] | None = None  # the last policy of any budget, and what it has
        caches = make_prompt_cache(model, settings.policy(None, None))
        if all(is_ours(cache) for cache in caches):
            wanted = queries_wanted(settings.scores)
            self.recordings = [RecordingCache(cache, wanted) for cache in caches]
            with AttentionPatch(model) if wanted != 0 else contextlib.nullcontext():
                read(model, self.tokens, self.recordings)

    def caches(self, policy: CachePolicy) -> list[Any]:
        """All of the context, not compressed yet.

        Until then a budget changes nothing: what was filled last is filled for every budget of its policy.
        """
        if policy.budget is None or not self.recordings:
            return self._fill(policy)
        alike = replace(policy, budget=MOST_TOKENS)
        if self._filled is None or self._filled[0] != alike:
            # The margin of a budget that is not given another is the named length, which the context may exceed.
            whole = replace(policy, margin=self.tokens.shape[1])
            self._filled = alike, [cache.state for cache in self._fill(whole)]
        empty = make_prompt_cache(self.model, policy)
        caches = [
            type(own).from_state(state if own.evictor is None else state._replace(layout=list(own.layout.parameters)))
            for own, state in zip(empty, self._filled[1], strict=True)
        ]
        show_attention(self.model, caches)
        return caches

    def _fill(self, policy: CachePolicy) -> list[Any]:
        caches = make_prompt_cache(self.model, policy)
        hold(caches)
        if not self.recordings:
            read(self.model, self.tokens, caches)
        for recording, cache in zip(self.recordings, caches, strict=False):
            recording.write_into(cache)
        if wants_rereading(caches):
            texts: Any = self.tokens.tolist()
            step = prefill_step(self.model, caches, None)
            Rereading(self.model, caches, texts, step, self._instructions, read=self.tokens.shape[1]).finish()
        return caches
