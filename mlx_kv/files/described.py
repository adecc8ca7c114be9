"""One cache in JSON and named arrays, and back.

Decides which slots of a cache are worth writing (those that hold tokens), and what else makes a loaded cache go on as
the saved one would have: rows, settings, capacity, the growth rule, what an evictor knows. A description may be made
up: what is restored was checked to be what a cache can be, and says the same of itself when it is described again.
Knows nothing about files.
B rows, H KV heads, n live slots of one row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import MOST_TOKENS
from mlx_kv.cache.codecs import PLAIN, Codecs, affine_of, are_plain, find_codec, find_codecs, packing_of, packings_of
from mlx_kv.cache.growth import DEFAULT, SLOT_MULTIPLE, FixedStep, Geometric, Growth, Tapered, round_up
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import NO_LIMIT, Budget, Layout, Row, make_layout
from mlx_kv.cache.state import CacheState, Tensors, tensor_told_by
from mlx_kv.files import stock_files
from mlx_kv.files.evictors import check_eviction, check_lists, eviction_in_short, whole
from mlx_kv.files.planes import check_planes
from mlx_kv.files.residuals import describe_residual, restore_residual

# What comes of a description that is none, beside the ValueErrors of the checks.
NOT_SO = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
GROWTHS: dict[str, type[Tapered] | type[Geometric] | type[FixedStep]] = {
    "tapered": Tapered,
    "geometric": Geometric,
    "fixed_step": FixedStep,
}
# What mlx-lm keeps itself, stored as it is: recurrent state, and caches that were never made ours.
AS_THEY_ARE = (
    stock.ArraysCache,
    stock.KVCache,
    stock.QuantizedKVCache,
    stock.RotatingKVCache,
    stock.ChunkedKVCache,
    stock.ConcatenateKVCache,
)
PARTS = {"kind", "name", "planes", "live", "capacity", "state", "growth", "reserve", "lengths"}


def describe(cache: Any, name: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """A cache in JSON; its arrays go to `arrays`, under names that begin with `name`.

    Raises:
        ValueError: a cache of an unknown kind.
    """
    if isinstance(cache, KVCache):
        return _describe_ours(cache, name, arrays)
    if type(cache) is stock.CacheList:
        members = [describe(member, f"{name}.{index}", arrays) for index, member in enumerate(cache.caches)]
        return {"kind": "list", "members": members}
    if isinstance(cache, stock.ArraysCache):  # also one that can go back: a file has what it is now
        return {"kind": stock.ArraysCache.__name__, "state": _in_json(cache.state, name, arrays)}
    if type(cache) in AS_THEY_ARE:
        return {"kind": type(cache).__name__, "state": _in_json(cache.state, name, arrays)}
    raise ValueError(f"cache {name} is a {type(cache).__name__}, which no file can hold: use mlx_kv.make_prompt_cache")


class Room:
    """The memory of this machine. A capacity is room that a file does not have: no more than there can be is taken."""

    def __init__(self) -> None:
        self.most = self.left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def take(self, size: int) -> None:
        """Raises ValueError if there is not so much."""
        self.left -= size
        if self.left < 0:
            raise ValueError(f"its caches would take more than the {self.most:,} bytes of this machine")


def restore(described: Sequence[dict[str, Any]], arrays: Mapping[str, mx.array]) -> list[Any]:
    """The caches that were described, of all of these arrays.

    Raises:
        ValueError, or another of NOT_SO: no caches are like that, or they are more than this machine has memory for.
    """
    left, room = dict(arrays), Room()
    caches = [_restore(each, str(index), left, room) for index, each in enumerate(described)]
    if left:
        raise ValueError(f"no cache has an array {next(iter(left))}")
    return caches


def _restore(described: dict[str, Any], name: str, arrays: dict[str, mx.array], room: Room) -> Any:
    """The cache that was described under this name."""
    kind = described["kind"]
    if kind == "mlx-kv":
        return _restore_ours(described, name, arrays, room)
    if kind == "list":
        _check_parts(described, {"kind", "members"})
        check_lists(described["members"])
        members = [_restore(each, f"{name}.{index}", arrays, room) for index, each in enumerate(described["members"])]
        return stock.CacheList(*members)  # type: ignore[no-untyped-call]
    _check_parts(described, {"kind", "state"})
    made: Any = next((cls for cls in AS_THEY_ARE if cls.__name__ == kind), None)
    if made is None:
        raise ValueError(f"nobody knows a {str(kind)[:40]!r}")
    state = _from_json(described["state"], name, arrays)
    stock_files.check_state(kind, state)
    return made.from_state(state)


def _check_parts(told: Mapping[str, Any], parts: set[str]) -> None:
    if told.keys() != parts:
        raise ValueError(f"a cache has {', '.join(sorted(parts))}, and nothing else")


def _describe_ours(cache: KVCache, name: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    told, view = cache.state, cache.view
    live = [min(max(0, row.end), view.layout.most_slots) for row in view.rows]
    planes = {}
    for which, tensor in (("keys", told.keys), ("values", told.values)):
        for index, plane in enumerate(tensor or ()):  # (B, H, C, width)
            for row, used in enumerate(live):
                arrays[f"{name}.{which}.{index}.{row}"] = plane[row, :, :used]  # (H, n, width)
        planes[which] = len(tensor or ())
    affine = affine_of(view.codecs)
    settings = (
        *((None, None) if affine is None else affine[:2]),
        told.quantized_start,
        told.packed_decode,
        told.packed,
    )
    rows, eviction = [in_short(row) for row in view.rows], told.eviction and eviction_in_short(told.eviction)
    state = [rows, told.ranges, told.layout, *settings, eviction]  # in the order of version 0.1.0
    described = {
        "kind": "mlx-kv",
        "name": name,
        "planes": planes,
        "live": live,
        "capacity": cache.capacity,
        "state": _in_json(state, f"{name}.state", arrays),
        "growth": _growth_in_json(view.growth),
        "reserve": view.reserved,
        "lengths": view.lengths,
    }
    if any(view.announced):
        described["announced"] = view.announced
    if affine is None and not are_plain(view.codecs):  # bits and a group size do not tell them
        described["codecs"] = {"codecs": told.codecs, "tensors": told.tensors, "encoded": told.encoded}
    if told.residual is not None:
        described["residual"] = describe_residual(told.residual, f"{name}.residual", arrays)
    return described


def _codecs(
    told: dict[str, Any] | None, bits: Any, group_size: Any, stored: bool
) -> tuple[Codecs, Tensors | None, bool | None]:
    """The codecs; head dims and dtypes, and whether planes are encoded yet, where more than the planes tells that.

    Args:
        stored: whether there are planes.
    """
    if told is None:
        codecs = find_codecs(bits, group_size)
        if bits is None and group_size is not None:
            raise ValueError("groups without bits")
        return codecs, None, None
    _check_parts(told, {"codecs", "tensors", "encoded"})
    (keys, its), (values, theirs) = told["codecs"]
    codecs = find_codec(keys, its), find_codec(values, theirs)
    if bits is not None or group_size is not None or affine_of(codecs) is not None or are_plain(codecs):
        raise ValueError("codecs that are told otherwise than such codecs are")
    if [[codec.name, codec.parameters] for codec in codecs] != told["codecs"]:
        raise ValueError(f"the codecs {keys} and {values} do not say of themselves what it says of them")
    if type(told["encoded"]) is not bool or (told["tensors"] is not None) != stored or told["encoded"] > stored:
        raise ValueError("tensors that there are not")
    tensors = None
    if stored:
        check_lists(told["tensors"], *told["tensors"])
        (key_dim, key_dtype), (value_dim, value_dtype) = told["tensors"]
        tensors = [(whole("a head dim", key_dim), key_dtype), (whole("a head dim", value_dim), value_dtype)]
    return codecs, tensors, told["encoded"]


def _restore_ours(described: dict[str, Any], name: str, arrays: dict[str, mx.array], room: Room) -> KVCache:
    _check_parts(described, PARTS | (described.keys() & {"announced", "codecs", "residual"}))
    _check_parts(described["planes"], {"keys", "values"})
    if described["name"] != name:
        raise ValueError(f"cache {name} says that it is another")
    state = _from_json(described["state"], f"{name}.state", arrays)
    rows, ranges, parameters, bits, group_size, quantized_start, packed_decode, packed, eviction = state
    check_lists(described["live"], state, rows, ranges, parameters, *rows, *ranges)
    layout = make_layout(parameters[0], *(whole("a number of a layout", number) for number in parameters[1:]))
    if list(layout.parameters) != parameters:
        raise ValueError("a layout that is told otherwise than layouts are")
    rows = tuple(_row(layout, row) for row in rows)
    live = [min(max(0, row.end), layout.most_slots) for row in rows]
    if not rows or described["live"] != live or not all(type(number) is int for number in described["live"]):
        raise ValueError("live slots that are not those of its rows")
    lengths = described["lengths"]
    if lengths is not None and (
        type(lengths) is not list or len(lengths) != len(rows) or min(whole("a length", one) for one in lengths) < 0
    ):
        raise ValueError("lengths of other rows")
    announced = described.get("announced", [0] * len(rows))
    check_lists(announced)
    if len(announced) != len(rows) or ("announced" in described and not max(whole("tokens", n) for n in announced)):
        raise ValueError("announced for other rows, or nothing")
    if not all(type(flag) is bool for flag in (packed_decode, packed)):
        raise ValueError("a yes or no that is neither")
    counts = [whole("planes", described["planes"][which]) for which in ("keys", "values")]
    stored = any(counts)
    codecs, tensors, encoded = _codecs(described.get("codecs"), bits, group_size, stored)
    if whole("quantized_start", quantized_start) and are_plain(codecs):
        raise ValueError("it is quantised later, but not to so many bits")
    encoded = stored and (are_plain(codecs) or counts[0] > 1) if encoded is None else encoded

    growth, reserve = _growth(described["growth"]), whole("reserve", described["reserve"])
    capacity, needed = whole("capacity", described["capacity"]), min(max(live) + 1, layout.most_slots)
    if not stored and max(live):
        raise ValueError("planes of no tensor")
    if capacity % SLOT_MULTIPLE or capacity < max(live) or stored != (capacity > 0):
        raise ValueError(f"a capacity of {capacity} slots")
    if stored and needed > capacity:
        capacity = round_up(max(needed, growth.capacity(needed, capacity)))
    end = capacity if stored else NO_LIMIT
    if not all(0 <= whole("a slot", first) < whole("a slot", last) <= end for first, last in ranges):
        raise ValueError("slots that are not there")
    if stored and not encoded and not quantized_start:
        raise ValueError("plain planes, but bits")
    if packed and not (encoded and packed_decode and (packing_of(codecs) or packings_of(codecs)) is not None):
        raise ValueError("packed planes that there are not")

    most = max(capacity, min(max(reserve, *announced), layout.enough_slots))  # which the next growth makes room for
    taken = [
        [[arrays.pop(f"{name}.{which}.{index}.{row}") for row in range(len(rows))] for index in range(count)]
        for which, count in zip(("keys", "values"), counts, strict=True)
    ]
    for which in taken:
        for lines in which:  # each (H, n, width)
            shapes = {(line.ndim, line.shape[0], line.shape[2], line.dtype) for line in lines}
            if len(shapes) != 1 or [line.shape[1] for line in lines] != live:
                raise ValueError("rows of different shapes")
            room.take(len(lines) * math.prod(lines[0].shape[::2]) * lines[0].itemsize * most)
    if stored:
        first_keys, first_values = ([lines[0][None] for lines in which] for which in taken)
        check_planes(first_keys, first_values, codecs if encoded else PLAIN, tensors)
    heads = taken[0][0][0].shape[0] if stored else None
    if isinstance(layout, Budget):
        check_eviction(layout, rows, heads, eviction)
    elif eviction is not None:
        raise ValueError("what evicts, without a budget")

    def plane(lines: list[mx.array]) -> mx.array:
        whole = mx.zeros((len(lines), lines[0].shape[0], capacity, lines[0].shape[2]), lines[0].dtype)
        for row, line in enumerate(lines):
            whole[row, :, : line.shape[1]] = line
        mx.eval(whole)
        return whole

    residual = None
    if "residual" in described:
        if are_plain(codecs):
            raise ValueError("newest tokens as they came, where all are")
        if stored and tensors is None:
            both = zip(codecs if encoded else PLAIN, (first_keys, first_values), strict=True)
            tensors = [tensor_told_by(codec, tuple(planes)) for codec, planes in both]
        offsets = [row.offset for row in rows]
        told = described["residual"]
        residual = restore_residual(told, f"{name}.residual", arrays, offsets, heads, tensors)
        room.take(sum(x.nbytes for x in residual[3]))
    keys, values = ([plane(lines) for lines in which] or None for which in taken)
    return KVCache.from_state(
        CacheState(
            keys,
            values,
            list(rows),
            ranges,
            parameters,
            [[codec.name, codec.parameters] for codec in codecs],
            tensors,
            encoded,
            quantized_start,
            packed_decode,
            packed,
            eviction,
            residual,
        ),
        growth=growth,
        reserved=reserve,
        announced=tuple(announced),
        lengths=None if lengths is None else tuple(lengths),
    )


def in_short(row: Row) -> list[int]:
    """Four numbers, as version 0.1.0 wrote it, where all heads hold as many tokens."""
    return list(row) if row.longer else list(row)[:4]


def _row(layout: Layout, told: Sequence[int]) -> Row:
    """Raises ValueError for where no row of this layout stands."""
    start, offset, high, front, longer = *told, *[0] * (len(Row._fields) - len(told))
    if list(told) != in_short(Row(start, offset, high, front, longer)):
        raise ValueError("a row that is told otherwise than rows are")
    if not all(type(number) is int and abs(number) <= MOST_TOKENS for number in told):
        raise ValueError("a row that stands nowhere")
    row = Row(start, offset, high, front, longer)
    stands = 0 <= front <= max(0, offset) <= high and (offset <= 0 or layout.most_trim(row) >= 0)
    if isinstance(layout, Budget):
        stands = stands and (row.evicted == 0 or (row.evicted > 0 and layout.cut_of(row) <= row.end and offset > 0))
        stands = stands and start <= 0 and (row.evicted > 0 or longer == 0) and layout.cut_of(row) >= layout.sinks
    else:
        stands = stands and start == longer == 0
    if not stands:
        raise ValueError(f"a row that stands at {told}")
    return row


def _growth(told: dict[str, Any] | None) -> Growth:
    if told is None:
        return DEFAULT
    _check_parts(told, {"rule", "settings"})
    growth = GROWTHS[told["rule"]](**told["settings"])
    settings = asdict(growth)
    if settings.keys() != told["settings"].keys():
        raise ValueError("a growth of other settings")
    for name, value in settings.items():
        if value is not None and not (name == "factor" and type(value) is float):
            whole(name, value)
    return growth


def _growth_in_json(growth: Growth) -> dict[str, Any] | None:
    """A rule of ours by its name; for another, the loaded cache has the default."""
    for name, rule in GROWTHS.items():
        if type(growth) is rule:
            return {"rule": name, "settings": asdict(growth)}
    return None


def _in_json(tree: Any, name: str, arrays: dict[str, mx.array]) -> Any:
    """Lists and scalars as they are; an array goes to `arrays`, and its name stays in its place."""
    if isinstance(tree, mx.array):
        arrays[name] = tree
        return {"array": name}
    if isinstance(tree, (list, tuple)):
        return [_in_json(item, f"{name}.{index}", arrays) for index, item in enumerate(tree)]
    return tree


def _from_json(tree: Any, name: str, arrays: dict[str, mx.array]) -> Any:
    """The other way round; each array is taken out of `arrays`."""
    if isinstance(tree, dict):
        if tree != {"array": name}:
            raise ValueError(f"an array that is not {name}")
        return arrays.pop(name)
    if isinstance(tree, list):
        return [_from_json(item, f"{name}.{index}", arrays) for index, item in enumerate(tree)]
    return tree
