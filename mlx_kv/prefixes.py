"""Token sequences that somebody has processed: which of them serves a prompt, and what one makes superfluous.

Decides by tokens alone. Sequences are kept sorted, so those that begin like a prompt lie beside the place where it
would lie itself, those that share most of it nearest: finding one takes a binary search, however many there are. Knows
nothing about where the caches of an entry are: on a disk (`prompt_store`) or in memory (`prompt_memory`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mlx_kv.adapter import leaves
from mlx_kv.cache import KVCache
from mlx_kv.layout import NO_LIMIT, Row

LEAST_SHARED = 64  # tokens; below, finding costs more than reading
_LAST = "\U0010ffff"  # after every name


@dataclass(frozen=True)
class Entry:
    """What is known of a processed prompt without its caches.

    Attributes:
        tokens: that its caches have read, from `packed`.
        bytes: that it takes.
        least: tokens that must stay of them: its caches can be trimmed back that far.
    """

    tokens: bytes
    bytes: int
    least: int

    def __len__(self) -> int:
        return len(self.tokens) // 4


class Prefixes(Protocol):
    """Somebody who keeps processed prompts."""

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """The asker's own caches, which have read the first tokens of these, and how many: never all of them."""
        ...

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> object:
        """Is shown caches that have read exactly these tokens."""
        ...


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes that sort as they do: four for each, the highest first. Bytes are packed already."""
    return tokens if isinstance(tokens, bytes) else np.asarray(tokens, dtype=">u4").tobytes()


def shared(first: bytes, second: bytes) -> int:
    """How many tokens two packed sequences begin with alike."""
    most = min(len(first), len(second)) // 4
    differ = np.flatnonzero(np.frombuffer(first, ">u4", most) != np.frombuffer(second, ">u4", most))
    return int(differ[0]) if len(differ) else most


class PrefixIndex:
    """Entries by name."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._sorted: list[tuple[bytes, str]] = []

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def add(self, name: str, entry: Entry) -> None:
        self.remove(name)
        self._entries[name] = entry
        insort(self._sorted, (entry.tokens, name))

    def remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            del self._sorted[bisect_left(self._sorted, (entry.tokens, name))]

    def serving(self, tokens: bytes) -> Iterator[tuple[str, int]]:
        """Names of entries, and how many of these tokens each can stand for, best first: never all of them."""
        right = bisect_left(self._sorted, (tokens, ""))
        left, most = right - 1, len(tokens) // 4 - 1
        before, after = self._shared(left, tokens), self._shared(right, tokens)
        while (nearest := max(before, after)) >= LEAST_SHARED:
            if before == nearest:
                name, left = self._sorted[left][1], left - 1
                before = self._shared(left, tokens)
            else:
                name, right = self._sorted[right][1], right + 1
                after = self._shared(right, tokens)
            count = min(nearest, most)
            if count >= max(LEAST_SHARED, self._entries[name].least):
                yield name, count

    def _shared(self, place: int, tokens: bytes) -> int:
        return shared(self._sorted[place][0], tokens) if 0 <= place < len(self._sorted) else 0

    def covering(self, entry: Entry) -> str | None:
        """An entry that serves every prompt which this one serves."""
        for place in range(bisect_left(self._sorted, (entry.tokens, "")), len(self._sorted)):
            tokens, name = self._sorted[place]
            if not tokens.startswith(entry.tokens):
                break
            if self._entries[name].least <= entry.least:
                return name
        return None

    def covered(self, entry: Entry) -> list[str]:
        """The entries that serve nothing which this one does not serve."""
        return [name for name in self._beginnings(entry.tokens) if self._entries[name].least >= entry.least]

    def _beginnings(self, tokens: bytes) -> Iterator[str]:
        """The entries whose tokens are the first of these, longest first."""
        place = bisect_right(self._sorted, (tokens, _LAST))
        while place > 0:
            other, name = self._sorted[place - 1]
            count = shared(other, tokens)
            if count == len(other) // 4:
                yield name
                place -= 1
            else:  # a beginning of more than `count` tokens would lie after this one
                place = bisect_right(self._sorted, (tokens[: 4 * count], _LAST))


def least_tokens(caches: Sequence[Any], held: int) -> int:
    """How few of `held` tokens caches can be trimmed back to exactly, all layers together."""
    most = held
    for cache in leaves(caches):
        if isinstance(cache, KVCache):
            most = min(most, *(_exact_trim(cache, row) for row in cache._rows))
        elif not cache.is_trimmable():
            most = 0
    return held - most


def _exact_trim(cache: KVCache, row: Row) -> int:
    """Tokens that can be taken back to where a fresh read of the rest would stand.

    With a budget not beyond the last compaction: what was evicted then may have gone for the sake of later tokens.
    """
    if cache.evictor is not None and row.start < 0:
        return max(0, row.end - cache.evictor.layout.budget)
    return cache.layout.most_trim(row)


def needs_checkpoints(caches: Sequence[Any]) -> bool:
    """Whether caches will come to where they cannot be trimmed back to any prefix."""
    return not all(isinstance(cache, KVCache) and cache.layout.enough_slots == NO_LIMIT for cache in leaves(caches))
