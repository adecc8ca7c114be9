"""Which rows of a batch have their slots in one buffer: the *capacity classes*.

Rows of one buffer all have as many slots as the longest of them, and attention reads as many. Rows of another class
have a buffer of their own, which costs each layer a few more calls a step. Decides from the slots that each row needs,
and from the classes that there are: what is good enough stays as it is. Works on integers only,
without arrays or layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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
def settled(needs: tuple[int, ...], held: Groups, coming: Groups, least_saved: int) -> Groups:
    """The classes of all rows, some of which come anew: with as few changes of those that there are as is good enough.

    Layers that stand alike ask for the same one after the other; it is worked out once.

    Args:
        needs: slots of each row, at least 1.
        held: the classes that there are; together with `coming`, they have every row once.
        coming: rows that come, and with whom.
        least_saved: slots that one class more has to save.
    """
    fresh = _made_anew(needs, least_saved)
    most = max(KEPT * sum(needs), held_slots(fresh, needs) + 2 * least_saved)
    for groups in (_each_where_it_fits(needs, held, coming), tuple(sorted((*held, *coming)))):
        if len(groups) <= len(fresh) and held_slots(groups, needs) <= most:
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
