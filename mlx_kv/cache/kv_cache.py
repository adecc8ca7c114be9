"""The KV cache of one attention layer: one update path for every combination of layout, codec and budget.

Read next: `state` (the fields of a cache and its serialisable state), `update` (one update, step by step), `rows`
(joining and selecting rows) and `info` (properties and copies). mlx-lm's models use the names of `protocol.Cache`.
B rows, H KV heads, S new tokens, Dk and Dv head dims, C capacity in slots.

    make_mask(S)            -> plan(S) -> None | "causal" | array
    update_and_fetch(k, v)  -> compact, if due -> plan(S) -> make room -> write into slots -> read

The plan consists of Python integers: an update synchronises with the device only when it reallocates buffers or
compacts a budget, and builds no chain of small unevaluated arrays.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx

from mlx_kv.cache import attending, rows, state, update
from mlx_kv.cache.checks import check_storage, check_type, whole_numbers
from mlx_kv.cache.codecs import Bits, Choice, are_plain, find_codecs
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.growth import DEFAULT, Growth
from mlx_kv.cache.info import CacheInfo
from mlx_kv.cache.layout import Append, Layout, Row, trim_rows
from mlx_kv.cache.mask import Mask, make_mask
from mlx_kv.cache.protocol import Call, Fetched, Hook
from mlx_kv.cache.residual import Residual
from mlx_kv.cache.state import CacheData, cut_chain
from mlx_kv.settings import shown, whole_number


class KVCache(CacheInfo):
    """Keys and values of one layer, plain or quantised, for a sequence or a batch: all tokens, or those a layout keeps.

    Args:
        bits: 2, 3, 4, 5, 6 or 8 to store quantised (`mx.quantize`, affine), or two numbers, of keys and of values; None
            stores tensors as they are.
        group_size: elements that share a scale, 32, 64 or 128; only looked at with bits.
        growth: rule for the next capacity when the buffers are full.
        reserve: tokens allocated at the first update; up to there nothing grows and nothing is copied.
        quantized_start: stay plain until a write begins at this offset or later, in any row; then quantise all, once.
        packed_decode: return packed planes to attention for writes of up to 8 tokens. False for models whose attention
            cannot read them (attention sinks, MLA); `make_prompt_cache` detects these.
        layout: which slot holds which position: all tokens (the default), a ring, chunks, or a budget.
        evictor: compacts the rows of a budget and brings its layout; None makes one with the default score where the
            layout is a budget.
        residual_length: newest tokens, the query's own included, that a query sees in full precision; 0 is none.
            Requires attention to be patched (`make_prompt_cache` checks that). At most keep_recent of a budget.
        codec: how tensors are stored: a codec or its name (`mlx_kv.codec_names()`), or two, of keys and of values;
            instead of bits, or with bits for codecs that need them ("rotated").

    Raises:
        ValueError: bits, a group size or a codec that don't exist, or don't combine; a negative number;
            quantized_start or residual_length where nothing is quantised; a residual_length above keep_recent, with
            heads of different numbers of tokens, or with a max_rollback above 64; an evictor and a layout that is not
            the evictor's.
    """

    _hook: Hook | None = None  # set from outside

    def __init__(
        self,
        bits: Bits | None = None,
        group_size: int = 64,
        growth: Growth = DEFAULT,
        reserve: int = 0,
        *,
        quantized_start: int = 0,
        packed_decode: bool = True,
        layout: Layout = Append(),
        evictor: Evictor | None = None,
        codec: Choice | None = None,
        residual_length: int = 0,
    ) -> None:
        codecs = find_codecs(bits, group_size, codec)
        _check_parts(layout, evictor)
        check_storage(codecs, growth, reserve, quantized_start, residual_length)
        if evictor is not None and layout not in (Append(), evictor.layout):
            raise ValueError(f"got {layout}, but an evictor of {evictor.layout}: leave the layout out")
        residual = Residual(residual_length) if residual_length else None
        made = CacheData(codecs, layout, evictor, growth, reserve, quantized_start, packed_decode, residual=residual)
        super().__init__(made)

    # --- the update path ------------------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask for the next N tokens: None, "causal", or booleans (N, K) or (B, 1, N, K).

        With a window over a budget, a compaction that is due runs here: the mask depends on the tokens that are left.
        """
        data = self._data
        data.transient = None  # a new step begins
        if (usual := update.next_plan(data, N)) is not None and (window_size is None or data.evictor is None):
            return make_mask(usual, window_size, return_array)
        if data.evictor is None:
            return make_mask(update.plan_for(data, data.rows, N), window_size, return_array)
        # The next update compacts what is due. The rows after it follow from integers, except in layers whose lengths
        # may differ: these replace this mask (`OwnMasks`). Only a window depends on which tokens are
        # left: then the compaction comes first.
        if window_size is not None:
            data.rows = data.evictor.compact_if_due(data.rows)
        plan = update.plan_for(data, tuple(map(data.layout.compacted_if_due, data.rows)), N)
        positions = None if window_size is None else data.evictor.key_positions(plan)
        return make_mask(plan, window_size, return_array, positions)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Fetched:
        """Stores the new tokens of every row and returns the keys and values that attention reads.

        Args:
            keys: (B, H, S, Dk), floating point.  values: (B, H, S, Dv).

        Returns:
            keys (B, H, n, Dk) and values (B, H, n, Dv), or packed planes of both: for mlx-lm's attention where `bits`
            is visible, else for `attend`.

        Raises:
            ValueError: shapes or dtypes that don't fit; with a budget, a score that cannot be used, or layers that
                have diverged. The cache is unchanged then.
        """
        fetched = update.step(self._data, keys, values)
        if fetched is None:
            fetched = update.store(self._data, keys, values)
            update.remember(self._data, keys, values)
        return fetched

    def keys_and_values(self) -> Fetched:
        """What the last update returned: some models read one layer's cache from another layer.

        Raises:
            ValueError: nothing was stored yet, or rows were added, removed or loaded since the last update.
        """
        data = self._data
        data.groupable = False  # else heads would leave and join groups at each step
        if data.buffers is None or data.empty():
            raise ValueError("this cache is empty: call update_and_fetch before keys_and_values")
        if data.transient is None and not data.ranges:
            raise ValueError("rows were added, removed or loaded since the last update: call update_and_fetch first")
        return update.fetched(data, data.buffers)

    # --- attention --------------------------------------------------------------------------------------------------

    @property
    def attention_hook(self) -> Hook | None:
        """The hook through which patched attention over this cache runs; None runs the model's own attention.

        The cache itself where its budget observes attention or where mlx-lm cannot read its planes; or the hook that
        was set, which forwards to `own_hook`.
        """
        return self.own_hook if self._hook is None else self._hook

    @attention_hook.setter
    def attention_hook(self, hook: Hook | None) -> None:
        self._hook = None if hook is self else hook
        self._data.ungroup()  # the hook may read what updates return

    @property
    def own_hook(self) -> KVCache | None:
        """This cache, if its budget observes attention or mlx-lm's attention cannot read its planes; else None."""
        data = self._data
        watched = data.evictor is not None and data.evictor.wants_attention
        own = data.residual is not None or (data.packings is not None and data.packed_decode)
        return self if watched or own else None

    def attend(self, call: Call) -> mx.array:
        """Attention after an update, (B, Hq, S, Dv): observed by the budget, computed here where mlx-lm's cannot."""
        return attending.attend(self._data, call, self._hook is None)

    # --- trims --------------------------------------------------------------------------------------------------

    def is_trimmable(self) -> bool:
        """Whether every trim is lossless; mlx-lm calls it before trims of any length."""
        rows = self._data.rows
        return all(most == row.offset for most, row in zip(self.most_trims, rows, strict=True) if row.offset > 0)

    def can_trim(self, n: int | Sequence[int]) -> bool:
        """Whether every row can drop its last n (or n[i]) tokens exactly: later queries see what they saw before."""
        try:
            counts = whole_numbers(n, len(self._data.rows))
        except ValueError:
            return False
        most = self.most_trims
        return len(counts) == len(most) and all(0 <= c <= m for c, m in zip(counts, most, strict=True))

    def trim(self, n: int) -> int:
        """Drops the last n tokens of every row, without moving anything, and returns n.

        Raises:
            ValueError: n is negative, or more than a row can drop exactly; nothing has changed then.
        """
        self.trim_per_sequence(whole_numbers(n, len(self._data.rows)))
        return n

    def trim_per_sequence(self, n: Sequence[int] | mx.array) -> None:
        """Drops the last n[i] tokens of row i, without moving anything.

        Args:
            n: B integers, or an array (B,).

        Raises:
            ValueError: a wrong number of counts, or more than a row can drop exactly; nothing has changed then.
        """
        data, before = self._data, self._data.rows
        counts = whole_numbers(n, len(before))
        rows = trim_rows(data.layout, before, counts)
        if data.residual is not None:
            data.residual.check_trim(counts, self.most_trims)
        data.rows = rows
        data.transient = None
        data.chain = cut_chain(data.chain, rows[0].offset)
        update.note_trim(data, before)
        if data.evictor is not None:
            data.evictor.trimmed(data.rows)

    def reset(self) -> None:
        """Removes every token, for a new session. The buffers stay, except with a quantized_start."""
        data = self._data
        data.rows, data.announced = (Row(),), (0,)
        state.release(data)
        update.begin(data)
        data.packed, data.transient, data.lengths, data.chain = False, None, None, ()
        if data.evictor is not None:
            data.evictor.reset()
        if data.residual is not None:
            data.residual = data.residual.empty()
        if data.quantized_start:
            data.buffers = None  # the new session begins plain again

    def reserve(self, tokens: int) -> None:
        """Announces that each row will hold `tokens` tokens in all: the next allocation makes room for them.

        Applies to the current rows only.

        Raises:
            ValueError: a negative number.
        """
        number = whole_number("reserve", tokens)
        pairs = zip(self._data.announced, self._data.rows, strict=True)
        self._data.announced = tuple([max(slots, number - row.shared) for slots, row in pairs])

    def maybe_trim_front(self) -> None:
        """Drops the tokens before the last chunk_size, if any; models with chunked attention call it in each step."""
        rows = tuple([row._replace(front=self.layout.trimmed_front(row)) for row in self._data.rows])
        if rows != self._data.rows:  # the same rows leave the fast path open
            self._data.rows = rows

    def compact(self) -> None:
        """Evicts down to the budget, if any, without waiting for the margin to fill; see `mlx_kv.compact`."""
        if self.evictor is not None:
            self._data.rows = self.evictor.compact_if_due(self._data.rows, on_demand=True)

    # --- rows -----------------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> KVCache:
        """A batch of copies of the rows of several caches, in their order.

        Raises:
            ValueError: no cache, or one that stores tokens differently from the first.
        """
        if not caches:
            raise ValueError("got no cache to merge: give at least one")
        merged = copy.deepcopy(caches[0])
        merged._join(caches[1:])
        return merged

    def extend(self, other: KVCache) -> None:
        """Appends copies of another cache's rows.

        Raises:
            ValueError: it stores tokens differently; nothing has changed then.
        """
        self._join([other])

    def _join(self, others: Sequence[KVCache]) -> None:
        for index, other in enumerate(others, 1):
            check_joinable(index, self, other)
        if self.seam is None:
            self.carry(next((other.seam for other in others if other.seam is not None), None))
        rows.join(self._data, [other._data for other in others])

    def extract(self, index: int) -> KVCache:
        """A copy of one row as a cache of its own, without reserved slots.

        Computed lazily: evaluate its `state` before the batch goes on, or it keeps the batch's buffers alive and the
        next write copies them.

        Raises:
            ValueError: the row does not exist.
        """
        rows.check_rows([index], len(self._data.rows))
        return self._like(rows.extracted(self._data, index))

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keeps only these rows, in this order, and frees the memory of the others.

        Raises:
            ValueError: no row, or one that does not exist; nothing has changed then.
        """
        chosen = list(whole_numbers(batch_indices, len(self._data.rows)))
        rows.check_rows(chosen, len(self._data.rows))
        if chosen != list(range(len(self._data.rows))):
            rows.select(self._data, chosen)

    def prepare(
        self,
        *,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
    ) -> None:
        """Announces padding in the next tokens, which is then not stored.

        Args:
            lengths: tokens of each row in all updates until `finalize`; the rest is padding.
            right_padding: ignored: it follows from lengths.
            left_padding: tokens of padding that come first in each row; only before anything is stored.

        Raises:
            ValueError: another number of rows, a negative number, or left padding after tokens.
        """
        rows.announce_padding(self._data, lengths, left_padding)

    def finalize(self) -> None:
        """Ends what `prepare` announced. Nothing moves."""
        self._data.lengths = None

    # --- attributes that mlx-lm reads and writes --------------------------------------------------------------------

    @property
    def bits(self) -> int:
        """Bits per element of the packed planes that the last fetch returned, or that the first one will return.

        AttributeError where attention gets arrays: mlx-lm takes its quantised path for every cache with this
        attribute, so it is absent with different bits for keys and values, other codecs, a residual, or before
        quantized_start.
        """
        return update.packing(self._data).bits

    @property
    def group_size(self) -> int:
        """Elements that share a scale; present only when `bits` is."""
        return update.packing(self._data).group_size

    def to_quantized(self, group_size: int = 64, bits: Bits = 4) -> KVCache:
        """A quantised copy of this cache, or this cache itself if it is already quantised, whatever its bits.

        mlx-lm's loop with kv_bits calls this after every step and replaces the cache by the result; kv_bits may be a
        pair for keys and values.
        """
        if not are_plain(self._data.codecs):
            return self
        quantized = copy.deepcopy(self)  # shares the buffers until they are replaced
        update.quantize(quantized._data, find_codecs(bits, group_size))
        return quantized

    @property
    def keys(self) -> mx.array | None:
        """The buffer of the keys, (B, H, C, Dk), or its first plane where encoded; None before the first update.

        Pipelined models replace it by the same buffer with a dependency: `cache.keys = mx.depends(cache.keys, h)`.
        """
        return update.first_plane(self._data, 0)

    @keys.setter
    def keys(self, value: mx.array) -> None:
        update.replace_first_plane(self._data, 0, value)

    @property
    def values(self) -> mx.array | None:
        """The buffer of the values, as `keys`."""
        return update.first_plane(self._data, 1)

    @values.setter
    def values(self, value: mx.array) -> None:
        update.replace_first_plane(self._data, 1, value)


def _check_parts(layout: object, evictor: object) -> None:
    """Raises ValueError for what is no layout or no evictor."""
    if isinstance(layout, type) or not hasattr(layout, "with_room"):
        raise ValueError(f"layout is {shown(layout)}: leave it out, or call RingKVCache or CompressedKVCache")
    check_type("evictor", evictor, Evictor | None, "leave it out, or use CachePolicy(budget=...)")


def check_joinable(index: int, first: KVCache, other: object) -> None:
    """Raises ValueError unless `other`, number `index` of those to join, stores its tokens as `first` does."""
    if type(other) is not type(first):
        kind = type(other).__name__
        raise ValueError(f"cache {index} is a {kind}: only caches of this library can be merged with one")
    rows.check_joinable(index, first.view, other.view)
