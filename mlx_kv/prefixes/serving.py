"""What of a sequence's caches decides whom they can serve: how far back they go, and how they keep what they keep.

Decides which trims are exact, so that what is served stands where a fresh read would. Knows nothing about which tokens
they have read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from mlx_kv.cache.codecs import are_plain, in_words
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import NO_LIMIT, Row, planned
from mlx_kv.mlxlm.traverse import is_ours, kind_of, leaves


def least_tokens(caches: Sequence[Any], held: int) -> int:
    """How few of `held` tokens caches can be trimmed back to exactly, all layers together."""
    most = held
    for cache in leaves(caches):
        if is_ours(cache):
            exact = [_exact_trim(cache, row, index) for index, row in enumerate(cache.view.rows)]
            most = min(most, *map(min, exact, cache.most_trims))
        elif not cache.is_trimmable():
            most = 0
    return held - most


def _exact_trim(cache: KVCache, row: Row, index: int) -> int:
    """Tokens that can be taken back to where a fresh read of the rest would stand.

    With a budget not beyond the last compaction: what was evicted then may have gone for the sake of later tokens. Nor
    further than what was seen of attention can be.
    """
    if cache.evictor is None:
        return cache.layout.most_trim(row)
    held, budget = cache.layout.held(row), cache.evictor.layout.budget
    most = max(0, held - budget) if row.evicted > 0 else cache.layout.most_trim(row)
    seen = cache.evictor.observation
    return most if seen is None or index >= len(seen.ends) else min(most, seen.most_trim(index))


def kept_how(caches: Sequence[Any]) -> str:
    """How caches keep keys and values, in words: only those that say the same may stand in for each other."""
    return "; ".join(_how(cache) if is_ours(cache) else kind_of(cache).__name__ for cache in leaves(caches))


def mark_of_drafts(own: Sequence[Any], plain: Sequence[Any]) -> list[str]:
    """What tells the caches of whom text is drafted for from others, if anything: rings have room for drafts then."""
    how = kept_how(own)
    return [] if how == kept_how(plain) else [hashlib.blake2b(how.encode(), digest_size=8).hexdigest()]


def _how(cache: KVCache) -> str:
    keeps, view = [" ".join(map(str, planned(cache.layout).parameters))], cache.view
    if not are_plain(view.codecs):
        keeps.append(f"{in_words(view.codecs)} from {view.quantized_start}")
        if view.residual_length:
            keeps.append(f"but the newest {view.residual_length}")
    if cache.evictor is not None:
        keeps.append(f"by {cache.evictor.score.name} for each {cache.evictor.granularity}")
        layers = cache.evictor.layers
        if not isinstance(layers, str):
            keeps.append(f"by table {hashlib.blake2b(repr(layers).encode(), digest_size=8).hexdigest()}")
        elif layers == "global":
            keeps.append("in one ranking of all layers")
    return ", ".join(keeps)


def needs_checkpoints(caches: Sequence[Any]) -> bool:
    """Whether caches will come to where they cannot be trimmed back to any prefix."""
    return not all(
        is_ours(cache) and cache.layout.enough_slots == NO_LIMIT and not cache.view.residual_length
        for cache in leaves(caches)
    )
