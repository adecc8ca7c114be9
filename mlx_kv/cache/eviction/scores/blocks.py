"""Tokens some at a time, so that a score takes no second copy of all keys, decoded or in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

from mlx_kv.cache.eviction.scores.tokens import Part

# Bytes of one block in float32, of each row and head: so sums come out the same in whatever batch a row is, and however
# heads are split. A few blocks are all that a score needs. On a CPU small ones are no slower, since they stay in its
# caches; on a GPU each costs a launch, and memory comes in other sizes.
BLOCK_BYTES = {mx.DeviceType.cpu: 2**15, mx.DeviceType.gpu: 2**19}
LEAST_TOKENS = 16
SHORT_BYTES = 2**18  # of each row and head, up to which all tokens are one block: a matrix product costs, however small
TOGETHER_BYTES = 2**19  # of blocks that are waited for at once; no less is waited for


class Blocks:
    """The keys, or the values, of n tokens in float32, in parts of axis 2.

    Args:
        x: all of them, (B, H, n, D), which is looked at for its shape alone where there is a `part`.
        part: reads some of them.
    """

    def __init__(self, x: mx.array, part: Part | None = None) -> None:
        self.rows, self.heads, self.n, self.dim = x.shape
        self._part: Part = part or (lambda which: some(x, which))

    @property
    def tokens(self) -> int:
        """Of one block; it follows from one row and head alone, as the bytes do."""
        if 4 * self.n * self.dim <= SHORT_BYTES:
            return self.n
        return max(LEAST_TOKENS, BLOCK_BYTES[mx.default_device().type] // (4 * self.dim))

    def __iter__(self) -> Iterator[mx.array]:
        for first in range(0, self.n, self.tokens):
            yield self.part(slice(first, first + self.tokens))

    def part(self, which: slice | mx.array) -> mx.array:
        return self._part(which).astype(mx.float32)

    def each(self, function: Callable[[mx.array], mx.array]) -> mx.array:
        """What `function` makes of each block, (B, H, n); a value for each token that depends on no other."""
        return mx.concatenate(list(self.evaluated(map(function, self))), axis=2)

    def evaluated(self, made: Iterator[mx.array]) -> Iterator[mx.array]:
        """What was made of each block, evaluated before more is made: what it was made of is let go."""
        return evaluated(made, 4 * self.rows * self.heads * self.tokens * self.dim)


def evaluated(made: Iterator[mx.array], nbytes: int) -> Iterator[mx.array]:
    """The same, evaluated as many at a time as were made of `TOGETHER_BYTES`, before more are made; not the last.

    Args:
        nbytes: that each was made of.
    """
    together: list[mx.array] = []
    for each in made:
        if len(together) == max(1, TOGETHER_BYTES // nbytes):
            mx.eval(together)
            together.clear()
        together.append(each)
        yield each


def some(x: mx.array, which: slice | mx.array) -> mx.array:
    if isinstance(which, slice):
        return x[:, :, which]
    return mx.take_along_axis(
        x, mx.broadcast_to(which[..., None], (*x.shape[:2], *which.shape[2:], x.shape[3])), axis=2
    )
