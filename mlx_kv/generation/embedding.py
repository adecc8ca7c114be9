"""Embeddings of texts: hidden states of their tokens, pooled and normalised, as the model's card wants them.

Texts are read in batches of similar lengths, padded on the right: in causal models no token sees what comes after it.
Tokens that all texts begin with are read once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.cache.layout import Append
from mlx_kv.generation.admission import MIN_SHARED
from mlx_kv.generation.sequence import common_prefix
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.taps import HiddenTap
from mlx_kv.mlxlm.traverse import is_ours
from mlx_kv.policy import CachePolicy

Pooling = Literal["last", "mean", "first"]
POOLING_MODES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
COPIED_BYTES = 2**28  # of keys and values that texts share, one copy for each text of a pass
MOST_TOKENS = {True: 2_048, False: 16_384}  # in a pass, padding included: on a CPU, on a GPU


@dataclass(frozen=True)
class EmbeddingCard:
    """How a model's embeddings are made, by the files that sentence-transformers reads.

    Attributes:
        pooling: which hidden states make a text's: that of its last or first token, or the mean of all.
        prompts: what comes before a text, by its kind, such as "query".
    """

    pooling: Pooling = "last"
    prompts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> EmbeddingCard:
        """Of a model's directory; the defaults where it says nothing.

        Raises:
            ValueError: a way of pooling that is not known.
        """
        modes, prompts = (
            _read(folder / "1_Pooling" / "config.json"),
            _read(folder / "config_sentence_transformers.json"),
        )
        chosen = [name for name, value in modes.items() if name.startswith("pooling_mode") and value is True]
        unknown = set(chosen) - POOLING_MODES.keys()
        if unknown or len(chosen) > 1:
            raise ValueError(f"its pooling is {', '.join(chosen)}: one of {', '.join(POOLING_MODES)} is supported")
        pooling = POOLING_MODES[chosen[0]] if chosen else "last"
        return cls(pooling, dict(prompts.get("prompts", {})))


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


class Embedder:
    """Makes embeddings with a model, pass by pass.

    Args:
        card: how they are made.

    Raises:
        ValueError: the model has no hidden states that could be read.
    """

    def __init__(self, model: nn.Module, card: EmbeddingCard | None = None) -> None:
        self._model, self._tap, self.card = model, HiddenTap(model), card or EmbeddingCard()
        caches = self._caches()
        self._shares = all(is_ours(cache) and isinstance(cache.layout, Append) for cache in caches)

    def _caches(self) -> list[Any]:
        return make_prompt_cache(self._model, CachePolicy(), strict=False)

    def embed(
        self,
        texts: Sequence[Sequence[int]],
        pooling: Pooling | None = None,
        most: Callable[[], int] = lambda: MOST_TOKENS[on_cpu()],
        passed: Callable[[int, float], None] = lambda tokens, seconds: None,
    ) -> Generator[None, None, list[mx.array]]:
        """Embeddings (D,) of float32 with a norm of 1, in the order of the texts; stops after each pass.

        Args:
            texts: token ids of each, at least one.
            pooling: instead of the card's.
            most: tokens that a pass may read.
            passed: called with the tokens of each pass and its seconds.
        """
        chosen, shared = pooling or self.card.pooling, self._shared(texts)
        reading = _Reading(self._tap, chosen, most, passed)
        prefix, beginning = None, None
        if shared:
            prefix = self._caches()
            beginning = yield from reading.read([texts[0][:shared]], prefix)
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        found: dict[int, mx.array] = {}
        while order:
            longest, room, caches = len(texts[order[-1]]) - shared, most(), None
            rows = max(1, min(len(order), room // longest))
            if prefix is not None:
                copy = sum(cache.nbytes for cache in prefix) * (shared + longest) // shared
                rows = max(1, min(rows, COPIED_BYTES // max(1, copy)))
                caches = [cache.merge([cache] * rows) for cache in prefix]
            elif longest > room:  # a single row, chunk by chunk
                caches = self._caches()
            batch, order = order[-rows:], order[:-rows]
            states = yield from reading.read([texts[number][shared:] for number in batch], caches)
            states = states if beginning is None else _joined(chosen, beginning, states)
            if chosen == "mean":
                states = states / mx.array([len(texts[number]) for number in batch])[:, None]
            vectors = states / mx.maximum(mx.linalg.norm(states, axis=1, keepdims=True), 1e-12)
            mx.eval(vectors)
            found |= dict(zip(batch, vectors, strict=True))
        return [found[number] for number in range(len(texts))]

    def _shared(self, texts: Sequence[Sequence[int]]) -> int:
        """How many first tokens of all texts are read once; each keeps one of its own."""
        if len(texts) < 2 or not self._shares:
            return 0
        lists = [list(text) for text in texts]
        # In their order, all others lie between these.
        shared = min(common_prefix(min(lists), max(lists)), min(map(len, texts)) - 1)
        return shared if shared >= MIN_SHARED else 0


class _Reading:
    """Passes over rows that are padded on the right."""

    def __init__(
        self,
        tap: HiddenTap,
        pooling: Pooling,
        most: Callable[[], int],
        passed: Callable[[int, float], None],
    ) -> None:
        self._tap, self._pooling, self._most, self._passed = tap, pooling, most, passed

    def read(self, texts: Sequence[Sequence[int]], caches: list[Any] | None) -> Generator[None, None, mx.array]:
        """The pooled states (B, D) of texts, of a mean their sum.

        Args:
            caches: that have read what comes before, or will read several chunks; None for a single pass.
        """
        lengths, longest = [len(text) for text in texts], max(map(len, texts))
        tokens = mx.array([[*text, *[0] * (longest - len(text))] for text in texts])
        ends, total, first = mx.array(lengths)[:, None], mx.zeros((len(texts), self._tap.width)), 0
        while first < longest:
            last = longest if caches is None else min(longest, first + max(1, self._most() // len(texts)))
            started = time.perf_counter()
            _, states = self._tap(tokens[:, first:last], cache=caches)
            places = mx.arange(first, last)[None]
            if self._pooling == "mean":
                counted = places < ends
            else:
                counted = places == (ends - 1 if self._pooling == "last" else mx.zeros_like(ends))
            total = total + mx.where(counted[:, :, None], states.astype(mx.float32), 0.0).sum(axis=1)
            mx.eval(total, [] if caches is None else [cache.state for cache in caches])
            self._passed(len(texts) * (last - first), time.perf_counter() - started)
            first = last
            yield
        return total


def _joined(pooling: Pooling, beginning: mx.array, states: mx.array) -> mx.array:
    """Pooled states of texts, of those of what they all begin with and of the rest."""
    if pooling == "mean":
        return beginning + states
    return states if pooling == "last" else mx.broadcast_to(beginning, states.shape)
