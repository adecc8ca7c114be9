"""The schema of the descriptions in prompt cache files, decoded by msgspec.

Types check every value and its range; unknown fields are refused. Files of 0.1 and 0.2 have the same schema; fields
with a default were added later. Each type checks what must hold between its fields: on decoding, or in `check`, which
takes what follows from other parts of the description. Arrays are named in JSON (`{"array": name}`) and decoded to
the array of that name.
B rows, H KV heads, Hq query heads, D head dim, n slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import mlx.core as mx
import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import asdict, astuple

from mlx_kv.cache.codecs import Codecs, affine_of, are_plain, find_codec, find_codecs, packing_of, packings_of
from mlx_kv.cache.eviction.allocation import BY_HEAD, Allocation, Scope, checked_allocation, uneven_heads
from mlx_kv.cache.eviction.evictor import EvictorState
from mlx_kv.cache.eviction.scores import Wants, find_score
from mlx_kv.cache.growth import SLOT_MULTIPLE, FixedStep, Geometric, Growth, Tapered
from mlx_kv.cache.layout import Budget, Row
from mlx_kv.cache.residual import ROOM
from mlx_kv.cache.state import DTYPES, Tensors, tensor_of_planes
from mlx_kv.files.decoding import Array, Count, Listed, Part, check_shape
from mlx_kv.settings import MOST_TOKENS

Signed = Annotated[int, Meta(ge=-MOST_TOKENS, le=MOST_TOKENS)]
GROWTH_RULES: dict[str, type[Tapered | Geometric | FixedStep]] = {
    "tapered": Tapered,
    "geometric": Geometric,
    "fixed_step": FixedStep,
}


# --- the file ---------------------------------------------------------------------------------------------------------


class BlockColumn(Part):
    """The blocks of the arrays of these names, in the order of their slots: the name and the slots of each."""

    arrays: list[str]
    blocks: list[tuple[str, Annotated[int, Meta(gt=0, le=MOST_TOKENS)]]]


class Description(Part):
    """The contents of a file other than arrays.

    Attributes:
        caches: each an `OwnCache`, `CacheList` or `StockCache`, decoded when their arrays are there.
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


class Observed(Listed):
    """Attention that an evictor has observed; see `ObservedState`."""

    rows: list[tuple[Count, Count, Count, Count]]
    scale: float
    sinks: Array | None
    queries: Array | None
    sums: Any = None  # these five: of scores that were removed in 0.4
    received: Any = None
    counts: Any = None
    mean: Any = None
    spread: Any = None

    def check(self, wants: Wants | None, rows: Sequence[Row], heads: int) -> None:
        """Raises ValueError unless it can have been observed in these rows, for a score with these wants."""
        if wants is None or not wants.observes or self.scale == 0 or len(self.rows) != len(rows):
            raise ValueError("observed attention of other rows, or that its score does not use")
        for row, (since, end, held, _) in zip(rows, self.rows, strict=True):
            if not (held <= end - since and end <= max(0, row.offset)):
                raise ValueError("observed queries of other tokens")
        sizes = {"B": len(rows), "H": heads}
        check_shape(self.queries, "B Hq n D", sizes)
        check_shape(self.sinks, "Hq", sizes)
        held = max(held for _, _, held, _ in self.rows)
        if (self.queries is None) != (held == 0) or sizes.get("n", 0) < held or sizes.get("Hq", 0) % heads:
            raise ValueError("observed queries of other heads or tokens")


WorkRow = tuple[Count, Count, Annotated[float, Meta(ge=0)]]


class Eviction(Listed):
    """The state of an evictor; see `EvictorState`."""

    score: str
    share: Scope
    layer: Count
    groups: list[str]
    positions: Array | None
    scores: Array | None
    work: Annotated[list[WorkRow | int | float], Meta(min_length=1)]  # 0.1.0: one row, for all rows together
    dead: Array | None = None
    layers: str | list[list[float]] = "uniform"
    observed: Observed | None = None
    reread: list[tuple[Count, Array] | None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.work[0], tuple):
            msgspec.convert(self.work, WorkRow)
        elif len(self.work) != len(self.groups) or not all(isinstance(row, tuple) for row in self.work):
            raise ValueError("the work of other rows")

    @property
    def state(self) -> EvictorState:
        """As the cache takes it."""
        observed = None if self.observed is None else astuple(self.observed)[:4]
        return EvictorState(**asdict(self) | {"observed": observed})

    def check(self, layout: Budget, rows: Sequence[Row], heads: int | None) -> None:
        """Raises ValueError unless an evictor of these rows can have this state.

        Args:
            heads: H; None before the first update.
        """
        score, table = find_score(self.score), checked_allocation(self.share, self.layers)
        if len(self.groups) not in (1, len(rows)):
            raise ValueError("layer groups of other rows")
        if not isinstance(table, str) and ([*map(list, table)] != self.layers or self.layer >= len(table)):
            raise ValueError("a table of budgets whose mean is not 1, or of fewer layers")
        cuts = [layout.cut_of(row) for row in rows if row.evicted > 0]
        if cuts and (self.positions is None or (score.per_token and self.scores is None)):
            raise ValueError("evicted tokens without the positions or the scores of the others")
        if heads is None:
            if any(x is not None for x in (self.positions, self.scores, self.dead, self.observed, self.reread)):
                raise ValueError("the state of an evictor of tokens, but no tokens")
            return
        # Rows that have evicted nothing have no positions, and their cut may be after those of others.
        for array, dtype in ((self.positions, mx.int32), (self.scores, mx.float32)):
            sizes = {"B": len(rows), "H": heads if self.share in BY_HEAD else 1}
            check_shape(array, "B H n", sizes, dtype)
            if sizes.get("n", MOST_TOKENS) < max(cuts, default=0):
                raise ValueError("positions or scores of other tokens")
        if self.positions is not None:
            first, last = mx.min(self.positions).item(), mx.max(self.positions).item()
            if not 0 <= first <= last <= max(row.offset for row in rows):  # type: ignore[operator]
                raise ValueError("positions that the rows do not have")
        self._check_dead(layout, rows, heads, table)
        if self.observed is not None:
            self.observed.check(score.wants, rows, heads)
        if self.reread is not None and len(self.reread) != len(rows):
            raise ValueError("a second reading of other rows")
        for row, own in zip(rows, self.reread or (), strict=False):
            sizes = {"H": heads}
            check_shape(own and own[1], "H n", sizes, mx.float32)
            if own and not 0 < sizes["n"] <= row.offset - own[0]:
                raise ValueError("a second reading of tokens that its row does not have")

    def _check_dead(self, layout: Budget, rows: Sequence[Row], heads: int, allocation: Allocation) -> None:
        """How many slots before the cut hold no token of a head."""
        uneven = uneven_heads(self.share, allocation)
        exact = allocation == "uniform"  # the heads of each layer hold its budget on average
        if self.dead is None:
            lost = any(row.extra_slots if exact else row.evicted > 0 for row in rows)
            if lost and (exact or uneven):
                raise ValueError("heads of different lengths without their lengths")
            return
        check_shape(self.dead, "B H", {"B": len(rows), "H": heads}, mx.int32)
        if not uneven:
            raise ValueError("lengths of heads that all have one length")
        gaps: list[list[int]] = self.dead.tolist()  # type: ignore[assignment]
        for row, own in zip(rows, gaps, strict=True):
            fits = 0 == min(own) <= max(own) <= layout.cut_of(row) - layout.sinks
            if row.evicted > 0 and not (fits and (not exact or sum(own) == heads * row.extra_slots)):
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
    found = []
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
        found.append((head_dim, dtype))
    if len({plane.shape[:3] for plane in (*keys, *values)}) != 1 or 0 in keys[0].shape[:2]:
        raise ValueError("keys and values of different shapes")
    return found


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


class OwnState(Listed):
    """The part of a cache that 0.1.0 knew as its state.

    Attributes:
        rows: the numbers of each `Row`, without a last 0.
        ranges: the slots [first, last) that the last fetch was made of.
        layout: its `parameters`.
        bits, group_size: of an affine codec; None for plain tensors and for those with `OwnCache.codecs`.
        quantized_start, packed_decode, packed: as in `CacheState`.
        eviction: of a budget.
    """

    rows: Annotated[list[Annotated[list[Signed], Meta(min_length=4, max_length=5)]], Meta(min_length=1)]
    ranges: list[tuple[Count, Count]]
    layout: list[str | Count]
    bits: int | None
    group_size: int | None
    quantized_start: Count
    packed_decode: bool
    packed: bool
    eviction: Eviction | None


class OwnCache(Part, tag_field="kind", tag="mlx-kv"):
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
    state: OwnState
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
    """A cache of mlx-lm's; the type of the state of each kind is in `stock_files.STATES`."""

    kind: str
    state: list[Any]
