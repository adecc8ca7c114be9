"""How the tokens of a budget are shared out among the layers and heads of a model when shares are fixed ahead.

A table has a share for each head of each layer. Counts follow from it, from the budget, and from the number of tokens
read so far alone, so each layer finds its own without asking others. Integers only.
L layers of full attention, H KV heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

HeadBudgets = tuple[tuple[float, ...], ...]  # (L, H) or (L, 1), multiples of the mean, which is 1

DIGITS = 6  # that a share is rounded to, so that a table read from a file is the same


def head_budgets(table: Sequence[Sequence[float]]) -> HeadBudgets:
    """A table of shares, divided by its mean.

    Args:
        table: (L, H), or (L, 1) where the heads of a layer have as many; only proportions matter.

    Raises:
        ValueError: something else.
    """
    try:
        rows = tuple(tuple(float(number) for number in row) for row in table)
    except (TypeError, ValueError):
        rows = ()
    numbers = [number for row in rows for number in row]
    if not numbers or len(set(map(len, rows))) != 1 or not all(0 <= x < math.inf for x in numbers):
        raise ValueError(
            "a table of budgets has a row for each layer of full attention, and in it a number from 0 up for each KV "
            "head, or one for all of them"
        )
    mean = sum(numbers) / len(numbers)
    if not 0 < mean < math.inf:
        raise ValueError("a table of budgets needs a number above 0")
    if abs(mean - 1) <= 10.0**-DIGITS:  # it was divided and rounded before: it stays the same
        mean = 1.0
    return tuple(tuple(round(number / mean, DIGITS) for number in row) for row in rows)


def by_layer(table: HeadBudgets) -> HeadBudgets:
    """(L, 1): the mean of each layer, for heads that keep the same tokens."""
    return head_budgets([[sum(row) / len(row)] for row in table])


@lru_cache(maxsize=256)
def token_counts(table: HeadBudgets, mean: int, most: int) -> tuple[tuple[int, ...], ...]:
    """(L, H): how many tokens each head keeps. The sum is exactly L * H * mean.

    Shares are proportional to the table; a head that is given more than there are keeps all, and the others share the
    rest. With more tokens read (a larger `most`), no head's count grows by more tokens than were read.

    Args:
        mean: tokens of a head on average.
        most: tokens that there are, at least `mean`.
    """
    flat = [share for row in table for share in row]
    order = sorted(range(len(flat)), key=lambda i: (-flat[i], i))
    total, rest, full = len(flat) * mean, math.fsum(flat), 0
    while full < len(flat) and flat[order[full]] * (total - full * most) > most * rest:
        rest = math.fsum(flat[i] for i in order[full + 1 :])
        full += 1
    counts = [most] * len(flat)
    if left := order[full:]:
        free = total - full * most
        # Heads of no share get some only where all others keep everything.
        wanted = [free * flat[i] / rest if rest > 0 else free / len(left) for i in left]
        whole = [min(most, int(x)) for x in wanted]
        by_rest = sorted(range(len(left)), key=lambda j: (whole[j] - wanted[j], j))
        missing = free - sum(whole)
        while missing > 0:  # once round, but for rounding in the last digits
            for j in by_rest:
                if missing > 0 and whole[j] < most:
                    whole[j], missing = whole[j] + 1, missing - 1
        for i, count in zip(left, whole, strict=True):
            counts[i] = count
    width = len(table[0])
    return tuple(tuple(counts[first : first + width]) for first in range(0, len(flat), width))


def most_together(table: HeadBudgets, layer: int, mean: int) -> int:
    """The most tokens that all heads of one layer ever keep together, however many are read; see `token_counts`.

    While some heads keep all tokens, what a layer has is linear in the tokens read: it is largest where a head stops.
    """
    flat, own = Counter(each for row in table for each in row), Counter(table[layer])
    heads, total = own.total(), flat.total() * mean
    found, rest, own_rest = float(heads * mean), math.fsum(flat.elements()), math.fsum(own.elements())
    full = own_full = 0  # heads with more than a share, of all and of this layer
    for share in sorted([each for each in flat if each > 0], reverse=True):
        read = total / (full + rest / share)  # so many tokens: from there on heads of this share keep fewer than all
        found = max(found, read * (own_full + own_rest / share))
        count, own_count = flat[share], own[share]
        full, own_full = full + count, own_full + own_count
        rest, own_rest = max(0.0, rest - count * share), max(0.0, own_rest - own_count * share)
    return math.ceil(found) + heads


def most_tokens(table: HeadBudgets, layer: int, mean: int) -> int:
    """The most tokens that a head of one layer ever keeps, however many are read; see `token_counts`.

    A head keeps all tokens until its share of what fuller heads leave is smaller; from then on fewer.
    """
    share = max(table[layer])
    flat = [each for row in table for each in row]
    if share <= 0:  # they share what is left where all others keep everything
        return mean
    larger = sum(each > share for each in flat)
    others = math.fsum(each for each in flat if each <= share)
    return math.ceil(len(flat) * mean / (larger + others / share)) + 1
