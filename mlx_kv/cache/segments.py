"""Segments: keys and values of first tokens that any number of rows read.

A row of a batch is a chain of segments, of which it uses the first `Row.shared` tokens, and a tail in slots of its own.
n tokens of a segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mlx_kv.cache.attention import Operand, operand_of
from mlx_kv.cache.buffers import Buffers, SlotBuffer
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.growth import round_up
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Append, Budget, Row
from mlx_kv.cache.plan import round_tail


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

    def operands(self, queries: int) -> tuple[Operand, Operand]:
        """Keys and values, (1, H, n, D), for so many queries."""
        keys, values = (operand_of(buffer.codec, buffer.planes, buffer.dtype, queries) for buffer in self.buffers)
        return keys, values


# The first tokens of a sequence: segments, one after the other, and how many of the first tokens of each belong to it.
Chain = tuple[tuple[Segment, int], ...]


def shared_tokens(chains: Sequence[Chain], now: Sequence[int], min_saving: int) -> list[int]:
    """How many tokens each row of a batch reads from segments: as many as other rows read, too, where that pays.

    Sharing saves the slots that would be read once for each row, and costs a few more calls for each layer and step:
    `min_saving` slots, or half as many where it is done already, so that it does not flip.

    Args:
        chains: of each row.
        now: tokens that each row reads from segments so far.
        min_saving: slots to save for each run of segments.
    """
    users: dict[Segment, list[int]] = {}
    for row, chain in enumerate(chains):
        for segment, _ in chain:
            users.setdefault(segment, []).append(row)
    targets = [0] * len(chains)
    for first in {chain[0][0] for chain in chains if chain}:  # rows that begin alike
        rows = users[first]
        shared = [itertools.takewhile(lambda link: len(users[link[0]]) > 1, chains[row]) for row in rows]
        counts = [sum(tokens for _, tokens in links) for links in shared]
        read = {segment: tokens for row in rows for segment, tokens in chains[row] if len(users[segment]) > 1}
        saved = sum((len(users[segment]) - 1) * tokens for segment, tokens in read.items())
        runs = len({tuple(users[segment]) for segment in read})
        least = min_saving * runs / (2 if any(now[row] for row in rows) else 1)
        if len(rows) > 1 and saved >= least:
            for row, count in zip(rows, counts, strict=True):
                targets[row] = count
    return targets


def read_from(chain: Chain, cache: KVCache, tokens: int) -> None:
    """Makes a cache of one row read so many first tokens from its chain, and have slots of its own for the others.

    Args:
        chain: with these tokens, and with those that the cache reads from it now.
    """
    (row,), buffers = cache.rows, cache.buffers
    more = tokens - row.shared
    if more == 0:
        return
    assert buffers is not None
    parts, end = [], 0  # buffers, and which of their slots [first, last)
    for segment, count in chain:
        first, last = max(tokens - end, 0), min(row.shared - end, count)
        if first < last:  # none where the cache reads more from its chain than before
            parts.append((segment.buffers, first, last))
        end += count
    parts.append((buffers, max(more, 0), row.end))
    capacity = (round_tail if more > 0 else round_up)(row.end - more + 1)
    keys, values = (
        SlotBuffer.in_order([(stored[which], first, last) for stored, first, last in parts], capacity)
        for which in range(2)
    )
    cache.buffers = keys, values
    cache.rows = (row._replace(start=row.start - more, shared=row.shared + more),)
    cache.announced = tuple([count and max(0, count - more) for count in cache.announced])
    cache._forget_fetch()


def can_evict_later(evictor: Evictor) -> bool:
    """Whether nothing needs the slots of all tokens before the first compaction, so that some may lie in segments.

    A second pass reads them.
    """
    return not (evictor.paused or evictor.second_pass)


def sharable(cache: KVCache, row: Row, compacting: bool = False) -> int:
    """First tokens of a row that may lie in segments, which cannot change.

    None of those that later queries see in full precision (a residual), and none once the row evicts tokens.

    Args:
        compacting: whether rows above their budget evict now, not only those that are due.
    """
    if isinstance(cache.layout, Budget):
        evictor = cache.evictor
        due = cache.layout.visible_tokens(row) > cache.layout.budget if compacting else cache.layout.due(row)
        if row.evicted > 0 or due or evictor is None or not can_evict_later(evictor):
            return 0
    elif not isinstance(cache.layout, Append):
        return 0
    return max(0, row.offset - max(0, cache.residual_length - 1)) if cache.encoded else 0


def can_share(cache: KVCache) -> bool:
    """Whether first tokens of a cache of one row may lie in segments."""
    return len(cache.rows) == 1 and sharable(cache, cache.rows[0]) > 0


def segment_of(cache: KVCache, first: int, last: int) -> Segment:
    """A copy of the slots [first, last) of a cache of one row, as a segment."""
    buffers = cache.buffers
    assert buffers is not None
    keys, values = (SlotBuffer.in_order([(buffer, first, last)], last - first) for buffer in buffers)
    return Segment((keys, values))
