"""The moves of several rows as those of one batch. Rows that are not compacted move slots onto themselves.

Knows nothing about scores or buffers. Shapes: B rows; H is 1 where heads agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlx_kv.cache.eviction.compaction import Moves, slide
from mlx_kv.cache.eviction.kept_tokens import KeptTokens
from mlx_kv.cache.eviction.widths import as_wide
from mlx_kv.cache.layout import Budget, Row


def side_by_side(moves: Mapping[int, Moves], rows: int) -> Moves:
    """The moves of all rows, (B, H, m), from those (H, m) of the rows that have any."""
    heads = next(iter(moves.values())).source.shape[0]
    none = Moves(*[mx.zeros((heads, 0), mx.int32)] * 2)
    each = [moves.get(i, none) for i in range(rows)]
    most = max(one.source.shape[1] for one in each)

    def stacked(which: int) -> mx.array:
        return mx.stack([_padded(one[which], most) for one in each])

    return Moves(stacked(0), stacked(1))


def _padded(slots: mx.array, most: int) -> mx.array:
    """Moves (H, m) as (H, most): the last one again and again, or slot 0 onto itself where there is none."""
    heads, count = slots.shape
    more = mx.repeat(slots[:, -1:], most - count, axis=1) if count else mx.zeros((heads, most), mx.int32)
    return mx.concatenate([slots, more], axis=1)


def with_slides(layout: Budget, rows: Sequence[Row], after: Sequence[Row], moves: Moves) -> Moves:
    """Moves (B, H, m) into holes, and after them the way down of the recent blocks: (B, H, m + keep_recent).

    Args:
        rows, after: where they stand before and afterwards; those that are not compacted the same.
    """
    slides = [slide(layout, row, then) for row, then in zip(rows, after, strict=True)]
    shape = (*moves.source.shape[:2], layout.keep_recent)

    def both(which: int) -> mx.array:
        down = mx.stack([one[which] for one in slides])[:, None]  # (B, 1, keep_recent)
        return mx.concatenate([moves[which], mx.broadcast_to(down, shape)], axis=2)

    return Moves(both(0), both(1))


def kept_after(
    layout: Budget,
    rows: Sequence[Row],
    after: Sequence[Row],
    moves: Moves,
    kept: KeptTokens,
    positions: Mapping[int, mx.array],
    scores: Mapping[int, mx.array] | None,
    dead: Mapping[int, mx.array],
) -> KeptTokens:
    """What is known of the tokens before the cut once holes are filled. Small arrays: they are made anew.

    Args:
        rows, after: where they stand before and afterwards.
        moves: into holes, (B, H, m).
        kept: what was known.
        positions: of the rows that are compacted, (1 or H, n), of all live slots.
        scores: of the same rows, (1 or H, at least n - keep_recent); None where they are asked for every time.
        dead: slots of the same rows, (H,), before the cut that hold no token then; only of those where any does.
    """
    heads, widest = moves.source.shape[1], max(map(layout.cut_of, after))

    def lines(known: Mapping[int, mx.array], old: mx.array | None, dtype: mx.Dtype) -> mx.array:
        each = []
        for i, row in enumerate(rows):
            if i not in known:
                each.append(mx.zeros((heads, widest), dtype) if old is None else as_wide(old[i], widest))
                continue
            last, cut = row.end - layout.keep_recent, layout.cut_of(after[i])
            slots = mx.broadcast_to(known[i][:, :last], (heads, last))
            filled = mx.take_along_axis(slots, moves.source[i], axis=1)
            moved = mx.put_along_axis(slots, moves.target[i], filled, axis=1)[:, :cut].astype(dtype)
            each.append(as_wide(moved, widest))
        return mx.stack(each)

    return KeptTokens(
        lines(positions, kept.positions, mx.int32),
        None if scores is None else lines(scores, kept.scores, mx.float32),
        _dead_after(len(rows), heads, kept.dead, dead),
    )


def _dead_after(rows: int, heads: int, before: mx.array | None, made: Mapping[int, mx.array]) -> mx.array | None:
    """(B, H), from those of before and those that were made by a compaction; None where there is none."""
    if before is None and not made:
        return None
    none = mx.zeros((heads,), mx.int32)
    return mx.stack([made.get(i, none if before is None else before[i]) for i in range(rows)])
