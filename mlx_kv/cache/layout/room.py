"""Room for writes: how much of it a layout has, and what changes when it gets another.

Rings and budgets need slots for the longest write that comes beside those of what they keep. Decides nothing about when
a layout gets another room. Integers only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from mlx_kv.cache.layout.base import NO_LIMIT, Layout, Row

L = TypeVar("L")


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


def stay(old: Layout, new: Layout, rows: tuple[Row, ...]) -> bool:
    """Whether all tokens have the same slots in both rooms."""
    return max([row.end for row in rows]) <= min(old.most_slots, new.most_slots)


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
