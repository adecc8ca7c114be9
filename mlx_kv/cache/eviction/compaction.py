"""Which slots move at a compaction: those of one row, and those of several rows as one batch.

Live tokens of a row lie in the slots [0, n): sinks, then in any order what was kept, and from the cut on in the order
of positions; the newest keep_recent are the last. With E = n - budget victims,

    [0, cut)              keeps its survivors where they are; its victims leave holes
    [cut, cut + E)        its survivors move into the holes: there are exactly as many
    [n - keep_recent, n)  slides down to the cut

At most E + keep_recent slots move, however large the budget is. In a batch, rows that are not compacted move slots onto
themselves.

Heads may keep different numbers of tokens: by one ranking of the tokens of all heads of a layer (AdaKV, Feng et al.
2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation"), or as many of each head as a table gives.
Together they keep as many as heads of one budget would. The recent block and
what comes after it lie alike in all heads, from the cut of the longest head on. Between a head's own tokens and that
cut its slots are dead, and attention must not read them.

Shapes: (H, ...) of one row, (B, H, ...) of a batch, with H = 1 where heads agree; n slots of a row, m' of them
evictable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers
from mlx_kv.cache.eviction.scoring import Scoring
from mlx_kv.cache.eviction.slot_tokens import SlotTokens, as_wide
from mlx_kv.cache.layout import Budget, Row

SAFEGUARD = 0.2  # of the mean budget, which each head of a ranking keeps in any case, as in the AdaKV paper
NO_TOKEN = mx.iinfo(mx.int64).max  # the rank of a slot without a token


class Moves(NamedTuple):
    """Slots and where they go: int32 (H, m), or (B, H, m) of a batch. Two of the same target have the same source.

    A move from slot 0 to slot 0 changes nothing: it pads heads and rows of fewer moves.
    """

    source: mx.array
    target: mx.array


class RowPlan(NamedTuple):
    """What a compaction does to one row.

    Attributes:
        moves: into holes, (H, m).
        extra_slots: `Row.extra_slots` after it: tokens of the longest head of the layer minus the budget.
        dead: slots before the recent block that hold no token then, (H,) of int32; None where all heads hold as many.
    """

    moves: Moves
    extra_slots: int = 0
    dead: mx.array | None = None


class CompactionStep:
    """The next compaction of a cache, valid until its rows or buffers change.

    Args:
        scoring: the scores of the tokens of a cache, and where they are.
        counts: (evictable tokens that were read, heads) -> evictable tokens that each of these heads keeps; None where
            that is not fixed.
    """

    def __init__(self, scoring: Scoring, counts: Callable[[int, int], Sequence[int]] | None = None) -> None:
        self.scoring, self.rows, self.buffers = scoring, scoring.rows, scoring.buffers
        self._layout, self._scope, self._kept, self._counts = scoring.layout, scoring.scope, scoring.kept, counts

    @property
    def nbytes(self) -> int:
        """Of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def is_of(self, rows: tuple[Row, ...], buffers: Buffers) -> bool:
        """Whether the rows and buffers of a cache are still those of this step."""
        return rows == self.rows and all(before is now for before, now in zip(self.buffers, buffers, strict=True))

    # --- what one row evicts ----------------------------------------------------------------------------------------

    def plan_alone(self, index: int) -> RowPlan:
        """What one row evicts if this layer decides alone.

        Raises:
            ValueError: scores that are not finite.
        """
        if self._counts is None and self._scope != "adaptive":
            return self.plan_of_scores(index, self.scoring.evictable(index))
        scores = self.scoring.evictable(index)
        self.scoring.check_finite(scores)
        alive = self._alive(index, scores.shape[0])
        tokens = evictable_of(self._layout, self.rows[index], scores, self._positions(index), alive)
        plan = uneven_plan(self._layout, self.rows[index], tokens, self._lowest(index, tokens), alive)
        mx.eval(plan.moves, plan.dead)
        return plan

    def plan_of_scores(self, index: int, scores: mx.array) -> RowPlan:
        """What one row evicts if it evicts the tokens of the lowest scores.

        Args:
            scores: (H', m), of the evictable slots.

        Raises:
            ValueError: scores that are not finite.
        """
        self.scoring.check_finite(scores)
        layout, row = self._layout, self.rows[index]
        evictable = self._positions(index)[:, layout.sinks : layout.sinks + scores.shape[1]]
        moves = hole_moves(layout, row, lowest(scores, evictable, row.end - layout.budget) + layout.sinks)
        mx.eval(moves)
        return RowPlan(moves)

    def _lowest(self, index: int, tokens: Evictable) -> mx.array:
        """Which evictable tokens are evicted if this layer decides alone, (H', m)."""
        layout, heads = self._layout, tokens.ranks.shape[0]
        protected = layout.sinks + layout.keep_recent
        counts = [layout.budget - protected] * heads
        if self._counts is not None:
            counts = list(self._counts(self.rows[index].offset - protected, heads))
            if self._scope != "adaptive":
                place = mx.argsort(mx.argsort(tokens.ranks, axis=-1), axis=-1)
                return place < tokens.alive.sum(axis=-1, keepdims=True) - mx.array(counts)[:, None]
        mean = sum(counts) // heads + protected
        return lowest_of_all(tokens, sum(counts), max(0, int(SAFEGUARD * mean) - protected))

    def _alive(self, index: int, heads: int) -> mx.array:
        row = self.rows[index]
        return mx.broadcast_to(self._kept.alive(self._layout, row, index, row.end), (heads, row.end))

    def _positions(self, index: int) -> mx.array:
        return self._kept.live_positions(self._layout, self.rows[index], index)

    # --- all rows ---------------------------------------------------------------------------------------------------

    def result(self, plans: Mapping[int, RowPlan]) -> tuple[Moves, SlotTokens, tuple[Row, ...]]:
        """The moves of the whole batch, (B, H', moved slots), and its kept tokens and rows after them.

        Args:
            plans: of the rows that are compacted.
        """
        layout, rows = self._layout, self.rows
        after = tuple(
            [layout.compacted(row, plans[i].extra_slots) if i in plans else row for i, row in enumerate(rows)]
        )
        moves = side_by_side({i: plan.moves for i, plan in plans.items()}, len(rows))
        positions = {i: self._positions(i) for i in plans}
        scores = {i: self.scoring.before_recent(i) for i in plans} if self.scoring.per_token else None
        dead = {i: plan.dead for i, plan in plans.items() if plan.dead is not None and self.scoring.by_head}
        kept = kept_after(layout, rows, after, moves, self._kept, positions, scores, dead)
        return with_slides(layout, rows, after, moves), kept, after


# --- one row ----------------------------------------------------------------------------------------------------------


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
    """int32 (H, most): the first `counts` slots of each head, padded with the last of them, or with 0 without any.

    Args:
        slots: (H, most).
        counts: (H, 1).
    """
    index = mx.minimum(mx.arange(most)[None], mx.maximum(counts - 1, 0))
    return mx.where(counts > 0, mx.take_along_axis(slots, index, axis=1), 0).astype(mx.int32)


def slide(layout: Budget, row: Row, after: Row) -> Moves:
    """The slide of the recent block, (keep_recent,), the same in all heads; slots onto themselves in other rows.

    Args:
        row, after: where it stands before and afterwards.
    """
    block = mx.arange(layout.keep_recent, dtype=mx.int32)
    if after == row:
        return Moves(block + layout.cut, block + layout.cut)  # arbitrary slots that exist
    return Moves(block + (row.end - layout.keep_recent), block + layout.cut_of(after))


# --- one row whose heads keep different numbers of tokens -------------------------------------------------------------


class Evictable(NamedTuple):
    """The slots of one row that can be evicted, m' = n - sinks - keep_recent.

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
) -> Evictable:
    """The evictable slots of one layer, ranked.

    Args:
        scores: (H, m') float32, finite where a slot is alive.
        positions: (1 or H, n), of all slots.
        alive: (H, n) of bool.
    """
    heads, free = scores.shape[0], slice(layout.sinks, row.end - layout.keep_recent)
    every = mx.arange(heads, dtype=mx.int32)[:, None]
    evictable = alive[:, free]
    ties = mx.broadcast_to(positions, alive.shape)[:, free].astype(mx.int64) * heads + every
    ranks = in_order(scores, ties)
    return Evictable(mx.where(evictable, ranks, NO_TOKEN), evictable)


def lowest_of_all(tokens: Evictable, kept: int, sure: int) -> mx.array:
    """(H, m') of bool, the tokens that are evicted if all heads together keep `kept`.

    Args:
        sure: tokens that each head keeps in any case.
    """
    ranks = tokens.ranks
    if sure:
        # Protects the `sure` highest live tokens of each head; dead slots rank above all of them (`NO_TOKEN`).
        dead = (~tokens.alive).sum(axis=-1, keepdims=True)
        place = mx.argsort(mx.argsort(ranks, axis=-1), axis=-1)
        ranks = mx.where(place >= ranks.shape[1] - dead - sure, NO_TOKEN, ranks)
    count: int = tokens.alive.sum().item() - kept  # type: ignore[assignment]
    gone = mx.zeros((ranks.size,), mx.bool_)
    if count > 0:
        victims = mx.argpartition(ranks.reshape(-1), count - 1)[:count]
        gone = mx.put_along_axis(gone, victims, mx.ones(victims.shape, mx.bool_), axis=0)
    return gone.reshape(ranks.shape)


def uneven_plan(layout: Budget, row: Row, tokens: Evictable, gone: mx.array, alive: mx.array) -> RowPlan:
    """What moves if some tokens are evicted, a different number of each head.

    Args:
        gone: (H, m') of bool, evictable tokens.
        alive: (H, n) of bool.
    """
    last = row.end - layout.keep_recent  # m
    empty = mx.concatenate([~alive[:, : layout.sinks], gone | ~tokens.alive], axis=1)  # (H, m)
    kept = last - empty.sum(axis=-1)  # (H,)
    # The first `kept` slots of each head are filled; some of these moves may be the same again.
    slots = mx.arange(last, dtype=mx.int32)[None]
    inside = slots < kept[:, None]
    holes, outside = empty & inside, ~(empty | inside)  # as many of the one as of the other, in each head
    count = holes.sum(axis=-1, keepdims=True)
    most: int = count.max().item()  # type: ignore[assignment]
    rising = (mx.sort(mx.where(which, slots, last), axis=-1)[:, :most] for which in (outside, holes))
    moves = Moves(*(as_long(each, count, most) for each in rising))
    longest: int = kept.max().item()  # type: ignore[assignment]
    return RowPlan(moves, longest - layout.cut, (longest - kept).astype(mx.int32))


# --- a batch ----------------------------------------------------------------------------------------------------------


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
    """Moves (B, H, m) into holes, and after them the slides of the recent blocks: (B, H, m + keep_recent).

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
    kept: SlotTokens,
    positions: Mapping[int, mx.array],
    scores: Mapping[int, mx.array] | None,
    dead: Mapping[int, mx.array],
) -> SlotTokens:
    """`kept` after a compaction. Small arrays, replaced as a whole.

    Args:
        rows, after: where they stand before and afterwards.
        moves: into holes, (B, H, m).
        kept: before it.
        positions: of the rows that are compacted, (1 or H, n), of all live slots.
        scores: of the same rows, (1 or H, at least n - keep_recent); None where every compaction scores all tokens.
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

    all_dead = kept.dead
    if dead:
        before = mx.zeros((len(rows), heads), mx.int32) if kept.dead is None else kept.dead
        all_dead = mx.stack([dead.get(i, before[i]) for i in range(len(rows))])
    of_scores = None if scores is None else lines(scores, kept.scores, mx.float32)
    return SlotTokens(lines(positions, kept.positions, mx.int32), of_scores, all_dead)
