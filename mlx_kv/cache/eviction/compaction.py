"""What goes and what moves when one row is compacted. Knows nothing about layers, buffers or scores.

Live tokens of a row lie in the slots [0, n): sinks, then in any order what was kept, and from the cut on in the order
of positions; the newest keep_recent are the last. With E = n - budget victims,

    [0, cut)              keeps its survivors where they are; its victims leave holes
    [cut, cut + E)        its survivors move into the holes: there are exactly as many
    [n - keep_recent, n)  slides down to the cut

At most E + keep_recent slots move, however large the budget is. Shapes: (H, ...) with H = 1 where heads agree.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_kv.cache.layout import Budget, Row


def lowest(scores: mx.array, positions: mx.array, count: int) -> mx.array:
    """The indices of the `count` lowest scores, ascending; of equal ones those of the oldest tokens.

    Args:
        scores: (H, n) float32, finite.  positions: (H, n), no two the same.

    Returns:
        (H, count).
    """
    bits = (scores + 0.0).view(mx.int32)  # -0.0 becomes 0.0
    ascending = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # floats as integers of the same order
    keys = ascending.astype(mx.int64) * 2**32 + positions
    return mx.sort(mx.argpartition(keys, count - 1, axis=-1)[:, :count], axis=-1)


def hole_moves(layout: Budget, row: Row, victims: mx.array) -> tuple[mx.array, mx.array]:
    """Which survivors fill which holes: two arrays (H, m). Some may be the same move again, or slot 0 onto itself.

    Args:
        victims: (H, E), slots in ascending order.
    """
    heads, evicted = victims.shape
    cut = layout.cut
    holes = (victims < cut).sum(axis=-1, keepdims=True)  # (H, 1)
    most: int = holes.max().item()  # type: ignore[assignment]
    ones = mx.ones(victims.shape, mx.int32)
    gone = mx.put_along_axis(mx.zeros((heads, row.end), mx.int32), victims, ones, axis=1)[:, cut : cut + evicted]
    survivors = cut + mx.argsort(gone * evicted + mx.arange(evicted), axis=-1)[:, :most]  # ascending, then victims
    # Heads with fewer holes repeat their last move; where there is none, slot 0 moves onto itself.
    index = mx.minimum(mx.arange(most)[None], mx.maximum(holes - 1, 0))
    source, target = (mx.take_along_axis(x[:, :most], index, axis=1) for x in (survivors, victims))
    source, target = (mx.where(holes > 0, x, 0).astype(mx.int32) for x in (source, target))
    return source, target


def padded(x: mx.array, most: int) -> mx.array:
    """Moves (H, m) as (H, most): the last one again and again, or slot 0 onto itself where there is none."""
    heads, count = x.shape
    more = mx.repeat(x[:, -1:], most - count, axis=1) if count else mx.zeros((heads, most), mx.int32)
    return mx.concatenate([x, more], axis=1)


def slide(layout: Budget, row: Row) -> tuple[mx.array, mx.array]:
    """The recent block's way down: two arrays (keep_recent,)."""
    block = mx.arange(layout.keep_recent, dtype=mx.int32)
    return block + (row.end - layout.keep_recent), block + layout.cut


def moved(x: mx.array, source: mx.array, target: mx.array) -> mx.array:
    """x (B, H, n) with what was at `source` (B, H, m) put at `target`."""
    return mx.put_along_axis(x, target, mx.take_along_axis(x, source, axis=2), axis=2)
