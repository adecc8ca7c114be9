"""Attention to the newest tokens as they came, and to all older ones as they are stored.

Two sets of keys stand side by side: those of the slots, and those of the residual. Masks see to it that each query sees
each token in one of the two. Knows nothing about how the residual is kept.
B rows, H KV heads, S queries, K slots that are read, m tokens of the residual.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_kv.cache.attention.blocks import attend
from mlx_kv.cache.attention.operands import Dense, Joined
from mlx_kv.cache.attention.packed import Packed
from mlx_kv.cache.codecs import Packing
from mlx_kv.cache.mask import key_positions, visible
from mlx_kv.cache.protocol import Call
from mlx_kv.cache.residual import Seen


class ResidualAnswer:
    """Attention over slots and a residual.

    Args:
        seen: the residual, after the write whose queries attend.
        length: tokens that a query sees as they came.
        packings: how keys and values of the slots are packed; None where attention gets arrays.
    """

    def __init__(self, seen: Seen, length: int, packings: tuple[Packing, Packing] | None) -> None:
        self._seen, self._length, self._packings = seen, length, packings

    def attend(self, call: Call) -> mx.array:
        """(B, Hq, S, Dv)."""
        seen = self._seen
        if (count := self._apart(call)) is not None:
            keys, values = (_newest(x, seen, count) for x in (seen.keys, seen.values))
            return self._joined(call, keys, values, self._slots(call) - count, None)
        return self._joined(call, seen.keys, seen.values, self._slots(call), self._mask(call))

    def _slots(self, call: Call) -> int:
        return int((call.keys if self._packings is None else call.keys[0]).shape[2])

    def _apart(self, call: Call) -> int | None:
        """How many of the last slots the residual stands for, where it does so for all queries alike; else None."""
        plan = self._seen.places.plan
        if call.mask is not None or plan.new > 1 or not (plan.uniform and plan.ordered and len(plan.ranges) == 1):
            return None
        return min(self._length, self._slots(call))

    def _joined(self, call: Call, keys: mx.array, values: mx.array, slots: int, mask: mx.array | None) -> mx.array:
        if self._packings is None:
            own = (x[:, :, :slots] for x in (call.keys, call.values))
            both = [mx.concatenate([old, new], axis=2) for old, new in zip(own, (keys, values), strict=True)]
            return call.hand_on(keys=both[0], values=both[1], mask=mask)
        if slots == 0:
            return attend(call.queries, Dense(keys), Dense(values), call.scale, mask, call.sinks)
        stored = (
            Packed(tuple([plane[:, :, :slots] for plane in planes]), packing)
            for planes, packing in zip((call.keys, call.values), self._packings, strict=True)
        )
        both_keys, both_values = (Joined(old, Dense(new)) for old, new in zip(stored, (keys, values), strict=True))
        return attend(call.queries, both_keys, both_values, call.scale, mask, call.sinks)

    def _mask(self, call: Call) -> mx.array:
        """(B or 1, 1 or more, S, K + m)."""
        places = self._seen.places
        plan = places.plan
        offsets = mx.array([row.offset for row in plan.distinct])[:, None, None, None]
        queries = offsets + mx.arange(plan.new)[:, None]  # (B, 1, S, 1)
        slots = key_positions(plan)
        slots = slots[None, None, None] if slots.ndim == 1 else slots  # (B, 1, 1, K)
        beside = mx.array(places.positions)[:, None, None]  # (B, 1, 1, m)
        near = slots > queries - self._length  # all of them are beside: no trim goes further back
        layout = plan.layout
        shown = visible(beside, queries, layout.window, layout.sinks, layout.chunk_size)
        shown = shown & (beside > queries - self._length)
        mask = call.mask
        if not isinstance(mask, mx.array):  # each query sees all up to itself
            return mx.concatenate([(slots >= 0) & (slots <= queries) & ~near, shown], axis=-1)
        mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
        columns = mx.array(places.columns)[:, None, None]  # (B, 1, 1, m)
        rows = max(mask.shape[0], columns.shape[0])
        index = mx.broadcast_to(columns, (rows, *mask.shape[1:3], columns.shape[3]))
        over = mx.take_along_axis(mx.broadcast_to(mask, (rows, *mask.shape[1:])), index, axis=-1)
        if mask.dtype == mx.bool_:
            parts = [mask & ~near, over & shown]
        else:
            least = mx.finfo(mask.dtype).min
            parts = [mx.where(near, least, mask), mx.where(shown, over, least)]
        shape = tuple(max(sizes) for sizes in zip(*(part.shape[:3] for part in parts), strict=True))
        return mx.concatenate([mx.broadcast_to(part, (*shape, part.shape[3])) for part in parts], axis=-1)


def _newest(x: mx.array, seen: Seen, count: int) -> mx.array:
    """The newest tokens of a ring (B, H, m, D) in order: (B, H, count, D)."""
    slots = x.shape[2]
    first = (seen.places.plan.rows[0].offset + 1 - count) % slots
    if first + count <= slots:
        return x[:, :, first : first + count]
    return mx.concatenate([x[:, :, first:], x[:, :, : first + count - slots]], axis=2)
