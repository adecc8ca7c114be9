"""What is known of the entries of a store: an index for each model and policy, and which was of use last.

Decides which entry is the least recently used one, also where other processes use them. One thread may ask while
another learns and forgets. Knows nothing about files.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection

from mlx_kv.prefixes.index import Entry, PrefixIndex


class EntryTable:
    """Entries by name, each with the fingerprint of its owner."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Entry, str]] = {}
        self._indexes: defaultdict[str, PrefixIndex] = defaultdict(PrefixIndex)  # by fingerprint
        self._used: dict[str, float] = {}  # when each was last of use, as far as is known: perhaps later
        self._changing = threading.RLock()  # guards the first two

    def __getitem__(self, name: str) -> tuple[Entry, str]:
        """An entry, and whose it is."""
        return self._known[name]

    def names(self) -> set[str]:
        with self._changing:
            return set(self._known)

    def entries(self) -> dict[str, Entry]:
        with self._changing:
            return {name: entry for name, (entry, _) in self._known.items()}

    def add(self, name: str, entry: Entry, fingerprint: str) -> None:
        with self._changing:
            self._known[name] = entry, fingerprint
            self._indexes[fingerprint].add(name, entry)

    def remove(self, name: str) -> None:
        """Also if it is not there."""
        with self._changing:
            _, fingerprint = self._known.pop(name, (None, None))
            self._used.pop(name, None)
            if fingerprint is not None:
                self._indexes[fingerprint].remove(name)

    # --- which ------------------------------------------------------------------------------------------------------

    def best(self, tokens: bytes, fingerprint: str) -> tuple[str, int] | None:
        """As `PrefixIndex.best`, of one owner's."""
        with self._changing:
            return self._indexes[fingerprint].best(tokens)

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
