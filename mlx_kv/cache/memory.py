"""What a cache holds, counted: bytes, and the positions of its live slots. Nothing is evaluated for bytes."""

from __future__ import annotations

import mlx.core as mx

from mlx_kv.cache.contents import Contents
from mlx_kv.cache.layout import NO_LIMIT


def allocated(held: Contents) -> int:
    """Bytes allocated, dead slots included."""
    known = 0 if held.evictor is None else held.evictor.nbytes
    return 0 if held.buffers is None else known + residual(held) + sum(buffer.nbytes for buffer in held.buffers)


def residual(held: Contents) -> int:
    """Bytes allocated for newest tokens as they came: a ring of its own size, however many tokens there are."""
    return 0 if held.residual is None else held.residual.nbytes


def live(held: Contents) -> int:
    """Bytes of the slots that hold a token, and of the newest as they came."""
    if held.buffers is None:
        return 0
    return sum(max(0, held.layout.held(row)) for row in held.rows) * bytes_per_slot(held) + residual(held)


def full(held: Contents) -> int:
    """Bytes that all tokens up to here would take if none had been evicted or overwritten."""
    return 0 if held.buffers is None else sum(max(0, row.offset) for row in held.rows) * bytes_per_slot(held)


def bytes_per_slot(held: Contents) -> int:
    """Bytes of one slot of one row, keys and values, as they are stored now."""
    return sum(buffer.bytes_per_slot for buffer in held.buffers or ())


def live_positions(held: Contents) -> mx.array:
    """As `KVCache.positions`."""
    ends = [max(0, row.end) for row in held.rows]
    if held.layout.most_slots != NO_LIMIT:
        raise ValueError("a ring uses its slots again: ask its layout for the position of a slot")
    lines = [
        mx.arange(max(0, row.end), dtype=mx.int32)[None] - row.start
        if held.evictor is None
        else held.evictor.live_positions(row, i)
        for i, row in enumerate(held.rows)
    ]
    heads, most = max(line.shape[0] for line in lines), max(ends)
    return mx.stack(
        [
            mx.pad(mx.broadcast_to(line, (heads, end)), [(0, 0), (0, most - end)], constant_values=mx.array(-1))
            for line, end in zip(lines, ends, strict=True)
        ]
    )
