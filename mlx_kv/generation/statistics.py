"""What the caches of one model hold, and what they did, summed up over its layers.

Decides what is summed and what is the busiest layer's. Knows nothing about loops, models or the command line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mlx_kv.cache.checks import cache_list
from mlx_kv.mlxlm.traverse import leaves, parts_of


@dataclass(frozen=True)
class CacheStatistics:
    """What the caches of one model hold, and what they did.

    Attributes:
        bytes_live: of tokens that can still be seen.
        bytes_allocated: dead slots included.
        bytes_full: what all tokens up to here would take, with none evicted or overwritten.
        growths: reallocations of the busiest layer.
        tokens_evicted: by all rows of the busiest layer.
        compactions: that the busiest row of the busiest layer took part in.
        compaction_seconds: of all layers together.
    """

    bytes_live: int
    bytes_allocated: int
    growths: int
    bytes_full: int
    tokens_evicted: int
    compactions: int
    compaction_seconds: float


def cache_statistics(caches: Iterable[Any]) -> CacheStatistics:
    """Sums over all layers; a cache that is not ours counts as wholly live.

    Raises:
        TypeError: something else than caches.
    """
    everything = list(leaves(cache_list("caches", caches)))
    layers = [parts_of(cache) for cache in everything]
    evictors = [[own.evictor for own in parts if own.evictor is not None] for parts in layers]
    return CacheStatistics(
        bytes_live=sum(getattr(cache, "nbytes_live", cache.nbytes) for cache in everything),
        bytes_allocated=sum(cache.nbytes for cache in everything),
        growths=max((own.growths for parts in layers for own in parts), default=0),
        bytes_full=sum(getattr(cache, "nbytes_full", cache.nbytes) for cache in everything),
        tokens_evicted=max((sum(own.evicted for own in layer) for layer in evictors), default=0),
        compactions=max((own.compactions for layer in evictors for own in layer), default=0),
        compaction_seconds=sum(own.seconds for layer in evictors for own in layer),
    )
