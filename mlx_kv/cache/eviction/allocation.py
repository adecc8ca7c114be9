"""Allocation of a budget to the layers and heads of a model.

The scope (option `share`) is which layers and heads keep the same tokens. The layer allocation (option `layers`) is how
many tokens each layer keeps: the same number in all, or the shares of a table, one for each head of each layer. Counts
by a table follow from the budget and the number of tokens read so far, so layers need not be compared. Integers only.
L layers of full attention, H KV heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, get_args

from mlx_kv.settings import SettingError, removed

# All layers keep the same tokens; each layer its own; each head its own, all the same number; or each head its own, by
# one ranking of the tokens of all heads.
Scope = Literal["layers", "layer", "head", "adaptive"]
BY_HEAD: tuple[Scope, ...] = ("head", "adaptive")

HeadBudgets = tuple[tuple[float, ...], ...]  # (L, H) or (L, 1), multiples of the mean, which is 1
Allocation = Literal["uniform"] | HeadBudgets  # all layers keep the same number, or a table
LayerAllocation = Allocation | Literal["calibrated"]  # of a policy, before the calibration of a model is known
# Allocations that were removed in 0.4, and what to use instead.
REMOVED = dict.fromkeys(("pyramid", "global"), "{layers:='calibrated'}, with a calibration (mlx-kv calibrate)")

DIGITS = 6  # that a share is rounded to, so that a table read from a file is the same


def checked_allocation(share: object, layers: str | Sequence[Sequence[float]] = "uniform") -> Allocation:
    """The allocation of the option `layers`, a table as `head_budgets` returns it.

    Raises:
        ValueError: unknown values of the options `share` or `layers`, or two that cannot be combined.
    """
    if not isinstance(share, str) or share not in get_args(Scope):
        raise SettingError("{share:is}: choose one of {}", ", ".join(get_args(Scope)), share=share)
    if isinstance(layers, str):
        if layers in REMOVED:
            raise removed("layers", layers, REMOVED[layers])
        if layers != "uniform":
            raise SettingError("{layers:is}: choose one of uniform, calibrated, or give a table", layers=layers)
        allocation: Allocation = "uniform"
    else:
        allocation = head_budgets(layers)
    if allocation != "uniform" and share == "layers":
        raise SettingError(
            "{layers} is a table, but {share:='layers'} keeps the same tokens in all of them: use {share:='layer'}, "
            "'head' or 'adaptive'"
        )
    return allocation


# --- a table ----------------------------------------------------------------------------------------------------------


def head_budgets(table: Sequence[Sequence[float]]) -> HeadBudgets:
    """A table of shares, divided by its mean.

    Args:
        table: (L, H), or (L, 1) where the heads of a layer have as many; only proportions matter.

    Raises:
        ValueError: not such a table.
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
    if abs(mean - 1) <= 10.0**-DIGITS:  # it was normalised before, and stays the same
        mean = 1.0
    return tuple(tuple(round(number / mean, DIGITS) for number in row) for row in rows)


def table_of(scope: Scope, allocation: Allocation) -> HeadBudgets | None:
    """The shares of what keeps its own tokens, (L, H) or (L, 1); None where they are not fixed."""
    if isinstance(allocation, str):
        return None
    # Heads that keep the same tokens have the mean of their layer.
    return head_budgets([[sum(row) / len(row)] for row in allocation]) if scope == "layer" else allocation


def uneven_heads(scope: Scope, allocation: Allocation) -> bool:
    """Whether heads of one layer may keep different numbers of tokens."""
    return scope == "adaptive" or (scope == "head" and not isinstance(allocation, str))


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
        exact = [free * flat[i] / rest if rest > 0 else free / len(left) for i in left]
        whole = [min(most, int(x)) for x in exact]
        by_rest = sorted(range(len(left)), key=lambda j: (whole[j] - exact[j], j))
        missing = free - sum(whole)
        while missing > 0:  # once round, but for rounding in the last digits
            for j in by_rest:
                if missing > 0 and whole[j] < most:
                    whole[j], missing = whole[j] + 1, missing - 1
        for i, count in zip(left, whole, strict=True):
            counts[i] = count
    width = len(table[0])
    return tuple(tuple(counts[first : first + width]) for first in range(0, len(flat), width))


def max_layer_tokens(table: HeadBudgets, layer: int, mean: int) -> int:
    """The largest number of tokens that all heads of one layer keep together, however many are read (`token_counts`).

    While some heads keep all tokens, it is linear in the tokens read; it is largest where a head stops keeping all.
    """
    flat, layer_shares = Counter(each for row in table for each in row), Counter(table[layer])
    heads, total = layer_shares.total(), flat.total() * mean
    largest, rest, own_rest = float(heads * mean), math.fsum(flat.elements()), math.fsum(layer_shares.elements())
    full = own_full = 0  # heads with more than a share, of all and of this layer
    for share in sorted([each for each in flat if each > 0], reverse=True):
        read = total / (full + rest / share)  # so many tokens: from there on heads of this share keep fewer than all
        largest = max(largest, read * (own_full + own_rest / share))
        count, own_count = flat[share], layer_shares[share]
        full, own_full = full + count, own_full + own_count
        rest, own_rest = max(0.0, rest - count * share), max(0.0, own_rest - own_count * share)
    return math.ceil(largest) + heads


def max_head_tokens(table: HeadBudgets, layer: int, mean: int) -> int:
    """The largest number of tokens that a head of one layer keeps, however many are read (`token_counts`).

    A head keeps all tokens until its share of what fuller heads leave is smaller, and then fewer.
    """
    share = max(table[layer])
    flat = [each for row in table for each in row]
    if share <= 0:  # they share what is left where all others keep everything
        return mean
    larger = sum(each > share for each in flat)
    others = math.fsum(each for each in flat if each <= share)
    return math.ceil(len(flat) * mean / (larger + others / share)) + 1
