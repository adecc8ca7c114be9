"""Queries that were observed: the last ones of each row as they came, and mean and covariance of all before them.

Recent queries of one row are of consecutive tokens, the last of them that of the last token, so a trim can drop the
newest. Steps of decoding are kept as they come and joined now and then; of a chunk of a prompt, what is kept is copied,
so that it does not keep the whole chunk alive. Integers hold which columns belong to which row.

Moments are joined by Chan, Golub and LeVeque 1979, which needs no difference of large sums.
B rows, Hq query heads, D head dim; s columns of one piece, m of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

FIRST = 4  # tokens without moments: their queries are unlike all others (Devoto et al. 2025)
Span = tuple[int, int]


# --- recent queries ---------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Some queries of every row.

    Attributes:
        queries: (B, Hq, s, D).
        sums: (B, Hq, s) of float32, log-sum-exps of their products; None where they are not known.
        spans: the columns [first, last) of each row.
    """

    queries: mx.array
    sums: mx.array | None
    spans: tuple[Span, ...]

    def columns(self, first: int, last: int) -> Piece:
        """Some columns; spans stay as they are."""
        sums = None if self.sums is None else self.sums[:, :, first:last]
        return self._replace(queries=self.queries[:, :, first:last], sums=sums)


class JoinedQueries(NamedTuple):
    """Queries of all rows that end in the same column.

    Attributes:
        queries: (B, Hq, m, D).
        sums: (B, Hq, m), arbitrary where they are not known; None where none are.
        counts: columns of each row, its last ones.
        known: how many of them, the first, have their sums.
    """

    queries: mx.array
    sums: mx.array | None
    counts: tuple[int, ...]
    known: tuple[int, ...]

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.queries.shape[2]

    def first_columns(self, count: int) -> JoinedQueries:
        """The first columns, without sums."""
        counts = tuple([max(0, count - (self.width - own)) for own in self.counts])
        return JoinedQueries(self.queries[:, :, :count], None, counts, (0,) * len(counts))


class RecentQueries:
    """The last queries of B rows, of which the newest can be dropped.

    Attributes:
        pieces: the oldest first; those whose sums are known come first in every row.
    """

    def __init__(self, rows: int = 1, pieces: Sequence[Piece] = ()) -> None:
        self.rows, self.pieces = rows, list(pieces)

    @property
    def counts(self) -> list[int]:
        """Queries that are held of each row."""
        return [sum([piece.spans[row][1] - piece.spans[row][0] for piece in self.pieces]) for row in range(self.rows)]

    @property
    def arrays(self) -> list[mx.array]:
        return [x for piece in self.pieces for x in (piece.queries, piece.sums) if x is not None]

    def append(self, queries: mx.array, spans: tuple[Span, ...]) -> None:
        self.pieces.append(Piece(queries, None, spans))

    def drop_last(self, row: int, count: int) -> None:
        """Drops the last `count` queries of one row, or as many as there are."""
        for index in range(len(self.pieces) - 1, -1, -1):
            piece = self.pieces[index]
            first, last = piece.spans[row]
            gone = min(count, last - first)
            spans = (*piece.spans[:row], (first, last - gone), *piece.spans[row + 1 :])
            self.pieces[index] = piece._replace(spans=spans)
            count -= gone
        self.pieces = [piece for piece in self.pieces if any(first < last for first, last in piece.spans)]

    def joined(self, most: int | None = None) -> JoinedQueries | None:
        """All queries, or the last `most` of each row; None where there are none. Never a part of a larger array."""
        held = self.counts
        counts = tuple([count if most is None else min(count, most) for count in held])
        width = max(counts)
        if not width:
            return None
        skipped = [count - kept for count, kept in zip(held, counts, strict=True)]
        parts, known, at, cut = list[Piece](), [0] * self.rows, 0, False
        columns = [list[int]() for _ in counts]  # of each row, among those of all parts side by side
        for piece in self.pieces:
            passed = [min(skip, last - first) for skip, (first, last) in zip(skipped, piece.spans, strict=True)]
            skipped = [skip - gone for skip, gone in zip(skipped, passed, strict=True)]
            spans = [(first + gone, last) for gone, (first, last) in zip(passed, piece.spans, strict=True)]
            if not (used := [span for span in spans if span[0] < span[1]]):
                continue
            low, high = min(first for first, _ in used), max(last for _, last in used)
            parts.append(piece.columns(low, high))
            cut = high - low < piece.queries.shape[2]
            for row, (first, last) in enumerate(spans):
                columns[row].extend(range(at + first - low, at + last - low))
                known[row] += last - first if piece.sums is not None else 0
            at += high - low
        queries, sums = _side_by_side(parts)
        if width < at or any(line != list(range(at - len(line), at)) for line in columns):
            index = mx.array([[0] * (width - len(line)) + line for line in columns])[:, None]  # (B, 1, m)
            shape = (*queries.shape[:2], width)
            queries = mx.take_along_axis(queries, mx.broadcast_to(index[..., None], (*shape, queries.shape[3])), axis=2)
            sums = None if sums is None else mx.take_along_axis(sums, mx.broadcast_to(index, shape), axis=2)
        elif len(parts) == 1 and cut:
            queries = copied(queries)
        return JoinedQueries(queries, sums, counts, tuple(known))

    def hold(self, queries: JoinedQueries, most: int) -> None:
        """Replaces all queries by the last `most` columns of others; if these have sums, all of them are known."""
        kept, sums = queries.queries, queries.sums
        if queries.width > most:
            kept = copied(kept[:, :, -most:])
            sums = None if sums is None else mx.contiguous(sums[:, :, -most:])
        width = kept.shape[2]
        self.pieces = [Piece(kept, sums, tuple([(max(0, width - count), width) for count in queries.counts]))]

    def of_rows(self, chosen: Sequence[int]) -> RecentQueries:
        """Copies of some rows, in this order."""
        index = mx.array(list(chosen))
        return RecentQueries(
            len(chosen),
            [
                Piece(queries[index], None if sums is None else sums[index], tuple([spans[row] for row in chosen]))
                for queries, sums, spans in self.pieces
            ],
        )

    def with_rows_of(self, other: RecentQueries) -> RecentQueries:
        """These rows, and after them another's."""
        stacked = [_stacked(self._with_sums(known), other._with_sums(known)) for known in (True, False)]
        return RecentQueries(self.rows + other.rows, [piece for piece in stacked if piece is not None])

    def _with_sums(self, known: bool) -> RecentQueries:
        return RecentQueries(self.rows, [piece for piece in self.pieces if (piece.sums is not None) == known])


def _side_by_side(parts: Sequence[Piece]) -> tuple[mx.array, mx.array | None]:
    """Queries (B, Hq, s, D) of all parts, and their sums (B, Hq, s): 0 of parts without, None if no part has any."""
    queries = [part.queries for part in parts]
    if all(part.sums is None for part in parts):
        return mx.concatenate(queries, axis=2) if len(parts) > 1 else queries[0], None
    sums = [mx.zeros(part.queries.shape[:3]) if part.sums is None else part.sums for part in parts]
    if len(parts) == 1:
        return queries[0], sums[0]
    return mx.concatenate(queries, axis=2), mx.concatenate(sums, axis=2)


def _stacked(own: RecentQueries, other: RecentQueries) -> Piece | None:
    """The rows of both in one piece; all have sums, or none."""
    parts = [(part.joined(), part.rows) for part in (own, other)]
    found = [part for part, _ in parts if part is not None]
    if not found:
        return None
    width, like = max([part.width for part in found]), found[0].queries
    queries, sums, spans = list[mx.array](), list[mx.array](), list[Span]()
    for part, rows in parts:
        if part is None:
            part = JoinedQueries(mx.zeros((rows, like.shape[1], 0, like.shape[3]), like.dtype), None, (0,) * rows, ())
        padding = [(0, 0), (0, 0), (width - part.width, 0)]
        queries.append(mx.pad(part.queries, [*padding, (0, 0)]))
        sums.append(mx.pad(mx.zeros(part.queries.shape[:3]) if part.sums is None else part.sums, padding))
        spans += [(width - count, width) for count in part.counts]
    known = found[0].sums is not None
    return Piece(mx.concatenate(queries), mx.concatenate(sums) if known else None, tuple(spans))


def copied(x: mx.array) -> mx.array:
    """The same (B, Hq, s, D) in memory of its own, also where it is a slice of something contiguous."""
    return mx.take(x, mx.arange(x.shape[2]), axis=2)


# --- moments ----------------------------------------------------------------------------------------------------------


class Rope(Protocol):
    """The RoPE of a layer."""

    def back(self, queries: mx.array, positions: Sequence[int]) -> mx.array:
        """Queries (B, Hq, m, D) of consecutive tokens before RoPE; positions are of the first column of each row."""
        ...

    def ahead(self, position: int) -> mx.array:
        """(D, D): the rotation of a column vector, averaged over the next positions from `position` on."""
        ...


class Moments(NamedTuple):
    """Mean and spread of the queries of every row and query head.

    Attributes:
        counts: queries of each row.
        mean: (B, Hq, D) of float32.
        spread: (B, Hq, D, D), the sum of outer products of deviations from the mean.
    """

    counts: tuple[int, ...]
    mean: mx.array
    spread: mx.array

    @property
    def nbytes(self) -> int:
        return self.mean.nbytes + self.spread.nbytes

    def covariance(self) -> mx.array:
        """(B, Hq, D, D)."""
        return self.spread / mx.maximum(_column(self.counts, 4), 1)

    def with_more(self, other: Moments) -> Moments:
        """The moments of the queries of both."""
        counts = tuple([own + more for own, more in zip(self.counts, other.counts, strict=True)])
        if not any(other.counts):
            return self
        share = [more / max(1, total) for more, total in zip(other.counts, counts, strict=True)]
        apart = other.mean - self.mean
        mean = self.mean + apart * mx.array(share)[:, None, None]
        both = [own * part for own, part in zip(self.counts, share, strict=True)]
        outer = apart[..., :, None] * apart[..., None, :] * mx.array(both)[:, None, None, None]
        return Moments(counts, mean, self.spread + other.spread + outer)

    def without(self, row: int) -> Moments:
        """The moments without the queries of one row."""
        kept = mx.array([float(index != row) for index in range(len(self.counts))])
        counts = tuple([0 if index == row else count for index, count in enumerate(self.counts)])
        return Moments(counts, self.mean * kept[:, None, None], self.spread * kept[:, None, None, None])

    def of_rows(self, chosen: Sequence[int]) -> Moments:
        index = mx.array(list(chosen))
        return Moments(tuple([self.counts[row] for row in chosen]), self.mean[index], self.spread[index])


def moments_of(queries: mx.array, counts: Sequence[int], left_out: Sequence[int]) -> Moments:
    """The moments of queries (B, Hq, m, D) before RoPE.

    Args:
        counts: columns of each row, its last ones.
        left_out: how many of these, the first, are not counted.
    """
    width = queries.shape[2]
    counted = tuple([max(0, count - out) for count, out in zip(counts, left_out, strict=True)])
    columns = mx.arange(width)[None]
    is_counted = (columns >= width - mx.array(counted)[:, None])[:, None, :, None]  # (B, 1, m, 1)
    x = mx.where(is_counted, queries.astype(mx.float32), 0)
    mean = x.sum(axis=2) / mx.maximum(_column(counted, 3), 1)
    off = mx.where(is_counted, x - mean[:, :, None], 0)
    return Moments(counted, mean, off.swapaxes(2, 3) @ off)


def joined_moments(own: Moments | None, rows: int, theirs: Moments | None, more: int) -> Moments | None:
    """The moments of some rows, and after them of others; None where no query was observed."""
    like = own or theirs
    if like is None:
        return None
    first, second = (
        each or Moments((0,) * count, *[mx.zeros((count, *x.shape[1:])) for x in like[1:]])
        for each, count in ((own, rows), (theirs, more))
    )
    arrays = [mx.concatenate(list(pair)) for pair in zip(first[1:], second[1:], strict=True)]
    return Moments(first.counts + second.counts, *arrays)


def _column(numbers: Sequence[int], axes: int) -> mx.array:
    return mx.array(list(numbers), mx.float32).reshape(-1, *[1] * (axes - 1))


# --- an observation as a state, and its memory ------------------------------------------------------------------------


class ObservedState(NamedTuple):
    """The state of an `Observation`. Files hold it as a list of the same order.

    Attributes:
        rows: of each row `since`, `end`, how many queries are held, and how many of these, the first, have their sums.
        scale: of the products; 0 where nothing was observed.
        sinks: logits of attention sinks, (Hq,), or None.
        queries, sums: as in `JoinedQueries`, of the same rows, or None.
        received: (B, H, n) of float32, or None.
        counts, mean, spread: as in `Moments`, or None.
    """

    rows: list[list[int]]
    scale: float
    sinks: mx.array | None
    queries: mx.array | None
    sums: mx.array | None
    received: mx.array | None
    counts: list[int] | None
    mean: mx.array | None
    spread: mx.array | None


class ObservedBytes(NamedTuple):
    """The largest number of bytes that an observation of one row holds.

    Attributes:
        queries: how many queries are held.
        per_query: (Hq, D) in the dtype of the queries, and (Hq,) of float32, their log-sum-exps, where those are kept.
        per_slot: (H,) of float32, what a token received.
        moments: (Hq, D) and (Hq, D, D) of float32, mean and spread.
    """

    queries: int = 0
    per_query: int = 0
    per_slot: int = 0
    moments: int = 0

    def nbytes(self, slots: int) -> int:
        """Of a row with so many slots in use."""
        return min(slots, self.queries) * self.per_query + slots * self.per_slot + self.moments
