"""An update, whole: tensors that fit, room for them, the write, and what attention reads.

Decides the order (check, compact if due, plan, make room, write, read), what is refused, when buffers are allocated,
grown, given another shape or quantised, and what is handed out packed. The steps of decoding, which are all alike, take
the shorter way of `steady`. B rows, H KV heads, S new tokens.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers, SlotBuffer, signature_of
from mlx_kv.cache.checks import check_tokens, check_unchanged, continues
from mlx_kv.cache.codecs import PLAIN, Codecs, Packing
from mlx_kv.cache.contents import Contents
from mlx_kv.cache.growth import round_up
from mlx_kv.cache.layout import Layout, Plan, Row, enough_slots, moves_between, plan_of, reshaped, stay
from mlx_kv.cache.phases import layout_for, note_write
from mlx_kv.cache.protocol import Fetched

# A write of up to this many tokens (decode, the verify step of speculative decoding) reads packed planes. A longer one
# is prefill: there, packed attention is unfused and holds all scores at once, so it gets dequantised arrays instead.
MOST_PACKED_TOKENS = 8


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
    if len(held.announced) != len(rows):  # what was said of the first row of a new batch is said of all
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
    # Who says how much will come gets that and no slack: also on top of what was held before, or loaded.
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
    if held.packing is None:  # ours can, if it is asked
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
