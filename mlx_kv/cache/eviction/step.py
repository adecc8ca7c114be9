"""The compaction that comes next for one cache: what it would evict, and what would move.

Nothing is changed here, so nothing has changed anywhere when one layer of a sequence cannot decide. Other layers have
no part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from mlx_kv.cache.eviction.allocation import BY_HEAD, Granularity
from mlx_kv.cache.eviction.compaction import Moves, eviction_moves, kept_after, side_by_side, with_slides
from mlx_kv.cache.eviction.held import Held
from mlx_kv.cache.eviction.kept_tokens import KeptTokens
from mlx_kv.cache.eviction.membership import Membership
from mlx_kv.cache.eviction.observed.observation import Observation
from mlx_kv.cache.eviction.scores import Score
from mlx_kv.cache.eviction.scoring import Scoring
from mlx_kv.cache.eviction.uneven import (
    SAFEGUARD,
    Evictable,
    Uneven,
    evictable_of,
    lowest_of_all,
    lowest_of_each,
    uneven_moves,
)
from mlx_kv.cache.layout import Budget, Row


class CompactionStep:
    """What was worked out for a cache, good for as long as it stands where it stood.

    Attributes:
        view: of the cache, as it stands.
        buffers: of its keys and values.
        scoring: what its tokens are worth.
    """

    def __init__(
        self,
        layout: Budget,
        score: Score,
        granularity: Granularity,
        view: Held,
        members: Membership,
        observation: Observation | None = None,
        layer: int = 0,
        counts: Callable[[int, int], Sequence[int]] | None = None,
    ) -> None:
        """
        Args:
            layer: of the model's layers of full attention.
            counts: (evictable tokens that were read, heads) -> evictable tokens that each of these heads keeps; None
                where that is not fixed.
        """
        assert view.buffers is not None, "only tokens that are there can be evicted"
        self.view, self.buffers, kept = view, view.buffers, members.kept
        known = view.rows, view.buffers, kept, observation, members.reread, layer
        self.scoring = Scoring(layout, score, granularity, *known)
        self._layout, self._score, self._kept, self._granularity = layout, score, kept, granularity
        self._counts = counts
        self._own_moves: dict[int, Moves] = {}
        self._uneven: dict[int, Uneven] = {}

    def is_of(self, view: Held) -> bool:
        """Whether a cache stands as it did, and holds its tokens where it did."""
        return view.rows == self.view.rows and [*map(id, view.buffers or ())] == [*map(id, self.buffers)]

    def own_moves(self, index: int) -> Moves:
        """What moves in one row if this layer decides alone, (H', m).

        Raises:
            ValueError: as `moves_for`.
        """
        if index not in self._own_moves:
            if self._counts is None and self._granularity != "adaptive":
                self._own_moves[index] = self.moves_for(self.scoring.evictable(index), index)
            else:
                tokens = self.evictable(index)
                self.evict(index, tokens, self._gone(index, tokens))
        return self._own_moves[index]

    def evictable(self, index: int, layer: int = 0, layers: int = 1) -> Evictable:
        """The slots of one row that can be evicted, ranked; see `evictable_of`.

        Raises:
            ValueError: as `moves_for`.
        """
        scores = self._finite(self.scoring.evictable(index))
        alive = self._alive(index, scores.shape[0])
        return evictable_of(self._layout, self.view.rows[index], scores, self._positions(index), alive, layer, layers)

    def evict(self, index: int, tokens: Evictable, gone: mx.array) -> None:
        """Has some tokens of one row evicted by the compaction; heads may then hold different numbers.

        Args:
            gone: (H', m'), as in `uneven_moves`.
        """
        alive = self._alive(index, gone.shape[0])
        uneven = self._uneven[index] = uneven_moves(self._layout, self.view.rows[index], tokens, gone, alive)
        mx.eval(uneven.moves, uneven.dead)
        self._own_moves[index] = uneven.moves

    def _gone(self, index: int, tokens: Evictable) -> mx.array:
        """Which evictable tokens go if this layer decides alone, (H', m')."""
        layout, heads = self._layout, tokens.ranks.shape[0]
        protected = layout.sinks + layout.keep_recent
        free = layout.budget - protected
        counts = [free] * heads
        if self._counts is not None:
            counts = list(self._counts(self.view.rows[index].offset - protected, heads))
            if self._granularity != "adaptive":
                return lowest_of_each(tokens, counts)
        mean = sum(counts) // heads + protected
        return lowest_of_all(tokens, sum(counts), max(0, int(SAFEGUARD * mean) - protected))

    def _alive(self, index: int, heads: int) -> mx.array:
        row = self.view.rows[index]
        return mx.broadcast_to(self._kept.alive(self._layout, row, index, row.end), (heads, row.end))

    def _finite(self, scores: mx.array) -> mx.array:
        if not mx.isfinite(scores).all().item():
            raise ValueError(f"the score {self._score.name} gave what is not a finite number: check it for NaN")
        return scores

    def moves_for(self, scores: mx.array, index: int) -> Moves:
        """What moves into the holes of one row if the tokens of the lowest scores go, (H', m).

        Args:
            scores: (H', n - sinks - keep_recent), of the evictable slots.

        Raises:
            ValueError: scores that are not finite.
        """
        row, positions = self.view.rows[index], self._positions(index)
        moves = eviction_moves(self._layout, row, self._finite(scores), positions)
        mx.eval(moves)
        return moves

    def _after(self, decided: Mapping[int, Moves]) -> tuple[Row, ...]:
        """Where all rows stand once those of which it is decided what moves have been compacted."""
        longer = {index: uneven.longer for index, uneven in self._uneven.items()}
        compacted = self._layout.compacted
        return tuple(
            [compacted(row, longer.get(i, 0)) if i in decided else row for i, row in enumerate(self.view.rows)]
        )

    def all_moves(self, decided: Mapping[int, Moves]) -> tuple[Moves, KeptTokens, tuple[Row, ...]]:
        """All that moves in the batch, (B, H', m), and what is known of its tokens then, and where rows stand.

        Args:
            decided: what moves into the holes of each row that is due.
        """
        layout, rows, due, after = self._layout, self.view.rows, list(decided), self._after(decided)
        moves = side_by_side(decided, len(rows))
        positions = {i: self._positions(i) for i in due}
        scores = {i: self.scoring.before_recent(i) for i in due} if self._score.per_token else None
        heads = self._granularity in BY_HEAD
        dead = {i: uneven.dead for i, uneven in self._uneven.items() if i in decided and heads}
        kept = kept_after(layout, rows, after, moves, self._kept, positions, scores, dead)
        return with_slides(layout, rows, after, moves), kept, after

    def _positions(self, index: int) -> mx.array:
        return self._kept.live_positions(self._layout, self.view.rows[index], index)
