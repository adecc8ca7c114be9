"""What goes and what moves when the heads of a model keep different numbers of tokens.

Three ways to choose: by one ranking of the tokens of all heads of a layer (AdaKV, Feng et al. 2024, "Ada-KV: Optimizing
KV Cache Eviction by Adaptive Budget Allocation"), as many of each head as a table says, or by one ranking of all heads
of all layers. Together they keep as many as heads of one budget would.

The recent block and what comes after it lie alike in all heads, from the cut of the longest head of the layer on.
Between a head's own tokens and that cut its slots are dead, and attention must not read them. Shapes: H heads, n slots
of one row, m of them before its recent block, m' = m - sinks that can be evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.eviction.compaction import Moves, as_long, in_order
from mlx_kv.cache.layout import Budget, Row

SAFEGUARD = 0.2  # of the mean budget, which each head of a ranking keeps in any case, as in the paper
NO_TOKEN = mx.iinfo(mx.int64).max  # the rank of a slot without a token


class Uneven(NamedTuple):
    """What a compaction does to one row.

    Attributes:
        moves: into holes, (H, m).
        longer: tokens that the longest head of the layer then holds over the budget, below 0 where it holds fewer.
        dead: slots before the cut that hold no token then, (H,) of int32.
    """

    moves: Moves
    longer: int
    dead: mx.array


class Evictable(NamedTuple):
    """The slots of one row that can be evicted.

    Attributes:
        ranks: (H, m') of int64, in the order of scores, of equal ones the oldest first; no two the same, but for
            `NO_TOKEN`.
        alive: (H, m') of bool, whether a slot holds a token.
    """

    ranks: mx.array
    alive: mx.array


def evictable_of(
    layout: Budget,
    row: Row,
    scores: mx.array,
    positions: mx.array,
    alive: mx.array,
    layer: int = 0,
    layers: int = 1,
) -> Evictable:
    """The evictable slots of one layer, ranked.

    Args:
        scores: (H, m') float32, finite where a slot is alive.
        positions: (1 or H, n), of all slots.
        alive: (H, n) of bool.
        layer, layers: which of so many layers it is, where their ranks are compared.
    """
    heads, free = scores.shape[0], slice(layout.sinks, row.end - layout.keep_recent)
    every = mx.arange(heads, dtype=mx.int32)[:, None]
    own = alive[:, free]
    ties = mx.broadcast_to(positions, alive.shape)[:, free].astype(mx.int64) * heads + every
    ranks = in_order(scores, ties * layers + layer)
    return Evictable(mx.where(own, ranks, NO_TOKEN), own)


def lowest_of_all(tokens: Evictable, kept: int, sure: int) -> mx.array:
    """(H, m') of bool, the tokens that go if all heads together keep so many.

    Args:
        sure: tokens that each head keeps in any case.
    """
    ranks = tokens.ranks
    if sure:
        # The highest of a head that are alive: those that are not rank highest, and are as many more.
        dead = (~tokens.alive).sum(axis=-1, keepdims=True)
        place = mx.argsort(mx.argsort(ranks, axis=-1), axis=-1)
        ranks = mx.where(place >= ranks.shape[1] - dead - sure, NO_TOKEN, ranks)
    count: int = tokens.alive.sum().item() - kept  # type: ignore[assignment]
    return lowest_ranks(ranks.reshape(-1), count).reshape(ranks.shape)


def lowest_ranks(ranks: mx.array, count: int) -> mx.array:
    """(n,) of bool: the `count` lowest of `ranks` (n,)."""
    gone = mx.zeros(ranks.shape, mx.bool_)
    if count <= 0:
        return gone
    victims = mx.argpartition(ranks, count - 1)[:count]
    return mx.put_along_axis(gone, victims, mx.ones(victims.shape, mx.bool_), axis=0)


def lowest_of_each(tokens: Evictable, counts: Sequence[int]) -> mx.array:
    """(H, m') of bool, the tokens that go if each head keeps as many as `counts` says."""
    place = mx.argsort(mx.argsort(tokens.ranks, axis=-1), axis=-1)
    return place < tokens.alive.sum(axis=-1, keepdims=True) - mx.array(list(counts))[:, None]


def uneven_moves(layout: Budget, row: Row, tokens: Evictable, gone: mx.array, alive: mx.array) -> Uneven:
    """What moves if some tokens go.

    Args:
        gone: (H, m') of bool, evictable tokens.
        alive: (H, n) of bool.
    """
    last = row.end - layout.keep_recent  # m
    holes = mx.concatenate([~alive[:, : layout.sinks], gone | ~tokens.alive], axis=1)  # (H, m)
    kept = last - holes.sum(axis=-1)  # (H,)
    longest: int = kept.max().item()  # type: ignore[assignment]
    return Uneven(filling(holes, kept), longest - layout.cut, (longest - kept).astype(mx.int32))


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
