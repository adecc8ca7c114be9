"""One layer of the sequences of a cache: what it tells its layer groups before anything is evicted.

B rows, H KV heads; H' is H where every head keeps its own tokens (share="head" or "adaptive"), else 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_kv.cache.eviction.allocation import (
    Allocation,
    Granularity,
    by_layer,
    check_granularity,
    head_budgets,
    token_counts,
)
from mlx_kv.cache.eviction.held import Cached, Held
from mlx_kv.cache.eviction.layer_group import LayerGroup
from mlx_kv.cache.eviction.membership import Membership
from mlx_kv.cache.eviction.observed.observation import observation_for
from mlx_kv.cache.eviction.peers import Peers
from mlx_kv.cache.eviction.scores import Function, Score, find_score
from mlx_kv.cache.eviction.step import CompactionStep
from mlx_kv.cache.eviction.uneven import Evictable
from mlx_kv.cache.eviction.weights import Keys, keys_of
from mlx_kv.cache.layout import Budget, Row
from mlx_kv.cache.protocol import Call


class GroupMember:
    """Scores the tokens of one cache; a `Member` of the layer group of each of its rows.

    Args:
        layout, score, granularity, layer_group, layer, layers: as of `Evictor`.

    Raises:
        ValueError: as `Evictor`.
    """

    def __init__(
        self,
        layout: Budget,
        score: str | Function | Score,
        granularity: Granularity,
        layer_group: LayerGroup,
        layer: int,
        layers: Allocation,
    ) -> None:
        check_granularity(granularity, layers)
        self.layout, self.score, self.granularity, self.layer = layout, find_score(score), granularity, layer
        self.layers = layers if isinstance(layers, str) else head_budgets(layers)
        self._table = None if isinstance(self.layers, str) else self.layers
        if self._table is not None and granularity == "layer":
            self._table = by_layer(self._table)
        self.members = Membership((layer_group,))
        self.members.groups[0].join(layer, self)
        self.observation = observation_for(self.score.wants, layout.keep_recent)
        self._owner: Callable[[], Cached | None] = lambda: None
        self._step: CompactionStep | None = None  # worked out for the compaction that comes, if anything was

    def belong_to(self, owner: Cached) -> None:
        self._owner = weakref.ref(owner)

    @property
    def peers(self) -> Peers:
        """Who has other parts of the same sequences."""
        return self.members.groups[0].peers

    def live_positions(self, row: Row, index: int) -> mx.array:
        """The position of each live slot of one row, (H', n); -1 where a head has no token, and others have."""
        kept = self.members.kept
        positions = kept.live_positions(self.layout, row, index)
        if kept.dead is None:
            return positions
        return mx.where(kept.alive(self.layout, row, index, positions.shape[1]), positions, -1)

    def counts(self, most: int, heads: int) -> Sequence[int]:
        """Evictable tokens that each head of this layer keeps by the table, of `most` that were read."""
        layout, table = self.layout, self._table
        assert table is not None, "counts are fixed where there is a table"
        own = token_counts(table, layout.budget - layout.sinks - layout.keep_recent, most)[self.layer]
        first, every = self.peers.first_head(heads), self.peers.all_heads(heads)
        if len(own) not in (1, every):
            raise ValueError(
                f"the table of budgets has {len(own)} numbers in a row, and a layer has {every} KV heads: give a "
                "number for each head, or one for all of them"
            )
        return own * heads if len(own) == 1 else own[first : first + heads]

    # --- the next compaction ------------------------------------------------------------------------------------------

    def _next_step(self) -> CompactionStep:
        """What was worked out for the next compaction, if it still holds."""
        view = self._cache().view
        if self._step is None or not self._step.is_of(view):
            self._step = self._step_from(view)
        return self._step

    def _step_from(self, view: Held) -> CompactionStep:
        if self.observation is not None and view.buffers is not None:
            self.observation.settle(view.rows, lambda: self._keys_for(view.rows))
        known = view, self.members, self.observation, self.layer, None if self._table is None else self.counts
        return CompactionStep(self.layout, self.score, self.granularity, *known)

    def _keys_for(self, rows: tuple[Row, ...], call: Call | None = None) -> Keys:
        """The tokens that queries see, as a call gives them or as they are stored."""
        buffers = self._cache().view.buffers
        assert buffers is not None, "queries come after keys"
        return keys_of(buffers[0], [self.live_positions(row, i) for i, row in enumerate(rows)], call)

    def _cache(self) -> Cached:
        owner = self._owner()
        assert owner is not None, "an evictor is asked by its cache, or through it"
        return owner

    # --- a member of layer groups -------------------------------------------------------------------------------------

    def row(self, group: LayerGroup) -> Row:
        owner = self._owner()
        if owner is None or owner.view.buffers is None or group not in self.members.groups:
            return Row()
        return owner.view.rows[self.members.groups.index(group)]

    def own_scores(self, group: LayerGroup) -> mx.array | None:
        return self._next_step().scoring.own(self.members.groups.index(group))

    def hear(self, group: LayerGroup, scores: mx.array) -> None:
        self._next_step().scoring.hear(self.members.groups.index(group), scores)

    def evictable_scores(self, group: LayerGroup) -> mx.array:
        return self._next_step().scoring.standardised(self.members.groups.index(group))

    def ranked(self, group: LayerGroup, place: int, layers: int) -> tuple[Evictable, int]:
        index, layout = self.members.groups.index(group), self.layout
        tokens = self._next_step().evictable(index, place, layers)
        return tokens, tokens.ranks.shape[0] * (layout.held(self.row(group)) - layout.budget)

    def evict(self, group: LayerGroup, tokens: Evictable, gone: mx.array) -> None:
        self._next_step().evict(self.members.groups.index(group), tokens, gone)

    def decide(self, group: LayerGroup) -> None:
        self._next_step().own_moves(self.members.groups.index(group))

    def change(self, old: LayerGroup, new: LayerGroup) -> None:
        self.members = self.members.with_group(old, new)
