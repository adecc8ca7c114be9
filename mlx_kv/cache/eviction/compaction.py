"""What goes and what moves when one row is compacted. Knows nothing about layers, buffers, or where scores come from.

Live tokens of a row lie in the slots [0, n): sinks, then in any order what was kept, and from the cut on in the order
of positions; the newest keep_recent are the last. With E = n - budget victims,

    [0, cut)              keeps its survivors where they are; its victims leave holes
    [cut, cut + E)        its survivors move into the holes: there are exactly as many
    [n - keep_recent, n)  slides down to the cut

At most E + keep_recent slots move, however large the budget is. Shapes: (H, ...) with H = 1 where heads agree.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.layout import Budget, Row


class Moves(NamedTuple):
    """Slots and where they go: int32 (H, m), or (B, H, m) of a batch. Two of the same target have the same source.

    A move from slot 0 to slot 0 is none: it makes heads and rows of fewer moves as long as the others.
    """

    source: mx.array
    target: mx.array


def lowest(scores: mx.array, positions: mx.array, count: int) -> mx.array:
    """The indices of the `count` lowest scores, ascending; of equal ones those of the oldest tokens.

    Args:
        scores: (H, n) float32, finite.  positions: (H, n), no two the same.

    Returns:
        (H, count).
    """
    return mx.sort(mx.argpartition(in_order(scores, positions), count - 1, axis=-1)[:, :count], axis=-1)


def in_order(scores: mx.array, ties: mx.array) -> mx.array:
    """Integers in the order of scores, and of equal ones in that of `ties`, which are not negative: int64."""
    bits = (scores + 0.0).view(mx.int32)  # -0.0 becomes 0.0
    ascending = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # floats as integers of the same order
    return ascending.astype(mx.int64) * 2**32 + ties


def eviction_moves(layout: Budget, row: Row, scores: mx.array, positions: mx.array) -> Moves:
    """What moves into the holes if the tokens of the lowest scores go, down to the budget.

    Args:
        scores: (H, n - sinks - keep_recent) float32, finite: of the evictable slots.
        positions: (H, n), of all live slots.
    """
    sinks = layout.sinks
    evictable = positions[:, sinks : sinks + scores.shape[1]]
    return hole_moves(layout, row, lowest(scores, evictable, row.end - layout.budget) + sinks)


def hole_moves(layout: Budget, row: Row, victims: mx.array) -> Moves:
    """Which survivors fill which holes, (H, m). Some may be the same move again, or slot 0 onto itself.

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
    return Moves(*(as_long(x[:, :most], holes, most) for x in (survivors, victims)))


def as_long(slots: mx.array, counts: mx.array, most: int) -> mx.array:
    """int32 (H, most): the first slots of each head, as many as count; after them the last once more, or 0 for none.

    Args:
        slots: (H, most).
        counts: (H, 1).
    """
    index = mx.minimum(mx.arange(most)[None], mx.maximum(counts - 1, 0))
    return mx.where(counts > 0, mx.take_along_axis(slots, index, axis=1), 0).astype(mx.int32)


def slide(layout: Budget, row: Row, after: Row) -> Moves:
    """The recent block's way down, (keep_recent,), the same in all heads; of a row that stays, slots onto themselves.

    Args:
        row, after: where it stands before and afterwards.
    """
    block = mx.arange(layout.keep_recent, dtype=mx.int32)
    if after == row:
        return Moves(block + layout.cut, block + layout.cut)  # slots that there are, whatever they hold
    return Moves(block + (row.end - layout.keep_recent), block + layout.cut_of(after))
