"""Which slot holds which position.

A layout determines which slots an update writes, which slots attention reads, and what a trim can undo. Integers only.
A *row* is one sequence of the batch. Rows of different lengths, as after a trim of one row alone, are *ragged*.

Append: slot = start + position; a row owns the slots [start, end), and every slot from `end` on is dead until written.
Budget: as Append, until a compaction evicts tokens and lowers start by their number.
Ring: a slot is overwritten by the token `turn` positions later.
Room: the longest write that currently has slots, in rings and budgets: more while a prompt is read than in decoding.
Chunks: a ring for chunked attention, where a token sees only its own chunk of the text; read in order of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self

from mlx_kv.settings import SettingError, integer_fields


class Row(NamedTuple):
    """Where one sequence stands.

    The integers add up: of the `offset` tokens read, an average head has `shared` in segments and `end - extra_slots`
    in its slots; the others are `evicted`. So offset = shared + (end - extra_slots) + evicted. The longest head of the
    layer, which the buffers are as long as, has a token in each of the `end` slots. For example, after 100 tokens of
    which the first 10 are in a segment, two heads that hold 30 and 50 in their slots: end = 50, so start = -50;
    extra_slots = 50 - 40 = 10; evicted = 100 - 10 - 40 = 50.

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
        images: of each image in which positions and tokens do not count alike, its first token, the one behind its
            last, and positions minus tokens from there on, one after the other.
    """

    start: int = 0
    offset: int = 0
    high: int = 0
    front: int = 0
    extra_slots: int = 0
    shared: int = 0
    images: tuple[int, ...] = ()

    @property
    def numbers(self) -> list[int]:
        """All of it, one after the other."""
        return [self.start, self.offset, self.high, self.front, self.extra_slots, self.shared, *self.images]

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
PLACES = 1 << 31  # ids from here up are places of images (`mlxlm.vision`), not tokens of a vocabulary


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
        if count and count > (most := layout.max_trim(row)):
            why, fix = layout.refusal(count, most)
            raise ValueError(f"cannot trim {count} tokens: {where} {why}; trim by 0 to {most}, or {fix}")
    return tuple(trimmed(layout, row, count) for row, count in zip(rows, counts, strict=True))


def trimmed(layout: Layout, row: Row, count: int) -> Row:
    """A row without its last `count` tokens."""
    offset = row.offset - count
    row = row._replace(offset=offset, front=min(row.front, layout.first_seen(offset)))
    while row.images and row.images[-2] > offset:
        row = row._replace(images=row.images[:-3])
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
    """The same layout with another room; equal arguments give the same object."""
    return replace(layout, room=room)


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
    if new.max_slots == NO_LIMIT:
        return rows
    return tuple([row._replace(high=max(row.offset, row.high + more)) for row in rows])


def stay(old: Layout, new: Layout, rows: tuple[Row, ...]) -> bool:
    """Whether all tokens have the same slots in both rooms."""
    return max([row.end for row in rows]) <= min(old.max_slots, new.max_slots)


def moves_between(old: Layout, new: Layout, row: Row) -> list[tuple[int, int, int]]:
    """How a row's tokens move between two rooms: (slot, new slot, slots) of each contiguous piece."""
    sinks, fewer = old.sinks, min(old.max_slots, new.max_slots)
    if row.end <= fewer:
        return [(0, 0, row.end)] if row.end > 0 else []
    moves = [(0, 0, sinks)] if sinks else []
    position = max(sinks, row.offset - fewer + sinks)
    while position < row.offset:
        source, target = old.slot(row, position), new.slot(row, position)
        count = min(row.offset - position, old.max_slots - source, new.max_slots - target)
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


# --- slots in the order of arrival ------------------------------------------------------------------------------------


class InOrder:
    """slot = start + position, of all new tokens: the arithmetic that `Append` and `Budget` share. Abstract."""

    __slots__ = ()
    window: ClassVar[None] = None
    chunk_size: ClassVar[None] = None
    max_slots: ClassVar[int] = NO_LIMIT

    def first_seen(self, position: int) -> int:
        return 0

    def front(self, row: Row, new: int) -> int:
        return 0

    def trimmed_front(self, row: Row) -> int:
        return 0

    def slot(self, row: Row, position: int) -> int:
        return row.start + position

    def ordered_from(self, row: Row) -> int:
        return 0

    def pieces(self, row: Row, new: int) -> Iterator[tuple[int, int, int]]:
        yield row.end, 0, new

    def ranges(self, row: Row, new: int) -> Ranges:
        return ((0, row.end + new),)


@dataclass(frozen=True, slots=True)
class Append(InOrder):
    """Everything is kept."""

    sinks: ClassVar[int] = 0
    max_write: ClassVar[int] = NO_LIMIT
    max_rollback: ClassVar[int] = 0
    room: ClassVar[int] = NO_LIMIT
    enough_slots: ClassVar[int] = NO_LIMIT

    def with_room(self, room: int) -> Self:
        return self

    @property
    def parameters(self) -> tuple[str | int, ...]:
        return ("append",)

    def max_trim(self, row: Row) -> int:
        return row.offset

    def refusal(self, count: int, most: int) -> tuple[str, str]:
        raise AssertionError("every trim of what is held is possible")

    def visible_tokens(self, row: Row) -> int:
        return row.offset

    def compacted_if_due(self, row: Row) -> Row:
        return row


# A budget of tokens: when a compaction is due, how many tokens it leaves, and in which slots. Integers only.
#
# Which tokens are evicted is decided in `cache.eviction`.


KEEP_RECENT = 64


def default_keep_recent(budget: int, residual: int = 0) -> int:
    """At most a quarter of the budget, so that a small one has room for other tokens, but all of a residual."""
    return min(KEEP_RECENT, max(budget // 4, residual))


@dataclass(frozen=True, slots=True)
class Budget(InOrder):
    """A row of more than budget + margin tokens is compacted to exactly the budget before its next write.

    The first `sinks` tokens and the newest `keep_recent` are never evicted. Before slot budget - keep_recent (the cut)
    survivors lie in any order; from there on tokens are in the order of positions, so a trim can go back to the cut.
    Where heads keep different numbers of tokens, the recent block begins at the cut of the longest head (`cut_of`), and
    the slots between a shorter head's own tokens and that cut are dead.

    Args:
        margin: how far the budget may be overshot before a compaction; None is max(64, budget // 16).
        max_write: the longest write to plan for; memory peaks at budget + margin + max_write slots.
        room: the longest write that currently has slots; 0 is max_write.

    Raises:
        ValueError: a number below its least, or a budget that sinks and recent tokens would fill.
    """

    budget: int
    keep_recent: int = KEEP_RECENT
    sinks: int = 4
    margin: int | None = None
    max_write: int = 512
    room: int = 0
    max_rollback: ClassVar[int] = 0  # keep_recent bounds trims

    def __post_init__(self) -> None:
        integer_fields(self, "budget", "keep_recent", "sinks", "margin", "max_write")
        for name, least in (("budget", 1), ("keep_recent", 0), ("sinks", 0), ("margin", 0), ("max_write", 1)):
            value = getattr(self, name)
            if (value is not None or name != "margin") and (type(value) is not int or value < least):
                raise SettingError(f"{{{name}:is}}: give a whole number of tokens from {least} up", **{name: value})
        object.__setattr__(self, "room", check_room(self.room, self.max_write))
        if self.budget <= self.sinks + self.keep_recent:
            raise SettingError(
                "{budget:is}, but {} sinks and {keep_recent:=} are kept: give a budget from {} up, or keep fewer of "
                "them",
                *(self.sinks, self.sinks + self.keep_recent + 1),
                budget=self.budget,
                keep_recent=self.keep_recent,
            )

    @property
    def slack(self) -> int:
        """Tokens above the budget that are allowed: the margin, or its default."""
        return max(64, self.budget // 16) if self.margin is None else self.margin

    @property
    def compaction_limit(self) -> int:
        """Tokens of a row up to which no compaction is due."""
        return self.budget + self.slack

    @property
    def enough_slots(self) -> int:
        return self.compaction_limit + self.room

    def with_room(self, room: int) -> Self:
        return _with_room(self, room)  # type: ignore[no-any-return]

    @property
    def cut(self) -> int:
        """The slot where, after a compaction, the recent block begins."""
        return self.budget - self.keep_recent

    @property
    def parameters(self) -> tuple[str | int, ...]:
        numbers = self.budget, self.keep_recent, self.sinks, self.slack, self.max_write
        return "budget", *numbers, *room_parameters(self)[1:]

    def cut_of(self, row: Row) -> int:
        """The cut of a row, in which one head may hold more than the budget, and others less."""
        return self.cut + row.extra_slots

    def due(self, row: Row) -> bool:
        """Whether a row is to be compacted before its next write."""
        return self.visible_tokens(row) > self.compaction_limit

    def before_due(self, row: Row) -> int:
        """The longest next write that delays no compaction, compared to the same tokens written one by one."""
        return self.compaction_limit + 1 - self.visible_tokens(self.compacted_if_due(row))

    def compacted(self, row: Row, extra_slots: int = 0) -> Row:
        """The row after a compaction to exactly the budget.

        Args:
            extra_slots: `Row.extra_slots` after the compaction.
        """
        return row._replace(start=self.budget + extra_slots - row.offset, extra_slots=extra_slots, shared=0)

    def compacted_if_due(self, row: Row) -> Row:
        return self.compacted(row) if self.due(row) else row

    def ordered_from(self, row: Row) -> int:
        """The position at the cut, before which survivors lie in any order; 0 as long as nothing was evicted."""
        return 0 if row.evicted <= 0 else self.cut_of(row) - row.start

    def max_trim(self, row: Row) -> int:
        """All, as long as nothing was evicted; then back to the cut."""
        return row.offset - self.ordered_from(row)

    def refusal(self, count: int, most: int) -> tuple[str, str]:
        more = self.keep_recent + count - most
        return "has evicted tokens from before its recent ones", f"keep more of them with keep_recent={more}"

    def visible_tokens(self, row: Row) -> int:
        """The mean over all heads of all layers, a whole number."""
        return row.end - row.extra_slots + row.shared


# --- slots that are written over --------------------------------------------------------------------------------------

# Slots that are written over and over: a ring for a sliding window.
#
# The first `sinks` positions have slots of their own, and after them slot = sinks + (position - sinks) mod turn, in R
# = window + room - 1 slots all in all, with room for the longest write of now. A slot holds the largest position
# below the row's offset that maps to it; the mask decides from that position alone, so a ring is never unrolled.
# Integers only.


# Reading two ranges as one takes a copy: each slot is read, written and read again. Up to so many times the slots that
# are seen, it costs less to read the dead ones between them, too (measured on a CPU: from 2.2).
MAX_DEAD = 2


class WrittenOver:
    """Sinks, and after them `turn` slots that are written over and over: the arithmetic that `Ring` and `Chunks` share.

    Abstract: a subclass defines which positions a query sees, and from that the number of slots.
    """

    __slots__ = ()
    max_write: int
    max_rollback: int
    room: int
    sinks: int

    @property
    def max_slots(self) -> int:
        raise NotImplementedError

    def front(self, row: Row, new: int) -> int:
        raise NotImplementedError

    @property
    def enough_slots(self) -> int:
        return self.max_slots

    def with_room(self, room: int) -> Self:
        return _with_room(self, room)  # type: ignore[no-any-return]

    def compacted_if_due(self, row: Row) -> Row:
        return row

    def ordered_from(self, row: Row) -> int:
        return 0

    def refusal(self, count: int, most: int) -> tuple[str, str]:
        more = self.room + count - most
        return "is a ring that has overwritten what would be seen again", f"plan for it with max_rollback={more}"

    @property
    def turn(self) -> int:
        """Slots of the ring proper, without those of the sinks."""
        return self.max_slots - self.sinks

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
            count = min(last - position, self.max_slots - slot)
            yield slot, position - row.offset, count
            position += count

    def _in_order(self, row: Row, new: int) -> Ranges:
        """The slots of the positions from the front to the last new token."""
        first, last = self.slot(row, self.front(row, new)), self.slot(row, row.offset + new - 1) + 1
        return ((first, last),) if first < last else ((first, self.max_slots), (self.sinks, last))


@dataclass(frozen=True, slots=True)
class Ring(WrittenOver):
    """The first `sinks` tokens and the newest window - sinks, in window + room - 1 slots.

    Raises:
        ValueError: a window or max_write below 1, a room that is not planned for, or sinks that fill the window.
    """

    window: int
    max_write: int
    sinks: int = 0
    max_rollback: int = 0
    room: int = 0
    chunk_size: ClassVar[None] = None

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("max_write", self.max_write)):
            if value < 1:
                raise SettingError(f"{{{name}:is}}: give a number of tokens from 1 up", **{name: value})
        object.__setattr__(self, "room", check_room(self.room, self.max_write, self.max_rollback))
        if not 0 <= self.sinks < self.window:
            raise SettingError(
                "{sinks:is}: a window of {} tokens has room for 0 to {}",
                *(self.window, self.window - 1),
                sinks=self.sinks,
            )

    @property
    def max_slots(self) -> int:
        return self.window + self.room - 1

    def first_seen(self, position: int) -> int:
        return max(0, position - (self.window - self.sinks) + 1)

    def front(self, row: Row, new: int) -> int:
        return self.first_seen(row.offset)

    def trimmed_front(self, row: Row) -> int:
        return row.front

    @property
    def parameters(self) -> tuple[str | int, ...]:
        return "ring", self.window, self.max_write, self.sinks, *room_parameters(self)

    def ranges(self, row: Row, new: int) -> Ranges:
        """One range wherever that is cheaper: the mask goes by positions, whatever their order."""
        end, most = row.offset + new, self.max_slots
        everything = ((0, min(end, most)),)
        if end <= self.window or most == self.window or self.front(row, new) <= self.sinks:
            return everything
        ranges = self._in_order(row, new)
        if self.sinks:  # they lie before slot `sinks`, where the second range begins if there is one
            ranges = ((0, ranges[1][1]), ranges[0]) if len(ranges) == 2 else ((0, self.sinks), *ranges)
        if len(ranges) == 1:
            return ranges
        return everything if everything[0][1] <= MAX_DEAD * count_slots(ranges) else ranges

    def visible_tokens(self, row: Row) -> int:
        return min(row.offset, self.window)

    def max_trim(self, row: Row) -> int:
        """A trim to offset L is lossless iff high - L <= room, or as long as nothing was ever overwritten."""
        if row.high <= self.max_slots:
            return row.offset
        return row.offset - max(0, row.high - self.room)


@dataclass(frozen=True, slots=True)
class Chunks(WrittenOver):
    """A query sees its own chunk: positions of the same p // chunk_size. chunk_size + room slots.

    Attention reads from the front on in the order of positions, because such models make the mask themselves. The front
    moves when the model calls `maybe_trim_front`, or when a write needs slots: the last chunk_size tokens then stay.

    Raises:
        ValueError: a chunk_size or max_write below 1, or a room that is not planned for.
    """

    chunk_size: int
    max_write: int
    max_rollback: int = 0
    room: int = 0
    window: ClassVar[None] = None
    sinks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name, value in (("chunk_size", self.chunk_size), ("max_write", self.max_write)):
            if value < 1:
                raise SettingError(f"{{{name}:is}}: give a number of tokens from 1 up", **{name: value})
        object.__setattr__(self, "room", check_room(self.room, self.max_write, self.max_rollback))

    @property
    def max_slots(self) -> int:
        return self.chunk_size + self.room

    def first_seen(self, position: int) -> int:
        return position - position % self.chunk_size

    def front(self, row: Row, new: int) -> int:
        return row.front if row.offset + new - row.front <= self.max_slots else self.trimmed_front(row)

    def trimmed_front(self, row: Row) -> int:
        """The front when only the last chunk_size tokens are to stay."""
        return max(row.front, row.offset - self.chunk_size)

    @property
    def parameters(self) -> tuple[str | int, ...]:
        return "chunks", self.chunk_size, self.max_write, *room_parameters(self)

    def ranges(self, row: Row, new: int) -> Ranges:
        return self._in_order(row, new)

    def visible_tokens(self, row: Row) -> int:
        return row.offset - row.front

    def max_trim(self, row: Row) -> int:
        """A trim to offset L is lossless if its chunk was not overwritten: high - max_slots <= L - L % chunk_size.

        Longer trims would be lossless only to the border of two chunks. They are refused, so that every trim shorter
        than an allowed one is allowed.
        """
        overwritten = max(0, row.high - self.max_slots)
        return row.offset + (-overwritten // self.chunk_size) * self.chunk_size


# A rule for slots, which never changes. All numbers are slots or positions of one row.
#
#   window: tokens that a query sees, itself and the sinks included; None is all
#   chunk_size: a query sees only tokens of its own chunk of so many positions; None is no chunks
#   max_write: the longest write to plan for: a longer one needs a transient view, or more slots than are enough
#   max_rollback: tokens that can be trimmed at any time; room is never smaller
#   room: the longest write that currently has slots, at most max_write
#   with_room(room): the same layout with slots for writes of so many tokens
#   max_slots: the largest number of slots in use; `NO_LIMIT` where slots are not overwritten
#   enough_slots: slots that suffice as long as no write is longer than there is room for
#   first_seen(position): the first position, sinks aside, that a query at `position` sees
#   front(row, new): the first position, sinks aside, that attention reads with a write of `new` tokens
#   trimmed_front(row): the front after a model has dropped the tokens that it will not see again (`maybe_trim_front`)
#   parameters: a name and numbers from which `make_layout` makes it again
#   slot(row, position): the slot of a position
#   pieces(row, new): how new tokens are written: (first slot, first token, tokens) of each contiguous piece, late
#       ones last
#   ranges(row, new): the slots [first, last) that attention reads after a write of `new` tokens, one range after the
#       other
#   ordered_from(row): the lowest position from which on every token lies in the slot that `slot` returns
#   max_trim(row): tokens that can be taken back without losing one that must stay visible
#   refusal(count, most): why `most` tokens can be taken back and `count` cannot, and what to do about it
#   visible_tokens(row): tokens of a row that the next query may see, without those of its own write
#   compacted_if_due(row): the row after the compaction before its next write, with `extra_slots` 0; the same object
#       if none is due
Layout = Append | Budget | Ring | Chunks
LAYOUTS: dict[str, Callable[..., Layout]] = {"append": Append, "budget": Budget, "ring": Ring, "chunks": Chunks}


def make_layout(name: str, *numbers: int) -> Layout:
    """The layout of these `parameters`.

    Raises:
        ValueError: no layout has this name.
    """
    if name not in LAYOUTS:
        raise ValueError(f"{name!r} is not a layout: there are {', '.join(LAYOUTS)}")
    return LAYOUTS[name](*numbers)
