"""Which slot holds which position.

Decides where the tokens of an update go, which slots attention reads, and what a trim can undo. Integers only: knows
nothing about arrays, so it is tested in microseconds. A *row* is one sequence of the batch. Rows need not line up:
after a trim of one row alone, they are *ragged*.

Append: slot = start + position; a row owns the slots [start, end), and every slot from `end` on is dead until written.
Ring: the first `sinks` positions have slots of their own, and after them slot = sinks + (position - sinks) mod turn, in
R = window + max_write - 1 slots all in all. A slot holds the largest position below the row's offset that maps to it;
the mask decides from that position alone, so a ring is never unrolled.
Chunks: the same ring for models whose tokens see their own chunk of the text; attention reads it in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol


class Row(NamedTuple):
    """Where one sequence stands.

    Attributes:
        start: the slot of position 0; only a layout without a ring has another than 0.
        offset: the next position.
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


class Plan:
    """One update in integers. The mask, the write and the read are all made from it, so they cannot disagree.

    Every layer makes one for every token, so what is asked more than once is worked out once.

    Attributes:
        layout: which slot holds which position.
        rows: where each row stands before the update.
        new: the number of new tokens of every row (S).
        held: one past the last slot of the longest row before the update, as if nothing ever wrapped.
        needed: slots that must exist: [0, needed).
        ranges: the slots [first, last) that attention reads, one range after the other, unless the plan is transient.
        uniform: whether all rows stand alike, so that one slice write does it and one mask row serves all.
        ordered: whether slots are in the order of positions: nothing wraps, before or with this update.
        transient: whether the write would overwrite what its own first query needs. Attention then reads the live
            tokens in order and after them the new ones, and the ring keeps the last of both.
    """

    __slots__ = ("held", "layout", "needed", "new", "ordered", "ranges", "rows", "transient", "uniform")

    def __init__(self, layout: Layout, rows: tuple[Row, ...], new: int) -> None:
        self.layout, self.rows, self.new = layout, rows, new
        self.held = rows[0].end if len(rows) == 1 else max([row.end for row in rows])
        self.uniform = len(rows) == 1 or len({(row.start, row.offset, row.front) for row in rows}) == 1
        self.ordered = self.held + new <= layout.most_slots
        self.needed = self.held + new if self.ordered else layout.most_slots
        self.transient = not self.ordered and new > layout.max_write
        self.ranges = layout.ranges(rows[0], new) if self.uniform and not self.transient else ((0, self.needed),)

    @property
    def after(self) -> tuple[Row, ...]:
        """Where each row stands after the update."""
        new, front = self.new, self.layout.front
        return tuple(
            [Row(row.start, row.offset + new, max(row.high, row.offset + new), front(row, new)) for row in self.rows]
        )

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
            [*range(min(sinks, row.offset)), *range(max(sinks, self.layout.front(row, self.new)), row.offset)]
            for row in self.distinct
        ]
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
    def chunk_size(self) -> int | None:
        """A query sees only tokens of its own chunk of so many positions; None is no chunks."""
        ...

    @property
    def max_write(self) -> int:
        """The longest write that never needs a transient view."""
        ...

    @property
    def most_slots(self) -> int:
        """Slots that are ever used."""
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


NO_LIMIT = 1 << 62
# Reading two ranges as one takes a copy: each slot is read, written and read again. Up to so many times the slots that
# are seen, it costs less to read the dead ones between them, too (measured on a CPU: from 2.2).
MOST_DEAD = 2


@dataclass(frozen=True, slots=True)
class Append:
    """slot = start + position: everything is kept."""

    window: ClassVar[None] = None
    sinks: ClassVar[int] = 0
    chunk_size: ClassVar[None] = None
    max_write: ClassVar[int] = NO_LIMIT
    most_slots: ClassVar[int] = NO_LIMIT

    def first_seen(self, position: int) -> int:
        return 0

    def front(self, row: Row, new: int) -> int:
        return 0

    def trimmed_front(self, row: Row) -> int:
        return 0

    @property
    def parameters(self) -> tuple[str | int, ...]:
        return ("append",)

    def slot(self, row: Row, position: int) -> int:
        return row.start + position

    def pieces(self, row: Row, new: int) -> Iterator[tuple[int, int, int]]:
        yield row.end, 0, new

    def ranges(self, row: Row, new: int) -> Ranges:
        return ((0, row.end + new),)

    def most_trim(self, row: Row) -> int:
        return row.offset


class Turning:
    """Sinks, and after them `turn` slots that are written over and over: the arithmetic that `Ring` and `Chunks` share.

    Abstract: a layout says what is seen, and with that how many slots there must be.
    """

    __slots__ = ()
    max_write: int

    sinks: int

    @property
    def most_slots(self) -> int:
        raise NotImplementedError

    def front(self, row: Row, new: int) -> int:
        raise NotImplementedError

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

    def _in_order(self, row: Row, new: int) -> Ranges:
        """The slots of the positions from the front to the last new token."""
        first, last = self.slot(row, self.front(row, new)), self.slot(row, row.offset + new - 1) + 1
        return ((first, last),) if first < last else ((first, self.most_slots), (self.sinks, last))


@dataclass(frozen=True, slots=True)
class Ring(Turning):
    """The last `window` tokens of which the first `sinks` are the first of all, in window + max_write - 1 slots.

    Raises:
        ValueError: a window or max_write below 1, or sinks that fill the window.
    """

    window: int
    max_write: int
    sinks: int = 0
    chunk_size: ClassVar[None] = None

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("max_write", self.max_write)):
            if value < 1:
                raise ValueError(f"{name} is {value}: give a number of tokens from 1 up")
        if not 0 <= self.sinks < self.window:
            raise ValueError(
                f"sinks is {self.sinks}: a window of {self.window} tokens has room for 0 to {self.window - 1}"
            )

    @property
    def most_slots(self) -> int:
        return self.window + self.max_write - 1

    def first_seen(self, position: int) -> int:
        return max(0, position - (self.window - self.sinks) + 1)

    def front(self, row: Row, new: int) -> int:
        return self.first_seen(row.offset)

    def trimmed_front(self, row: Row) -> int:
        return row.front

    @property
    def parameters(self) -> tuple[str | int, ...]:
        return "ring", self.window, self.max_write, self.sinks

    def ranges(self, row: Row, new: int) -> Ranges:
        """One range wherever that is cheaper: the mask goes by positions, whatever their order."""
        end = row.offset + new
        everything = ((0, min(end, self.most_slots)),)
        if end <= self.window or self.front(row, new) <= self.sinks:
            return everything
        ranges = self._in_order(row, new)
        if self.sinks:  # they lie before slot `sinks`, where the second range begins if there is one
            ranges = ((0, ranges[1][1]), ranges[0]) if len(ranges) == 2 else ((0, self.sinks), *ranges)
        if len(ranges) == 1:
            return ranges
        return everything if everything[0][1] <= MOST_DEAD * count_slots(ranges) else ranges

    def most_trim(self, row: Row) -> int:
        """Back to offset L is lossless iff high - L <= R - W + 1, or as long as nothing was ever overwritten."""
        if row.high <= self.most_slots:
            return row.offset
        return row.offset - max(0, row.high - self.max_write)


@dataclass(frozen=True, slots=True)
class Chunks(Turning):
    """A query sees its own chunk: positions of the same p // chunk_size. chunk_size + max_write slots.

    Attention reads in the order of positions, from the front on, as models want it that make the mask themselves. The
    front moves when the model says so, at the latest when room is needed; then the last chunk_size tokens stay.

    Raises:
        ValueError: a chunk_size or max_write below 1.
    """

    chunk_size: int
    max_write: int
    window: ClassVar[None] = None
    sinks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name, value in (("chunk_size", self.chunk_size), ("max_write", self.max_write)):
            if value < 1:
                raise ValueError(f"{name} is {value}: give a number of tokens from 1 up")

    @property
    def most_slots(self) -> int:
        return self.chunk_size + self.max_write

    def first_seen(self, position: int) -> int:
        return position - position % self.chunk_size

    def front(self, row: Row, new: int) -> int:
        return row.front if row.offset + new - row.front <= self.most_slots else self.trimmed_front(row)

    def trimmed_front(self, row: Row) -> int:
        """The front when only the last chunk_size tokens are to stay."""
        return max(row.front, row.offset - self.chunk_size)

    @property
    def parameters(self) -> tuple[str | int, ...]:
        return "chunks", self.chunk_size, self.max_write

    def ranges(self, row: Row, new: int) -> Ranges:
        return self._in_order(row, new)

    def most_trim(self, row: Row) -> int:
        """Back to offset L is lossless if the chunk that L is in was not overwritten: high - R <= L - L % chunk_size.

        Further back, only offsets between two chunks would be: those are not offered, so that less is never refused.
        """
        overwritten = max(0, row.high - self.most_slots)
        return row.offset + (-overwritten // self.chunk_size) * self.chunk_size


def make_layout(name: str, *numbers: int) -> Layout:
    """The layout of these `parameters`.

    Raises:
        ValueError: no layout has this name.
    """
    match name:
        case "append":
            return Append()
        case "ring":
            return Ring(*numbers)
        case "chunks":
            return Chunks(*numbers)
    raise ValueError(f"{name!r} is no layout: there are append, ring and chunks")


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
            raise ValueError(
                f"cannot trim {count} tokens: {where} is a ring that has overwritten what would be seen again; "
                f"trim by 0 to {most}, or plan for it with max_write={layout.max_write + count - most}"
            )
    return tuple(trimmed(layout, row, count) for row, count in zip(rows, counts, strict=True))


def trimmed(layout: Layout, row: Row, count: int) -> Row:
    """A row without its last `count` tokens."""
    offset = row.offset - count
    return Row(row.start, offset, row.high, min(row.front, layout.first_seen(offset)))
