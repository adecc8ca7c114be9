"""Attention that mlx-lm cannot compute: over planes that it cannot read, and over slots beside a residual.

With a residual, two sets of keys stand side by side: those of the slots, and those of the residual. The mask lets each
query see each token in exactly one of the two.
B rows, H KV heads, S queries, K slots that are read, m tokens of the residual.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.attention.blocks import attend
from mlx_kv.cache.attention.operands import Dense, Joined, Operand, Packed
from mlx_kv.cache.codecs import Packing
from mlx_kv.cache.mask import Mask, key_positions, visible
from mlx_kv.cache.protocol import Call
from mlx_kv.cache.residual import Places, Residual


class Operands(NamedTuple):
    """What attention reads: keys and values of n tokens, and a mask that broadcasts to (B, Hq, S, n), or None."""

    keys: Operand
    values: Operand
    mask: Mask


class PackedAnswer:
    """Attention over packed keys and values.

    Args:
        keys, values: how each of them is packed.
    """

    def __init__(self, keys: Packing, values: Packing) -> None:
        self._keys, self._values = keys, values

    def attend(self, call: Call) -> mx.array:
        """(B, Hq, S, Dv)."""
        keys, values, mask = self.operands(call)
        return attend(call.queries, keys, values, call.scale, mask, call.sinks)

    def operands(self, call: Call) -> Operands:
        """What it reads."""
        return Operands(Packed(call.keys, self._keys), Packed(call.values, self._values), call.mask)


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
        keys, values, mask = self.operands(call)
        if self._packings is None and isinstance(keys, Dense) and isinstance(values, Dense):
            return call.forward(keys=keys.tensor, values=values.tensor, mask=mask)
        return attend(call.queries, keys, values, call.scale, mask, call.sinks)

    def operands(self, call: Call) -> Operands:
        """What it reads: some first slots, and after them tokens of the residual."""
        slots = int((call.keys if self._packings is None else call.keys[0]).shape[2])
        plan, mask = self._places.plan, None
        if call.mask is None and plan.new == 1 and plan.uniform and plan.ordered and len(plan.ranges) == 1:
            # One query sees the last slots as they came, and all slots before them as they are stored.
            count = min(self._places.length, slots)
            newest = self._residual.newest(plan.rows[0].offset + 1, count)
            slots -= count
        else:
            mask = self._places.mask(call.mask, lambda: self._mask(call))
            newest = self._residual.read()
        if self._packings is None:
            own = (x[:, :, :slots] for x in (call.keys, call.values))
            keys, values = (Dense(mx.concatenate(list(pair), axis=2)) for pair in zip(own, newest, strict=True))
            return Operands(keys, values, mask)
        if slots == 0:
            return Operands(Dense(newest[0]), Dense(newest[1]), mask)
        both_keys, both_values = (
            Joined([Packed(planes, packing), Dense(new)], [slots, int(new.shape[2])])
            for planes, packing, new in zip((call.keys, call.values), self._packings, newest, strict=True)
        )
        return Operands(both_keys, both_values, mask)

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
