"""Caches as descriptions in JSON and named arrays, and back.

Only slots that hold tokens are stored, and what makes a loaded cache continue as the saved one would: rows, settings,
capacity, the growth rule, the state of the evictor. A description may be made up: what is restored was checked to be
consistent, and is described in the same way again.
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
from msgspec.structs import astuple

from mlx_kv.cache.codecs import PLAIN, affine_of, are_plain
from mlx_kv.cache.eviction.evictor import EvictorState
from mlx_kv.cache.growth import DEFAULT, Growth, round_up
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import NO_LIMIT, Budget, Layout, Row, make_layout
from mlx_kv.cache.residual import Residual
from mlx_kv.cache.state import DTYPES, CacheState, Tensors, in_state
from mlx_kv.files.decoding import INVALID, decode, in_one_line, take
from mlx_kv.files.schema import GROWTH_RULES, CacheList, OwnCache, StockCache, StoredResidual, check_planes
from mlx_kv.files.stock_files import STATES

# --- describing -------------------------------------------------------------------------------------------------------


def describe(cache: Any, name: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """A cache in JSON; its arrays are added to `arrays`, under names that begin with `name`.

    Raises:
        ValueError: a cache of an unknown kind.
    """
    if isinstance(cache, KVCache):
        return _describe_own(cache, name, arrays)
    if type(cache) is stock.CacheList:
        members = [describe(member, f"{name}.{index}", arrays) for index, member in enumerate(cache.caches)]
        return {"kind": "list", "members": members}
    kind = stock.ArraysCache if isinstance(cache, stock.ArraysCache) else type(cache)  # also one with checkpoints
    if kind in STATES:
        return {"kind": kind.__name__, "state": _named(cache.state, name, arrays)}
    raise ValueError(f"cache {name} is a {type(cache).__name__}, which no file can hold: use mlx_kv.make_prompt_cache")


def _describe_own(cache: KVCache, name: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    state, view = cache.state, cache.view
    live = [_live_slots(row, view.layout) for row in view.rows]
    planes = {}
    for which, tensor in (("keys", state.keys), ("values", state.values)):
        for index, plane in enumerate(tensor or ()):  # (B, H, C, width)
            for row, used in enumerate(live):
                arrays[f"{name}.{which}.{index}.{row}"] = plane[row, :, :used]  # (H, n, width)
        planes[which] = len(tensor or ())
    affine = affine_of(view.codecs)
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
        "growth": _growth_rule(view.growth),
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
    """Four numbers, as in 0.1.0, where all heads hold as many tokens."""
    return list(row)[: 5 if row.extra_slots else 4]


def _live_slots(row: Row, layout: Layout) -> int:
    return min(max(0, row.end), layout.most_slots)


def _short_eviction(state: EvictorState) -> list[Any]:
    """The fields of 0.1.0, and later ones up to the last that differs from its default."""
    defaults = [state.dead is None, state.layers == "uniform", state.observed is None, state.reread is None]
    while defaults and defaults[-1]:
        defaults.pop()
    return list(state)[: len(EvictorState._fields) - 4 + len(defaults)]


def _growth_rule(growth: Growth) -> dict[str, Any] | None:
    for name, rule in GROWTH_RULES.items():
        if type(growth) is rule:
            return {"rule": name, "settings": asdict(growth)}
    return None


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
        return _restore_own(tree, name, arrays, memory)
    if kind == "list":
        members = enumerate(decode(tree, CacheList).members)
        restored = [_restore(each, f"{name}.{index}", arrays, memory) for index, each in members]
        return stock.CacheList(*restored)  # type: ignore[no-untyped-call]
    cls = next((cls for cls in STATES if cls.__name__ == kind), None)
    if cls is None:
        raise ValueError(f"a cache of unknown kind {str(kind)[:40]!r}")
    return cls.from_state(astuple(decode(decode(tree, StockCache).state, STATES[cls], arrays)))


def _restore_own(tree: Any, name: str, arrays: dict[str, mx.array], memory: MemoryLimit) -> KVCache:
    given = decode(tree, OwnCache, arrays)
    state, live = given.state, given.live
    layout = make_layout(*state.layout)  # type: ignore[arg-type]
    if list(layout.parameters) != state.layout:
        raise ValueError("a layout with other parameters than it is made with")
    rows = tuple(_row(layout, numbers) for numbers in state.rows)
    if given.name != name or live != [_live_slots(row, layout) for row in rows]:
        raise ValueError("a cache of another name, or live slots of other rows")
    codecs, tensors, encoded = given.find_codecs()
    growth = DEFAULT if given.growth is None else given.growth.make()
    announced = tuple(given.announced or [0] * len(rows))
    capacity, needed = given.capacity, min(max(live) + 1, layout.most_slots)
    if given.stored and needed > capacity:
        capacity = round_up(max(needed, growth.capacity(needed, capacity)))
    if not all(first < last <= (capacity if given.stored else NO_LIMIT) for first, last in state.ranges):
        raise ValueError("slots beyond its capacity")

    next_capacity = max(capacity, min(max(given.reserve, *announced), layout.enough_slots))
    stored = {"keys": given.planes.keys, "values": given.planes.values}
    keys, values = (
        [[take(arrays, f"{name}.{which}.{index}.{row}") for row in range(len(rows))] for index in range(count)]
        for which, count in stored.items()
    )
    for lines in (*keys, *values):  # of one plane, each (H, n, width)
        if len({(x.ndim, x.shape[0], x.shape[2], x.dtype) for x in lines}) != 1 or [x.shape[1] for x in lines] != live:
            raise ValueError("rows of different shapes")
        memory.take(len(lines) * math.prod(lines[0].shape[::2]) * lines[0].itemsize * next_capacity)
    heads = keys[0][0].shape[0] if given.stored else None
    if given.stored:
        first_rows = [[lines[0][None] for lines in planes] for planes in (keys, values)]
        tensors = check_planes(first_rows[0], first_rows[1], codecs if encoded else PLAIN, tensors)

    if isinstance(layout, Budget) == (state.eviction is None):
        raise ValueError("an evictor without a budget, or the other way round")
    if isinstance(layout, Budget) and state.eviction is not None:
        state.eviction.check(layout, rows, heads)
    residual = None
    if given.residual:
        residual = _restore_residual(given.residual, f"{name}.residual", arrays, rows, heads, tensors)
        memory.take(sum(x.nbytes for x in residual[-1]))
    cache = KVCache.from_state(
        CacheState(
            [_plane(lines, capacity) for lines in keys] or None,
            [_plane(lines, capacity) for lines in values] or None,
            list(rows),
            state.ranges,
            state.layout,
            in_state(codecs),
            tensors,
            encoded,
            state.quantized_start,
            state.packed_decode,
            state.packed,
            None if state.eviction is None else state.eviction.state,
            residual,
        ),
        growth=growth,
        reserved=given.reserve,
    )
    cache.announced = announced
    cache.lengths = None if given.lengths is None else tuple(given.lengths)
    return cache


def _restore_residual(
    given: StoredResidual,
    name: str,
    arrays: dict[str, mx.array],
    rows: Sequence[Row],
    heads: int | None,
    tensors: Tensors | None,
) -> list[Any]:
    """The state of a `Residual`; `heads` and `tensors` are None before the first update."""
    if given.stored != (tensors is not None) or (tensors is None and any(given.first)):
        raise ValueError("newest tokens without others, or the other way round")
    if tensors is None:
        return [given.length, given.room, given.first, []]
    ranges = [range(max(0, row.offset - given.length - given.room), max(0, row.offset) + 1) for row in rows]
    if len(given.first) != len(rows) or any(
        first not in allowed for first, allowed in zip(given.first, ranges, strict=True)
    ):
        raise ValueError("newest tokens of other rows")
    planes = [take(arrays, f"{name}.{index}") for index in range(2)]
    slots = Residual(given.length, given.room).slots + 1
    for plane, (head_dim, dtype) in zip(planes, tensors, strict=True):
        if plane.shape != (len(rows), heads, slots, head_dim) or plane.dtype != DTYPES[dtype]:
            raise ValueError("newest tokens of other shapes")
    return [given.length, given.room, given.first, planes]


def _row(layout: Layout, numbers: list[int]) -> Row:
    """Raises ValueError for a row that this layout cannot have."""
    row = Row(*numbers)
    start, offset, high, front, extra, shared = row
    fits = 0 <= front <= max(0, offset) <= high and (offset <= 0 or layout.most_trim(row) >= 0)
    if isinstance(layout, Budget):
        fits = fits and (row.evicted == 0 or (row.evicted > 0 and layout.cut_of(row) <= row.end and offset > 0))
        fits = fits and start <= 0 and (row.evicted > 0 or extra == 0) and layout.cut_of(row) >= layout.sinks
    else:
        fits = fits and start == extra == 0
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
