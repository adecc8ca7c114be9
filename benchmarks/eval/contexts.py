"""A context that is read once, and then written to caches of many policies.

B rows, H KV heads, S tokens, C tokens of context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.eviction.calibration import FITTED
from mlx_kv.cache.eviction.scores import find_score
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.protocol import Call, Hook
from mlx_kv.generation.prefill import (
    NO_INSTRUCTIONS,
    Instructions,
    TwoPassPrefill,
    hold,
    needs_second_pass,
    prefill_step,
    read_chunk,
)
from mlx_kv.mlxlm.attention import AttentionPatch, attach_attention_hooks
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.traverse import is_ours
from mlx_kv.policy import CachePolicy
from mlx_kv.settings import MOST_TOKENS

from .results import Settings, score_of


@dataclass
class Write:
    """One write to a cache, and the queries (B, Hq, S, D) of the attention call that followed, if they are kept."""

    keys: mx.array
    values: mx.array
    queries: mx.array | None = None
    scale: float = 0.0
    sinks: mx.array | None = None


@dataclass(frozen=True)
class ReplayedCall:
    """A call of attention over a cache that is written again. Its result is not used."""

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
    """Wraps a cache and records what is written to it, with the queries of the attention calls.

    Args:
        queries: minimum number of the last queries to keep; None keeps all of them.
    """

    def __init__(self, cache: KVCache, queries: int | None = 0) -> None:
        self.cache = cache
        self.writes: list[Write] = []
        self._queries = queries

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.writes.append(Write(keys, values))
        return self.cache.update_and_fetch(keys, values)

    @property
    def attention_hook(self) -> RecordingCache | None:
        return None if self._queries == 0 else self

    def attend(self, call: Call) -> mx.array:
        last = self.writes[-1]
        last.queries, last.scale, last.sinks = call.queries, call.scale, call.sinks
        return call.forward()

    def compute(self) -> None:
        """Evaluates the queries to keep and drops older ones."""
        count = 0
        for write in reversed(self.writes):
            if self._queries is not None and count >= self._queries:
                write.queries = None
            elif write.queries is not None:
                mx.eval(write.queries)
                count += write.queries.shape[2]

    def write_into(self, cache: KVCache) -> None:
        """Repeats all writes on another cache; the recorded queries go to its attention hook."""
        for write in self.writes:
            keys, values = cache.update_and_fetch(write.keys, write.values)
            hook = cache.attention_hook
            if hook is not None and write.queries is not None:
                mx.eval(hook.attend(ReplayedCall(write.queries, keys, values, write.scale, write.sinks)))


def queries_wanted(scores: Sequence[str]) -> int:
    """The number of last queries that these scores observe."""
    observing = (find_score(name).wants for name in map(score_of, scores) if name != FITTED)
    return max([wants.queries for wants in observing if wants is not None], default=0)


class Context:
    """A context that is read once and then written to caches of any policy.

    Until caches are compressed, no policy changes what the model computes. A model with state besides keys and values
    reads the context again for each policy, and so does a score with a second pass, for that pass.

    Args:
        tokens: (B, C).
        settings: the scores to record queries for, and how tensors are stored.
        instructions: for scores with a second pass.
    """

    def __init__(
        self, model: nn.Module, tokens: np.ndarray, settings: Settings, instructions: Instructions = NO_INSTRUCTIONS
    ) -> None:
        self.model, self.tokens = model, mx.array(tokens)
        self.recordings: list[RecordingCache] = []
        self._instructions = instructions
        self._filled: tuple[CachePolicy, list[Any]] | None = None  # the last policy with any budget, and cache states
        caches = make_prompt_cache(model, settings.policy(None, None))
        if all(is_ours(cache) for cache in caches):
            wanted = queries_wanted(settings.scores)
            self.recordings = [RecordingCache(cache, wanted) for cache in caches]
            with AttentionPatch(model) if wanted != 0 else contextlib.nullcontext():
                self._read(self.recordings)

    def caches(self, policy: CachePolicy) -> list[Any]:
        """Caches with the whole context, not compressed yet.

        Until compression a budget changes nothing, so the last filled state serves all budgets of the same policy.
        """
        if policy.budget is None or not self.recordings:
            return self._fill(policy)
        same_fill = replace(policy, budget=MOST_TOKENS)
        if self._filled is None or self._filled[0] != same_fill:
            # Settings set the margin to their context length, which this context may exceed.
            whole = replace(policy, margin=self.tokens.shape[1])
            self._filled = same_fill, [cache.state for cache in self._fill(whole)]
        empty = make_prompt_cache(self.model, policy)
        caches = [
            type(new).from_state(state if new.evictor is None else state._replace(layout=list(new.layout.parameters)))
            for new, state in zip(empty, self._filled[1], strict=True)
        ]
        attach_attention_hooks(self.model, caches)
        return caches

    def _fill(self, policy: CachePolicy) -> list[Any]:
        caches = make_prompt_cache(self.model, policy)
        hold(caches)
        if not self.recordings:
            self._read(caches)
        for recording, cache in zip(self.recordings, caches, strict=False):
            recording.write_into(cache)
        if needs_second_pass(caches):
            texts: Any = self.tokens.tolist()
            step = prefill_step(self.model, caches, None)
            TwoPassPrefill(self.model, caches, texts, step, self._instructions, read=self.tokens.shape[1]).finish()
        return caches

    def _read(self, caches: Sequence[Any]) -> None:
        step = max(1, prefill_step(self.model, caches, None) // len(self.tokens))
        for first in range(0, self.tokens.shape[1], step):
            read_chunk(self.model, caches, self.tokens[:, first : first + step])
            for recording in self.recordings:
                recording.compute()
