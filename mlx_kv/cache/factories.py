"""Names for usual combinations: each makes a `KVCache` of certain parts, and nothing else.

Decides only defaults and signatures. A combination is never a class of its own, so these are functions that are named
like what they make.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_kv.cache.codecs import Bits, Choice
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.eviction.granularity import Granularity
from mlx_kv.cache.eviction.scores import Function
from mlx_kv.cache.growth import DEFAULT, Growth
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Budget, Chunks, Ring


def QuantizedKVCache(group_size: int = 64, bits: int = 8) -> KVCache:  # noqa: N802, mlx-lm's name for it
    """A quantised `KVCache`, with the name and the signature of mlx-lm's."""
    return KVCache(bits=bits, group_size=group_size)


def RingKVCache(  # noqa: N802, a choice of parts with the name of what it is
    window: int,
    max_write: int = 512,
    sinks: int = 0,
    bits: Bits | None = None,
    group_size: int = 64,
    growth: Growth = DEFAULT,
    reserve: int = 0,
    *,
    packed_decode: bool = True,
    codec: Choice | None = None,
    max_rollback: int = 0,
) -> KVCache:
    """A `KVCache` that keeps the last `window` tokens and can undo its last write.

    It has window + max_write - 1 slots while it is written to in long pieces, and as many as the window while tokens
    come one by one.

    Args:
        window: tokens that a query sees, itself and the sinks included.
        max_write: the longest write to plan for. A longer one loses nothing, but attention then reads a copy.
        sinks: so many of the first tokens are never dropped; they count towards the window.
        max_rollback: tokens that it must be able to take back at any time, also those of several writes.

    Raises:
        ValueError: a window or max_write below 1, sinks that fill the window, and what `KVCache` refuses.
    """
    layout = Ring(window, max(max_write, max_rollback), sinks, max_rollback)
    return KVCache(bits, group_size, growth, reserve, packed_decode=packed_decode, layout=layout, codec=codec)


def RotatingKVCache(max_size: int, keep: int = 0) -> KVCache:  # noqa: N802, mlx-lm's name for it
    """A ring with the name, the signature and the meaning of mlx-lm's: `keep` sinks, `max_size` tokens in all."""
    return RingKVCache(max_size, sinks=keep)


def RingBufferKVCache(window: int, max_write: int | None = None) -> KVCache:  # noqa: N802, its name elsewhere
    """A ring for those who know it under this name; max_write is the window unless told otherwise."""
    return RingKVCache(window, window if max_write is None else max_write)


def ChunkedKVCache(  # noqa: N802, mlx-lm's name for it
    chunk_size: int,
    max_write: int = 512,
    bits: Bits | None = None,
    group_size: int = 64,
    growth: Growth = DEFAULT,
    reserve: int = 0,
    *,
    packed_decode: bool = True,
    codec: Choice | None = None,
    max_rollback: int = 0,
) -> KVCache:
    """A `KVCache` for chunked attention, as llama4's: a token sees those of its own chunk of the text.

    Has `start_position` and `maybe_trim_front` like mlx-lm's cache of this name, and hands out what begins there in the
    order of positions. Beyond that: a mask, exact trims, bits, batches, and no copy for each trim of the front.

    Args:
        chunk_size: positions of a chunk.
        max_write: the longest write to plan for. A longer one loses nothing.
        max_rollback: tokens that it must be able to take back at any time, also those of several writes.

    Raises:
        ValueError: a chunk_size or max_write below 1, and what `KVCache` refuses.
    """
    layout = Chunks(chunk_size, max(max_write, max_rollback), max_rollback)
    return KVCache(bits, group_size, growth, reserve, packed_decode=packed_decode, layout=layout, codec=codec)


def CompressedKVCache(  # noqa: N802, a choice of parts with the name of what it is
    budget: int,
    keep_recent: int = 64,
    sinks: int = 4,
    score: str | Function = "key_diff",
    share: Granularity = "layers",
    margin: int | None = None,
    bits: Bits | None = None,
    group_size: int = 64,
    max_write: int = 512,
    growth: Growth = DEFAULT,
    reserve: int = 0,
    *,
    packed_decode: bool = True,
    codec: Choice | None = None,
) -> KVCache:
    """A `KVCache` that keeps at most `budget` tokens of each sequence, or up to `margin` more: those that matter most.

    For a model, use `CachePolicy(budget=...)`: its layers then agree on which tokens go. One made here stands alone.

    Args:
        budget: tokens that are left after a compaction.
        keep_recent: so many of the newest tokens are never evicted; a trim can go back as far.
        sinks: so many of the first tokens are never evicted.
        score: what matters, by name (`mlx_kv.score_names()`), or any callable `(tokens: ScoredTokens) -> (B, H, n)` in
            float32, higher is kept.
        share: "head", each head keeps its own tokens; "adaptive", and those that matter most among the tokens of all
            heads, so that one may keep more than another; otherwise heads keep the same.
        margin: how far the budget may be overshot before a compaction; None is max(64, budget // 16).
        max_write: the longest write to plan for: memory peaks at budget + margin + max_write tokens.

    Raises:
        ValueError: a budget that sinks and recent tokens would fill, a number below its least, an unknown score or
            share, and what `KVCache` refuses.
    """
    evictor = Evictor(Budget(budget, keep_recent, sinks, margin, max_write), score, share)
    return KVCache(bits, group_size, growth, reserve, packed_decode=packed_decode, evictor=evictor, codec=codec)


def BatchKVCache(left_padding: Sequence[int]) -> KVCache:  # noqa: N802, mlx-lm's name for it
    """A batch of len(left_padding) rows, with the name and the signature of mlx-lm's; padding is not stored."""
    return _batch(KVCache(), left_padding)


def BatchRotatingKVCache(max_size: int, left_padding: Sequence[int]) -> KVCache:  # noqa: N802, mlx-lm's name for it
    """A batch of rings of len(left_padding) rows, with the name and the signature of mlx-lm's."""
    return _batch(RingKVCache(max_size), left_padding)


def _batch(cache: KVCache, left_padding: Sequence[int]) -> KVCache:
    if not left_padding:
        raise ValueError("left_padding is empty: give one number for each row of the batch, 0 for none")
    batch = KVCache.merge([cache] * len(left_padding))
    batch.prepare(left_padding=left_padding)
    return batch
