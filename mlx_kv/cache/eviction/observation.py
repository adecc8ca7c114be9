"""Observed attention: the queries over one cache, in step with its rows, for scores that use them.

Of each row, queries [since, end) were observed: those of all its tokens from `since` on. The last of them,
[first, end), are held as they are, as many as a trim can drop, so their contribution can be dropped with them. The
contribution of the queries before them, [since, first), is summed up and cannot be separated any more: a trim back to
before `first` begins the observation of that row again, there. So does a write without a call of `see`.

A query gives exp(product - its log-sum-exp) to a token. That is known before anything is evicted, so what it gave to
remaining tokens stays exact, whatever is evicted. Sums lie in the slots of their tokens, and move with them.
B rows, Hq query heads, H KV heads, D head dim; n slots, from the first on; m queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.cache.eviction.compaction import Moves
from mlx_kv.cache.eviction.kept_tokens import as_wide, joined_rows
from mlx_kv.cache.eviction.observed_queries import (
    FIRST,
    JoinedQueries,
    Moments,
    ObservedBytes,
    ObservedState,
    Piece,
    RecentQueries,
    Rope,
    joined_moments,
    moments_of,
)
from mlx_kv.cache.eviction.scores.tokens import AttentionInputs
from mlx_kv.cache.eviction.weights import Keys, Queries, blocks, log_sums, products, received_weights, weights
from mlx_kv.cache.layout import Row
from mlx_kv.cache.protocol import Call

SHORT = 8  # queries of a step of decoding, or of one that verifies drafts
PIECES = 32  # steps that are kept as they come
TAKEN_BACK = 64  # at least so many queries are held beyond those of the score, for trims


class Observation:
    """The attention over one cache, as far as its score uses it.

    Args:
        wants: what the score uses.
        keep_recent: tokens that a trim can drop in any case.
        rope: of the layer; without it there are no moments.
        rows: of the cache.

    Attributes:
        since, ends: by row, the first position that was observed, and one past the last.
        recent: the queries that are held.
        received: (B, H, n), what other queries gave to each slot; None where there are none.
        moments: of the same queries.
    """

    def __init__(self, wants: AttentionInputs, keep_recent: int, rope: Rope | None = None, rows: int = 1) -> None:
        self.wants, self.rope, self._keep_recent = wants, rope, keep_recent
        self._held = wants.queries + max(keep_recent, TAKEN_BACK)  # queries of each row
        self.begin(rows)

    def begin(self, rows: int) -> None:
        """Begins again, with as many rows."""
        self.recent = RecentQueries(rows)
        self.since, self.ends = [0] * rows, [0] * rows
        self.scale = 0.0
        self.sinks: mx.array | None = None
        self.received: mx.array | None = None
        self.moments: Moments | None = None

    def _like(self, rows: int) -> Observation:
        made = Observation(self.wants, self._keep_recent, self.rope, rows)
        made.scale, made.sinks = self.scale, self.sinks
        return made

    @property
    def needs_rope(self) -> bool:
        """Whether the RoPE of the layer is still to be set."""
        return self.wants.moments and self.rope is None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        moments = [] if self.moments is None else [self.moments.mean, self.moments.spread]
        return [*self.recent.arrays, *([] if self.received is None else [self.received]), *moments]

    def max_bytes(self, heads: int, step: int = 1) -> ObservedBytes:
        """The bytes of each row, by the shapes of the first queries that were observed; 0 before there are any.

        Args:
            heads: H.
            step: tokens of a step of decoding. The queries of `PIECES` steps and of one short chunk wait to be joined.
        """
        if not self.recent.pieces:
            return ObservedBytes()
        queries, received = self.recent.pieces[0].queries, self.wants.received  # (1, Hq, 1, D)
        _, query_heads, _, dim = queries.shape
        return ObservedBytes(
            self._held + SHORT + (PIECES * step if step <= SHORT else 0),
            query_heads * (dim * queries.itemsize + (4 if received else 0)),
            4 * heads if received else 0,
            4 * query_heads * dim * (1 + dim) if self.wants.moments else 0,
        )

    def standing(self, row: int) -> tuple[int, ...]:
        """What rows must have in common to be scored together."""
        counted = 0 if self.moments is None else self.moments.counts[row]
        return self.since[row], self.ends[row], self.recent.counts[row], counted

    def most_trim(self, row: int) -> int:
        """Tokens that can be trimmed without loss: as if they had never been observed."""
        held, end = self.recent.counts[row], self.ends[row]
        return end if held >= end else max(0, held - self.wants.queries)

    # --- new queries and trims ------------------------------------------------------------------------------------

    def see(
        self, call: Call, answer: mx.array, rows: Sequence[Row], counts: Sequence[int] | None, keys: Callable[[], Keys]
    ) -> mx.array:
        """Observes the queries of a call; returns its answer, whose evaluation also computes what is kept of them.

        Args:
            answer: to the call, (B, Hq, S, Dv).
            rows: where they stand after the update.
            counts: how many of the queries are of tokens of each row, padding follows; None is all.
            keys: returns the tokens that they attend to.
        """
        queries, ends = call.queries, [max(0, row.offset) for row in rows]
        new = queries.shape[2]
        if len(rows) != len(self.ends):
            self.begin(len(rows))
        if ends == self.ends:
            return answer  # another layer, which attends to the same tokens
        self.scale, self.sinks = call.scale, call.sinks
        spans = tuple([_span(row, new if counts is None else counts[i]) for i, row in enumerate(rows)])
        for row, (end, (first, last)) in enumerate(zip(ends, spans, strict=True)):
            if self.ends[row] != end - (last - first):
                self._begin_row(row, end - (last - first))
        self.recent.append(queries, spans)
        self.ends = ends
        if new <= SHORT and len(self.recent.pieces) <= PIECES:
            return answer
        self._join(keys)
        # Within the step, not later: while another graph reads the keys, the next write would copy all of them.
        waiting: list[mx.array] = mx.depends([answer], self.arrays)
        return waiting[0]

    def trimmed(self, rows: Sequence[Row]) -> None:
        """Drops the queries of tokens that were trimmed.

        Args:
            rows: where they stand now.
        """
        if len(rows) != len(self.ends):
            return
        held = self.recent.counts
        for index, row in enumerate(rows):
            end = max(0, row.offset)
            if end >= self.ends[index]:
                continue
            if end >= self.ends[index] - held[index]:
                self.recent.drop_last(index, self.ends[index] - end)
                self.ends[index] = end
            if end <= self.since[index] or end < self.ends[index]:
                self._begin_row(index, end)

    def _begin_row(self, row: int, position: int) -> None:
        """Begins the observation of one row, at a position."""
        self.recent.drop_last(row, self.recent.counts[row])
        self.since[row] = self.ends[row] = position
        if self.received is not None:
            kept = mx.array([float(index != row) for index in range(len(self.ends))])
            self.received = self.received * kept[:, None, None]
        if self.moments is not None:
            self.moments = self.moments.without(row)

    def settle(self, rows: Sequence[Row], keys: Callable[[], Keys]) -> None:
        """Computes and evaluates all that needs the present tokens. Called before some of them are evicted.

        Begins rows again to which tokens were written without a call of `see`.
        """
        if len(rows) != len(self.ends):
            self.begin(len(rows))
        for index, row in enumerate(rows):
            if self.ends[index] != (end := max(0, row.offset)):
                self._begin_row(index, end)
        if self.recent.pieces:
            self._join(keys)
            mx.eval(self.arrays)

    def _join(self, keys: Callable[[], Keys]) -> None:
        """Joins all queries into one piece, and sums up those that need not be held any more."""
        sums_up = self.wants.received or self.wants.moments
        queries = self.recent.joined(None if sums_up else self._held)
        if queries is None:
            return
        gone = max(0, queries.width - self._held)  # columns that are summed up
        if self.wants.received and (gone or queries.known != queries.counts):
            queries = self._sum_up_received(queries, gone, keys())
        if self.wants.moments and self.rope is not None and gone:
            self.moments = self._moments_with(queries.first_columns(gone), [end - self._held for end in self.ends])
        self.recent.hold(queries, self._held)

    def _sum_up_received(self, joined: JoinedQueries, gone: int, keys: Keys) -> JoinedQueries:
        """Computes the sums of all queries, and adds up what the first `gone` columns give."""
        queries = self._with_positions(joined)
        rows, heads, n, _ = keys.shape
        total = mx.zeros((rows, heads, n))
        columns, sums = mx.arange(joined.width)[None], list[mx.array]()
        unknown = [joined.width - count + known for count, known in zip(joined.counts, joined.known, strict=True)]
        is_known = columns < mx.array(unknown)[:, None]  # (B, m); columns that are no query count as known
        waited: list[mx.array] = []  # results of the previous block: one block is computed after the other
        for first, last in blocks(queries, keys):
            block = queries.columns(first, last)
            old = None if joined.sums is None else joined.sums[:, :, first:last]
            if first >= gone and last <= min(unknown) and old is not None:
                sums.append(old)
                continue
            if waited:
                block = block._replace(queries=mx.depends([block.queries], waited)[0])
            made = products(block, keys)
            found = log_sums(made, self.sinks)  # (B, H, g, m)
            if old is not None:
                found = mx.where(is_known[:, None, None, first:last], old.reshape(found.shape), found)
            if first < gone:
                counted = (block.positions >= 0) & (columns[:, first:last] < gone)
                total = total + weights(made, found, counted).sum(axis=3).mean(axis=2)
            sums.append(found.reshape(rows, -1, last - first))
            waited = [total] if first < gone else waited or [sums[-1]]
        if gone:
            self.received = total if self.received is None else _added(self.received, total)
        return joined._replace(sums=mx.concatenate(sums, axis=2), known=joined.counts)

    def _with_positions(self, joined: JoinedQueries) -> Queries:
        """Queries with the position of each column, (B, m); -1 where there is no query."""
        columns = mx.arange(joined.width)[None] - joined.width
        is_query = columns >= -mx.array(joined.counts)[:, None]
        positions = mx.where(is_query, columns + mx.array(self.ends)[:, None], -1)
        return Queries(joined.queries, positions, self.scale, self.sinks)

    def _moments_with(self, queries: JoinedQueries, ends: Sequence[int]) -> Moments:
        """The moments together with those of other queries, which end at positions `ends`."""
        assert self.rope is not None, "set before the first query"
        unrotated = self.rope.back(queries.queries, [end - queries.width for end in ends])
        left_out = [max(0, FIRST - (end - count)) for end, count in zip(ends, queries.counts, strict=True)]
        more = moments_of(unrotated, queries.counts, left_out)
        return more if self.moments is None else self.moments.with_more(more)

    # --- what scores use ------------------------------------------------------------------------------------------

    def last_queries(self, row: int | None) -> Queries | None:
        """The last `wants.queries` of a row, or of all rows, as far as they are held; None where there are none."""
        of = self._of(row)
        queries = of.recent.joined(self.wants.queries) if self.wants.queries else None
        return None if queries is None else of._with_positions(queries)

    def received_by(self, row: int | None, keys: Keys) -> tuple[mx.array, mx.array] | None:
        """What tokens received of all observed queries, in the mean over the query heads of a group: (B, H, n).

        And how many of the queries could see each, (B, 1 or H, n). None where no query was observed. Call `settle`
        first.
        """
        of = self._of(row)
        if not self.wants.received or of.since[0] == of.ends[0]:
            return None
        rows, heads, n, _ = keys.shape
        total = mx.zeros((rows, heads, n))
        if of.received is not None:
            total = _added(total, of.received[:, :, :n])
        if (joined := of.recent.joined()) is not None:
            assert joined.sums is not None, "settled before"
            total = total + received_weights(of._with_positions(joined), joined.sums, keys)
        observers = mx.maximum(of.ends[0] - mx.maximum(keys.positions, of.since[0]), 1)
        return total, observers

    def all_moments(self, row: int | None) -> Moments | None:
        """The moments of all observed queries; None where there are none."""
        of = self._of(row)
        if not self.wants.moments or self.rope is None:
            return None
        queries = of.recent.joined()
        moments = of.moments if queries is None else of._moments_with(queries, of.ends)
        return moments if moments is not None and all(moments.counts) else None

    def _of(self, row: int | None) -> Observation:
        return self if row is None else self.of_rows([row])

    # --- compactions, rows and states -----------------------------------------------------------------------------

    def moved(self, moves: Moves, ends: Sequence[int]) -> None:
        """Called after a compaction: moves what tokens received to their new slots.

        Args:
            moves: of slots, (B, 1 or H, m).
            ends: one past the last live slot of each row, after it.
        """
        if self.received is None:
            return
        rows, heads, n = self.received.shape
        received = self.received
        if moves.source.size:
            reached: int = mx.maximum(moves.source.max(), moves.target.max()).item()  # type: ignore[assignment]
            received = mx.pad(received, [(0, 0), (0, 0), (0, max(0, reached + 1 - n))])
            source, target = (mx.broadcast_to(x, (rows, heads, x.shape[2])) for x in moves)
            taken = mx.take_along_axis(received, source, axis=2)
            received = mx.put_along_axis(received, target, taken, axis=2)
        # Also where nothing moves, since only the last tokens were evicted: others come to their slots.
        live = mx.arange(received.shape[2]) < mx.array([max(0, end) for end in ends])[:, None, None]
        self.received = mx.where(live, received, 0)[:, :, : max(1, *ends)]
        mx.eval(self.received)

    def copied(self) -> Observation:
        """A copy; arrays are shared, and never changed in place."""
        made = self._like(len(self.ends))
        made.recent = RecentQueries(self.recent.rows, self.recent.pieces)
        made.since, made.ends = list(self.since), list(self.ends)
        made.received, made.moments = self.received, self.moments
        return made

    def of_rows(self, chosen: Sequence[int]) -> Observation:
        """Copies of some rows, in this order."""
        made = self._like(len(chosen))
        if max(chosen) >= len(self.ends):  # rows that have just begun
            return made
        made.recent = self.recent.of_rows(chosen)
        made.since, made.ends = ([line[row] for row in chosen] for line in (self.since, self.ends))
        made.received = None if self.received is None else self.received[mx.array(list(chosen))]
        made.moments = None if self.moments is None else self.moments.of_rows(chosen)
        return made

    def joined(self, rows: int, other: Observation, more: int) -> Observation:
        """These rows, `rows` of them, and after them copies of `more` others."""
        own = self if len(self.ends) == rows else self._like(rows)
        theirs = other if len(other.ends) == more else other._like(more)
        made = (own if own.scale else theirs)._like(rows + more)
        made.rope = self.rope or other.rope
        made.recent = own.recent.with_rows_of(theirs.recent)
        made.since, made.ends = own.since + theirs.since, own.ends + theirs.ends
        made.received = joined_rows(own.received, rows, theirs.received, more)
        made.moments = joined_moments(own.moments, rows, theirs.moments, more)
        return made

    def compute(self) -> Observation:
        """Starts computing the arrays: rows may come and go often before they are used, and build a long graph."""
        if arrays := self.arrays:
            mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
        return self

    def state(self) -> ObservedState | None:
        """The state to resume from; None where nothing was observed."""
        if self.since == self.ends:
            return None
        joined, none = self.recent.joined(), (0,) * len(self.ends)
        queries, sums, counts, known = (None, None, none, none) if joined is None else joined
        rows = [list(row) for row in zip(self.since, self.ends, counts, known, strict=True)]
        moments = (None, None, None) if self.moments is None else (list(self.moments.counts), *self.moments[1:])
        return ObservedState(rows, self.scale, self.sinks, queries, sums, self.received, *moments)

    def resume(self, state: Sequence[Any] | None, rows: int) -> None:
        """Continues from the state of an observation of so many rows; None is one that observed nothing.

        Args:
            state: an `ObservedState`, or a list of the same.
        """
        self.begin(rows)
        if state is None:
            return
        given = ObservedState(*state)
        self.scale, self.sinks, self.received = given.scale, given.sinks, given.received
        since, ends, counts, known = zip(*given.rows, strict=True)
        self.since, self.ends = list(since), list(ends)
        if given.queries is not None:
            width = given.queries.shape[2]
            starts = [width - count for count in counts]
            middle = [start + own for start, own in zip(starts, known, strict=True)]  # from there on without sums
            pieces = [
                Piece(given.queries, given.sums, tuple(zip(starts, middle, strict=True))),
                Piece(given.queries, None, tuple([(start, width) for start in middle])),
            ]
            self.recent = RecentQueries(rows, [piece for piece in pieces if any(a < b for a, b in piece.spans)])
        if given.counts is not None and given.mean is not None and given.spread is not None:
            self.moments = Moments(tuple(given.counts), given.mean, given.spread)


def _span(row: Row, count: int) -> tuple[int, int]:
    """The columns of a row's own tokens among those of an update; padding comes before, and from `count` on."""
    return min(count, max(0, count - row.offset)), count


def _added(one: mx.array, other: mx.array) -> mx.array:
    """The sum of (B, H, n) and (B, H, m), the shorter followed by zeros."""
    width = max(one.shape[2], other.shape[2])
    return as_wide(one, width) + as_wide(other, width)
