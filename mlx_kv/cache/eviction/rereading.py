"""What tokens receive while their text is read once more, and what is kept of that.

A text is repeated over a cache that holds all of it: what the repetition looks at is needed to say it again. Decides
which keys such a query chooses among, and how the largest share that each token got is found without the whole matrix.
Who reads what again, and when, is none of its business.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction": a token is worth the largest
attention that it receives, over the queries of the repetition and the query heads of its group; shares are among the
sinks, the chunk that is repeated, and what has been repeated of it so far.
B rows, which stand alike; H KV heads, G query heads for each, S queries, D head dim, m tokens of the chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.eviction.held import Cached
from mlx_kv.cache.eviction.weights import log_sums
from mlx_kv.cache.layout import Budget
from mlx_kv.cache.protocol import Call

NOT_READ = -1.0  # in the place of a share, of tokens that were not read again
MOST_WEIGHTS = 2**22  # numbers at once: blocks of queries are as long as that allows


class Reread(NamedTuple):
    """What tokens of one row received.

    Attributes:
        first: the position of the first of them.
        received: (H, m) of float32: of this one and those that follow, the largest share of attention.
    """

    first: int
    received: mx.array

    @property
    def last(self) -> int:
        """One past the position of the last of them."""
        return self.first + self.received.shape[1]

    def at(self, positions: mx.array) -> mx.array:
        """(H, n) of the tokens at some positions, (1 or H, n): `NOT_READ` for those that were not read again."""
        count = self.received.shape[1]
        index = mx.broadcast_to(positions - self.first, (self.received.shape[0], positions.shape[1]))
        found = mx.take_along_axis(self.received, mx.clip(index, 0, count - 1), axis=1)
        return mx.where((index >= 0) & (index < count), found, NOT_READ)

    def between(self, first: int, last: int) -> Reread | None:
        """Of the tokens at positions [first, last) alone; None where there are none of them."""
        first, last = max(first, self.first), min(last, self.last)
        if first >= last:
            return None
        if (first, last) == (self.first, self.last):
            return self
        return Reread(first, self.received[:, first - self.first : last - self.first])

    def then(self, other: Reread) -> Reread:
        """These tokens, and others that follow; those between were not read again, as answers are not."""
        own = self.between(self.first, other.first)
        if own is None:
            return other
        unread = mx.full((own.received.shape[0], other.first - own.last), NOT_READ)
        return Reread(own.first, mx.concatenate([own.received, unread, other.received], axis=1))


class Listener:
    """Sees the attention of the queries that repeat a chunk, in the place of a cache's `attention_hook`.

    Args:
        cache: of rows that stand alike, which holds all tokens of the chunk in the order in which they came.
        layout: its budget.
        first, last: positions of the chunk; the repetition is written from where the rows stand now.
    """

    def __init__(self, cache: Cached, layout: Budget, first: int, last: int) -> None:
        self._cache, self._first, self._last = cache, first, last
        self._sinks, self._written = min(layout.sinks, first), cache.view.rows[0].offset
        self._largest: mx.array | None = None

    @property
    def reread(self) -> tuple[Reread, ...]:
        """What the chunk has received, by row; nothing before anything was repeated."""
        return () if self._largest is None else tuple([Reread(self._first, own) for own in self._largest])

    def attend(self, call: Call) -> mx.array:
        """(B, Hq, S, Dv): what the layer would have got, seen on its way."""
        row, buffers = self._cache.view.rows[0], self._cache.view.buffers
        assert buffers is not None, "attention comes after an update"
        start, keys = row.start, buffers[0]
        ranges = (start + self._first, start + self._last), (start + self._written, row.end)
        seen = keys.decode(keys.read(((0, self._sinks), *ranges) if self._sinks else ranges))
        count = self._last - self._first
        largest = largest_shares(call.queries, seen, call.scale, slice(self._sinks, self._sinks + count), call.sinks)
        self._largest = largest if self._largest is None else mx.maximum(self._largest, largest)
        mx.eval(self._largest)
        return call.hand_on()


def largest_shares(
    queries: mx.array, keys: mx.array, scale: float, chosen: slice, sinks: mx.array | None = None
) -> mx.array:
    """The largest share of attention that each of some tokens gets, over queries and the heads of a group: (B, H, m).

    Args:
        queries: (B, H * G, S, D), of the last S of the keys' tokens: each sees its own and those before.
        keys: (B, H, N, D).
        chosen: the tokens that are asked about.
        sinks: (H * G,), logits that shares are divided by beside those of tokens, where the model has them.
    """
    rows, heads, count, dim = keys.shape[0], keys.shape[1], queries.shape[2], queries.shape[3]
    groups, total = queries.shape[1] // heads, keys.shape[2]
    grouped = queries.reshape(rows, heads, groups, count, dim).astype(mx.float32) * scale
    turned = keys.swapaxes(2, 3).astype(mx.float32)  # (B, H, D, N)
    block = max(1, MOST_WEIGHTS // (total * rows * queries.shape[1]))
    largest: mx.array | None = None
    for begin in range(0, count, block):
        some = grouped[:, :, :, begin : begin + block]
        size = some.shape[3]
        logits = some.reshape(rows, heads, groups * size, dim) @ turned
        logits = logits.reshape(rows, heads, groups, size, total)
        newest = mx.arange(total - count + begin, total - count + begin + size)[:, None]  # what each query sees last
        logits = mx.where(mx.arange(total) <= newest, logits, -mx.inf)
        shares = (logits[..., chosen] - log_sums(logits, sinks)[..., None]).max(axis=(2, 3))  # their logarithms
        largest = shares if largest is None else mx.maximum(largest, shares)
        mx.eval(largest)
    assert largest is not None, "a pass has queries"
    return mx.exp(largest)
