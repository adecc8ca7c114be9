"""Caches with rows of one batch, and which rows those are.

Decides nothing: it is the map between rows of the batch and rows of caches. B rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.classes.rule import Group, Groups
from mlx_kv.cache.kv_cache import KVCache


class Part(NamedTuple):
    """One cache, and where its rows are in the batch.

    Attributes:
        rows: of the batch, by row of the cache.
        take: the same, to index an axis of the batch with.
    """

    cache: KVCache
    rows: Group
    take: slice | mx.array


def part_of(cache: KVCache, rows: Iterable[int]) -> Part:
    rows = tuple(rows)
    first, last = rows[0], rows[0] + len(rows)
    return Part(cache, rows, slice(first, last) if rows == tuple(range(first, last)) else mx.array(rows))


class Parts:
    """All rows of a batch, each in one of the parts. It never changes; the caches do.

    Attributes:
        rows: how many.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = tuple(sorted(parts, key=lambda part: part.rows))
        order = [row for part in self._parts for row in part.rows]
        self.rows = len(order)
        # Where to find each row of the batch when those of the parts come one after the other; None is where it is.
        back = sorted(range(self.rows), key=order.__getitem__)
        self._back = None if order == sorted(order) else mx.array(back)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    @property
    def first(self) -> KVCache:
        """The cache of the first row."""
        return self._parts[0].cache

    @property
    def caches(self) -> tuple[KVCache, ...]:
        return tuple([part.cache for part in self._parts])

    @property
    def groups(self) -> Groups:
        """The rows of each, in rising order."""
        return tuple(sorted([tuple(sorted(part.rows)) for part in self._parts]))

    @property
    def places(self) -> list[tuple[KVCache, int]]:
        """Of each row of the batch, its cache and which row of that it is."""
        found = {row: (part.cache, index) for part in self._parts for index, row in enumerate(part.rows)}
        return [found[row] for row in range(self.rows)]

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """(B, ...) of one array for each part, in the order of the batch."""
        together = outputs[0] if len(outputs) == 1 else mx.concatenate(list(outputs))
        return together if self._back is None else together[self._back]
