"""What was seen of the attention over one cache, in step with its rows.

Of each row, queries [since, end) were seen: those of all its tokens from `since` on. The last of them, [first, end),
are held as they are, as many as a trim takes back, so whatever they contributed can be taken back with them. What those
before them contributed, [since, first), is summed up, and cannot be parted any more: a trim back to before `first`
begins the observation of that row anew, there. So does a write without a call of `see`.

What a query gives to a token is exp(product - its log-sum-exp). That is known before anything is evicted, so what it
gave to tokens that are left stays exact, whatever is gone. Sums lie in the slots of their tokens, and move with them.

Scores, and which tokens go, are decided elsewhere.
B rows, Hq query heads, H KV heads, D head dim; n slots, from the first on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_kv.cache.eviction.compaction import Moves
from mlx_kv.cache.eviction.kept_tokens import as_wide, joined_rows
from mlx_kv.cache.eviction.observed.moments import FIRST, Moments, Turning, joined_moments, moments_of
from mlx_kv.cache.eviction.observed.recent import RecentQueries, Together, copied
from mlx_kv.cache.eviction.scores.tokens import Wants
from mlx_kv.cache.eviction.weights import Keys, Queries, blocks, log_sums, products, weights
from mlx_kv.cache.layout import Row
from mlx_kv.cache.protocol import Call

SHORT = 8  # queries of a step of decoding, or of one that looks at drafts
PIECES = 32  # steps that are kept as they come
TAKEN_BACK = 64  # at the least: as many queries a trim can take back and leave the observation as it was


def observation_for(wants: Wants | None, keep_recent: int) -> Observation | None:
    """An observation of what a score wants to see while a text is read; None where that is nothing."""
    return Observation(wants, keep_recent) if wants is not None and wants.observes else None


class Observation:
    """What was seen for a score of one cache.

    Args:
        wants: what is to be known.
        keep_recent: tokens that a trim can take back in any case.
        turning: the RoPE of the layer; without it nothing is known of queries before it.
        rows: of the cache.
    """

    def __init__(self, wants: Wants, keep_recent: int, turning: Turning | None = None, rows: int = 1) -> None:
        self.wants, self.turning = wants, turning
        self._held = wants.queries + max(keep_recent, TAKEN_BACK)  # queries of each row
        self._keep_recent = keep_recent
        self.begin(rows)

    def begin(self, rows: int) -> None:
        """So many rows begin, of which nothing was seen."""
        self.recent = RecentQueries(rows)
        self.since, self.ends = [0] * rows, [0] * rows
        self.scale = 0.0
        self.sinks: mx.array | None = None
        self.received: mx.array | None = None  # (B, H, n): what queries that are no longer held gave
        self.moments: Moments | None = None  # of the same queries

    def _like(self, rows: int) -> Observation:
        made = Observation(self.wants, self._keep_recent, self.turning, rows)
        made.scale, made.sinks = self.scale, self.sinks
        return made

    @property
    def sums_up(self) -> bool:
        """Whether more is kept of queries than those that are held."""
        return self.wants.received or self.wants.moments

    @property
    def most_queries(self) -> int:
        """Queries of each row that are held at the most, but for those that wait to be put together."""
        return self._held

    @property
    def nbytes(self) -> int:
        more = 0 if self.moments is None else self.moments.nbytes
        return self.recent.nbytes + (0 if self.received is None else self.received.nbytes) + more

    @property
    def arrays(self) -> list[mx.array]:
        moments = [] if self.moments is None else [self.moments.mean, self.moments.spread]
        return [*self.recent.arrays, *([] if self.received is None else [self.received]), *moments]

    def standing(self, row: int) -> tuple[int, ...]:
        """What rows must have alike to be scored together."""
        counted = 0 if self.moments is None else self.moments.counts[row]
        return self.since[row], self.ends[row], self.recent.counts[row], counted

    def most_trim(self, row: int) -> int:
        """Tokens that can be taken back so that as much is known as if they had never been seen."""
        held, end = self.recent.counts[row], self.ends[row]
        return end if held >= end else max(0, held - self.wants.queries)

    # --- what is seen ---------------------------------------------------------------------------------------------

    def see(
        self, call: Call, answer: mx.array, rows: Sequence[Row], counts: Sequence[int] | None, keys: Callable[[], Keys]
    ) -> mx.array:
        """Takes in the queries of a call; returns its answer, which may wait for what was made of them.

        Args:
            answer: to the call, (B, Hq, S, Dv).
            rows: where they stand after the update.
            counts: how many of the queries are of tokens of each row, padding follows; None is all.
            keys: gives the tokens that they attend to.
        """
        queries, ends = call.queries, [max(0, row.offset) for row in rows]
        new = queries.shape[2]
        if len(rows) != len(self.ends):
            self.begin(len(rows))
        if ends == self.ends:
            return answer  # another layer attends to the same tokens
        self.scale, self.sinks = call.scale, call.sinks
        spans = tuple([_span(row, new if counts is None else counts[i]) for i, row in enumerate(rows)])
        for row, (end, (first, last)) in enumerate(zip(ends, spans, strict=True)):
            if self.ends[row] != end - (last - first):
                self._begin_row(row, end - (last - first))
        self.recent.append(queries, spans)
        self.ends = ends
        if new <= SHORT and len(self.recent.pieces) <= PIECES:
            return answer
        self._put_together(keys)
        # With the step itself, not later: who looks at keys while the next ones are written has them all copied.
        waiting: list[mx.array] = mx.depends([answer], self.arrays)
        return waiting[0]

    def trimmed(self, rows: Sequence[Row]) -> None:
        """Takes queries back that are of tokens beyond where rows stand now."""
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

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Begins anew where tokens were written without a call of `see`: old queries don't show what is asked now."""
        if len(rows) != len(self.ends):
            self.begin(len(rows))
        for index, row in enumerate(rows):
            if self.ends[index] != (end := max(0, row.offset)):
                self._begin_row(index, end)

    def _begin_row(self, row: int, position: int) -> None:
        """Nothing was seen of a row, which stands at a position."""
        self.recent.drop_last(row, self.recent.counts[row])
        self.since[row] = self.ends[row] = position
        if self.received is not None:
            kept = mx.array([float(index != row) for index in range(len(self.ends))])
            self.received = self.received * kept[:, None, None]
        if self.moments is not None:
            self.moments = self.moments.without(row)

    def settle(self, rows: Sequence[Row], keys: Callable[[], Keys]) -> None:
        """Before tokens go: finds out what is known only as long as they are there, and evaluates it."""
        self._catch_up(rows)
        if self.recent.pieces:
            self._put_together(keys)
            mx.eval(self.arrays)

    # --- what is put together -------------------------------------------------------------------------------------

    def _put_together(self, keys: Callable[[], Keys]) -> None:
        """Makes one piece of all that is held, and sums up what need not be held any more."""
        together = self.recent.together(None if self.sums_up else self._held)
        if together is None:
            return
        width = together.queries.shape[2]
        gone = max(0, width - self._held)  # columns that are summed up
        if self.wants.received and (gone or together.known != together.counts):
            together = self._sum_up_received(together, gone, keys())
        if self.wants.moments and self.turning is not None and gone:
            more = self._moments_of(together.columns(0, gone), self._shifted(gone))
            self.moments = more if self.moments is None else self.moments.with_more(more)
        if gone:
            kept = together.columns(gone, width)
            sums = None if kept.sums is None else mx.contiguous(kept.sums)
            together = kept._replace(queries=copied(kept.queries), sums=sums)
        self.recent.hold(together)

    def _shifted(self, gone: int) -> list[int]:
        """One past the last position of each row among the columns before those that stay held."""
        return [end - self._held for end in self.ends] if gone else self.ends

    def _positions(self, together: Together) -> mx.array:
        """(B, m), of all that is held; -1 where there is no query."""
        width = together.queries.shape[2]
        columns = mx.arange(width)[None] - width
        counts = mx.array(together.counts)[:, None]
        return mx.where(columns >= -counts, columns + mx.array(self.ends)[:, None], -1)

    def _sum_up_received(self, together: Together, gone: int, keys: Keys) -> Together:
        """Finds the sums of all queries, and adds up what the first `gone` columns give."""
        width = together.queries.shape[2]
        asked = Queries(together.queries, self._positions(together), self.scale, self.sinks)
        rows, heads, n, _ = keys.shape
        total = mx.zeros((rows, heads, n))
        sums = []
        unknown = [width - count + known for count, known in zip(together.counts, together.known, strict=True)]
        before, columns = together.sums, mx.arange(width)[None]
        is_known = columns < mx.array(unknown)[:, None]  # (B, m); what is no query counts as known
        last_total: list[mx.array] = []
        for first, last in blocks(asked, keys):
            some = asked.columns(first, last)
            old = None if before is None else before[:, :, first:last]
            if first >= gone and last <= min(unknown) and old is not None:
                sums.append(old)
                continue
            if last_total:  # one block after the other
                (made_of,) = mx.depends([some.queries], last_total)
                some = some._replace(queries=made_of)
            made = products(some, keys)
            found = log_sums(made, self.sinks)  # (B, H, g, m)
            if old is not None:
                known = is_known[:, None, None, first:last]
                found = mx.where(known, old.reshape(found.shape), found)
            if first < gone:
                counted = (some.positions >= 0) & (columns[:, first:last] < gone)
                total = total + weights(made, found, counted).sum(axis=3).mean(axis=2)
                last_total = [total]
            sums.append(found.reshape(rows, -1, last - first))
            last_total = last_total or [sums[-1]]
        if gone:
            self.received = total if self.received is None else _added(self.received, total)
        return together._replace(
            sums=sums[0] if len(sums) == 1 else mx.concatenate(sums, axis=2), known=together.counts
        )

    def _moments_of(self, together: Together, ends: Sequence[int]) -> Moments:
        assert self.turning is not None
        width = together.queries.shape[2]
        turned = self.turning.back(together.queries, [end - width for end in ends])
        left_out = [max(0, FIRST - (end - count)) for end, count in zip(ends, together.counts, strict=True)]
        return moments_of(turned, together.counts, left_out)

    # --- what is known --------------------------------------------------------------------------------------------

    def last_queries(self, row: int | None) -> Queries | None:
        """The last `wants.queries` of a row or of all, as far as they are held; None where there is none."""
        together = self._of(row).recent.together(self.wants.queries) if self.wants.queries else None
        if together is None:
            return None
        of = self._of(row)
        return Queries(together.queries, of._positions(together), self.scale, self.sinks)

    def received_by(self, row: int | None, keys: Keys) -> tuple[mx.array, mx.array] | None:
        """What tokens received of all queries that were seen, in the mean over the query heads of a group: (B, H, n).

        And how many of the queries could see each, (B, 1 or H, n). None where none was seen. What is still to be known
        for it was settled.
        """
        of = self._of(row)
        if not self.wants.received or of.since[0] == of.ends[0]:
            return None
        rows, heads, n, _ = keys.shape
        total = mx.zeros((rows, heads, n))
        if of.received is not None:
            total = _added(total, of.received[:, :, :n])
        together = of.recent.together()
        if together is not None:
            assert together.sums is not None, "settled before"
            asked = Queries(together.queries, of._positions(together), self.scale, self.sinks)
            for first, last in blocks(asked, keys):
                some = asked.columns(first, last)
                made = products(some, keys)
                sums = together.sums[:, :, first:last].reshape(made.shape[:4])
                total = total + weights(made, sums, some.positions >= 0).sum(axis=3).mean(axis=2)
                mx.eval(total)
        observers = mx.maximum(of.ends[0] - mx.maximum(keys.positions, of.since[0]), 1)
        return total, observers

    def all_moments(self, row: int | None) -> Moments | None:
        """Of all queries that were seen; None where there is none."""
        of = self._of(row)
        if not self.wants.moments or self.turning is None:
            return None
        moments, together = of.moments, of.recent.together()
        if together is not None:
            more = of._moments_of(together, of.ends)
            moments = more if moments is None else moments.with_more(more)
        return moments if moments is not None and all(moments.counts) else None

    def _of(self, row: int | None) -> Observation:
        return self if row is None else self.of_rows([row])

    # --- rows and tokens that move --------------------------------------------------------------------------------

    def moved(self, moves: Moves, ends: Sequence[int]) -> None:
        """After a compaction: what tokens received is where they are now.

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
        # Also where nothing moves, since only the last tokens went: others come to their slots.
        live = mx.arange(received.shape[2]) < mx.array([max(0, end) for end in ends])[:, None, None]
        self.received = mx.where(live, received, 0)[:, :, : max(1, *ends)]
        mx.eval(self.received)

    @property
    def wants_turning(self) -> bool:
        """Whether the RoPE of the layer is still to be set."""
        return self.wants.moments and self.turning is None

    def copied(self) -> Observation:
        """Another one that has seen the same; arrays are never changed in place."""
        made = self._like(len(self.ends))
        made.recent = RecentQueries(self.recent.rows, self.recent.pieces)
        made.since, made.ends = list(self.since), list(self.ends)
        made.received, made.moments = self.received, self.moments
        return made

    def of_rows(self, chosen: Sequence[int]) -> Observation:
        """Copies of some rows, in this order."""
        if max(chosen) >= len(self.ends):  # rows that began and of which nothing was seen
            return self._like(len(chosen))
        made = self._like(len(chosen))
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
        made.turning = self.turning or other.turning
        made.recent = own.recent.joined(theirs.recent)
        made.since, made.ends = own.since + theirs.since, own.ends + theirs.ends
        made.received = joined_rows(own.received, rows, theirs.received, more)
        made.moments = joined_moments(own.moments, rows, theirs.moments, more)
        return made

    def compute(self) -> Observation:
        """Has it computed now: rows may come and go for long before it is looked at, and make a chain of arrays."""
        if arrays := self.arrays:
            mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
        return self


def _span(row: Row, count: int) -> tuple[int, int]:
    """The columns of a row's own tokens among those of an update of which `count` are tokens or come before any."""
    return min(count, max(0, count - row.offset)), count


def _added(one: mx.array, other: mx.array) -> mx.array:
    """The sum of (B, H, n) and (B, H, m), where what is not there counts as 0."""
    width = max(one.shape[2], other.shape[2])
    return as_wide(one, width) + as_wide(other, width)
