"""The last queries of each row, as they came: the newest of them may be taken back one by one.

Queries of one row are of consecutive tokens, the last of them that of the last token. Steps of decoding are kept as
they come, and put together now and then; of a chunk of a prompt, what is kept is copied, so that it does not keep the
whole chunk alive. Integers say which columns are of which row. Knows nothing about keys or what queries are for.
B rows, Hq query heads, D head dim; s columns of one piece, m of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

Span = tuple[int, int]


class Piece(NamedTuple):
    """Some queries of every row, and behind each the logarithm of the sum that its weights are divided by.

    Attributes:
        queries: (B, Hq, s, D).
        sums: (B, Hq, s) of float32, log-sum-exps of the products; None where they are not known.
        spans: the columns [first, last) that are of each row.
    """

    queries: mx.array
    sums: mx.array | None
    spans: tuple[Span, ...]


class Together(NamedTuple):
    """Queries of all rows that end in the same column.

    Attributes:
        queries: (B, Hq, m, D).
        sums: (B, Hq, m), anything where they are not known; None where none are.
        counts: columns of each row, its last ones.
        known: how many of them, the first, have their sums.
    """

    queries: mx.array
    sums: mx.array | None
    counts: tuple[int, ...]
    known: tuple[int, ...]

    def columns(self, first: int, last: int) -> Together:
        """Some columns of it."""
        width, rest = self.queries.shape[2], self.queries.shape[2] - last
        starts = [max(0, width - count - first) for count in self.counts]
        counts = tuple([max(0, last - first - start) for start in starts])
        before = [max(0, first - (width - count)) for count in self.counts]  # of a row, that are left out
        known = [min(max(0, n - gone), count) for n, gone, count in zip(self.known, before, counts, strict=True)]
        assert rest >= 0
        sums = None if self.sums is None else self.sums[:, :, first:last]
        return Together(self.queries[:, :, first:last], sums, counts, tuple(known))


class RecentQueries:
    """Queries of B rows that may be taken back.

    Attributes:
        pieces: of them, the oldest first.
    """

    def __init__(self, rows: int = 1, pieces: Sequence[Piece] = ()) -> None:
        self.rows, self.pieces = rows, list(pieces)

    @property
    def counts(self) -> list[int]:
        """Queries that are held of each row."""
        return [sum([piece.spans[row][1] - piece.spans[row][0] for piece in self.pieces]) for row in range(self.rows)]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for piece in self.pieces for x in (piece.queries, piece.sums) if x is not None)

    @property
    def arrays(self) -> list[mx.array]:
        return [x for piece in self.pieces for x in (piece.queries, piece.sums) if x is not None]

    def append(self, queries: mx.array, spans: tuple[Span, ...]) -> None:
        self.pieces.append(Piece(queries, None, spans))

    def drop_last(self, row: int, count: int) -> None:
        """Takes the last queries of one row back, or as many as there are."""
        for index in range(len(self.pieces) - 1, -1, -1):
            if count <= 0:
                break
            piece = self.pieces[index]
            first, last = piece.spans[row]
            gone = min(count, last - first)
            spans = (*piece.spans[:row], (first, last - gone), *piece.spans[row + 1 :])
            self.pieces[index] = piece._replace(spans=spans)
            count -= gone
        self.pieces = [piece for piece in self.pieces if any(first < last for first, last in piece.spans)]

    def together(self, most: int | None = None) -> Together | None:
        """All that are held, or the last `most` of each row; None where there is none; no queries of larger arrays.

        Args:
            most: None is all.
        """
        counts = self.counts
        wanted = [count if most is None else min(count, most) for count in counts]
        width = max(wanted)
        if not width:
            return None
        first = self.pieces[0]
        whole = ((first.queries.shape[2] - count, first.queries.shape[2]) for count in wanted)
        if len(self.pieces) == 1 and width == first.queries.shape[2] and first.spans == tuple(whole):
            known = tuple(wanted) if first.sums is not None else (0,) * self.rows
            return Together(first.queries, first.sums, tuple(wanted), known)
        parts, columns, known_counts, at = [], [list[int]() for _ in wanted], [0] * self.rows, 0
        left = [count - want for count, want in zip(counts, wanted, strict=True)]  # of each row, to be passed over
        with_sums = any(piece.sums is not None for piece in self.pieces)
        for piece in self.pieces:
            spans = []
            for row, (begin, end) in enumerate(piece.spans):
                over = min(left[row], end - begin)
                left[row] -= over
                spans.append((begin + over, end))
            used = [span for span in spans if span[0] < span[1]]
            if not used:
                continue
            low, high = min(span[0] for span in used), max(span[1] for span in used)
            parts.append((piece, low, high))
            for row, (begin, end) in enumerate(spans):
                columns[row].extend(range(at + begin - low, at + end - low))
                known_counts[row] += end - begin if piece.sums is not None else 0
            at += high - low
        queries = _joined([piece.queries[:, :, low:high] for piece, low, high in parts])
        sums = None
        if with_sums:
            none = mx.zeros(queries.shape[:2])[:, :, None]
            shape = queries.shape[:2]
            sums = _joined(
                [
                    mx.broadcast_to(none, (*shape, high - low)) if piece.sums is None else piece.sums[:, :, low:high]
                    for piece, low, high in parts
                ]
            )
        lines = [[0] * (width - len(line)) + line for line in columns]
        if any(line != lines[0] for line in lines) or lines[0] != list(range(at)):
            index = mx.array(lines)  # (B, m)
            shown = mx.broadcast_to(index[:, None, :, None], (*queries.shape[:2], width, queries.shape[3]))
            queries = mx.take_along_axis(queries, shown, axis=2)
            if sums is not None:
                sums = mx.take_along_axis(sums, mx.broadcast_to(index[:, None], (*queries.shape[:2], width)), axis=2)
        elif len(parts) == 1:
            queries = copied(queries)
        return Together(queries, sums, tuple(wanted), tuple(known_counts))

    def hold(self, together: Together) -> None:
        """These are all that is held from now on."""
        width = together.queries.shape[2]
        spans = tuple([(width - count, width) for count in together.counts])
        self.pieces = [Piece(together.queries, together.sums, spans)]

    def of_rows(self, chosen: Sequence[int]) -> RecentQueries:
        """Copies of some rows, in this order."""
        index = mx.array(list(chosen))
        return RecentQueries(
            len(chosen),
            [
                Piece(
                    piece.queries[index],
                    None if piece.sums is None else piece.sums[index],
                    tuple([piece.spans[row] for row in chosen]),
                )
                for piece in self.pieces
            ],
        )

    def joined(self, other: RecentQueries) -> RecentQueries:
        """These rows, and after them another's."""
        # Those whose sums are known come first in every row.
        stacked = [_stacked(self._known(known), other._known(known)) for known in (True, False)]
        return RecentQueries(self.rows + other.rows, [piece for piece in stacked if piece is not None])

    def _known(self, known: bool) -> RecentQueries:
        return RecentQueries(self.rows, [piece for piece in self.pieces if (piece.sums is not None) == known])


def _stacked(own: RecentQueries, other: RecentQueries) -> Piece | None:
    """The rows of one, and after them the other's, in one piece."""
    each = [(part.together(), part.rows) for part in (own, other)]
    there = [part for part, _ in each if part is not None]
    if not there:
        return None
    width, like = max([part.queries.shape[2] for part in there]), there[0].queries
    queries, sums = [], []
    spans: tuple[Span, ...] = ()
    for part, rows in each:
        counts = (0,) * rows if part is None else part.counts
        spans = (*spans, *[(width - count, width) for count in counts])
        if part is None:
            queries.append(mx.zeros((rows, like.shape[1], width, like.shape[3]), like.dtype))
            sums.append(mx.zeros((rows, like.shape[1], width)))
            continue
        more = [(0, 0), (0, 0), (width - part.queries.shape[2], 0)]
        queries.append(mx.pad(part.queries, [*more, (0, 0)]))
        sums.append(mx.zeros((rows, like.shape[1], width)) if part.sums is None else mx.pad(part.sums, more))
    known = there[0].sums is not None
    return Piece(mx.concatenate(queries), mx.concatenate(sums) if known else None, spans)


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=2)


def copied(x: mx.array) -> mx.array:
    """The same in memory of its own, also where it is a slice of something contiguous."""
    return mx.take(x, mx.arange(x.shape[2]), axis=2)
