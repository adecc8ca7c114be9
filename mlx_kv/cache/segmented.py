"""The keys and values of one layer of a batch: shared segments, and the rows' tails, grouped by length.

Tails are rows of `KVCache`s, one for each capacity class (`rule`, `moving`): rings, budgets and codecs are theirs.
While one cache has all rows, and no row has a segment, that cache serves the model as if it stood here itself.
B rows, Hq query heads, H KV heads, S new tokens, Dk and Dv head dims.

    make_mask(S)            -> a DeferredMask: each tail makes its own mask in `attend`
    update_and_fetch(k, v)  -> the same k and v, since no single pair of arrays holds what is read
    attend(call)            -> of each tail: make_mask -> update_and_fetch -> attention; merged with that over segments
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from mlx_kv.cache.attention import (
    BLOCK_SCORES,
    Dense,
    Joined,
    Operand,
    Operands,
    Partial,
    attend_beside,
    attend_partly,
    combined,
    merged,
)
from mlx_kv.cache.buffers import index_of, on_cpu
from mlx_kv.cache.checks import whole_numbers
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Layout
from mlx_kv.cache.mask import Mask
from mlx_kv.cache.protocol import Call, Fetched, Hook
from mlx_kv.cache.row_classes import (
    Part,
    Parts,
    Regrouping,
    RowClass,
    part_of,
    regroup,
    regroup_growing,
    regroup_to_share,
    room_in,
    tokens_before_eviction,
)
from mlx_kv.cache.rows import check_joinable, check_padding, check_rows
from mlx_kv.cache.segments import Chain, Segment, read_from, segment_of, sharable
from mlx_kv.cache.state import cut_chain

# --- attention over segments and tails --------------------------------------------------------------------------------

# Attention of a batch in several buffers: over the segments that rows share, and over their tails.
#
# Segments precede every query of their rows, so attention over them needs no causal mask, and the queries of all rows
# that read a segment are one matrix product (Hydragen, Juravsky et al. 2024). Partial results are merged by the
# log-sum-exp of their scores.
#
# B rows, R of which read a segment; Hq query heads, S queries of a row, n tokens of a segment, Dv head dim of values.


# Queries up to which segments are attended to at once, and not one after the other: on a CPU, scores of a block that
# stay in its caches count for more than few calls. 640 queries of two segments of 1,024 tokens take 0.8 of the time.
MAX_JOINED = 64


class DeferredMask:
    """What the caches of one step make their masks of; models hand it on from the layer that was asked to all others.

    Args:
        new, return_array, window_size: what the model asked `make_mask` for.
    """

    def __init__(self, new: int, return_array: bool, window_size: int | None) -> None:
        self._new, self._return_array, self._window = new, return_array, window_size
        self._known: dict[Any, Mask] = {}  # layers whose caches stand alike share a mask

    def of(self, rows: RowClass, cache: KVCache) -> Mask:
        """The mask of a cache before its update.

        Args:
            rows: of its class, which layers number differently. Caches of two classes have histories of their own, and
                may come to stand alike in what can be seen of them.
        """
        key = rows, cache.layout, cache.rows, cache.lengths
        by_integers = cache.evictor is None or self._window is None
        if key not in self._known or not by_integers:
            self._known[key] = cache.make_mask(self._new, self._return_array, self._window)
        return self._known[key]


class Reading:
    """Some consecutive segments, and the rows of a batch that read them.

    Args:
        segments: of a chain, one after the other.
        rows: of the batch.
        counts: of each of these rows, how many of the segments' tokens it uses.

    Attributes:
        tokens: of all these segments.
    """

    def __init__(self, segments: Sequence[Segment], rows: tuple[int, ...], counts: Sequence[int]) -> None:
        self.rows, self._counts, self._slots = rows, tuple(counts), max(counts)
        self._segments, self._take = segments, index_of(rows)
        self.tokens = sum(segment.tokens for segment in segments)
        self._seen: mx.array | None = None

    def attend(self, queries: mx.array, scale: float) -> Partial:
        """Attention of the rows that read these segments, of queries (B, Hq, S, D)."""
        queries = queries[self._take]
        rows, query_heads, new, dim = queries.shape
        together = queries.swapaxes(0, 1).reshape(1, query_heads, -1, dim)  # one row of more queries: (1, Hq, R * S, D)
        apart = on_cpu() and rows * new > MAX_JOINED
        partials, first = list[Partial](), 0
        for segments in [[segment] for segment in self._segments] if apart else [self._segments]:
            keys, values = _joined(segments, rows * new)
            last = min(first + keys.shape[2], self._slots)
            mask = self._mask(new, first, last)
            partials.append(attend_partly(together, keys, values, scale, mask, slots=last - first))
            first = last
        return Partial(*(x.reshape(query_heads, rows, new, -1).swapaxes(0, 1) for x in combined(partials)))

    def _mask(self, new: int, first: int, last: int) -> mx.array | None:
        """Which of the slots [first, last) each query sees, (1, 1, R S, last - first); None if all see all."""
        if min(self._counts) >= last:
            return None
        seen = mx.arange(first, last) < mx.array(self._counts)[:, None, None]  # (R, 1, n)
        return mx.broadcast_to(seen, (len(self.rows), new, last - first)).reshape(1, 1, -1, last - first)

    def operands(self, batch: int, new: int) -> Operands:
        """What is read, for queries (B, Hq, S, D) of the whole batch: rows that read nothing see nothing.

        Args:
            batch, new: B and S.
        """
        keys, values = _joined(self._segments, batch * new)
        if len(self.rows) == batch and min(self._counts) >= self.tokens:
            return Operands(keys, values, None)
        if self._seen is None:  # in the next steps, too
            counts = dict(zip(self.rows, self._counts, strict=True))
            seen = mx.arange(self.tokens) < mx.array([counts.get(row, 0) for row in range(batch)])[:, None, None, None]
            self._seen = seen
        return Operands(keys, values, self._seen)


def _joined(segments: Sequence[Segment], queries: int) -> tuple[Operand, Operand]:
    """Keys and values of segments, one after the other, for so many queries."""
    pairs, lengths = [one.operands(queries) for one in segments], [one.tokens for one in segments]
    keys, values = (Joined.of([pair[i] for pair in pairs], lengths) for i in range(2))
    return keys, values


def of_rows(rows: tuple[int, ...], partial: Partial, chosen: tuple[int, ...]) -> Partial:
    """A partial result of some rows as that of others: nothing was read of those that are not among them."""
    if rows == chosen:
        return partial
    place = {row: index for index, row in enumerate(rows)}
    if set(chosen) <= set(rows):
        index = index_of([place[row] for row in chosen])
        return Partial(partial.mixed[index], partial.level[index])
    index = mx.array([place.get(row, len(rows)) for row in chosen])
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
    rows_read = {row for reading in readings for row in reading.rows}
    at_once = len(parts) == 1 and _few_scores(call.queries.shape, readings, parts.first.capacity)
    outputs, partials = list[mx.array](), list[tuple[tuple[int, ...], Partial]]()
    for cache, rows, take in parts:
        queries, lengths = call.queries[take], cache.lengths
        if lengths is not None and not any(lengths) and cache.evictor is None:
            # Only padding, whose outputs are not used, but finite: prompts of other classes are longer.
            outputs.append(mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype))
            continue
        reads = not rows_read.isdisjoint(rows)
        if reads:
            cache.ungroup()  # heads by length can only be attended to alone
        layer_mask = mask.of(rows, cache)
        read, read_values = cache.update_and_fetch(keys[take], values[take])
        part_call = call.changed(queries=queries, keys=read, values=read_values, cache=cache, mask=layer_mask)
        if not reads:
            hook = cache.attention_hook
            outputs.append(part_call.forward() if hook is None else hook.attend(part_call))
        elif at_once and (cache.evictor is None or not cache.evictor.wants_attention):
            shared = [reading.operands(parts.rows, queries.shape[2]) for reading in readings]
            outputs.append(attend_beside(shared, _operands(cache, part_call), queries, call.scale, call.sinks))
        else:
            partials = partials or [(each.rows, each.attend(call.queries, call.scale)) for each in readings]
            own = [of_rows(others, each, rows) for others, each in partials if not set(others).isdisjoint(rows)]
            all_read = merged([attend_tails(cache, part_call), *own], call.sinks)
            outputs.append(all_read.astype(queries.dtype))
    return parts.joined(outputs)


def _few_scores(shape: tuple[int, ...], readings: Sequence[Reading], own: int) -> bool:
    """Whether a GPU may hold the scores of all segments and of the slots of each row, and rows read half of the former.

    Args:
        shape: of the queries, (B, Hq, S, D).
        own: slots of each row.
    """
    rows, query_heads, new, _ = shape
    slots = rows * sum(reading.tokens for reading in readings)
    read = sum(len(reading.rows) * reading.tokens for reading in readings)
    held = (slots + rows * own) * query_heads * new
    return not on_cpu() and slots <= 2 * read and held <= BLOCK_SCORES[mx.DeviceType.gpu]


def attend_tails(cache: KVCache, call: Call) -> Partial:
    """Attention after an update, to be merged with that over the segments that the rows share."""
    evictor = cache.evictor if cache.evictor is not None and cache.evictor.wants_attention else None
    call = call if evictor is None else evictor.masked(call, cache.rows, cache._counts)
    keys, values, mask = _operands(cache, call)
    partial = attend_partly(call.queries, keys, values, call.scale, mask)
    if evictor is None:
        return partial
    return partial._replace(mixed=evictor.observed(call, partial.mixed, cache.rows, cache._counts))


def _operands(cache: KVCache, call: Call) -> Operands:
    """What attention reads after an update."""
    attention = cache.own_attention(cache.packing)  # of planes that mlx-lm reads, too
    return Operands(Dense(call.keys), Dense(call.values), call.mask) if attention is None else attention.operands(call)


# --- the cache --------------------------------------------------------------------------------------------------------


class SegmentedCache:
    """Keys and values of one layer for a batch. It needs patched attention (`mlxlm.attention.AttentionPatch`).

    Takes the place of a batched cache in generation loops. `extract` returns a `KVCache`. Methods and their errors are
    those of `KVCache`; an error changes nothing.

    Args:
        cache: of one row, or of several in the order of the batch. The chain of a single row is used as soon as other
            rows have its segments, too.
        layer: its number in the sequence.
        split: the layers whose rows are in several parts, one set for all layers of the sequence; a batch has that of
            its first one. Layers share the mask that one of them is asked for. Where heads keep different numbers of
            tokens, rows may be one class in one layer and two in another: then no layer serves the model by one cache.
    """

    def __init__(self, cache: KVCache, layer: int = 0, split: set[int] | None = None) -> None:
        rows = range(len(cache.rows))
        self._begin([part_of(cache, rows)], [cache.chain for _ in rows], layer, set() if split is None else split)

    @classmethod
    def _of(cls, parts: Sequence[Part], chains: Sequence[Chain], layer: int, split: set[int]) -> Self:
        cache = cls.__new__(cls)
        cache._begin(parts, chains, layer, split)
        return cache

    def _begin(self, parts: Sequence[Part], chains: Sequence[Chain], layer: int, split: set[int]) -> None:
        self._layer, self._split = layer, split
        self._chains = list(chains)  # of each row of the batch
        self._set_parts(Parts(parts))
        self._interim_groups: list[object] = []
        self._pending: tuple[mx.array, mx.array] | None = None

    def _set_parts(self, parts: Parts) -> None:
        self._parts = parts
        self._is_split = len(parts) != 1 or any(self._chains)
        (self._split.add if self._is_split else self._split.discard)(self._layer)
        self._room = 0  # tokens until some row may outgrow its class
        self._before_eviction = 0  # tokens that each row can surely take before one that shares segments evicts
        self._readings: list[Reading] | None = None  # None: to be found anew

    @property
    def _only(self) -> KVCache | None:
        """The cache that serves the model alone, if there is one: then there is one in each layer."""
        return None if self._split else self._parts.first

    @property
    def parts(self) -> tuple[KVCache, ...]:
        """The caches, one for each class."""
        return self._parts.caches

    @property
    def segments(self) -> list[Segment]:
        """The segments that rows refer to, each once."""
        return list(dict.fromkeys(segment for chain in self._chains for segment, _ in chain))

    @property
    def places(self) -> list[tuple[KVCache, int]]:
        """Of each row of the batch, its cache and which row of that it is."""
        return self._parts.places

    # --- the update path ------------------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask for the next N tokens; of several caches what they will make it of, a `DeferredMask`."""
        self._pending, self._interim_groups = None, []
        if self._only is not None:
            return self._only.make_mask(N, return_array, window_size)
        return DeferredMask(N, return_array, window_size)

    def before_write(self, compacting: bool = False) -> None:
        """Gives rows that evict with the next write slots of their own for what they share (copy on write).

        To be called in all layers before each pass: layers of a sequence decide together, from their own slots.

        Args:
            compacting: all rows above their budget will evict, without a write.
        """
        if not self._is_split or (self._before_eviction > 0 and not compacting):
            return
        self._before_eviction = tokens_before_eviction(self._parts)
        if self._before_eviction <= 0 or compacting:
            self._update_sharing(tuple(self._parts), len(self._parts), compacting)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Fetched:
        """Stores the new tokens of every row; of several caches when they are attended to, which comes next.

        Args:
            keys: (B, H, S, Dk), floating point.  values: (B, H, S, Dv).

        Returns:
            what attention reads; of several caches nothing that it would read: keys and values.

        Raises:
            ValueError: another number of rows, or with one cache what `KVCache.update_and_fetch` refuses; the cache is
                then as it was. With several, they refuse it in `attend`.
        """
        if self._interim_groups:
            self._interim_groups = []
        if self._only is not None:
            return self._only.update_and_fetch(keys, values)
        if keys.shape[0] != self._parts.rows:
            raise ValueError(f"keys came with rows {keys.shape[0]}, but this batch has rows {self._parts.rows}")
        self._pending = keys, values
        return keys, values

    @property
    def attention_hook(self) -> Hook | None:
        """The attention hook of this layer: while one cache has all rows, the hook of that cache."""
        return self if self._only is None else self._only.attention_hook

    def attend(self, call: Call) -> mx.array:
        """(B, Hq, S, Dv): attention of every row after its update."""
        mask = call.mask
        assert self._pending is not None, "attention comes once, after each update"
        assert isinstance(mask, DeferredMask), "models that do not hand on the mask are not asked by class"
        (keys, values), self._pending = self._pending, None
        self._make_room(keys.shape[2])
        self._before_eviction -= keys.shape[2]
        if self._readings is None:
            shared = [cache.rows[index].shared for cache, index in self._parts.places]
            self._readings = readings_of(self._chains, shared)
        return attend(call, self._parts, self._readings, mask, keys, values)

    def _make_room(self, new: int) -> None:
        if self._room < new:
            self._room = room_in(self._parts)
            if self._room < new:
                self._set_parts(regroup_growing(self._parts, new))
                self._room = new  # where a class grows it is asked again
        self._room -= new

    # --- rows -----------------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[SegmentedCache]) -> Self:
        """A batch of copies of the rows of several, in their order.

        Raises:
            ValueError: none at all, or one that stores otherwise than the first.
        """
        if not caches:
            raise ValueError("got no cache to merge: give at least one")
        batch = cls._of((), (), caches[0]._layer, caches[0]._split)
        batch._join(caches)
        return batch

    def extend(self, other: SegmentedCache) -> None:
        """Adds copies of another's rows after its own. Rows of classes that none of them joins stay in place."""
        self._join([other])

    def _join(self, others: Sequence[SegmentedCache]) -> None:
        parts = list(self._parts)
        current = len(parts)
        for index, other in enumerate(others, min(current, 1)):
            first = sum(len(part.rows) for part in parts)
            if not isinstance(other, SegmentedCache):
                raise ValueError(f"cache {index} is a {type(other).__name__}: only caches of one kind can be one batch")
            for cache, rows, _ in other._parts:
                check_joinable(index, parts[0].cache if parts else cache, cache)
                parts.append(part_of(cache, [first + row for row in rows]))
        self._chains.extend(chain for other in others for chain in other._chains)
        self._update_sharing(parts, current)

    def _update_sharing(self, parts: Sequence[Part], current: int, compacting: bool = False) -> None:
        """Decides anew which tokens rows read from segments, and which rows are together."""
        regrouping = regroup_to_share(parts, self._chains, current, compacting)
        for number, (cache, index) in enumerate(regrouping.parts.places):
            if not sharable(cache, cache.rows[index], compacting):
                self._chains[number] = ()  # it will never share these segments again
        self._apply(regrouping)

    def _apply(self, regrouping: Regrouping) -> None:
        self._set_parts(regrouping.parts)
        self._interim_groups = [*self._interim_groups, *regrouping.interim_groups]

    def share(self, index: int, tokens: int) -> None:
        """Makes the first tokens of a row segments, as far as they are not, so that copies of the row can share them.

        Args:
            tokens: that the row holds; those that it may not share stay as they are.
        """
        chain, (cache, row) = self._chains[index], self._parts.places[index]
        known = sum(count for _, count in chain)
        tokens = min(tokens, sharable(cache, cache.rows[row]))
        if known < tokens:
            segment = segment_of(self.extract(index), known, tokens)
            mx.eval([buffer.planes for buffer in segment.buffers])
            self._chains[index] = (*chain, (segment, tokens - known))

    def extract(self, index: int) -> KVCache:
        """A copy of one row, as a cache of its own, with slots for all of its tokens."""
        check_rows([index], self._parts.rows)
        (cache, row), chain = self._parts.places[index], self._chains[index]
        single = cache.extract(row)
        read_from(chain, single, 0)
        single.chain = chain
        return single

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keeps only these rows, in this order; frees the others, and what only they needed."""
        chosen = list(whole_numbers(batch_indices, self._parts.rows))
        check_rows(chosen, self._parts.rows)
        if chosen == list(range(self._parts.rows)):
            return
        parts, self._chains = [], [self._chains[row] for row in chosen]
        for cache, rows, _ in self._parts:
            if kept := [row for row in chosen if row in rows]:
                cache.filter([rows.index(row) for row in kept])
                parts.append(part_of(cache, [chosen.index(row) for row in kept]))
        self._update_sharing(parts, len(parts))

    def prepare(
        self,
        *,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
    ) -> None:
        """Announces padding in the tokens that come."""
        check_padding(self._parts.rows, self.empty(), lengths, left_padding)
        if lengths is not None and all(cache.lengths is None for cache in self.parts):
            self._apply(regroup(tuple(self._parts), len(self._parts), lengths))
        for cache, rows, _ in self._parts:
            right, left = ([counts[row] for row in rows] if counts else None for counts in (lengths, left_padding))
            cache.prepare(lengths=right, left_padding=left)

    def finalize(self) -> None:
        """Ends what `prepare` announced. Nothing moves."""
        self._room = 0
        for cache in self.parts:
            cache.finalize()

    def reserve(self, tokens: int) -> None:
        """Announces that each row will hold `tokens` tokens in all: see `KVCache.reserve`."""
        for cache in self.parts:
            cache.reserve(tokens)

    # --- trims ----------------------------------------------------------------------------------------------------

    def is_trimmable(self) -> bool:
        """Whether every trim is lossless."""
        return all(cache.is_trimmable() for cache in self.parts)

    def can_trim(self, n: int | Sequence[int]) -> bool:
        """Whether every row can drop n tokens, or row i n[i] of them, and see what it saw before them."""
        try:
            counts = whole_numbers(n, self._parts.rows)
        except ValueError:
            return False
        if len(counts) != self._parts.rows:
            return False
        return all(cache.can_trim([counts[row] for row in rows]) for cache, rows, _ in self._parts)

    def trim(self, n: int) -> int:
        """Drops the last n tokens of every row, without moving anything, and returns n."""
        self.trim_per_sequence([n] * self._parts.rows)
        return n

    def trim_per_sequence(self, n: Sequence[int] | mx.array) -> None:
        """Drops the last n[i] tokens of row i, without moving anything."""
        counts, rows = whole_numbers(n, self._parts.rows), self._parts.rows
        if len(counts) != rows:
            raise ValueError(f"got {len(counts)} counts to trim by, but this cache has {rows} rows: give one for each")
        trims = [(part.cache, [counts[row] for row in part.rows]) for part in self._parts]
        for cache, part_counts in sorted(trims, key=lambda trim: trim[0].can_trim(trim[1])):
            cache.trim_per_sequence(part_counts)  # those that cannot come first, and raise
        if any(self._chains):
            ends = [cache.rows[index].offset for cache, index in self._parts.places]
            self._chains = [cut_chain(chain, end) for chain, end in zip(self._chains, ends, strict=True)]
            self._readings = None
            places = self._parts.places
            if any(cache.rows[index].shared > sharable(cache, cache.rows[index]) for cache, index in places):
                self._update_sharing(tuple(self._parts), len(self._parts))

    # --- what others read -------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Which slot holds which position."""
        return self._parts.first.layout

    @property
    def offset(self) -> int | mx.array:
        """The next position: an int where all rows agree, an array (B,) of int32 where they differ."""
        if not self._is_split:
            return self._parts.first.offset
        offsets = [cache.rows[index].offset for cache, index in self._parts.places]
        return offsets[0] if len(set(offsets)) == 1 else mx.array(offsets)

    @property
    def keys(self) -> mx.array | None:
        """Those of the first class, as a pipelined model replaces them: what they wait for, all of them wait for."""
        return self._parts.first.keys

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._parts.first.keys = value

    def size(self) -> int:
        """Tokens held by the longest row."""
        return max(cache.size() for cache in self.parts)

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return all(cache.empty() for cache in self.parts)

    @property
    def capacity(self) -> int:
        """Slots allocated for each row of the class that has most; 0 before the first update."""
        return max(cache.capacity for cache in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, dead slots included."""
        return sum(cache.nbytes for cache in self.parts) + sum(segment.nbytes for segment in self.segments)

    @property
    def nbytes_live(self) -> int:
        """Bytes of the slots that hold a token, and of newest tokens as they came; of segments, what rows read now."""
        read: dict[Segment, int] = {}  # tokens; rows may have segments that none reads yet, beside slots of their own
        for chain, (cache, row) in zip(self._chains, self.places, strict=True):
            left = cache.rows[row].shared
            for segment, count in chain:
                read[segment] = max(read.get(segment, 0), min(left, count))
                left = max(0, left - count)
        shared = sum(segment.nbytes * count // segment.tokens for segment, count in read.items())
        return sum(cache.nbytes_live for cache in self.parts) + shared

    @property
    def nbytes_full(self) -> int:
        """Bytes that all tokens up to here would take if none had been evicted or overwritten."""
        return sum(cache.nbytes_full for cache in self.parts)

    @property
    def state(self) -> list[Any]:
        """Those of its caches, to evaluate. To go on from elsewhere, take rows out by `extract`."""
        return [cache.state for cache in self.parts]

    @property
    def bits(self) -> int:
        """As of `KVCache`: there only while one cache has all rows, and packs them."""
        return self._alone("bits").bits

    @property
    def group_size(self) -> int:
        """Elements that share a scale in the last fetch; there only when `bits` is."""
        return self._alone("group_size").group_size

    def _alone(self, name: str) -> KVCache:
        if self._only is None:
            raise AttributeError(f"{name} is that of one cache, and this batch has {len(self._parts)}")
        return self._only

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        parts = [part._replace(cache=copy.deepcopy(part.cache, memo)) for part in self._parts]
        result = memo[id(self)] = self._of(parts, self._chains, self._layer, copy.deepcopy(self._split, memo))
        return result

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, (*self.parts, *self.segments)))})"
