"""Which slot holds which position.

Decides where the tokens of an update go, which slots attention reads, and what a trim can undo. Integers only: knows
nothing about arrays, so it is tested in microseconds. A *row* is one sequence of the batch. Rows need not line up:
after a trim of one row alone, they are *ragged*.

Append: slot = start + position; a row owns the slots [start, end), and every slot from `end` on is dead until written.
Ring: the first `sinks` positions have slots of their own, and after them slot = sinks + (position - sinks) mod turn, in
R = window + max_write - 1 slots all in all. A slot holds the largest position below the row's offset that maps to it;
the mask decides from that position alone, so a ring is never unrolled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Row(NamedTuple):
    """Where one sequence stands.

    Attributes:
        start: the slot of position 0; only a layout without a ring has another than 0.
        offset: the next position.
        high: the high-water mark, one past the highest position ever written, taken back or not.
    """

    start: int = 0
    offset: int = 0
    high: int = 0

    @property
    def end(self) -> int:
        """One past the last live slot, as long as nothing has wrapped."""
        return self.start + self.offset

    def advanced(self, new: int) -> Row:
        return Row(self.start, self.offset + new, max(self.high, self.offset + new))

    def trimmed(self, count: int) -> Row:
        return Row(self.start, self.offset - count, self.high)


class Plan:
    """One update in integers. The mask, the write and the read are all made from it, so they cannot disagree.

    Every layer makes one for every token, so what is asked more than once is worked out once.

    Attributes:
        layout: which slot holds which position.
        rows: where each row stands before the update.
        new: the number of new tokens of every row (S).
        held: one past the last slot of the longest row before the update, as if nothing ever wrapped.
        needed: slots that must exist, and that attention reads unless the plan is transient: [0, needed).
        uniform: whether all rows stand alike, so that one slice write does it and one mask row serves all.
        ordered: whether slots are in the order of positions: nothing wraps, before or with this update.
        transient: whether the write would overwrite what its own first query needs. Attention then reads the live
            tokens in order and after them the new ones, and the ring keeps the last of both.
    """

    __slots__ = ("held", "layout", "needed", "new", "ordered", "rows", "transient", "uniform")

    def __init__(self, layout: Layout, rows: tuple[Row, ...], new: int) -> None:
        self.layout, self.rows, self.new = layout, rows, new
        self.held = rows[0].end if len(rows) == 1 else max([row.end for row in rows])
        self.uniform = len(rows) == 1 or len({(row.start, row.offset) for row in rows}) == 1
        self.ordered = self.held + new <= layout.most_slots
        self.needed = self.held + new if self.ordered else layout.most_slots
        self.transient = not self.ordered and new > layout.max_write

    @property
    def after(self) -> tuple[Row, ...]:
        """Where each row stands after the update."""
        return tuple([row.advanced(self.new) for row in self.rows])

    @property
    def distinct(self) -> tuple[Row, ...]:
        """The rows to work something out for: one where all stand alike."""
        return self.rows[:1] if self.uniform else self.rows

    def live(self) -> list[list[int]]:
        """For a transient plan: the positions before the update that its queries may see, in order, by distinct row.

        All are as long as the longest; shorter ones begin with -1, which is no position.
        """
        seen = [self.layout.positions_seen(row) for row in self.distinct]
        longest = max(map(len, seen))
        return [[-1] * (longest - len(positions)) + positions for positions in seen]


class Layout(Protocol):
    """A rule for slots. All numbers are slots or positions of one row."""

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself and the sinks included; None is all."""
        ...

    @property
    def sinks(self) -> int: ...

    @property
    def max_write(self) -> int:
        """The longest write that never needs a transient view."""
        ...

    @property
    def most_slots(self) -> int:
        """Slots that are ever used."""
        ...

    def slot(self, row: Row, position: int) -> int:
        """The slot of a position."""
        ...

    def pieces(self, row: Row, new: int) -> Iterator[tuple[int, int, int]]:
        """How new tokens are written: (first slot, first token, tokens) of each contiguous piece, late ones last."""
        ...

    def positions_seen(self, row: Row) -> list[int]:
        """The positions below the offset that the next query may see."""
        ...

    def most_trim(self, row: Row) -> int:
        """Tokens that can be taken back without losing one that must stay visible."""
        ...


NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Append:
    """slot = start + position: everything is kept."""

    window: None = None
    sinks: int = 0
    max_write: int = NO_LIMIT
    most_slots: int = NO_LIMIT

    def slot(self, row: Row, position: int) -> int:
        return row.start + position

    def pieces(self, row: Row, new: int) -> Iterator[tuple[int, int, int]]:
        yield row.end, 0, new

    def positions_seen(self, row: Row) -> list[int]:
        return list(range(row.offset))

    def most_trim(self, row: Row) -> int:
        return row.offset


@dataclass(frozen=True, slots=True)
class Ring:
    """The last `window` tokens of which the first `sinks` are the first of all, in window + max_write - 1 slots.

    Raises:
        ValueError: a window or max_write below 1, or sinks that fill the window.
    """

    window: int
    max_write: int
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}: give a number of tokens from 1 up")
        if self.max_write < 1:
            raise ValueError(f"max_write is {self.max_write}: give a number of tokens from 1 up")
        if not 0 <= self.sinks < self.window:
            raise ValueError(
                f"sinks is {self.sinks}: a window of {self.window} tokens has room for 0 to {self.window - 1}"
            )

    @property
    def most_slots(self) -> int:
        return self.window + self.max_write - 1

    @property
    def turn(self) -> int:
        """Slots of the ring proper, without those of the sinks."""
        return self.most_slots - self.sinks

    def slot(self, row: Row, position: int) -> int:
        return position if position < self.sinks else self.sinks + (position - self.sinks) % self.turn

    def pieces(self, row: Row, new: int) -> Iterator[tuple[int, int, int]]:
        position, last = row.offset, row.offset + new
        if position < self.sinks:
            count = min(new, self.sinks - position)
            yield position, 0, count
            position += count
        position = max(position, last - self.turn)  # the ring keeps the last turn of a longer write
        while position < last:
            slot = self.slot(row, position)
            count = min(last - position, self.most_slots - slot)
            yield slot, position - row.offset, count
            position += count

    def positions_seen(self, row: Row) -> list[int]:
        first = max(self.sinks, row.offset - (self.window - self.sinks) + 1)
        return [*range(min(self.sinks, row.offset)), *range(first, row.offset)]

    def most_trim(self, row: Row) -> int:
        """Back to offset L is lossless iff high - L <= R - W + 1, or as long as nothing was ever overwritten."""
        if row.high <= self.most_slots:
            return row.offset
        return row.offset - max(0, row.high - self.max_write)


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
            raise ValueError(
                f"cannot trim {count} tokens: {where} is a ring that has overwritten what would be seen again; "
                f"trim by 0 to {most}, or plan for it with max_write={layout.max_write + count - most}"
            )
    return tuple(row.trimmed(count) for row, count in zip(rows, counts, strict=True))
