"""Attention that mlx-lm cannot compute: over planes that it cannot read, and over slots beside a residual.

With a residual, two sets of keys stand side by side: those of the slots, and those of the residual. The mask lets each
query see each token in exactly one of the two.
B rows, H KV heads, S queries, K slots that are read, m tokens of the residual.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_kv.cache.attention.blocks import attend
from mlx_kv.cache.attention.operands import Dense, Joined, Packed
from mlx_kv.cache.codecs import Packing
from mlx_kv.cache.mask import key_positions, visible
from mlx_kv.cache.protocol import Call
from mlx_kv.cache.residual import Places, Residual


class PackedAnswer:
    """Attention over packed keys and values.

    Args:
        keys, values: how each of them is packed.
    """

    def __init__(self, keys: Packing, values: Packing) -> None:
        self._keys, self._values = keys, values

    def attend(self, call: Call) -> mx.array:
        """(B, Hq, S, Dv)."""
        keys, values = Packed(call.keys, self._keys), Packed(call.values, self._values)
        return attend(call.queries, keys, values, call.scale, call.mask, call.sinks)


class ResidualAnswer:
    """Attention over slots and a residual.

    Args:
        residual: after the write whose queries attend.
        places: of its tokens.
        packings: how keys and values of the slots are packed; None where attention gets arrays.
    """

    def __init__(self, residual: Residual, places: Places, packings: tuple[Packing, Packing] | None) -> None:
        self._residual, self._places, self._packings = residual, places, packings

    def attend(self, call: Call) -> mx.array:
        """(B, Hq, S, Dv)."""
        slots = int((call.keys if self._packings is None else call.keys[0]).shape[2])
        plan = self._places.plan
        if call.mask is None and plan.new == 1 and plan.uniform and plan.ordered and len(plan.ranges) == 1:
            # One query sees the last slots as they came, and all slots before them as they are stored.
            count = min(self._places.length, slots)
            return self._joined(call, *self._residual.newest(plan.rows[0].offset + 1, count), slots - count, None)
        mask = self._places.mask(call.mask, lambda: self._mask(call))
        return self._joined(call, *self._residual.read(), slots, mask)

    def _joined(self, call: Call, keys: mx.array, values: mx.array, slots: int, mask: mx.array | None) -> mx.array:
        """Over the first slots, and after them keys and values of the residual."""
        if self._packings is None:
            own = (x[:, :, :slots] for x in (call.keys, call.values))
            both = [mx.concatenate([old, new], axis=2) for old, new in zip(own, (keys, values), strict=True)]
            return call.forward(keys=both[0], values=both[1], mask=mask)
        if slots == 0:
            return attend(call.queries, Dense(keys), Dense(values), call.scale, mask, call.sinks)
        both_keys, both_values = (
            Joined([Packed(planes, packing), Dense(new)], [slots, int(new.shape[2])])
            for planes, packing, new in zip((call.keys, call.values), self._packings, (keys, values), strict=True)
        )
        return attend(call.queries, both_keys, both_values, call.scale, mask, call.sinks)

    def _mask(self, call: Call) -> mx.array:
        """(B or 1, 1 or more, S, K + m)."""
        places = self._places
        plan, length = places.plan, places.length
        offsets = mx.array([row.offset for row in plan.distinct])[:, None, None, None]
        queries = offsets + mx.arange(plan.new)[:, None]  # (B, 1, S, 1)
        slots = key_positions(plan)
        slots = slots[None, None, None] if slots.ndim == 1 else slots  # (B, 1, 1, K)
        beside = mx.array(places.positions)[:, None, None]  # (B, 1, 1, m)
        near = slots > queries - length  # hidden: they are read from the residual, which holds all (`most_trim`)
        layout = plan.layout
        shown = visible(beside, queries, layout.window, layout.sinks, layout.chunk_size)
        shown = shown & (beside > queries - length)
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
