"""The caches of a batch by the length of their rows: *capacity classes*, and how rows move between them.

Rows of one buffer all have as many slots as the longest of them, and attention reads as many. Rows of another class
have a buffer of their own, which costs each layer a few more calls a step. Decides from the slots that each row needs,
and from the classes that there are: what is good enough stays as it is. Works on integers only,
without arrays or layouts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.buffers import index_of, on_cpu
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import NO_LIMIT, Budget, enough_slots
from mlx_kv.cache.segments import Chain, read_from, sharable, shared_tokens
from mlx_kv.cache.state import cut_chain

# --- which rows are in one buffer -------------------------------------------------------------------------------------


# Each costs calls; lengths from 1 to any number that are spread evenly need 1.25 times their slots then.
MAX_CLASSES = 4
# Slots of classes, padding included, over those that their rows need: new classes stay below the first, and classes
# remain as they are up to the second. Between them nothing moves, so nothing flips.
TARGET_PADDING, MAX_PADDING = 1.25, 1.5

RowClass = tuple[int, ...]  # rows of one buffer, in rising order
RowClasses = tuple[RowClass, ...]


def padded_slots(classes: RowClasses, needed_slots: Sequence[int]) -> int:
    """Slots of all rows together, each padded to the longest of its class."""
    return sum(len(rows) * max(needed_slots[row] for row in rows) for rows in classes)


@lru_cache(maxsize=16)
def assign_classes(
    needed_slots: tuple[int, ...], current: RowClasses, joining: RowClasses, min_saving: int
) -> RowClasses:
    """The classes of all rows, some of which come anew: with as few changes of those that there are as is good enough.

    Layers that stand alike ask for the same one after the other; it is worked out once.

    Args:
        needed_slots: slots of each row, at least 1.
        current: the classes that there are; together with `joining`, they have every row once.
        joining: rows that come, and with whom.
        min_saving: slots that one class more has to save.
    """
    fewest = _fewest_classes(needed_slots, min_saving)
    limit = max(MAX_PADDING * sum(needed_slots), padded_slots(fewest, needed_slots) + 2 * min_saving)
    for classes in (_join_where_it_fits(needed_slots, current, joining), tuple(sorted((*current, *joining)))):
        if len(classes) <= len(fewest) and padded_slots(classes, needed_slots) <= limit:
            return classes
    return fewest


def _join_where_it_fits(needed_slots: Sequence[int], current: RowClasses, joining: RowClasses) -> RowClasses:
    """Each row that joins in the smallest class with room for it, and those that none has room for in a new one."""
    classes = [(max(needed_slots[row] for row in rows), list(rows)) for rows in current]
    new_class: list[int] = []
    for row in (row for rows in joining for row in rows):
        large_enough = [(size, rows) for size, rows in classes if size >= needed_slots[row]]
        (min(large_enough)[1] if large_enough else new_class).append(row)
    return tuple(sorted(tuple(sorted(rows)) for rows in (*(rows for _, rows in classes), new_class) if rows))


def _fewest_classes(needed_slots: Sequence[int], min_saving: int) -> RowClasses:
    """The fewest classes of all rows that are good enough, whatever classes there are."""
    sizes = sorted(set(needed_slots))
    counts = [needed_slots.count(size) for size in sizes]
    # By how many of the sizes they serve: the fewest slots that so many classes can hold, and the sizes of these.
    best: list[tuple[int, tuple[int, ...]]] = [
        (sum(counts[:n]) * sizes[n - 1], (sizes[n - 1],)) if n else (0, ()) for n in range(len(sizes) + 1)
    ]
    for _ in range(1, min(MAX_CLASSES, len(sizes))):
        one_more = [best[0]]
        for n in range(1, len(best)):
            cuts = [
                (best[cut][0] + sum(counts[cut:n]) * sizes[n - 1], (*best[cut][1], sizes[n - 1])) for cut in range(n)
            ]
            one_more.append(min(cuts))
        if best[-1][0] <= TARGET_PADDING * sum(needed_slots) or best[-1][0] - one_more[-1][0] < min_saving:
            break
        best = one_more
    classes: dict[int, list[int]] = {size: [] for size in best[-1][1]}
    for row, need in enumerate(needed_slots):
        classes[min(size for size in classes if size >= need)].append(row)
    return tuple(sorted(map(tuple, classes.values())))


# --- the caches of a batch --------------------------------------------------------------------------------------------

# The caches of a batch, which rows each has (`Parts`), and how rows move between them as `assign_classes` decides.
#
# Rows that stay together stay in place: only caches that rows leave or join are made anew. B rows.


# One class more, or one run of segments, costs each layer and step some ten calls, and has to save slots for it. On a
# CPU that is the time in which attention reads a thousand or two. On a GPU it is what the host needs for the calls: an
# H200 reads 100,000 slots of 8 KV heads of 128 meanwhile.
CPU_SAVING, MORE_CALLS, SLOT_BYTES = 2**11, 10, 4096
LARGE = 2**26  # bytes that are read and written to measure how fast that is


class Regrouping:
    """The parts of a batch after its rows changed classes.

    Attributes:
        interim_groups: layer groups of interim copies. A row that moves is copied twice: out of its part (the interim
            copy), and into the next. Layers of one sequence find one another by what they are copies of (`LayerGroup`),
            which is a weak reference; so these must live until all layers of the batch have moved, which is before its
            next step.
    """

    def __init__(self, parts: Sequence[Part], classes: RowClasses, current: int) -> None:
        """
        Args:
            parts: with every row once.
            classes: which rows are to be together.
            current: the number of parts that are in the batch; those after them join it, and are copied.
        """
        self.interim_groups: list[object] = []
        merged = [self._merge(parts, set(rows), parts[:current]) for rows in classes]
        if len(merged) == 1:  # it serves the model alone: its rows are those of the batch, in their order
            cache, rows, _ = merged[0]
            cache.filter(sorted(range(len(rows)), key=rows.__getitem__))
            merged = [part_of(cache, range(len(rows)))]
        self.parts = Parts(merged)

    def _merge(self, parts: Sequence[Part], rows: set[int], current: Sequence[Part]) -> Part:
        """The part of one class: a current one in place if it has these rows, else a copy."""
        for part in current:
            if set(part.rows) == rows:
                return part
        chosen = [(part, [index for index, row in enumerate(part.rows) if row in rows]) for part in parts]
        caches = []
        for part, indices in chosen:
            if indices:
                cache = part.cache if len(indices) == len(part.rows) else part.cache.select(indices)
                if cache is not part.cache and cache.evictor is not None:
                    self.interim_groups.extend(cache.evictor.metadata.groups)
                caches.append(cache)
        return part_of(KVCache.merge(caches), [part.rows[index] for part, indices in chosen for index in indices])


def regroup(parts: Sequence[Part], current: int, lengths: Sequence[int] | None = None) -> Regrouping:
    """Puts every row into its class.

    Args:
        parts, current: as of `Regrouping`.
        lengths: tokens that come next, of each row of the batch.
    """
    needed_slots, classes = _needed_slots(Parts(parts), lengths), tuple([tuple(sorted(part.rows)) for part in parts])
    assigned = assign_classes(needed_slots, classes[:current], classes[current:], min_saving())
    return Regrouping(parts, assigned, current)


def regroup_to_share(parts: Sequence[Part], chains: Sequence[Chain], current: int, compacting: bool) -> Regrouping:
    """Puts every row into its class, after each reads as many tokens from segments as it may and as pays.

    Args:
        parts, current: as of `Regrouping`.
        chains: of each row.
        compacting: as of `sharable`.
    """
    if not any(chains):
        return regroup(parts, current)
    rows = {row: (cache, stand) for cache, rows, _ in parts for row, stand in zip(rows, cache.rows, strict=True)}
    now = [rows[row][1].shared for row in range(len(rows))]
    usable = [cut_chain(chain, sharable(*rows[row], compacting)) for row, chain in enumerate(chains)]
    targets = shared_tokens(usable, now, min_saving())
    stay, changed, unchanged = list[Part](), list[Part](), 0
    for number, part in enumerate(parts):
        staying = [index for index, row in enumerate(part.rows) if targets[row] == now[row]]
        for index in sorted(set(range(len(part.rows))) - set(staying)):
            row, single = part.rows[index], part.cache.select([index])
            read_from(chains[row], single, targets[row])
            changed.append(part_of(single, [row]))
        if staying and len(staying) < len(part.rows):
            part = part_of(part.cache.select(staying), [part.rows[index] for index in staying])
            changed.append(part)
        elif staying:
            stay.append(part)
            unchanged += number < current
    regrouping = regroup([*stay, *changed], unchanged)
    for cache, _, _ in changed:
        if cache.evictor is not None:
            regrouping.interim_groups.extend(cache.evictor.metadata.groups)
    return regrouping


def regroup_growing(parts: Parts, new: int) -> Parts:
    """The parts before a write of `new` tokens: rows that outgrow their class move on alone, where that is worth it.

    For rows that grow without end (`room_in`).
    """
    needs = list(_needed_slots(parts))
    staying, growing = [], []
    for cache, rows, _ in parts:
        capacity = cache.capacity
        ends = {row: stand.end + new for row, stand in zip(rows, cache.rows, strict=True)}
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
    if not growing or assign_classes(tuple(needs), parts.classes, (), min_saving()) == parts.classes:
        return parts
    classes = assign_classes(tuple(needs), tuple(staying), tuple(growing), min_saving())
    return Regrouping(tuple(parts), classes, len(parts)).parts


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
            left.extend([layout.compaction_limit + 1 - layout.visible_tokens(row) for row in cache.rows if row.shared])
    return min(left)


def _needed_slots(parts: Parts, lengths: Sequence[int] | None = None) -> tuple[int, ...]:
    """Slots of each row, as far as it is known what will come."""
    needs = []
    for number, (cache, index) in enumerate(parts.places):
        row = cache.rows[index]
        end = row.end + (1 if lengths is None else lengths[number])
        announced = max(cache.reserved, cache.announced[index])
        needs.append(cache.round_up(max(1, min(max(end, announced), enough_slots(cache.layout, [row])))))
    return tuple(needs)


def min_saving() -> int:
    """Slots that one class more has to save."""
    if on_cpu():
        return CPU_SAVING
    return _agreed[-1] if _agreed else int(MORE_CALLS * bytes_in_a_call() / SLOT_BYTES)


def agree_on_saving(slots: int) -> None:
    """Sets what that is on a GPU: all processes of a model have to put rows together alike."""
    _agreed[:] = [slots]


_agreed: list[int] = []


@lru_cache(1)
def bytes_in_a_call() -> float:
    """Bytes that the device reads or writes in the time in which the host launches an operation; measured once."""

    def seconds(elements: int, count: int) -> float:
        """Of one of so many operations, one after the other."""
        tries = []
        for _ in range(4):  # the first one makes the kernel
            x = mx.zeros(elements, mx.uint8)
            mx.eval(x)
            started = time.perf_counter()
            for _ in range(count):
                x = x + 1
            mx.eval(x)
            tries.append((time.perf_counter() - started) / count)
        return min(tries)

    return seconds(1, 200) * 2 * LARGE / seconds(LARGE, 8)


class Part(NamedTuple):
    """One cache, and where its rows are in the batch.

    Attributes:
        rows: of the batch, by row of the cache.
        take: the same, to index an axis of the batch with.
    """

    cache: KVCache
    rows: RowClass
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
    def classes(self) -> RowClasses:
        """The rows of each, in rising order."""
        return tuple(sorted([tuple(sorted(part.rows)) for part in self._parts]))

    @cached_property
    def places(self) -> list[tuple[KVCache, int]]:
        """Of each row of the batch, its cache and which row of that it is."""
        by_row = {row: (part.cache, index) for part in self._parts for index, row in enumerate(part.rows)}
        return [by_row[row] for row in range(self.rows)]

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """(B, ...) of one array for each part, in the order of the batch."""
        together = outputs[0] if len(outputs) == 1 else mx.concatenate(list(outputs))
        return together if self._back is None else together[self._back]
