"""What queries are like before RoPE turned them: their mean and covariance, put together from parts.

Two parts are put together by Chan, Golub and LeVeque 1979, which needs no difference of large sums. Knows nothing about
where queries come from.
B rows, Hq query heads, D head dim; m queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

FIRST = 4  # tokens whose queries are left out: they are unlike all others (Devoto et al. 2025)


class Turning(Protocol):
    """The RoPE of a layer."""

    def back(self, queries: mx.array, positions: Sequence[int]) -> mx.array:
        """Queries (B, Hq, m, D) of consecutive tokens as they were before; positions are of each row's first."""
        ...

    def ahead(self, position: int) -> mx.array:
        """(D, D): what RoPE does to a column, in the mean over the next positions from `position` on."""
        ...


class Moments(NamedTuple):
    """Of queries of every row and query head.

    Attributes:
        counts: queries of each row.
        mean: (B, Hq, D) of float32.
        spread: (B, Hq, D, D), the sum of outer products of what lies off the mean.
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
        """Of the queries of both."""
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
        """Where one row begins anew."""
        kept = mx.array([float(index != row) for index in range(len(self.counts))])
        counts = tuple([0 if index == row else count for index, count in enumerate(self.counts)])
        return Moments(counts, self.mean * kept[:, None, None], self.spread * kept[:, None, None, None])

    def of_rows(self, chosen: Sequence[int]) -> Moments:
        index = mx.array(list(chosen))
        return Moments(tuple([self.counts[row] for row in chosen]), self.mean[index], self.spread[index])


def moments_of(queries: mx.array, counts: Sequence[int], left_out: Sequence[int]) -> Moments:
    """The moments of queries (B, Hq, m, D), turned back.

    Args:
        counts: how many of each row there are, its last columns.
        left_out: how many of these are not counted, the first ones.
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
    """Those of some rows, and after them of others; None is of no query."""
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
