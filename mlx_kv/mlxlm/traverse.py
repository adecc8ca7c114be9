"""The caches of all layers of a model, also those inside mlx-lm's `CacheList`: listed, trimmed and compacted.

Caches are ours, others that follow `cache.protocol.Cache`, or mlx-lm's own. A trim changes all layers or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard, overload

import mlx.core as mx
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import cache_list, check_type
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.communicator import CacheCommunicator
from mlx_kv.settings import as_int

Places = list[tuple[KVCache, int]]


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches of all layers, those inside a `CacheList` one by one."""
    for cache in caches:
        if isinstance(cache, stock.CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def mapped(caches: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    """The results of a function of each cache, in the same structure."""
    # Not by an inner function that calls itself: such a cycle would keep the caches until Python collects garbage.
    return [
        stock.CacheList(*mapped(cache.caches, function))  # type: ignore[no-untyped-call]
        if isinstance(cache, stock.CacheList)
        else function(cache)
        for cache in caches
    ]


def kind_of(cache: Any) -> type:
    """The class of a cache; mlx-lm's also for recurrent state with checkpoints."""
    return stock.ArraysCache if isinstance(cache, stock.ArraysCache) else type(cache)


def is_ours(cache: Any) -> TypeGuard[KVCache]:
    """Whether a cache is a `KVCache`."""
    return isinstance(cache, KVCache)


def parts_of(cache: Any) -> tuple[KVCache, ...]:
    """The `KVCache`s of one layer: one, or one for each class of rows; none where the cache is not ours."""
    return cache.parts if isinstance(cache, SegmentedCache) else (cache,) if is_ours(cache) else ()


def places_of(cache: Any) -> Places:
    """For each row of a batch, the `KVCache` that stores it, and its row there."""
    if isinstance(cache, SegmentedCache):
        return cache.places
    return [(cache, index) for index in range(len(cache.view.rows))] if is_ours(cache) else []


def attention_caches(caches: Iterable[Any]) -> list[KVCache]:
    """The `KVCache`s of all layers."""
    return [part for cache in leaves(caches) for part in parts_of(cache)]


def set_communicator(caches: Iterable[Any], communicator: CacheCommunicator) -> None:
    """Connects caches to the other parts of their model, after they were loaded or received."""
    for cache in attention_caches(caches):
        if cache.evictor is not None:
            cache.evictor.set_communicator(communicator)


def in_use(caches: Iterable[Any]) -> list[Any]:
    """The caches that hold tokens; all of them while none does.

    Some models have caches for layers without attention, which are never written to or trimmed.
    """
    everything = list(leaves(caches))
    unwritten = [bool(parts_of(cache)) and all(part.keys is None for part in parts_of(cache)) for cache in everything]
    written = [cache for cache, spared in zip(everything, unwritten, strict=True) if not spared]
    return written if any(parts_of(cache) for cache in written) else everything


def can_trim(caches: Iterable[Any], n: int | Sequence[int]) -> bool:
    """Whether every layer can drop its last n tokens, or n[i] of row i, so that others can be written instead."""
    return all(_can_trim(cache, n) for cache in in_use(caches))


def _can_trim(cache: Any, n: int | Sequence[int]) -> bool:
    # mlx-lm's own caches have no can_trim.
    return bool(cache.can_trim(n) if hasattr(cache, "can_trim") else isinstance(n, int) and cache.is_trimmable())


def can_trim_prompt_cache(caches: Iterable[Any], n: int | Sequence[int] | None = None) -> bool:
    """Whether every layer can drop its last tokens, so that others can be written instead.

    Args:
        n: tokens of every row, or n[i] of row i; None, as in mlx-lm, is any number that is held.
    """
    caches = cache_list("caches", caches)
    return all(cache.is_trimmable() for cache in in_use(caches)) if n is None else can_trim(caches, as_int(n))


@overload
def trim_prompt_cache(caches: Sequence[Any], n: int, *, strict: bool = False) -> int: ...
@overload
def trim_prompt_cache(caches: Sequence[Any], n: Sequence[int], *, strict: bool = False) -> Sequence[int]: ...
def trim_prompt_cache(caches: Sequence[Any], n: int | Sequence[int], *, strict: bool = False) -> int | Sequence[int]:
    """Drops the last n tokens in every layer, or in none, and returns how many, as mlx-lm's function of this name.

    Where fewer than n are held, all of them are dropped. Where a layer cannot drop so many (a ring that has overwritten
    tokens that would be seen again, recurrent state), no layer changes, and the result is 0.

    Args:
        n: tokens of every row, or n[i] of row i, which must all be held.
        strict: raise an error instead of dropping fewer.

    Raises:
        ValueError: strict, and a layer cannot, with its reason; no layer has changed.
    """
    used, n = in_use(cache_list("caches", caches)), as_int(n.tolist() if isinstance(n, mx.array) else n)
    check_type("n", n, int | Sequence, "give a number of tokens, or one for each row")
    if not strict and isinstance(n, int):
        n = min([n, *(tokens for cache in used if (tokens := _tokens_in(cache)) is not None)])
    if isinstance(n, int) and n == 0:
        return n  # recurrent state, too, can be left as it is
    for cache in used:
        if not _can_trim(cache, n):
            if not strict:
                return 0 if isinstance(n, int) else [0] * len(n)
            index = next(i for i, layer in enumerate(caches) if any(leaf is cache for leaf in leaves([layer])))
            raise ValueError(f"cannot trim {n} tokens: layer {index} {_why_no_trim(cache, n)}")
    for cache in used:
        cache.trim(n) if isinstance(n, int) else cache.trim_per_sequence(n)
    return n


def _tokens_in(cache: Any) -> int | None:
    """The positions that every row of a cache has, evicted ones included; None where it has no offset."""
    offset = getattr(cache, "offset", None)
    if offset is None:
        return None
    shortest: Any = mx.min(mx.array(offset)).item()
    return max(0, int(shortest))


def trim_all(caches: Sequence[Any], n: int) -> bool:
    """Drops the last n tokens in every layer, or in none; returns whether it did."""
    if could := n == 0 or can_trim(caches, n):
        trim_prompt_cache(caches, n, strict=True)
    return could


def _why_no_trim(cache: Any, n: int | Sequence[int]) -> str:
    """Why a cache cannot drop so many tokens, and the fix."""
    if type(cache) is stock.ArraysCache:
        return (
            "is recurrent state of mlx-lm's, which cannot go back: make the caches with CachePolicy(max_rollback=...), "
            "copy them before (copy.deepcopy), or read them anew"
        )
    if not hasattr(cache, "can_trim"):
        return f"is a {type(cache).__name__} of mlx-lm's, which takes no tokens back: read them anew"
    try:  # it refuses before it changes anything
        cache.trim(n) if isinstance(n, int) else cache.trim_per_sequence(n)
    except ValueError as error:
        return f"says: {error}"
    return f"({type(cache).__name__}) says that it cannot"


def compact(caches: Iterable[Any]) -> None:
    """Evicts down to the budget in every layer, now, instead of when the margin is exceeded.

    Raises:
        ValueError: a score that cannot be used, or layers that have diverged; nothing has changed then, in any layer.
    """
    everything = cache_list("caches", caches)
    for cache in leaves(everything):
        if isinstance(cache, SegmentedCache):
            cache.before_write(compacting=True)
    for part in attention_caches(everything):
        part.compact()
