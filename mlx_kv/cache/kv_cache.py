"""What an attention layer talks to: one update path for every combination.

Decides the order of an update (check, compact if due, plan, reserve, write, read) and puts the parts together: a growth
rule, a layout, a codec and two buffers, and an evictor where there is a budget. Knows nothing about models or mlx-lm
beyond the names in `protocol.Cache`.
B rows, H KV heads, S new tokens, Dk and Dv head dims, C capacity in slots.

    make_mask(S)            -> plan(S) -> None | "causal" | array
    update_and_fetch(k, v)  -> compact, if it is due -> plan(S) -> reserve -> write into slots -> read

The plan is made of Python integers, so no update waits for the device, and no chain of tiny arrays is left unevaluated.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.cache.buffers import SlotBuffer, tensor_of
from mlx_kv.cache.checks import check_tokens, check_unchanged, continues, whole_number
from mlx_kv.cache.codecs import Plain, make_codec
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.growth import Geometric, Growth, round_up
from mlx_kv.cache.layout import NO_LIMIT, Append, Budget, Layout, Plan, Ranges, Row, make_layout, plan_of, trim_rows
from mlx_kv.cache.mask import Mask, make_mask
from mlx_kv.cache.protocol import Fetched
from mlx_kv.cache.rows import check_joinable, check_rows, joined_buffers
from mlx_kv.cache.view import CacheView

# A write of up to this many tokens (decode, the verify step of speculative decoding) reads packed planes. A longer one
# is prefill: there, packed attention is unfused and holds all scores at once, so it gets dequantised arrays instead.
MOST_PACKED_TOKENS = 8


class KVCache:
    """Keys and values of one layer, unbounded, plain or quantised, for one sequence or a batch.

    Args:
        bits: 2, 3, 4, 5, 6 or 8 to store quantised (`mx.quantize`, affine); None stores tensors as they are.
        group_size: elements that share a scale, 32, 64 or 128; only looked at with bits.
        growth: how capacity grows when it must.
        reserve: tokens to make room for at the first update; within them nothing grows and nothing is copied.
        quantized_start: stay plain until this many tokens are held, then quantise all of them, once.
        packed_decode: hand packed planes to attention for writes of up to 8 tokens. False for models whose attention
            cannot take them (attention sinks, MLA); `make_prompt_cache` finds out by itself.
        layout: which slot holds which position: everything (the default), a ring, chunks, or a budget.
        evictor: what compacts the rows of a budget, whose layout it has; None makes one with the default score where
            the layout is a budget.

    Raises:
        ValueError: bits or a group size that don't exist, a negative reserve or quantized_start, an evictor beside
            another layout than its own.
    """

    def __init__(
        self,
        bits: int | None = None,
        group_size: int = 64,
        growth: Growth = Geometric(),
        reserve: int = 0,
        *,
        quantized_start: int = 0,
        packed_decode: bool = True,
        layout: Layout = Append(),
        evictor: Evictor | None = None,
    ) -> None:
        self._codec, self._growth = make_codec(bits, group_size), growth
        self._reserve = whole_number("reserve", reserve)  # for any row
        self._announced: tuple[int, ...] = (0,)  # tokens that each row will hold, as far as was said
        self._quantized_start = whole_number("quantized_start", quantized_start)
        if self._quantized_start and bits is None:
            raise ValueError(f"quantized_start is {quantized_start}, but bits is None: say how many")
        self._packed_decode = packed_decode
        self._rows: tuple[Row, ...] = (Row(),)
        self._buffers: tuple[SlotBuffer, SlotBuffer] | None = None  # keys, values
        self._lengths: tuple[int, ...] | None = None  # tokens of each row that are announced; padding follows them
        if evictor is not None and layout not in (Append(), evictor.layout):
            raise ValueError(f"got {layout}, but an evictor of {evictor.layout}: leave the layout out")
        self._lay_out(layout, evictor)
        # What attention read of a write longer than max_write, until the next step.
        self._transient: tuple[mx.array, mx.array] | None = None
        self._ranges: Ranges = ()  # the slots that the last fetch was made of
        self._packed = False  # whether the last fetch handed out packed planes
        self.growths = 0  # reallocations since the first allocation

    def _lay_out(self, layout: Layout, evictor: Evictor | None) -> None:
        if evictor is None and isinstance(layout, Budget):  # without one, nothing would ever be evicted
            evictor = Evictor(layout)
        self.layout: Layout = layout if evictor is None else evictor.layout  # which slot holds which position
        self._evictor = evictor
        if evictor is not None:
            evictor.belong_to(self)

    # --- the update path ------------------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask for the next N tokens: None, "causal", or booleans (N, K) or (B, 1, N, K)."""
        self._transient = None  # a new step: nobody reads what the last one left
        counts = self._counts(N)
        if self._evictor is None:
            return make_mask(plan_of(self.layout, self._rows, N, counts), window_size, return_array)
        # The next update compacts what is due, but where the rows stand then is known now. Only for a window must it
        # be known which tokens are left.
        if window_size is not None:
            self._rows = self._evictor.compact_if_due(self._rows)
        plan = plan_of(self.layout, tuple(map(self.layout.compacted_if_due, self._rows)), N, counts)
        positions = None if window_size is None else self._evictor.key_positions(plan)
        return make_mask(plan, window_size, return_array, positions)

    def _counts(self, new: int) -> tuple[int, ...] | None:
        """How many of the next tokens are tokens of their row; None is all of all rows."""
        if self._lengths is None or min(self._lengths) >= new:
            return None
        return tuple([min(length, new) for length in self._lengths])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Fetched:
        """Stores the new tokens of every row and returns all that attention reads.

        Args:
            keys: (B, H, S, Dk), floating point.  values: (B, H, S, Dv).

        Returns:
            keys (B, H, n, Dk) and values (B, H, n, Dv), or two triples of packed planes where `bits` is visible.

        Raises:
            ValueError: shapes or dtypes that don't fit, or with a budget a score that cannot be used, or layers that
                have diverged; the cache is then as it was.
        """
        tensors = (keys, values)
        self._check(*tensors)
        rows = self._rows
        if len(rows) != keys.shape[0]:
            if rows != (Row(),) or self._lengths is not None:
                raise ValueError(f"keys came with rows {keys.shape[0]}, but this batch has rows {len(rows)}")
            rows = (Row(),) * keys.shape[0]
        if self._evictor is not None:
            rows = self._rows = self._evictor.compact_if_due(rows)
        if len(self._announced) != len(rows):  # what was said of the first row of a new batch is said of all
            self._announced *= len(rows)
        plan = plan_of(self.layout, rows, keys.shape[2], self._counts(keys.shape[2]))
        self._transient = None
        buffers = self._make_room(plan, tensors)
        if plan.transient:  # read before the write overwrites what its first queries see
            self._transient = self._read_transient(plan, buffers, tensors)
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.write(tensor, plan)
        self._rows, self._ranges = plan.after, () if plan.transient else plan.ranges
        if self._lengths is not None:
            self._lengths = tuple([max(0, length - plan.new) for length in self._lengths])
        self._packed = not plan.transient and self._hands_out_packed(buffers, plan.new)
        return self._fetched(buffers)

    def _read_transient(
        self, plan: Plan, buffers: tuple[SlotBuffer, SlotBuffer], tensors: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array]:
        """The live tokens in order, then the new ones as they will be stored. Shorter rows begin with filler."""
        live = plan.live()
        slots = [
            [0 if position < 0 else plan.layout.slot(row, position) for position in seen]
            for row, seen in zip(plan.distinct, live, strict=True)
        ]

        def read(buffer: SlotBuffer, new: mx.array) -> mx.array:
            stored = buffer.codec.decode(buffer.codec.encode(new))
            return mx.concatenate([buffer.codec.decode(buffer.take(slots)), stored], axis=2) if live[0] else stored

        return read(buffers[0], tensors[0]), read(buffers[1], tensors[1])

    def _hands_out_packed(self, buffers: tuple[SlotBuffer, SlotBuffer], new: int) -> bool:
        # mlx-lm's packed attention shapes its result by the keys' head dim: with another one of values it cannot work.
        same_head_dim = buffers[0].tensor[2] == buffers[1].tensor[2]
        return self._packed_decode and new <= MOST_PACKED_TOKENS and same_head_dim and buffers[0].codec.bits is not None

    def keys_and_values(self) -> Fetched:
        """What the last update returned, again: some models read a layer's cache from another layer.

        Raises:
            ValueError: nothing has been stored yet.
        """
        if self._buffers is None or self.empty():
            raise ValueError("this cache is empty: call update_and_fetch before keys_and_values")
        if self._transient is None and not self._ranges:
            raise ValueError("nothing was fetched since rows came, went or were loaded: call update_and_fetch first")
        return self._fetched(self._buffers)

    def _fetched(self, buffers: tuple[SlotBuffer, SlotBuffer]) -> Fetched:
        if self._transient is not None:
            return self._transient
        keys, values = (buffer.read(self._ranges) for buffer in buffers)
        if self._packed:
            return keys, values
        return buffers[0].codec.decode(keys), buffers[1].codec.decode(values)

    def _make_room(self, plan: Plan, tensors: tuple[mx.array, mx.array]) -> tuple[SlotBuffer, SlotBuffer]:
        """The buffers, with slots for the plan: allocated, grown or quantised first where that is due."""
        held = min(max(plan.held, 0), plan.layout.most_slots)
        needed = plan.needed + plan.padded  # padding goes to a slot of its own
        due = max([row.offset for row in plan.rows]) >= self._quantized_start
        if self._buffers is None:
            codec = self._codec if due else Plain()
            capacity = self._next_capacity(needed)
            keys, values = (SlotBuffer.allocate(codec, tensor, capacity) for tensor in tensors)
            self._buffers = keys, values
        elif needed > self.capacity:
            capacity = self._next_capacity(needed)
            for buffer in self._buffers:
                buffer.reserve(capacity, used=held)
            self.growths += 1
        if due and self._buffers[0].codec is not self._codec:
            for buffer in self._buffers:
                buffer.recode(self._codec)
        return self._buffers

    def _next_capacity(self, needed: int) -> int:
        reserve = max(self._reserve, *self._announced)
        # Who says how much will come gets that and no slack: also on top of what was held before, or loaded.
        wanted = round_up(reserve if needed <= reserve else max(needed, self._growth.capacity(needed, self.capacity)))
        return min(wanted, round_up(max(needed, self.layout.enough_slots)))

    def _check(self, keys: mx.array, values: mx.array) -> None:
        if self._buffers is not None and continues(keys, values, self._buffers):
            return  # every token of every layer comes by here: the usual case first
        check_tokens(keys, values)
        tensors = {"keys": keys, "values": values}
        for name, tensor in tensors.items():
            self._codec.check(name, tensor)
        if self._buffers is None:
            return
        if self.empty() and [tensor_of(x) for x in tensors.values()] != [buffer.tensor for buffer in self._buffers]:
            self._buffers = None  # a new session of another shape: nothing is lost
            return
        for (name, tensor), buffer in zip(tensors.items(), self._buffers, strict=True):
            check_unchanged(name, tensor, buffer)

    # --- lengths --------------------------------------------------------------------------------------------------

    @property
    def offset(self) -> int | mx.array:
        """The next position: an int where all rows agree, an array (B,) of int32 where they differ."""
        offsets = [row.offset for row in self._rows]
        return offsets[0] if len(set(offsets)) == 1 else mx.array(offsets)

    def size(self) -> int:
        """Tokens held by the longest row."""
        return max(0, *map(self.layout.held, self._rows))

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return not any(row.offset > 0 for row in self._rows)

    def is_trimmable(self) -> bool:
        """mlx-lm's question, whose callers then trim by any amount: whether every trim is lossless."""
        return all(self.layout.most_trim(row) == row.offset for row in self._rows if row.offset > 0)

    def can_trim(self, n: int | Sequence[int]) -> bool:
        """Whether every row can drop n tokens, or row i n[i] of them, and see what it saw before them."""
        try:
            counts = self._numbers(n)
        except ValueError:
            return False
        most = map(self.layout.most_trim, self._rows)
        return len(counts) == len(self._rows) and all(0 <= c <= m for c, m in zip(counts, most, strict=True))

    def trim(self, n: int) -> int:
        """Drops the last n tokens of every row, without moving anything, and returns n.

        Raises:
            ValueError: n is negative or more than a row can give back; nothing has changed then.
        """
        self.trim_per_sequence(self._numbers(n))
        return n

    def trim_per_sequence(self, n: Sequence[int] | mx.array) -> None:
        """Drops the last n[i] tokens of row i, without moving anything.

        Args:
            n: B integers, or an array (B,).

        Raises:
            ValueError: a wrong number of counts, or one that its row cannot give; nothing has changed then.
        """
        self._rows = trim_rows(self.layout, self._rows, self._numbers(n))
        self._transient = None
        if self._evictor is not None:
            self._evictor.forget()

    def _numbers(self, given: object) -> tuple[int, ...]:
        """Whole numbers from a sequence or an array; one number stands for one of each row."""
        listed: Any = given.tolist() if isinstance(given, mx.array) else given
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            listed = list(listed) if hasattr(listed, "__len__") else [listed] * len(self._rows)
        try:
            return tuple([operator.index(number) for number in listed])
        except TypeError:
            raise ValueError(f"got {given!r}: give whole numbers") from None

    def reset(self) -> None:
        """Forgets every token, for a new session. Slots stay allocated, and serve it if its shapes are the same."""
        self._rows, self._packed, self._transient, self._lengths = (Row(),), False, None, None
        self._announced = (0,)
        if self._evictor is not None:
            self._evictor.reset()
        if self._quantized_start:
            self._buffers = None  # the new session begins plain again

    def reserve(self, tokens: int) -> None:
        """Announces that each row will hold `tokens` tokens in all: when room must be made next, it is made for them.

        It holds for the rows of now, and goes with them.

        Raises:
            ValueError: a negative number.
        """
        number = whole_number("reserve", tokens)
        self._announced = tuple([max(announced, number) for announced in self._announced])

    @property
    def max_write(self) -> int | None:
        """The longest write after which attention reads the slots themselves, not a copy; None is no limit."""
        return None if self.layout.max_write == NO_LIMIT else self.layout.max_write

    @property
    def start_position(self) -> int:
        """The first position, sinks aside, that attention reads."""
        return min(row.front for row in self._rows)

    def maybe_trim_front(self) -> None:
        """Lets go of tokens before the last chunk_size, as models with chunked attention ask before each step.

        Nothing moves. Caches of another layout have no front to move: they do nothing.
        """
        self._rows = tuple([row._replace(front=self.layout.trimmed_front(row)) for row in self._rows])

    # --- rows -----------------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> KVCache:
        """A batch of copies of the rows of several caches, in their order.

        Raises:
            ValueError: no cache at all, or one that stores otherwise than the first.
        """
        if not caches:
            raise ValueError("got no cache to merge: give at least one")
        first = caches[0]
        merged = copy.deepcopy(first)
        merged._join(caches[1:])
        return merged

    def extend(self, other: KVCache) -> None:
        """Takes copies of another's rows, after its own.

        Raises:
            ValueError: it stores otherwise; nothing has changed then.
        """
        self._join([other])

    def _join(self, others: Sequence[KVCache]) -> None:
        everyone = [self, *others]
        for index, other in enumerate(everyone):
            check_joinable(index, self, other)
        filled = [cache for cache in everyone if not cache.empty()]
        # Where nobody has a token, buffers that are left of trimmed ones have rows for this cache alone.
        self._buffers = joined_buffers(everyone, max(cache.capacity for cache in filled)) if filled else None
        self._rows = tuple([row for cache in everyone for row in cache._rows])
        self._reserve = max(cache._reserve for cache in everyone)
        self._announced = tuple([announced for cache in everyone for announced in cache._announced])
        self._transient, self._ranges, self._packed, self._lengths = None, (), False, None
        if self._evictor is not None:
            for other in others:
                if other._evictor is not None:
                    self._evictor.extend(other._evictor)

    def extract(self, index: int) -> KVCache:
        """A copy of one row, as a cache of its own, of no more slots than it needs; what was announced is left behind.

        It is computed when it is first used. Evaluate its `state` to keep it beside a batch that goes on: until then it
        holds on to the batch's buffers, which the next write would have to copy.

        Raises:
            ValueError: there is no such row.
        """
        check_rows([index], len(self._rows))
        single = self._without_evictor({})
        single._select([index], shrink=True)
        single._announced = (0,)
        if self._evictor is not None:
            single._evictor = self._evictor.selected([index])
            single._evictor.belong_to(single)
        return single

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keeps only these rows, in this order; the memory of the others is given back, and what only they needed.

        Raises:
            ValueError: no row, or one that is not there; nothing has changed then.
        """
        chosen = list(self._numbers(batch_indices))
        check_rows(chosen, len(self._rows))
        if chosen != list(range(len(self._rows))):
            self._select(chosen)

    def _select(self, chosen: Sequence[int], shrink: bool = False) -> None:
        self._rows = tuple([self._rows[index] for index in chosen])
        self._announced = tuple([self._announced[index] for index in chosen])
        if self._buffers is not None:
            used = min(max(0, *(row.end for row in self._rows)), self.layout.most_slots)
            capacity = min(self.capacity, round_up(max(self._reserve, *self._announced, 2 * used, 1)))
            capacity = round_up(used + 1) if shrink else capacity
            keys, values = (buffer.selected(chosen, capacity) for buffer in self._buffers)
            self._buffers = keys, values
        self._transient, self._ranges, self._packed = None, (), False
        if self._lengths is not None:
            self._lengths = tuple([self._lengths[index] for index in chosen])
        if self._evictor is not None:
            self._evictor.keep(chosen, self._rows)

    def prepare(
        self,
        *,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
    ) -> None:
        """Announces padding in the tokens that come, which is then never stored.

        Args:
            lengths: tokens of each row in all updates until `finalize`; what a row gets beyond them is padding.
            right_padding: not looked at: lengths say the same.
            left_padding: tokens of padding that come first in each row; only before anything is stored.

        Raises:
            ValueError: another number of rows, a negative number, or left padding after tokens.
        """
        rows = len(self._rows)
        for name, counts in (("lengths", lengths), ("left_padding", left_padding)):
            if counts is not None and (len(counts) != rows or min(counts) < 0):
                raise ValueError(f"{name} is {list(counts)}: give {rows} numbers from 0 up, one for each row")
        if left_padding is not None:
            if not self.empty():
                raise ValueError("left padding can only come first, but this cache holds tokens: give lengths instead")
            self._rows = tuple(
                [row._replace(offset=row.offset - n) for row, n in zip(self._rows, left_padding, strict=True)]
            )
        if lengths is not None:
            self._lengths = tuple(lengths)

    def finalize(self) -> None:
        """Ends what `prepare` announced. Nothing moves."""
        self._lengths = None

    # --- budgets --------------------------------------------------------------------------------------------------

    def compact(self) -> None:
        """Evicts down to the budget now, not only when it is overshot by its margin; see `mlx_kv.compact`.

        Caches without a budget do nothing.
        """
        if self._evictor is not None:
            self._rows = self._evictor.compact_if_due(self._rows, on_demand=True)

    @property
    def evictor(self) -> Evictor | None:
        """The part that evicts, with what it did so far; None without a budget."""
        return self._evictor

    @property
    def positions(self) -> mx.array:
        """The position of each live slot: (B, H', n), H' being the number of heads where each keeps its own, else 1.

        Rows with fewer live slots end with -1. Only for layouts whose slots are never used again: budgets, or none.

        Raises:
            ValueError: this cache is a ring.
        """
        ends = [max(0, row.end) for row in self._rows]
        if self.layout.most_slots != NO_LIMIT:
            raise ValueError("a ring uses its slots again: ask its layout for the position of a slot")
        lines = [
            mx.arange(max(0, row.end), dtype=mx.int32)[None] - row.start
            if self._evictor is None
            else self._evictor.live_positions(row, i)
            for i, row in enumerate(self._rows)
        ]
        heads, most = max(line.shape[0] for line in lines), max(ends)
        return mx.stack(
            [
                mx.pad(mx.broadcast_to(line, (heads, end)), [(0, 0), (0, most - end)], constant_values=mx.array(-1))
                for line, end in zip(lines, ends, strict=True)
            ]
        )

    @property
    def view(self) -> CacheView:
        """What it holds and how, as it is now, for those who look and change nothing."""
        return CacheView(self.layout, self._rows, self._buffers)

    # --- memory ---------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots allocated for each row; 0 before the first update."""
        return 0 if self._buffers is None else self._buffers[0].capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated, dead slots included."""
        known = 0 if self._evictor is None else self._evictor.nbytes
        return 0 if self._buffers is None else known + sum(buffer.nbytes for buffer in self._buffers)

    @property
    def nbytes_live(self) -> int:
        """Bytes of the slots that hold a token."""
        if self._buffers is None:
            return 0
        return sum(max(0, self.layout.held(row)) for row in self._rows) * self._bytes_per_slot

    @property
    def nbytes_full(self) -> int:
        """Bytes that all tokens up to here would take if none had been evicted or overwritten."""
        return 0 if self._buffers is None else sum(max(0, row.offset) for row in self._rows) * self._bytes_per_slot

    @property
    def _bytes_per_slot(self) -> int:
        return sum(buffer.bytes_per_slot for buffer in self._buffers or ())

    # --- quantisation ---------------------------------------------------------------------------------------------

    @property
    def bits(self) -> int:
        """Bits per element of the packed planes of the last fetch.

        Not there (AttributeError) when the last fetch was of plain arrays: mlx-lm's attention takes its unfused
        quantised path for any cache that has this attribute, which would be wrong for those.
        """
        return self._visible(self._codec.bits)

    @property
    def group_size(self) -> int:
        """Elements that share a scale in the last fetch; there only when `bits` is."""
        return self._visible(self._codec.group_size)

    def _visible(self, value: int | None) -> int:
        if not self._packed or value is None:
            raise AttributeError("bits and group_size are visible only after a fetch of packed planes")
        return value

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> KVCache:
        """A quantised copy of this cache; this cache itself if it is quantised already, whatever its bits.

        mlx-lm's loop calls this after every step when it is given kv_bits, and puts the result in the cache's place.
        """
        if self._codec.bits is not None:
            return self
        codec = make_codec(bits, group_size)
        for name, buffer in zip(("keys", "values"), self._buffers or (), strict=False):
            codec.check(name, buffer.planes[0])
        quantized = copy.deepcopy(self)  # the buffers are shared until the next line replaces them
        quantized._codec = codec
        for buffer in quantized._buffers or ():
            buffer.recode(codec)
        return quantized

    # --- what mlx-lm reads and writes from outside ------------------------------------------------------------------

    @property
    def keys(self) -> mx.array | None:
        """The buffer of the keys, (B, H, C, Dk), or its packed plane where quantised; None before the first update.

        Pipelined models replace it by the same buffer with a dependency: `cache.keys = mx.depends(cache.keys, h)`.
        """
        return None if self._buffers is None else self._buffers[0].handles()[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._replace(0, value)

    @property
    def values(self) -> mx.array | None:
        """The buffer of the values, as `keys`."""
        return None if self._buffers is None else self._buffers[1].handles()[0]

    @values.setter
    def values(self, value: mx.array) -> None:
        self._replace(1, value)

    def _replace(self, which: int, value: mx.array) -> None:
        if self._buffers is None or value.shape != self._buffers[which].planes[0].shape:
            raise ValueError(f"a buffer of shape {value.shape} cannot replace the one of this cache: keep its shape")
        buffer = self._buffers[which]
        buffer.planes = (value[:], *buffer.planes[1:])

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything to continue from, as a pytree: planes of keys and of values, rows, and how they are stored."""
        keys, values = (None, None) if self._buffers is None else (buffer.handles() for buffer in self._buffers)
        rows, ranges = [list(row) for row in self._rows], [list(one) for one in self._ranges]
        settings = (self._codec.bits, self._codec.group_size, self._quantized_start, self._packed_decode, self._packed)
        eviction = None if self._evictor is None else self._evictor.state
        return keys, values, rows, ranges, list(self.layout.parameters), *settings, eviction

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        keys, values, rows, ranges, layout, *settings, eviction = value
        self._lengths = None  # padding is announced anew
        bits, group_size, quantized_start, packed_decode, packed = settings
        self._codec = make_codec(bits, group_size)
        self._quantized_start, self._packed_decode, self._packed = quantized_start, packed_decode, packed
        self._rows, self._transient = tuple(Row(*row) for row in rows), None
        self._announced = (0,) * len(rows)
        self._ranges, self._buffers = tuple((first, last) for first, last in ranges), None
        evictor = None if eviction is None else Evictor.from_state(Budget(*layout[1:]), eviction)
        self._lay_out(make_layout(*layout), evictor)
        if keys is not None:
            codec = self._codec if len(keys) > 1 else Plain()
            self._buffers = SlotBuffer(codec, tuple(keys)), SlotBuffer(codec, tuple(values))

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> KVCache:
        """A cache that continues from another's `state`; it grows by the default rule."""
        cache = cls()
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        evictor = None if self._evictor is None else self._evictor.copied(memo)
        copied = self._without_evictor(memo)
        if evictor is not None:
            copied._evictor = evictor
            copied._evictor.belong_to(copied)
        return copied

    def _without_evictor(self, memo: dict[int, Any]) -> KVCache:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ |= vars(self)  # all of it is never changed in place, but for the two that follow
        copied._evictor = None
        if self._buffers is not None:
            copied._buffers = self._buffers[0].copied(), self._buffers[1].copied()
        return copied

    def __repr__(self) -> str:
        how = f", bits={self._codec.bits}" if self._codec.bits is not None else ""
        return f"{type(self).__name__}(offset={self.offset}, capacity={self.capacity}, nbytes={self.nbytes}{how})"
