"""What the live tokens of one cache are worth, where it stands now.

Decides which tokens a score is asked for and what it is given of them, and checks what it says. Which tokens go is
decided elsewhere.
B rows, Hq query heads, H KV heads; H' is H where every head keeps its own tokens, else 1; n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.cache.buffers import SlotBuffer
from mlx_kv.cache.codecs import Planes
from mlx_kv.cache.eviction.allocation import BY_HEAD, Granularity
from mlx_kv.cache.eviction.kept_tokens import KeptTokens
from mlx_kv.cache.eviction.observed.observation import Observation
from mlx_kv.cache.eviction.rereading import NOT_READ, Reread
from mlx_kv.cache.eviction.scores import Score
from mlx_kv.cache.eviction.scores.blocks import some
from mlx_kv.cache.eviction.scores.tokens import Part, QueryMoments, ScoredTokens
from mlx_kv.cache.eviction.weights import Keys, stored_keys
from mlx_kv.cache.layout import Budget, Row


class Scoring:
    """Scores of one cache's tokens; what is asked of rows that all stand alike is worked out once for all of them.

    Args:
        layout, score, granularity: the evictor's.
        rows: where each row stands.
        buffers: of keys and of values.
        kept: what is known of the tokens before the cut.
        observation: of the attention over them, if the score wants any; it is settled.
        reread: by row, what tokens received when their text was read once more; nothing where that is not wanted.
        layer: of the model's layers of full attention.
    """

    def __init__(
        self,
        layout: Budget,
        score: Score,
        granularity: Granularity,
        rows: Sequence[Row],
        buffers: Sequence[SlotBuffer],
        kept: KeptTokens,
        observation: Observation | None = None,
        reread: Sequence[Reread | None] = (),
        layer: int = 0,
    ) -> None:
        self._layout, self._score, self._granularity = layout, score, granularity
        self._rows, self._buffers, self._kept, self._reread = rows, buffers, kept, reread
        self._observation = None if observation is None or len(observation.ends) != len(rows) else observation
        self._layer, self._uneven = layer, kept.dead is not None
        self._alike = not self._uneven and all(row == rows[0] for row in rows)
        if self._observation is not None:
            seen = [self._observation.standing(index) for index in range(len(rows))]
            self._alike = self._alike and all(one == seen[0] for one in seen)
        self._fields: dict[int | None, dict[str, Any]] = {}  # of what was seen, by row as the next two
        self._before_recent: dict[int | None, mx.array] = {}  # by row; those of all rows by None
        self._own: dict[int | None, mx.array] = {}  # what the score said of the heads here, by the same

    def live(self, index: int) -> mx.array:
        """The scores of all live slots of one row, (H', n), as the score sees them now."""
        row = self._rows[index]
        first = 0 if self._known(index) is None else self._layout.cut_of(row)
        return self._with_known(index, self._asked(index, first, row.end))[0]

    def evictable(self, index: int) -> mx.array:
        """The scores of the evictable slots of one row, (H', n - sinks - keep_recent)."""
        return self.before_recent(index)[:, self._layout.sinks : self._rows[index].end - self._layout.keep_recent]

    def standardised(self, index: int) -> mx.array:
        """The scores of the evictable slots of one row, with mean 0 and deviation 1 in each head.

        Layers with large norms would decide alone otherwise.
        """
        scores = self.evictable(index)
        centred = scores - scores.mean(axis=-1, keepdims=True)
        return centred / mx.maximum(scores.std(axis=-1, keepdims=True), 1e-12)

    def before_recent(self, index: int) -> mx.array:
        """The scores of one row from slot 0 at least up to its recent block, (H', n - keep_recent or more)."""
        which = self._which(index)
        if which not in self._before_recent:
            self._before_recent[which] = self._with_known(which, self._said(which))
        return self._before_recent[which][index if self._alike else 0]

    def own(self, index: int) -> mx.array | None:
        """What the score says of the heads here, (B or 1, H, n), as much as it must be asked for the scores of a row.

        None where those are known.
        """
        which = self._which(index)
        if which in self._before_recent:
            return None
        if which not in self._own:
            self._own[which] = self._said(which)
        return self._own[which]

    def hear(self, index: int, scores: mx.array) -> None:
        """Takes what the score says of all heads, these and others, in the place of what `own` gave."""
        which = self._which(index)
        self._before_recent[which] = self._with_known(which, scores)
        self._own.pop(which, None)

    def _which(self, index: int) -> int | None:
        return None if self._alike else index

    def _said(self, index: int | None) -> mx.array:
        """What the score says of the tokens of one row, or of all, whose scores are not known yet."""
        row = self._rows[index or 0]
        if not self._score.per_token:
            return self._asked(index, 0, row.end)
        return self._asked(
            index, 0 if self._known(index) is None else self._layout.cut_of(row), row.end - self._layout.keep_recent
        )

    def _known(self, index: int | None) -> mx.array | None:
        """The scores of tokens before the cut where they need not be asked for again, (B or 1, H', cut)."""
        known, row = self._kept.scores, self._rows[index or 0]
        if not self._score.per_token or row.evicted <= 0 or known is None:
            return None
        known = known[..., : self._layout.cut_of(row)]
        return known if index is None else known[index : index + 1]

    def _with_known(self, index: int | None, said: mx.array) -> mx.array:
        """The combined scores of what the score said, after those that are known."""
        known, fresh = self._known(index), self._combined(said)
        return fresh if known is None else mx.concatenate([known, fresh], axis=2)

    def _combined(self, scores: mx.array) -> mx.array:
        """(B, H', n) of (B, H, n)."""
        return scores if self._granularity in BY_HEAD else scores.mean(axis=1, keepdims=True)

    def _asked(self, index: int | None, first: int, last: int) -> mx.array:
        """What the score says of slots [first, last) of one row or, as (B, H, n), of all; it must be of that shape.

        Where heads keep different numbers of tokens, it is asked of each alone, and 0 stands for slots without one.
        """
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

        return self._said_of(planes, positions, self._seen(index, positions))

    def _of_head(self, index: int, head: int, end: int, cut: int, positions: mx.array) -> mx.array:
        """What the score says of the slots of one head: (1, 1, n), with 0 for those in [end, cut).

        Args:
            positions: (1, H, n), of all of them.
        """

        def own(x: mx.array) -> mx.array:
            line = x[:1, head : head + 1, : positions.shape[2]]
            return mx.concatenate([line[:, :, :end], line[:, :, cut:]], axis=2)

        read = [tuple([own(plane[index : index + 1]) for plane in buffer.planes]) for buffer in self._buffers]
        seen = fields_of_head(self._seen(index, positions), head, positions.shape[1], own)
        scores = self._said_of(lambda buffer: read[buffer is self._buffers[1]], own(positions), seen, head)
        return mx.concatenate([scores[..., :end], mx.zeros((1, 1, cut - end)), scores[..., end:]], axis=2)

    def _said_of(
        self,
        planes: Callable[[SlotBuffer], Planes],
        positions: mx.array,
        seen: dict[str, Any],
        head: int | None = None,
    ) -> mx.array:
        """What the score says of those tokens of which `planes` gives the planes, (B, H, n) of float32.

        Args:
            seen: the fields that say what was seen of attention.
            head: whose planes these are; None is those of all.
        """

        def part(buffer: SlotBuffer) -> Part:
            return lambda which: buffer.decode(tuple([some(plane, which) for plane in planes(buffer)]), head)

        # Lazy: a score that reads parts never has all of them decoded, since these whole arrays stay unevaluated then.
        keys, values = (buffer.decode(planes(buffer), head) for buffer in self._buffers)
        key_part, value_part = map(part, self._buffers)
        tokens = ScoredTokens(
            keys=keys,
            values=values,
            positions=positions,
            key_part=key_part,
            value_part=value_part,
            layer=self._layer,
            **seen,
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

    def _seen(self, index: int | None, positions: mx.array) -> dict[str, Any]:
        """The fields of `ScoredTokens` that say what was seen of the attention over the tokens of one row, or of all.

        Where heads keep different numbers of tokens, those of slots without one say anything.

        Args:
            positions: (B, H', n), of those that are scored.
        """
        which = range(len(self._rows)) if index is None else [index]
        seen: dict[str, Any] = {}
        if self._score.wants is not None and self._score.wants.reread:
            unread = mx.full((self._buffers[0].planes[0].shape[1], positions.shape[2]), NOT_READ)
            reread = [self._reread[i] if self._reread else None for i in which]
            found = [unread if own is None else own.at(positions[at]) for at, own in enumerate(reread)]
            seen["reread"] = mx.stack(found)
        if self._observation is None:
            return seen
        if index not in self._fields:
            row = self._rows[index or 0]
            lines = [self._kept.live_positions(self._layout, row, i) for i in which]
            if self._uneven:
                lines = [
                    mx.where(self._kept.alive(self._layout, row, i, row.end), line, -1)
                    for i, line in zip(which, lines, strict=True)
                ]
            keys = stored_keys(self._buffers[0], index, row.end, mx.stack(lines))
            self._fields[index] = seen_fields(self._observation, index, keys, row.offset)
        return seen | self._fields[index]


# --- what was seen of attention, as a score is given it ---------------------------------------------------------------


def seen_fields(observation: Observation, row: int | None, keys: Keys, offset: int) -> dict[str, Any]:
    """What was seen of attention, as fields of `ScoredTokens`: of one row, or of all, which stand alike then.

    Args:
        keys: the tokens, of which n lie in the first slots.
        offset: the next position.
    """
    seen: dict[str, Any] = {}
    if (last := observation.last_queries(row)) is not None:
        seen |= {"queries": last.queries, "query_positions": last.positions, "scale": last.scale}
        seen["attention_sinks"] = last.sinks
    if (received := observation.received_by(row, keys)) is not None:
        seen["received"], seen["observers"] = received
    if (moments := observation.all_moments(row)) is not None and observation.turning is not None:
        ahead = observation.turning.ahead(offset)
        seen |= {"moments": QueryMoments(moments.mean, moments.covariance(), ahead), "scale": observation.scale}
    return seen


def fields_of_head(seen: dict[str, Any], head: int, heads: int, own: Callable[[mx.array], mx.array]) -> dict[str, Any]:
    """The fields of `seen_fields`, of one of the KV heads and of those query heads that look at it.

    Args:
        own: the tokens that this head keeps, (1, 1, m) of (1, H, n).
    """

    def asked(x: mx.array, axis: int = 1) -> mx.array:
        return x.split(heads, axis=axis)[head]

    made = dict(seen)
    for name in ("received", "observers", "reread"):
        if name in seen:
            made[name] = own(mx.broadcast_to(seen[name], (1, heads, seen[name].shape[2])))
    if "queries" in seen:
        made["queries"] = asked(seen["queries"])
        sinks = seen["attention_sinks"]
        made["attention_sinks"] = None if sinks is None else asked(sinks, axis=0)
    if "moments" in seen:
        mean, covariance, ahead = seen["moments"]
        made["moments"] = QueryMoments(asked(mean), asked(covariance), ahead)
    return made
