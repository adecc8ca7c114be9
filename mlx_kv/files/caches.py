"""Caches as descriptions in JSON and named arrays, and back: the schema, ours, and those of files of mlx-lm.

msgspec decodes a description: types check every value and its range; unknown fields are refused. Files of 0.1 and 0.2
have the same schema; fields with a default were added later. Each type checks what must hold between its fields: on
decoding, or in `check`, which takes what follows from other parts of the description. Arrays are named in JSON
(`{"array": name}`) and decoded to the array of that name.

Only slots that hold tokens are stored, and what makes a loaded cache continue as the saved one would: rows, settings,
capacity, the growth rule, the state of the evictor. A description may be made up: what is restored was checked to be
consistent, and is described in the same way again.

The format of mlx-lm 0.32.2 is that of `save_prompt_cache` in mlx_lm/models/cache.py: a safetensors file with the
flattened `state` of every cache, and in its metadata, flattened too, words, class names, and which arrays stand for
scalars, strings or None. It has no checksum: only states that no cache can have are refused.
B rows, H KV heads, Hq query heads, D head dim, n slots.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import mlx.core as mx
import msgspec
from mlx_lm.models import cache as stock
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import astuple

from mlx_kv.cache.checks import Count
from mlx_kv.cache.codecs import PLAIN, Codecs, affine_of, are_plain, find_codec, find_codecs, packing_of, packings_of
from mlx_kv.cache.eviction.allocation import BY_HEAD, Allocation, Scope, checked_allocation, uneven_heads
from mlx_kv.cache.eviction.evictor import EvictorState
from mlx_kv.cache.eviction.scores import Wants, find_score
from mlx_kv.cache.eviction.scoring import ObservedState
from mlx_kv.cache.growth import DEFAULT, SLOT_MULTIPLE, FixedStep, Geometric, Growth, Tapered, round_up
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import NO_LIMIT, Append, Budget, Layout, Ring, Row, make_layout
from mlx_kv.cache.residual import ROOM, Residual
from mlx_kv.cache.state import DTYPES, CacheState, Tensors, in_state, named_state, tensor_of_planes
from mlx_kv.files import tensor_files
from mlx_kv.files.tensor_files import INVALID, Array, Listed, Part, check_shape, decode, in_one_line, take
from mlx_kv.settings import MOST_TOKENS

WorkRow = tuple[Count, Count, Annotated[float, Meta(ge=0)]]
Signed = Annotated[int, Meta(ge=-MOST_TOKENS, le=MOST_TOKENS)]
GROWTH_RULES: dict[str, type[Tapered | Geometric | FixedStep]] = {
    "tapered": Tapered,
    "geometric": Geometric,
    "fixed_step": FixedStep,
}
MAX_WRITE = 512  # of the rings that are made of mlx-lm's: the default of a policy


# --- the file ---------------------------------------------------------------------------------------------------------


class BlockColumn(Part):
    """The blocks of the arrays of these names, in the order of their slots: the name and the slots of each."""

    arrays: list[str]
    blocks: list[tuple[str, Annotated[int, Meta(gt=0, le=MOST_TOKENS)]]]


class Description(Part):
    """The contents of a file other than arrays.

    Attributes:
        caches: each an `StoredCache`, `CacheList` or `StockCache`, decoded when their arrays are there.
        metadata: the caller's.
        fingerprint: of the model.
        arrays: the digest of each array.
        blocks: in entries of a prompt store, the slots that are in other files.
    """

    caches: list[Any]
    metadata: dict[str, str]
    fingerprint: str | None
    arrays: dict[str, str]
    blocks: list[BlockColumn] | UnsetType = UNSET


# --- eviction ---------------------------------------------------------------------------------------------------------


def _check_observed(state: ObservedState, wants: Wants | None, rows: Sequence[Row], heads: int) -> None:
    """Raises ValueError unless attention can have been observed in these rows, for a score with these wants."""
    if wants is None or not wants.observes or state.scale == 0 or len(state.rows) != len(rows):
        raise ValueError("observed attention of other rows, or that its score does not use")
    for row, (since, end, count, _) in zip(rows, state.rows, strict=True):
        if not (count <= end - since and end <= max(0, row.offset)):
            raise ValueError("observed queries of other tokens")
    sizes = {"B": len(rows), "H": heads}
    check_shape(state.queries, "B Hq n D", sizes)
    check_shape(state.sinks, "Hq", sizes)
    count = max(count for _, _, count, _ in state.rows)
    if (state.queries is None) != (count == 0) or sizes.get("n", 0) < count or sizes.get("Hq", 0) % heads:
        raise ValueError("observed queries of other heads or tokens")


def check_eviction(state: EvictorState, layout: Budget, rows: Sequence[Row], heads: int | None) -> None:
    """Raises ValueError unless an evictor of these rows can have this state.

    Args:
        heads: H; None before the first update.
    """
    score, table = find_score(state.score), checked_allocation(state.share, state.layers)
    by_row = isinstance(state.work[0], list)  # 0.1.0: one row, for all rows together
    msgspec.convert(state.work, list[WorkRow] if by_row else WorkRow)
    if by_row and len(state.work) != len(state.groups):
        raise ValueError("the work of other rows")
    if len(state.groups) not in (1, len(rows)):
        raise ValueError("layer groups of other rows")
    if not isinstance(table, str) and ([*map(list, table)] != state.layers or state.layer >= len(table)):
        raise ValueError("a table of budgets whose mean is not 1, or of fewer layers")
    cuts = [layout.cut_of(row) for row in rows if row.evicted > 0]
    if cuts and (state.positions is None or (score.per_token and state.scores is None)):
        raise ValueError("evicted tokens without the positions or the scores of the others")
    if heads is None:
        if any(x is not None for x in (state.positions, state.scores, state.dead, state.observed, state.reread)):
            raise ValueError("the state of an evictor of tokens, but no tokens")
        return
    # Rows that have evicted nothing have no positions, and their cut may be after those of others.
    for array, dtype in ((state.positions, mx.int32), (state.scores, mx.float32)):
        sizes = {"B": len(rows), "H": heads if state.share in BY_HEAD else 1}
        check_shape(array, "B H n", sizes, dtype)
        if sizes.get("n", MOST_TOKENS) < max(cuts, default=0):
            raise ValueError("positions or scores of other tokens")
    if state.positions is not None:
        first, last = mx.min(state.positions).item(), mx.max(state.positions).item()
        if not 0 <= first <= last <= max(row.offset for row in rows):  # type: ignore[operator]
            raise ValueError("positions that the rows do not have")
    _check_dead(state.dead, state.share, table, layout, rows, heads)
    if state.observed is not None:
        _check_observed(state.observed, score.wants, rows, heads)
    if state.reread is not None and len(state.reread) != len(rows):
        raise ValueError("a second reading of other rows")
    for row, shares in zip(rows, state.reread or (), strict=False):
        sizes = {"H": heads}
        check_shape(shares and shares[1], "H n", sizes, mx.float32)
        if shares and not 0 < sizes["n"] <= row.offset - shares[0]:
            raise ValueError("a second reading of tokens that its row does not have")


def _check_dead(
    dead: mx.array | None, scope: Scope, allocation: Allocation, layout: Budget, rows: Sequence[Row], heads: int
) -> None:
    """How many slots before the cut hold no token of a head."""
    uneven = uneven_heads(scope, allocation)
    exact = allocation == "uniform"  # the heads of each layer hold its budget on average
    if dead is None:
        lost = any(row.extra_slots if exact else row.evicted > 0 for row in rows)
        if lost and (exact or uneven):
            raise ValueError("heads of different lengths without their lengths")
        return
    check_shape(dead, "B H", {"B": len(rows), "H": heads}, mx.int32)
    if not uneven:
        raise ValueError("lengths of heads that all have one length")
    gaps: list[list[int]] = dead.tolist()  # type: ignore[assignment]
    for row, head_gaps in zip(rows, gaps, strict=True):
        fits = 0 == min(head_gaps) <= max(head_gaps) <= layout.cut_of(row) - layout.sinks
        if row.evicted > 0 and not (fits and (not exact or sum(head_gaps) == heads * row.extra_slots)):
            raise ValueError("heads that do not hold their share of a budget")


# --- keys and values --------------------------------------------------------------------------------------------------


def check_planes(
    keys: Sequence[mx.array], values: Sequence[mx.array], codecs: Codecs, tensors: Tensors | None = None
) -> Tensors:
    """Checks that planes (B, H, n, width) are what the codecs make of keys and of values.

    Args:
        tensors: head dims and dtypes of keys and of values; None where they follow from the planes.

    Returns:
        The head dims and dtypes.

    Raises:
        ValueError: planes that the codecs do not make.
    """
    kinds = []
    for which, (name, planes, codec) in enumerate(zip(("keys", "values"), (keys, values), codecs, strict=True)):
        if not planes or not all(isinstance(plane, mx.array) and plane.ndim == 4 for plane in planes):
            raise ValueError("keys or values that are not arrays of four axes")
        head_dim, dtype = tensor_of_planes(codec, tuple(planes)) if tensors is None else tensors[which]
        if dtype not in DTYPES:
            raise ValueError(f"keys or values of {dtype}")
        codec.check(name, mx.zeros((1, planes[0].shape[1], 1, head_dim), DTYPES[dtype]))
        if [(plane.shape[3], plane.dtype) for plane in planes] != list(codec.planes(head_dim, DTYPES[dtype])):
            raise ValueError(f"planes that the codec {codec.name} does not make")
        if name == "keys" and head_dim == 0:
            raise ValueError("keys with a head dim of 0")
        kinds.append((head_dim, dtype))
    if len({plane.shape[:3] for plane in (*keys, *values)}) != 1 or 0 in keys[0].shape[:2]:
        raise ValueError("keys and values of different shapes")
    return kinds


class PlaneCounts(Part):
    """How many planes the codecs made."""

    keys: Count
    values: Count


NamedCodec = tuple[str, dict[str, Any]]
TensorKind = tuple[Count, str]  # head dim, dtype


class StoredCodecs(Part):
    """Codecs that `bits` and `group_size` do not determine, of keys and of values.

    Attributes:
        tensors: head dims and dtypes; None before the first update.
        encoded: whether the planes are made by the codecs; before `quantized_start` they are plain.
    """

    codecs: tuple[NamedCodec, NamedCodec]
    tensors: tuple[TensorKind, TensorKind] | None
    encoded: bool

    def __post_init__(self) -> None:
        if (self.encoded and self.tensors is None) or any(dtype not in DTYPES for _, dtype in self.tensors or ()):
            raise ValueError("planes of no tensors, or of those of another dtype")
        codecs = self.find()
        if affine_of(codecs) is not None or are_plain(codecs):
            raise ValueError("codecs that bits and a group size determine")
        if [(codec.name, codec.parameters) for codec in codecs] != list(self.codecs):
            raise ValueError("codecs with other parameters than they are made with")

    def find(self) -> Codecs:
        """Raises ValueError where a codec is not registered."""
        keys, values = (find_codec(*each) for each in self.codecs)
        return keys, values


class GrowthRule(Part):
    """A growth rule of this package."""

    rule: Literal["tapered", "geometric", "fixed_step"]
    settings: dict[str, Count | float | None]

    def make(self) -> Growth:
        """Raises ValueError or TypeError for settings that the rule does not have."""
        growth = GROWTH_RULES[self.rule](**self.settings)  # type: ignore[arg-type]
        if dataclasses.asdict(growth) != self.settings:
            raise ValueError(f"a growth rule {self.rule} without all of its settings")
        return growth


class StoredResidual(Part):
    """The `state` of a `Residual`, whose keys and values (B, H, slots, D) are arrays of the file if it has any."""

    length: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    room: Annotated[int, Meta(ge=ROOM, le=ROOM)]
    first: list[Count]
    stored: bool


# --- caches -----------------------------------------------------------------------------------------------------------


class StoredState(Listed):
    """The part of a cache that 0.1.0 knew as its state.

    Attributes:
        rows: the numbers of each `Row`, without a last 0, and those of its images.
        ranges: the slots [first, last) that the last fetch was made of.
        layout: its `parameters`.
        bits, group_size: of an affine codec; None for plain tensors and for those with `StoredCache.codecs`.
        quantized_start, packed_decode, packed: as in `CacheState`.
        eviction: of a budget.
    """

    rows: Annotated[list[Annotated[list[Signed], Meta(min_length=4)]], Meta(min_length=1)]
    ranges: list[tuple[Count, Count]]
    layout: list[str | Count]
    bits: int | None
    group_size: int | None
    quantized_start: Count
    packed_decode: bool
    packed: bool
    eviction: EvictorState | None


class StoredCache(Part, tag_field="kind", tag="mlx-kv"):
    """A cache of this package. Its planes are arrays of the file: `NAME.keys.PLANE.ROW` (H, n, width), and `values`.

    Attributes:
        name: its number in the file, or in a list `LIST.NUMBER`.
        live: of each row, the slots n that are stored.
        capacity: slots to allocate.
        growth: None for a rule of another package; the loaded cache then has the default.
        reserve, lengths, announced: as in `KVCache`.
    """

    name: str
    planes: PlaneCounts
    live: list[Count]
    capacity: Count
    state: StoredState
    growth: GrowthRule | None
    reserve: Count
    lengths: list[Count] | None
    announced: list[Count] | UnsetType = UNSET
    codecs: StoredCodecs | UnsetType = UNSET
    residual: StoredResidual | UnsetType = UNSET

    def __post_init__(self) -> None:
        rows, counts = len(self.state.rows), [self.live, self.lengths, self.announced]
        if any(len(each) != rows for each in counts if isinstance(each, list)):
            raise ValueError("live slots, lengths or announced tokens of other rows")
        if self.announced is not UNSET and not any(self.announced):
            raise ValueError("announced tokens that are none")
        if (self.planes.keys > 0) != self.stored or (self.planes.values > 0) != self.stored:
            raise ValueError("keys without values, or a capacity without planes")
        if self.capacity % SLOT_MULTIPLE or self.capacity < max(self.live):
            raise ValueError(f"a capacity of {self.capacity} slots")

    @property
    def stored(self) -> bool:
        """Whether the cache has been updated."""
        return self.capacity > 0

    def find_codecs(self) -> tuple[Codecs, Tensors | None, bool]:
        """The codecs; head dims and dtypes, where they do not follow from the planes; whether these are encoded.

        Raises:
            ValueError: there are no such codecs, or they do not fit the planes.
        """
        state = self.state
        if self.codecs is UNSET:
            if state.bits is None and state.group_size is not None:
                raise ValueError("groups without bits")
            codecs, tensors = find_codecs(state.bits, state.group_size), None  # type: ignore[arg-type]
            encoded = self.stored and (are_plain(codecs) or self.planes.keys > 1)
        else:
            codecs, encoded = self.codecs.find(), self.codecs.encoded
            tensors = None if self.codecs.tensors is None else list(self.codecs.tensors)
            if state.bits is not None or state.group_size is not None or (tensors is not None) != self.stored:
                raise ValueError("codecs beside bits, or of other tensors")
        if state.quantized_start and are_plain(codecs):
            raise ValueError("a quantized_start without bits")
        if self.stored and not encoded and not state.quantized_start:
            raise ValueError("plain planes, but bits")
        packing = packing_of(codecs) or packings_of(codecs)
        if state.packed and not (encoded and state.packed_decode and packing is not None):
            raise ValueError("a packed fetch of planes that are not packed")
        if self.residual is not UNSET and are_plain(codecs):
            raise ValueError("newest tokens apart from others, where none is encoded")
        return codecs, tensors, encoded


class CacheList(Part, tag_field="kind", tag="list"):
    """mlx-lm's `CacheList`."""

    members: list[Any]


class StockCache(Part):
    """A cache of mlx-lm's; the type of the state of each kind is in `STATES`."""

    kind: str
    state: list[Any]


# --- the states of mlx-lm's caches ------------------------------------------------------------------------------------


class RecurrentState(Listed):
    arrays: list[Array | None]
    left_padding: Array | None
    lengths: Array | None

    def __post_init__(self) -> None:
        check_shape(self.left_padding, "B", {}, mx.int32)
        check_shape(self.lengths, "B", {}, mx.int32)


class ConcatenateState(Listed):
    keys: Array | None  # (B, H, n, D)
    values: Array | None

    def __post_init__(self) -> None:
        _check_planes([self.keys], [self.values], PLAIN)


class PlainState(ConcatenateState):
    offset: Count

    def __post_init__(self) -> None:
        _check_planes([self.keys], [self.values], PLAIN, self.offset)


class ChunkedState(ConcatenateState):
    offset: Count
    chunk_size: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    start_position: Count

    def __post_init__(self) -> None:
        _check_planes([self.keys], [self.values], PLAIN, self.offset - self.start_position)


class RotatingState(ConcatenateState):
    offset: Count
    keep: Count
    max_size: Count
    index: Count

    def __post_init__(self) -> None:
        ConcatenateState.__post_init__(self)
        self.slots_by_age()

    def slots_by_age(self) -> list[int]:
        """Slots from the oldest token on, as mlx-lm's `_temporal_order` has them.

        Raises:
            ValueError: no rotating cache has such a state.
        """
        Ring(self.max_size, MAX_WRITE, self.keep)
        slots = 0 if self.keys is None else self.keys.shape[2]
        offset, keep, index, order = self.offset, self.keep, self.index, list(range(slots))
        if index > slots or (keep > index < min(slots, offset)):
            raise ValueError(f"a rotating cache that continues at slot {index} of {slots}")
        if index < slots:  # all is written, or rotated, or some is not
            order = order[:keep] + order[index:] + order[keep:index] if index < offset else order[:index]
        if not min(offset, self.max_size - 1) <= len(order) <= offset:
            raise ValueError(f"a rotating cache of {self.max_size} that holds {len(order)} of {offset} tokens")
        return order


class QuantizedState(Listed):
    keys: list[Array | None] | None  # packed, scales, biases: (B, H, n, width)
    values: list[Array | None] | None
    offset: Count
    group_size: int
    bits: int

    def __post_init__(self) -> None:
        _check_planes(self.keys or [], self.values or [], find_codecs(self.bits, self.group_size), self.offset)


def _check_planes(keys: list[Any], values: list[Any], codecs: Codecs, tokens: int = 0) -> None:
    """Raises ValueError unless planes, or None for each, are what the codecs make of so many tokens, or of more."""
    slots = 0
    if any(plane is not None for plane in (*keys, *values)):
        check_planes(keys, values, codecs)
        slots = keys[0].shape[2]
    if not 0 <= tokens <= slots:
        raise ValueError(f"a cache that holds {tokens} tokens in {slots} slots")


STATES: dict[Any, type[Listed]] = {
    stock.ArraysCache: RecurrentState,
    stock.KVCache: PlainState,
    stock.QuantizedKVCache: QuantizedState,
    stock.RotatingKVCache: RotatingState,
    stock.ChunkedKVCache: ChunkedState,
    stock.ConcatenateKVCache: ConcatenateState,
}


# --- describing -------------------------------------------------------------------------------------------------------


def describe(cache: Any, name: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """A cache in JSON; its arrays are added to `arrays`, under names that begin with `name`.

    Raises:
        ValueError: a cache of an unknown kind.
    """
    if isinstance(cache, KVCache):
        return _describe_kv_cache(cache, name, arrays)
    if type(cache) is stock.CacheList:
        members = [describe(member, f"{name}.{index}", arrays) for index, member in enumerate(cache.caches)]
        return {"kind": "list", "members": members}
    kind = stock.ArraysCache if isinstance(cache, stock.ArraysCache) else type(cache)  # also one with checkpoints
    if kind in STATES:
        return {"kind": kind.__name__, "state": _named(cache.state, name, arrays)}
    raise ValueError(f"cache {name} is a {type(cache).__name__}, which no file can hold: use mlx_kv.make_prompt_cache")


def _describe_kv_cache(cache: KVCache, name: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    state, view = cache.state, cache.view
    live = [_live_slots(row, view.layout) for row in view.rows]
    planes = {}
    for which, tensor in (("keys", state.keys), ("values", state.values)):
        for index, plane in enumerate(tensor or ()):  # (B, H, C, width)
            for row, used in enumerate(live):
                arrays[f"{name}.{which}.{index}.{row}"] = plane[row, :, :used]  # (H, n, width)
        planes[which] = len(tensor or ())
    affine, growth = affine_of(view.codecs), view.growth
    rules = (
        {"rule": name, "settings": dataclasses.asdict(growth)}
        for name, rule in GROWTH_RULES.items()
        if type(growth) is rule
    )
    own_state = [
        [_short_row(row) for row in view.rows],
        state.ranges,
        state.layout,
        *((None, None) if affine is None else (affine.bits, affine.group_size)),
        state.quantized_start,
        state.packed_decode,
        state.packed,
        None if state.eviction is None else _short_eviction(EvictorState(*state.eviction)),
    ]
    described = {
        "kind": "mlx-kv",
        "name": name,
        "planes": planes,
        "live": live,
        "capacity": cache.capacity,
        "state": _named(own_state, f"{name}.state", arrays),
        "growth": next(rules, None),
        "reserve": view.reserved,
        "lengths": view.lengths,
    }
    if any(view.announced):
        described["announced"] = view.announced
    if affine is None and not are_plain(view.codecs):
        described["codecs"] = {"codecs": state.codecs, "tensors": state.tensors, "encoded": state.encoded}
    if state.residual is not None:
        length, room, first, newest = state.residual
        arrays |= {f"{name}.residual.{index}": plane for index, plane in enumerate(newest)}
        described["residual"] = {"length": length, "room": room, "first": first, "stored": bool(newest)}
    return described


def _short_row(row: Row) -> list[int]:
    """Four numbers, as in 0.1.0, where all heads hold as many tokens and positions count as tokens do."""
    return row.numbers if row.images else row.numbers[: 5 if row.extra_slots else 4]


def _live_slots(row: Row, layout: Layout) -> int:
    return min(max(0, row.end), layout.max_slots)


def _short_eviction(state: EvictorState) -> list[Any]:
    """The fields of 0.1.0, and later ones up to the last that differs from its default."""
    defaults = [state.dead is None, state.layers == "uniform", state.observed is None, state.reread is None]
    while defaults and defaults[-1]:
        defaults.pop()
    return list(state)[: len(EvictorState._fields) - 4 + len(defaults)]


def _named(tree: Any, name: str, arrays: dict[str, mx.array]) -> Any:
    """Lists and scalars as they are; an array is added to `arrays`, and replaced by its name."""
    if isinstance(tree, mx.array):
        arrays[name] = tree
        return {"array": name}
    if isinstance(tree, (list, tuple)):
        return [_named(item, f"{name}.{index}", arrays) for index, item in enumerate(tree)]
    return tree


# --- restoring --------------------------------------------------------------------------------------------------------


class MemoryLimit:
    """The memory of this machine, of which restored caches take no more than there is: files do not have capacities."""

    def __init__(self) -> None:
        self.total = self.left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def take(self, nbytes: int) -> None:
        """Raises ValueError if less is left."""
        self.left -= nbytes
        if self.left < 0:
            raise ValueError(f"its caches would take more than the {self.total:,} bytes of this machine")


def restore(described: Sequence[Any], arrays: Mapping[str, mx.array]) -> list[Any]:
    """The caches that `describe` described, which use all of these arrays.

    Raises:
        ValueError: a description that is not valid, or of more than this machine has memory for.
    """
    left, memory = dict(arrays), MemoryLimit()
    try:
        caches = [_restore(each, str(index), left, memory) for index, each in enumerate(described)]
    except INVALID as error:
        raise ValueError(in_one_line(error)) from error
    if left:
        raise ValueError(f"no cache has an array {next(iter(left))}")
    return caches


def _restore(tree: Any, name: str, arrays: dict[str, mx.array], memory: MemoryLimit) -> Any:
    kind = tree["kind"]
    if kind == "mlx-kv":
        return _restore_kv_cache(tree, name, arrays, memory)
    if kind == "list":
        members = enumerate(decode(tree, CacheList).members)
        restored = [_restore(each, f"{name}.{index}", arrays, memory) for index, each in members]
        return stock.CacheList(*restored)  # type: ignore[no-untyped-call]
    cls = next((cls for cls in STATES if cls.__name__ == kind), None)
    if cls is None:
        raise ValueError(f"a cache of unknown kind {str(kind)[:40]!r}")
    return cls.from_state(astuple(decode(decode(tree, StockCache).state, STATES[cls], arrays)))


def _restore_kv_cache(tree: Any, name: str, arrays: dict[str, mx.array], memory: MemoryLimit) -> KVCache:
    eviction = tree["state"][-1]
    if eviction and eviction[9:] and eviction[9] and len(eviction[9]) == 9:
        eviction[9] = eviction[9][:4]  # up to 0.3, with five fields of scores that were removed
    description = decode(tree, StoredCache, arrays)
    state, live = description.state, description.live
    layout = make_layout(*state.layout)  # type: ignore[arg-type]
    if list(layout.parameters) != state.layout:
        raise ValueError("a layout with other parameters than it is made with")
    rows = tuple(_row(layout, numbers) for numbers in state.rows)
    if description.name != name or live != [_live_slots(row, layout) for row in rows]:
        raise ValueError("a cache of another name, or live slots of other rows")
    codecs, tensors, encoded = description.find_codecs()
    growth = DEFAULT if description.growth is None else description.growth.make()
    announced = tuple(description.announced or [0] * len(rows))
    capacity, needed = description.capacity, min(max(live) + 1, layout.max_slots)
    if description.stored and needed > capacity:
        capacity = round_up(max(needed, growth.capacity(needed, capacity)))
    if not all(first < last <= (capacity if description.stored else NO_LIMIT) for first, last in state.ranges):
        raise ValueError("slots beyond its capacity")

    next_capacity = max(capacity, min(max(description.reserve, *announced), layout.enough_slots))
    stored = {"keys": description.planes.keys, "values": description.planes.values}
    keys, values = (
        [[take(arrays, f"{name}.{which}.{index}.{row}") for row in range(len(rows))] for index in range(count)]
        for which, count in stored.items()
    )
    for lines in (*keys, *values):  # of one plane, each (H, n, width)
        if len({(x.ndim, x.shape[0], x.shape[2], x.dtype) for x in lines}) != 1 or [x.shape[1] for x in lines] != live:
            raise ValueError("rows of different shapes")
        memory.take(len(lines) * math.prod(lines[0].shape[::2]) * lines[0].itemsize * next_capacity)
    heads = keys[0][0].shape[0] if description.stored else None
    if description.stored:
        first_rows = [[lines[0][None] for lines in planes] for planes in (keys, values)]
        tensors = check_planes(first_rows[0], first_rows[1], codecs if encoded else PLAIN, tensors)

    if isinstance(layout, Budget) == (state.eviction is None):
        raise ValueError("an evictor without a budget, or the other way round")
    if isinstance(layout, Budget) and state.eviction is not None:
        check_eviction(state.eviction, layout, rows, heads)
    residual = None
    if description.residual:
        residual = _restore_residual(description.residual, f"{name}.residual", arrays, rows, heads, tensors)
        memory.take(sum(x.nbytes for x in residual[-1]))
    planes = ([_plane(lines, capacity) for lines in stored] or None for stored in (keys, values))
    restored = named_state((*planes, *astuple(state)))
    restored = restored._replace(codecs=in_state(codecs), tensors=tensors, encoded=encoded, residual=residual)
    cache = KVCache.from_state(restored, growth=growth, reserved=description.reserve)
    cache.announced = announced
    cache.lengths = None if description.lengths is None else tuple(description.lengths)
    return cache


def _restore_residual(
    description: StoredResidual,
    name: str,
    arrays: dict[str, mx.array],
    rows: Sequence[Row],
    heads: int | None,
    tensors: Tensors | None,
) -> list[Any]:
    """The state of a `Residual`; `heads` and `tensors` are None before the first update."""
    if description.stored != (tensors is not None) or (tensors is None and any(description.first)):
        raise ValueError("newest tokens without others, or the other way round")
    if tensors is None:
        return [description.length, description.room, description.first, []]
    ranges = [range(max(0, row.offset - description.length - description.room), max(0, row.offset) + 1) for row in rows]
    if len(description.first) != len(rows) or any(
        first not in allowed for first, allowed in zip(description.first, ranges, strict=True)
    ):
        raise ValueError("newest tokens of other rows")
    planes = [take(arrays, f"{name}.{index}") for index in range(2)]
    slots = Residual(description.length, description.room).slots + 1
    for plane, (head_dim, dtype) in zip(planes, tensors, strict=True):
        if plane.shape != (len(rows), heads, slots, head_dim) or plane.dtype != DTYPES[dtype]:
            raise ValueError("newest tokens of other shapes")
    return [description.length, description.room, description.first, planes]


def _row(layout: Layout, numbers: list[int]) -> Row:
    """Raises ValueError for a row that this layout cannot have."""
    start, offset, high, front, extra, shared = [*numbers[:6], 0, 0][:6]
    row, images = Row(start, offset, high, front, extra, shared, tuple(numbers[6:])), numbers[6:]
    fits = 0 <= front <= max(0, offset) <= high and (offset <= 0 or layout.max_trim(row) >= 0)
    if isinstance(layout, Budget):
        fits = fits and (row.evicted == 0 or (row.evicted > 0 and layout.cut_of(row) <= row.end and offset > 0))
        fits = fits and start <= 0 and (row.evicted > 0 or extra == 0) and layout.cut_of(row) >= layout.sinks
    else:
        fits = fits and start == extra == 0
    ends = [0, *(end for number in range(0, len(images), 3) for end in images[number : number + 2]), offset]
    fits = fits and len(images) % 3 == 0 and (not images or ends == sorted(ends))
    if shared or not fits or _short_row(row) != numbers:
        raise ValueError(f"a row that cannot be: {numbers}")
    return row


def _plane(rows: Sequence[mx.array], capacity: int) -> mx.array:
    """A plane (B, H, capacity, width) of the live slots of each row (H, n, width)."""
    whole = mx.zeros((len(rows), rows[0].shape[0], capacity, rows[0].shape[2]), rows[0].dtype)
    for index, row in enumerate(rows):
        whole[index, :, : row.shape[1]] = row
    mx.eval(whole)
    return whole


# --- files of mlx-lm --------------------------------------------------------------------------------------------------


def convert(path: str | Path, file: tensor_files.TensorFile) -> tuple[list[Any], dict[str, str]]:
    """The caches of a file that mlx-lm wrote, as ours, and the metadata that was saved with them.

    Raises:
        ValueError: it is none of mlx-lm's files, or of an older version, or has a state that no cache can have.
    """
    words = file.words
    if not is_stock(words):
        raise ValueError(
            f"{path} is a safetensors file, but no prompt cache of mlx-kv or mlx-lm 0.32.2: give one that "
            "save_prompt_cache wrote"
        )
    try:
        states = _unflatten(_leaves(file))
        caches = [_converted(name, state) for name, state in zip(_unflatten(words, "1."), states, strict=True)]
    except INVALID as error:
        raise ValueError(
            f"{path} was written by mlx-lm, but cannot be used: {in_one_line(error)}; make it again"
        ) from error
    return caches, {name[2:]: word for name, word in words.items() if name.startswith("0.")}


def is_stock(words: dict[str, str]) -> bool:
    """Whether this is the metadata of a file that mlx-lm 0.32.2 wrote."""
    return "1.0" in words and words.get("2.0") == ""


def _leaves(file: tensor_files.TensorFile) -> dict[str, Any]:
    """Arrays by name, and scalars, strings and None instead of the arrays that stand for them."""
    leaves: dict[str, Any] = dict(file.arrays)
    for name, kind in _unflatten(file.words, "2.")[1:]:
        value: Any = file.arrays[name].tolist()
        leaves[name] = value if kind == "scalar" else "".join(map(chr, value)) if kind == "string" else None
    return leaves


def _unflatten(flat: Mapping[str, Any], prefix: str = "") -> Any:
    """Nested lists of values with names such as "0.1", as MLX's `tree_flatten` gives them, after this prefix.

    MLX's own inverse makes lists of any length for a name such as "99999999".

    Raises:
        LookupError, TypeError, AttributeError: a list with gaps, or names that exclude each other.
    """
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        if name.startswith(prefix):
            *path, last = name.removeprefix(prefix).split(".")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value

    def listed(node: Any) -> Any:
        return [listed(node[str(index)]) for index in range(len(node))] if isinstance(node, dict) else node

    return listed(tree)


def _converted(name: str, state: Any) -> Any:
    """A cache of mlx-lm's as one of ours; recurrent state stays mlx-lm's."""
    if name == "CacheList":
        return stock.CacheList(*[_converted(kind, each) for each, kind in state])  # type: ignore[no-untyped-call]
    match name:
        case "KVCache":
            plain = decode(state, PlainState)
            return _full([plain.keys], [plain.values], plain.offset)
        case "QuantizedKVCache":
            packed = decode(state, QuantizedState)
            codecs = find_codecs(packed.bits, packed.group_size)
            return _full(packed.keys, packed.values, packed.offset, codecs)
        case "RotatingKVCache":
            return _ring(decode(state, RotatingState))
        case "ArraysCache":
            return stock.ArraysCache.from_state(astuple(decode(state, RecurrentState)))  # type: ignore[no-untyped-call]
    raise ValueError(
        f"it holds a {name}, and only KVCache, QuantizedKVCache, RotatingKVCache and ArraysCache can be read"
    )


def _full(keys: Any, values: Any, offset: int, codecs: Codecs = PLAIN) -> KVCache:
    if not keys or keys[0] is None or offset == 0:
        return KVCache(codec=codecs)
    keys, values = ([plane[:, :, :offset] for plane in planes] for planes in (keys, values))
    return _with_free_slot(keys, values, Row(0, offset, offset), Append(), codecs)


def _ring(state: RotatingState) -> KVCache:
    """A ring of what a rotating buffer (B, H, n, D) holds: the first `keep` tokens, and the newest."""
    offset, keep, keys, values = state.offset, state.keep, state.keys, state.values
    layout = Ring(state.max_size, MAX_WRITE, keep)
    if keys is None or values is None or offset == 0:
        return KVCache(layout=layout)
    slots = state.slots_by_age()
    count = len(slots)
    # Their positions. Those that come after the sinks are the newest; no more than the ring has room for.
    first = max(keep, offset - (count - keep), offset - layout.turn) if offset > keep else offset
    row = Row(0, offset, offset if first <= keep else first + layout.turn)  # as if so many had been written and trimmed
    positions = [*range(min(keep, offset)), *range(first, offset)]
    slots_of_positions = slots[: min(keep, offset)] + slots[count - (offset - first) :]
    source: list[int] = [0] * min(offset + 1, layout.max_slots)
    for position, slot in zip(positions, slots_of_positions, strict=True):
        source[layout.slot(row, position)] = slot
    index = mx.array(source)
    return _with_free_slot([keys[:, :, index]], [values[:, :, index]], row, layout)


def _with_free_slot(
    keys: list[mx.array], values: list[mx.array], row: Row, layout: Layout, codecs: Codecs = PLAIN
) -> KVCache:
    """A cache of these planes (B, H, n, width) with one free slot, if the layout has one; all rows are alike."""
    rows, capacity = [row.numbers] * keys[0].shape[0], round_up(min(row.offset + 1, layout.max_slots))
    keys, values = (
        [mx.pad(plane, [(0, 0), (0, 0), (0, capacity - plane.shape[2]), (0, 0)]) for plane in planes]
        for planes in (keys, values)
    )
    mx.eval(keys, values)
    ranges, parameters = list(layout.ranges(row, 0)), list(layout.parameters)
    return KVCache.from_state(CacheState(keys, values, rows, ranges, parameters, in_state(codecs)))
