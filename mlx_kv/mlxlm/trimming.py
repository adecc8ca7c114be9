"""What is done to the caches of all layers together, or to none: tokens taken back, and compaction.

Caches are ours, others that follow `cache.protocol.Cache`, or mlx-lm's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import mlx.core as mx
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import cache_list, check_type
from mlx_kv.mlxlm.traverse import attention_caches, in_use, leaves


def can_trim(caches: Iterable[Any], n: int | Sequence[int]) -> bool:
    """Whether every layer can take back n tokens, or n[i] of row i, and then any of them be written again."""
    return all(_can_trim(cache, n) for cache in in_use(caches))


def _can_trim(cache: Any, n: int | Sequence[int]) -> bool:
    # Ours and those of others answer as `protocol.Cache` says; mlx-lm's own know only whether they trim at all.
    return bool(cache.can_trim(n) if hasattr(cache, "can_trim") else isinstance(n, int) and cache.is_trimmable())


def can_trim_prompt_cache(caches: Iterable[Any], n: int | Sequence[int] | None = None) -> bool:
    """Whether every layer can take back tokens, so that others can be written in their place.

    Args:
        n: so many of every row, or n[i] of row i; None is mlx-lm's question: any number that is held.
    """
    caches = cache_list("caches", caches)
    return all(cache.is_trimmable() for cache in in_use(caches)) if n is None else can_trim(caches, n)


@overload
def trim_prompt_cache(caches: Sequence[Any], n: int, *, strict: bool = False) -> int: ...
@overload
def trim_prompt_cache(caches: Sequence[Any], n: Sequence[int], *, strict: bool = False) -> Sequence[int]: ...
def trim_prompt_cache(caches: Sequence[Any], n: int | Sequence[int], *, strict: bool = False) -> int | Sequence[int]:
    """Drops the last n tokens in every layer, or in none, and returns how many, as mlx-lm's function of this name.

    Where fewer than n are held, these go; where a layer cannot take back so many (a ring that has overwritten what
    would be seen again, recurrent state), nothing goes in any layer, and the answer is 0.

    Args:
        n: tokens of every row, or n[i] of row i, which then are all held, or nothing goes.
        strict: all n or a ValueError.

    Raises:
        ValueError: strict, and a layer cannot, with its reason; nothing has changed then, in any layer.
    """
    used, n = in_use(cache_list("caches", caches)), n.tolist() if isinstance(n, mx.array) else n
    check_type("n", n, int | Sequence, "give a number of tokens, or one for each row")
    if not strict and isinstance(n, int):
        n = min([n, *(held for cache in used if (held := _held(cache)) is not None)])
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


def _held(cache: Any) -> int | None:
    """Tokens that every row of a cache holds, if it says so: positions, of which eviction takes none away."""
    offset = getattr(cache, "offset", None)
    if offset is None:
        return None
    least: Any = mx.min(mx.array(offset)).item()
    return max(0, int(least))


def trim_all(caches: Sequence[Any], n: int) -> bool:
    """Drops the last n tokens in every layer, and says whether it could; where not, nothing has changed."""
    could = n == 0 or can_trim(caches, n)
    if could:
        trim_prompt_cache(caches, n, strict=True)
    return could


def _why_no_trim(cache: Any, n: int | Sequence[int]) -> str:
    """Why a cache cannot take back so many tokens, and what to do about it."""
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
    """Evicts down to the budget in every layer, now; by itself a cache does that when its margin is overshot, too.

    Raises:
        ValueError: a score that cannot be used, or layers that have diverged; nothing has changed then, in any layer.
    """
    for cache in attention_caches(cache_list("caches", caches)):
        cache.compact()
