"""What every layout has in common: rows, the plan of an update, what is asked of a layout, and trims.

Decides nothing about slots itself. Integers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

L = TypeVar("L")


class Row(NamedTuple):
    """Where one sequence stands.

    Attributes:
        start: the slot of position 0. Below 0, so many tokens were evicted, and slot = start + position holds for those
            that came after.
        offset: the next position. Below 0, so many tokens of padding are to come first.
        high: the high-water mark, one past the highest position ever written, taken back or not.
        front: the first position after the sinks that attention reads.
    """

    start: int = 0
    offset: int = 0
    high: int = 0
    front: int = 0

    @property
    def end(self) -> int:
        """One past the last live slot, as long as nothing has wrapped."""
        return self.start + self.offset


Ranges = tuple[tuple[int, int], ...]


NO_LIMIT = 1 << 62


Index = tuple[slice, slice, slice]


def _slots(first: int, count: int) -> Index:
    return slice(None), slice(None), slice(first, first + count)


class Plan:
    """One update in integers. The mask, the write and the read are all made from it, so they cannot disagree.

    Every layer asks for one for every token, so what is asked more than once is worked out once: `plan_of` gives
    layers that stand alike the same.

    Attributes:
        layout: which slot holds which position.
        rows: where each row stands before the update.
        new: the number of new tokens of every row (S).
        counts: how many of them are tokens of the row; padding follows. Positions below 0 are padding, too.
        padded: whether any row has padding, which is never stored, nor seen by a token.
        held: one past the last slot of the longest row before the update, as if nothing ever wrapped.
        needed: slots that must exist: [0, needed).
        ranges: the slots [first, last) that attention reads, one range after the other, unless the plan is transient.
        uniform: whether all rows stand alike, so that one slice write does it and one mask row serves all.
        ordered: whether slots are in the order of positions: nothing wraps, before or with this update.
        steady: whether the update is all that is due: no padding, no compaction, nothing transient.
        bounded: whether the room for writes is limited.
        written, read: the slots of the new tokens, and of what attention reads, as an index of (B, H, C, D) each; None
            where they are not one range.
        transient: whether the write would overwrite what its own first query needs. Attention then reads the live
            tokens in order and after them the new ones, and the ring keeps the last of both.
    """

    __slots__ = (
        "_after",
        "_next",
        "bounded",
        "counts",
        "held",
        "layout",
        "needed",
        "new",
        "ordered",
        "padded",
        "ranges",
        "read",
        "rows",
        "steady",
        "transient",
        "uniform",
        "written",
    )

    def __init__(self, layout: Layout, rows: tuple[Row, ...], new: int, counts: tuple[int, ...] | None = None) -> None:
        self.layout, self.rows, self.new = layout, rows, new
        self._after: tuple[Row, ...] | None = None
        self._next: Plan | None = None
        self.padded = counts is not None or min([row.offset for row in rows]) < 0
        self.counts = (new,) * len(rows) if counts is None else counts
        self.held = rows[0].end if len(rows) == 1 else max([row.end for row in rows])
        self.uniform = not self.padded and (
            len(rows) == 1 or len({(row.start, row.offset, row.front) for row in rows}) == 1
        )
        end = self.held + new
        if self.padded:
            end = max([0, *(row.end + count for row, count in zip(rows, self.counts, strict=True))])
        self.ordered = end <= layout.most_slots
        self.needed = end if self.ordered else layout.most_slots
        self.transient = not self.ordered and new > layout.room
        self.ranges = (
            layout.ranges(rows[0], new) if self.uniform and not self.transient else ((0, self._bucket(self.needed)),)
        )

        self.bounded = layout.room != NO_LIMIT
        self.steady = not (self.padded or self.transient or any(layout.compacted_if_due(r) is not r for r in rows))
        self.written: Index | None = None
        self.read: Index | None = None
        if self.uniform and self.steady and len(self.ranges) == 1:
            if new == 1 or len(list(layout.pieces(rows[0], new))) == 1:
                self.written = _slots(layout.slot(rows[0], rows[0].offset), new)
            self.read = _slots(self.ranges[0][0], count_slots(self.ranges))

    def _bucket(self, end: int) -> int:
        """Where reading ends when there is a mask anyway: a few slots later, so that devices see fewer shapes.

        At most 1/16 more slots, at least to a multiple of 16, and never into slots that do not exist.
        """
        end = max(end, 1)  # a batch may begin with nothing but padding, which must see something
        step = min(256, 1 << max(4, end.bit_length() - 5))
        return min(-(-end // step) * step, self.layout.most_slots)

    def is_padding(self, index: int, token: int) -> bool:
        """Whether a new token of row `index` is none of its own."""
        return token >= self.counts[index] or self.rows[index].offset + token < 0

    @property
    def after(self) -> tuple[Row, ...]:
        """Where each row stands after the update."""
        if self._after is None:
            front = self.layout.front
            self._after = tuple(
                [
                    Row(row.start, row.offset + new, max(row.high, row.offset + new), front(row, new))
                    for row, new in zip(self.rows, self.counts, strict=True)
                ]
            )
        return self._after

    @property
    def next(self) -> Plan:
        """The plan of the same update once more. Layers with the same plan get the same."""
        if self._next is None:
            self._next = plan_of(self.layout, self.after, self.new)
        return self._next

    @property
    def distinct(self) -> tuple[Row, ...]:
        """The rows to work something out for: one where all stand alike."""
        return self.rows[:1] if self.uniform else self.rows

    def live(self) -> list[list[int]]:
        """For a transient plan: the positions before the update that attention reads, in order, by distinct row.

        All are as long as the longest; shorter ones begin with -1, which is no position.
        """
        sinks = self.layout.sinks
        seen = [
            [*range(min(sinks, row.offset)), *range(max(sinks, self.layout.front(row, new)), row.offset)]
            for row, new in zip(self.distinct, self.counts, strict=False)
        ]
        longest = max(map(len, seen))
        return [[-1] * (longest - len(positions)) + positions for positions in seen]


@lru_cache(maxsize=8)
def plan_of(layout: Layout, rows: tuple[Row, ...], new: int, counts: tuple[int, ...] | None = None) -> Plan:
    """The plan of an update. The layers of a model ask for the same one after the other; it is made once."""
    return Plan(layout, rows, new, counts)


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
        """Tokens that can be taken back in any case: there is never less room than for so many."""
        ...

    @property
    def room(self) -> int:
        """The longest write that there are slots for as things are, max_write at the most."""
        ...

    def with_room(self, room: int) -> Layout:
        """The same layout with slots for writes of so many tokens."""
        ...

    @property
    def most_slots(self) -> int:
        """Slots that are ever used."""
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
        """The front when a model has asked to let go of what it will not see."""
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

    def most_trim(self, row: Row) -> int:
        """Tokens that can be taken back without losing one that must stay visible."""
        ...

    def refusal(self, count: int, most: int) -> tuple[str, str]:
        """Why `most` tokens can be taken back and `count` cannot, and what to do about it."""
        ...

    def held(self, row: Row) -> int:
        """Tokens of a row that a later query may see, those of its own write aside."""
        ...

    def compacted_if_due(self, row: Row) -> Row:
        """Where a row will stand when what is due before its next write has been done: a compaction, if anything."""
        ...


def check_room(room: int, max_write: int, max_rollback: int = 0) -> int:
    """The room for writes that was told, or max_write where none was.

    Raises:
        ValueError: more than is planned for, or less than what can be taken back in any case.
    """
    if max_rollback < 0 or max_rollback > max_write:
        raise ValueError(f"max_rollback is {max_rollback}: give a number of tokens from 0 to max_write={max_write}")
    if room and not max(1, max_rollback) <= room <= max_write:
        raise ValueError(
            f"there is room for writes of {room}, but {max_write} are planned for, {max_rollback} at least"
        )
    return room or max_write


@lru_cache(maxsize=64)
def _with_room(layout: Any, room: int) -> Any:
    return replace(layout, room=room)


def with_room(layout: L, room: int) -> L:
    """The same layout with another room; layers that ask for the same get the same object."""
    made: L = _with_room(layout, room)
    return made


def room_parameters(layout: Layout) -> tuple[int, ...]:
    """What of the `parameters` is about room: nothing where a layout is as it was made without any of it."""
    if not layout.max_rollback and layout.room == layout.max_write:
        return ()
    return layout.max_rollback, layout.room


def planned(layout: Layout) -> Layout:
    """The layout with all the room that it ever has, as it was made."""
    return layout.with_room(layout.max_write)


def count_slots(ranges: Ranges) -> int:
    return sum([last - first for first, last in ranges])


def count_seen(layout: Layout, position: int) -> int:
    """Tokens that a query at `position` sees, itself included."""
    first = layout.first_seen(position)
    return position + 1 - first + min(layout.sinks, first)


def trim_rows(layout: Layout, rows: tuple[Row, ...], counts: tuple[int, ...]) -> tuple[Row, ...]:
    """The rows without their last `counts[i]` tokens; nothing moves.

    Raises:
        ValueError: one count for each row is wanted, none negative, none more than its row can give back.
    """
    if len(counts) != len(rows):
        raise ValueError(f"got {len(counts)} counts to trim by, but this cache has {len(rows)} rows: give one for each")
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        where = "this cache" if len(rows) == 1 else f"row {index}"
        if not 0 <= count <= row.offset:
            raise ValueError(f"cannot trim {count} tokens: {where} holds {row.offset}; trim by 0 to {row.offset}")
        if count > (most := layout.most_trim(row)):
            why, mend = layout.refusal(count, most)
            raise ValueError(f"cannot trim {count} tokens: {where} {why}; trim by 0 to {most}, or {mend}")
    return tuple(trimmed(layout, row, count) for row, count in zip(rows, counts, strict=True))


def trimmed(layout: Layout, row: Row, count: int) -> Row:
    """A row without its last `count` tokens."""
    offset = row.offset - count
    return Row(row.start, offset, row.high, min(row.front, layout.first_seen(offset)))


@lru_cache(maxsize=8)
def reshaped(old: Layout, new: Layout, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Rows of one layout where they stand in the same with another room, once their tokens have moved there.

    The lowest position that no write has gone over stays the same, as long as there is a slot for it: what can be taken
    back is what it was, or what the new room allows.
    """
    more = new.room - old.room
    if new.most_slots == NO_LIMIT:
        return rows
    return tuple([row._replace(high=max(row.offset, row.high + more)) for row in rows])


def moves_between(old: Layout, new: Layout, row: Row) -> list[tuple[int, int, int]]:
    """Which slots of a row are which between two rooms: (slot, new slot, slots) of each contiguous piece."""
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
