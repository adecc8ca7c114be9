"""What is known of the entries of a store: an index for each model and policy, and which was of use last.

Decides which entry is the least recently used one, also where other processes use them. One thread may ask while
another learns and forgets. Knows nothing about files.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from itertools import accumulate

from mlx_kv.prefixes.entry_files import IndexedEntry
from mlx_kv.prefixes.index import Entry, Holdings, PrefixIndex


class EntryTable:
    """Entries by name, each with the fingerprint of its owner and the blocks that it holds."""

    def __init__(self) -> None:
        self._known: dict[str, IndexedEntry] = {}
        self._holdings: Holdings[str] = Holdings()
        self._indexes: defaultdict[str, PrefixIndex] = defaultdict(PrefixIndex)  # by fingerprint
        self._used: dict[str, float] = {}  # when each was last of use, as far as is known: perhaps later
        self._changing = threading.RLock()  # guards the first three

    def __getitem__(self, name: str) -> IndexedEntry:
        return self._known[name]

    @property
    def nbytes(self) -> int:
        """Of all entries, what several share counted once."""
        with self._changing:
            return self._holdings.nbytes

    @property
    def blocks(self) -> set[str]:
        """The names of all blocks that any entry holds."""
        with self._changing:
            return set(self._holdings.blocks)

    def names(self) -> set[str]:
        with self._changing:
            return set(self._known)

    def entries(self) -> dict[str, Entry]:
        with self._changing:
            return {name: known.entry for name, known in self._known.items()}

    def add(self, name: str, known: IndexedEntry) -> None:
        """One that is not there."""
        with self._changing:
            self._known[name] = known
            self._indexes[known.fingerprint].add(name, known.entry)
            self._holdings.add(name, known.own_bytes, known.blocks)

    def remove(self, name: str) -> list[str]:
        """Also if it is not there. Returns the blocks that no entry holds any longer."""
        with self._changing:
            known = self._known.pop(name, None)
            self._used.pop(name, None)
            if known is not None:
                self._indexes[known.fingerprint].remove(name)
            return self._holdings.remove(name)

    # --- which ------------------------------------------------------------------------------------------------------

    def best(self, tokens: bytes, fingerprint: str) -> tuple[str, int] | None:
        """As `PrefixIndex.best`, of one owner's."""
        with self._changing:
            return self._indexes[fingerprint].best(tokens)

    def nearest(self, tokens: bytes, fingerprint: str) -> tuple[IndexedEntry, int] | None:
        """As `PrefixIndex.nearest`, of one owner's."""
        with self._changing:
            found = self._indexes[fingerprint].nearest(tokens)
            return None if found is None else (self._known[found[0]], found[1])

    def wanted_ends(self, entry: Entry, fingerprint: str, column: int, slots: int) -> list[int]:
        """Where blocks of a new entry should end, so that they are those of the one that begins like it for longest.

        Where two part, a block ends: the next that parts there has the same one.
        """
        nearest = self.nearest(entry.tokens, fingerprint)
        if nearest is None or slots != len(entry):  # where a slot is no position, all are cut alike
            return []
        other, shared = nearest
        ends = accumulate(count for _, count, _ in (*other.columns, *[()] * (column + 1))[column])
        return [*(end for end in ends if end <= shared), *([shared] if shared < len(other.entry) else [])]

    def covering(self, entry: Entry, fingerprint: str) -> str | None:
        """As `PrefixIndex.covering`, of one owner's."""
        with self._changing:
            return self._indexes[fingerprint].covering(entry)

    def covered(self, entry: Entry, fingerprint: str) -> list[str]:
        """As `PrefixIndex.covered`, of one owner's."""
        with self._changing:
            return self._indexes[fingerprint].covered(entry)

    # --- which was of use last --------------------------------------------------------------------------------------

    def touch(self, name: str, now: float) -> None:
        """Also before it is added."""
        self._used[name] = now

    def touched(self, name: str) -> float:
        """When it was last of use, as far as is known."""
        return self._used.get(name, 0.0)

    def least_recent(self, names: Collection[str], last_used: Callable[[str], float]) -> str:
        """Of these, the one that was of no use for longest.

        Args:
            last_used: when one was last of use to any process; asked only of those that may be it.
        """
        while True:
            name = min(names, key=lambda name: self._used.get(name, 0.0))
            known, self._used[name] = self._used.get(name, 0.0), last_used(name)
            if self._used[name] <= known:
                return name  # else another process has used it meanwhile
