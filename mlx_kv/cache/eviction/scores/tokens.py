"""What a score asks for and what it is given: the attention to be observed, and the fields of tokens to be scored.

Attention is observed only for a score that asks for it (`Wants`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

# Some of the n tokens, a slice of them or indices (B, 1 or H, m), as they were before they were stored: (B, H, m, D).
Part = Callable[[slice | mx.array], mx.array]


@dataclass(frozen=True, kw_only=True)
class Wants:
    """What is to be observed for a score; see the fields of `ScoredTokens`.

    Attributes:
        queries: so many of the last queries of each row, as they were asked.
        received: how much attention each token received.
        moments: mean and covariance of all queries, before RoPE turned them.
        reread: the text is read once more when it is whole, and what each token receives then is kept.

    Raises:
        ValueError: nothing is wanted, or a number of queries below 0.
    """

    queries: int = 0
    received: bool = False
    moments: bool = False
    reread: bool = False

    def __post_init__(self) -> None:
        if type(self.queries) is not int or self.queries < 0:
            raise ValueError(f"queries is {self.queries!r}: give a number of queries from 0 up")
        if not (self.queries or self.received or self.moments or self.reread):
            raise ValueError("wants nothing: a score that sees no attention has no Wants at all (wants=None)")

    @property
    def observes(self) -> bool:
        """Whether anything is to be seen while a text is read for the first time."""
        return bool(self.queries or self.received or self.moments)


class QueryMoments(NamedTuple):
    """What the queries of a text are like before RoPE, without those of its first 4 tokens; of every query head.

    Attributes:
        mean: (B, Hq, D) of float32.
        covariance: (B, Hq, D, D).
        ahead: (D, D), what RoPE does to a column in the mean over the next 512 positions.
    """

    mean: mx.array
    covariance: mx.array
    ahead: mx.array


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredTokens:
    """Tokens to be scored, n of each row and head, in no particular order. What comes to be known of them is one more
    field: scores that do not look at it stay as they are.

    Attributes:
        keys: (B, H, n, Dk), in the dtype of the model, positions rotated in.
        values: (B, H, n, Dv).
        positions: (B, 1, n) of int32, or (B, H, n) where every head keeps its own tokens, once any went.
        key_part, value_part: the same keys and values, some of them at a time. Evaluated one
            part after the other, they are never all decoded, or in float32, at once.
        layer: which of the model's layers of full attention they are of, from 0.
        queries: (B, Hq, w, D), the last ones that were asked, after RoPE; fewer than the score wants where fewer were
            seen. This and all that follows is None unless the score wants it (`Wants`), and where nothing was seen yet:
            in a cache of a file without it, or right after more was taken back than the observation can follow.
        query_positions: (B, w) of int32.
        scale: of the products of queries and keys.
        attention_sinks: (Hq,), logits that weights are divided by beside those of tokens, where the model has them.
        received: (B, H, n) of float32, the attention that each token received of all queries that were seen, in the
            mean over the query heads of a group.
        observers: (B, 1 or H, n), how many of these queries could see it.
        moments: of all queries that were seen.
        reread: (B, H, n) of float32, for scores that want it: the largest share of attention that each token got when
            its text was read once more; -1 where it was not, and never None.
    """

    keys: mx.array
    values: mx.array
    positions: mx.array
    key_part: Part | None = None
    value_part: Part | None = None
    layer: int = 0
    queries: mx.array | None = None
    query_positions: mx.array | None = None
    scale: float | None = None
    attention_sinks: mx.array | None = None
    received: mx.array | None = None
    observers: mx.array | None = None
    moments: QueryMoments | None = None
    reread: mx.array | None = None
