"""Which slot holds which position.

Decides where the tokens of an update go and which slots attention reads. Integers only: knows nothing about arrays, so
it is tested in microseconds. A *row* is one sequence of the batch; it owns the slots [start, end), and every slot from
`end` on is dead until it is written. Rows need not line up: after a trim of one row alone, they are *ragged*.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """Where one sequence lies: its tokens hold positions [0, offset) and slots [start, start + offset)."""

    start: int = 0
    offset: int = 0

    @property
    def end(self) -> int:
        """One past the last live slot, which is where the next token goes."""
        return self.start + self.offset


@dataclass(frozen=True, slots=True)
class Plan:
    """One update in integers. The mask and the write are both made from it, so they cannot disagree.

    Attributes:
        starts: the first live slot of each row; the position in slot s of row i is `s - starts[i]`.
        ends: the slot of each row's first new token.
        new: the number of new tokens of every row (S).
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    new: int

    @property
    def needed(self) -> int:
        """Slots that must exist, and that attention reads: [0, needed)."""
        return max(self.ends) + self.new

    @property
    def uniform(self) -> bool:
        """Whether all rows lie alike, so that one slice write does it and one mask row serves all."""
        return len(set(self.starts)) == 1 and len(set(self.ends)) == 1


def plan_append(rows: tuple[Row, ...], new: int) -> Plan:
    """The append layout: slot = start + position, new tokens go right after the old ones of their row."""
    return Plan(tuple(row.start for row in rows), tuple(row.end for row in rows), new)


def trim_rows(rows: tuple[Row, ...], counts: tuple[int, ...]) -> tuple[Row, ...]:
    """The rows without their last `counts[i]` tokens; nothing moves.

    Raises:
        ValueError: one count for each row is wanted, none negative, none more than its row holds.
    """
    if len(counts) != len(rows):
        raise ValueError(f"got {len(counts)} counts to trim by, but this cache has {len(rows)} rows: give one for each")
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if not 0 <= count <= row.offset:
            where = "this cache" if len(rows) == 1 else f"row {index}"
            raise ValueError(f"cannot trim {count} tokens: {where} holds {row.offset}; trim by 0 to {row.offset}")
    return tuple(Row(row.start, row.offset - count) for row, count in zip(rows, counts, strict=True))
