"""The plan of one update: which slots are written, which are read, and where rows stand after it. Integers only."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from mlx_kv.cache.growth import SLOT_MULTIPLE, TAIL_MULTIPLE, round_up
from mlx_kv.cache.layout import NO_LIMIT, Layout, Row

AHEAD = 8  # steps of decoding that are planned in one go

Index = tuple[slice, slice, slice]
# Of slots that are read, where some are hidden anyway: the least, and log2 of the parts of a power of two.
READ_MULTIPLES = {mx.DeviceType.cpu: (16, 5), mx.DeviceType.gpu: (64, 3)}


def round_read(slots: int) -> int:
    """Slots that attention reads where it needs so many: few numbers, as devices prepare themselves for each shape.

    A GPU reads 64, 128, ..., 512, 640, ..., 1,024, 1,280, ...: at most a quarter more from 256 on.
    """
    least, part = READ_MULTIPLES[mx.default_device().type]
    return round_up(slots, min(SLOT_MULTIPLE, max(least, 1 << max(0, slots.bit_length() - part))))


def round_tail(slots: int) -> int:
    """The capacity of a tail behind shared first tokens: all that attention may read."""
    return round_up(round_read(slots), TAIL_MULTIPLE)


def _slots(first: int, count: int) -> Index:
    return slice(None), slice(None), slice(first, first + count)


class Plan:
    """One update in integers. The mask, the write and the read are all made from it, so they cannot disagree.

    Every layer needs one for every token, so plans are cached: layers with equal rows get the same object (`plan_of`).

    Attributes:
        layout: which slot holds which position.
        rows: where each row stands before the update.
        new: the number of new tokens of every row (S).
        counts: how many of them are tokens of the row; padding follows. Positions below 0 are padding, too.
        padded: whether any row has padding, which is never stored, nor seen by a token.
        filled: one past the last slot of the longest row before the update, as if nothing ever wrapped.
        needed: slots that must exist: [0, needed).
        ranges: the slots [first, last) that attention reads, one range after the other, unless the plan is transient.
        alike: whether all rows are equal but for `high`, and have as many new tokens.
        uniform: whether they are, without padding: one slice write and one mask row serve all.
        ordered: whether nothing wraps, before or with this update.
        steady: whether the fast path may use this plan: no padding, no compaction due before it, not transient.
        bounded: whether the room for writes is limited.
        written, read: the slots of the new tokens, and of what attention reads, as an index of (B, H, C, D) each; None
            where they are not one range.
        after: where each row stands after the update.
        transient: whether the write would overwrite what its own first query needs. Attention then reads the live
            tokens in order and after them the new ones, and the ring keeps the last of both.
    """

    __slots__ = (
        "_next",
        "after",
        "alike",
        "bounded",
        "counts",
        "filled",
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
        self._next: Plan | None = None
        first, alone, most = rows[0], len(rows) == 1, layout.max_slots
        self.padded = counts is not None or (first.offset if alone else min([row.offset for row in rows])) < 0
        self.counts = (new,) * len(rows) if counts is None else counts
        self.filled = first.end if alone else max([row.end for row in rows])
        self.alike = alone or (
            len({(row.start, row.offset, row.front, row.extra_slots, row.shared) for row in rows}) == 1
            and len(set(self.counts)) == 1
        )
        self.uniform = self.alike and not self.padded
        end = self.filled + new
        if self.padded:
            end = max([0, *(row.end + count for row, count in zip(rows, self.counts, strict=True))])
        self.ordered = end <= most
        self.needed = end if self.ordered else most
        self.transient = not self.ordered and new > layout.room
        if self.uniform and not self.transient:
            self.ranges = layout.ranges(first, new)
        else:
            # There is a mask anyway: reads a few slots more, never slots that do not exist. (A batch may begin with
            # nothing but padding, which must see something.)
            self.ranges = ((0, min(round_read(max(self.needed, 1)), most)),)
        self.bounded = layout.room != NO_LIMIT
        due = [row for row in self.distinct if layout.compacted_if_due(row) is not row]
        self.steady = not (self.padded or self.transient or due)
        self.after = tuple(
            [
                row._replace(offset=row.offset + n, high=max(row.high, row.offset + n), front=layout.front(row, n))
                for row, n in zip(rows, self.counts, strict=True)
            ]
        )
        self.written: Index | None = None
        self.read: Index | None = None
        if self.uniform and self.steady:
            pieces = list(layout.pieces(first, new))
            if len(pieces) == 1:
                self.written = _slots(pieces[0][0], new)
            if len(self.ranges) == 1:
                begin, end = self.ranges[0]
                self.read = _slots(begin, end - begin)

    def is_padding(self, index: int, token: int) -> bool:
        """Whether a new token of row `index` is padding."""
        return token >= self.counts[index] or self.rows[index].offset + token < 0

    @property
    def next(self) -> Plan:
        """The plan of an equal update after this one, cached: layers that share this plan share the next."""
        plan = self
        if self._next is None:  # a few at once: several times as fast as one by one between other work
            for _ in range(AHEAD if self.steady else 1):
                plan._next = Plan(plan.layout, plan.after, plan.new)
                plan = plan._next
                if not plan.steady:
                    break
        assert self._next is not None
        return self._next

    @property
    def distinct(self) -> tuple[Row, ...]:
        """The rows to compute something for: the first alone where `uniform`, else all."""
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
    """The plan of an update, cached: the layers of a model need equal plans one after the other."""
    return Plan(layout, rows, new, counts)
