"""The data of one cache: all its fields, and its state as a pytree.

`CacheData` has the settings, buffers and counters; `update` and `rows` change them. `CacheState` is what another cache
needs to continue from here, without announced room, announced padding and the growth rule, which a cache made from a
state gets anew. Older states are read, too: tuples of twelve (without a residual) and of eleven (version 0.1.0).

B rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers, SlotBuffer
from mlx_kv.cache.codecs import (
    PLAIN,
    Affine,
    Codec,
    Codecs,
    Packing,
    Plain,
    Planes,
    find_codec,
    find_codecs,
    packing_of,
    packings_of,
)
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.growth import DEFAULT, SLOT_MULTIPLE, TAIL_MULTIPLE, Growth, round_up
from mlx_kv.cache.head_groups import HeadGroups
from mlx_kv.cache.layout import NO_LIMIT, Append, Budget, Layout, Plan, Ranges, Row, make_layout
from mlx_kv.cache.residual import Residual

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32, "float64": mx.float64}
Tensors = list[tuple[int, str]]  # head dim and name of the dtype, of keys and of values


# --- data -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, weakref_slot=True, eq=False)
class CacheData:
    """All fields of a cache.

    Attributes:
        codecs: how keys and how values are stored from `quantized_start` on.
        layout: which slot holds which position.
        growth: rule for the next capacity.
        reserved: tokens allocated at the first update, in any row.
        quantized_start: offset from which on the codecs are used.
        packed_decode: whether attention may get packed planes.
        announced: tokens that each row will hold, from `reserve`.
        lengths: announced tokens of each row, followed by padding; None without padding.
        last, alike: the plan of the last update and its signature (`update.StepSignature`) where the next update may
            take the fast path; else None. Code that changes the data but not `rows` sets `last` to None.
        following: the layout with less room that the next short write will use; None where nothing changes.
        steps, most_steps: consecutive updates on the fast path, and how many are allowed before room is checked again.
        short_writes, longest, trimmed_at: input of the decision about room: the number of consecutive writes that need
            far less than there is, the longest of them, and the offset of each row after the last trim.
        evictor: compacts the rows of a budget; None without one.
        packing: how mlx-lm's attention reads the planes; None where it cannot.
        packings: how our own attention reads them, of keys and of values, where mlx-lm's cannot.
        residual: the newest tokens in full precision; None without a residual.
        seam: the attention patch that calls this cache, if any: then attention can be computed here.
        rows: the position of each row in its slots.
        padded, groups: keys and values in one buffer each, or by groups of heads; the other is None. See `buffers`.
        groupable: whether heads may be grouped after this update.
        encoded: whether the buffers are stored by the codecs; before `quantized_start` they are plain.
        ranges: the slots that the last fetch returned.
        transient: keys and values that attention read for a write longer than max_write, until the next step.
        packed: whether the last fetch returned packed planes.
        counts: tokens of each row in the last update, where some of it was padding; else None.
        growths: reallocations since the first allocation.
        chain: segments (`cache.segments`) that hold the first tokens of a single row, too, and how many of the first
            tokens of each; the row can read these in place of its own slots.
    """

    codecs: Codecs = PLAIN
    layout: Layout = Append()
    evictor: Evictor | None = None
    growth: Growth = DEFAULT
    reserved: int = 0
    quantized_start: int = 0
    packed_decode: bool = True
    announced: tuple[int, ...] = (0,)
    lengths: tuple[int, ...] | None = None
    rows: tuple[Row, ...] = (Row(),)
    padded: Buffers | None = None
    groups: HeadGroups | None = None
    groupable: bool = False
    encoded: bool = False
    ranges: Ranges = ()
    packed: bool = False
    transient: tuple[mx.array, mx.array] | None = None
    counts: tuple[int, ...] | None = None
    growths: int = 0
    last: Plan | None = None
    alike: Any = None
    following: Layout | None = None
    steps: int = 0
    most_steps: int = 0
    short_writes: int = 0
    longest: int = 0
    trimmed_at: tuple[int, ...] = ()
    seam: object = None
    residual: Residual | None = None
    chain: tuple[tuple[Any, int], ...] = ()
    packing: Packing | None = field(init=False)
    packings: tuple[Packing, Packing] | None = field(init=False)

    def __post_init__(self) -> None:
        self._find_packings()
        if self.evictor is None and isinstance(self.layout, Budget):  # without one, nothing would be evicted
            self.evictor = Evictor(self.layout)
        if self.evictor is not None:
            self.layout = self.evictor.layout
            self.evictor.belong_to(self)
        if self.residual is not None:
            keep_recent = None if self.evictor is None else self.evictor.layout.keep_recent
            uneven = self.evictor is not None and self.evictor.uneven_heads
            self.residual.check_beside(self.layout.max_rollback, keep_recent, uneven)

    def use(self, codecs: Codecs) -> None:
        """Stores tensors by these codecs from now on, and re-encodes what is stored."""
        self.codecs, self.last = codecs, None
        self._find_packings()
        for buffer, codec in zip(self.buffers or (), codecs, strict=False):
            buffer.recode(codec)
        self.encoded = True

    def _find_packings(self) -> None:
        """Sets which attention reads the planes; mlx-lm's cannot read a residual, so with one our own does."""
        if self.residual is None:
            self.packing, self.packings = packing_of(self.codecs), packings_of(self.codecs)
            return
        keys, values = (codec.packed for codec in self.codecs)
        self.packing, self.packings = None, None if keys is None or values is None else (keys, values)

    @property
    def buffers(self) -> Buffers | None:
        """Of keys and of values; groups of heads are put back into one buffer first. None before the first update."""
        self.ungroup()
        return self.padded

    @buffers.setter
    def buffers(self, value: Buffers | None) -> None:
        self.padded, self.groups = value, None

    def ungroup(self) -> None:
        """Puts all heads into one buffer, if they are in groups."""
        if self.groups is not None:
            self.padded, self.groups = self.groups.buffers(), None

    @property
    def capacity(self) -> int:
        """Slots allocated for each row, if all heads are in one buffer; 0 before the first update."""
        if self.groups is not None:
            return self.groups.capacity
        return 0 if self.padded is None else self.padded[0].capacity

    @property
    def holds_slots(self) -> bool:
        """Whether there are buffers."""
        return self.padded is not None or self.groups is not None

    @property
    def stored_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(each.nbytes for each in self.padded or ()) if self.groups is None else self.groups.nbytes

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of one row, keys and values, as they are stored; 0 before the first update."""
        one_buffer = sum(each.bytes_per_slot for each in self.padded or ())
        return one_buffer if self.groups is None else self.groups.bytes_per_slot

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return not any(row.offset > 0 for row in self.rows)

    @property
    def used(self) -> int:
        """Number of first slots that contain all tokens of all rows."""
        return min(max(0, *(row.end for row in self.rows)), self.layout.most_slots)

    def round_up(self, slots: int) -> int:
        """The least capacity that holds so many slots."""
        return round_up(slots, TAIL_MULTIPLE if any(row.shared for row in self.rows) else SLOT_MULTIPLE)

    @property
    def residual_length(self) -> int:
        """Newest tokens that a query sees in full precision; 0 without a residual."""
        return 0 if self.residual is None else self.residual.length

    def copied(self, memo: dict[int, Any]) -> CacheData:
        """A deep copy that shares the memory of the buffers until one of the two writes.

        Args:
            memo: deepcopy's.
        """
        evictor = None if self.evictor is None else self.evictor.copied(memo)
        copied = self.without_evictor()
        if evictor is not None:
            copied.evictor = evictor
            evictor.belong_to(copied)
        return copied

    def without_evictor(self) -> CacheData:
        """A copy without its evictor, which the caller sets."""
        buffers = self.buffers
        copied = copy.copy(self)  # fields are replaced, never changed in place, except the following
        copied.evictor = None
        if buffers is not None:
            copied.buffers = buffers[0].copied(), buffers[1].copied()
        if self.residual is not None:
            copied.residual = self.residual.copied()
        return copied


def cut_chain(chain: tuple[tuple[Any, int], ...], tokens: int) -> tuple[tuple[Any, int], ...]:
    """The first tokens of a chain."""
    kept = []
    for segment, count in chain:
        if tokens > 0:
            kept.append((segment, min(count, tokens)))
        tokens -= count
    return tuple(kept)


# --- pausing of eviction ----------------------------------------------------------------------------------------------

# While eviction is paused, the layout plans with an unlimited margin; masks and updates follow from that. Two-pass
# prefill pauses it during its first pass.


def hold(data: CacheData) -> None:
    """Pauses eviction; without a budget nothing changes."""
    if data.evictor is not None:
        data.evictor.paused = True
        _with_margin(data, NO_LIMIT)


def release(data: CacheData) -> None:
    """Resumes eviction, from the next write on."""
    if data.evictor is not None and data.evictor.paused:
        data.evictor.paused = False
        _with_margin(data, data.evictor.layout.margin)


def released(data: CacheData) -> Layout:
    """The layout without a pause."""
    if data.evictor is None or not data.evictor.paused or not isinstance(data.layout, Budget):
        return data.layout
    return replace(data.layout, margin=data.evictor.layout.margin)


def _with_margin(data: CacheData, margin: int | None) -> None:
    if isinstance(data.layout, Budget):
        data.layout, data.following, data.last = replace(data.layout, margin=margin), None, None


# --- the state pytree -------------------------------------------------------------------------------------------------


class CacheState(NamedTuple):
    """Everything to continue from: `mx.eval` evaluates it, `tree_flatten` walks it.

    Attributes:
        keys, values: planes (B, H, C, width); None before the first update.
        rows: the numbers of each `Row`.
        ranges: the slots [first, last) that the last fetch returned.
        layout: the layout's `parameters`.
        codecs: of keys and of values, each a name and parameters.
        tensors: head dim and name of the dtype, of keys and of values; None where they follow from the planes.
        encoded: whether the planes are made by the codecs; before `quantized_start` they are plain.
        quantized_start, packed_decode: as in `KVCache`.
        packed: whether the last fetch returned packed planes.
        eviction: the evictor's state; None without one.
        residual: length, room, lowest position of each row, and keys and values (B, H, slots, D), absent before the
            first update; None without a residual.
    """

    keys: Planes | list[mx.array] | None
    values: Planes | list[mx.array] | None
    rows: list[Any]
    ranges: list[Any]
    layout: list[Any]
    codecs: list[Any]
    tensors: Tensors | None = None
    encoded: bool = True
    quantized_start: int = 0
    packed_decode: bool = True
    packed: bool = False
    eviction: Sequence[Any] | None = None
    residual: Sequence[Any] | None = None


def in_state(codecs: Codecs) -> list[Any]:
    """Two codecs by their names and parameters."""
    return [[codec.name, codec.parameters] for codec in codecs]


def state_of(data: CacheData) -> CacheState:
    """The state of a cache; its arrays are new handles, unaffected by later changes of the cache."""
    keys, values, tensors = None, None, None
    if data.buffers is not None:
        keys, values = (buffer.handles() for buffer in data.buffers)
        tensors = [(buffer.head_dim, str(buffer.dtype).rpartition(".")[2]) for buffer in data.buffers]
    return CacheState(
        keys,
        values,
        [list(row) for row in data.rows],
        [list(one) for one in data.ranges],
        list(released(data).parameters),
        in_state(data.codecs),
        tensors,
        data.encoded and data.buffers is not None,
        data.quantized_start,
        data.packed_decode,
        data.packed,
        None if data.evictor is None else data.evictor.state,
        None if data.residual is None else data.residual.state,
    )


def data_of(
    state: tuple[Any, ...],
    growth: Growth = DEFAULT,
    reserved: int = 0,
    announced: tuple[int, ...] | None = None,
    lengths: tuple[int, ...] | None = None,
) -> CacheData:
    """Data that continues from a state.

    Args:
        state: a `CacheState`, or an older tuple.
        growth, reserved, announced, lengths: as in `CacheData`; they are not part of a state.

    Raises:
        ValueError: a codec or a score that is not registered in this process.
    """
    given = _named(state)
    keys, values = (find_codec(name, parameters) for name, parameters in given.codecs)
    layout = make_layout(*given.layout)
    evictor = None
    if given.eviction is not None and isinstance(layout, Budget):
        evictor = Evictor.from_state(layout, given.eviction)
    data = CacheData(
        (keys, values),
        layout,
        evictor,
        growth,
        reserved,
        given.quantized_start,
        given.packed_decode,
        (0,) * len(given.rows) if announced is None else announced,
        lengths,
        tuple(Row(*row) for row in given.rows),
        ranges=tuple((first, last) for first, last in given.ranges),
        packed=given.packed,
        residual=None if given.residual is None else Residual.from_state(given.residual),
    )
    if given.keys is not None and given.values is not None:
        codecs, planes = data.codecs if given.encoded else PLAIN, (tuple(given.keys), tuple(given.values))
        tensors = given.tensors or [tensor_of_planes(*each) for each in zip(codecs, planes, strict=True)]
        own_keys, own_values = (
            SlotBuffer(codec, each, head_dim, DTYPES[dtype])
            for codec, each, (head_dim, dtype) in zip(codecs, planes, tensors, strict=True)
        )
        data.buffers, data.encoded = (own_keys, own_values), given.encoded
    return data


def _named(state: tuple[Any, ...]) -> CacheState:
    if len(state) in (len(CacheState._fields), len(CacheState._fields) - 1):
        return CacheState(*state)
    keys, values, rows, ranges, layout, bits, group_size, quantized_start, packed_decode, packed, eviction = state
    encoded = bits is None or (keys is not None and len(keys) > 1)
    codecs = in_state(find_codecs(bits, group_size))
    flags = encoded, quantized_start, packed_decode, packed
    return CacheState(keys, values, rows, ranges, layout, codecs, None, *flags, eviction)


def tensor_of_planes(codec: Codec, planes: Planes) -> tuple[int, str]:
    """The head dim and the name of the dtype, where they follow from the planes: plain or quantised by `Affine`.

    Raises:
        ValueError: planes of another codec.
    """
    width, dtype = planes[0].shape[3], str(planes[-1].dtype).rpartition(".")[2]
    if isinstance(codec, Affine):
        return width * 32 // codec.bits, dtype
    if isinstance(codec, Plain):
        return width, dtype
    raise ValueError(f"planes of the codec {codec.name} do not tell what they stand for: give the state its tensors")
