"""The inputs of a score: the attention that it uses, the fields of the tokens, and their keys and values in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

# Some of the n tokens, a slice of them or indices (B, 1 or H, m), as they were before they were stored: (B, H, m, D).
Part = Callable[[slice | mx.array], mx.array]

# Bytes of one block in float32, of each row and head: so sums are the same in every batch, and however heads are split.
# On a CPU small blocks are no slower, since they stay in its caches; on a GPU each costs a launch.
BLOCK_BYTES = {mx.DeviceType.cpu: 2**15, mx.DeviceType.gpu: 2**19}
LEAST_TOKENS = 16
SHORT_BYTES = 2**18  # of each row and head, up to which all tokens are one block
TOGETHER_BYTES = 2**19  # of blocks that are evaluated at once


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """What a score uses of attention; see the fields of `ScoredTokens`. Public as `mlx_kv.Wants`.

    Attributes:
        queries: how many of the last queries of each row.
        received: how much attention each token received.
        moments: mean and covariance of all queries, before RoPE.
        reread: the attention that each token receives when its text is read a second time.

    Raises:
        ValueError: no input at all, or a number of queries below 0.
    """

    queries: int = 0
    received: bool = False
    moments: bool = False
    reread: bool = False

    def __post_init__(self) -> None:
        if type(self.queries) is not int or self.queries < 0:
            raise ValueError(f"queries is {self.queries!r}: give a number of queries from 0 up")
        if not (self.queries or self.received or self.moments or self.reread):
            raise ValueError("wants nothing: for a score that does not use attention, give wants=None")

    @property
    def observes(self) -> bool:
        """Whether attention is observed while a text is read for the first time."""
        return bool(self.queries or self.received or self.moments)


Wants = AttentionInputs  # the public name


class QueryMoments(NamedTuple):
    """Moments of the queries of a text before RoPE, without those of its first 4 tokens; of every query head.

    Attributes:
        mean: (B, Hq, D) of float32.
        covariance: (B, Hq, D, D).
        ahead: (D, D), the rotation of a column vector by RoPE, averaged over the next 512 positions.
    """

    mean: mx.array
    covariance: mx.array
    ahead: mx.array


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredTokens:
    """Tokens to be scored, n of each row and head, in no particular order. New inputs are added as fields.

    Attributes:
        keys: (B, H, n, Dk), in the dtype of the model, positions rotated in.
        values: (B, H, n, Dv).
        positions: (B, 1, n) of int32, or (B, H, n) where every head keeps its own tokens, once any were evicted.
        key_part, value_part: the same keys and values, some of them at a time. Evaluated one part after the other, they
            are never all decoded, or in float32, at once.
        layer: which of the model's layers of full attention they are of, from 0.
        queries: (B, Hq, w, D), the last ones, after RoPE; fewer where fewer were observed. This and all that
            follows is None unless the score uses it (`wants=`), and where nothing was observed yet: in a cache of a
            file without it, or right after a longer trim than the observation can follow.
        query_positions: (B, w) of int32.
        scale: of the products of queries and keys.
        attention_sinks: (Hq,), logits that weights are divided by beside those of tokens, where the model has them.
        received: (B, H, n) of float32, the attention that each token received of all observed queries, in the mean
            over the query heads of a group.
        observers: (B, 1 or H, n), how many of these queries could see it.
        moments: of all observed queries.
        reread: (B, H, n) of float32, for scores that want it: the largest share of attention that each token got when
            its text was read a second time; -1 of tokens without a second pass, and never None.
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


class Blocks:
    """The keys, or the values, of n tokens in float32, a block of axis 2 at a time, without a second copy of all.

    Args:
        x: all of them, (B, H, n, D); only its shape is used where there is a `part`.
        part: reads some of them.
    """

    def __init__(self, x: mx.array, part: Part | None = None) -> None:
        self.rows, self.heads, self.n, self.dim = x.shape
        self._part: Part = part or (lambda which: some(x, which))

    @property
    def tokens(self) -> int:
        """Tokens of one block."""
        if 4 * self.n * self.dim <= SHORT_BYTES:
            return self.n
        return max(LEAST_TOKENS, BLOCK_BYTES[mx.default_device().type] // (4 * self.dim))

    def __iter__(self) -> Iterator[mx.array]:
        for first in range(0, self.n, self.tokens):
            yield self.part(slice(first, first + self.tokens))

    def part(self, which: slice | mx.array) -> mx.array:
        return self._part(which).astype(mx.float32)

    def each(self, function: Callable[[mx.array], mx.array]) -> mx.array:
        """`function` of each block, (B, H, n); its value for a token must not depend on other tokens."""
        return mx.concatenate(list(self.evaluated(map(function, self))), axis=2)

    def evaluated(self, made: Iterator[mx.array]) -> Iterator[mx.array]:
        """Results of each block, evaluated before more are made, so that the block is freed."""
        return evaluated(made, 4 * self.rows * self.heads * self.tokens * self.dim)


def evaluated(made: Iterator[mx.array], nbytes: int) -> Iterator[mx.array]:
    """The same arrays, evaluated in groups that are made of `TOGETHER_BYTES`, before more are made; not the last.

    Args:
        nbytes: that each is made of.
    """
    together: list[mx.array] = []
    for each in made:
        if len(together) == max(1, TOGETHER_BYTES // nbytes):
            mx.eval(together)
            together.clear()
        together.append(each)
        yield each


def some(x: mx.array, which: slice | mx.array) -> mx.array:
    """Some tokens of (B, H, n, D), as a `Part` returns them."""
    if isinstance(which, slice):
        return x[:, :, which]
    return mx.take_along_axis(
        x, mx.broadcast_to(which[..., None], (*x.shape[:2], *which.shape[2:], x.shape[3])), axis=2
    )
