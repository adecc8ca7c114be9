"""Scores of the live tokens of one cache, as it stands: the inputs of the score function, and checks of its result.

B rows, Hq query heads, H KV heads; H' is H where every head keeps its own tokens, else 1; n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.cache.buffers import SlotBuffer
from mlx_kv.cache.codecs import Planes
from mlx_kv.cache.eviction.allocation import BY_HEAD, Scope
from mlx_kv.cache.eviction.kept_tokens import KeptTokens
from mlx_kv.cache.eviction.observation import Observation
from mlx_kv.cache.eviction.scores import Score
from mlx_kv.cache.eviction.scores.tokens import Part, QueryMoments, ScoredTokens, some
from mlx_kv.cache.eviction.two_pass import NOT_READ, SecondPassShares
from mlx_kv.cache.eviction.weights import Keys, stored_keys
from mlx_kv.cache.layout import Budget, Row


class Scoring:
    """Scores of one cache's tokens; those of rows that all stand alike are computed together.

    Args:
        layout, score, scope: of the evictor.
        rows: where each row stands.
        buffers: of keys and of values.
        kept: positions and scores of the tokens before the cut.
        observation: of the attention over them, if the score uses any; it is settled.
        reread: by row, what tokens received in a second pass; empty where there was none.
        layer: of the model's layers of full attention.
    """

    def __init__(
        self,
        layout: Budget,
        score: Score,
        scope: Scope,
        rows: Sequence[Row],
        buffers: Sequence[SlotBuffer],
        kept: KeptTokens,
        observation: Observation | None = None,
        reread: Sequence[SecondPassShares | None] = (),
        layer: int = 0,
    ) -> None:
        self._layout, self._score, self._by_head, self._layer = layout, score, scope in BY_HEAD, layer
        self._rows, self._buffers, self._kept, self._reread = rows, buffers, kept, reread
        self._observation = None if observation is None or len(observation.ends) != len(rows) else observation
        self._uneven = kept.dead is not None
        self._alike = not self._uneven and all(row == rows[0] for row in rows)
        if self._observation is not None:
            standing = [self._observation.standing(index) for index in range(len(rows))]
            self._alike = self._alike and all(one == standing[0] for one in standing)
        # By row; of all rows together by None.
        self._observed: dict[int | None, dict[str, Any]] = {}  # fields of `ScoredTokens`
        self._before_recent: dict[int | None, mx.array] = {}

    @property
    def per_token(self) -> bool:
        """Whether each token is scored only once."""
        return self._score.per_token

    def check_finite(self, scores: mx.array) -> None:
        """Raises ValueError for scores that cannot be ranked."""
        if not mx.isfinite(scores).all().item():
            raise ValueError(f"the score {self._score.name} gave what is not a finite number: check it for NaN")

    def live(self, index: int) -> mx.array:
        """The present scores of all live slots of one row, (H', n)."""
        return self._with_known(index, self._new_scores(index, self._rows[index].end))[0]

    def evictable(self, index: int) -> mx.array:
        """The scores of the evictable slots of one row, (H', n - sinks - keep_recent)."""
        return self.before_recent(index)[:, self._layout.sinks : self._rows[index].end - self._layout.keep_recent]

    def standardised(self, index: int) -> mx.array:
        """The scores of the evictable slots of one row, with mean 0 and deviation 1 in each head.

        Otherwise layers with large norms would decide alone.
        """
        scores = self.evictable(index)
        centred = scores - scores.mean(axis=-1, keepdims=True)
        return centred / mx.maximum(scores.std(axis=-1, keepdims=True), 1e-12)

    def before_recent(self, index: int) -> mx.array:
        """The scores of one row from slot 0 at least up to its recent block, (H', n - keep_recent or more)."""
        if (of_heads := self.of_heads(index)) is not None:
            self.set_heads(index, of_heads)
        return self._before_recent[self._which(index)][index if self._alike else 0]

    def of_heads(self, index: int) -> mx.array | None:
        """The new scores of the heads here, (B or 1, H, n), that `before_recent` needs; None where it has them."""
        which = self._which(index)
        if which in self._before_recent:
            return None
        row = self._rows[index]
        return self._new_scores(which, row.end - self._layout.keep_recent if self.per_token else row.end)

    def set_heads(self, index: int, scores: mx.array) -> None:
        """Sets the scores of all heads, (B or 1, all heads, n), from which those of this cache follow."""
        which = self._which(index)
        self._before_recent[which] = self._with_known(which, scores)

    def _which(self, index: int) -> int | None:
        return None if self._alike else index

    def _known(self, index: int | None) -> mx.array | None:
        """The scores of tokens before the cut that are not computed again, (B or 1, H', cut); None where all are."""
        known, row = self._kept.scores, self._rows[index or 0]
        if not self._score.per_token or row.evicted <= 0 or known is None:
            return None
        known = known[..., : self._layout.cut_of(row)]
        return known if index is None else known[index : index + 1]

    def _with_known(self, index: int | None, scores: mx.array) -> mx.array:
        """Known scores, and after them new ones of all heads, (B or 1, H', n)."""
        if not self._by_head:
            scores = scores.mean(axis=1, keepdims=True)
        known = self._known(index)
        return scores if known is None else mx.concatenate([known, scores], axis=2)

    def _new_scores(self, index: int | None, last: int) -> mx.array:
        """The scores of the slots up to `last` of one row, or of all rows, that are not known yet: (B or 1, H, n).

        Where heads keep different numbers of tokens, each is scored alone, and dead slots score 0.
        """
        first = 0 if self._known(index) is None else self._layout.cut_of(self._rows[index or 0])
        which = range(len(self._rows)) if index is None else [index]
        live = [self._kept.live_positions(self._layout, self._rows[i], i) for i in which]
        positions = mx.stack([line[:, first:last] for line in live])  # (B or 1, H', n)
        row = self._rows[index or 0]
        if index is not None and row.evicted > 0 and first == 0 and self._kept.dead is not None:
            gaps: list[int] = self._kept.dead[index].tolist()  # type: ignore[assignment]
            ends = [(self._layout.cut_of(row) - gap, self._layout.cut_of(row)) for gap in gaps]
            return mx.concatenate([self._of_head(index, h, *ends[h], positions) for h in range(len(ends))], axis=1)

        def planes(buffer: SlotBuffer) -> Planes:
            read = buffer.read(((first, last),))
            return read if index is None else tuple([plane[index : index + 1] for plane in read])

        return self._call(planes, positions, self._attention(index, positions))

    def _of_head(self, index: int, head: int, end: int, cut: int, positions: mx.array) -> mx.array:
        """The scores of the slots of one head, (1, 1, n); 0 of dead slots, [end, cut).

        Args:
            positions: (1, H, n), of all heads.
        """

        def own(x: mx.array) -> mx.array:
            line = x[:1, head : head + 1, : positions.shape[2]]
            return mx.concatenate([line[:, :, :end], line[:, :, cut:]], axis=2)

        read = [tuple([own(plane[index : index + 1]) for plane in buffer.planes]) for buffer in self._buffers]
        attention = of_head(self._attention(index, positions), head, positions.shape[1], own)
        scores = self._call(lambda buffer: read[buffer is self._buffers[1]], own(positions), attention, head)
        return mx.concatenate([scores[..., :end], mx.zeros((1, 1, cut - end)), scores[..., end:]], axis=2)

    def _call(
        self,
        planes: Callable[[SlotBuffer], Planes],
        positions: mx.array,
        attention: dict[str, Any],
        head: int | None = None,
    ) -> mx.array:
        """The result of the score function, (B, H, n) of float32.

        Args:
            planes: returns the planes of the tokens.
            attention: fields of `ScoredTokens`.
            head: of the planes; None where they are of all heads.
        """

        def part(buffer: SlotBuffer) -> Part:
            return lambda which: buffer.decode(tuple([some(plane, which) for plane in planes(buffer)]), head)

        # Lazy: where a score reads parts, these whole arrays are never evaluated.
        keys, values = (buffer.decode(planes(buffer), head) for buffer in self._buffers)
        tokens = ScoredTokens(
            keys=keys,
            values=values,
            positions=positions,
            key_part=part(self._buffers[0]),
            value_part=part(self._buffers[1]),
            layer=self._layer,
            **attention,
        )
        scores = self._score.function(tokens)
        wanted = keys.shape[:3]
        if not isinstance(scores, mx.array) or scores.shape != wanted or scores.dtype != mx.float32:
            got = f"{scores.shape} of {scores.dtype}" if isinstance(scores, mx.array) else type(scores).__name__
            raise ValueError(
                f"the score {self._score.name} gave {got}, expected an mx.array {wanted} of float32: one number "
                "for each row, head and token"
            )
        return scores

    def _attention(self, index: int | None, positions: mx.array) -> dict[str, Any]:
        """Fields of `ScoredTokens`: the attention over the tokens of one row, or of all; arbitrary for dead slots.

        Args:
            positions: (B, H', n), of the tokens that are scored.
        """
        which = range(len(self._rows)) if index is None else [index]
        fields: dict[str, Any] = {}
        if self._score.wants is not None and self._score.wants.reread:
            unread = mx.full((self._buffers[0].planes[0].shape[1], positions.shape[2]), NOT_READ)
            reread = [self._reread[i] if self._reread else None for i in which]
            found = [unread if own is None else own.at(positions[at]) for at, own in enumerate(reread)]
            fields["reread"] = mx.stack(found)
        if self._observation is None:
            return fields
        if index not in self._observed:
            row = self._rows[index or 0]
            lines = mx.stack([self._kept.token_positions(self._layout, self._rows[i], i) for i in which])
            keys = stored_keys(self._buffers[0], index, row.end, lines)
            self._observed[index] = observed_fields(self._observation, index, keys, row.offset)
        return fields | self._observed[index]


def observed_fields(observation: Observation, row: int | None, keys: Keys, offset: int) -> dict[str, Any]:
    """Fields of `ScoredTokens` from observed attention: of one row, or of all rows, which stand alike.

    Args:
        keys: of the tokens in the first n slots.
        offset: the next position.
    """
    fields: dict[str, Any] = {}
    if (last := observation.last_queries(row)) is not None:
        fields |= {"queries": last.queries, "query_positions": last.positions, "scale": last.scale}
        fields["attention_sinks"] = last.sinks
    if (received := observation.received_by(row, keys)) is not None:
        fields["received"], fields["observers"] = received
    if (moments := observation.all_moments(row)) is not None and observation.rope is not None:
        ahead = observation.rope.ahead(offset)
        fields |= {"moments": QueryMoments(moments.mean, moments.covariance(), ahead), "scale": observation.scale}
    return fields


def of_head(fields: dict[str, Any], head: int, heads: int, own: Callable[[mx.array], mx.array]) -> dict[str, Any]:
    """The same fields of one of the KV heads, and of the query heads that attend to it.

    Args:
        own: returns the tokens that this head keeps, (1, 1, m) of (1, H, n).
    """

    def group(x: mx.array, axis: int = 1) -> mx.array:
        return x.split(heads, axis=axis)[head]

    made = dict(fields)
    for name in ("received", "observers", "reread"):
        if name in fields:
            made[name] = own(mx.broadcast_to(fields[name], (1, heads, fields[name].shape[2])))
    if "queries" in fields:
        made["queries"] = group(fields["queries"])
        sinks = fields["attention_sinks"]
        made["attention_sinks"] = None if sinks is None else group(sinks, axis=0)
    if "moments" in fields:
        mean, covariance, ahead = fields["moments"]
        made["moments"] = QueryMoments(group(mean), group(covariance), ahead)
    return made
