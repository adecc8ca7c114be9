"""Named combinations, such as `RingKVCache`: each is called like a class and returns a `KVCache` of certain parts.

They add defaults and signatures but no behaviour. `isinstance` tests the parts of a cache, so that caches from a model
or a file match their name, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

from mlx_kv.cache.checks import whole_numbers
from mlx_kv.cache.codecs import Bits, Choice, are_plain
from mlx_kv.cache.eviction.allocation import Scope, checked_allocation
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.eviction.scores import Function
from mlx_kv.cache.growth import DEFAULT, Growth
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Budget, Chunks, Ring, default_keep_recent
from mlx_kv.settings import whole_number


class Named(type):
    """Metaclass: `isinstance` tests what a cache is made of."""

    @property
    def is_name(cls) -> bool:
        """Whether it is one of the names in this module, not a user's subclass of one."""
        return cls.__module__ == __name__

    def __instancecheck__(cls, instance: object) -> bool:
        if not cls.is_name:
            return super().__instancecheck__(instance)
        return isinstance(instance, KVCache) and cast(Any, cls)._describes(instance)


class Combination(KVCache, metaclass=Named):
    """Base class of the names."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """A `KVCache`; an instance of `cls` only for subclasses of users."""
        if not cls.is_name:
            return super().__new__(cls)
        cache: Any = KVCache.__new__(KVCache)
        cls.__init__(cache, *args, **kwargs)
        return cache  # type: ignore[no-any-return]

    @classmethod
    def from_state(cls, value: tuple[Any, ...], **settings: Any) -> Self:
        """A `KVCache` that continues from another's `state`, with the parts recorded there."""
        if not cls.is_name:
            return super().from_state(value, **settings)
        cache: Any = KVCache.from_state(value, **settings)
        return cache  # type: ignore[no-any-return]

    @staticmethod
    def _describes(cache: KVCache) -> bool:
        """Whether a cache matches this name."""
        raise NotImplementedError


class QuantizedKVCache(Combination):
    """A quantised `KVCache`, with the name and the signature of mlx-lm's."""

    def __init__(self, group_size: int = 64, bits: int = 8) -> None:
        KVCache.__init__(self, bits, group_size)

    @staticmethod
    def _describes(cache: KVCache) -> bool:
        """Whether it has a codec."""
        return not are_plain(cache.codecs)


class RingKVCache(Combination):
    """A `KVCache` that keeps the last `window` tokens and can undo its last write, if not longer than max_write.

    It has window + max_write - 1 slots while a prompt is read, and as many as the window in decoding (plus
    max_rollback, to the next power of two), rounded up to multiples of 256.

    Args:
        window: tokens that a query sees, itself and the sinks included.
        max_write: the longest write to plan for. A longer one loses nothing, but attention then reads a copy.
        sinks: first tokens that are never dropped; they count towards the window.
        max_rollback: tokens that can be trimmed at any time, also over several writes.

    Raises:
        ValueError: a window or max_write below 1, sinks that fill the window, and the errors of `KVCache`.
    """

    def __init__(
        self,
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
        residual_length: int = 0,
    ) -> None:
        window, max_write = whole_number("window", window, minimum=1), whole_number("max_write", max_write, minimum=1)
        sinks, max_rollback = whole_number("sinks", sinks), whole_number("max_rollback", max_rollback)
        layout = Ring(window, max(max_write, max_rollback), sinks, max_rollback)
        storage: Any = {"packed_decode": packed_decode, "codec": codec, "residual_length": residual_length}
        KVCache.__init__(self, bits, group_size, growth, reserve, layout=layout, **storage)

    @staticmethod
    def _describes(cache: KVCache) -> bool:
        """Whether it has a window."""
        return cache.layout.window is not None


class RotatingKVCache(RingKVCache):
    """A ring with the name, the signature and the meaning of mlx-lm's: `keep` sinks, `max_size` tokens in all."""

    def __init__(self, max_size: int, keep: int = 0) -> None:
        RingKVCache.__init__(self, max_size, sinks=keep)


class RingBufferKVCache(RingKVCache):
    """Another name of `RingKVCache`; max_write is the window by default."""

    def __init__(self, window: int, max_write: int | None = None) -> None:
        RingKVCache.__init__(self, window, window if max_write is None else max_write)


class ChunkedKVCache(Combination):
    """A `KVCache` for chunked attention, as llama4's: a token sees the tokens of its own chunk.

    Has `start_position` and `maybe_trim_front` like mlx-lm's cache of this name and returns tokens in the order of
    positions. Adds a mask, exact trims, bits, batches, and trims of the front without a copy.

    Args:
        chunk_size: positions of a chunk.
        max_write: the longest write to plan for. A longer one loses nothing.
        max_rollback: tokens that can be trimmed at any time, also over several writes.

    Raises:
        ValueError: a chunk_size or max_write below 1, and the errors of `KVCache`.
    """

    def __init__(
        self,
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
        residual_length: int = 0,
    ) -> None:
        chunk_size = whole_number("chunk_size", chunk_size, minimum=1)
        max_write = whole_number("max_write", max_write, minimum=1)
        max_rollback = whole_number("max_rollback", max_rollback)
        layout = Chunks(chunk_size, max(max_write, max_rollback), max_rollback)
        storage: Any = {"packed_decode": packed_decode, "codec": codec, "residual_length": residual_length}
        KVCache.__init__(self, bits, group_size, growth, reserve, layout=layout, **storage)

    @staticmethod
    def _describes(cache: KVCache) -> bool:
        """Whether it has chunks."""
        return cache.layout.chunk_size is not None


class CompressedKVCache(Combination):
    """A `KVCache` that keeps at most `budget` tokens of each sequence (plus up to `margin`), chosen by a score.

    For a model, use `CachePolicy(budget=...)`, whose layers decide together. A cache made here decides alone.

    Args:
        budget: tokens left after a compaction.
        keep_recent: newest tokens that are never evicted; a trim can go back as far. None is 64, but at most a quarter
            of the budget, or the residual if that is longer.
        sinks: first tokens that are never evicted.
        score: name of a score (`mlx_kv.score_names()`), or any callable `(tokens: ScoredTokens) -> (B, H, n)` in
            float32; tokens with higher scores are kept.
        share: which tokens are kept together. "layers": the same in all layers of a sequence; "layer": each layer its
            own; "head": each head its own; "adaptive": the best tokens of all heads of a layer, so that heads may keep
            different numbers. For a single layer the first two are equal.
        margin: tokens above the budget before a compaction; None is max(64, budget // 16).
        max_write: the longest write to plan for: memory peaks at budget + margin + max_write tokens.

    Raises:
        ValueError: a budget that sinks and recent tokens would fill, a number below its minimum, an unknown score or
            share, and the errors of `KVCache`.
    """

    def __init__(
        self,
        budget: int,
        keep_recent: int | None = None,
        sinks: int = 4,
        score: str | Function = "key_diff",
        share: Scope = "layers",
        margin: int | None = None,
        bits: Bits | None = None,
        group_size: int = 64,
        max_write: int = 512,
        growth: Growth = DEFAULT,
        reserve: int = 0,
        *,
        packed_decode: bool = True,
        codec: Choice | None = None,
        residual_length: int = 0,
    ) -> None:
        if keep_recent is None:
            residual = whole_number("residual_length", residual_length)
            keep_recent = default_keep_recent(whole_number("budget", budget, minimum=1), residual)
        checked_allocation(share)
        evictor = Evictor(Budget(budget, keep_recent, sinks, margin, max_write), score, share)
        storage: Any = {"packed_decode": packed_decode, "codec": codec, "residual_length": residual_length}
        KVCache.__init__(self, bits, group_size, growth, reserve, evictor=evictor, **storage)

    @staticmethod
    def _describes(cache: KVCache) -> bool:
        """Whether it evicts."""
        return cache.evictor is not None


class BatchKVCache(Combination):
    """A batch of len(left_padding) rows, with the name and signature of mlx-lm's; padding is not stored.

    Raises:
        ValueError: no row.
    """

    def __init__(self, left_padding: Sequence[int]) -> None:
        KVCache.__init__(self)
        _begin(self, left_padding)

    @staticmethod
    def _describes(cache: KVCache) -> bool:
        """Whether it has no window; every cache can have rows."""
        return cache.layout.window is None


class BatchRotatingKVCache(RingKVCache):
    """A batch of rings of len(left_padding) rows, with the name and the signature of mlx-lm's.

    Raises:
        ValueError: no row, or a max_size below 1.
    """

    def __init__(self, max_size: int, left_padding: Sequence[int]) -> None:
        RingKVCache.__init__(self, max_size)
        _begin(self, left_padding)


def _begin(cache: KVCache, left_padding: Sequence[int]) -> None:
    """Gives an empty cache one row per number, which begins with that much padding."""
    counts = whole_numbers(left_padding, 1)
    if not counts:
        raise ValueError("left_padding is empty: give one number for each row of the batch, 0 for none")
    cache._join([cache] * (len(counts) - 1))
    cache.prepare(left_padding=counts)
