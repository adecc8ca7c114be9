"""One update: stores the new tokens of every row and returns what attention reads.

Full path: check the tensors, compact a budget if it is due, plan, make room (allocate, grow, rearrange or quantise
buffers), write, read.

Fast path, for an update of the same shapes and dtypes as the last one, with no change of the cache in between: its plan
is `next` of the last plan, which all layers share, and only shapes and dtypes of tensors are compared. A trim, other
rows, a compaction, growth, padding, a change of room, or a codec that is not in use yet (`quantized_start`) takes the
full path. Both paths give equal results.

Write capacity (`room`): the longest write that a layout has slots for. A ring has window + room - 1 slots, a budget has
budget + margin + room. A prompt needs much, decoding little. Room grows at once for a longer write and shrinks after
PERIOD consecutive writes that need far less. Trims count as writes, so that a loop with a draft model keeps room for
all tokens that it may take back. One layer makes the mask for all layers before the write; so the room of that write is
decided before, from integers that are equal in all layers.

B rows, H KV heads, S new tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers, SlotBuffer, signature_of
from mlx_kv.cache.checks import check_tokens, check_unchanged, continues
from mlx_kv.cache.codecs import PLAIN, Codecs, Packing, are_plain, in_rows
from mlx_kv.cache.head_groups import HeadGroups
from mlx_kv.cache.layout import (
    NO_LIMIT,
    Layout,
    Plan,
    Row,
    enough_slots,
    moves_between,
    plan_of,
    planned,
    reshaped,
    stay,
)
from mlx_kv.cache.protocol import Fetched
from mlx_kv.cache.state import CacheData

# Writes of up to this many tokens (decoding, the verify step of speculative decoding) read packed planes. Longer ones
# are prefill: there packed attention is unfused and holds all scores at once, so it gets dequantised arrays instead.
MAX_PACKED_TOKENS = 8
# Changing the room copies all live slots once, about as much as attention reads in two or three decode steps. Once in
# so many writes that is little, even where the length of writes keeps changing.
PERIOD = 32
MUCH_LESS = 4  # times: writes of at most room / MUCH_LESS tokens, or of 1 (which then needs no mask), are short


# --- the full path ----------------------------------------------------------------------------------------------------


def store(data: CacheData, keys: mx.array, values: mx.array) -> Fetched:
    """As `KVCache.update_and_fetch`."""
    check(data, keys, values)
    tensors, new, rows = (keys, values), keys.shape[2], data.rows
    if len(rows) != keys.shape[0]:
        if rows != (Row(),) or data.lengths is not None:
            raise ValueError(f"keys came with rows {keys.shape[0]}, but this batch has rows {len(rows)}")
        rows = (Row(),) * keys.shape[0]
    if data.evictor is not None:
        rows = data.rows = data.evictor.compact_if_due(rows)
    if len(data.announced) != len(rows):  # announced for the first row of a new batch: applies to all
        data.announced *= len(rows)
    plan = plan_for(data, rows, new)
    data.transient = None
    buffers = make_room(data, plan, tensors, rows)
    if plan.transient:  # read before the write overwrites what its first queries see
        data.transient = read_transient(plan, buffers, tensors)
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer.write(tensor, plan)
    if data.residual is not None:
        data.residual.write(tensors, plan)
    data.layout, data.last, data.counts = plan.layout, plan, plan.counts if plan.padded else None
    data.rows, data.ranges = plan.after, () if plan.transient else plan.ranges
    if data.lengths is not None:
        data.lengths = tuple([max(0, length - new) for length in data.lengths])
    note_write(data, new)
    data.packed = not plan.transient and hands_out_packed(data, buffers, new)
    return fetched(data, buffers)


def plan_for(data: CacheData, rows: tuple[Row, ...], new: int) -> Plan:
    """The plan of the next `new` tokens, of the mask and of the update, in the layout for this write.

    Args:
        rows: in the current layout, after a compaction that is due.
    """
    layout, lengths = layout_for(data, new), data.lengths
    standing = rows if layout is data.layout else reshaped(data.layout, layout, rows)
    # How many of the next tokens are tokens of their row; None is all of all rows.
    counted = None if lengths is None or min(lengths) >= new else tuple([min(length, new) for length in lengths])
    return plan_of(layout, standing, new, counted)


def check(data: CacheData, keys: mx.array, values: mx.array) -> None:
    """Raises ValueError for tensors that this cache cannot store."""
    if data.buffers is not None and continues(keys, values, data.buffers):
        return  # the usual case
    check_tokens(keys, values)
    tensors = {"keys": keys, "values": values}
    for (name, tensor), codec in zip(tensors.items(), data.codecs, strict=True):
        codec.check(name, tensor)
    if data.buffers is None:
        return
    if data.empty() and [signature_of(x) for x in tensors.values()] != [buffer.signature for buffer in data.buffers]:
        data.buffers = None  # a new session with another shape
        return
    for (name, tensor), buffer in zip(tensors.items(), data.buffers, strict=True):
        check_unchanged(name, tensor, buffer)


def make_room(data: CacheData, plan: Plan, tensors: tuple[mx.array, mx.array], rows: tuple[Row, ...]) -> Buffers:
    """The buffers with slots for the plan: allocated, resized or quantised first where needed.

    Args:
        rows: in the layout before this write, which may differ from the plan's.
    """
    used = min(max(plan.filled, 0), plan.layout.most_slots)
    needed = plan.needed + plan.padded  # one extra slot that padding is written to
    due = max([row.offset for row in plan.rows]) >= data.quantized_start
    if data.buffers is None:
        codecs = data.codecs if due else PLAIN
        capacity = _next_capacity(data, plan.layout, needed)
        keys, values = (
            SlotBuffer.allocate(codec, tensor, capacity) for codec, tensor in zip(codecs, tensors, strict=True)
        )
        data.buffers, data.encoded = (keys, values), due
    elif needed > data.capacity or plan.layout is not data.layout or plan.layout is data.following:
        data.growths += needed > data.capacity
        _reshape(data.buffers, data.layout, plan.layout, rows, _next_capacity(data, plan.layout, needed), used)
    if due and not data.encoded:
        data.use(data.codecs)
    return data.buffers


def _reshape(buffers: Buffers, before: Layout, layout: Layout, rows: tuple[Row, ...], capacity: int, used: int) -> None:
    """Changes the capacity of the buffers, and moves tokens to their slots in the new layout."""
    moves = None if stay(before, layout, rows) else [moves_between(before, layout, row) for row in rows]
    for buffer in buffers:
        if moves is not None:
            buffer.rearrange(moves, capacity)
        elif capacity != buffer.capacity:
            buffer.reserve(capacity, used=used)


def _next_capacity(data: CacheData, layout: Layout, needed: int) -> int:
    enough = enough_slots(layout, data.rows)
    if needed <= data.capacity:  # frees slots beyond the new room
        return min(data.capacity, data.round_up(max(needed, enough)))
    reserve = max(data.reserved, *data.announced)
    # No slack where the length was announced, also when tokens were held or loaded before.
    wanted = data.round_up(reserve if needed <= reserve else max(needed, data.growth.capacity(needed, data.capacity)))
    return min(wanted, data.round_up(max(needed, enough)))


def read_transient(plan: Plan, buffers: Buffers, tensors: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
    """Keys and values in the order of positions: live tokens, then the new ones as stored. Short rows are padded."""
    live = plan.live()
    slots = [
        [0 if position < 0 else plan.layout.slot(row, position) for position in seen]
        for row, seen in zip(plan.distinct, live, strict=True)
    ]

    def read(buffer: SlotBuffer, new: mx.array) -> mx.array:
        stored = buffer.as_stored(new)
        return mx.concatenate([buffer.decode(buffer.take(slots)), stored], axis=2) if live[0] else stored

    return read(buffers[0], tensors[0]), read(buffers[1], tensors[1])


def hands_out_packed(data: CacheData, buffers: Buffers, new: int) -> bool:
    """Whether attention reads packed planes after a write of `new` tokens."""
    if not (data.encoded and data.packed_decode) or new > MAX_PACKED_TOKENS:
        return False
    if data.packing is None:  # only our own attention can read them, where attention is patched
        return data.packings is not None and data.seam is not None
    # mlx-lm's packed attention takes the head dim of its result from the keys: values must have the same.
    return buffers[0].head_dim == buffers[1].head_dim


def fetched(data: CacheData, buffers: Buffers) -> Fetched:
    """What attention reads after the last write."""
    if data.transient is not None:
        return data.transient
    keys, values = buffers
    if data.packed:
        return in_rows(keys.read(data.ranges)), in_rows(values.read(data.ranges))
    return keys.decode(keys.read(data.ranges)), values.decode(values.read(data.ranges))


def packing(data: CacheData) -> Packing:
    """How the planes of the last (or the first) fetch are packed, where mlx-lm's attention can read them.

    Raises:
        AttributeError: it cannot, or the last fetch returned plain arrays.
    """
    first = data.buffers is None and data.packed_decode and not data.quantized_start
    if data.packing is None or not (data.packed or first):
        raise AttributeError("bits and group_size are visible before a first fetch, and after one of packed planes")
    return data.packing


def quantize(data: CacheData, codecs: Codecs) -> None:
    """Quantises a plain cache from now on, whatever its length.

    Raises:
        ValueError: a head dim that the codecs cannot store; nothing has changed then.
    """
    for name, codec, buffer in zip(("keys", "values"), codecs, data.buffers or (), strict=False):
        codec.check(name, buffer.planes[0])
    data.use(codecs)


def first_plane(data: CacheData, which: int) -> mx.array | None:
    """A handle to the first plane of the keys (0) or the values (1)."""
    return None if data.buffers is None else data.buffers[which].handles()[0]


def replace_first_plane(data: CacheData, which: int, value: mx.array) -> None:
    """Replaces the first plane by an array of the same shape."""
    if data.buffers is None or value.shape != data.buffers[which].planes[0].shape:
        raise ValueError(f"a buffer of shape {value.shape} cannot replace the one of this cache: keep its shape")
    buffer = data.buffers[which]
    buffer.planes = (value[:], *buffer.planes[1:])


# --- the fast path ----------------------------------------------------------------------------------------------------


class StepSignature(NamedTuple):
    """What must be equal to the last update for the next one to take the fast path.

    Attributes:
        capacity: slots of the buffers.
        plain: whether tensors are stored without a codec.
        keys_shape, values_shape, keys_dtype, values_dtype: of the tensors that were written.
    """

    capacity: int
    plain: bool
    keys_shape: tuple[int, ...]
    values_shape: tuple[int, ...]
    keys_dtype: mx.Dtype
    values_dtype: mx.Dtype


def remember(data: CacheData, keys: mx.array, values: mx.array) -> None:
    """After an update on the full path: records its signature, if the next one may take the fast path."""
    last, data.last = data.last, None
    if last is None or data.buffers is None or not (data.encoded and last.steady):
        return
    if data.lengths is not None or data.following is not None:
        return
    if data.residual is not None and data.residual.last is None:
        return
    data.last = last
    data.groupable = data.evictor is not None and last.new == len(last.rows) == last.layout.room
    tensors = keys.shape, values.shape, keys.dtype, values.dtype
    data.alike = StepSignature(data.capacity, are_plain(data.codecs), *tensors)


def next_plan(data: CacheData, new: int) -> Plan | None:
    """The plan of the next step if, by all but its tensors, it can take the fast path; else None."""
    last = data.last
    if last is None or last.new != new or data.rows is not last.after:
        return None
    plan = last.next
    return plan if plan.steady else None


def step(data: CacheData, keys: mx.array, values: mx.array) -> Fetched | None:
    """`KVCache.update_and_fetch` on the fast path; None, and nothing changed, where this update cannot take it."""
    last = data.last
    if last is None or data.rows is not last.after:
        return None
    plan = last.next
    if data.groups is not None:
        return _step_by_group(data, data.groups, plan, keys, values)
    buffers, residual = data.padded, data.residual
    if residual is not None and residual.last is None:
        return None  # a copy has no plan to continue from
    capacity, plain, keys_shape, values_shape, keys_dtype, values_dtype = data.alike
    if buffers is None or plan.needed > capacity or not plan.steady:
        return None
    try:
        alike = keys.shape == keys_shape and values.shape == values_shape
        alike = alike and keys.dtype == keys_dtype and values.dtype == values_dtype
    except AttributeError:
        return None  # not arrays: the full path raises
    if not alike:
        return None
    if plan.bounded:
        if data.steps >= data.most_steps:
            return None  # time to check the room
        data.steps += 1
    if residual is not None:
        residual.step((keys, values), plan)
    written, read = plan.written, plan.read
    if not plain or written is None or read is None:
        buffers[0].write(keys, plan)
        buffers[1].write(values, plan)
        data.rows, data.ranges, data.last, data.transient = plan.after, plan.ranges, plan, None
        return fetched(data, buffers)
    data.rows, data.ranges, data.last, data.transient = plan.after, plan.ranges, plan, None
    of_keys, of_values = buffers[0].planes[0], buffers[1].planes[0]
    of_keys[written] = keys
    of_values[written] = values
    if plan.ranges[0] == (0, capacity):  # a new handle like a slice, but no operation
        return of_keys[...], of_values[...]
    return of_keys[read], of_values[read]


def _step_by_group(data: CacheData, groups: HeadGroups, plan: Plan, keys: mx.array, values: mx.array) -> Fetched | None:
    """As `step`. What it returns is not what attention reads: `attend` does that."""
    _, _, *alike = data.alike
    if plan.needed > groups.most or not (plan.steady and groups.attended):
        return None
    if not isinstance(values, type(keys)) or [keys.shape, values.shape, keys.dtype, values.dtype] != alike:
        return None
    data.rows, data.ranges, data.last, data.transient = plan.after, plan.ranges, plan, None
    groups.write(keys, values)
    return keys, values


# --- write capacity ---------------------------------------------------------------------------------------------------


def layout_for(data: CacheData, new: int) -> Layout:
    """The layout for a write of `new` tokens."""
    layout, following = data.layout, data.following
    if new > layout.room:
        return layout if layout.room == layout.max_write else layout.with_room(_room_for(new, layout))
    return layout if following is None or new > following.room else following


def begin(data: CacheData) -> None:
    """Begins a new session: room for max_write, counters at 0."""
    data.layout, data.following, data.last = planned(data.layout), None, None
    data.steps, data.most_steps, data.short_writes, data.longest, data.trimmed_at = 0, 0, 0, 0, ()


def note_write(data: CacheData, new: int) -> None:
    """Counts a write that was made in the layout of `layout_for`."""
    if data.layout.room == NO_LIMIT:
        return
    data.following = None  # in use since this write
    _note(data, new, writes=1)


def note_trim(data: CacheData, rows: tuple[Row, ...]) -> None:
    """Counts a trim like a write of all tokens since the last trim: a draft of that length could have been trimmed.

    Args:
        rows: before the trim.
    """
    if data.layout.room == NO_LIMIT:
        return
    before = data.trimmed_at if len(data.trimmed_at) == len(rows) else (0,) * len(rows)
    _note(data, max(row.offset - offset for row, offset in zip(rows, before, strict=True)), writes=0)
    data.last = None
    data.trimmed_at = tuple([row.offset for row in data.rows])


def _note(data: CacheData, tokens: int, writes: int) -> None:
    """Counts `tokens` that were written at once, or that could have been trimmed at once."""
    layout = data.layout
    if data.following is not None and tokens > data.following.room:
        data.following = None
    if tokens * MUCH_LESS > layout.room and tokens > 1:
        data.steps, data.short_writes, data.longest, data.most_steps = 0, 0, 0, NO_LIMIT
        return
    if data.short_writes:  # the fast steps since the last check were short, too
        data.short_writes += data.steps
    data.short_writes += writes
    data.longest = max(data.longest, tokens)
    if data.short_writes >= PERIOD:
        narrower = layout.with_room(min(layout.room, _room_for(data.longest, layout)))
        data.short_writes, data.longest = 0, 0
        if narrower is not layout or data.capacity > data.round_up(enough_slots(layout, data.rows)):
            data.following, data.last = narrower, None
    data.steps, data.most_steps = 0, PERIOD - 1 - data.short_writes


def _room_for(tokens: int, layout: Layout) -> int:
    """Room for writes of at least `tokens`, a power of two so that drafts of varying lengths change nothing."""
    wanted = max(1, tokens, layout.max_rollback)
    return min(1 << (wanted - 1).bit_length(), layout.max_write)
