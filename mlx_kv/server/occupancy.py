"""What is in memory: the rows of a batch, and which positions each of them keeps.

Decides how caches of many layers become a few plain numbers: layers that keep their tokens by the same rule are shown
as one, by the first of them. Knows nothing about requests, HTTP or when it is asked. Called from the thread that owns
the caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Layout, Row
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.traverse import Places, leaves, places_of

FINENESS = 1000  # runs of positions are told apart down to this fraction of a row
PositionRanges = list[tuple[int, int]]  # [first, last)


@dataclass(frozen=True)
class RowOccupancy:
    """One row in the layers of one rule.

    Attributes:
        rule: in words.
        layers: that follow it.
        offset: the next position.
        live, capacity: slots that hold a token of this row, and slots that there are for it.
        kept: positions that are held, as ranges [first, last), of the first of the layers (and of its first head);
            None where they are not watched. Gaps of less than a thousandth of the row are closed.
        heads: tokens that each head of each layer holds; one number for heads of a layer that hold the same tokens.
            None where all hold as many, or are not watched.
    """

    rule: str
    layers: int
    offset: int
    live: int
    capacity: int
    kept: PositionRanges | None
    heads: list[list[int]] | None = None

    @property
    def evicted(self) -> int:
        """Tokens that are no longer held: evicted, or overwritten in a ring."""
        return self.offset - self.live


@dataclass(frozen=True)
class BatchOccupancy:
    """All rows that decode, in the order of the batch, and the bytes that they take together."""

    rows: tuple[tuple[RowOccupancy, ...], ...] = ()
    bytes_live: int = 0
    bytes_allocated: int = 0
    bytes_full: int = 0

    def beside(self, other: BatchOccupancy) -> BatchOccupancy:
        """This batch and another one: the rows of that follow."""
        live, allocated = self.bytes_live + other.bytes_live, self.bytes_allocated + other.bytes_allocated
        return BatchOccupancy(self.rows + other.rows, live, allocated, self.bytes_full + other.bytes_full)


def occupancy_of(caches: Sequence[Any], positions: bool) -> BatchOccupancy:
    """What the caches of one batch hold.

    Args:
        caches: one for each layer.
        positions: whether to read which positions are kept, which may have to wait for the device.
    """
    held = cache_statistics(caches)
    rules: dict[tuple[Any, ...], list[Places]] = {}
    for cache in leaves(caches):
        if places := places_of(cache):
            rules.setdefault(places[0][0].layout.parameters, []).append(places)
    columns = [_rule(same, positions) for same in rules.values()]
    rows = tuple(zip(*columns, strict=True)) if columns else ()
    return BatchOccupancy(rows, held.bytes_live, held.bytes_allocated, held.bytes_full)


def tokens_evicted(caches: Iterable[Any]) -> list[int]:
    """Tokens that a budget has evicted of each row, by the busiest layer."""
    counts = [
        [max(0, own.view.rows[index].evicted) for own, index in places]
        for places in map(places_of, leaves(caches))
        if places and places[0][0].evictor is not None
    ]
    return [max(layers) for layers in zip(*counts, strict=True)]


def _rule(layers: Sequence[Places], positions: bool) -> list[RowOccupancy]:
    rule = layout_name(layers[0][0][0].layout)
    told: list[RowOccupancy] = []
    for cache, index in layers[0]:
        row = cache.view.rows[index]
        kept = _kept(cache, row, index) if positions else None
        live = max(0, cache.layout.held(row))
        heads = _heads(layers, len(told)) if positions else None
        told.append(RowOccupancy(rule, len(layers), max(0, row.offset), live, cache.capacity, kept, heads))
    return told


def _heads(layers: Sequence[Places], number: int) -> list[list[int]] | None:
    """Tokens that each head of each layer holds of one row; None where all hold as many."""
    held = []
    for places in layers:
        cache, index = places[number]
        if cache.evictor is None or not cache.evictor.own_lengths:
            return None
        held.append(cache.evictor.tokens_by_head(cache.view.rows[index], index))
    return held


def _kept(cache: KVCache, row: Row, index: int) -> PositionRanges:
    offset, live = max(0, row.offset), max(0, cache.layout.held(row))
    if cache.evictor is not None and row.evicted > 0:
        places = np.sort(np.array(cache.evictor.live_positions(row, index)[0]))
        places = places[places >= 0]  # of the first head, where heads keep different numbers of tokens
        return position_ranges(places, offset // FINENESS)
    sinks = min(cache.layout.sinks, live)  # a ring: its first tokens, and its newest
    return [(0, offset)] if live == offset else [(0, sinks), (offset - live + sinks, offset)][sinks == 0 :]


def position_ranges(positions: Any, gap: int = 0) -> PositionRanges:
    """Rising positions as ranges [first, last); those that are at most `gap` positions apart are one."""
    if len(positions) == 0:
        return []
    breaks = np.flatnonzero(np.diff(positions) > gap + 1)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(positions) - 1)
    return [(int(positions[a]), int(positions[b]) + 1) for a, b in zip(firsts, lasts, strict=True)]


def layout_name(layout: Layout) -> str:
    """What a layout keeps."""
    name, *numbers = layout.parameters
    if name == "append":
        return "all tokens"
    if name == "budget":
        return f"a budget of {numbers[0]:,} tokens"
    if layout.chunk_size is not None:
        return f"chunks of {layout.chunk_size:,} tokens"
    return f"a window of {layout.window:,} tokens"
