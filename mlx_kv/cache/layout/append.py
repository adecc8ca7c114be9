"""Slots in the order of arrival, and all are kept. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from mlx_kv.cache.layout.base import NO_LIMIT, Ranges, Row


class InOrder:
    """slot = start + position, of all new tokens: the arithmetic that `Append` and `Budget` share. Abstract."""

    __slots__ = ()
    window: ClassVar[None] = None
    chunk_size: ClassVar[None] = None
    most_slots: ClassVar[int] = NO_LIMIT

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

    def most_trim(self, row: Row) -> int:
        return row.offset

    def refusal(self, count: int, most: int) -> tuple[str, str]:
        raise AssertionError("every trim of what is held is possible")

    def held(self, row: Row) -> int:
        return row.offset

    def compacted_if_due(self, row: Row) -> Row:
        return row
