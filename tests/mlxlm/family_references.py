"""Slow, obvious caches for whole models: full histories, masked, and the same in the shadow of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from family_model import Family, WrongError, read, tokens
from mlx_lm.models import cache as stock
from shadowing import shadowed
from slow_cache import SlowCache

from mlx_kv import CachePolicy, make_prompt_cache
from mlx_kv.mlxlm.traverse import attention_caches, leaves

INDEXED = ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl")  # the second cache of a layer is an indexer's, never packed


class History(SlowCache):
    """Everything that a layer ever saw, in the slot of its position; what is evicted or out of sight is masked."""

    def __init__(self, bits: int | None, window: int | None = None, sinks: int = 0, chunk: int | None = None) -> None:
        super().__init__(bits, window, sinks, chunk)
        self.gone: set[int] = set()

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        mask = super().make_mask(N, return_array)
        if not self.gone and window_size is None:
            return mask
        seen = [
            [p not in self.gone and (window_size is None or q - p < window_size) for p in range(self.offset + N)]
            for q in range(self.offset, self.offset + N)
        ]
        return mx.array(seen) if mask is None else mask & mx.array(seen)


def windows_asked(model: nn.Module) -> set[int]:
    """The windows that a model asks masks for."""
    asked = set()

    class Listener(stock.RotatingKVCache):
        def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
            if window_size is not None:
                asked.add(window_size)
            return super().make_mask(N, window_size, return_array)

    caches = stock.make_prompt_cache(model)
    for cache in leaves(caches):
        if type(cache) is stock.RotatingKVCache:
            cache.__class__ = Listener
    read(model, caches, tokens(), [2])
    return asked


def histories(family: Family, bits: int | None = None, bound: tuple[int, int] | None = None) -> list[Any]:
    """mlx-lm's own list of caches, with histories in the place of attention caches.

    Args:
        bound: tokens and sinks that full attention keeps; None is all.
    """
    asked = windows_asked(family.model)

    def replaced(cache: Any, bits: int | None) -> Any:
        if type(cache) is stock.CacheList:
            inner = enumerate(cache.caches)
            plain = family.name in INDEXED
            return stock.CacheList(*(replaced(c, None if plain and i == 1 else bits) for i, c in inner))
        if type(cache) is stock.RotatingKVCache:
            return History(bits, max({cache.max_size} | {window for window in asked if window == cache.max_size + 1}))
        if type(cache) is stock.ChunkedKVCache:
            return History(bits, chunk=cache.chunk_size)
        if type(cache) is stock.KVCache:
            return History(bits) if bound is None else History(bits, *bound)
        return cache

    return [replaced(cache, bits) for cache in stock.make_prompt_cache(family.model)]


def run_shadowed(
    family: Family, policy: CachePolicy, rows: int, chunks: Sequence[int], bits: int | None = None
) -> None:
    """Reads with a slow cache in the shadow of each of ours: what every query sees must be the same, bit for bit."""
    caches = make_prompt_cache(family.model, policy)
    watched, shadows = shadowed(caches, histories(family, bits))
    prompt = mx.concatenate([tokens(seed, sum(chunks)) for seed in range(rows)])
    read(family.model, watched, prompt, chunks)
    used = [shadow for shadow in shadows if shadow.checked]
    assert used, "no layer wrote anything"
    assert all(shadow.checked == len(chunks) for shadow in used)
    if bits is not None and not any(
        cache.view.codecs[0].packed for cache in attention_caches(caches) if not cache.empty()
    ):
        raise WrongError("nothing was quantised")
