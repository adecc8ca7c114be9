"""The caches of a model's layers, one by one, also those inside mlx-lm's `CacheList`.

Decides which of them are ours, and which hold anything. Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

from mlx_lm.models import cache as stock

from mlx_kv.cache.kv_cache import KVCache


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches of all layers, those inside a `CacheList` one by one."""
    for cache in caches:
        if isinstance(cache, stock.CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def is_ours(cache: Any) -> TypeGuard[KVCache]:
    """Whether a cache is ours: of attention, and not somebody else's."""
    return isinstance(cache, KVCache)


def attention_caches(caches: Iterable[Any]) -> list[KVCache]:
    """Those of all the caches that are ours."""
    return [cache for cache in leaves(caches) if is_ours(cache)]


def in_use(caches: Iterable[Any]) -> list[Any]:
    """The caches of all layers that hold anything, as far as any does.

    Some models have caches for layers that have no attention: nothing is ever written to them, nor taken back. As long
    as nothing was written to any, nobody knows which they are.
    """
    everything = list(leaves(caches))
    unwritten = [is_ours(cache) and cache.keys is None for cache in everything]
    written = [cache for cache, spared in zip(everything, unwritten, strict=True) if not spared]
    return written if any(is_ours(cache) for cache in written) else everything
