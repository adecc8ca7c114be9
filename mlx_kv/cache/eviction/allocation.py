"""How the tokens of a budget are shared out among the layers and heads of a model.

The option `share` says which tokens are kept together, `layers` how many each layer keeps: as many as all others, fewer
from layer to layer (a pyramid), as many as a ranking of all tokens leaves it, or as many as a table says. A table has a
share for each head of each layer. Counts by a pyramid or a table follow from it, from the budget, and from the number
of tokens read so far alone, so each layer finds its own without asking others. Integers only.
L layers of full attention, H KV heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, get_args

# The same tokens in all layers; in each layer its own; in each head its own, and of those either as many as in all
# others, or those that matter most among the tokens of all heads.
Granularity = Literal["layers", "layer", "head", "adaptive"]
BY_HEAD: tuple[Granularity, ...] = ("head", "adaptive")

# All layers keep as many tokens; the lower ones more; or as many as one ranking of all heads of all layers leaves them.
LayerBudgets = Literal["uniform", "pyramid", "global"]
HeadBudgets = tuple[tuple[float, ...], ...]  # (L, H) or (L, 1), multiples of the mean, which is 1
# Of these names, or as many in each head of each layer as a table says.
Allocation = LayerBudgets | HeadBudgets

DIGITS = 6  # that a share is rounded to, so that a table read from a file is the same
STEEPNESS = 20  # of a pyramid: the mean, divided by the budget of the last layer; the number of the paper


def check_granularity(share: object, layers: object = "uniform") -> None:
    """Raises ValueError for what `share` or `layers` does not take, or for two values that don't go together."""
    if not isinstance(share, str) or share not in get_args(Granularity):
        raise ValueError(f"share is {share!r}: choose one of {', '.join(get_args(Granularity))}")
    if isinstance(layers, str):
        if layers not in get_args(LayerBudgets):
            raise ValueError(
                f"layers is {layers!r}: choose one of {', '.join(get_args(LayerBudgets))}, or give a table"
            )
        name = repr(layers)
    else:
        head_budgets(layers)  # type: ignore[arg-type]
        name = "a table"
    if layers != "uniform" and share == "layers":
        raise ValueError(
            f"layers is {name}, but share='layers' keeps the same tokens in all of them: use share='layer', 'head' "
            "or 'adaptive'"
        )
    if layers == "global" and share != "adaptive":
        raise ValueError("layers is 'global', one ranking of the tokens of all heads: use share='adaptive' with it")


# --- a pyramid --------------------------------------------------------------------------------------------------------


def layer_budget(mean: int, layer: int, layers: int, least: int) -> int:
    """Tokens of one of so many layers in a pyramid; the sum over all of them is layers * mean.

    After PyramidKV (Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
    Funneling"): lower layers look at many tokens, upper ones at few. Linearly fewer from layer to layer, the last has a
    twentieth of the mean, and all together as much as if each had the mean.

    Args:
        mean: tokens of a layer on average, at least `least`.
        least: tokens that every layer needs.
    """
    if 2 * layer + 1 == layers:
        return mean
    if 2 * layer >= layers:  # the other half of the pyramid: what one layer gets over the mean, another gives
        return 2 * mean - layer_budget(mean, layers - 1 - layer, layers, least)
    last = max(mean / STEEPNESS, least)
    return round(2 * mean - last - layer * 2 * (mean - last) / (layers - 1))


# --- a table ----------------------------------------------------------------------------------------------------------


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
