"""Slow caches in the shadow of ours, for all layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mlx_lm.models import cache as stock
from oracle import Shadowed

from mlx_kv import KVCache
from mlx_kv.mlxlm.traverse import leaves


def shadowed(caches: Sequence[Any], slow: Iterable[Any]) -> tuple[list[Any], list[Shadowed]]:
    """Each of our caches as one in whose shadow the slow one of its place stands, and all of those by themselves."""
    others, shadows = iter(list(leaves(slow))), list[Shadowed]()

    def one(cache: Any) -> Any:
        if isinstance(cache, stock.CacheList):
            return stock.CacheList(*map(one, cache.caches))
        other = next(others)
        if not isinstance(cache, KVCache):
            return cache
        shadows.append(Shadowed(cache, other))
        return shadows[-1]

    return [one(cache) for cache in caches], shadows
