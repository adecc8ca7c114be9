"""Rows that come, go and change places: which caches fit, their buffers as one, and padding that is announced.

A row's slots begin at 0 in every cache, whatever was evicted or overwritten, so rows are put side by side as they are:
nothing is rolled, padded or realigned. Attention and masks are not affected; `KVCache` has the methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_kv.cache.buffers import Buffers, SlotBuffer
from mlx_kv.cache.codecs import affine_of, are_plain, in_words
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.growth import round_up
from mlx_kv.cache.layout import Layout, enough_slots, moves_between, planned, reshaped, stay
from mlx_kv.cache.residual import Residual
from mlx_kv.cache.state import CacheView, Contents


class Joinable(Protocol):
    """A cache that says what it holds."""

    @property
    def view(self) -> CacheView: ...

    @property
    def evictor(self) -> Evictor | None: ...


def check_joinable(index: int, first: Joinable, other: Joinable) -> None:
    """Raises ValueError unless `other`, number `index` of those to be joined, keeps its tokens as `first` does."""
    if type(other) is not type(first):
        raise ValueError(
            f"cache {index} is a {type(other).__name__}: only caches of this library can be merged with one"
        )
    kept, wanted = _how(other), _how(first)
    if first.view.buffers is None or other.view.buffers is None:  # what has stored nothing yet takes any shape
        kept, wanted = kept[:-2], wanted[:-2]
    for (what, own), (_, theirs) in zip(wanted, kept, strict=True):
        if own != theirs:
            raise ValueError(
                f"cache {index} has {what} {theirs}, the first one {own}: only caches of one kind can be one batch"
            )


def _how(cache: Joinable) -> list[tuple[str, object]]:
    """All that must be the same in every row of a batch, in words and as it is."""
    view, evictor = cache.view, cache.evictor
    affine = affine_of(view.codecs)
    keys, values = (None, None) if view.buffers is None else (buffer.signature[1:] for buffer in view.buffers)
    other = None if affine is not None or are_plain(view.codecs) else in_words(view.codecs)
    return [
        ("layout", planned(view.layout).parameters),
        ("bits and group size", None if affine is None else (affine.bits, affine.group_size)),
        ("a residual of", view.residual_length),
        ("codecs", (other, None if other is None else tuple(map(type, view.codecs)))),
        ("score and share", None if evictor is None else (evictor.score.name, evictor.granularity)),
        ("budgets of layers", None if evictor is None else evictor.layers),
        # Lambdas have one name, and so have functions that were registered under it one after the other.
        (
            "the score function",
            None if evictor is None else (evictor.score.function, evictor.score.per_token, evictor.score.wants),
        ),
        ("KV heads, head dim and dtype of keys", keys),
        ("KV heads, head dim and dtype of values", values),
    ]


def check_rows(chosen: Sequence[int], rows: int) -> None:
    """Raises ValueError unless these are rows that there are."""
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= index < rows for index in chosen):
        raise ValueError(
            f"cannot take rows {list(chosen)}: this cache has rows 0 to {rows - 1}; give at least one, and none twice"
        )


def join(held: Contents, others: Sequence[Contents]) -> None:
    """Takes copies of the rows of others, after its own; `check_joinable` has found that they fit."""
    everyone = [held, *others]
    filled = [each for each in everyone if not each.empty()]
    if filled:  # those that come take the shape of those that are there: these are often many
        layout = filled[0].layout
        held.layout, everyone = layout, [_in_shape(each, layout) for each in everyone]
        filled = [each for each in everyone if not each.empty()]
    encoded = any(each.encoded for each in filled)  # if one cache is quantised by now, all are
    # Where no row has a token, buffers that are left of trimmed ones have rows for this cache alone.
    held.buffers = joined_buffers(everyone, _joint_capacity(filled), encoded) if filled else None
    held.encoded = encoded
    if held.residual is not None:
        parts = [(each.residual, len(each.rows)) for each in everyone if each.residual is not None]
        held.residual = Residual.joined(parts)
    held.rows = tuple([row for each in everyone for row in each.rows])
    held.reserved = max(each.reserved for each in everyone)
    held.announced = tuple([announced for each in everyone for announced in each.announced])
    held.transient, held.ranges, held.packed, held.lengths, held.trimmed_at = None, (), False, None, ()
    if held.evictor is not None:
        for other in others:
            if other.evictor is not None:
                held.evictor.extend(other.evictor)


def _in_shape(held: Contents, layout: Layout) -> Contents:
    """The same contents, or a copy of them in a layout of another room."""
    if held.layout == layout:
        return held
    copied = held.without_evictor()
    copied.layout, copied.rows = layout, reshaped(held.layout, layout, held.rows)
    if stay(held.layout, layout, held.rows):
        return copied
    moves = [moves_between(held.layout, layout, row) for row in held.rows]
    for buffer in copied.buffers or ():
        buffer.rearrange(moves, round_up(copied.view.used))
    return copied


def _joint_capacity(filled: Sequence[Contents]) -> int:
    """Slots for the rows of all: no more than they ever need, or hold now."""
    used = max(each.view.used for each in filled)
    enough = max(enough_slots(filled[0].layout, each.rows) for each in filled)
    return min(max(each.capacity for each in filled), round_up(max(used, enough)))


def joined_buffers(everyone: Sequence[Contents], capacity: int, encoded: bool) -> Buffers:
    """Keys and values of all rows, stored by the codecs, or still plain."""
    stored = [None if each.empty() else each.buffers for each in everyone]

    def joined(which: int) -> SlotBuffer:
        parts: list[tuple[SlotBuffer | None, int, int]] = []
        for each, buffers in zip(everyone, stored, strict=True):
            if buffers is None:
                parts.append((None, len(each.rows), 0))
                continue
            buffer = buffers[which]
            if encoded:
                buffer = buffer.copied()
                buffer.recode(everyone[0].codecs[which])
            parts.append((buffer, len(each.rows), each.view.used))
        return SlotBuffer.stacked(parts, capacity)

    return joined(0), joined(1)


def extracted(held: Contents, index: int) -> Contents:
    """A copy of one row, of no more slots than it needs; what was reserved is left behind."""
    single = copied_rows(held, [index], shrink=True)
    single.announced = (0,)
    return single


def copied_rows(held: Contents, chosen: Sequence[int], shrink: bool = False) -> Contents:
    """A copy of some rows, in this order. No other sequence is copied with them.

    Args:
        shrink: leave no slack.
    """
    copied = held.without_evictor()
    select(copied, chosen, shrink)
    if held.evictor is not None:
        copied.evictor = held.evictor.selected(chosen)
        copied.evictor.belong_to(copied)
    return copied


def select(held: Contents, chosen: Sequence[int], shrink: bool = False) -> None:
    """Keeps only these rows, in this order.

    Args:
        shrink: leave no slack.
    """
    held.rows = tuple([held.rows[index] for index in chosen])
    held.announced = tuple([held.announced[index] for index in chosen])
    if held.buffers is not None:
        used = held.view.used
        capacity = min(held.capacity, round_up(max(held.reserved, *held.announced, 2 * used, 1)))
        capacity = round_up(used + 1) if shrink else capacity
        keys, values = (buffer.selected(chosen, capacity) for buffer in held.buffers)
        held.buffers = keys, values
    if held.residual is not None:
        held.residual = held.residual.selected(chosen)
    held.transient, held.ranges, held.packed, held.trimmed_at = None, (), False, ()
    if held.lengths is not None:
        held.lengths = tuple([held.lengths[index] for index in chosen])
    if held.evictor is not None:
        held.evictor.keep(chosen, held.rows)


def check_padding(rows: int, empty: bool, lengths: Sequence[int] | None, left_padding: Sequence[int] | None) -> None:
    """Raises ValueError unless padding of so many rows can be announced like that."""
    for name, counts in (("lengths", lengths), ("left_padding", left_padding)):
        if counts is not None and (len(counts) != rows or min(counts) < 0):
            raise ValueError(f"{name} is {list(counts)}: give {rows} numbers from 0 up, one for each row")
    if left_padding is not None and not empty:
        raise ValueError("left padding can only come first, but this cache holds tokens: give lengths instead")


def announce_padding(held: Contents, lengths: Sequence[int] | None, left_padding: Sequence[int] | None) -> None:
    """As `KVCache.prepare`."""
    check_padding(len(held.rows), held.empty(), lengths, left_padding)
    if left_padding is not None:
        held.rows = tuple([row._replace(offset=row.offset - n) for row, n in zip(held.rows, left_padding, strict=True)])
    if lengths is not None:
        held.lengths, held.last = tuple(lengths), None
