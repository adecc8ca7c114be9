"""Two-pass prefill: the attention that tokens receive while their text is read a second time.

The second pass repeats the text over a cache that holds all of it: the tokens that it attends to are needed to
reproduce the text. Which text is repeated, and when, is decided in `generation`.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction": a token is worth the largest
attention that it receives, over the queries of the repetition and the query heads of its group; shares are among the
sinks, the chunk that is repeated, and what has been repeated of it so far.
B rows, which stand alike; H KV heads, G query heads for each, S queries, D head dim, m tokens of the chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.buffers import SlotBuffer
from mlx_kv.cache.eviction.weights import Keys, Queries, blocks, log_sums, products
from mlx_kv.cache.layout import Budget, Row
from mlx_kv.cache.protocol import Call

NOT_READ = -1.0  # the share of tokens without a second pass


class SecondPassShares(NamedTuple):
    """The largest share of attention that tokens of one row received.

    Attributes:
        first: the position of the first of them.
        received: (H, m) of float32, the shares of this token and those that follow.
    """

    first: int
    received: mx.array

    @property
    def last(self) -> int:
        """One past the position of the last of them."""
        return self.first + self.received.shape[1]

    def at(self, positions: mx.array) -> mx.array:
        """The shares of tokens at `positions`, (1 or H, n): (H, n), `NOT_READ` for those without a second pass."""
        count = self.received.shape[1]
        index = mx.broadcast_to(positions - self.first, (self.received.shape[0], positions.shape[1]))
        found = mx.take_along_axis(self.received, mx.clip(index, 0, count - 1), axis=1)
        return mx.where((index >= 0) & (index < count), found, NOT_READ)

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
        own = self.between(self.first, other.first)
        if own is None:
            return other
        unread = mx.full((own.received.shape[0], other.first - own.last), NOT_READ)
        return SecondPassShares(own.first, mx.concatenate([own.received, unread, other.received], axis=1))


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
        return () if self._largest is None else tuple([SecondPassShares(self._first, own) for own in self._largest])

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
    own = Keys(keys.shape, lambda which: keys[:, :, which], mx.arange(total)[None, None])
    positions = mx.broadcast_to(mx.arange(total - count, total), (rows, count))
    every = Queries(queries, positions, scale, sinks)
    largest: mx.array | None = None
    for first, last in blocks(every, own):
        made = products(every.columns(first, last), own)  # (B, H, G, block, N)
        shares = (made[..., chosen] - log_sums(made, sinks)[..., None]).max(axis=(2, 3))  # their logarithms
        largest = shares if largest is None else mx.maximum(largest, shares)
        mx.eval(largest)
    assert largest is not None, "a pass has queries"
    return mx.exp(largest)
