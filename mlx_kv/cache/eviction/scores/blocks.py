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
        """Of one block."""
        return max(LEAST_TOKENS, BLOCK_BYTES[mx.default_device().type] // (4 * self.dim))

    def __iter__(self) -> Iterator[mx.array]:
        for first in range(0, self.n, self.tokens):
            yield self.part(slice(first, first + self.tokens))

    def part(self, which: slice | mx.array) -> mx.array:
        return self._part(which).astype(mx.float32)

    def each(self, function: Callable[[mx.array], mx.array]) -> mx.array:
        """What `function` makes of each block, (B, H, n); a value for each token that depends on no other."""
        if self.n <= self.tokens:  # nothing is gained by waiting for it
            return function(self.part(slice(None)))
        return mx.concatenate(list(evaluated(map(function, self))), axis=2)


def evaluated(made: Iterator[mx.array]) -> Iterator[mx.array]:
    """The same, each evaluated before the next is made: what it was made of is let go."""
    for each in made:
        mx.eval(each)
        yield each


def some(x: mx.array, which: slice | mx.array) -> mx.array:
    if isinstance(which, slice):
        return x[:, :, which]
    return mx.take_along_axis(
        x, mx.broadcast_to(which[..., None], (*x.shape[:2], *which.shape[2:], x.shape[3])), axis=2
    )
