"""Rows of caches: what they must have in common to be one batch, joining and selecting them, announced padding.

A row's slots begin at 0 in every cache, whatever was evicted or overwritten, so rows are stacked without
realigning them. Only the slots of rings of different room are rearranged first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers, SlotBuffer, change_layout
from mlx_kv.cache.codecs import Codecs, affine_of, are_plain, in_words
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.layout import NO_LIMIT, Append, Layout, Row, enough_slots, planned, reshaped, stay
from mlx_kv.cache.residual import Residual


class RowStorage(Protocol):
    """The fields of a `KVCache` that belong to its rows."""

    codecs: Codecs
    layout: Layout
    evictor: Evictor | None
    residual: Residual | None
    rows: tuple[Row, ...]
    announced: tuple[int, ...]
    lengths: tuple[int, ...] | None
    reserved: int
    encoded: bool
    growths: int
    chain: tuple[tuple[Any, int], ...]
    buffers: Buffers | None

    @property
    def capacity(self) -> int: ...

    @property
    def used(self) -> int: ...

    def empty(self) -> bool: ...

    def round_up(self, slots: int) -> int: ...

    def _copied(self) -> Self: ...

    def _forget_fetch(self, new_rows: bool = False) -> None: ...


# --- checks -----------------------------------------------------------------------------------------------------------


def check_joinable(index: int, first: RowStorage, other: Any) -> None:
    """Raises ValueError unless `other`, number `index` of those to join, stores its tokens as `first` does."""
    if type(other) is not type(first):
        kind = type(other).__name__
        raise ValueError(f"cache {index} is a {kind}: only caches of this library can be merged with one")
    ours, theirs = _storage(first), _storage(other)
    if first.buffers is None or other.buffers is None:  # a cache without tokens takes any shape
        ours, theirs = ours[:-2], theirs[:-2]
    for (what, expected), (_, value) in zip(ours, theirs, strict=True):
        if value != expected:
            raise ValueError(
                f"cache {index} has {what} {value}, the first one {expected}: only caches of one kind can be one batch"
            )


def _storage(cache: RowStorage) -> list[tuple[str, object]]:
    """Names and values of all that must be equal in the rows of a batch."""
    evictor, codecs, affine = cache.evictor, cache.codecs, affine_of(cache.codecs)
    score = None if evictor is None else evictor.score
    keys, values = (None, None) if cache.buffers is None else (buffer.signature[1:] for buffer in cache.buffers)
    other = None if affine is not None or are_plain(codecs) else in_words(codecs)
    return [
        ("layout", planned(cache.layout).parameters),
        ("bits and group size", None if affine is None else (affine.bits, affine.group_size)),
        ("a residual of", 0 if cache.residual is None else cache.residual.length),
        ("codecs", (other, None if other is None else tuple(map(type, codecs)))),
        ("score and share", None if evictor is None else (evictor.score.name, evictor.scope)),
        ("budgets of layers", None if evictor is None else evictor.layer_allocation),
        # Names are not enough: all lambdas have the same, and functions can be registered again under one name.
        ("the score function", None if score is None else (score.function, score.per_token, score.wants)),
        ("KV heads, head dim and dtype of keys", keys),
        ("KV heads, head dim and dtype of values", values),
    ]


def check_rows(chosen: Sequence[int], rows: int) -> None:
    """Raises ValueError unless these rows exist, each given once."""
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= index < rows for index in chosen):
        raise ValueError(
            f"cannot take rows {list(chosen)}: this cache has rows 0 to {rows - 1}; give at least one, and none twice"
        )


def check_padding(rows: int, empty: bool, lengths: Sequence[int] | None, left_padding: Sequence[int] | None) -> None:
    """Raises ValueError unless this padding can be announced for so many rows."""
    for name, counts in (("lengths", lengths), ("left_padding", left_padding)):
        if counts is not None and (len(counts) != rows or min(counts) < 0):
            raise ValueError(f"{name} is {list(counts)}: give {rows} numbers from 0 up, one for each row")
    if left_padding is not None and not empty:
        raise ValueError("left padding can only come first, but this cache holds tokens: give lengths instead")


def grow_early(cache: RowStorage, ahead: int) -> bool:
    """Allocates what was announced before it is needed; returns whether that took a copy.

    So layers can grow one after the other: a step in which all do waits for the copies of all.

    Args:
        ahead: slots that are left, at most.
    """
    reserve, capacity = cache.round_up(max(cache.reserved, *cache.announced)), cache.capacity
    due = capacity < reserve and 0 < cache.used <= capacity < cache.used + ahead
    if not due or cache.buffers is None or not isinstance(cache.layout, Append):
        return False
    cache.growths += 1
    change_layout(cache.buffers, cache.layout, cache.layout, cache.rows, reserve, cache.used)
    cache._forget_fetch()  # the next update must not take the capacity from the last one
    return True


# --- joining and selecting --------------------------------------------------------------------------------------------


def join(cache: RowStorage, others: Sequence[RowStorage]) -> None:
    """Appends copies of the rows of others, which `check_joinable` has checked."""
    everyone: list[RowStorage] = [cache, *others]
    filled = [each for each in everyone if not each.empty()]
    if filled:  # new rows take the layout of those that are there, which are usually more
        layout = filled[0].layout
        cache.layout, everyone = layout, [_in_layout(each, layout) for each in everyone]
        filled = [each for each in everyone if not each.empty()]
    encoded = any(each.encoded for each in filled)  # if one cache is quantised, all become so
    buffers = None  # where no row has a token: those left over from trimmed rows have rows for this cache only
    if filled:  # at most the slots that they hold now, can ever need, or twice what is live: see `keep`
        used = max(each.used for each in filled)
        enough = max(enough_slots(filled[0].layout, each.rows) for each in filled)
        needed = max(each.round_up(min(2 * used + 1, max(used, enough))) for each in filled)
        buffers = joined_buffers(everyone, min(needed, max(each.capacity for each in filled)), encoded)
    cache.buffers, cache.encoded = buffers, encoded
    if cache.residual is not None:
        parts = [(each.residual, len(each.rows)) for each in everyone if each.residual is not None]
        cache.residual = Residual.joined(parts)
    cache.rows = tuple([row for each in everyone for row in each.rows])
    cache.reserved = max(each.reserved for each in everyone)
    cache.announced = tuple([announced for each in everyone for announced in each.announced])
    lengths = [each.lengths for each in everyone if each.lengths is not None]  # rows of one batch that move: of all
    cache.lengths = tuple([n for rows in lengths for n in rows]) if len(lengths) == len(everyone) else None
    cache.chain = ()
    cache._forget_fetch(new_rows=True)
    if cache.evictor is not None:
        for other in others:
            if other.evictor is not None:
                cache.evictor.extend(other.evictor)


def _in_layout(cache: RowStorage, layout: Layout) -> RowStorage:
    """The same cache, or a copy of it in a layout of another room."""
    if cache.layout == layout:
        return cache
    copied = cache._copied()
    copied.layout, copied.rows = layout, reshaped(cache.layout, layout, cache.rows)
    if copied.buffers is not None and not stay(cache.layout, layout, cache.rows):
        change_layout(copied.buffers, cache.layout, layout, cache.rows, copied.round_up(copied.used), copied.used)
    return copied


def joined_buffers(everyone: Sequence[RowStorage], capacity: int, encoded: bool) -> Buffers:
    """Buffers of all rows, encoded or still plain."""
    stored = [(None if each.empty() else each.buffers, len(each.rows), each.used) for each in everyone]

    def joined(which: int) -> SlotBuffer:
        parts: list[tuple[SlotBuffer | None, int, int]] = []
        for buffers, rows, used in stored:
            buffer = None if buffers is None else buffers[which]
            if buffer is not None and encoded:
                buffer = buffer.copied()
                buffer.recode(everyone[0].codecs[which])
            parts.append((buffer, rows, used))
        return SlotBuffer.stacked(parts, capacity)

    return joined(0), joined(1)


def keep(cache: RowStorage, chosen: Sequence[int], shrink: bool = False) -> None:
    """Keeps only these rows, in this order.

    Args:
        shrink: without slack.
    """
    cache.rows = tuple([cache.rows[index] for index in chosen])
    cache.announced = tuple([cache.announced[index] for index in chosen])
    if cache.buffers is not None:
        used = cache.used
        # What was announced may never come, and empty slots cost a copy as much as live ones: twice what is live is
        # enough, as for a cache that grows.
        capacity = cache.round_up(used + 1) if shrink else min(cache.capacity, cache.round_up(2 * used + 1))
        keys, values = (buffer.selected(chosen, used, capacity) for buffer in cache.buffers)
        cache.buffers = keys, values
    if cache.residual is not None:
        cache.residual = cache.residual.selected(chosen)
    cache.chain = cache.chain if len(chosen) == 1 else ()
    cache._forget_fetch(new_rows=True)
    if cache.lengths is not None:
        cache.lengths = tuple([cache.lengths[index] for index in chosen])
    if cache.evictor is not None:
        cache.evictor.keep(chosen, cache.rows)


def announce_padding(cache: RowStorage, lengths: Sequence[int] | None, left_padding: Sequence[int] | None) -> None:
    """As `KVCache.prepare`."""
    check_padding(len(cache.rows), cache.empty(), lengths, left_padding)
    if left_padding is not None:
        pairs = zip(cache.rows, left_padding, strict=True)
        cache.rows = tuple([row._replace(offset=row.offset - n) for row, n in pairs])
    if lengths is not None:
        cache.lengths = tuple(lengths)


def positions(cache: RowStorage) -> mx.array:
    """As `KVCache.positions`."""
    if cache.layout.max_slots != NO_LIMIT:
        raise ValueError("a ring reuses its slots: use the layout of the cache for the position of a slot")
    lines = [
        mx.arange(max(0, row.end), dtype=mx.int32)[None] - row.start
        if cache.evictor is None
        else cache.evictor.live_positions(row, i)
        for i, row in enumerate(cache.rows)
    ]
    heads, most = max(line.shape[0] for line in lines), max(line.shape[1] for line in lines)
    return mx.stack(
        [
            mx.pad(mx.broadcast_to(line, (heads, n)), [(0, 0), (0, most - n)], constant_values=mx.array(-1))
            for line, n in ((line, line.shape[1]) for line in lines)
        ]
    )
