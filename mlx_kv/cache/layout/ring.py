"""Slots that are written over and over: a ring for a sliding window.

The first `sinks` positions have slots of their own, and after them slot = sinks + (position - sinks) mod turn, in
R = window + room - 1 slots all in all, with room for the longest write of now. A slot holds the largest position below
the row's offset that maps to it; the mask decides from that position alone, so a ring is never unrolled. Integers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from mlx_kv.cache.layout.base import Ranges, Row, check_room, count_slots, room_parameters, with_room
from mlx_kv.settings import SettingError

# Reading two ranges as one takes a copy: each slot is read, written and read again. Up to so many times the slots that
# are seen, it costs less to read the dead ones between them, too (measured on a CPU: from 2.2).
MOST_DEAD = 2


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
    def most_slots(self) -> int:
        raise NotImplementedError

    def front(self, row: Row, new: int) -> int:
        raise NotImplementedError

    @property
    def enough_slots(self) -> int:
        return self.most_slots

    def with_room(self, room: int) -> Self:
        return with_room(self, room)

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
    def most_slots(self) -> int:
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
        end, most = row.offset + new, self.most_slots
        everything = ((0, min(end, most)),)
        if end <= self.window or most == self.window or self.front(row, new) <= self.sinks:
            return everything
        ranges = self._in_order(row, new)
        if self.sinks:  # they lie before slot `sinks`, where the second range begins if there is one
            ranges = ((0, ranges[1][1]), ranges[0]) if len(ranges) == 2 else ((0, self.sinks), *ranges)
        if len(ranges) == 1:
            return ranges
        return everything if everything[0][1] <= MOST_DEAD * count_slots(ranges) else ranges

    def held(self, row: Row) -> int:
        return min(row.offset, self.window)

    def most_trim(self, row: Row) -> int:
        """A trim to offset L is lossless iff high - L <= room, or as long as nothing was ever overwritten."""
        if row.high <= self.most_slots:
            return row.offset
        return row.offset - max(0, row.high - self.room)
