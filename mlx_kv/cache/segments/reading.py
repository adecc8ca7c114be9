"""Attention of a batch in several buffers: over the segments that rows share, and over their tails.

Segments precede every query of their rows, so attention over them needs no causal mask, and the queries of all rows
that read a segment are one matrix product (Hydragen, Juravsky et al. 2024). Partial results are merged by the
log-sum-exp of their scores.

B rows, R of which read a segment; Hq query heads, S queries of a row, n tokens of a segment, Dv head dim of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.cache.attention import Dense, Joined, Operand, Partial, attend_partly, combined, merged, operand_of
from mlx_kv.cache.buffers import index_of, on_cpu
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.mask import Mask
from mlx_kv.cache.protocol import Call
from mlx_kv.cache.segments.moving import Parts
from mlx_kv.cache.segments.segment import Chain, Segment

# Queries up to which segments are attended to at once, and not one after the other: on a CPU, scores of a block that
# stay in its caches count for more than few calls. 640 queries of two segments of 1,024 tokens take 0.8 of the time.
MOST_JOINED = 64


class DeferredMask:
    """What the caches of one step make their masks of; models hand it on from the layer that was asked to all others.

    Args:
        new, return_array, window_size: what the model asked `make_mask` for.
    """

    def __init__(self, new: int, return_array: bool, window_size: int | None) -> None:
        self._new, self._return_array, self._window = new, return_array, window_size
        self._known: dict[Any, Mask] = {}  # layers whose caches stand alike share a mask

    def of(self, number: int, cache: KVCache) -> Mask:
        """The mask of a cache before its update.

        Args:
            number: of its class. Caches of two classes have histories of their own, and may come to stand alike in what
                can be seen of them.
        """
        if cache.evictor is not None and self._window is not None:  # then integers alone do not say
            return self._made_by(cache)
        key = number, cache.layout, cache.rows, cache.lengths
        if key not in self._known:
            self._known[key] = self._made_by(cache)
        return self._known[key]

    def _made_by(self, cache: KVCache) -> Mask:
        return cache.make_mask(self._new, self._return_array, self._window)


class Reading:
    """Some consecutive segments, and the rows of a batch that read them.

    Args:
        segments: of a chain, one after the other.
        rows: of the batch.
        counts: of each of these rows, how many of the segments' tokens it uses.
    """

    def __init__(self, segments: Sequence[Segment], rows: tuple[int, ...], counts: Sequence[int]) -> None:
        self.rows, self._counts, self._slots = rows, tuple(counts), max(counts)
        self._segments, self._take = segments, index_of(rows)

    def attend(self, queries: mx.array, scale: float) -> Partial:
        """Attention of the rows that read these segments, of queries (B, Hq, S, D)."""
        own = queries[self._take]
        rows, query_heads, new, dim = own.shape
        together = own.swapaxes(0, 1).reshape(1, query_heads, -1, dim)  # one row of more queries: (1, Hq, R * S, D)
        apart = on_cpu() and rows * new > MOST_JOINED
        found, first = list[Partial](), 0
        for segments in [[segment] for segment in self._segments] if apart else [self._segments]:
            each, lengths = [one.operands(rows * new) for one in segments], [one.tokens for one in segments]
            keys, values = (Joined.of([own[i] for own in each], lengths) for i in range(2))
            last = min(first + sum(lengths), self._slots)
            mask = self._mask(new, first, last)
            found.append(attend_partly(together, keys, values, scale, mask, slots=last - first))
            first = last
        return Partial(*(x.reshape(query_heads, rows, new, -1).swapaxes(0, 1) for x in combined(found)))

    def _mask(self, new: int, first: int, last: int) -> mx.array | None:
        """Which of the slots [first, last) each query sees, (1, 1, R S, last - first); None if all see all."""
        if min(self._counts) >= last:
            return None
        seen = mx.arange(first, last) < mx.array(self._counts)[:, None, None]  # (R, 1, n)
        return mx.broadcast_to(seen, (len(self.rows), new, last - first)).reshape(1, 1, -1, last - first)


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


def attend(
    call: Call, parts: Parts, readings: Sequence[Reading], mask: DeferredMask, keys: mx.array, values: mx.array
) -> mx.array:
    """(B, Hq, S, Dv): attention of every row, whose new keys and values are stored first.

    Args:
        parts: with every row; each makes its own mask.
        readings: the segments that rows read.
        keys, values: of the new tokens, (B, H, S, Dk) and (B, H, S, Dv).
    """
    outputs: list[mx.array] = []
    partials: list[tuple[tuple[int, ...], Partial]] = []
    for number, (cache, rows, take) in enumerate(parts):
        queries, lengths = call.queries[take], cache.lengths
        if lengths is not None and not any(lengths) and cache.evictor is None:
            # Only padding, whose outputs are not used, but finite: prompts of other classes are longer.
            outputs.append(mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype))
            partials.append((rows, Partial(outputs[-1], mx.zeros((*queries.shape[:3], 1)))))
            continue
        if readings:
            cache.ungroup()  # heads by length can only be attended to alone
        made = mask.of(number, cache)
        read, read_values = cache.update_and_fetch(keys[take], values[take])
        own = call.changed(queries=queries, keys=read, values=read_values, cache=cache, mask=made)
        if readings:
            partials.append((rows, attend_tails(cache, own)))
        else:
            hook = cache.attention_hook
            outputs.append(own.forward() if hook is None else hook.attend(own))
    if not readings:
        return parts.joined(outputs)
    partials += [(reading.rows, reading.attend(call.queries, call.scale)) for reading in readings]
    everyone = [of_all_rows(rows, partial, parts.rows) for rows, partial in partials]
    return merged(everyone, call.sinks).astype(call.queries.dtype)


def attend_tails(cache: KVCache, call: Call) -> Partial:
    """Attention after an update, to be merged with that over the segments that the rows share."""
    evictor, attention = cache.evictor, cache._attention()
    evictor = evictor if evictor is not None and evictor.wants_attention else None
    call = call if evictor is None else evictor.masked(call, cache.rows, cache._counts)
    keys: Operand
    values: Operand
    if attention is not None:
        keys, values, mask = attention.operands(call)
    elif cache._packed:  # mlx-lm's attention reads these
        keys, values = (
            operand_of(codec, planes, call.queries.dtype)
            for codec, planes in zip(cache.codecs, (call.keys, call.values), strict=True)
        )
        mask = call.mask
    else:
        keys, values, mask = Dense(call.keys), Dense(call.values), call.mask
    partial = attend_partly(call.queries, keys, values, call.scale, mask)
    if evictor is None:
        return partial
    return partial._replace(mixed=evictor.observed(call, partial.mixed, cache.rows, cache._counts))
