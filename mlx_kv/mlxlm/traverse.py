"""The caches of a model's layers, one by one, also those inside mlx-lm's `CacheList`.

Decides which of them are ours, and which hold anything. Models are not looked at here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

from mlx_lm.models import cache as stock

from mlx_kv.cache.classes import RowClasses
from mlx_kv.cache.eviction.peers import Peers
from mlx_kv.cache.kv_cache import KVCache

Places = list[tuple[KVCache, int]]


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches of all layers, those inside a `CacheList` one by one."""
    for cache in caches:
        if isinstance(cache, stock.CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def mapped(caches: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    """What a function makes of the caches of all layers, those inside a `CacheList` one by one."""

    def one(cache: Any) -> Any:
        if isinstance(cache, stock.CacheList):
            return stock.CacheList(*map(one, cache.caches))  # type: ignore[no-untyped-call]
        return function(cache)

    return [one(cache) for cache in caches]


def kind_of(cache: Any) -> type:
    """The class of a cache; recurrent state that can go back is mlx-lm's in all else."""
    return stock.ArraysCache if isinstance(cache, stock.ArraysCache) else type(cache)


def is_ours(cache: Any) -> TypeGuard[KVCache]:
    """Whether a cache is ours: of attention, and not mlx-lm's or another package's."""
    return isinstance(cache, KVCache)


def parts_of(cache: Any) -> tuple[KVCache, ...]:
    """Ours that stand in one layer: one, or one for each class of rows; none where the cache is not ours."""
    return cache.parts if isinstance(cache, RowClasses) else (cache,) if is_ours(cache) else ()


def places_of(cache: Any) -> Places:
    """Of each row of a batch, the one of ours that has it, and which of its rows that is."""
    if isinstance(cache, RowClasses):
        return cache.places
    return [(cache, index) for index in range(len(cache.view.rows))] if is_ours(cache) else []


def attention_caches(caches: Iterable[Any]) -> list[KVCache]:
    """Those of all the caches that are ours."""
    return [part for cache in leaves(caches) for part in parts_of(cache)]


def hear_from(caches: Iterable[Any], peers: Peers) -> None:
    """Gives caches the peers that have the other parts of their model, which files and other processes don't store."""
    for cache in attention_caches(caches):
        if cache.evictor is not None:
            cache.evictor.hear_from(peers)


def in_use(caches: Iterable[Any]) -> list[Any]:
    """The caches of all layers that hold anything, as far as any does.

    Some models have caches for layers that have no attention: nothing is ever written to them, nor taken back. As long
    as nothing was written to any, these cannot be distinguished.
    """
    everything = list(leaves(caches))
    unwritten = [bool(parts_of(cache)) and all(own.keys is None for own in parts_of(cache)) for cache in everything]
    written = [cache for cache, spared in zip(everything, unwritten, strict=True) if not spared]
    return written if any(parts_of(cache) for cache in written) else everything
