"""What all layouts share: rows, the protocol of a layout, trims, and the write capacity (`room`). Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

from mlx_kv.settings import SettingError

L = TypeVar("L")


class Row(NamedTuple):
    """Where one sequence stands.

    Attributes:
        start: slot minus position of the tokens in order: 0 at first, lowered by evictions, after which it holds from
            the cut on (`Budget.cut_of`).
        offset: the next position; -n while n tokens of left padding are still to come.
        high: one past the highest position ever written, trimmed tokens included. A change of room shifts it, so that
            as many tokens can be trimmed as before (`reshaped`).
        front: the first position after the sinks that attention reads.
        extra_slots: tokens of the longest head of this layer minus the mean over all heads of all layers: below 0 in a
            layer of few tokens, 0 where all heads hold the same number.
        shared: first tokens that lie in shared segments (`cache.segments`), not in slots of this cache.
    """

    start: int = 0
    offset: int = 0
    high: int = 0
    front: int = 0
    extra_slots: int = 0
    shared: int = 0

    @property
    def end(self) -> int:
        """One past the last live slot, as long as nothing has wrapped."""
        return self.start + self.offset

    @property
    def evicted(self) -> int:
        """Tokens that are gone, of all heads on average."""
        return self.extra_slots - self.start - self.shared


Ranges = tuple[tuple[int, int], ...]


NO_LIMIT = 1 << 62


class Layout(Protocol):
    """A rule for slots. All numbers are slots or positions of one row. A layout never changes."""

    def __hash__(self) -> int: ...

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself and the sinks included; None is all."""
        ...

    @property
    def sinks(self) -> int: ...

    @property
    def chunk_size(self) -> int | None:
        """A query sees only tokens of its own chunk of so many positions; None is no chunks."""
        ...

    @property
    def max_write(self) -> int:
        """The longest write to plan for: a longer one needs a transient view, or more slots than are enough."""
        ...

    @property
    def max_rollback(self) -> int:
        """Tokens that can be trimmed at any time; room is never smaller."""
        ...

    @property
    def room(self) -> int:
        """The longest write that currently has slots, at most max_write."""
        ...

    def with_room(self, room: int) -> Layout:
        """The same layout with slots for writes of so many tokens."""
        ...

    @property
    def most_slots(self) -> int:
        """The largest number of slots in use; `NO_LIMIT` where slots are not overwritten."""
        ...

    @property
    def enough_slots(self) -> int:
        """Slots that suffice as long as no write is longer than there is room for."""
        ...

    def first_seen(self, position: int) -> int:
        """The first position, sinks aside, that a query at `position` sees."""
        ...

    def front(self, row: Row, new: int) -> int:
        """The first position, sinks aside, that attention reads with a write of `new` tokens."""
        ...

    def trimmed_front(self, row: Row) -> int:
        """The front after a model has dropped the tokens that it will not see again (`maybe_trim_front`)."""
        ...

    @property
    def parameters(self) -> tuple[str | int, ...]:
        """A name and numbers from which `make_layout` makes it again."""
        ...

    def slot(self, row: Row, position: int) -> int:
        """The slot of a position."""
        ...

    def pieces(self, row: Row, new: int) -> Iterator[tuple[int, int, int]]:
        """How new tokens are written: (first slot, first token, tokens) of each contiguous piece, late ones last."""
        ...

    def ranges(self, row: Row, new: int) -> Ranges:
        """The slots [first, last) that attention reads after a write of `new` tokens, one range after the other."""
        ...

    def ordered_from(self, row: Row) -> int:
        """The lowest position from which on every token lies in the slot that `slot` returns."""
        ...

    def most_trim(self, row: Row) -> int:
        """Tokens that can be taken back without losing one that must stay visible."""
        ...

    def refusal(self, count: int, most: int) -> tuple[str, str]:
        """Why `most` tokens can be taken back and `count` cannot, and what to do about it."""
        ...

    def held(self, row: Row) -> int:
        """Tokens of a row that the next query may see, without those of its own write."""
        ...

    def compacted_if_due(self, row: Row) -> Row:
        """The row after the compaction before its next write, with `extra_slots` 0; the same object if none is due."""
        ...


def enough_slots(layout: Layout, rows: Iterable[Row]) -> int:
    """Slots that suffice for these rows as long as no write is longer than there is room for."""
    return layout.enough_slots + max([row.extra_slots for row in rows])


def count_slots(ranges: Ranges) -> int:
    return sum([last - first for first, last in ranges])


def count_seen(layout: Layout, position: int) -> int:
    """Tokens that a query at `position` sees, itself included."""
    first = layout.first_seen(position)
    return position + 1 - first + min(layout.sinks, first)


def trim_rows(layout: Layout, rows: tuple[Row, ...], counts: tuple[int, ...]) -> tuple[Row, ...]:
    """The rows without their last `counts[i]` tokens; nothing moves.

    Raises:
        ValueError: a wrong number of counts, or one that is negative or more than its row can drop.
    """
    if len(counts) != len(rows):
        raise ValueError(f"got {len(counts)} counts to trim by, but this cache has {len(rows)} rows: give one for each")
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        where = "this cache" if len(rows) == 1 else f"row {index}"
        length = max(0, row.offset)  # below 0 while left padding is to come
        if not 0 <= count <= length:
            raise ValueError(f"cannot trim {count} tokens: {where} holds {length}; trim by 0 to {length}")
        if count and count > (most := layout.most_trim(row)):
            why, fix = layout.refusal(count, most)
            raise ValueError(f"cannot trim {count} tokens: {where} {why}; trim by 0 to {most}, or {fix}")
    return tuple(trimmed(layout, row, count) for row, count in zip(rows, counts, strict=True))


def trimmed(layout: Layout, row: Row, count: int) -> Row:
    """A row without its last `count` tokens."""
    offset = row.offset - count
    row = row._replace(offset=offset, front=min(row.front, layout.first_seen(offset)))
    if offset >= row.shared:
        return row
    return row._replace(start=row.start + row.shared - max(0, offset), shared=max(0, offset))


# --- write capacity ---------------------------------------------------------------------------------------------------

# Rings and budgets need slots for the longest write beside the tokens that they keep. The same layout has more room
# while a prompt is read than in decoding; `WriteCapacity` decides when it changes.


def check_room(room: int, max_write: int, max_rollback: int = 0) -> int:
    """The given room for writes, or max_write where it is 0.

    Raises:
        ValueError: more than is planned for, or less than what can be taken back in any case.
    """
    if max_rollback < 0 or max_rollback > max_write:
        raise SettingError(
            "{max_rollback:is}: give a number of tokens from 0 to {max_write:=}",
            max_rollback=max_rollback,
            max_write=max_write,
        )
    if room and not max(1, max_rollback) <= room <= max_write:
        raise ValueError(
            f"there is room for writes of {room}, but {max_write} are planned for, {max_rollback} at least"
        )
    return room or max_write


@lru_cache(maxsize=64)
def _with_room(layout: Any, room: int) -> Any:
    return replace(layout, room=room)


def with_room(layout: L, room: int) -> L:
    """The same layout with another room; equal arguments give the same object."""
    made: L = _with_room(layout, room)
    return made


def room_parameters(layout: Layout) -> tuple[int, ...]:
    """The end of `parameters`: max_rollback and room, or nothing where both have their defaults."""
    if not layout.max_rollback and layout.room == layout.max_write:
        return ()
    return layout.max_rollback, layout.room


def planned(layout: Layout) -> Layout:
    """The layout with room for max_write tokens, as it was made."""
    return layout.with_room(layout.max_write)


@lru_cache(maxsize=8)
def reshaped(old: Layout, new: Layout, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of one layout after a change of room, once their tokens have moved.

    The lowest position that is not overwritten stays the same as long as it has a slot: as many tokens can be trimmed
    as before, or as many as the new room allows.
    """
    more = new.room - old.room
    if new.most_slots == NO_LIMIT:
        return rows
    return tuple([row._replace(high=max(row.offset, row.high + more)) for row in rows])


def stay(old: Layout, new: Layout, rows: tuple[Row, ...]) -> bool:
    """Whether all tokens have the same slots in both rooms."""
    return max([row.end for row in rows]) <= min(old.most_slots, new.most_slots)


def moves_between(old: Layout, new: Layout, row: Row) -> list[tuple[int, int, int]]:
    """How a row's tokens move between two rooms: (slot, new slot, slots) of each contiguous piece."""
    sinks, fewer = old.sinks, min(old.most_slots, new.most_slots)
    if row.end <= fewer:
        return [(0, 0, row.end)] if row.end > 0 else []
    moves = [(0, 0, sinks)] if sinks else []
    position = max(sinks, row.offset - fewer + sinks)
    while position < row.offset:
        source, target = old.slot(row, position), new.slot(row, position)
        count = min(row.offset - position, old.most_slots - source, new.most_slots - target)
        moves.append((source, target, count))
        position += count
    return moves


class WriteCapacity:
    """The room that the next write of a cache gets: a prompt needs much, decoding little.

    Room grows at once for a longer write and shrinks after PERIOD consecutive writes that need far less. Trims count as
    writes, so that a loop with a draft model keeps room for all tokens that it may take back. One layer makes the mask
    for all layers before the write; so the room of that write is decided before, from integers that are equal in all
    layers.

    Attributes:
        next_layout: the layout with less room that the next short write will use; None where nothing changes.
        steps, max_steps: consecutive updates on the fast path, and how many are allowed before room is checked again.
        trimmed_at: the offset of each row after the last trim.
    """

    # Changing the room copies all live slots once, about as much as attention reads in two or three decode steps. Once
    # in so many writes that is little, even where the length of writes keeps changing.
    PERIOD = 32
    MUCH_LESS = 4  # times: writes of at most room / MUCH_LESS tokens, or of 1 (which then needs no mask), are short

    def __init__(self) -> None:
        self.next_layout: Layout | None = None
        self.steps, self.max_steps = 0, 0
        self.trimmed_at: tuple[int, ...] = ()
        # Consecutive writes that need far less than there is, and the longest of them.
        self._short_writes, self._longest = 0, 0

    def layout_for(self, layout: Layout, new: int) -> Layout:
        """The layout for a write of `new` tokens."""
        if new > layout.room:
            return layout if layout.room == layout.max_write else layout.with_room(_room_for(new, layout))
        return layout if self.next_layout is None or new > self.next_layout.room else self.next_layout

    def tokens_since_trim(self, before: tuple[Row, ...], after: tuple[Row, ...]) -> int:
        """Most tokens of a row since the last trim: a draft of that length could have been trimmed.

        Args:
            before, after: the rows before and after this trim.
        """
        offsets = self.trimmed_at if len(self.trimmed_at) == len(before) else (0,) * len(before)
        self.trimmed_at = tuple([row.offset for row in after])
        return max(row.offset - offset for row, offset in zip(before, offsets, strict=True))

    def note(self, layout: Layout, tokens: int, writes: int) -> Layout | None:
        """Counts tokens that were written at once, or could have been trimmed at once.

        Returns:
            after PERIOD short writes the layout with room for these, which may be the same; else None.
        """
        if self.next_layout is not None and tokens > self.next_layout.room:
            self.next_layout = None
        if tokens * self.MUCH_LESS > layout.room and tokens > 1:
            self.steps, self._short_writes, self._longest, self.max_steps = 0, 0, 0, NO_LIMIT
            return None
        if self._short_writes:  # the fast steps since the last check were short, too
            self._short_writes += self.steps
        self._short_writes += writes
        self._longest = max(self._longest, tokens)
        narrower = None
        if self._short_writes >= self.PERIOD:
            narrower = layout.with_room(min(layout.room, _room_for(self._longest, layout)))
            self._short_writes, self._longest = 0, 0
        self.steps, self.max_steps = 0, self.PERIOD - 1 - self._short_writes
        return narrower


def _room_for(tokens: int, layout: Layout) -> int:
    """Room for writes of at least `tokens`, a power of two so that drafts of varying lengths change nothing."""
    room = max(1, tokens, layout.max_rollback)
    return min(1 << (room - 1).bit_length(), layout.max_write)
