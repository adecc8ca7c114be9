"""The index of a prefix cache: which entry serves a prompt, which blocks entries share, which was used least recently.

An index works on token ids alone. Sequences are sorted, so the ones that begin like a prompt lie beside the place where
the prompt would lie, and a lookup takes a few binary searches however many entries there are. An entry that can be
trimmed back to `least` tokens serves prompts that begin with those tokens, its *head*. Entries are therefore sorted by
head first, and a lookup only searches heads that the prompt begins with.

`PrefixCache` is what `PromptMemory` and `PromptStore` have in common. It holds the caches of one model and policy: of
the fingerprint it was made with, or else of its first reader.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from mlx_kv.cache.checks import token_ids
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Row
from mlx_kv.mlxlm.traverse import is_ours, leaves

MIN_SHARED = 64  # tokens; a shorter prefix is faster to read than to look up
MAX_EVICTED = 16_384  # digests of evicted prefixes: one for each MIN_SHARED tokens, 1 M tokens in all
MAX_STEPS = 64  # of a walk through sequences that turn out not to be prefixes
_LAST = "\U0010ffff"  # sorts after every name


@dataclass(frozen=True)
class Entry:
    """A processed prompt, without its caches.

    Attributes:
        tokens: token ids that the caches have read, from `packed`.
        bytes: size of the caches.
        least: tokens that the caches can be trimmed back to.
        fingerprint: of the model and policy.
    """

    tokens: bytes
    bytes: int
    least: int
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.tokens) // 4

    @property
    def blocks(self) -> Mapping[Any, int]:
        """Blocks that other entries may share, and the bytes of each."""
        return {}

    @property
    def own_bytes(self) -> int:
        """Bytes outside of blocks."""
        return max(0, self.bytes - sum(self.blocks.values()))


E = TypeVar("E", bound=Entry)


def head_of(entry: Entry) -> bytes:
    """The tokens that can't be trimmed: the entry serves every prompt that begins with them."""
    return entry.tokens[: 4 * entry.least]


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes with the same order: four bytes each, big-endian. Packed tokens are returned unchanged.

    Raises:
        ValueError: these are not token ids.
    """
    return tokens if isinstance(tokens, bytes) else np.array(token_ids(tokens, 2**32, "tokens"), ">u4").tobytes()


def shared(first: bytes, second: bytes) -> int:
    """The length, in tokens, of the common prefix of two packed sequences."""
    count = min(len(first), len(second)) // 4
    differ = np.flatnonzero(np.frombuffer(first, ">u4", count) != np.frombuffer(second, ">u4", count))
    return int(differ[0]) if len(differ) else count


class SortedIndex:
    """Names sorted by packed tokens."""

    def __init__(self) -> None:
        self._places: list[tuple[bytes, str]] = []

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, tokens: bytes, name: str) -> None:
        insort(self._places, (tokens, name))

    def remove(self, tokens: bytes, name: str) -> None:
        del self._places[bisect_left(self._places, (tokens, name))]

    def nearest(self, tokens: bytes) -> tuple[int, str]:
        """The longest prefix of these tokens that a sequence here shares, in tokens, and the name of that sequence.

        0 and no name if there are none.
        """
        right = bisect_left(self._places, (tokens, ""))
        beside = self._places[max(0, right - 1) : right + 1]
        return max(((shared(other, tokens), name) for other, name in beside), default=(0, ""))

    def beginning(self, tokens: bytes) -> str | None:
        """The name of a sequence that begins with these tokens."""
        place = bisect_left(self._places, (tokens, ""))
        beside = self._places[place : place + 1]
        return next((name for other, name in beside if other.startswith(tokens)), None)

    def beginnings(self, tokens: bytes) -> Iterator[tuple[bytes, str]]:
        """Sequences that these tokens begin with, longest first; stops after MAX_STEPS mismatches."""
        place, steps = bisect_right(self._places, (tokens, _LAST)), 0
        while place > 0 and steps < MAX_STEPS:
            other, name = self._places[place - 1]
            count = shared(other, tokens)
            if count == len(other) // 4:
                yield other, name
                place -= 1
            else:  # a prefix of more than `count` tokens would lie after this one
                place, steps = bisect_right(self._places, (tokens[: 4 * count], _LAST)), steps + 1


class EntryTable(Generic[E]):
    """Entries by name, searched by their tokens; reference counts of blocks, and times of last use.

    Threads may read and change it at the same time.

    Attributes:
        nbytes: of all entries together, each block counted once.
    """

    def __init__(self) -> None:
        self._entries: dict[str, E] = {}
        self._all: defaultdict[str, SortedIndex] = defaultdict(SortedIndex)  # by fingerprint
        self._heads: defaultdict[str, SortedIndex] = defaultdict(SortedIndex)  # by fingerprint, without names
        self._of_head: defaultdict[tuple[str, bytes], SortedIndex] = defaultdict(SortedIndex)
        self._block_refs: Counter[Any] = Counter()
        self.nbytes = 0
        self._used: dict[str, float] = {}  # time of last use, if known; other processes may have used it later
        self._lock = threading.RLock()  # guards all but the last

    def __getitem__(self, name: str) -> E:
        return self._entries[name]

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def blocks(self) -> set[Any]:
        """All blocks that an entry uses."""
        with self._lock:
            return set(self._block_refs)

    def entries(self) -> dict[str, E]:
        """A copy of the table."""
        with self._lock:
            return dict(self._entries)

    def add(self, name: str, entry: E) -> None:
        """Adds a new entry."""
        with self._lock:
            self._entries[name] = entry
            self._all[entry.fingerprint].add(entry.tokens, name)
            same_head = self._of_head[entry.fingerprint, head_of(entry)]
            if not same_head:
                self._heads[entry.fingerprint].add(head_of(entry), "")
            same_head.add(entry.tokens, name)
            new = [size for block, size in entry.blocks.items() if block not in self._block_refs]
            self.nbytes += entry.own_bytes + sum(new)
            self._block_refs.update(entry.blocks.keys())

    def remove(self, name: str) -> list[Any]:
        """Removes an entry, if there is one; returns the blocks that no entry uses any more."""
        with self._lock:
            self._used.pop(name, None)
            entry = self._entries.pop(name, None)
            if entry is None:
                return []
            self._all[entry.fingerprint].remove(entry.tokens, name)
            same_head = self._of_head[entry.fingerprint, head_of(entry)]
            same_head.remove(entry.tokens, name)
            if not same_head:
                del self._of_head[entry.fingerprint, head_of(entry)]
                self._heads[entry.fingerprint].remove(head_of(entry), "")
            unused = [block for block in entry.blocks if self._block_refs[block] == 1]
            self.nbytes -= entry.own_bytes + sum(entry.blocks[block] for block in unused)
            self._block_refs -= Counter(entry.blocks.keys())
            return unused

    # --- lookups, among entries of the same fingerprint -------------------------------------------------------------

    def best(self, tokens: bytes, fingerprint: str = "") -> tuple[str, int] | None:
        """The entry that serves the longest prefix of these tokens, and its length in tokens; never all of them."""
        with self._lock:
            limit, best, length = len(tokens) // 4 - 1, None, MIN_SHARED - 1
            in_common = self._all[fingerprint].nearest(tokens)[0]  # no entry shares more
            longest = min(limit, in_common)
            if longest >= MIN_SHARED:
                for head, _ in self._heads[fingerprint].beginnings(tokens[: 4 * longest]):
                    count, name = self._of_head[fingerprint, head].nearest(tokens)
                    if min(count, limit) > length:
                        best, length = name, min(count, limit)
                    if length == longest:
                        break
            return None if best is None else (best, length)

    def nearest(self, tokens: bytes, fingerprint: str, min_shared: int = MIN_SHARED) -> tuple[E, int] | None:
        """The entry with the longest common prefix, and its length in tokens, even if it can't serve these tokens."""
        with self._lock:
            count, name = self._all[fingerprint].nearest(tokens)
            return (self._entries[name], count) if name and count >= min_shared else None

    def covering(self, entry: Entry) -> str | None:
        """An entry that serves every prompt that this one serves."""
        with self._lock:
            for head, _ in self._heads[entry.fingerprint].beginnings(head_of(entry)):
                if (name := self._of_head[entry.fingerprint, head].beginning(entry.tokens)) is not None:
                    return name
            return None

    def covered(self, entry: Entry) -> list[str]:
        """The entries that this one makes superfluous."""
        names = []
        with self._lock:
            for tokens, name in self._all[entry.fingerprint].beginnings(entry.tokens):
                if len(tokens) < len(head_of(entry)):
                    break  # it serves shorter prompts
                if self._entries[name].least >= entry.least:
                    names.append(name)
        return names

    # --- least recently used ----------------------------------------------------------------------------------------

    def touch(self, name: str, now: float) -> None:
        """Sets when an entry was last used; it may be added later."""
        self._used[name] = now

    def touched(self, name: str) -> float:
        """When this process last used an entry; 0 if unknown."""
        return self._used.get(name, 0.0)

    def least_recent(self, last_used: Callable[[str], float]) -> str:
        """The entry that was used least recently, of at least one.

        Args:
            last_used: when any process last used an entry; called for candidates only.
        """
        names = self.entries()
        while True:
            name = min(names, key=self.touched)
            known, self._used[name] = self.touched(name), last_used(name)
            if self._used[name] <= known:
                return name  # otherwise another process has used it since


# --- evicted entries -------------------------------------------------------------------------------------------------


class EvictedPrefixes:
    """Digests of the prefixes of evicted prompts, up to a number; the oldest are dropped."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def add(self, tokens: bytes) -> None:
        """Records a packed prompt that is evicted."""
        for digest in _digests(tokens):
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > MAX_EVICTED:
            self._digests.popitem(last=False)

    def longest(self, tokens: bytes) -> int:
        """Tokens of the longest prefix of a packed prompt that was evicted, a multiple of MIN_SHARED."""
        count = 0
        for digest in _digests(tokens) if self._digests else ():
            if digest not in self._digests:
                break
            count += MIN_SHARED
        return count


def _digests(tokens: bytes) -> Iterator[bytes]:
    """A digest of the first MIN_SHARED packed tokens, of twice as many, and so on."""
    digest, step = hashlib.blake2b(digest_size=8), 4 * MIN_SHARED
    for end in range(step, len(tokens) + 1, step):
        digest.update(tokens[end - step : end])
        yield digest.digest()


# --- a prefix cache ---------------------------------------------------------------------------------------------------


REMOVED = {  # arguments of earlier versions
    "deadline": "a store is a folder on a disk or a mounted drive; leave it out",
    "parts": "prompts of several ranks are not kept here; leave it out",
}


def refuse_removed(kind: str, arguments: Mapping[str, object]) -> None:
    """Raises ValueError for an argument of earlier versions, and TypeError for any other."""
    for name in arguments:
        if name not in REMOVED:
            raise TypeError(f"{kind} has no argument {name!r}: leave it out")
        raise ValueError(f"{kind} no longer takes {name}: {REMOVED[name]}")


class PrefixCache(ABC, Generic[E]):
    """Processed prompts of one model and policy; abstract.

    Args:
        max_bytes: of all entries.
        fingerprint: of model and policy; None takes that of the first reader.

    Attributes:
        fingerprint: None before the first reader.
        evicted: digests of entries that were removed to make room.
    """

    fingerprint: str | None = None

    def __init__(self, max_bytes: int, fingerprint: str | None) -> None:
        self.max_bytes, self.fingerprint = max_bytes, fingerprint
        self._binds = fingerprint is None
        self._table: EntryTable[E] = EntryTable()
        self.evicted = EvictedPrefixes()

    def bind(self, find: Callable[[], str]) -> None:
        """Sets the fingerprint to that of a reader, unless one was given.

        Args:
            find: computes it.

        Raises:
            ValueError: an earlier reader had another model or policy.
        """
        if not self._binds:
            return
        fingerprint, kind = find(), type(self).__name__
        if self.fingerprint not in (None, fingerprint):
            raise ValueError(f"this {kind} keeps caches of another model or policy: give each a {kind} of its own")
        self.fingerprint = fingerprint

    def _bound(self) -> str:
        if self.fingerprint is None:
            kind = type(self).__name__
            raise ValueError(
                f"this {kind} has no fingerprint of a model and policy: read with a PromptReader, or give "
                f"{kind}(..., fingerprint=...), such as that of mlx_kv.files.serialization.model_fingerprint"
            )
        return self.fingerprint

    def serves(self, tokens: Sequence[int]) -> int:
        """The length of the prefix of a prompt that `find` would return caches for, in tokens."""
        best = self._table.best(packed(tokens), self._bound())
        return 0 if best is None else best[1]

    def nearest(self, tokens: Sequence[int]) -> tuple[E, int] | None:
        """The entry with the longest common prefix, and its length in tokens, even if it can't serve a prompt."""
        return self._table.nearest(packed(tokens), self._bound(), min_shared=0)

    def _entry(self, tokens: Sequence[int], caches: Sequence[Any], nbytes: int) -> Entry | None:
        """The entry for caches of so many bytes; None if it is too short, or larger than max_bytes."""
        fingerprint, key = self._bound(), packed(tokens)
        count = len(key) // 4
        if count < MIN_SHARED or nbytes > self.max_bytes:
            return None
        return Entry(key, nbytes, min_tokens(caches, count), fingerprint)

    def _make_room(self, name: str, entry: E) -> None:
        """Removes entries that a new one makes superfluous, then the least recently used until all fit."""
        for other in self._table.covered(entry):
            if other != name:
                self._remove(other)
        self._evict(self.max_bytes)

    def _evict(self, max_bytes: float) -> None:
        while self._table and self._table.nbytes > max_bytes:
            name = self._table.least_recent(self._last_used)
            self.evicted.add(self._table[name].tokens)
            self._remove(name)

    @abstractmethod
    def _remove(self, name: str) -> None:
        """Removes an entry."""

    @abstractmethod
    def _last_used(self, name: str) -> float:
        """When any process last used an entry."""


def min_tokens(caches: Sequence[Any], tokens: int) -> int:
    """How few of `tokens` tokens all layers can be trimmed back to exactly."""
    trim = tokens
    for cache in leaves(caches):
        if is_ours(cache):
            exact = [_exact_trim(cache, row, index) for index, row in enumerate(cache.view.rows)]
            trim = min(trim, *map(min, exact, cache.most_trims))
        elif not cache.is_trimmable():
            trim = 0
    return tokens - trim


def _exact_trim(cache: KVCache, row: Row, index: int) -> int:
    """Tokens that can be trimmed to the state that a fresh read of the remaining ones has.

    With a budget this ends at the last compaction, which may have evicted tokens because of later ones, and at the
    attention that was observed.
    """
    if cache.evictor is None:
        return cache.layout.max_trim(row)
    stored, budget = cache.layout.visible_tokens(row), cache.evictor.layout.budget
    trim = max(0, stored - budget) if row.evicted > 0 else cache.layout.max_trim(row)
    observation = cache.evictor.observation
    return trim if observation is None or index >= len(observation.ends) else min(trim, observation.max_trim(index))
