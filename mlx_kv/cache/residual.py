"""The residual: the newest tokens of each row in full precision, beside the quantised codes of all tokens.

Quantisation harms most the tokens that are attended to most, the newest ones; KIVI (Liu et al. 2024) and transformers'
`residual_length` keep these in full precision. Here a query at position q sees keys and values at positions
p > q - length in full precision and older ones as they are stored. Each token of a write has its own boundary, so
neither chunks nor drafts change the result.

A ring of `length + ROOM` slots holds them, slot = position mod slots.
B rows, H KV heads, S new tokens, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from threading import get_ident
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_kv.cache.buffers import Buffers, SlotBuffer, signature_of
from mlx_kv.cache.codecs import PLAIN
from mlx_kv.cache.layout import NO_LIMIT, Ring, Row
from mlx_kv.cache.plan import Plan, plan_of
from mlx_kv.settings import SettingError

ROOM = 64  # tokens that can be trimmed at any time, and that a write may have without a copy
NOWHERE = -1  # the position of padding


class Places:
    """Positions and slots of the tokens of a residual that attention reads after a write; computed lazily.

    Layers with the same plan share one, and its mask.

    Args:
        plan: of the write.
        length: tokens that a query sees in full precision.
        slots: of the ring.
        long: whether attention reads the ring from before the write, followed by the new tokens.
    """

    def __init__(self, plan: Plan, length: int, slots: int, long: bool) -> None:
        self.plan, self.length, self._slots, self._long = plan, length, slots, long
        self._mask: tuple[object, int, mx.array] | None = None

    @cached_property
    def positions(self) -> np.ndarray:
        """Positions of the m tokens of each row, (B or 1, m) of int; below 0 is an empty slot."""
        plan, slots = self.plan, self._slots
        rows = plan.distinct
        if not self._long:
            return _positions(slots, [row.offset for row in plan.after[: len(rows)]])
        stored = _positions(slots, [row.offset for row in rows])
        new = [
            [NOWHERE if plan.is_padding(i, token) else row.offset + token for token in range(plan.new)]
            for i, row in enumerate(rows)
        ]
        return np.concatenate([stored, np.array(new)], axis=1)

    @cached_property
    def columns(self) -> np.ndarray:
        """Index of each token among the slots that attention reads, (B or 1, m); 0 for empty slots."""
        plan = self.plan
        if plan.transient:
            columns_by_position = [
                {p: column for column, p in enumerate([*seen, *range(row.offset, row.offset + plan.new)])}
                for row, seen in zip(plan.distinct, plan.live(), strict=True)
            ]
            pairs = zip(columns_by_position, self.positions, strict=True)
            return np.array([[columns.get(int(p), 0) for p in line] for columns, line in pairs])
        layout, columns, before = plan.layout, np.zeros_like(self.positions), 0
        if layout.max_slots == NO_LIMIT:
            slots = self.positions + np.array([[row.start] for row in plan.distinct])
        else:
            turn = layout.max_slots - layout.sinks
            around = layout.sinks + (self.positions - layout.sinks) % turn
            slots = np.where(self.positions < layout.sinks, self.positions, around)
        for first, last in plan.ranges:
            inside = (self.positions >= 0) & (slots >= first) & (slots < last)
            columns = np.where(inside, before + slots - first, columns)
            before += last - first
        return columns

    def mask(self, asked: object, made: Callable[[], mx.array]) -> mx.array:
        """The result of `made`, computed once for all layers that pass the same mask in the same thread."""
        thread = get_ident()  # a graph is evaluated by the thread that made it
        if self._mask is None or self._mask[0] is not asked or self._mask[1] != thread:
            self._mask = asked, thread, made()
        return self._mask[2]


_places = lru_cache(maxsize=8)(Places)


class Residual:
    """The newest tokens of the rows of one layer.

    Args:
        length: tokens that a query sees in full precision, itself included.
        room: tokens that can be trimmed at any time.
        buffers: of keys and of values, `slots` + 1 slots each; None before the first write.
        first: the lowest position held of each row.

    Attributes:
        places: where the tokens are that attention reads after the last write; None before one.
        last: the plan of the last write to the ring, where the next may take the fast path; else None.
    """

    def __init__(
        self, length: int, room: int = ROOM, buffers: Buffers | None = None, first: tuple[int, ...] = (0,)
    ) -> None:
        self.length, self.room, self.buffers, self.first = length, room, buffers, first
        self.places: Places | None = None
        self.last: Plan | None = None
        self._long: tuple[mx.array, mx.array] | None = None  # what attention reads of a write that is longer than room

    @property
    def slots(self) -> int:
        """Slots of the ring; padding is written to one more."""
        return self.length + self.room

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self.buffers is None else sum(buffer.nbytes for buffer in self.buffers)

    @property
    def state(self) -> list[Any]:
        """Everything to continue from."""
        planes = [] if self.buffers is None else [buffer.handles()[0] for buffer in self.buffers]
        return [self.length, self.room, list(self.first), planes]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Residual:
        """A residual that continues from another's `state`."""
        length, room, first, planes = state
        buffers = [SlotBuffer(codec, (x,), x.shape[3], x.dtype) for codec, x in zip(PLAIN, planes, strict=False)]
        return cls(length, room, (buffers[0], buffers[1]) if buffers else None, tuple(first))

    def check_beside(self, max_rollback: int, keep_recent: int | None = None, uneven: bool = False) -> None:
        """Raises ValueError unless it is compatible with the other settings of a cache.

        Args:
            max_rollback: tokens that can be taken back in any case.
            keep_recent: of a budget; None without one. Its other tokens lie in any order.
            uneven: whether heads of a budget keep different numbers of tokens.
        """
        if keep_recent is not None and (self.length > keep_recent or uneven):
            raise SettingError(
                "{residual_length:is}: with a budget give no more than {keep_recent:=}, and another {share} than "
                "'adaptive', or than 'head' with a table of budgets",
                residual_length=self.length,
                keep_recent=keep_recent,
            )
        if max_rollback > self.room:
            raise SettingError(
                "{residual_length:is}: beside it no more than {} tokens can be taken back, but {max_rollback:is}: "
                "draft fewer",
                self.room,
                residual_length=self.length,
                max_rollback=max_rollback,
            )

    def empty(self) -> Residual:
        """An empty residual of the same settings."""
        return Residual(self.length, self.room)

    def copied(self) -> Residual:
        """A copy that shares the memory until one of the two writes."""
        return self._with(None if self.buffers is None else _both(self.buffers, SlotBuffer.copied), self.first)

    def selected(self, chosen: Sequence[int]) -> Residual:
        """Copies of some rows."""
        first = tuple([self.first[index] for index in chosen]) if len(self.first) > 1 else self.first * len(chosen)
        if self.buffers is None:
            return self._with(None, first)
        return self._with(
            _both(self.buffers, lambda buffer: buffer.selected(chosen, self.slots + 1, self.slots + 1)), first
        )

    @classmethod
    def joined(cls, parts: Sequence[tuple[Residual, int]]) -> Residual:
        """The rows of several residuals, one after the other.

        Args:
            parts: residuals and their numbers of rows; all of one length and room.
        """
        like = parts[0][0]
        first = tuple(
            number
            for each, rows in parts
            for number in (each.first if len(each.first) == rows else each.first[:1] * rows)
        )
        if all(each.buffers is None for each, _ in parts):
            return like._with(None, first)

        def stacked(which: int) -> SlotBuffer:
            buffers = [(None if each.buffers is None else each.buffers[which], rows) for each, rows in parts]
            return SlotBuffer.stacked([(buffer, rows, like.slots) for buffer, rows in buffers], like.slots + 1)

        return like._with((stacked(0), stacked(1)), first)

    def _with(self, buffers: Buffers | None, first: tuple[int, ...]) -> Residual:
        return Residual(self.length, self.room, buffers, first)

    def max_trim(self, index: int, offset: int, ordered_from: int) -> int:
        """Tokens that row `index` can drop so that the next query still sees `length` - 1 tokens in full precision.

        Args:
            offset: end of the row.
            ordered_from: the lowest position whose slot follows from it (`Layout.ordered_from`). Masks hide the slots
                of the newest tokens by position, which is only correct from there on.
        """
        first = max(ordered_from, self.first[index] if index < len(self.first) else self.first[0])
        return offset if first <= 0 else max(0, offset - (first + self.length - 1))

    def check_trim(self, counts: Sequence[int], most: Sequence[int]) -> None:
        """Raises ValueError where a row would drop more than it can."""
        for index, (count, can) in enumerate(zip(counts, most, strict=True)):
            if count > can:
                raise SettingError(
                    "cannot trim {} tokens: the {} before them in row {} are no longer all held in full precision; "
                    "trim by 0 to {}, or use a smaller {residual_length}",
                    *(count, self.length - 1, index, can),
                )

    def write(self, tensors: tuple[mx.array, mx.array], plan: Plan) -> None:
        """Writes the new tokens, keys (B, H, S, D) and values (B, H, S, Dv), of a plan."""
        if self.buffers is not None and [signature_of(x) for x in tensors] != [each.signature for each in self.buffers]:
            self.buffers = None  # a new session of another shape, or more rows
        if self.buffers is None:
            keys, values = (
                SlotBuffer.allocate(codec, x, self.slots + 1) for codec, x in zip(PLAIN, tensors, strict=True)
            )
            self.buffers = keys, values
        if len(self.first) != len(plan.rows):
            self.first = self.first[:1] * len(plan.rows)
        rows = tuple([Row(0, row.offset, row.high) for row in plan.rows])
        ring = Ring(self.length, self.room + 1)
        plan_of_ring = plan_of(ring, rows, plan.new, plan.counts if plan.padded else None)
        long = plan.new > self.room + 1  # then it overwrites some of what its first queries see
        # Handles only where needed: a buffer with another handle is copied by a write in place.
        before = [buffer.planes[0][:, :, : self.slots] for buffer in self.buffers] if long else []
        self._write(tensors, plan_of_ring)
        self.last = plan_of_ring if plan_of_ring.steady else None
        self.places, self._long = _places(plan, self.length, self.slots, long), None
        if long:
            both = [mx.concatenate([old, x], axis=2) for old, x in zip(before, tensors, strict=True)]
            self._long = both[0], both[1]

    def step(self, tensors: tuple[mx.array, mx.array], plan: Plan) -> None:
        """`write` on the fast path: a write like the last one."""
        assert self.last is not None, "the last write was no step"
        self.last = self.last.next
        self._write(tensors, self.last)
        self.places, self._long = _places(plan, self.length, self.slots, False), None

    def read(self) -> tuple[mx.array, mx.array]:
        """What attention reads after a write, keys (B, H, m, D) and values (B, H, m, Dv), in the order of `places`."""
        assert self.buffers is not None, "there is a ring to read"
        if self._long is not None:
            return self._long
        keys, values = (buffer.planes[0][:, :, : self.slots] for buffer in self.buffers)
        return keys, values

    def newest(self, end: int, count: int) -> tuple[mx.array, mx.array]:
        """The newest tokens of rows that all end at `end`, in order: (B, H, count, D) and (B, H, count, Dv)."""
        assert self.buffers is not None, "there is a ring to read"
        slots = self.slots
        first = (end - count) % slots
        last = first + count
        planes = [buffer.planes[0] for buffer in self.buffers]
        if last <= slots:
            return planes[0][:, :, first:last], planes[1][:, :, first:last]
        keys, values = (
            mx.concatenate([plane[:, :, first:slots], plane[:, :, : last - slots]], axis=2) for plane in planes
        )
        return keys, values

    def _write(self, tensors: tuple[mx.array, mx.array], own: Plan) -> None:
        """Writes new tokens by a plan of the ring."""
        assert self.buffers is not None, "there is a ring to write to"
        for buffer, x in zip(self.buffers, tensors, strict=True):
            buffer.write(x, own)
        slots = self.slots
        self.first = tuple([max(first, row.offset - slots) for first, row in zip(self.first, own.after, strict=True)])


def _both(buffers: Buffers, made: Callable[[SlotBuffer], SlotBuffer]) -> Buffers:
    return made(buffers[0]), made(buffers[1])


def _positions(slots: int, ends: Sequence[int]) -> np.ndarray:
    """Position of each slot of a ring, (B, slots), for rows with these ends: below 0 is an empty slot.

    Positions below `first` belong to overwritten tokens: while trims go no further back than `max_trim`, no query sees
    those.
    """
    newest = np.array(ends)[:, None] - 1
    return newest - (newest - np.arange(slots)) % slots
