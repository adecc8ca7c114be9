"""Slow caches in the shadow of ours, of one layer and of all layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as stock
from slow_cache import SlowCache

from mlx_kv import KVCache
from mlx_kv.mlxlm.traverse import leaves


class Shadowed:
    """One of our caches with a slow one in its shadow: at each update, queries must see the same tokens, bit for bit.

    Comparing logits cannot show that for quantised caches: a difference in the last bit of one layer's output can turn
    the rounding of a key in the next, and one step of 8 bits is no small number.
    """

    def __init__(self, cache: KVCache, slow: SlowCache) -> None:
        self.cache, self.slow, self.checked = cache, slow, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)  # `bits` too, which is there only after a fetch of packed planes

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        new = keys.shape[2]
        masks = [cache.make_mask(new) for cache in (self.cache, self.slow)]
        fetched = self.cache.update_and_fetch(keys, values)
        how = {"group_size": self.group_size, "bits": self.bits} if hasattr(self, "bits") else None
        ours = [mx.dequantize(*x, **how) if how else x for x in fetched]
        assert [x.dtype for x in ours] == [keys.dtype, values.dtype]
        ours = [widened(x) for x in ours]
        theirs = [widened(x) for x in self.slow.update_and_fetch(keys, values)]
        for row in range(keys.shape[0]):
            lines = [token_lines(tensors, row) for tensors in (ours, theirs)]
            for query in range(new):
                got, wanted = (
                    sorted_lines(line[seen_by(mask, row, query, new, len(line))])
                    for line, mask in zip(lines, masks, strict=True)
                )
                assert np.array_equal(got, wanted), f"query {query} of row {row} sees other tokens"
        self.checked += 1
        return fetched


def widened(x: mx.array) -> np.ndarray:
    """In float32, which holds every half-precision number; NumPy knows no bfloat16."""
    return np.array(x.astype(mx.float32))


def seen_by(mask: Any, row: int, query: int, new: int, total: int) -> np.ndarray:
    """Which keys one query may look at, whatever form the mask has."""
    if mask is None:
        return np.ones(total, bool)
    if isinstance(mask, str):
        return np.arange(total) <= total - new + query
    table = np.array(mask)
    return table[query] if table.ndim == 2 else table[row, 0, query]


def token_lines(tensors: Sequence[np.ndarray], row: int) -> np.ndarray:
    """Keys and values of all tokens of one row, heads side by side, one token a line."""
    return np.concatenate([np.moveaxis(x[row], 0, 1).reshape(x.shape[2], -1) for x in tensors], axis=1)


def sorted_lines(lines: np.ndarray) -> np.ndarray:
    """In an order of their own, whatever slots they came from."""
    return lines[np.lexsort(lines.T)]


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
