"""Segments: keys and values of first tokens that any number of rows read, and attention over them.

A row of a batch is a chain of segments, of which it uses the first `Row.shared` tokens, and a tail in slots of its own.
Segments precede every query of their rows, so attention over them needs no causal mask, and the queries of all rows
that read a segment are one matrix product (Hydragen, Juravsky et al. 2024).

R rows that read a segment, Hq query heads, H KV heads, r = Hq / H, S queries of a row, n tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlx_kv.cache.attention import Joined, Operand, Partial, attend_partly, operand_of
from mlx_kv.cache.buffers import Buffers, SlotBuffer, index_of
from mlx_kv.cache.codecs import PLAIN
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Append
from mlx_kv.cache.protocol import Call
from mlx_kv.cache.rows import with_first, without_first


class Segment:
    """Keys and values of consecutive tokens of one layer. Never written to; it lives as long as a row refers to it.

    Args:
        buffers: of the keys and of the values, of one row, every slot a token.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers

    @property
    def tokens(self) -> int:
        return self.buffers[0].capacity

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Keys and values, (1, H, n, D)."""
        keys, values = (operand_of(buffer.codec, buffer.planes, buffer.dtype) for buffer in self.buffers)
        return keys, values


# The first tokens of a sequence: segments, one after the other, and how many of the first tokens of each belong to it.
Chain = tuple[tuple[Segment, int], ...]


class Reading:
    """Some consecutive segments, and the rows of a batch that read them.

    Args:
        segments: of a chain, one after the other.
        rows: of the batch.
        counts: of each of these rows, how many of the segments' tokens it uses.
    """

    def __init__(self, segments: Sequence[Segment], rows: tuple[int, ...], counts: Sequence[int]) -> None:
        self.rows, self._counts, self._slots = rows, tuple(counts), max(counts)
        self._take = index_of(rows)
        each = [segment.operands for segment in segments]
        lengths = [segment.tokens for segment in segments]
        self._keys, self._values = (Joined.of([own[i] for own in each], lengths) for i in range(2))

    def attend(self, queries: mx.array, scale: float) -> Partial:
        """Attention of the rows that read these segments, of queries (B, Hq, S, D)."""
        own = queries[self._take]
        rows, query_heads, new, dim = own.shape
        together = own.swapaxes(0, 1).reshape(1, query_heads, -1, dim)  # one row of more queries: (1, Hq, R * S, D)
        mask = None
        if min(self._counts) < self._slots:
            seen = mx.arange(self._slots) < mx.array(self._counts)[:, None, None]  # (R, 1, n)
            mask = mx.broadcast_to(seen, (rows, new, self._slots)).reshape(1, 1, -1, self._slots)
        found = attend_partly(together, self._keys, self._values, scale, mask, slots=self._slots)
        return Partial(*(x.reshape(query_heads, rows, new, -1).swapaxes(0, 1) for x in found))


def attend_tails(call: Call, cache: KVCache) -> Partial:
    """Attention over the tails of some rows, to be merged with that over their segments."""
    assert cache.evictor is None
    assert cache.view.residual is None
    packed = not isinstance(call.keys, mx.array)
    keys, values = (
        operand_of(codec if packed else PLAIN[0], planes if packed else (planes,), call.queries.dtype)
        for codec, planes in zip(cache.view.codecs, (call.keys, call.values), strict=True)
    )
    return attend_partly(call.queries, keys, values, call.scale, call.mask)


def of_all_rows(rows: tuple[int, ...], partial: Partial, batch: int) -> Partial:
    """The same of every row of the batch: nothing was read of the others."""
    if rows == tuple(range(batch)):
        return partial
    place = {row: index for index, row in enumerate(rows)}
    index = mx.array([place.get(row, len(rows)) for row in range(batch)])
    nothing = 0.0, mx.finfo(mx.float32).min
    return Partial(
        *(
            mx.concatenate([x, mx.full((1, *x.shape[1:]), value)])[index]
            for x, value in zip(partial, nothing, strict=True)
        )
    )


def readings_of(chains: Sequence[Chain], shared: Sequence[int]) -> list[Reading]:
    """How the rows of a batch read their segments: neighbours that the same rows read are read together.

    Args:
        chains: of each row.
        shared: tokens that each row uses of its chain.
    """
    users: dict[Segment, list[tuple[int, int]]] = {}  # rows and tokens used, in the order of the chains
    for row, (chain, count) in enumerate(zip(chains, shared, strict=True)):
        for segment, tokens in chain:
            if count > 0:
                users.setdefault(segment, []).append((row, min(count, tokens)))
            count -= tokens
    runs: list[tuple[list[Segment], tuple[int, ...], list[int]]] = []
    whole = False  # whether all rows of the last run use all of its segments
    for segment, uses in users.items():
        rows, counts = tuple(row for row, _ in uses), [count for _, count in uses]
        if runs and whole and runs[-1][1] == rows:
            runs[-1][0].append(segment)
            runs[-1][2][:] = [before + count for before, count in zip(runs[-1][2], counts, strict=True)]
        else:
            runs.append(([segment], rows, counts))
        whole = min(counts) == segment.tokens
    return [Reading(*run) for run in runs]


def shared_tokens(chains: Sequence[Chain], now: Sequence[int], least_saved: int) -> list[int]:
    """How many tokens each row of a batch reads from segments: as many as other rows read, too, where that pays.

    Sharing saves the slots that would be read once for each row, and costs a few more calls for each layer and step:
    `least_saved` slots, or half as many where it is done already, so that it does not flip.

    Args:
        chains: of each row.
        now: tokens that each row reads from segments so far.
        least_saved: slots to save for each run of segments.
    """
    users: dict[Segment, list[int]] = {}
    for row, chain in enumerate(chains):
        for segment, _ in chain:
            users.setdefault(segment, []).append(row)
    wanted = [0] * len(chains)
    for first in {chain[0][0] for chain in chains if chain}:  # rows that begin alike
        rows = users[first]
        counts = [_leading(chains[row], users) for row in rows]
        read = {segment: tokens for row in rows for segment, tokens in chains[row] if len(users[segment]) > 1}
        saved = sum((len(users[segment]) - 1) * tokens for segment, tokens in read.items())
        runs = len({tuple(users[segment]) for segment in read})
        least = least_saved * runs / (2 if any(now[row] for row in rows) else 1)
        if len(rows) > 1 and saved >= least:
            for row, count in zip(rows, counts, strict=True):
                wanted[row] = count
    return wanted


def _leading(chain: Chain, users: Mapping[Segment, Sequence[int]]) -> int:
    """The first tokens of a chain that several rows have."""
    count = 0
    for segment, tokens in chain:
        if len(users[segment]) < 2:
            break
        count += tokens
    return count


def with_shared(chain: Chain, cache: KVCache, tokens: int) -> KVCache:
    """A cache of one row that has slots for all but its first tokens, so many of which it reads from its chain."""
    now = cache.view.rows[0].shared
    if tokens == now:
        return cache
    if tokens > now:
        return cache._like(without_first(cache.view, tokens - now))
    parts, end = [], 0
    for segment, count in chain:
        first, last = max(tokens - end, 0), min(now - end, count)
        if first < last:
            parts.append((segment.buffers, first, last))
        end += count
    return cache._like(with_first(cache.view, parts))


def with_chain(cache: KVCache, chain: Chain) -> KVCache:
    """The same cache of one row, which may read the tokens of this chain from there."""
    if chain == cache.view.chain:
        return cache
    data = cache.view.without_evictor()
    data.chain = chain
    return cache._like(data)


def can_share(cache: KVCache) -> bool:
    """Whether first tokens of a cache of one row can be in segments: it keeps all tokens, and has no residual."""
    view = cache.view
    return isinstance(view.layout, Append) and view.residual is None and len(view.rows) == 1 and view.encoded


def segment_of(cache: KVCache, first: int, last: int) -> Segment:
    """A copy of the slots [first, last) of a cache of one row, as a segment."""
    buffers = cache.view.buffers
    assert buffers is not None
    keys, values = (SlotBuffer.in_order([(buffer, first, last)], last - first) for buffer in buffers)
    return Segment((keys, values))
