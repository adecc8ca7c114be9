"""Updates: one stores the new tokens of every row and returns what attention reads. Here is what that takes, in order.

The full path checks the tensors, compacts a budget where it is due, plans, makes room (allocates, grows, rearranges or
quantises buffers), writes, and reads.

The fast path serves decode steps that are like the last one: same shapes and dtypes, same rows, one slot further on.
The plan of such a step, which all layers share, is made from the last plan, and of the tensors only shapes and dtypes
are compared. Whatever differs (a trim, other rows, a compaction, growth, padding) takes the full path; where both are
possible, their results are equal.

Room is the longest write that a layout has slots for: a ring has window + room - 1 slots, a budget has budget +
margin + room. A prompt needs much room, decoding little. It grows at once for a longer write, and shrinks after
PERIOD writes in a row that need far less. Trims count, too: a draft model's loop keeps room for all tokens that it
may take back. The mask of a write is made before the write, by one layer for all; so the room that the write finds is
decided before that, from integers that are the same in all layers.

B rows, H KV heads, S new tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers, SlotBuffer, signature_of
from mlx_kv.cache.checks import check_tokens, check_unchanged, continues
from mlx_kv.cache.codecs import PLAIN, Codecs, Packing, are_plain
from mlx_kv.cache.growth import round_up
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
from mlx_kv.cache.state import Contents

# A write of up to this many tokens (decode, the verify step of speculative decoding) reads packed planes. A longer one
# is prefill: there, packed attention is unfused and holds all scores at once, so it gets dequantised arrays instead.
MOST_PACKED_TOKENS = 8
# Changing the room copies what is live once, about as much as attention reads in two or three steps of decoding. After
# so many writes, this is little even where writes change all the time.
PERIOD = 32
MUCH_LESS = 4  # times: less than that is not worth a copy, unless it makes the mask unnecessary


# --- the full path ----------------------------------------------------------------------------------------------------


def store(held: Contents, keys: mx.array, values: mx.array) -> Fetched:
    """As `KVCache.update_and_fetch`."""
    check(held, keys, values)
    tensors, new, rows = (keys, values), keys.shape[2], held.rows
    if len(rows) != keys.shape[0]:
        if rows != (Row(),) or held.lengths is not None:
            raise ValueError(f"keys came with rows {keys.shape[0]}, but this batch has rows {len(rows)}")
        rows = (Row(),) * keys.shape[0]
    if held.evictor is not None:
        rows = held.rows = held.evictor.compact_if_due(rows)
    if len(held.announced) != len(rows):  # announced for the first row of a new batch: holds for all
        held.announced *= len(rows)
    plan = plan_for(held, rows, new)
    held.transient = None
    buffers = make_room(held, plan, tensors, rows)
    if plan.transient:  # read before the write overwrites what its first queries see
        held.transient = read_transient(plan, buffers, tensors)
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer.write(tensor, plan)
    if held.residual is not None:
        held.residual.write(tensors, plan)
    held.layout, held.last, held.counts = plan.layout, plan, plan.counts if plan.padded else None
    held.rows, held.ranges = plan.after, () if plan.transient else plan.ranges
    if held.lengths is not None:
        held.lengths = tuple([max(0, length - new) for length in held.lengths])
    note_write(held, new)
    held.packed = not plan.transient and hands_out_packed(held, buffers, new)
    return fetched(held, buffers)


def plan_for(held: Contents, rows: tuple[Row, ...], new: int) -> Plan:
    """The plan of the next `new` tokens, for the mask as for the update: in the layout that this write finds.

    Args:
        rows: where they stand in the layout of now, once what is due has been compacted.
    """
    layout, lengths = layout_for(held, new), held.lengths
    standing = rows if layout is held.layout else reshaped(held.layout, layout, rows)
    # How many of the next tokens are tokens of their row; None is all of all rows.
    counted = None if lengths is None or min(lengths) >= new else tuple([min(length, new) for length in lengths])
    return plan_of(layout, standing, new, counted)


def check(held: Contents, keys: mx.array, values: mx.array) -> None:
    """Raises ValueError for tensors that this cache cannot take."""
    if held.buffers is not None and continues(keys, values, held.buffers):
        return  # every token of every layer comes by here: the usual case first
    check_tokens(keys, values)
    tensors = {"keys": keys, "values": values}
    for (name, tensor), codec in zip(tensors.items(), held.codecs, strict=True):
        codec.check(name, tensor)
    if held.buffers is None:
        return
    if held.empty() and [signature_of(x) for x in tensors.values()] != [buffer.signature for buffer in held.buffers]:
        held.buffers = None  # a new session of another shape: nothing is lost
        return
    for (name, tensor), buffer in zip(tensors.items(), held.buffers, strict=True):
        check_unchanged(name, tensor, buffer)


def make_room(held: Contents, plan: Plan, tensors: tuple[mx.array, mx.array], rows: tuple[Row, ...]) -> Buffers:
    """The buffers, with slots for the plan: allocated, given another shape or quantised first where that is due.

    Args:
        rows: where they stand in the layout of before, which may be another than the plan's.
    """
    used = min(max(plan.filled, 0), plan.layout.most_slots)
    needed = plan.needed + plan.padded  # padding goes to a slot of its own
    due = max([row.offset for row in plan.rows]) >= held.quantized_start
    if held.buffers is None:
        codecs = held.codecs if due else PLAIN
        capacity = _next_capacity(held, plan.layout, needed)
        keys, values = (
            SlotBuffer.allocate(codec, tensor, capacity) for codec, tensor in zip(codecs, tensors, strict=True)
        )
        held.buffers, held.encoded = (keys, values), due
    elif needed > held.capacity or plan.layout is not held.layout or plan.layout is held.following:
        held.growths += needed > held.capacity
        _reshape(held.buffers, held.layout, plan.layout, rows, _next_capacity(held, plan.layout, needed), used)
    if due and not held.encoded:
        held.use(held.codecs)
    return held.buffers


def _reshape(buffers: Buffers, before: Layout, layout: Layout, rows: tuple[Row, ...], capacity: int, used: int) -> None:
    """Gives buffers another capacity, and tokens the slots that they have in another room."""
    moves = None if stay(before, layout, rows) else [moves_between(before, layout, row) for row in rows]
    for buffer in buffers:
        if moves is not None:
            buffer.rearrange(moves, capacity)
        elif capacity != buffer.capacity:
            buffer.reserve(capacity, used=used)


def _next_capacity(held: Contents, layout: Layout, needed: int) -> int:
    enough = enough_slots(layout, held.rows)
    if needed <= held.capacity:  # what is beyond the room that there is to be is given back
        return min(held.capacity, round_up(max(needed, enough)))
    reserve = max(held.reserved, *held.announced)
    # Where the length was announced, there is no slack: also on top of what was held before, or loaded.
    wanted = round_up(reserve if needed <= reserve else max(needed, held.growth.capacity(needed, held.capacity)))
    return min(wanted, round_up(max(needed, enough)))


def read_transient(plan: Plan, buffers: Buffers, tensors: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
    """The live tokens in order, then the new ones as they will be stored. Shorter rows begin with filler."""
    live = plan.live()
    slots = [
        [0 if position < 0 else plan.layout.slot(row, position) for position in seen]
        for row, seen in zip(plan.distinct, live, strict=True)
    ]

    def read(buffer: SlotBuffer, new: mx.array) -> mx.array:
        stored = buffer.as_stored(new)
        return mx.concatenate([buffer.decode(buffer.take(slots)), stored], axis=2) if live[0] else stored

    return read(buffers[0], tensors[0]), read(buffers[1], tensors[1])


def hands_out_packed(held: Contents, buffers: Buffers, new: int) -> bool:
    """Whether attention reads a write of `new` tokens, and all before it, as packed planes."""
    if not (held.encoded and held.packed_decode) or new > MOST_PACKED_TOKENS:
        return False
    if held.packing is None:  # our own attention can read them, where it is called
        return held.packings is not None and held.seam is not None
    # mlx-lm's packed attention shapes its result by the keys' head dim: with another one of values it cannot work.
    return buffers[0].head_dim == buffers[1].head_dim


def fetched(held: Contents, buffers: Buffers) -> Fetched:
    """What attention reads after the last write."""
    if held.transient is not None:
        return held.transient
    keys, values = buffers
    if held.packed:
        return keys.read(held.ranges), values.read(held.ranges)
    return keys.decode(keys.read(held.ranges)), values.decode(values.read(held.ranges))


def packing(held: Contents) -> Packing:
    """How planes are packed, where mlx-lm's attention can read them: those of the last fetch, or of the first to come.

    Raises:
        AttributeError: it cannot, or the last fetch was of plain arrays.
    """
    first = held.buffers is None and held.packed_decode and not held.quantized_start
    if held.packing is None or not (held.packed or first):
        raise AttributeError("bits and group_size are visible before a first fetch, and after one of packed planes")
    return held.packing


def quantize(held: Contents, codecs: Codecs) -> None:
    """Stores plain contents by these codecs from now on, whatever the length.

    Raises:
        ValueError: a head dim that they cannot store; nothing has changed then.
    """
    for name, codec, buffer in zip(("keys", "values"), codecs, held.buffers or (), strict=False):
        codec.check(name, buffer.planes[0])
    held.use(codecs)


def first_plane(held: Contents, which: int) -> mx.array | None:
    """A handle of the first plane of the keys (0) or the values (1)."""
    return None if held.buffers is None else held.buffers[which].handles()[0]


def replace_first_plane(held: Contents, which: int, value: mx.array) -> None:
    """Puts an array of the same shape in its place."""
    if held.buffers is None or value.shape != held.buffers[which].planes[0].shape:
        raise ValueError(f"a buffer of shape {value.shape} cannot replace the one of this cache: keep its shape")
    buffer = held.buffers[which]
    buffer.planes = (value[:], *buffer.planes[1:])


# --- the fast path ----------------------------------------------------------------------------------------------------


class Alike(NamedTuple):
    """What must not have changed since the last update for the next to take the fast path.

    Attributes:
        capacity: slots of the buffers.
        plain: whether tensors are their planes.
        keys_shape, values_shape, keys_dtype, values_dtype: of the tensors that were written.
    """

    capacity: int
    plain: bool
    keys_shape: tuple[int, ...]
    values_shape: tuple[int, ...]
    keys_dtype: mx.Dtype
    values_dtype: mx.Dtype


def remember(held: Contents, keys: mx.array, values: mx.array) -> None:
    """After an update that took the full path: notes what the next is compared with, if it may take the fast one."""
    last, held.last = held.last, None
    if last is None or held.buffers is None or not (held.encoded and last.steady):
        return
    if held.lengths is not None or held.following is not None:
        return
    if held.residual is not None and held.residual.last is None:
        return
    held.last = last
    tensors = keys.shape, values.shape, keys.dtype, values.dtype
    held.alike = Alike(held.capacity, are_plain(held.codecs), *tensors)


def next_plan(held: Contents, new: int) -> Plan | None:
    """The plan of the next step, if nothing but its tensors can keep it from the fast path; else None."""
    last = held.last
    if last is None or last.new != new or held.rows is not last.after:
        return None
    plan = last.next
    return plan if plan.steady else None


def step(held: Contents, keys: mx.array, values: mx.array) -> Fetched | None:
    """`KVCache.update_and_fetch` on the fast path; None where this update cannot take it, and nothing has changed."""
    last = held.last
    if last is None or held.rows is not last.after:
        return None
    plan = last.next
    buffers, residual = held.buffers, held.residual
    if residual is not None and residual.last is None:
        return None  # a copy has no plan to continue from
    capacity, plain, keys_shape, values_shape, keys_dtype, values_dtype = held.alike
    if buffers is None or plan.needed > capacity or not plan.steady:
        return None
    try:
        alike = keys.shape == keys_shape and values.shape == values_shape
        alike = alike and keys.dtype == keys_dtype and values.dtype == values_dtype
    except AttributeError:
        return None  # no arrays: the full path raises
    if not alike:
        return None
    if plan.bounded:
        if held.steps >= held.most_steps:
            return None  # the room is to be checked again
        held.steps += 1
    if residual is not None:
        residual.step((keys, values), plan)
    written, read = plan.written, plan.read
    if not plain or written is None or read is None:
        buffers[0].write(keys, plan)
        buffers[1].write(values, plan)
        held.rows, held.ranges, held.last, held.transient = plan.after, plan.ranges, plan, None
        return fetched(held, buffers)
    held.rows, held.ranges, held.last, held.transient = plan.after, plan.ranges, plan, None
    of_keys, of_values = buffers[0].planes[0], buffers[1].planes[0]
    of_keys[written] = keys
    of_values[written] = values
    if plan.ranges[0] == (0, capacity):  # handles of their own, as a slice would be, but no operation
        return of_keys[...], of_values[...]
    return of_keys[read], of_values[read]


# --- room for writes --------------------------------------------------------------------------------------------------


def layout_for(held: Contents, new: int) -> Layout:
    """The layout that a write of `new` tokens finds."""
    layout, following = held.layout, held.following
    if new > layout.room:
        return layout if layout.room == layout.max_write else layout.with_room(_room_for(new, layout))
    return layout if following is None or new > following.room else following


def begin(held: Contents) -> None:
    """A new session: all the room that is planned for, and counters at 0."""
    held.layout, held.following, held.last = planned(held.layout), None, None
    held.steps, held.most_steps, held.short_writes, held.longest, held.trimmed_at = 0, 0, 0, 0, ()


def note_write(held: Contents, new: int) -> None:
    """Counts a write that was made, in the layout that `layout_for` gave it."""
    if held.layout.room == NO_LIMIT:
        return
    held.following = None  # this write has found it
    _note(held, new, writes=1)


def note_trim(held: Contents, rows: tuple[Row, ...]) -> None:
    """Counts a trim, as one of all tokens since the last trim: so many might have been taken back.

    Args:
        rows: as they stood before it.
    """
    if held.layout.room == NO_LIMIT:
        return
    before = held.trimmed_at if len(held.trimmed_at) == len(rows) else (0,) * len(rows)
    _note(held, max(row.offset - offset for row, offset in zip(rows, before, strict=True)), writes=0)
    held.last = None
    held.trimmed_at = tuple([row.offset for row in held.rows])


def _note(held: Contents, tokens: int, writes: int) -> None:
    """So many tokens were written at once, or might have been taken back."""
    layout = held.layout
    if held.following is not None and tokens > held.following.room:
        held.following = None
    if tokens * MUCH_LESS > layout.room and tokens > 1:
        held.steps, held.short_writes, held.longest, held.most_steps = 0, 0, 0, NO_LIMIT
        return
    if held.short_writes:  # the steps since the last check were short, too
        held.short_writes += held.steps
    held.short_writes += writes
    held.longest = max(held.longest, tokens)
    if held.short_writes >= PERIOD:
        narrower = layout.with_room(min(layout.room, _room_for(held.longest, layout)))
        held.short_writes, held.longest = 0, 0
        if narrower is not layout or held.capacity > round_up(enough_slots(layout, held.rows)):
            held.following, held.last = narrower, None
    held.steps, held.most_steps = 0, PERIOD - 1 - held.short_writes


def _room_for(tokens: int, layout: Layout) -> int:
    """Room for writes of at least so many: powers of two, so that drafts of changing lengths change nothing."""
    wanted = max(1, tokens, layout.max_rollback)
    return min(1 << (wanted - 1).bit_length(), layout.max_write)
