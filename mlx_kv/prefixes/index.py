"""Token sequences that were processed: which of them serves a prompt, which one makes superfluous, who shares blocks.

Everything follows from tokens alone. Sequences are kept sorted, so those that begin like a prompt lie beside the place
where it would lie itself, those that share most of it nearest: finding one takes a few binary searches, however many
there are. An entry that can be trimmed back to `least` tokens serves a prompt that begins with those, its *head*; so
entries are sorted among those of the same head, and only heads that the prompt begins with are looked into. How far
back caches can be trimmed is decided in `place`; where they are, in `store` (a disk) and `memory`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from mlx_kv.cache.checks import token_ids

LEAST_SHARED = 64  # tokens; below, finding costs more than reading
MOST_STEPS = 64  # of a walk through beginnings that turn out to be none
B = TypeVar("B")
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


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes that sort as they do: four for each, the highest first. Bytes are packed already.

    Raises:
        ValueError: something else than token ids.
    """
    return tokens if isinstance(tokens, bytes) else np.array(token_ids(tokens, 2**32, "tokens"), ">u4").tobytes()


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

    def nearest(self, tokens: bytes) -> tuple[str, int] | None:
        """The entry that begins like these tokens for longest, and for how many, whether it can serve them or not."""
        count, name = self._all.nearest(tokens) if self._all else (0, "")
        return (name, count) if count >= LEAST_SHARED else None

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


class Holdings(Generic[B]):
    """Entries by name, and the blocks that each of them holds.

    Attributes:
        nbytes: of all entries together, each block once.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, Mapping[B, int]]] = {}
        self._holders: Counter[B] = Counter()
        self.nbytes = 0

    def __contains__(self, block: object) -> bool:
        """Whether an entry holds a block."""
        return block in self._holders

    @property
    def blocks(self) -> Collection[B]:
        """All that are held, as long as nothing changes."""
        return self._holders.keys()

    def add(self, name: str, own: int, blocks: Mapping[B, int]) -> None:
        """An entry that was not there.

        Args:
            own: bytes that are its alone, beside the blocks.
            blocks: that it holds, and the bytes of each.
        """
        self._held[name] = own, blocks
        self.nbytes += own + sum(size for block, size in blocks.items() if block not in self._holders)
        self._holders.update(blocks.keys())

    def remove(self, name: str) -> list[B]:
        """Lets go of an entry, if it is there; returns the blocks that no entry holds any longer."""
        own, blocks = self._held.pop(name, (0, {}))
        free = [block for block in blocks if self._holders[block] == 1]
        self._holders -= Counter(blocks.keys())
        self.nbytes -= own + sum(blocks[block] for block in free)
        return free
