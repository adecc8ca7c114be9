"""Tokens by time: nothing is lost, and nothing grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kv.server.monitor import RECENT_SLOTS, SLOTS, CountsSinceStart, RecentCounts, TokenHistory

TIMES = st.lists(st.tuples(st.floats(0, 5000), st.integers(1, 99)), max_size=40)


@given(TIMES)
def test_since_the_start_each_slot_has_what_came_in_it(times: list[tuple[float, int]]) -> None:
    history, now = CountsSinceStart(slots=8), 5000.0
    for since_start, count in sorted(times):
        history.add(since_start, count)
    found = history.counts(now)
    assert len(found) <= 8
    for slot, count in enumerate(found):
        assert count == sum(n for at, n in times if at // history.seconds == slot)
    assert history.seconds & (history.seconds - 1) == 0


@given(TIMES)
def test_the_newest_seconds_are_told_one_by_one(times: list[tuple[float, int]]) -> None:
    history, now = RecentCounts(slots=60), 5000.0
    for since_start, count in sorted(times):
        history.add(since_start, count)
    seconds = range(4941, 5001)
    assert history.counts(now) == [sum(n for at, n in times if int(at) == second) for second in seconds]
    assert history.counts(2.5)[-1] <= 99 * 40
    assert len(history.counts(2.5)) == 3


def test_a_server_that_ran_for_a_year_remembers_as_little() -> None:
    history = TokenHistory(1000.0)
    for day in range(365):
        history.add(1000.0 + 86_400 * day, 7)
    found = history.figures(1000.0 + 86_400 * 365)
    assert sum(found["since_start"]["tokens"]) == 7 * 365
    assert len(found["since_start"]["tokens"]) <= SLOTS
    assert len(found["recent"]["tokens"]) == RECENT_SLOTS
    assert sum(found["recent"]["tokens"]) == 0


@pytest.mark.parametrize("later", [0.0, 0.4, 1.0, 30.0])
def test_time_goes_on_without_tokens(later: float) -> None:
    history = TokenHistory(0.0)
    history.add(2.2, 5)
    found = history.figures(2.2 + later)
    assert found["since_start"] == found["recent"] == {"seconds": 1, "tokens": [0, 0, 5] + [0] * int(2.2 + later - 2)}
