"""Token sequences that somebody has processed: which of them serves a prompt, and what one makes superfluous.

Decides by tokens alone. Sequences are kept sorted, so those that begin like a prompt lie beside the place where it
would lie itself, those that share most of it nearest: finding one takes a few binary searches, however many there are.
An entry that can be trimmed back to `least` tokens serves a prompt that begins with those, its *head*; so entries are
sorted among those of the same head, and only heads that the prompt begins with are looked into. Knows nothing about
where the caches of an entry are: on a disk (`store`) or in memory (`memory`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mlx_kv.cache.codecs import are_plain, in_words
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import NO_LIMIT, Row
from mlx_kv.mlxlm.traverse import is_ours, leaves

LEAST_SHARED = 64  # tokens; below, finding costs more than reading
MOST_STEPS = 64  # of a walk through beginnings that turn out to be none
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


def head(entry: Entry) -> bytes:
    """The tokens that must stay of an entry: whatever begins with them can be served."""
    return entry.tokens[: 4 * entry.least]


class Prefixes(Protocol):
    """Somebody who keeps processed prompts."""

    def bind(self, find: Callable[[], str]) -> None:
        """Is told, if need be, whose caches these are: `find` works it out."""
        ...

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


class SortedIndex:
    """Names by packed tokens, in the order of these. Every question is a few binary searches."""

    def __init__(self) -> None:
        self._places: list[tuple[bytes, str]] = []

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, tokens: bytes, name: str) -> None:
        insort(self._places, (tokens, name))

    def remove(self, tokens: bytes, name: str) -> None:
        del self._places[bisect_left(self._places, (tokens, name))]

    def nearest(self, tokens: bytes) -> tuple[int, str]:
        """How many tokens anything here shares with these at the most, and the name of one that does."""
        right = bisect_left(self._places, (tokens, ""))
        beside = self._places[max(0, right - 1) : right + 1]
        return max((shared(other, tokens), name) for other, name in beside)

    def beginning(self, tokens: bytes) -> str | None:
        """The name of something that begins with these tokens."""
        place = bisect_left(self._places, (tokens, ""))
        beside = self._places[place : place + 1]
        return next((name for other, name in beside if other.startswith(tokens)), None)

    def beginnings(self, tokens: bytes) -> Iterator[tuple[bytes, str]]:
        """What these tokens begin with, longest first; after MOST_STEPS that were in vain, no more is found."""
        place, steps = bisect_right(self._places, (tokens, _LAST)), 0
        while place > 0 and steps < MOST_STEPS:
            other, name = self._places[place - 1]
            count = shared(other, tokens)
            if count == len(other) // 4:
                yield other, name
                place -= 1
            else:  # a beginning of more than `count` tokens would lie after this one
                place, steps = bisect_right(self._places, (tokens[: 4 * count], _LAST)), steps + 1


class PrefixIndex:
    """Entries by name."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._all, self._heads = SortedIndex(), SortedIndex()
        self._of_head: dict[bytes, SortedIndex] = {}

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def add(self, name: str, entry: Entry) -> None:
        self.remove(name)
        self._entries[name] = entry
        self._all.add(entry.tokens, name)
        if head(entry) not in self._of_head:
            self._of_head[head(entry)] = SortedIndex()
            self._heads.add(head(entry), "")
        self._of_head[head(entry)].add(entry.tokens, name)

    def remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self._all.remove(entry.tokens, name)
        alike = self._of_head[head(entry)]
        alike.remove(entry.tokens, name)
        if not alike:
            del self._of_head[head(entry)]
            self._heads.remove(head(entry), "")

    def best(self, tokens: bytes) -> tuple[str, int] | None:
        """The entry that can stand for most of these tokens, and for how many: never all of them."""
        most = len(tokens) // 4 - 1
        there = min(most, self._all.nearest(tokens)[0]) if self._all else 0  # no entry shares more
        found, count = None, LEAST_SHARED - 1
        if there >= LEAST_SHARED:
            for beginning, _ in self._heads.beginnings(tokens[: 4 * there]):
                same, name = self._of_head[beginning].nearest(tokens)
                if min(same, most) > count:
                    found, count = name, min(same, most)
                if count == there:
                    break
        return None if found is None else (found, count)

    def covering(self, entry: Entry) -> str | None:
        """An entry that serves every prompt which this one serves."""
        for beginning, _ in self._heads.beginnings(head(entry)):
            if (name := self._of_head[beginning].beginning(entry.tokens)) is not None:
                return name
        return None

    def covered(self, entry: Entry) -> list[str]:
        """The entries that serve nothing which this one does not serve."""
        found = []
        for tokens, name in self._all.beginnings(entry.tokens):
            if len(tokens) < len(head(entry)):
                break  # it is shorter than what must stay of this one
            if self._entries[name].least >= entry.least:
                found.append(name)
        return found


def least_tokens(caches: Sequence[Any], held: int) -> int:
    """How few of `held` tokens caches can be trimmed back to exactly, all layers together."""
    most = held
    for cache in leaves(caches):
        if is_ours(cache):
            most = min(most, *(_exact_trim(cache, row) for row in cache.view.rows))
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


def kept_how(caches: Sequence[Any]) -> str:
    """How caches keep keys and values, in words: only those that say the same may stand in for each other."""
    return "; ".join(_how(cache) if is_ours(cache) else type(cache).__name__ for cache in leaves(caches))


def _how(cache: KVCache) -> str:
    keeps, view = [" ".join(map(str, cache.layout.parameters))], cache.view
    if not are_plain(view.codecs):
        keeps.append(f"{in_words(view.codecs)} from {view.quantized_start}")
    if cache.evictor is not None:
        keeps.append(f"by {cache.evictor.score.name} for each {cache.evictor.granularity}")
    return ", ".join(keeps)


def needs_checkpoints(caches: Sequence[Any]) -> bool:
    """Whether caches will come to where they cannot be trimmed back to any prefix."""
    return not all(is_ours(cache) and cache.layout.enough_slots == NO_LIMIT for cache in leaves(caches))
