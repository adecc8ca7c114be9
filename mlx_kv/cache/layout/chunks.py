"""A ring of slots for chunked attention, where a query sees only its own chunk of the text. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mlx_kv.cache.layout.base import Ranges, Row, check_room, room_parameters
from mlx_kv.cache.layout.ring import WrittenOver
from mlx_kv.settings import SettingError


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
    def most_slots(self) -> int:
        return self.chunk_size + self.room

    def first_seen(self, position: int) -> int:
        return position - position % self.chunk_size

    def front(self, row: Row, new: int) -> int:
        return row.front if row.offset + new - row.front <= self.most_slots else self.trimmed_front(row)

    def trimmed_front(self, row: Row) -> int:
        """The front when only the last chunk_size tokens are to stay."""
        return max(row.front, row.offset - self.chunk_size)

    @property
    def parameters(self) -> tuple[str | int, ...]:
        return "chunks", self.chunk_size, self.max_write, *room_parameters(self)

    def ranges(self, row: Row, new: int) -> Ranges:
        return self._in_order(row, new)

    def held(self, row: Row) -> int:
        return row.offset - row.front

    def most_trim(self, row: Row) -> int:
        """A trim to offset L is lossless if its chunk was not overwritten: high - most_slots <= L - L % chunk_size.

        Longer trims would be lossless only to the border of two chunks. They are refused, so that every trim shorter
        than an allowed one is allowed.
        """
        overwritten = max(0, row.high - self.most_slots)
        return row.offset + (-overwritten // self.chunk_size) * self.chunk_size
