"""What an attention layer talks to: one update path for every combination.

Decides what a trim takes back. The contents of a cache and its state are in `state`, what other code reads of it in
`holder`, an update in `update`, and what is done to rows in `rows`. Of models and mlx-lm it uses only the names in
`protocol.Cache`. B rows, H KV heads, S new tokens, Dk and Dv head dims, C capacity in slots.

    make_mask(S)            -> plan(S) -> None | "causal" | array
    update_and_fetch(k, v)  -> compact, if it is due -> plan(S) -> reserve -> write into slots -> read

The plan is made of Python integers, so no update waits for the device but where buffers are made anew or a budget is
compacted, and no chain of tiny arrays is left unevaluated.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx

from mlx_kv.cache import rows, state, update
from mlx_kv.cache.attention import PackedAnswer, ResidualAnswer
from mlx_kv.cache.checks import check_type, shown, whole_number, whole_numbers
from mlx_kv.cache.codecs import Bits, Choice, are_plain, find_codecs
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.growth import DEFAULT, Growth
from mlx_kv.cache.holder import Holder
from mlx_kv.cache.layout import Append, Layout, Row, trim_rows
from mlx_kv.cache.mask import Mask, make_mask
from mlx_kv.cache.protocol import Call, Fetched, Hook
from mlx_kv.cache.residual import Residual
from mlx_kv.cache.state import Contents


class KVCache(Holder):
    """Keys and values of one layer, plain or quantised, of a sequence or a batch: all, or what a layout keeps.

    Args:
        bits: 2, 3, 4, 5, 6 or 8 to store quantised (`mx.quantize`, affine), or two numbers, of keys and of values; None
            stores tensors as they are.
        group_size: elements that share a scale, 32, 64 or 128; only looked at with bits.
        growth: how capacity grows when it must.
        reserve: tokens to make room for at the first update; within them nothing grows and nothing is copied.
        quantized_start: stay plain until a write begins at this offset or later, in any row; then quantise all, once.
        packed_decode: hand packed planes to attention for writes of up to 8 tokens. False for models whose attention
            cannot take them (attention sinks, MLA); `make_prompt_cache` finds out by itself.
        layout: which slot holds which position: everything (the default), a ring, chunks, or a budget.
        evictor: what compacts the rows of a budget, whose layout it has; None makes one with the default score where
            the layout is a budget.
        residual_length: tokens that a query sees as they came, itself included, whatever stores the others; 0 is none.
            Only where attention can be answered here (`make_prompt_cache` asks). At most keep_recent of a budget.
        codec: how tensors are stored: a codec or its name (`mlx_kv.codec_names()`), or two, of keys and of values;
            instead of bits, or the name of one that is made with bits ("rotated") beside them.

    Raises:
        ValueError: bits, a group size or a codec that don't exist, or that don't go together; a negative number;
            quantized_start or residual_length where nothing is quantised, or a residual_length with share="adaptive" or
            more max_rollback than it can give back; an evictor beside another layout than its own.
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
        _check_parts(growth, layout, evictor)
        reserve, quantized_start = whole_number("reserve", reserve), whole_number("quantized_start", quantized_start)
        if quantized_start and are_plain(codecs):
            raise ValueError(f"quantized_start is {quantized_start}, but bits is None: say how many")
        if evictor is not None and layout not in (Append(), evictor.layout):
            raise ValueError(f"got {layout}, but an evictor of {evictor.layout}: leave the layout out")
        if whole_number("residual_length", residual_length) and are_plain(codecs):
            raise ValueError(f"residual_length is {residual_length}, but bits is None: say how many")
        residual = Residual(residual_length) if residual_length else None
        made = Contents(codecs, layout, evictor, growth, reserve, quantized_start, packed_decode, residual=residual)
        super().__init__(made)

    # --- the update path ------------------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask for the next N tokens: None, "causal", or booleans (N, K) or (B, 1, N, K)."""
        held = self._held
        held.transient = None  # a new step: what the last one left is not read any more
        if (usual := update.next_plan(held, N)) is not None and (window_size is None or held.evictor is None):
            return make_mask(usual, window_size, return_array)
        if held.evictor is None:
            return make_mask(update.plan_for(held, held.rows, N), window_size, return_array)
        # The next update compacts what is due, but where the rows stand then is known now. Only for a window must it
        # be known which tokens are left.
        if window_size is not None:
            held.rows = held.evictor.compact_if_due(held.rows)
        plan = update.plan_for(held, tuple(map(held.layout.compacted_if_due, held.rows)), N)
        positions = None if window_size is None else held.evictor.key_positions(plan)
        return make_mask(plan, window_size, return_array, positions)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Fetched:
        """Stores the new tokens of every row and returns all that attention reads.

        Args:
            keys: (B, H, S, Dk), floating point.  values: (B, H, S, Dv).

        Returns:
            keys (B, H, n, Dk) and values (B, H, n, Dv), or packed planes of both: for mlx-lm where `bits` is visible,
            else for `attend`.

        Raises:
            ValueError: shapes or dtypes that don't fit, or with a budget a score that cannot be used, or layers that
                have diverged; the cache is then as it was.
        """
        fetched = update.step(self._held, keys, values)
        if fetched is None:
            fetched = update.store(self._held, keys, values)
            update.remember(self._held, keys, values)
        return fetched

    def keys_and_values(self) -> Fetched:
        """What the last update returned, again: some models read a layer's cache from another layer.

        Raises:
            ValueError: nothing has been stored yet, or fetched since rows came, went or were loaded.
        """
        held = self._held
        if held.buffers is None or held.empty():
            raise ValueError("this cache is empty: call update_and_fetch before keys_and_values")
        if held.transient is None and not held.ranges:
            raise ValueError("nothing was fetched since rows came, went or were loaded: call update_and_fetch first")
        return update.fetched(held, held.buffers)

    # --- attention --------------------------------------------------------------------------------------------------

    @property
    def attention_hook(self) -> Hook | None:
        """What is shown the attention over this cache, where it can be shown: see `mlxlm.attention.AttentionSeam`.

        The cache itself where its budget wants to see it; or the hook that was set, which hands on to `own_hook`.
        """
        return self.own_hook if self._hook is None else self._hook

    @attention_hook.setter
    def attention_hook(self, hook: Hook | None) -> None:
        self._hook = None if hook is self else hook

    @property
    def own_hook(self) -> KVCache | None:
        """This cache, if its budget wants to see attention, or mlx-lm's cannot read what it has; else None."""
        held = self._held
        watched = held.evictor is not None and held.evictor.wants_attention
        own = held.residual is not None or (held.packings is not None and held.packed_decode)
        return self if watched or own else None

    def attend(self, call: Call) -> mx.array:
        """(B, Hq, S, Dv): attention after an update, seen by a budget that wants to, answered where mlx-lm cannot."""
        held = self._held
        answer: Hook | None = None
        if held.residual is not None and held.residual.places is not None and held.encoded:
            answer = ResidualAnswer(held.residual, held.residual.places, held.packings if held.packed else None)
        elif held.packed and held.packings is not None:
            answer = PackedAnswer(*held.packings)
        if held.evictor is None or not held.evictor.wants_attention:
            return call.hand_on() if answer is None else answer.attend(call)
        return held.evictor.attend(call if answer is None else call.before(answer), held.rows, held.counts)

    # --- trims --------------------------------------------------------------------------------------------------

    def is_trimmable(self) -> bool:
        """mlx-lm's question, whose callers then trim by any amount: whether every trim is lossless."""
        rows = self._held.rows
        return all(most == row.offset for most, row in zip(self.most_trims, rows, strict=True) if row.offset > 0)

    def can_trim(self, n: int | Sequence[int]) -> bool:
        """Whether every row can drop n tokens, or row i n[i] of them, and see what it saw before them."""
        try:
            counts = whole_numbers(n, len(self._held.rows))
        except ValueError:
            return False
        most = self.most_trims
        return len(counts) == len(most) and all(0 <= c <= m for c, m in zip(counts, most, strict=True))

    def trim(self, n: int) -> int:
        """Drops the last n tokens of every row, without moving anything, and returns n.

        Raises:
            ValueError: n is negative or more than a row can give back; nothing has changed then.
        """
        self.trim_per_sequence(whole_numbers(n, len(self._held.rows)))
        return n

    def trim_per_sequence(self, n: Sequence[int] | mx.array) -> None:
        """Drops the last n[i] tokens of row i, without moving anything.

        Args:
            n: B integers, or an array (B,).

        Raises:
            ValueError: a wrong number of counts, or one that its row cannot give; nothing has changed then.
        """
        held, before = self._held, self._held.rows
        counts = whole_numbers(n, len(before))
        rows = trim_rows(held.layout, before, counts)
        if held.residual is not None:
            held.residual.check_trim(counts, self.most_trims)
        held.rows = rows
        held.transient = None
        update.note_trim(held, before)
        if held.evictor is not None:
            held.evictor.trimmed(held.rows)

    def reset(self) -> None:
        """Forgets every token. A new session of the same shapes gets the slots, but with a quantized_start."""
        held = self._held
        held.rows, held.announced = (Row(),), (0,)
        state.release(held)
        update.begin(held)
        held.packed, held.transient, held.lengths = False, None, None
        if held.evictor is not None:
            held.evictor.reset()
        if held.residual is not None:
            held.residual = held.residual.empty()
        if held.quantized_start:
            held.buffers = None  # the new session begins plain again

    def reserve(self, tokens: int) -> None:
        """Announces that each row will hold `tokens` tokens in all: when room must be made next, it is made for them.

        It holds for the rows of now, and goes with them.

        Raises:
            ValueError: a negative number.
        """
        number = whole_number("reserve", tokens)
        self._held.announced = tuple([max(announced, number) for announced in self._held.announced])

    def maybe_trim_front(self) -> None:
        """Lets go of tokens before the last chunk_size, as models with chunked attention ask before each step.

        Nothing moves. Caches of another layout have no front to move: they do nothing.
        """
        held = self._held
        held.rows = tuple([row._replace(front=held.layout.trimmed_front(row)) for row in held.rows])

    def compact(self) -> None:
        """Evicts down to the budget now, not only when it is overshot by its margin; see `mlx_kv.compact`.

        Caches without a budget do nothing.
        """
        if self.evictor is not None:
            self._held.rows = self.evictor.compact_if_due(self._held.rows, on_demand=True)

    # --- rows -----------------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> KVCache:
        """A batch of copies of the rows of several caches, in their order.

        Raises:
            ValueError: no cache at all, or one that stores otherwise than the first.
        """
        if not caches:
            raise ValueError("got no cache to merge: give at least one")
        merged = copy.deepcopy(caches[0])
        merged._join(caches[1:])
        return merged

    def extend(self, other: KVCache) -> None:
        """Takes copies of another's rows, after its own.

        Raises:
            ValueError: it stores otherwise; nothing has changed then.
        """
        self._join([other])

    def _join(self, others: Sequence[KVCache]) -> None:
        for index, other in enumerate(others, 1):
            rows.check_joinable(index, self, other)
        if self.seam is None:
            self.carry(next((other.seam for other in others if other.seam is not None), None))
        rows.join(self._held, [other._held for other in others])

    def extract(self, index: int) -> KVCache:
        """A copy of one row, as a cache of its own, of no more slots than it needs; what was reserved is left behind.

        It is computed when it is first used. Evaluate its `state` to keep it beside a batch that goes on: until then it
        holds on to the batch's buffers, which the next write would have to copy.

        Raises:
            ValueError: there is no such row.
        """
        rows.check_rows([index], len(self._held.rows))
        return self._like(rows.extracted(self._held, index))

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keeps only these rows, in this order; the memory of the others is given back, and what only they needed.

        Raises:
            ValueError: no row, or one that is not there; nothing has changed then.
        """
        chosen = list(whole_numbers(batch_indices, len(self._held.rows)))
        rows.check_rows(chosen, len(self._held.rows))
        if chosen != list(range(len(self._held.rows))):
            rows.select(self._held, chosen)

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
        rows.announce_padding(self._held, lengths, left_padding)

    def finalize(self) -> None:
        """Ends what `prepare` announced. Nothing moves."""
        self._held.lengths = None

    # --- what mlx-lm reads and writes from outside ------------------------------------------------------------------

    @property
    def bits(self) -> int:
        """Bits per element of the packed planes that mlx-lm's attention reads: of the last fetch, or of the first.

        Not there (AttributeError) where that gets arrays, as it takes its quantised path for whatever has this, or
        where it cannot read planes (bits apart, other codecs, a residual); nor with a quantized_start before it.
        """
        return update.packing(self._held).bits

    @property
    def group_size(self) -> int:
        """Elements that share a scale; there only when `bits` is."""
        return update.packing(self._held).group_size

    def to_quantized(self, group_size: int = 64, bits: Bits = 4) -> KVCache:
        """A quantised copy of this cache; this cache itself if it is quantised already, whatever its bits.

        mlx-lm's loop calls this after every step when it is given kv_bits, and puts the result in the cache's place;
        its kv_bits may be a pair then, too, of keys and of values.
        """
        if not are_plain(self._held.codecs):
            return self
        quantized = copy.deepcopy(self)  # the buffers are shared until they are replaced
        update.quantize(quantized._held, find_codecs(bits, group_size))
        return quantized

    @property
    def keys(self) -> mx.array | None:
        """The buffer of the keys, (B, H, C, Dk), or its first plane where encoded; None before the first update.

        Pipelined models replace it by the same buffer with a dependency: `cache.keys = mx.depends(cache.keys, h)`.
        """
        return update.first_plane(self._held, 0)

    @keys.setter
    def keys(self, value: mx.array) -> None:
        update.replace_first_plane(self._held, 0, value)

    @property
    def values(self) -> mx.array | None:
        """The buffer of the values, as `keys`."""
        return update.first_plane(self._held, 1)

    @values.setter
    def values(self, value: mx.array) -> None:
        update.replace_first_plane(self._held, 1, value)


def _check_parts(growth: object, layout: object, evictor: object) -> None:
    """Raises ValueError for what is no growth rule, no layout or no evictor."""
    if isinstance(growth, type) or not callable(getattr(growth, "capacity", None)):
        raise ValueError(f"growth is {shown(growth)}: give a rule such as Tapered() or FixedStep(256)")
    if isinstance(layout, type) or not hasattr(layout, "with_room"):
        raise ValueError(f"layout is {shown(layout)}: leave it out, or call RingKVCache or CompressedKVCache")
    check_type("evictor", evictor, Evictor | None, "leave it out, or use CachePolicy(budget=...)")
