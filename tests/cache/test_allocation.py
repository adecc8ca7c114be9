"""Tables of head budgets: how many tokens each head keeps, against tokens that are handed out one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kv.cache.eviction import allocation
from mlx_kv.cache.eviction.allocation import (
    DIGITS,
    HeadBudgets,
    head_budgets,
    max_head_tokens,
    max_layer_tokens,
    table_of,
    token_counts,
)

SHARE = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 1.0, 7.0]), st.floats(0, 20, allow_nan=False))


@st.composite
def any_tables(draw: st.DrawFn) -> list[list[float]]:
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    table = [[draw(SHARE) for _ in range(heads)] for _ in range(layers)]
    table[-1][-1] = max(table[-1][-1], 0.01)
    return table


tables = any_tables().map(head_budgets)
means = st.integers(1, 30)
ROUNDING = Fraction(1, 10**9)  # counts are worked out in floats


def slow_levels(table: HeadBudgets, mean: int, most: int) -> list[Fraction]:
    """What each head has, as a fraction: heads fill at the speed of their shares, and stop when they have all."""
    shares = [Fraction(round(share * 10**DIGITS)) for row in table for share in row]
    level, free = [Fraction(0)] * len(shares), Fraction(len(shares) * mean)
    while free:
        filling = [i for i, share in enumerate(shares) if share and level[i] < most]
        speeds = shares
        if not filling:  # heads of no share get what is left, alike
            filling, speeds = [i for i, share in enumerate(shares) if not share], [Fraction(1)] * len(shares)
        seconds = min(free / sum(speeds[i] for i in filling), *((most - level[i]) / speeds[i] for i in filling))
        for i in filling:
            level[i] += seconds * speeds[i]
            free -= seconds * speeds[i]
    return level


def check_counts(table: HeadBudgets, mean: int, more: int, counts: Callable[..., Any]) -> None:
    most = mean + more
    found = [count for row in counts(table, mean, most) for count in row]
    assert sum(found) == len(found) * mean
    assert 0 <= min(found) <= max(found) <= most
    wanted = slow_levels(table, mean, most)
    assert all(math.floor(level) <= count <= math.ceil(level) for count, level in zip(found, wanted, strict=True))
    rests = [level - math.floor(level) for level in wanted]
    more_than = [count > level for count, level in zip(found, wanted, strict=True)]
    up = [rest for rest, more in zip(rests, more_than, strict=True) if more]
    down = [rest for rest, more in zip(rests, more_than, strict=True) if not more]
    assert not up or min(up) >= max(down, default=0) - ROUNDING, "the largest remainders are rounded up"
    flat = [share for row in table for share in row]
    for share in set(flat):
        own = [count for count, other in zip(found, flat, strict=True) if other == share]
        assert own == sorted(own, reverse=True), "of the same share, the first heads"


@given(tables, means, st.integers(0, 200))
def test_each_head_has_its_share_of_exactly_the_budget(table: HeadBudgets, mean: int, more: int) -> None:
    check_counts(table, mean, more, token_counts)


@given(tables, means, st.integers(0, 100), st.integers(1, 9))
def test_no_head_needs_a_token_that_it_has_evicted(table: HeadBudgets, mean: int, more: int, read: int) -> None:
    before, after = (token_counts(table, mean, mean + n) for n in (more, more + read))
    for old, new in zip(before, after, strict=True):
        assert all(then <= now + read for now, then in zip(old, new, strict=True))


@given(any_tables())
def test_a_table_that_was_divided_by_its_mean_stays_the_same(table: list[list[float]]) -> None:
    found = head_budgets(table)
    assert head_budgets(found) == found
    assert head_budgets([list(row) for row in found]) == found
    numbers = [share for row in found for share in row]
    assert abs(sum(numbers) / len(numbers) - 1) <= 10**-DIGITS
    mean = sum(map(sum, table)) / len(numbers)
    assert numbers == [pytest.approx(share / mean, abs=2 * 10**-DIGITS) for row in table for share in row]


@given(tables)
def test_a_layer_has_the_mean_of_its_heads(table: HeadBudgets) -> None:
    found = table_of("layer", table)
    assert table_of("layer", found) == found
    for row, (share,) in zip(table, found, strict=True):
        assert share == pytest.approx(sum(row) / len(row), abs=2 * 10**-DIGITS)


@given(tables, st.integers(1, 12))
def test_bounds_are_never_exceeded_and_reached(table: HeadBudgets, mean: int) -> None:
    heads = len(table[0])
    every = [token_counts(table, mean, most) for most in range(mean, len(table) * heads * mean + 2)]
    for layer in range(len(table)):
        longest, together = (max(of(counts[layer]) for counts in every) for of in (max, sum))
        assert longest <= max_head_tokens(table, layer, mean) <= longest + 2
        assert together <= max_layer_tokens(table, layer, mean) <= together + 2 * heads


def test_a_layer_may_have_more_than_the_mean_of_its_heads_says() -> None:
    """A head that keeps all leaves tokens to the heads of another layer."""
    table = head_budgets([[2, 2], [4, 0]])
    assert table_of("layer", table) == ((1.0,), (1.0,))
    assert sum(token_counts(table, 300, 400)[0]) == 800
    assert max_layer_tokens(table, 0, 300) >= 800


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ([], "a table of budgets has a row"),
        ([[]], "a table of budgets has a row"),
        ([[1, 2], [3]], "a table of budgets has a row"),
        ([[1, -1]], "a number from 0 up"),
        ([[1, math.nan]], "a number from 0 up"),
        ([[1, math.inf]], "a number from 0 up"),
        ([["many"]], "a table of budgets has a row"),
        ([1, 2], "a table of budgets has a row"),
        (7, "a table of budgets has a row"),
        ([[0, 0], [0, 0]], "needs a number above 0"),
    ],
    ids=str,
)
def test_what_is_no_table_is_refused_in_one_line(table: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        head_budgets(table)
    assert "\n" not in str(caught.value)


# --- the tests above must be able to fail -----------------------------------------------------------------------------


def one_less(table: HeadBudgets, mean: int, most: int) -> list[list[int]]:
    counts = [list(row) for row in token_counts(table, mean, most)]
    counts[0][0] -= 1
    return counts


def not_shared_again(table: HeadBudgets, mean: int, most: int) -> list[list[int]]:
    return [[min(most, round(share * mean)) for share in row] for row in table]


def the_last_first(table: HeadBudgets, mean: int, most: int) -> list[list[int]]:
    counts = token_counts(tuple(row[::-1] for row in table[::-1]), mean, most)
    return [list(row[::-1]) for row in counts[::-1]]


@pytest.mark.parametrize("broken", [one_less, not_shared_again, the_last_first])
def test_other_counts_are_caught(broken: Callable[..., Any]) -> None:
    table = head_budgets([[3, 1, 1]])
    check_counts(table, 10, 3, token_counts)
    with pytest.raises(AssertionError):
        check_counts(table, 10, 3, broken)


def test_a_bound_of_one_less_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation.math, "ceil", lambda x: math.floor(x) - 2)
    table = head_budgets([[3, 1], [1, 1]])
    longest = max(max(token_counts(table, 10, most)[0]) for most in range(10, 60))
    assert max_head_tokens(table, 0, 10) < longest
