"""Buffers of slots, for keys and values.

A buffer holds the planes of one tensor (the keys, or the values, of one layer), each (B, H, C, width) with C slots. It
reserves, writes, reads, moves and re-encodes slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from mlx_kv.cache.codecs import Codec, Planes, alike, in_rows, of_head, takes_slices
from mlx_kv.cache.layout import Layout, Ranges, Row, moves_between, stay
from mlx_kv.cache.plan import Plan

MOVED_BYTES = 2**20  # read at a time before they are written to their new slots
COPIED_BYTES = 2**20  # up to this, a copy costs less than synchronising
FEW_SLOTS = 1_024  # read whole rather than copied, however few of them are used

Moves = list[tuple[int, int, int]]  # of a row: slot, new slot, slots of each contiguous piece
# Rows, heads, head dim and dtype: what must agree for a tensor to fit into a buffer.
Signature = tuple[int, int, int, mx.Dtype]


def signature_of(x: mx.array) -> Signature:
    """The signature of x (B, H, S, D): all that must agree with its buffer."""
    return x.shape[0], x.shape[1], x.shape[3], x.dtype


@lru_cache(maxsize=8)
def _slots(plan: Plan, first: int, last: int, padding: int) -> mx.array:
    """The slots of new tokens [first, last) of each row, (B, 1, n, 1), cached for all layers with the same plan."""
    slots = [
        [
            padding if plan.padded and plan.is_padding(i, token) else plan.layout.slot(row, row.offset + token)
            for token in range(first, last)
        ]
        for i, row in enumerate(plan.rows)
    ]
    return mx.array([[[[slot] for slot in row]] for row in slots])  # no graph, which only its thread could evaluate


def index_of(numbers: Sequence[int]) -> slice | mx.array:
    """An index for some numbers of an axis, ascending: a slice where they are evenly spaced, which copies nothing."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    evenly = step > 0 and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step))
    return slice(numbers[0], numbers[-1] + 1, step) if evenly else mx.array(list(numbers))


class SlotBuffer:
    """The planes of one tensor.

    Args:
        codec: how the tensor became planes.
        planes: one or more arrays (B, H, C, width).
        head_dim, dtype: of the tensor.
    """

    def __init__(self, codec: Codec, planes: Planes, head_dim: int, dtype: mx.Dtype) -> None:
        self.codec, self.planes = codec, tuple(plane[:] for plane in planes)
        self.head_dim, self.dtype = head_dim, dtype

    @classmethod
    def allocate(cls, codec: Codec, like: mx.array, capacity: int) -> SlotBuffer:
        """An empty buffer of `capacity` slots for tensors like `like` (B, H, S, D).

        Raises:
            ValueError: the codec's planes don't match its own description, or decode to another shape or dtype.
        """
        check_codec(codec, like[:, :, :1])
        rows, heads, head_dim, dtype = signature_of(like)
        planes = codec.planes(head_dim, dtype)
        empty = tuple(mx.zeros((rows, heads, capacity, width), of) for width, of in planes)
        return cls(codec, empty, head_dim, dtype)

    def handles(self) -> Planes:
        """New handles to the planes, for callers that keep them; nothing is copied.

        A write in place changes the Python object of an mx.array, and so everything that holds this object.
        """
        return tuple(plane[:] for plane in self.planes)

    def copied(self) -> SlotBuffer:
        """A copy that shares the memory: MLX copies it when one of the two is written to."""
        return self._with(self.planes)

    def _with(self, planes: Planes) -> SlotBuffer:
        return SlotBuffer(self.codec, planes, self.head_dim, self.dtype)

    @property
    def signature(self) -> Signature:
        """The signature of tensors that fit."""
        rows, heads = self.planes[0].shape[:2]
        return rows, heads, self.head_dim, self.dtype

    @property
    def capacity(self) -> int:
        return self.planes[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, from shapes alone: nothing is evaluated."""
        return sum(plane.nbytes for plane in self.planes)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of one row, all heads and planes."""
        return sum(math.prod(plane.shape[1::2]) * plane.itemsize for plane in self.planes)

    def rearrange(self, moves: Sequence[Moves], capacity: int) -> None:
        """Moves slots into planes of `capacity` slots: one allocation and one copy a plane.

        Evaluates each large plane, so that at most one of them is held twice.

        Args:
            moves: of each row (slot, new slot, slots) of each contiguous piece; one list serves all rows.
        """
        sources = None if all(own == moves[0] for own in moves) else _index(_sources(moves, capacity))
        for index in range(len(self.planes)):
            old = self.planes[index]
            new = _moved(old, moves[0], capacity) if sources is None else _taken(old, sources)
            if new.nbytes > COPIED_BYTES:
                mx.eval(new)
            self.planes = (*self.planes[:index], new, *self.planes[index + 1 :])

    def write(self, x: mx.array, plan: Plan) -> None:
        """Writes the new tokens x (B, H, S, D) of a plan to their slots, in place wherever MLX owns the buffer.

        One slice for each contiguous piece where all rows stand alike (two where a ring wraps), one scatter otherwise.
        """
        encoded = self.codec.encode(x)
        if plan.written is not None:
            for plane, tokens in zip(self.planes, encoded, strict=True):
                plane[plan.written] = tokens
            return
        if plan.uniform:
            for slot, token, count in plan.layout.pieces(plan.rows[0], plan.new):
                for plane, tokens in zip(self.planes, encoded, strict=True):
                    part = tokens if count == plan.new else tokens[:, :, token : token + count]
                    plane[:, :, slot : slot + count] = part
            return
        # Tokens of one scatter must go to distinct slots: a write longer than the ring is split.
        turn = min(plan.new, plan.layout.max_slots - plan.layout.sinks)
        for first in range(0, plan.new, turn):
            last = min(first + turn, plan.new)
            # Padding goes to the last slot, which is never read.
            index = _slots(plan, first, last, self.capacity - 1)
            parts = encoded if turn == plan.new else [tokens[:, :, first:last] for tokens in encoded]
            self.planes = tuple(
                mx.put_along_axis(plane, mx.broadcast_to(index, part.shape), part, axis=2)
                for plane, part in zip(self.planes, parts, strict=True)
            )

    def read(self, ranges: Ranges) -> Planes:
        """These slots of every plane: a view of the buffer for one range, a copy for several."""
        if len(ranges) == 1:
            first, last = ranges[0]
            return tuple(plane[:, :, first:last] for plane in self.planes)
        return tuple(
            mx.concatenate([plane[:, :, first:last] for first, last in ranges], axis=2) for plane in self.planes
        )

    def read_packed(self, ranges: Ranges) -> Planes:
        """As `read`, for attention that reads packed planes."""
        return in_rows(self.read(ranges))

    def take(self, slots: Sequence[Sequence[int]]) -> Planes:
        """A copy of slots[i] of row i, in that order; one list applies to all rows."""
        index = _index(slots)
        return tuple(_taken(plane, index) for plane in self.planes)

    def selected(self, rows: Sequence[int], used: int, capacity: int) -> SlotBuffer:
        """The first `used` slots of some rows, copied into `capacity` slots; nothing of this buffer is kept alive."""
        planes = [mx.contiguous(plane[mx.array(list(rows))][:, :, :used]) for plane in self.planes]
        if used < capacity:
            planes = [mx.pad(plane, [(0, 0), (0, 0), (0, capacity - used), (0, 0)]) for plane in planes]
        return self._with(tuple(planes))

    @classmethod
    def stacked(cls, parts: Sequence[tuple[SlotBuffer | None, int, int]], capacity: int) -> SlotBuffer:
        """The rows of several buffers, one after the other, in new planes of `capacity` slots.

        Args:
            parts: buffer, or None for empty rows; number of rows; slots to copy. At least one has a buffer; all have
                the same codec.
        """
        like = next(buffer for buffer, _, _ in parts if buffer is not None)
        rows = sum(count for _, count, _ in parts)
        planes = []
        for which, plane in enumerate(like.planes):
            new = mx.zeros((rows, plane.shape[1], capacity, plane.shape[3]), plane.dtype)
            first = 0
            for buffer, count, used in parts:
                if buffer is not None:
                    new[first : first + count, :, :used] = buffer.planes[which][:, :, :used]
                first += count
            planes.append(new)
        return like._with(tuple(planes))

    @classmethod
    def in_order(cls, parts: Sequence[tuple[SlotBuffer, int, int]], capacity: int) -> SlotBuffer:
        """Copies of slots [first, last) of several buffers of the same rows and codec, one part after the other.

        Args:
            capacity: slots of the new buffer.
        """
        like = parts[0][0]
        planes = []
        for which, plane in enumerate(like.planes):
            # Parts without slots are left out: a slice of a plane that is not computed yet would compute it.
            copied = [buffer.planes[which][:, :, first:last] for buffer, first, last in parts if last > first]
            missing = capacity - sum(part.shape[2] for part in copied)
            empty = mx.zeros((*plane.shape[:2], missing, plane.shape[3]), plane.dtype)
            planes.append(mx.concatenate([*copied, empty], axis=2))
        return like._with(tuple(planes))

    def decode(self, planes: Planes, head: int | None = None) -> mx.array:
        """The tensor (B, H, n, D) decoded from some slots of the planes, or (B, 1, n, D) from those of one head."""
        codec = self.codec if head is None else of_head(self.codec, head)
        return codec.decode(planes, self.dtype)

    def recode(self, codec: Codec) -> None:
        """Re-encodes every slot with another codec; the capacity stays.

        Raises:
            ValueError: as `allocate`.
        """
        if not alike(codec, self.codec):
            decoded = self.decode(self.planes)
            check_codec(codec, decoded[:, :, :1])
            self.planes = codec.encode(decoded)
        self.codec = codec


Buffers = tuple[SlotBuffer, SlotBuffer]  # of keys, of values


def whole_planes(buffers: Buffers, ranges: Ranges) -> tuple[Planes, Planes] | None:
    """The planes of all slots, of keys and of values, where a GPU would have to copy the part that attention reads.

    They also have fewer shapes than their parts: a product of another shape may need a kernel of its own. None where
    slices can be read, or where most slots are not used.
    """
    (first, last), *others = ranges
    if takes_slices() or first or others or buffers[0].capacity > max(FEW_SLOTS, 2 * last):
        return None
    keys, values = (buffer.handles() for buffer in buffers)
    return keys, values


def read_transient(plan: Plan, buffers: Buffers, tensors: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
    """Keys and values in the order of positions: live tokens, then the new ones as stored. Short rows are padded."""
    live = plan.live()
    slots = [
        [0 if position < 0 else plan.layout.slot(row, position) for position in seen]
        for row, seen in zip(plan.distinct, live, strict=True)
    ]
    parts = [buffer.decode(buffer.codec.encode(new)) for buffer, new in zip(buffers, tensors, strict=True)]
    if live[0]:
        stored = [buffer.decode(buffer.take(slots)) for buffer in buffers]
        parts = [mx.concatenate([old, new], axis=2) for old, new in zip(stored, parts, strict=True)]
    return parts[0], parts[1]


def change_layout(
    buffers: Buffers, before: Layout, after: Layout, rows: tuple[Row, ...], capacity: int, used: int
) -> None:
    """Changes the capacity of buffers, and moves tokens to their slots in a layout of another room.

    Args:
        rows: in the layout before.
        used: first slots that contain all tokens.
    """
    moves = None if stay(before, after, rows) else [moves_between(before, after, row) for row in rows]
    for buffer in buffers:
        if moves is not None:
            buffer.rearrange(moves, capacity)
        elif capacity != buffer.capacity:
            buffer.rearrange([[(0, 0, used)]], capacity)


def replace_first_plane(buffers: Buffers | None, which: int, value: mx.array) -> None:
    """Replaces the first plane of keys (0) or values (1) by an array of the same shape."""
    if buffers is None or value.shape != buffers[which].planes[0].shape:
        raise ValueError(f"a buffer of shape {value.shape} cannot replace the one of this cache: keep its shape")
    buffers[which].planes = (value[:], *buffers[which].planes[1:])


def move_slots(buffers: Sequence[SlotBuffer], source: mx.array, target: mx.array) -> None:
    """Copies slots source[b, h, i] of every buffer to slots target[b, h, i], in place.

    Moves run in blocks: no source may be the target of an earlier move, except of a move onto itself. Moves with equal
    targets have equal sources.

    Args:
        source, target: (B, 1 or H, m) of int32.
    """
    rows, heads, capacity = buffers[0].planes[0].shape[:3]
    first = mx.arange(rows * heads, dtype=mx.int32).reshape(rows, heads, 1) * capacity
    index = source + first
    dtypes = [[plane.dtype for plane in buffer.planes] for buffer in buffers]
    # The kernels' time depends on the number of elements: wider words move a slot faster.
    words = [as_words(plane) for buffer in buffers for plane in buffer.planes]
    for buffer in buffers:
        buffer.planes = ()  # a second handle would make a write in place copy the buffer
    some = max(1, MOVED_BYTES // (rows * heads * sum(plane.shape[3] * plane.itemsize for plane in words)))
    for i in range(0, index.shape[2], some):
        which, to = index[:, :, i : i + some].reshape(-1), target[:, :, i : i + some, None]
        columns = [plane.reshape(-1, plane.shape[3])[which].reshape(rows, heads, -1, plane.shape[3]) for plane in words]
        if sum(plane.nbytes for plane in words) > COPIED_BYTES:
            mx.eval(columns)  # a pending read of the buffer would make the write below copy it whole
        for number, new in enumerate(columns):
            words[number] = mx.put_along_axis(words[number], mx.broadcast_to(to, new.shape), new, axis=2)
        mx.async_eval(words)  # type: ignore[no-untyped-call]  # before the next block allocates
        del columns, new
    for buffer, of in zip(buffers, dtypes, strict=True):
        buffer.planes = tuple([words.pop(0).view(dtype) for dtype in of])


def check_codec(codec: Codec, x: mx.array) -> None:
    """Raises ValueError unless a codec's planes for x (B, H, S, D) match its description, and decode to x's shape.

    Compares shapes and dtypes only; nothing is evaluated.
    """
    described = [(*x.shape[:3], width, dtype) for width, dtype in codec.planes(x.shape[3], x.dtype)]
    encoded = codec.encode(x)
    signature = [(*plane.shape, plane.dtype) for plane in encoded]
    if signature != described:
        raise ValueError(f"the codec {codec.name} describes planes {described}, but makes {signature}: they must agree")
    again = codec.decode(encoded, x.dtype)
    if (again.shape, again.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"the codec {codec.name} decodes {again.shape} of {again.dtype}, expected {x.shape} of {x.dtype}"
        )


def _moved(plane: mx.array, moves: Moves, capacity: int) -> mx.array:
    """Pieces of a plane in another one of `capacity` slots."""
    rows, heads, _, width = plane.shape
    if len(moves) <= 1:
        new = mx.zeros((rows, heads, capacity, width), plane.dtype)
        for source, target, count in moves:
            new[:, :, target : target + count] = plane[:, :, source : source + count]
        return new
    # The pieces of a ring: concatenation writes each slot once, where zeros first would write it twice.
    parts, end = [], 0
    for source, target, count in [*sorted(moves, key=lambda move: move[1]), (0, capacity, 0)]:
        if target > end:
            parts.append(mx.zeros((rows, heads, target - end, width), plane.dtype))
        if count:
            parts.append(plane[:, :, source : source + count])
        end = target + count
    return mx.concatenate(parts, axis=2)


def _sources(moves: Sequence[Moves], capacity: int) -> list[list[int]]:
    """The source of each of `capacity` slots of a row; any slot for dead ones."""
    slots = [[0] * capacity for _ in moves]
    for line, row_moves in zip(slots, moves, strict=True):
        for source, target, count in row_moves:
            line[target : target + count] = range(source, source + count)
    return slots


def _index(slots: Sequence[Sequence[int]]) -> mx.array:
    """Slots of each row, or the same of all, as (B or 1, 1, n, 1)."""
    return mx.array([list(row) for row in slots])[:, None, :, None]


def _taken(plane: mx.array, index: mx.array) -> mx.array:
    return mx.take_along_axis(plane, mx.broadcast_to(index, (*plane.shape[:2], *index.shape[2:])), axis=2)


def as_words(plane: mx.array) -> mx.array:
    """A view of the bytes as the widest unsigned integers that divide a slot."""
    size = plane.shape[3] * plane.itemsize
    for words in (mx.uint64, mx.uint32, mx.uint16):
        if size % words.size == 0:
            return plane.view(words)
    return plane


def on_cpu() -> bool:
    """Whether MLX computes on a CPU by default."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)
