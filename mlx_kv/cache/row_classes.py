"""The caches of a batch by the length of their rows: *capacity classes*, and how rows move between them.

Rows of one buffer all have as many slots as the longest of them, and attention reads as many. Rows of another class
have a buffer of their own, which costs each layer a few more calls a step. Decides from the slots that each row needs,
and from the classes that there are: what is good enough stays as it is. Works on integers only,
without arrays or layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.buffers import index_of
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import NO_LIMIT, Budget, enough_slots
from mlx_kv.cache.segments import Chain, read_from, sharable, shared_tokens
from mlx_kv.cache.state import cut_chain

# --- which rows are in one buffer -------------------------------------------------------------------------------------


MOST_CLASSES = (
    4  # each costs calls; lengths from 1 to any number that are spread evenly need 1.25 times their slots then
)
# Slots that classes hold over those that their rows need: new ones are made to stay below the first, and stay as they
# are up to the second. Between them nothing moves, so nothing flips.
MADE, KEPT = 1.25, 1.5

Group = tuple[int, ...]  # rows, in rising order
Groups = tuple[Group, ...]


def held_slots(groups: Groups, needs: Sequence[int]) -> int:
    """Slots of all rows together, when each has those of the longest of its group."""
    return sum(len(group) * max(needs[row] for row in group) for group in groups)


@lru_cache(maxsize=16)
def assign_classes(needed_slots: tuple[int, ...], current: Groups, joining: Groups, min_saving: int) -> Groups:
    """The classes of all rows, some of which come anew: with as few changes of those that there are as is good enough.

    Layers that stand alike ask for the same one after the other; it is worked out once.

    Args:
        needed_slots: slots of each row, at least 1.
        current: the classes that there are; together with `joining`, they have every row once.
        joining: rows that come, and with whom.
        min_saving: slots that one class more has to save.
    """
    fresh = _made_anew(needed_slots, min_saving)
    most = max(KEPT * sum(needed_slots), held_slots(fresh, needed_slots) + 2 * min_saving)
    for groups in (_each_where_it_fits(needed_slots, current, joining), tuple(sorted((*current, *joining)))):
        if len(groups) <= len(fresh) and held_slots(groups, needed_slots) <= most:
            return groups
    return fresh


def _each_where_it_fits(needs: Sequence[int], held: Groups, coming: Groups) -> Groups:
    """Each row that comes in the smallest class that has room for it, and those that none has room for in a new one."""
    groups = [(max(needs[row] for row in group), list(group)) for group in held]
    alone: list[int] = []
    for row in (row for group in coming for row in group):
        fits = [(size, group) for size, group in groups if size >= needs[row]]
        (min(fits)[1] if fits else alone).append(row)
    return tuple(sorted(tuple(sorted(group)) for group in (*(group for _, group in groups), alone) if group))


def _made_anew(needs: Sequence[int], least_saved: int) -> Groups:
    """The fewest classes that are good enough."""
    sizes = sorted(set(needs))
    counts = [needs.count(size) for size in sizes]
    # By how many of the sizes they serve: the fewest slots that so many classes can hold, and the sizes of these.
    best: list[tuple[int, tuple[int, ...]]] = [
        (sum(counts[:n]) * sizes[n - 1], (sizes[n - 1],)) if n else (0, ()) for n in range(len(sizes) + 1)
    ]
    for _ in range(1, min(MOST_CLASSES, len(sizes))):
        one_more = [best[0]]
        for n in range(1, len(best)):
            cuts = [
                (best[cut][0] + sum(counts[cut:n]) * sizes[n - 1], (*best[cut][1], sizes[n - 1])) for cut in range(n)
            ]
            one_more.append(min(cuts))
        if best[-1][0] <= MADE * sum(needs) or best[-1][0] - one_more[-1][0] < least_saved:
            break
        best = one_more
    groups: dict[int, list[int]] = {size: [] for size in best[-1][1]}
    for row, need in enumerate(needs):
        groups[min(size for size in groups if size >= need)].append(row)
    return tuple(sorted(map(tuple, groups.values())))


# --- the caches of a batch --------------------------------------------------------------------------------------------

# The caches of a batch, which rows each has (`Parts`), and how rows move between them as `rule` decides.
#
# Rows that stay together stay in place: only caches that rows leave or join are made anew. B rows.


# Slots that one class more, or one run of segments, has to save, for what it costs: some ten calls in each layer and
# step. On a CPU that is the time in which attention reads a thousand slots or two. A GPU reads more of them meanwhile:
# on an H200, with 8 KV heads of 128, 30,000 saved slots cost time and 120,000 gain some (docs/performance.md). GPUs of
# Macs have a tenth of its bandwidth, so the number for them is lower; it was not measured.
LEAST_SAVED = {mx.DeviceType.cpu: 2**11, mx.DeviceType.gpu: 100_000 if mx.cuda.is_available() else 2**14}


class Moved:
    """The parts of a batch after a move.

    Attributes:
        passing: to be held until all layers of the batch have moved, which is before its next step. Layers of one
            sequence find one another by what they are copies of (`LayerGroup`), and rows that moved were copied twice:
            these are of the copies between.
    """

    def __init__(self, parts: Sequence[Part], groups: Groups, held: int) -> None:
        """
        Args:
            parts: with every row once.
            groups: which rows are to be together.
            held: so many of the parts are the batch's own; the others come, and are copied.
        """
        self.passing: list[object] = []
        made = [self._made(parts, set(group), parts[:held]) for group in groups]
        if len(made) == 1:  # it is asked as if it stood there alone: its rows are those of the batch, in their order
            cache, rows, _ = made[0]
            cache.filter(sorted(range(len(rows)), key=rows.__getitem__))
            made = [part_of(cache, range(len(rows)))]
        self.parts = Parts(made)

    def _made(self, parts: Sequence[Part], group: set[int], own: Sequence[Part]) -> Part:
        for part in own:
            if set(part.rows) == group:
                return part
        chosen = [(part, [index for index, row in enumerate(part.rows) if row in group]) for part in parts]
        pieces = [self._piece(part.cache, indices) for part, indices in chosen if indices]
        return part_of(KVCache.merge(pieces), [part.rows[index] for part, indices in chosen for index in indices])

    def _piece(self, cache: KVCache, chosen: list[int]) -> KVCache:
        if len(chosen) == len(cache.rows):
            return cache
        piece = cache.select(chosen)
        if piece.evictor is not None:
            self.passing.extend(piece.evictor.metadata.groups)
        return piece


def moved_to_classes(parts: Sequence[Part], held: int, lengths: Sequence[int] | None = None) -> Moved:
    """Every row in its class.

    Args:
        parts, held: as of `Moved`.
        lengths: tokens that come next, of each row of the batch.
    """
    together = Parts(parts)
    groups = [tuple(sorted(part.rows)) for part in parts]
    needs = _needs(together, lengths)
    return Moved(parts, assign_classes(needs, tuple(groups[:held]), tuple(groups[held:]), least_saved()), held)


def moved_to_share(parts: Sequence[Part], chains: Sequence[Chain], held: int, compacting: bool) -> Moved:
    """Every row in its class, after each reads as many tokens from segments as it may and as pays.

    Args:
        parts: with every row once; the first `held` of them are the batch's own.
        chains: of each row.
        compacting: as of `sharable`.
    """
    if not any(chains):
        return moved_to_classes(parts, held)
    rows = {row: (cache, own) for cache, rows, _ in parts for row, own in zip(rows, cache.rows, strict=True)}
    now = [rows[row][1].shared for row in range(len(rows))]
    usable = [cut_chain(chain, sharable(*rows[row], compacting)) for row, chain in enumerate(chains)]
    wanted = shared_tokens(usable, now, least_saved())
    stay, changed, kept = list[Part](), list[Part](), 0
    for number, part in enumerate(parts):
        staying = [index for index, row in enumerate(part.rows) if wanted[row] == now[row]]
        for index in sorted(set(range(len(part.rows))) - set(staying)):
            row, single = part.rows[index], part.cache.select([index])
            read_from(chains[row], single, wanted[row])
            changed.append(part_of(single, [row]))
        if staying and len(staying) < len(part.rows):
            part = part_of(part.cache.select(staying), [part.rows[index] for index in staying])
            changed.append(part)
        elif staying:
            stay.append(part)
            kept += number < held
    moved = moved_to_classes([*stay, *changed], kept)
    for cache, _, _ in changed:
        if cache.evictor is not None:
            moved.passing.extend(cache.evictor.metadata.groups)
    return moved


def moved_where_they_grow(parts: Parts, new: int) -> Parts:
    """The parts before a write of `new` tokens: rows that outgrow their class move on alone, where that is worth it.

    For rows that grow without end (`room_in`).
    """
    needs = list(_needs(parts))
    staying, growing = [], []
    for cache, rows, _ in parts:
        capacity = cache.capacity
        ends = {row: own.end + new for row, own in zip(rows, cache.rows, strict=True)}
        beyond = [row for row in sorted(rows) if ends[row] > capacity]
        announced = dict(zip(rows, cache.announced, strict=True))
        for row in beyond:
            if max(cache.reserved, announced[row]) < ends[row]:
                needs[row] = max(needs[row], cache.round_up(cache.growth.capacity(ends[row], capacity)))
        if len(beyond) < len(rows):
            growing.extend([tuple(beyond)] if beyond else [])
            staying.append(tuple([row for row in sorted(rows) if row not in beyond]))
        else:  # a class that grows as it is
            staying.append(tuple(beyond))
    as_it_is = assign_classes(tuple(needs), parts.groups, (), least_saved())
    if not growing or as_it_is == parts.groups:
        return parts
    return Moved(
        tuple(parts), assign_classes(tuple(needs), tuple(staying), tuple(growing), least_saved()), len(parts)
    ).parts


def room_in(parts: Parts) -> int:
    """Tokens that each row can take before one of them outgrows its class.

    No limit where rows stop growing, in rings and budgets (and layers of a budget change places between steps alone),
    and while prompts are read, for which room was made when they were announced.
    """
    rooms = [NO_LIMIT]
    for cache, _, _ in parts:
        if cache.layout.enough_slots == NO_LIMIT and cache.lengths is None:
            rooms.append(cache.capacity - max(0, *[row.end for row in cache.rows]))
    return min(rooms)


def tokens_before_eviction(parts: Parts) -> int:
    """Tokens that each row can surely take before a compaction of one that reads segments is due."""
    left = [NO_LIMIT]
    for cache, _, _ in parts:
        layout = cache.layout
        if isinstance(layout, Budget):
            left.extend([layout.most_held + 1 - layout.held(row) for row in cache.rows if row.shared])
    return min(left)


def _needs(parts: Parts, lengths: Sequence[int] | None = None) -> tuple[int, ...]:
    """Slots of each row, as far as it is known what will come."""
    needs = []
    for number, (cache, index) in enumerate(parts.places):
        row = cache.rows[index]
        end = row.end + (1 if lengths is None else lengths[number])
        announced = max(cache.reserved, cache.announced[index])
        needs.append(cache.round_up(max(1, min(max(end, announced), enough_slots(cache.layout, [row])))))
    return tuple(needs)


def least_saved() -> int:
    """Slots that one class more has to save."""
    return LEAST_SAVED[mx.default_device().type]


class Part(NamedTuple):
    """One cache, and where its rows are in the batch.

    Attributes:
        rows: of the batch, by row of the cache.
        take: the same, to index an axis of the batch with.
    """

    cache: KVCache
    rows: Group
    take: slice | mx.array


def part_of(cache: KVCache, rows: Iterable[int]) -> Part:
    rows = tuple(rows)
    return Part(cache, rows, index_of(rows))


class Parts:
    """All rows of a batch, each in one of the parts. It never changes; the caches do.

    Attributes:
        rows: how many.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = tuple(sorted(parts, key=lambda part: part.rows))
        order = [row for part in self._parts for row in part.rows]
        self.rows = len(order)
        # Where to find each row of the batch when those of the parts come one after the other; None is where it is.
        back = sorted(range(self.rows), key=order.__getitem__)
        self._back = None if order == sorted(order) else mx.array(back)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    @property
    def first(self) -> KVCache:
        """The cache of the first row."""
        return self._parts[0].cache

    @property
    def caches(self) -> tuple[KVCache, ...]:
        return tuple([part.cache for part in self._parts])

    @property
    def groups(self) -> Groups:
        """The rows of each, in rising order."""
        return tuple(sorted([tuple(sorted(part.rows)) for part in self._parts]))

    @cached_property
    def places(self) -> list[tuple[KVCache, int]]:
        """Of each row of the batch, its cache and which row of that it is."""
        found = {row: (part.cache, index) for part in self._parts for index, row in enumerate(part.rows)}
        return [found[row] for row in range(self.rows)]

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """(B, ...) of one array for each part, in the order of the batch."""
        together = outputs[0] if len(outputs) == 1 else mx.concatenate(list(outputs))
        return together if self._back is None else together[self._back]
