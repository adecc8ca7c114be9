"""What goes and what moves when the heads of a layer keep different numbers of tokens.

Decides by one ranking of the tokens of all heads which of them go, after AdaKV (Feng et al. 2024, "Ada-KV: Optimizing
KV Cache Eviction by Adaptive Budget Allocation"): a head whose tokens all matter takes room from one that looks at few.
Together they keep as many as heads of one budget would. Knows nothing about layers, buffers, or where scores come from.

The recent block and what comes after it lie alike in all heads, from the cut of the longest head on. Between a head's
own tokens and that cut its slots are dead, and attention must not read them. Shapes: H heads, n slots of one row, m of
them before its recent block.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.eviction.compaction import Moves, as_long, in_order
from mlx_kv.cache.layout import Budget, Row

SAFEGUARD = 0.2  # of the budget that each head keeps in any case, as in the paper


class Uneven(NamedTuple):
    """What a compaction does to one row.

    Attributes:
        moves: into holes, (H, m).
        longer: tokens that the longest head then holds over the budget.
        dead: slots before the cut that hold no token then, (H,) of int32.
    """

    moves: Moves
    longer: int
    dead: mx.array


def adaptive_moves(
    layout: Budget, row: Row, scores: mx.array, positions: mx.array, alive: mx.array, safeguard: float = SAFEGUARD
) -> Uneven:
    """What moves if the tokens of the lowest scores go, of all heads together, down to the budget on average.

    Args:
        scores: (H, n - sinks - keep_recent) float32, finite where a slot is alive: of the evictable slots.
        positions: (H, n), of all slots.
        alive: (H, n) of bool, whether a slot holds a token.
        safeguard: the share of the budget that no head goes below.
    """
    heads, last = scores.shape[0], row.end - layout.keep_recent  # m
    free = slice(layout.sinks, last)
    least = max(0, int(safeguard * layout.budget) - layout.sinks - layout.keep_recent)
    every = mx.arange(heads, dtype=mx.int32)[:, None]
    ranks = in_order(scores, mx.broadcast_to(positions, alive.shape)[:, free] * heads + every)  # (H, m - sinks)
    best = mx.iinfo(mx.int64).max
    ranks = mx.where(alive[:, free], ranks, best)
    if least:
        # The highest of a head that are alive: those that are not rank highest, and are as many more.
        dead = (~alive[:, free]).sum(axis=-1, keepdims=True)
        place = mx.argsort(mx.argsort(ranks, axis=-1), axis=-1)
        ranks = mx.where(place >= ranks.shape[1] - dead - least, best, ranks)
    flat = ranks.reshape(-1)
    count = heads * (layout.held(row) - layout.budget)
    victims = mx.argpartition(flat, count - 1)[:count]
    gone = mx.put_along_axis(mx.zeros(flat.shape, mx.bool_), victims, mx.ones(victims.shape, mx.bool_), axis=0)
    gone = mx.concatenate([~alive[:, : layout.sinks], gone.reshape(ranks.shape) | ~alive[:, free]], axis=1)  # (H, m)
    kept = last - gone.sum(axis=-1)  # (H,)
    longest: int = kept.max().item()  # type: ignore[assignment]
    return Uneven(filling(gone, kept), longest - layout.cut, (longest - kept).astype(mx.int32))


def filling(gone: mx.array, kept: mx.array) -> Moves:
    """The moves (H, most) that bring what is left of each head into its first slots. Some may be the same again.

    Args:
        gone: (H, m) of bool, slots without a token.
        kept: (H,), how many of them have one.
    """
    slots = mx.arange(gone.shape[1], dtype=mx.int32)[None]
    inside = slots < kept[:, None]
    holes, outside = gone & inside, ~(gone | inside)  # as many of the one as of the other, in each head
    count = holes.sum(axis=-1, keepdims=True)
    most: int = count.max().item()  # type: ignore[assignment]
    rising = (mx.sort(mx.where(which, slots, gone.shape[1]), axis=-1)[:, :most] for which in (outside, holes))
    return Moves(*(as_long(each, count, most) for each in rising))
