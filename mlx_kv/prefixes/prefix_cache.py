"""What `PromptMemory` and `PromptStore` have in common, and how far the caches of an entry can serve other prompts.

A prefix cache holds the caches of one model and policy: of the fingerprint it was made with, or else of its first
reader.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, Protocol

from mlx_kv.cache.codecs import are_plain, in_words
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import NO_LIMIT, Row, planned
from mlx_kv.mlxlm.traverse import is_ours, kind_of, leaves
from mlx_kv.prefixes.index import MIN_SHARED, E, Entry, EntryTable, EvictedPrefixes, packed

Measure = Literal["kept", "live"]  # bytes in a PromptMemory, or of live slots


class Prefixes(Protocol):
    """Finds and keeps processed prompts."""

    def bind(self, find: Callable[[], str]) -> None:
        """Sets the fingerprint of model and policy to that of `find`, unless there is one."""
        ...

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """New caches that have read a prefix of these tokens, and its length; never all of them."""
        ...

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> object:
        """Keeps caches that have read exactly these tokens; it may decline."""
        ...


class Shards:
    """The other ranks' shards of the entries. Here there are none; see `rank_shards.RankShards`.

    Attributes:
        description: which part of the caches this process has; "" is all.
    """

    def __init__(self, description: str = "") -> None:
        self.description = description

    def fingerprint(self, own: str) -> str:
        """The fingerprint of all ranks together."""
        return own

    def largest(self, caches: Sequence[Any], tokens: int, measure: Measure, nbytes: int, least: int) -> tuple[int, int]:
        """The bytes of a sequence's caches, and the tokens they can be trimmed back to, each of the rank with most.

        Args:
            tokens: number of tokens that the caches have read.
            nbytes, least: of this rank's shard.
        """
        return nbytes, least

    def use_this_thread(self) -> None:
        """From now on messages are sent by the thread that has them, no longer by the engine's."""

    # --- in memory --------------------------------------------------------------------------------------------------

    def keep(self, name: str, caches: Sequence[Any], tokens: int, like: str | None, shared: int) -> int:
        """All ranks keep their shard as an entry that may share blocks with the entry `like`.

        Returns:
            The bytes of all entries, of the other rank with most.

        Raises:
            MemoryError: one rank can't; then none does.
        """
        return 0

    def take(self, name: str, own: list[Any], excess: int, capacity: int) -> list[Any]:
        """The caches of all ranks, given this rank's shard."""
        return own

    def drop(self, name: str) -> int:
        """All ranks remove their shard; returns the same as `keep`."""
        return 0

    # --- in a directory ---------------------------------------------------------------------------------------------

    def open(self, directory: str, deadline: float) -> None:
        """All ranks open their directory. Raises ValueError if one can't."""

    def pack(self, name: str, caches: Sequence[Any], tokens: Sequence[int], fingerprint: str) -> None:
        """All ranks pack their shard, to be written or removed later."""

    def writing(self, name: str) -> AbstractContextManager[None]:
        """Meanwhile all ranks write their packed shard. Raises OSError at the end if one couldn't."""
        return contextlib.nullcontext()

    def reading(self, name: str, seconds: float) -> AbstractContextManager[None]:
        """Meanwhile all ranks read their shard.

        Raises:
            FileNotFoundError: at the end, if one has none.
            ValueError: if one's is damaged.
            OSError: if one could not read it, or not in so many seconds.
        """
        return contextlib.nullcontext()

    def restore(self, name: str, own: list[Any], excess: int) -> list[Any]:
        """The caches of all ranks from what they read last. Raises ValueError if one's can't be made."""
        return own

    def remove(self, name: str) -> None:
        """All ranks remove their shard, packed or written."""

    def remove_others(self, names: Collection[str]) -> None:
        """All ranks remove old shards of entries that are not among these."""


class PrefixCache(ABC, Generic[E]):
    """Processed prompts of one model and policy; abstract.

    Args:
        max_bytes: of all entries.
        fingerprint: of model and policy; None takes that of the first reader.
        shards: the other ranks, if they have parts of the caches.

    Attributes:
        evicted: digests of entries that were removed to make room.
    """

    def __init__(self, max_bytes: int, fingerprint: str | None, shards: Shards | None) -> None:
        self.max_bytes, self._shards = max_bytes, Shards() if shards is None else shards
        self._given, self._fingerprint = fingerprint, fingerprint
        self._table: EntryTable[E] = EntryTable()
        self._bytes_of_others = 0  # of all entries, on the other rank with most
        self.evicted = EvictedPrefixes()

    @property
    def fingerprint(self) -> str | None:
        """Of the model and policy; None before the first reader."""
        return self._fingerprint

    def bind(self, find: Callable[[], str]) -> None:
        """Sets the fingerprint to that of a reader, unless one was given.

        Args:
            find: computes it.

        Raises:
            ValueError: an earlier reader had another model or policy.
        """
        if self._given is not None:
            return
        found, kind = self._shards.fingerprint(find()), type(self).__name__
        if self._fingerprint not in (None, found):
            raise ValueError(f"this {kind} keeps caches of another model or policy: give each a {kind} of its own")
        self._fingerprint = found

    def _bound(self) -> str:
        if self._fingerprint is None:
            kind = type(self).__name__
            raise ValueError(
                f"this {kind} has no fingerprint of a model and policy: read with a PromptReader, or give "
                f"{kind}(..., fingerprint=...), such as that of mlx_kv.files.fingerprint.model_fingerprint"
            )
        return self._fingerprint

    def serves(self, tokens: Sequence[int]) -> int:
        """The length of the prefix of a prompt that `find` would return caches for, in tokens."""
        best = self._best(tokens)
        return 0 if best is None else best[1]

    def nearest(self, tokens: Sequence[int]) -> tuple[E, int] | None:
        """The entry with the longest common prefix, and its length in tokens, even if it can't serve a prompt."""
        return self._table.nearest(packed(tokens), self._bound(), min_shared=0)

    def _best(self, tokens: Sequence[int]) -> tuple[str, int] | None:
        """The entry that serves the longest prefix of a prompt, and its length."""
        return self._table.best(packed(tokens), self._bound())

    def _entry(self, tokens: Sequence[int], caches: Sequence[Any], measure: Measure, nbytes: int) -> Entry | None:
        """The entry for caches of so many bytes; None if it is too short, or larger than max_bytes."""
        fingerprint, key = self._bound(), packed(tokens)
        count = len(key) // 4
        if count < MIN_SHARED or nbytes > self.max_bytes:
            return None
        nbytes, least = self._shards.largest(caches, count, measure, nbytes, min_tokens(caches, count))
        return None if nbytes > self.max_bytes else Entry(key, nbytes, least, fingerprint)

    # --- eviction ---------------------------------------------------------------------------------------------------

    def _make_room(self, name: str, entry: E) -> None:
        """Removes entries that a new one makes superfluous, then the least recently used until all fit."""
        for other in self._table.covered(entry):
            if other != name:
                self._remove(other)
        self._evict(self.max_bytes)

    def _evict(self, max_bytes: float) -> None:
        while self._table and max(self._table.nbytes, self._bytes_of_others) > max_bytes:
            name = self._table.least_recent(self._last_used)
            self.evicted.add(self._table[name].tokens)
            self._remove(name)

    @abstractmethod
    def _remove(self, name: str) -> None:
        """Removes an entry."""

    @abstractmethod
    def _last_used(self, name: str) -> float:
        """When any process last used an entry."""


# --- how far caches can be trimmed ------------------------------------------------------------------------------------


def min_tokens(caches: Sequence[Any], held: int) -> int:
    """How few of `held` tokens all layers can be trimmed back to exactly."""
    most = held
    for cache in leaves(caches):
        if is_ours(cache):
            exact = [_exact_trim(cache, row, index) for index, row in enumerate(cache.view.rows)]
            most = min(most, *map(min, exact, cache.most_trims))
        elif not cache.is_trimmable():
            most = 0
    return held - most


def _exact_trim(cache: KVCache, row: Row, index: int) -> int:
    """Tokens that can be trimmed to the state that a fresh read of the remaining ones has.

    With a budget this ends at the last compaction, which may have evicted tokens because of later ones, and at the
    attention that was observed.
    """
    if cache.evictor is None:
        return cache.layout.most_trim(row)
    held, budget = cache.layout.held(row), cache.evictor.layout.budget
    most = max(0, held - budget) if row.evicted > 0 else cache.layout.most_trim(row)
    seen = cache.evictor.observation
    return most if seen is None or index >= len(seen.ends) else min(most, seen.most_trim(index))


def needs_checkpoints(caches: Sequence[Any]) -> bool:
    """Whether caches will reach a state that can't be trimmed back to every prefix."""
    return not all(
        is_ours(cache) and cache.layout.enough_slots == NO_LIMIT and not cache.view.residual_length
        for cache in leaves(caches)
    )


# --- policies in words ------------------------------------------------------------------------------------------------


def cache_format(caches: Sequence[Any]) -> str:
    """How caches store keys and values, in words. Caches with the same words can replace each other."""
    return "; ".join(_format(cache) if is_ours(cache) else kind_of(cache).__name__ for cache in leaves(caches))


def draft_mark(own: Sequence[Any], plain: Sequence[Any]) -> list[str]:
    """What distinguishes caches with room for drafted tokens from plain ones, if anything: rings are larger."""
    how = cache_format(own)
    return [] if how == cache_format(plain) else [hashlib.blake2b(how.encode(), digest_size=8).hexdigest()]


def _format(cache: KVCache) -> str:
    keeps, view = [" ".join(map(str, planned(cache.layout).parameters))], cache.view
    if not are_plain(view.codecs):
        keeps.append(f"{in_words(view.codecs)} from {view.quantized_start}")
        if view.residual_length:
            keeps.append(f"but the newest {view.residual_length}")
    if cache.evictor is not None:
        keeps.append(f"by {cache.evictor.score.name} for each {cache.evictor.scope}")
        layers = cache.evictor.layer_allocation
        if not isinstance(layers, str):
            keeps.append(f"by table {hashlib.blake2b(repr(layers).encode(), digest_size=8).hexdigest()}")
        elif layers == "global":
            keeps.append("in one ranking of all layers")
    return ", ".join(keeps)
