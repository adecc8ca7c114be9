"""The next compaction of one cache: scores of its tokens, and what each row evicts and moves.

Nothing is changed here: scores that cannot be used raise before any slot has moved.
H KV heads; H' is H where every head keeps its own tokens, else 1; n slots of a row, m of them evictable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers
from mlx_kv.cache.eviction.allocation import BY_HEAD, Scope
from mlx_kv.cache.eviction.compaction import (
    SAFEGUARD,
    Evictable,
    Moves,
    RowPlan,
    evictable_of,
    eviction_moves,
    kept_after,
    lowest_of_all,
    lowest_of_each,
    side_by_side,
    uneven_plan,
    with_slides,
)
from mlx_kv.cache.eviction.kept_tokens import KeptTokens
from mlx_kv.cache.eviction.scoring import Scoring
from mlx_kv.cache.layout import Budget, Row


class CompactionStep:
    """The next compaction of a cache, valid until its rows or buffers change.

    Args:
        layout: the budget.
        scope: which heads and layers keep the same tokens.
        rows, buffers: of the cache.
        kept: positions and scores of the tokens before the cut.
        scoring: the scores of the same tokens.
        counts: (evictable tokens that were read, heads) -> evictable tokens that each of these heads keeps; None where
            that is not fixed.
    """

    def __init__(
        self,
        layout: Budget,
        scope: Scope,
        rows: tuple[Row, ...],
        buffers: Buffers,
        kept: KeptTokens,
        scoring: Scoring,
        counts: Callable[[int, int], Sequence[int]] | None = None,
    ) -> None:
        self.rows, self.buffers, self.scoring = rows, buffers, scoring
        self._layout, self._scope, self._kept, self._counts = layout, scope, kept, counts

    @property
    def nbytes(self) -> int:
        """Of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def is_of(self, rows: tuple[Row, ...], buffers: Buffers) -> bool:
        """Whether the rows and buffers of a cache are still those of this step."""
        return rows == self.rows and all(own is now for own, now in zip(self.buffers, buffers, strict=True))

    # --- what one row evicts ----------------------------------------------------------------------------------------

    def plan_alone(self, index: int) -> RowPlan:
        """What one row evicts if this layer decides alone.

        Raises:
            ValueError: scores that are not finite.
        """
        if self._counts is None and self._scope != "adaptive":
            return self.plan_of_scores(index, self.scoring.evictable(index))
        tokens = self.evictable(index)
        return self.plan_without(index, tokens, self._lowest(index, tokens))

    def plan_of_scores(self, index: int, scores: mx.array) -> RowPlan:
        """What one row evicts if it evicts the tokens of the lowest scores.

        Args:
            scores: (H', m), of the evictable slots.

        Raises:
            ValueError: scores that are not finite.
        """
        self.scoring.check_finite(scores)
        moves = eviction_moves(self._layout, self.rows[index], scores, self._positions(index))
        mx.eval(moves)
        return RowPlan(moves)

    def evictable(self, index: int, place: int = 0, layers: int = 1) -> Evictable:
        """The evictable slots of one row, ranked.

        Args:
            place, layers: which of so many layers this is, where ranks are compared with those of other layers.

        Raises:
            ValueError: scores that are not finite.
        """
        scores = self.scoring.evictable(index)
        self.scoring.check_finite(scores)
        alive = self._alive(index, scores.shape[0])
        return evictable_of(self._layout, self.rows[index], scores, self._positions(index), alive, place, layers)

    def surplus(self, index: int) -> int:
        """Tokens of each head of one row beyond the budget, on average."""
        return self._layout.held(self.rows[index]) - self._layout.budget

    def plan_without(self, index: int, tokens: Evictable, gone: mx.array) -> RowPlan:
        """What one row moves if some tokens are evicted; heads may then hold different numbers of tokens.

        Args:
            gone: (H', m) of bool, which of the evictable slots.
        """
        alive = self._alive(index, gone.shape[0])
        plan = uneven_plan(self._layout, self.rows[index], tokens, gone, alive)
        mx.eval(plan.moves, plan.dead)
        return plan

    def _lowest(self, index: int, tokens: Evictable) -> mx.array:
        """Which evictable tokens are evicted if this layer decides alone, (H', m)."""
        layout, heads = self._layout, tokens.ranks.shape[0]
        protected = layout.sinks + layout.keep_recent
        counts = [layout.budget - protected] * heads
        if self._counts is not None:
            counts = list(self._counts(self.rows[index].offset - protected, heads))
            if self._scope != "adaptive":
                return lowest_of_each(tokens, counts)
        mean = sum(counts) // heads + protected
        return lowest_of_all(tokens, sum(counts), max(0, int(SAFEGUARD * mean) - protected))

    def _alive(self, index: int, heads: int) -> mx.array:
        row = self.rows[index]
        return mx.broadcast_to(self._kept.alive(self._layout, row, index, row.end), (heads, row.end))

    def _positions(self, index: int) -> mx.array:
        return self._kept.live_positions(self._layout, self.rows[index], index)

    # --- all rows ---------------------------------------------------------------------------------------------------

    def result(self, plans: Mapping[int, RowPlan]) -> tuple[Moves, KeptTokens, tuple[Row, ...]]:
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
        by_head = self._scope in BY_HEAD
        dead = {i: plan.dead for i, plan in plans.items() if plan.dead is not None and by_head}
        kept = kept_after(layout, rows, after, moves, self._kept, positions, scores, dead)
        return with_slides(layout, rows, after, moves), kept, after
