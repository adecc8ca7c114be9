"""Scores of the live tokens of one cache, and what its scores see of attention: the last queries, or a second pass.

`Scoring` calls the score function with its inputs, and checks the result. An `Observation` holds the queries of the
last tokens of each row: those that the score uses, and as many more as a trim may drop, so that a trim drops them with
their tokens. A longer trim begins the observation of that row again, and so does a write without a call of `see`.

A `SecondPass` repeats the text of a prompt over a cache that holds all of it: the tokens that it attends to are needed
to reproduce the text (Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction"). Which
text is repeated, and when, is decided in `generation`.
B rows, Hq query heads, H KV heads, D head dim; H' is H where every head keeps its own tokens, else 1; n tokens, m
queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers, SlotBuffer
from mlx_kv.cache.checks import Count
from mlx_kv.cache.codecs import Planes
from mlx_kv.cache.eviction.allocation import BY_HEAD, Scope
from mlx_kv.cache.eviction.scores import (
    AttentionInputs,
    Keys,
    Part,
    Queries,
    Score,
    ScoredTokens,
    blocks,
    log_sums,
    products,
    take_tokens,
)
from mlx_kv.cache.eviction.slot_tokens import SlotTokens
from mlx_kv.cache.layout import Budget, Row
from mlx_kv.cache.protocol import Call

NOT_READ = -1.0  # the share of tokens without a second pass
SHORT = 8  # queries of a step of decoding, or of one that verifies drafts
PIECES = 32  # steps that are kept as they come
MIN_TRIM = 64  # at least so many queries are held beyond those of the score, for trims
Span = tuple[int, int]


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

    Attributes:
        by_head: whether each head keeps its own tokens.
        per_token: whether each token is scored only once.
    """

    def __init__(
        self,
        layout: Budget,
        score: Score,
        scope: Scope,
        rows: tuple[Row, ...],
        buffers: Buffers,
        kept: SlotTokens,
        observation: Observation | None = None,
        reread: Sequence[SecondPassShares | None] = (),
        layer: int = 0,
    ) -> None:
        self.layout, self._score, self.scope, self._layer = layout, score, scope, layer
        self.rows, self.buffers, self.kept, self._reread = rows, buffers, kept, reread
        self.by_head, self.per_token = scope in BY_HEAD, score.per_token
        self._observation = None if observation is None or len(observation.ends) != len(rows) else observation
        self._uneven = kept.dead is not None
        self._alike = not self._uneven and all(row == rows[0] for row in rows)
        if self._observation is not None:
            standing = [self._observation.standing(index) for index in range(len(rows))]
            self._alike = self._alike and all(one == standing[0] for one in standing)
        # By row; of all rows together by None.
        self._before_recent: dict[int | None, mx.array] = {}

    def check_finite(self, scores: mx.array) -> None:
        """Raises ValueError for scores that cannot be ranked."""
        if not mx.isfinite(scores).all().item():
            raise ValueError(f"the score {self._score.name} gave what is not a finite number: check it for NaN")

    def live(self, index: int) -> mx.array:
        """The present scores of all live slots of one row, (H', n)."""
        return self._with_known(index, self._new_scores(index, self.rows[index].end))[0]

    def evictable(self, index: int) -> mx.array:
        """The scores of the evictable slots of one row, (H', n - sinks - keep_recent)."""
        return self.before_recent(index)[:, self.layout.sinks : self.rows[index].end - self.layout.keep_recent]

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
        row = self.rows[index]
        return self._new_scores(which, row.end - self.layout.keep_recent if self.per_token else row.end)

    def set_heads(self, index: int, scores: mx.array) -> None:
        """Sets the scores of all heads, (B or 1, all heads, n), from which those of this cache follow."""
        which = self._which(index)
        self._before_recent[which] = self._with_known(which, scores)

    def _which(self, index: int) -> int | None:
        return None if self._alike else index

    def _known(self, index: int | None) -> mx.array | None:
        """The scores of tokens before the cut that are not computed again, (B or 1, H', cut); None where all are."""
        known, row = self.kept.scores, self.rows[index or 0]
        if not self.per_token or row.evicted <= 0 or known is None:
            return None
        known = known[..., : self.layout.cut_of(row)]
        return known if index is None else known[index : index + 1]

    def _with_known(self, index: int | None, scores: mx.array) -> mx.array:
        """Known scores, and after them new ones of all heads, (B or 1, H', n)."""
        if not self.by_head:
            scores = scores.mean(axis=1, keepdims=True)
        known = self._known(index)
        return scores if known is None else mx.concatenate([known, scores], axis=2)

    def _new_scores(self, index: int | None, last: int) -> mx.array:
        """The scores of the slots up to `last` of one row, or of all rows, that are not known yet: (B or 1, H, n).

        Where heads keep different numbers of tokens, each is scored alone, and dead slots score 0.
        """
        first = 0 if self._known(index) is None else self.layout.cut_of(self.rows[index or 0])
        which = range(len(self.rows)) if index is None else [index]
        live = [self.kept.live_positions(self.layout, self.rows[i], i) for i in which]
        positions = mx.stack([line[:, first:last] for line in live])  # (B or 1, H', n)
        row = self.rows[index or 0]
        if index is not None and row.evicted > 0 and first == 0 and self.kept.dead is not None:
            gaps: list[int] = self.kept.dead[index].tolist()  # type: ignore[assignment]
            ends = [(self.layout.cut_of(row) - gap, self.layout.cut_of(row)) for gap in gaps]
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

        read = [tuple([own(plane[index : index + 1]) for plane in buffer.planes]) for buffer in self.buffers]
        attention = of_head(self._attention(index, positions), head, positions.shape[1], own)
        scores = self._call(lambda buffer: read[buffer is self.buffers[1]], own(positions), attention, head)
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
            return lambda which: buffer.decode(tuple([take_tokens(plane, which) for plane in planes(buffer)]), head)

        # Lazy: where a score reads parts, these whole arrays are never evaluated.
        keys, values = (buffer.decode(planes(buffer), head) for buffer in self.buffers)
        tokens = ScoredTokens(
            keys=keys,
            values=values,
            positions=positions,
            key_part=part(self.buffers[0]),
            value_part=part(self.buffers[1]),
            layer=self._layer,
            **attention,
        )
        scores = self._score.function(tokens)
        shape = keys.shape[:3]
        if not isinstance(scores, mx.array) or scores.shape != shape or scores.dtype != mx.float32:
            got = f"{scores.shape} of {scores.dtype}" if isinstance(scores, mx.array) else type(scores).__name__
            raise ValueError(
                f"the score {self._score.name} gave {got}, expected an mx.array {shape} of float32: one number "
                "for each row, head and token"
            )
        return scores

    def _attention(self, index: int | None, positions: mx.array) -> dict[str, Any]:
        """Fields of `ScoredTokens`: the attention over the tokens of one row, or of all; arbitrary for dead slots.

        Args:
            positions: (B, H', n), of the tokens that are scored.
        """
        which = range(len(self.rows)) if index is None else [index]
        fields: dict[str, Any] = {}
        if self._score.wants is not None and self._score.wants.reread:
            unread = mx.full((self.buffers[0].planes[0].shape[1], positions.shape[2]), NOT_READ)
            reread = [self._reread[i] if self._reread else None for i in which]
            received = [unread if shares is None else shares.at(positions[at]) for at, shares in enumerate(reread)]
            fields["reread"] = mx.stack(received)
        if self._observation is not None and (last := self._observation.last_queries(index)) is not None:
            fields |= {"queries": last.queries, "query_positions": last.positions, "scale": last.scale}
            fields["attention_sinks"] = last.sinks
        return fields


def of_head(fields: dict[str, Any], head: int, heads: int, own: Callable[[mx.array], mx.array]) -> dict[str, Any]:
    """The same fields of one of the KV heads, and of the query heads that attend to it.

    Args:
        own: returns the tokens that this head keeps, (1, 1, m) of (1, H, n).
    """

    def group(x: mx.array, axis: int = 1) -> mx.array:
        return x.split(heads, axis=axis)[head]

    head_fields = dict(fields)
    if "reread" in fields:
        head_fields["reread"] = own(fields["reread"])
    if "queries" in fields:
        head_fields["queries"] = group(fields["queries"])
        sinks = fields["attention_sinks"]
        head_fields["attention_sinks"] = None if sinks is None else group(sinks, axis=0)
    return head_fields


# --- the last queries -------------------------------------------------------------------------------------------------


class Observation:
    """The last queries over one cache.

    Args:
        wants: what the score uses.
        keep_recent: tokens that a trim can drop in any case.
        rows: of the cache.

    Attributes:
        ends: by row, one past the position of the last query that was observed.
        recent: the queries that are held, which end there.
    """

    def __init__(self, wants: AttentionInputs, keep_recent: int, rows: int = 1) -> None:
        self.wants, self._keep_recent = wants, keep_recent
        self._limit = wants.queries + max(keep_recent, MIN_TRIM)  # queries of each row
        self.begin(rows)

    def begin(self, rows: int) -> None:
        """Begins again, with as many rows."""
        self.recent, self.ends = RecentQueries(rows), [0] * rows
        self.scale = 0.0
        self.sinks: mx.array | None = None

    def _like(self, rows: int) -> Observation:
        observation = Observation(self.wants, self._keep_recent, rows)
        observation.scale, observation.sinks = self.scale, self.sinks
        return observation

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in self.recent.arrays)

    def max_bytes(self, step: int = 1) -> ObservedBytes:
        """The bytes of each row, by the shapes of the first queries that were observed; 0 before there are any.

        Args:
            step: tokens of a step of decoding. The queries of `PIECES` steps and of one short chunk wait to be joined.
        """
        if not self.recent.pieces:
            return ObservedBytes()
        queries = self.recent.pieces[0].queries
        _, query_heads, _, dim = queries.shape
        waiting = SHORT + (PIECES * step if step <= SHORT else 0)
        return ObservedBytes(self._limit + waiting, query_heads * dim * queries.itemsize)

    def standing(self, row: int) -> tuple[int, int]:
        """What rows must have in common to be scored together."""
        return self.ends[row], self.recent.counts[row]

    def max_trim(self, row: int) -> int:
        """Tokens that can be trimmed without loss: as if they had never been observed."""
        count, end = self.recent.counts[row], self.ends[row]
        return end if count >= end else max(0, count - self.wants.queries)

    # --- new queries and trims ------------------------------------------------------------------------------------

    def see(self, call: Call, answer: mx.array, rows: Sequence[Row], counts: Sequence[int] | None) -> mx.array:
        """Observes the queries of a call; returns its answer, whose evaluation also computes what is kept of them.

        Args:
            answer: to the call, (B, Hq, S, Dv).
            rows: where they stand after the update.
            counts: how many of the queries are of tokens of each row, padding follows; None is all.
        """
        queries, ends = call.queries, [max(0, row.offset) for row in rows]
        new = queries.shape[2]
        if len(rows) != len(self.ends):
            self.begin(len(rows))
        if ends == self.ends:
            return answer  # another layer, which attends to the same tokens
        self.scale, self.sinks = call.scale, call.sinks
        # The columns of each row's own tokens: padding comes before them, and after `counts`.
        counted = zip(rows, (new,) * len(rows) if counts is None else counts, strict=True)
        spans = tuple([(min(count, max(0, count - row.offset)), count) for row, count in counted])
        for row, (end, (first, last)) in enumerate(zip(ends, spans, strict=True)):
            if self.ends[row] != end - (last - first):
                self._begin_row(row, end - (last - first))
        self.recent.pieces.append(Piece(queries, spans))
        self.ends = ends
        if new <= SHORT and len(self.recent.pieces) <= PIECES:
            return answer
        self.recent.shorten(self._limit)
        # Within the step, not later: else the queries of a whole chunk would stay until then.
        waiting: list[mx.array] = mx.depends([answer], self.recent.arrays)
        return waiting[0]

    def trim(self, rows: Sequence[Row]) -> None:
        """Drops the queries of tokens that were trimmed.

        Args:
            rows: where they stand now.
        """
        if len(rows) != len(self.ends):
            return
        for index, row in enumerate(rows):
            end = max(0, row.offset)
            if end < self.ends[index]:
                self.recent.drop_last(index, self.ends[index] - end)
                self.ends[index] = end

    def _begin_row(self, row: int, position: int) -> None:
        """Begins the observation of one row, at a position."""
        self.recent.drop_last(row, self.recent.counts[row])
        self.ends[row] = position

    def settle(self, rows: Sequence[Row]) -> None:
        """Begins rows again to which tokens were written without a call of `see`. Called before a compaction."""
        if len(rows) != len(self.ends):
            self.begin(len(rows))
        for index, row in enumerate(rows):
            if self.ends[index] != (end := max(0, row.offset)):
                self._begin_row(index, end)
        self.recent.shorten(self._limit)
        mx.eval(self.recent.arrays)

    def last_queries(self, row: int | None) -> Queries | None:
        """The last `wants.queries` of a row, or of all rows, as far as they are held; None where there are none.

        The position of each column, (B, m), is -1 where there is no query.
        """
        of = self if row is None else self.of_rows([row])
        if (joined := of.recent.join(self.wants.queries)) is None:
            return None
        columns = mx.arange(joined.queries.shape[2])[None] - joined.queries.shape[2]
        is_query = columns >= -mx.array(joined.counts)[:, None]
        positions = mx.where(is_query, columns + mx.array(of.ends)[:, None], -1)
        return Queries(joined.queries, positions, of.scale, of.sinks)

    # --- rows and states --------------------------------------------------------------------------------------------

    def copy(self) -> Observation:
        """A copy; arrays are shared, and never changed in place."""
        copied = self._like(len(self.ends))
        copied.recent, copied.ends = RecentQueries(self.recent.rows, self.recent.pieces), list(self.ends)
        return copied

    def of_rows(self, chosen: Sequence[int]) -> Observation:
        """Copies of some rows, in this order."""
        selected = self._like(len(chosen))
        if max(chosen) < len(self.ends):  # else rows that have just begun
            selected.recent, selected.ends = self.recent.of_rows(chosen), [self.ends[row] for row in chosen]
        return selected

    def join(self, rows: int, other: Observation, more: int) -> Observation:
        """These rows, `rows` of them, and after them copies of `more` others."""
        ours = self if len(self.ends) == rows else self._like(rows)
        theirs = other if len(other.ends) == more else other._like(more)
        joined = (ours if ours.scale else theirs)._like(rows + more)
        joined.recent, joined.ends = ours.recent.with_rows_of(theirs.recent), ours.ends + theirs.ends
        return joined

    def compute(self) -> Observation:
        """Starts computing the arrays: rows may come and go often before they are used, and build a long graph."""
        if arrays := self.recent.arrays:
            mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
        return self

    def state(self) -> ObservedState | None:
        """The state to resume from; None where no query is held."""
        if (joined := self.recent.join()) is None:
            return None
        rows = [(end - count, end, count, 0) for end, count in zip(self.ends, joined.counts, strict=True)]
        return ObservedState(rows, self.scale, self.sinks, joined.queries)

    def resume(self, state: Sequence[Any] | None, rows: int) -> None:
        """Continues from the state of an observation of so many rows; None is one that observed nothing.

        Args:
            state: an `ObservedState`, or a list of the same.
        """
        self.begin(rows)
        if state is None:
            return
        observed = ObservedState(*state)
        self.scale, self.sinks, self.ends = observed.scale, observed.sinks, [row[1] for row in observed.rows]
        if observed.queries is not None:
            width = observed.queries.shape[2]
            spans = tuple([(width - row[2], width) for row in observed.rows])
            self.recent = RecentQueries(rows, [Piece(observed.queries, spans)])


class Piece(NamedTuple):
    """Some queries of every row.

    Attributes:
        queries: (B, Hq, s, D).
        spans: the columns [first, last) of each row.
    """

    queries: mx.array
    spans: tuple[Span, ...]


class JoinedQueries(NamedTuple):
    """Queries of all rows that end in the same column.

    Attributes:
        queries: (B, Hq, m, D).
        counts: columns of each row, its last ones.
    """

    queries: mx.array
    counts: tuple[int, ...]


class RecentQueries:
    """The last queries of B rows, of which the newest can be dropped.

    Attributes:
        pieces: the oldest first.
    """

    def __init__(self, rows: int = 1, pieces: Sequence[Piece] = ()) -> None:
        self.rows, self.pieces = rows, list(pieces)

    @property
    def counts(self) -> list[int]:
        """Queries that are held of each row."""
        return [sum([piece.spans[row][1] - piece.spans[row][0] for piece in self.pieces]) for row in range(self.rows)]

    @property
    def arrays(self) -> list[mx.array]:
        return [piece.queries for piece in self.pieces]

    def drop_last(self, row: int, count: int) -> None:
        """Drops the last `count` queries of one row, or as many as there are."""
        for index in range(len(self.pieces) - 1, -1, -1):
            piece = self.pieces[index]
            first, last = piece.spans[row]
            dropped = min(count, last - first)
            spans = (*piece.spans[:row], (first, last - dropped), *piece.spans[row + 1 :])
            self.pieces[index] = piece._replace(spans=spans)
            count -= dropped
        self.pieces = [piece for piece in self.pieces if any(first < last for first, last in piece.spans)]

    def join(self, limit: int | None = None) -> JoinedQueries | None:
        """All queries, or the last `limit` of each row; None where there are none. Never a part of a larger array."""
        counts_before = self.counts
        counts = tuple([count if limit is None else min(count, limit) for count in counts_before])
        width = max(counts)
        if not width:
            return None
        skipped = [count - kept for count, kept in zip(counts_before, counts, strict=True)]
        parts, at, cut = list[mx.array](), 0, False
        columns = [list[int]() for _ in counts]  # of each row, among those of all parts side by side
        for piece in self.pieces:
            passed = [min(skip, last - first) for skip, (first, last) in zip(skipped, piece.spans, strict=True)]
            skipped = [skip - gone for skip, gone in zip(skipped, passed, strict=True)]
            spans = [(first + gone, last) for gone, (first, last) in zip(passed, piece.spans, strict=True)]
            if not (used := [span for span in spans if span[0] < span[1]]):
                continue
            low, high = min(first for first, _ in used), max(last for _, last in used)
            parts.append(piece.queries[:, :, low:high])
            cut = high - low < piece.queries.shape[2]
            for row, (first, last) in enumerate(spans):
                columns[row].extend(range(at + first - low, at + last - low))
            at += high - low
        queries = mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
        if width < at or any(line != list(range(at - len(line), at)) for line in columns):
            index = mx.array([[0] * (width - len(line)) + line for line in columns])[:, None, :, None]  # (B, 1, m, 1)
            shape = (*queries.shape[:2], width, queries.shape[3])
            queries = mx.take_along_axis(queries, mx.broadcast_to(index, shape), axis=2)
        elif len(parts) == 1 and cut:
            queries = mx.take(queries, mx.arange(width), axis=2)  # in memory of its own
        return JoinedQueries(queries, counts)

    def shorten(self, limit: int) -> None:
        """Joins all queries into one piece, the last `limit` of each row."""
        if (joined := self.join(limit)) is not None:
            width = joined.queries.shape[2]
            self.pieces = [Piece(joined.queries, tuple([(width - count, width) for count in joined.counts]))]

    def of_rows(self, chosen: Sequence[int]) -> RecentQueries:
        """Copies of some rows, in this order."""
        index = mx.array(list(chosen))
        return RecentQueries(
            len(chosen),
            [Piece(queries[index], tuple([spans[row] for row in chosen])) for queries, spans in self.pieces],
        )

    def with_rows_of(self, other: RecentQueries) -> RecentQueries:
        """These rows, and after them another's."""
        parts = [(part.join(), part.rows) for part in (self, other)]
        pieces = [part for part, _ in parts if part is not None]
        if not pieces:
            return RecentQueries(self.rows + other.rows)
        width, like = max([part.queries.shape[2] for part in pieces]), pieces[0].queries
        queries, spans = list[mx.array](), list[Span]()
        for part, rows in parts:
            if part is None:
                part = JoinedQueries(mx.zeros((rows, like.shape[1], 0, like.shape[3]), like.dtype), (0,) * rows)
            padding = width - part.queries.shape[2]
            queries.append(mx.pad(part.queries, [(0, 0), (0, 0), (padding, 0), (0, 0)]))
            spans += [(width - count, width) for count in part.counts]
        return RecentQueries(self.rows + other.rows, [Piece(mx.concatenate(queries), tuple(spans))])


class ObservedState(NamedTuple):
    """The state of an `Observation`. Files hold it as a list of the same order.

    Attributes:
        rows: of each row the position of the first query that is held, one past that of the last, how many are held,
            and 0 (up to 0.3, how many of them had sums).
        scale: of the products; 0 where nothing was observed.
        sinks: logits of attention sinks, (Hq,), or None.
        queries: (B, Hq, m, D), the last of each row, which end in the same column, or None.
    """

    rows: list[tuple[Count, Count, Count, Count]]
    scale: float
    sinks: mx.array | None
    queries: mx.array | None


class ObservedBytes(NamedTuple):
    """The largest number of bytes that an observation of one row holds.

    Attributes:
        queries: how many queries are held.
        per_query: (Hq, D) in the dtype of the queries.
    """

    queries: int = 0
    per_query: int = 0

    def nbytes(self, slots: int) -> int:
        """Of a row with so many slots in use."""
        return min(slots, self.queries) * self.per_query


# --- a second pass ----------------------------------------------------------------------------------------------------


class SecondPassShares(NamedTuple):
    """The largest share of attention that tokens of one row received.

    Attributes:
        first: the position of the first of them.
        received: (H, m) of float32, the shares of this token and those that follow.
    """

    first: Count
    received: mx.array

    @property
    def last(self) -> int:
        """One past the position of the last of them."""
        return self.first + self.received.shape[1]

    def at(self, positions: mx.array) -> mx.array:
        """The shares of tokens at `positions`, (1 or H, n): (H, n), `NOT_READ` for those without a second pass."""
        count = self.received.shape[1]
        index = mx.broadcast_to(positions - self.first, (self.received.shape[0], positions.shape[1]))
        received = mx.take_along_axis(self.received, mx.clip(index, 0, count - 1), axis=1)
        return mx.where((index >= 0) & (index < count), received, NOT_READ)

    def between(self, first: int, last: int) -> SecondPassShares | None:
        """The shares of the tokens at positions [first, last) alone; None where there are none."""
        first, last = max(first, self.first), min(last, self.last)
        if first >= last:
            return None
        if (first, last) == (self.first, self.last):
            return self
        return SecondPassShares(first, self.received[:, first - self.first : last - self.first])

    def then(self, other: SecondPassShares) -> SecondPassShares:
        """The shares of these tokens and of others that follow; tokens between them, as answers, get `NOT_READ`."""
        before = self.between(self.first, other.first)
        if before is None:
            return other
        unread = mx.full((before.received.shape[0], other.first - before.last), NOT_READ)
        return SecondPassShares(before.first, mx.concatenate([before.received, unread, other.received], axis=1))


class SecondPass:
    """Observes the attention of the queries that repeat a chunk.

    Args:
        layout: the budget of the cache, whose rows stand alike and hold all tokens of the chunk in order.
        first, last: positions of the chunk.
        begin: the position from which on the repetition is written.
    """

    def __init__(self, layout: Budget, first: int, last: int, begin: int) -> None:
        self._first, self._last, self._begin = first, last, begin
        self._sinks = min(layout.sinks, first)
        self._largest: mx.array | None = None  # (B, H, m)

    @property
    def shares(self) -> tuple[SecondPassShares, ...]:
        """What the chunk has received, by row; nothing before anything was repeated."""
        return () if self._largest is None else tuple([SecondPassShares(self._first, x) for x in self._largest])

    def attend(self, call: Call, row: Row, keys: SlotBuffer) -> mx.array:
        """(B, Hq, S, Dv): the answer to the call, which is observed.

        Args:
            row: where all rows stand after the update.
            keys: the buffer of the keys.
        """
        ranges = (row.start + self._first, row.start + self._last), (row.start + self._begin, row.end)
        seen = keys.decode(keys.read(((0, self._sinks), *ranges) if self._sinks else ranges))
        chunk = slice(self._sinks, self._sinks + self._last - self._first)
        largest = largest_shares(call.queries, seen, call.scale, chunk, call.sinks)
        self._largest = largest if self._largest is None else mx.maximum(self._largest, largest)
        mx.eval(self._largest)
        return call.forward()


def largest_shares(
    queries: mx.array, keys: mx.array, scale: float, chosen: slice, sinks: mx.array | None = None
) -> mx.array:
    """The largest share of attention that each of some tokens gets, over queries and the heads of a group: (B, H, m).

    Args:
        queries: (B, H * G, S, D), of the last S of the keys' tokens: each sees its own and those before.
        keys: (B, H, N, D).
        chosen: the tokens that shares are returned of.
        sinks: (H * G,), logits that shares are divided by beside those of tokens, where the model has them.
    """
    rows, count, total = keys.shape[0], queries.shape[2], keys.shape[2]
    own_keys = Keys(keys.shape, lambda which: keys[:, :, which], mx.arange(total)[None, None])
    positions = mx.broadcast_to(mx.arange(total - count, total), (rows, count))
    every = Queries(queries, positions, scale, sinks)
    largest: mx.array | None = None
    for first, last in blocks(every, own_keys):
        logits = products(every.columns(first, last), own_keys)  # (B, H, G, block, N)
        shares = (logits[..., chosen] - log_sums(logits, sinks)[..., None]).max(axis=(2, 3))  # their logarithms
        largest = shares if largest is None else mx.maximum(largest, shares)
        mx.eval(largest)
    assert largest is not None, "a pass has queries"
    return mx.exp(largest)
