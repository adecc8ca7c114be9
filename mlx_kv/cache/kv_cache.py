"""The KV cache of one attention layer: one update path for every combination of layout, codec and budget.

mlx-lm's models use the names of `protocol.Cache`.
B rows, H KV heads, S new tokens, Dk and Dv head dims, C capacity in slots.

    make_mask(S)            -> plan(S) -> None | "causal" | array
    update_and_fetch(k, v)  -> compact, if due -> plan(S) -> make room -> write into slots -> read

The plan consists of Python integers: an update synchronises with the device only when it reallocates buffers or
compacts a budget, and builds no chain of small unevaluated arrays.

The fast path is for an update of the same shapes and dtypes as the last one, with no change of the cache in between:
its plan is `next` of the last plan, which all layers share. Both paths give equal results.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import mlx.core as mx

from mlx_kv.cache import rows
from mlx_kv.cache.attention import PackedAttention, ResidualAttention
from mlx_kv.cache.buffers import Buffers, SlotBuffer, change_layout, read_transient, replace_first_plane, whole_planes
from mlx_kv.cache.checks import check_storage, check_type, check_update, whole_numbers
from mlx_kv.cache.codecs import PLAIN, Bits, Choice, Codecs, Packing, are_plain, briefly, find_codecs, find_packings
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.growth import DEFAULT, SLOT_MULTIPLE, Growth, round_up
from mlx_kv.cache.head_groups import HeadGroups
from mlx_kv.cache.layout import (
    NO_LIMIT,
    Append,
    Budget,
    Layout,
    Ranges,
    Row,
    WriteCapacity,
    count_slots,
    enough_slots,
    planned,
    reshaped,
    trim_rows,
)
from mlx_kv.cache.mask import Mask, make_mask
from mlx_kv.cache.plan import Plan, plan_of, round_tail
from mlx_kv.cache.protocol import Call, Fetched, Hook
from mlx_kv.cache.residual import Residual
from mlx_kv.cache.state import CacheParts, CacheState, check_residual, cut_chain, in_state, restored
from mlx_kv.settings import shown, whole_number

# Writes of up to this many tokens (decoding, the verify step of speculative decoding) read packed planes. Longer ones
# are prefill: there packed attention is unfused and holds all scores at once, so it gets dequantised arrays instead.
MAX_PACKED_TOKENS = 8


class KVCache:
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

    Attributes:
        rows: the position of each row in its slots; replaced, never modified.
        codecs: how keys and how values are stored from `quantized_start` on.
        encoded: whether the buffers are stored by the codecs; before `quantized_start` they are plain.
        reserved, announced: tokens allocated at the first update, in any row; tokens that each row will hold.
        lengths: announced tokens of each row, followed by padding; None without padding.
        packing: how mlx-lm's attention reads the planes; None where it cannot.
        packings: how our own attention reads them, of keys and of values, where mlx-lm's cannot.
        residual: the newest tokens in full precision; None without. Setting it to a copy made earlier allows a trim
            back to the offset of that copy, whatever was written since.
        growths: reallocations since the first allocation.
        seam: the attention patch that this cache keeps alive, if any: then attention can be computed here.
        chain: segments (`cache.segments`) that hold the first tokens of a single row, too, and how many of the first
            tokens of each; the row can read these in place of its own slots.

    Raises:
        ValueError: bits, a group size or a codec that don't exist, or don't combine; a negative number; quantized_start
            or residual_length where nothing is quantised; a residual_length above keep_recent, with heads of different
            numbers of tokens, or with a max_rollback above 64; an evictor and a layout that is not the evictor's.
    """

    step: ClassVar[int] = SLOT_MULTIPLE  # mlx-lm's name: slots come in multiples of it
    layout: Layout
    evictor: Evictor | None
    residual: Residual | None
    growths: int
    seam: object
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
        if isinstance(layout, type) or not hasattr(layout, "with_room"):
            raise ValueError(f"layout is {shown(layout)}: leave it out, or call RingKVCache or CompressedKVCache")
        check_type("evictor", evictor, Evictor | None, "leave it out, or use CachePolicy(budget=...)")
        check_storage(codecs, growth, reserve, quantized_start, residual_length)
        if evictor is not None and layout not in (Append(), evictor.layout):
            raise ValueError(f"got {layout}, but an evictor of {evictor.layout}: leave the layout out")
        if evictor is None and isinstance(layout, Budget):  # without one, nothing would be evicted
            evictor = Evictor(layout)
        residual = Residual(residual_length) if residual_length else None
        check_residual(residual, layout if evictor is None else evictor.layout, evictor)
        self._begin(CacheParts(codecs, layout, evictor, residual, growth, reserve, quantized_start, packed_decode))

    @classmethod
    def of_parts(cls, parts: CacheParts) -> Self:
        """A cache of parts that were checked."""
        cache = cls.__new__(cls)
        cache._begin(parts)
        return cache

    def _begin(self, parts: CacheParts) -> None:
        """Sets all fields of an empty cache of one row."""
        self.codecs, self.residual, self.growth = parts.codecs, parts.residual, parts.growth
        self.reserved, self.quantized_start = parts.reserved, parts.quantized_start
        self.packed_decode = parts.packed_decode
        self.layout = parts.layout if parts.evictor is None else parts.evictor.layout
        self.rows: tuple[Row, ...] = (Row(),)
        self.announced: tuple[int, ...] = (0,)
        self.lengths: tuple[int, ...] | None = None
        self.encoded, self.growths, self.seam = False, 0, None
        self.chain: tuple[tuple[Any, int], ...] = ()
        self._set_evictor(parts.evictor)
        self.packing, self.packings = find_packings(self.codecs, self.residual is not None)
        # Keys and values are in one buffer each, or by groups of heads (one row that decodes); the other is None.
        self._padded: Buffers | None = None
        self.groups: HeadGroups | None = None
        self._groupable = False  # whether heads may be grouped after this update
        self._room = WriteCapacity()
        # The last fetch: the slots that it returned; the arrays of a write longer than max_write, until the next step;
        # whether planes were packed; tokens of each row, where some were padding.
        self._ranges: Ranges = ()
        self._transient: tuple[mx.array, mx.array] | None = None
        self._packed = False
        self._counts: tuple[int, ...] | None = None
        # Where the next update may take the fast path: the plan of the last one, and its capacity, whether tensors are
        # stored without a codec, and shapes and dtypes of keys and values. Code that changes the cache, but not `rows`,
        # sets `_last` to None.
        self._last: Plan | None = None
        self._signature: Any = None

    def _set_evictor(self, evictor: Evictor | None) -> None:
        self.evictor = evictor
        if evictor is not None:
            evictor.belong_to(self)

    def _forget_fetch(self, new_rows: bool = False) -> None:
        """Nothing can be read until the next update, which takes the full path."""
        self._transient, self._ranges, self._packed, self._last = None, (), False, None
        if new_rows:
            self._room.trimmed_at = ()

    # --- updates ------------------------------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask for the next N tokens: None, "causal", or booleans (N, K) or (B, 1, N, K).

        With a window over a budget, a compaction that is due runs here: the mask depends on the tokens that are left.
        """
        self._transient = None  # a new step begins
        if (usual := self._next_plan(N)) is not None and (window_size is None or self.evictor is None):
            return make_mask(usual, window_size, return_array)
        if self.evictor is None:
            return make_mask(self._plan_for(self.rows, N), window_size, return_array)
        # The next update compacts what is due. The rows after it follow from integers, except in layers whose lengths
        # may differ: these replace this mask (`LayerMasks`). Only a window depends on which tokens are
        # left: then the compaction comes first.
        if window_size is not None:
            self.rows = self.evictor.compact_if_due(self.rows)
        plan = self._plan_for(tuple(map(self.layout.compacted_if_due, self.rows)), N)
        positions = None if window_size is None else self.evictor.key_positions(plan)
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
        fetched = self._fast_update(keys, values)
        if fetched is None:
            fetched = self._full_update(keys, values)
            self._remember(keys, values)
        return fetched

    def keys_and_values(self) -> Fetched:
        """What the last update returned: some models read one layer's cache from another layer.

        Raises:
            ValueError: nothing was stored yet, or rows were added, removed or loaded since the last update.
        """
        self._groupable = False  # else heads would leave and join groups at each step
        if self.buffers is None or self.empty():
            raise ValueError("this cache is empty: call update_and_fetch before keys_and_values")
        if self._transient is None and not self._ranges:
            raise ValueError("rows were added, removed or loaded since the last update: call update_and_fetch first")
        return self._fetched(self.buffers)

    # --- the full path

    def _full_update(self, keys: mx.array, values: mx.array) -> Fetched:
        if check_update(keys, values, self.codecs, self.buffers, self.empty()):
            self.buffers = None  # a new session with another shape
        tensors, new, rows = (keys, values), keys.shape[2], self.rows
        if len(rows) != keys.shape[0]:
            if rows != (Row(),) or self.lengths is not None:
                raise ValueError(f"keys came with rows {keys.shape[0]}, but this batch has rows {len(rows)}")
            rows = (Row(),) * keys.shape[0]
        if self.evictor is not None:
            rows = self.rows = self.evictor.compact_if_due(rows)
        if len(self.announced) != len(rows):  # announced for the first row of a new batch: applies to all
            self.announced *= len(rows)
        plan = self._plan_for(rows, new)
        self._transient = None
        buffers = self._make_room(plan, tensors, rows)
        if plan.transient:  # read before the write overwrites what its first queries see
            self._transient = read_transient(plan, buffers, tensors)
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.write(tensor, plan)
        if self.residual is not None:
            self.residual.write(tensors, plan)
        self.layout, self._last, self._counts = plan.layout, plan, plan.counts if plan.padded else None
        self.rows, self._ranges = plan.after, () if plan.transient else plan.ranges
        if self.lengths is not None:
            self.lengths = tuple([max(0, length - new) for length in self.lengths])
        if self.layout.room != NO_LIMIT:
            self._room.next_layout = None  # in use since this write
            self._note(new, writes=1)
        self._packed = not plan.transient and self._returns_packed(buffers, new)
        return self._fetched(buffers)

    def _plan_for(self, rows: tuple[Row, ...], new: int) -> Plan:
        """The plan of the next `new` tokens, of the mask and of the update, in the layout for this write.

        Args:
            rows: in the current layout, after a compaction that is due.
        """
        layout, lengths = self._room.layout_for(self.layout, new), self.lengths
        standing = rows if layout is self.layout else reshaped(self.layout, layout, rows)
        # How many of the next tokens are tokens of their row; None is all of all rows.
        counted = None if lengths is None or min(lengths) >= new else tuple([min(length, new) for length in lengths])
        return plan_of(layout, standing, new, counted)

    def _make_room(self, plan: Plan, tensors: tuple[mx.array, mx.array], rows: tuple[Row, ...]) -> Buffers:
        """The buffers with slots for the plan: allocated, resized or quantised first where needed.

        Args:
            rows: in the layout before this write, which may differ from the plan's.
        """
        needed = max(plan.needed + plan.padded, *(last for _, last in plan.ranges))  # padding has one slot more
        due = max([row.offset for row in plan.rows]) >= self.quantized_start
        before, layout = self.layout, plan.layout
        if self.buffers is None:
            codecs = self.codecs if due else PLAIN
            capacity = self._next_capacity(layout, needed)
            keys, values = (
                SlotBuffer.allocate(codec, tensor, capacity) for codec, tensor in zip(codecs, tensors, strict=True)
            )
            self.buffers, self.encoded = (keys, values), due
        elif needed > self.capacity or layout is not before or layout is self._room.next_layout:
            self.growths += needed > self.capacity
            capacity = self._next_capacity(layout, needed)
            change_layout(self.buffers, before, layout, rows, capacity, min(max(plan.filled, 0), layout.max_slots))
        if due and not self.encoded:
            self._encode(self.codecs)
        assert self.buffers is not None
        return self.buffers

    def _next_capacity(self, layout: Layout, needed: int) -> int:
        enough = enough_slots(layout, self.rows)
        if needed <= self.capacity:  # frees slots beyond the new room
            return min(self.capacity, self.round_up(max(needed, enough)))
        reserve = max(self.reserved, *self.announced)
        # No slack where the length was announced, also when tokens were held or loaded before.
        capacity = reserve if needed <= reserve else max(needed, self.growth.capacity(needed, self.capacity))
        return min(self.round_up(capacity), self.round_up(max(needed, enough)))

    def _encode(self, codecs: Codecs) -> None:
        """Stores tensors by these codecs from now on, and re-encodes what is stored."""
        self.codecs, self._last = codecs, None
        self.packing, self.packings = find_packings(self.codecs, self.residual is not None)
        for buffer, codec in zip(self.buffers or (), codecs, strict=False):
            buffer.recode(codec)
        self.encoded = True

    def _returns_packed(self, buffers: Buffers, new: int) -> bool:
        """Whether attention reads packed planes after a write of `new` tokens."""
        if not (self.encoded and self.packed_decode) or new > MAX_PACKED_TOKENS:
            return False
        if self.packing is None:  # only our own attention can read them, where attention is patched
            return self.packings is not None and self.seam is not None
        # mlx-lm's packed attention takes the head dim of its result from the keys: values must have the same.
        return buffers[0].head_dim == buffers[1].head_dim

    def _fetched(self, buffers: Buffers) -> Fetched:
        """What attention reads after the last write."""
        if self._transient is not None:
            return self._transient
        keys, values = buffers
        if self._packed:
            return keys.read_packed(self._ranges), values.read_packed(self._ranges)
        return keys.decode(keys.read(self._ranges)), values.decode(values.read(self._ranges))

    # --- the fast path

    def _remember(self, keys: mx.array, values: mx.array) -> None:
        """After an update on the full path: records its signature, if the next one may take the fast path."""
        last, self._last = self._last, None
        if last is None or self.buffers is None or not (self.encoded and last.steady):
            return
        if self.lengths is not None or self._room.next_layout is not None:
            return
        if self.residual is not None and self.residual.last is None:
            return
        self._last = last
        self._groupable = self.evictor is not None and last.new == len(last.rows) == last.layout.room
        tensors = keys.shape, values.shape, keys.dtype, values.dtype
        self._signature = self.capacity, are_plain(self.codecs), *tensors

    def _next_plan(self, new: int) -> Plan | None:
        """The plan of the next step if, by all but its tensors, it can take the fast path; else None."""
        last = self._last
        if last is None or last.new != new or self.rows is not last.after:
            return None
        return last.next if last.next.steady else None

    def _fast_update(self, keys: mx.array, values: mx.array) -> Fetched | None:
        """`update_and_fetch` on the fast path; None, and nothing changed, where this update cannot take it."""
        last = self._last
        if last is None or self.rows is not last.after:
            return None
        plan = last.next
        if self.groups is not None:
            return self._update_groups(self.groups, plan, keys, values)
        buffers, residual = self._padded, self.residual
        if residual is not None and residual.last is None:
            return None  # a copy has no plan to continue from
        capacity, plain, keys_shape, values_shape, keys_dtype, values_dtype = self._signature
        if buffers is None or plan.needed > capacity or plan.ranges[-1][1] > capacity or not plan.steady:
            return None
        try:
            alike = keys.shape == keys_shape and values.shape == values_shape
            alike = alike and keys.dtype == keys_dtype and values.dtype == values_dtype
        except AttributeError:
            return None  # not arrays: the full path raises
        if not alike:
            return None
        if plan.bounded:
            room = self._room
            if room.steps >= room.max_steps:
                return None  # time to check the room
            room.steps += 1
        if residual is not None:
            residual.step((keys, values), plan)
        self.rows, self._ranges, self._last, self._transient = plan.after, plan.ranges, plan, None
        written, read = plan.written, plan.read
        if not plain or written is None or read is None:
            buffers[0].write(keys, plan)
            buffers[1].write(values, plan)
            return self._fetched(buffers)
        of_keys, of_values = buffers[0].planes[0], buffers[1].planes[0]
        of_keys[written] = keys
        of_values[written] = values
        if plan.ranges[0] == (0, capacity):  # a new handle like a slice, but no operation
            return of_keys[...], of_values[...]
        return of_keys[read], of_values[read]

    def _update_groups(self, groups: HeadGroups, plan: Plan, keys: mx.array, values: mx.array) -> Fetched | None:
        """As `_fast_update`. What it returns is not what attention reads: `attend` does that."""
        _, _, *alike = self._signature
        if plan.needed > groups.max_slots or not (plan.steady and groups.attended):
            return None
        if not isinstance(values, type(keys)) or [keys.shape, values.shape, keys.dtype, values.dtype] != alike:
            return None
        self.rows, self._ranges, self._last, self._transient = plan.after, plan.ranges, plan, None
        groups.write(keys, values)
        return keys, values

    def _note(self, tokens: int, writes: int) -> None:
        """Counts tokens that were written at once, or that could have been trimmed at once (`WriteCapacity.note`)."""
        narrower = self._room.note(self.layout, tokens, writes)
        if narrower is None:
            return
        if narrower is not self.layout or self.capacity > self.round_up(enough_slots(self.layout, self.rows)):
            self._room.next_layout, self._last = narrower, None

    # --- attention ----------------------------------------------------------------------------------------------------

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
        self.ungroup()  # the hook may read what updates return

    @property
    def own_hook(self) -> KVCache | None:
        """This cache, if its budget observes attention or mlx-lm's attention cannot read its planes; else None."""
        if self.evictor is not None and self.evictor.wants_attention:
            return self
        return self if self.residual is not None or (self.packings is not None and self.packed_decode) else None

    def carry(self, seam: object) -> None:
        """Keeps an attention patch alive for as long as this cache, or a copy of it, lives."""
        self.seam = seam

    def attend(self, call: Call) -> mx.array:
        """Attention after an update, (B, Hq, S, Dv): observed by the budget, computed here where mlx-lm's cannot."""
        if self.groups is not None:
            return self.groups.attend(call)
        evictor, attention = self.evictor, self.own_attention()
        if evictor is None or not evictor.wants_attention:
            return call.forward() if attention is None else attention.attend(call)
        if evictor.uneven_heads:
            call = self._complete(call)
        result = evictor.attend(call if attention is None else call.before(attention), self.rows, self._counts)
        if self._groupable:
            self._groupable = False
            if self._hook is None:  # which would read what the cache returns
                self._group_heads(call, result)
        return result

    def own_attention(self, packing: Packing | None = None) -> PackedAttention | ResidualAttention | None:
        """What computes the attention where mlx-lm cannot, or with `packing`, of both tensors, where it can."""
        whole = whole_planes(self._padded, self._ranges) if self._packed and self._padded else None
        if (residual := self.residual) is not None and residual.places is not None and self.encoded:
            return ResidualAttention(residual, residual.places, self.packings if self._packed else None, whole)
        packings = self.packings if packing is None else (packing, packing)
        return PackedAttention(*packings, whole) if self._packed and packings is not None else None

    def _complete(self, call: Call) -> Call:
        """The call over all slots, if heads were in groups during the update, and no longer are."""
        if self._packed or self.buffers is None or call.keys.shape[2] >= count_slots(self._ranges):
            return call
        keys, values = self._fetched(self.buffers)
        return call.changed(keys=keys, values=values)

    def _group_heads(self, call: Call, result: mx.array) -> None:
        """Puts the heads of a single row into groups, if they differ enough in length."""
        evictor, layout, buffers, (row, *others) = self.evictor, self.layout, self._padded, self.rows
        if others or evictor is None or buffers is None or not isinstance(layout, Budget) or not are_plain(self.codecs):
            return
        if row.shared or call.sinks is not None or (dead := evictor.metadata.kept.dead) is None:
            return
        if evictor.paused or evictor.observation is not None or evictor.second_pass is not None:  # they read slots
            return
        groups = HeadGroups.if_smaller(buffers, layout, row, dead, call.queries.shape[1])
        if groups is not None:
            mx.eval(result, groups.arrays)  # a pending read would keep the one buffer
            self._padded, self.groups = None, groups

    def ungroup(self) -> None:
        """Puts all heads into one buffer, if they are in groups."""
        if self.groups is not None:
            self._padded, self.groups = self.groups.buffers(), None

    # --- trims --------------------------------------------------------------------------------------------------------

    @property
    def most_trims(self) -> tuple[int, ...]:
        """Tokens that each row can drop exactly, so that later queries see what they saw before."""
        layout, residual = self.layout, self.residual
        most = [layout.max_trim(row) for row in self.rows]
        if residual is not None:
            for i, row in enumerate(self.rows):
                most[i] = min(most[i], residual.max_trim(i, row.offset, layout.ordered_from(row)))
        return tuple(most)

    def is_trimmable(self) -> bool:
        """Whether every trim is lossless; mlx-lm calls it before trims of any length."""
        return all(most == row.offset for most, row in zip(self.most_trims, self.rows, strict=True) if row.offset > 0)

    def can_trim(self, n: int | Sequence[int]) -> bool:
        """Whether every row can drop its last n (or n[i]) tokens exactly: later queries see what they saw before."""
        try:
            counts = whole_numbers(n, len(self.rows))
        except ValueError:
            return False
        most = self.most_trims
        return len(counts) == len(most) and all(0 <= c <= m for c, m in zip(counts, most, strict=True))

    def trim(self, n: int) -> int:
        """Drops the last n tokens of every row, without moving anything, and returns n.

        Raises:
            ValueError: n is negative, or more than a row can drop exactly; nothing has changed then.
        """
        self.trim_per_sequence(whole_numbers(n, len(self.rows)))
        return n

    def trim_per_sequence(self, n: Sequence[int] | mx.array) -> None:
        """Drops the last n[i] tokens of row i, without moving anything.

        Args:
            n: B integers, or an array (B,).

        Raises:
            ValueError: a wrong number of counts, or more than a row can drop exactly; nothing has changed then.
        """
        before = self.rows
        counts = whole_numbers(n, len(before))
        rows = trim_rows(self.layout, before, counts)
        if self.residual is not None:
            self.residual.check_trim(counts, self.most_trims)
        self.rows, self._transient = rows, None
        self.chain = cut_chain(self.chain, rows[0].offset)
        if self.layout.room != NO_LIMIT:  # counts like a write of all tokens since the last trim
            self._note(self._room.tokens_since_trim(before, rows), writes=0)
            self._last = None
        if self.evictor is not None:
            self.evictor.trimmed(rows)

    def reset(self) -> None:
        """Removes every token, for a new session. The buffers stay, except with a quantized_start."""
        self.rows, self.announced, self.lengths, self.chain = (Row(),), (0,), None, ()
        self.release()
        self.layout, self._room = planned(self.layout), WriteCapacity()
        self._packed, self._transient, self._last = False, None, None
        if self.evictor is not None:
            self.evictor.reset()
        if self.residual is not None:
            self.residual = self.residual.empty()
        if self.quantized_start:
            self.buffers = None  # the new session begins plain again

    def reserve(self, tokens: int, row: int | None = None) -> None:
        """Announces that each row, or one, will hold `tokens` tokens in all: the next allocation makes room for them.

        Applies to the current rows only.

        Raises:
            ValueError: a negative number.
        """
        number, announced = whole_number("reserve", tokens), list(self.announced)
        for index in range(len(announced)) if row is None else (row,):
            announced[index] = max(announced[index], number - self.rows[index].shared)
        self.announced = tuple(announced)

    def maybe_trim_front(self) -> None:
        """Drops the tokens before the last chunk_size, if any; models with chunked attention call it in each step."""
        rows = tuple([row._replace(front=self.layout.trimmed_front(row)) for row in self.rows])
        if rows != self.rows:  # the same rows leave the fast path open
            self.rows = rows

    def compact(self) -> None:
        """Evicts down to the budget, if any, without waiting for the margin to fill; see `mlx_kv.compact`."""
        if self.evictor is not None:
            self.rows = self.evictor.compact_if_due(self.rows, on_demand=True)

    def hold(self) -> None:
        """Pauses eviction until `release`: two-pass prefill needs the whole text during its first pass.

        The layout plans with an unlimited margin meanwhile; masks and updates follow from that.
        """
        self._pause(True)

    def release(self) -> None:
        """Resumes eviction from the next write on."""
        self._pause(False)

    def _pause(self, paused: bool) -> None:
        if self.evictor is not None and isinstance(self.layout, Budget) and (paused or self.evictor.paused):
            self.evictor.paused, margin = paused, NO_LIMIT if paused else self.evictor.layout.margin
            self.layout, self._last, self._room.next_layout = replace(self.layout, margin=margin), None, None

    # --- rows ---------------------------------------------------------------------------------------------------------

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
            rows.check_joinable(index, self, other)
        if self.seam is None:
            self.seam = next((other.seam for other in others if other.seam is not None), None)
        rows.join(self, others)

    def extract(self, index: int) -> KVCache:
        """A copy of one row as a cache of its own, without reserved slots.

        Computed lazily: evaluate its `state` before the batch goes on, or it keeps the batch's buffers alive and the
        next write copies them.

        Raises:
            ValueError: the row does not exist.
        """
        rows.check_rows([index], len(self.rows))
        single = self.select([index], shrink=True)
        single.announced = (0,)
        return single

    def select(self, chosen: Sequence[int], shrink: bool = False) -> Self:
        """A copy of some rows, in this order, reserved slots included.

        Args:
            shrink: without slack.
        """
        copied = self._copied()
        rows.keep(copied, chosen, shrink)
        copied._set_evictor(None if self.evictor is None else self.evictor.selected(chosen))
        return copied

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keeps only these rows, in this order, and frees the memory of the others.

        Raises:
            ValueError: no row, or one that does not exist; nothing has changed then.
        """
        chosen = list(whole_numbers(batch_indices, len(self.rows)))
        rows.check_rows(chosen, len(self.rows))
        if chosen != list(range(len(self.rows))):
            rows.keep(self, chosen)

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
        rows.announce_padding(self, lengths, left_padding)
        if lengths is not None:
            self._last = None

    def finalize(self) -> None:
        """Ends what `prepare` announced. Nothing moves."""
        self.lengths = None

    # --- state and copies ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> CacheState:
        """Everything to continue from, as a pytree: planes of keys and of values, rows, and how they are stored.

        Its arrays are new handles, unaffected by later changes of the cache.
        """
        keys, values, tensors = None, None, None
        if self.buffers is not None:
            keys, values = (buffer.handles() for buffer in self.buffers)
            tensors = [(buffer.head_dim, str(buffer.dtype).rpartition(".")[2]) for buffer in self.buffers]
        layout = self.layout
        if self.evictor is not None and self.evictor.paused and isinstance(layout, Budget):
            layout = replace(layout, margin=self.evictor.layout.margin)
        return CacheState(
            keys,
            values,
            [row.numbers for row in self.rows],
            [list(one) for one in self._ranges],
            list(layout.parameters),
            in_state(self.codecs),
            tensors,
            self.encoded and self.buffers is not None,
            self.quantized_start,
            self.packed_decode,
            self._packed,
            None if self.evictor is None else self.evictor.state,
            None if self.residual is None else self.residual.state,
        )

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        growths, seam, evictor = self.growths, self.seam, self.evictor
        self._restore(value, self.growth, self.reserved)
        self.growths, self.seam = growths, seam
        if evictor is not None and self.evictor is not None:
            self.evictor.set_communicator(evictor.communicator)

    @classmethod
    def from_state(cls, value: tuple[Any, ...], **settings: Any) -> Self:
        """A cache that continues from another's `state`, or from an older tuple; it grows by the default rule.

        Args:
            settings: arguments of `CacheParts` that are not part of a state, such as growth.

        Raises:
            ValueError: a codec or a score that is not registered in this process.
        """
        cache = cls.__new__(cls)
        cache._restore(value, **settings)
        return cache

    def _restore(self, value: tuple[Any, ...], growth: Growth = DEFAULT, reserved: int = 0) -> None:
        """Sets all fields from a state; an error changes nothing."""
        state, parts, buffers = restored(value, growth, reserved)
        self._begin(parts)
        self.rows = tuple(Row(*row[:6])._replace(images=tuple(row[6:])) for row in state.rows)
        self._ranges = tuple((first, last) for first, last in state.ranges)
        self.announced, self._packed = (0,) * len(self.rows), state.packed
        self.buffers, self.encoded = buffers, buffers is not None and state.encoded

    def replace_planes(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        """Replaces the planes by others with more or fewer slots, the tokens in the same slots.

        With zero slots the cache can only be copied and trimmed.

        Args:
            keys, values: as many planes (B, H, C, width) as before, of the same rows, heads, widths and dtypes.

        Raises:
            ValueError: nothing was stored yet.
        """
        if self.buffers is None:
            raise ValueError("this cache is empty: it has no planes to replace")
        for buffer, planes in zip(self.buffers, (keys, values), strict=True):
            buffer.planes = tuple(plane[:] for plane in planes)
        self._forget_fetch()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        evictor = None if self.evictor is None else self.evictor.copied(memo)
        copied = memo[id(self)] = self._copied()
        copied._set_evictor(evictor)
        return copied

    def _copied(self) -> Self:
        """A copy without its evictor, which the caller sets; it shares memory until one of the two writes."""
        buffers = self.buffers
        copied = type(self).__new__(type(self))
        copied.__dict__ |= vars(self)  # fields are replaced, never changed in place, except the following
        copied.evictor, copied._room = None, copy.copy(self._room)
        if buffers is not None:
            copied.buffers = buffers[0].copied(), buffers[1].copied()
        copied.residual = None if self.residual is None else self.residual.copied()
        return copied

    def to_quantized(self, group_size: int = 64, bits: Bits = 4) -> KVCache:
        """A quantised copy of this cache, or this cache itself if it is already quantised, whatever its bits.

        mlx-lm's loop with kv_bits calls this after every step and replaces the cache by the result; kv_bits may be a
        pair for keys and values.

        Raises:
            ValueError: a head dim that cannot be quantised; nothing has changed then.
        """
        if not are_plain(self.codecs):
            return self
        codecs, quantized = find_codecs(bits, group_size), copy.deepcopy(self)  # buffers are shared until replaced
        for name, codec, buffer in zip(("keys", "values"), codecs, quantized.buffers or (), strict=False):
            codec.check(name, buffer.planes[0])
        quantized._encode(codecs)
        return quantized

    # --- what others read ---------------------------------------------------------------------------------------------

    @property
    def view(self) -> KVCache:
        """The cache itself: another name, for its fields."""
        return self

    @property
    def buffers(self) -> Buffers | None:
        """Of keys and of values; groups of heads are put back into one buffer first. None before the first update."""
        self.ungroup()
        return self._padded

    @buffers.setter
    def buffers(self, value: Buffers | None) -> None:
        self._padded, self.groups = value, None

    @property
    def offset(self) -> int | mx.array:
        """The next position: an int where all rows agree, an array (B,) of int32 where they differ."""
        offsets = [row.offset for row in self.rows]
        return offsets[0] if len(set(offsets)) == 1 else mx.array(offsets)

    def size(self) -> int:
        """Tokens held by the longest row."""
        return max(0, *map(self.layout.visible_tokens, self.rows))

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return not any(row.offset > 0 for row in self.rows)

    @property
    def max_write(self) -> int | None:
        """The longest write that slots are planned for; rings read a copy after a longer one. None is no limit."""
        return None if self.layout.max_write == NO_LIMIT else self.layout.max_write

    @property
    def positions(self) -> mx.array:
        """The position of each live slot: (B, H', n), with H' = H where each head keeps its own tokens, else 1.

        Rows with fewer live slots are padded with -1. Only for caches that keep all tokens or have a budget.

        Raises:
            ValueError: this cache is a ring or has chunks.
        """
        return rows.positions(self)

    @property
    def residual_length(self) -> int:
        """Newest tokens that a query sees in full precision; 0 without a residual."""
        return 0 if self.residual is None else self.residual.length

    # --- slots and bytes

    @property
    def capacity(self) -> int:
        """Slots allocated for each row, if all heads are in one buffer; 0 before the first update."""
        if self.groups is not None:
            return self.groups.capacity
        return 0 if self._padded is None else self._padded[0].capacity

    @property
    def used(self) -> int:
        """Number of first slots that contain all tokens of all rows."""
        return min(max(0, *(row.end for row in self.rows)), self.layout.max_slots)

    def round_up(self, slots: int) -> int:
        """The least capacity that holds so many slots."""
        return round_tail(slots) if any(row.shared for row in self.rows) else round_up(slots)

    @property
    def stored_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(each.nbytes for each in self._padded or ()) if self.groups is None else self.groups.nbytes

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of one row, keys and values, as they are stored; 0 before the first update."""
        one_buffer = sum(each.bytes_per_slot for each in self._padded or ())
        return one_buffer if self.groups is None else self.groups.bytes_per_slot

    @property
    def nbytes(self) -> int:
        """Bytes allocated, dead slots included."""
        if self._padded is None and self.groups is None:
            return 0
        return self.stored_bytes + self.nbytes_residual + (0 if self.evictor is None else self.evictor.nbytes)

    @property
    def nbytes_residual(self) -> int:
        """Bytes allocated for the residual: a ring of fixed size, however many tokens there are."""
        return 0 if self.residual is None else self.residual.nbytes

    @property
    def nbytes_live(self) -> int:
        """Bytes of the slots that hold a token, and of the residual; without shared segments."""
        tokens = sum(max(0, self.layout.visible_tokens(row) - row.shared) for row in self.rows)
        return tokens * self.bytes_per_slot + self.nbytes_residual if self.nbytes else 0

    @property
    def nbytes_full(self) -> int:
        """Bytes that all tokens read so far would take if none had been evicted or overwritten, with the residual."""
        return sum(max(0, row.offset) for row in self.rows) * self.bytes_per_slot + self.nbytes_residual

    # --- mlx-lm's names

    @property
    def bits(self) -> int:
        """Bits per element of the packed planes that the last fetch returned, or that the first one will return.

        AttributeError where attention gets arrays: mlx-lm takes its quantised path for every cache with this
        attribute, so it is absent with different bits for keys and values, other codecs, a residual, or before
        quantized_start.
        """
        return self._returned_packing().bits

    @property
    def group_size(self) -> int:
        """Elements that share a scale; present only when `bits` is."""
        return self._returned_packing().group_size

    def _returned_packing(self) -> Packing:
        first = self.packed_decode and not self.quantized_start and self.buffers is None
        if self.packing is None or not (self._packed or first):
            raise AttributeError("bits and group_size are visible before a first fetch, and after one of packed planes")
        return self.packing

    @property
    def keys(self) -> mx.array | None:
        """The buffer of the keys, (B, H, C, Dk), or its first plane where encoded; None before the first update.

        Pipelined models replace it by the same buffer with a dependency: `cache.keys = mx.depends(cache.keys, h)`.
        """
        return None if self.buffers is None else self.buffers[0].handles()[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        replace_first_plane(self.buffers, 0, value)

    @property
    def values(self) -> mx.array | None:
        """The buffer of the values, as `keys`."""
        return None if self.buffers is None else self.buffers[1].handles()[0]

    @values.setter
    def values(self, value: mx.array) -> None:
        replace_first_plane(self.buffers, 1, value)

    @property
    def max_size(self) -> int:
        """The window of a ring; AttributeError for other caches."""
        if (window := self.layout.window) is None:
            raise AttributeError("max_size is the window of a ring, and this cache has none")
        return window

    @property
    def keep(self) -> int:
        """Sinks of a ring, first tokens that are never dropped; AttributeError for other caches."""
        if self.layout.window is None:
            raise AttributeError("keep is the number of a ring's sinks, and this cache is not a ring")
        return self.layout.sinks

    @property
    def chunk_size(self) -> int:
        """Positions of a chunk; AttributeError for caches without chunked attention."""
        if (size := self.layout.chunk_size) is None:
            raise AttributeError("chunk_size is that of chunked attention, and this cache has none")
        return size

    @property
    def left_padding(self) -> mx.array:
        """(B,), announced padding before the first token of each row; 0 once tokens are stored.

        Padding itself is never stored.
        """
        return mx.array([max(0, -row.offset) for row in self.rows])

    @property
    def start_position(self) -> int:
        """The first position after the sinks that attention reads."""
        return min(row.front for row in self.rows)

    def __repr__(self) -> str:
        how = f", {stored}" if (stored := briefly(self.codecs)) else ""
        return f"{type(self).__name__}(offset={self.offset}, capacity={self.capacity}, nbytes={self.nbytes}{how})"
