"""Processed prompts in memory: the nearest place to find one again.

Decides what leaves when there is too much. What entries have in common is there once (`blocks`): keeping one
copies what is its own, finding one copies what was asked for, when it is first read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Any

from mlx_kv.cache.checks import cache_list, shown
from mlx_kv.prefixes.blocks import Block, KeptCaches, kept_bytes
from mlx_kv.prefixes.index import Holdings, PrefixIndex, packed
from mlx_kv.prefixes.parts import Parts
from mlx_kv.prefixes.place import PromptPlace


class PromptMemory(PromptPlace):
    """Processed prompts, up to so many bytes.

    Args:
        max_bytes: of all of them, what several share counted once; what was of no use for longest leaves first. 0 keeps
            nothing.
        fingerprint: whose caches these are; None leaves it to the first `PromptReader`. A reader of another model or
            policy is refused.
        parts: the other ranks, where each has a part of the caches: what is said of bytes is of the rank that has most.

    Raises:
        ValueError: max_bytes below 0; whenever prompts are asked for or kept, that nobody has said whose they are.
    """

    def __init__(self, max_bytes: int = 2**30, fingerprint: str | None = None, parts: Parts | None = None) -> None:
        if not (isinstance(max_bytes, int | float) and max_bytes >= 0):
            raise ValueError(f"max_bytes is {shown(max_bytes)}: give a number of bytes from 0 up")
        super().__init__(max_bytes, fingerprint, parts)
        self._index, self._names = PrefixIndex(), count()
        self._kept: OrderedDict[str, KeptCaches] = OrderedDict()  # least recently used first
        self._holdings: Holdings[Block] = Holdings()
        self._elsewhere = 0  # bytes of the other rank that has most

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Of all entries, what several share counted once."""
        return max(self._holdings.nbytes, self._elsewhere)

    def _best(self, tokens: Sequence[int]) -> tuple[str, int] | None:
        self._owner()
        return self._index.best(packed(tokens))

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """The caches that have read most of a prompt, all but its last token at the most, and how many tokens of it.

        They are the caller's own. None where nothing serves.
        """
        best = self._best(tokens)
        if best is None:
            return None
        name, found = best
        excess = len(self._index[name]) - found
        caches = self._kept[name].caches(excess, len(tokens))
        self._kept.move_to_end(name)
        return self._parts.take(name, caches, excess, len(tokens)), found

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> bool:
        """Keeps the caches that have read exactly these tokens, unless an entry serves as well; says whether it did.

        They are evaluated. What is kept of them is a copy, but for what is kept of another prompt already.
        """
        self._owner()
        caches = cache_list("caches", caches)
        entry = self._entry(tokens, caches, "kept", kept_bytes(caches))
        if entry is None:
            return False
        covering = self._index.covering(entry)
        if covering is not None:
            self._kept.move_to_end(covering)
            return False
        like, shared = self._index.nearest(entry.tokens) or (None, 0)
        name, kept = str(next(self._names)), KeptCaches.of(caches, len(entry), self._kept.get(like or ""), shared)
        self._elsewhere = self._parts.keep(name, caches, len(entry), like, shared)
        for superfluous in self._index.covered(entry):  # from here on, nothing can fail
            self._remove(superfluous)
        self._index.add(name, entry)
        self._kept[name] = kept
        self._holdings.add(name, kept.own_bytes, kept.blocks)
        self.shrink(self.max_bytes)
        return True

    def shrink(self, most: int) -> None:
        """Lets go of what was of no use for longest, until all that is left has at most so many bytes."""
        while self.nbytes > most and self._kept:
            self._remove(next(iter(self._kept)))

    def forget(self, tokens: Sequence[int]) -> None:
        """Lets what was read of these tokens go, where it is of use to no longer prompt that is kept."""
        best = self._best(tokens)
        if best is not None and packed(tokens).startswith(self._index[best[0]].tokens):
            self._remove(best[0])

    def _remove(self, name: str) -> None:
        self._holdings.remove(name)
        self._index.remove(name)
        del self._kept[name]
        self._elsewhere = self._parts.drop(name)
