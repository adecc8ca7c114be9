"""The parts that are integers only: growth, layout, and when a mask is needed at all."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kv import CachePolicy, FixedStep, Geometric, KVCache, Tapered
from mlx_kv.cache.growth import DEFAULT, Growth
from mlx_kv.cache.layout import Append, Ring, Row, trim_rows
from mlx_kv.cache.mask import make_mask
from mlx_kv.cache.plan import Plan


def plan_append(rows: tuple[Row, ...], new: int) -> Plan:
    return Plan(Append(), rows, new)


def growths(rule: Growth, total: int, chunk: int) -> list[int]:
    """The capacities that appending `total` tokens in chunks goes through."""
    capacities: list[int] = []
    for needed in range(chunk, total + 1, chunk):
        if not capacities or needed > capacities[-1]:
            capacities.append(rule.capacity(needed, capacities[-1] if capacities else 0))
    return capacities


def test_doubling_reaches_32k_in_seven_growths_and_steps_in_127() -> None:
    assert growths(Geometric(), 32768, 1) == [256 * 2**i for i in range(8)]
    assert len(growths(FixedStep(), 32768, 1)) - 1 == 127


def most_slack(rule: Growth, chunk: int, first: int = 4096, last: int = 131_072) -> float:
    """Slots allocated over slots that hold tokens, the most of all lengths from `first` to `last`."""
    capacities, most = growths(rule, last, chunk), 0.0
    for held in range(-(-first // chunk) * chunk, last + 1, chunk):
        most = max(most, next(c for c in capacities if c >= held) / held)
    return most


def test_a_cache_grows_by_the_default_rule_unless_told_otherwise() -> None:
    assert Tapered() == DEFAULT == KVCache().view.growth == CachePolicy().growth
    assert growths(DEFAULT, 5000, 1) == [256, 512, 1024, 1536, 2304, 3328, 4864, 7168]


@pytest.mark.parametrize("chunk", [1, 64, 100, 256, 512, 777, 1000, 1024, 2000, 2048])
def test_the_default_holds_at_most_half_more_than_is_live_in_at_most_12_growths(chunk: int) -> None:
    assert most_slack(DEFAULT, chunk) <= 1.5
    assert len(growths(DEFAULT, 32_768, chunk)) - 1 <= 12
    # It is the taper that does it: twice as much, or half as much rounded up, are more; less at once, more growths.
    if chunk == 1:
        assert most_slack(Geometric(), chunk) > 1.9
        assert most_slack(Geometric(1.5), chunk) > 1.5
        assert len(growths(Tapered(4096), 32_768, chunk)) - 1 > 12


@given(st.integers(1, 100_000), st.integers(0, 400).map(lambda n: n * 256), st.integers(256, 10_000))
def test_tapered_growth_holds_what_is_needed_and_not_much_more(extra: int, current: int, most: int) -> None:
    needed = current + extra
    capacity = Tapered(most).capacity(needed, current)
    assert capacity >= needed
    assert capacity % 256 == 0
    assert capacity < max(needed + 256, current + min(most, max(512, current / 2)) + 1)
    assert capacity >= current + min(current, most, max(512, current // 2)) - 255


@given(
    st.integers(1, 100_000),
    st.integers(0, 400).map(lambda n: n * 256),
    st.floats(1.01, 8),
    st.none() | st.integers(1, 5000),
    st.none() | st.integers(1, 50_000),
)
def test_geometric_holds_what_is_needed_within_its_limits(
    extra: int, current: int, factor: float, increment: int | None, most: int | None
) -> None:
    needed = current + extra
    capacity = Geometric(factor, increment, most).capacity(needed, current)
    assert capacity >= needed
    assert capacity % 256 == 0
    slack_from = [factor * current]
    slack_from += [current + increment] if increment is not None else []
    slack_from += [most] if most is not None else []
    assert capacity < max(needed, min(slack_from)) + 256


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Geometric(1.0), "factor is 1.0"),
        (lambda: Geometric(float("nan")), "factor is nan"),
        (lambda: Geometric(max_increment=0), "max_increment is 0"),
        (lambda: Geometric(max_capacity=-1), "max_capacity is -1"),
        (lambda: Tapered(255), "max_increment is 255"),
        (lambda: FixedStep(0), "step is 0"),
        (lambda: FixedStep(100), "step is 100"),
    ],
)
def test_impossible_growth_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_plan_and_trim_are_plain_arithmetic() -> None:
    rows = (Row(0, 5, 5), Row(2, 3, 3))
    assert plan_append(rows, 4).needed == 9
    assert plan_append(rows, 4).after == (Row(0, 9, 9), Row(2, 7, 7))
    assert not plan_append(rows, 4).uniform
    assert plan_append((Row(0, 5, 9), Row(0, 5, 5)), 1).uniform
    assert trim_rows(Append(), rows, (5, 1)) == (Row(0, 0, 5), Row(2, 2, 3))
    assert plan_append((Row(0, 2, 5),), 1).after == (Row(0, 3, 5),)


@pytest.mark.parametrize(
    ("counts", "message"), [((1,), "1 counts"), ((-1, 0), "row 0 holds 5"), ((0, 4), "row 1 holds 3")]
)
def test_impossible_trims_are_refused(counts: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trim_rows(Append(), (Row(0, 5), Row(2, 3)), counts)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3), st.integers(0, 40), st.integers(1, 40))
def test_a_ring_writes_the_last_of_every_write_once(window: int, most: int, sinks: int, offset: int, new: int) -> None:
    ring, row = Ring(window, most, min(sinks, window - 1)), Row(0, offset, offset)
    written: dict[int, int] = {}
    for slot, token, count in ring.pieces(row, new):
        assert slot + count <= ring.max_slots
        for i in range(count):
            assert slot + i not in written
            assert ring.slot(row, offset + token + i) == slot + i
            written[slot + i] = offset + token + i
    kept = [p for p in range(offset, offset + new) if p < ring.sinks or p >= offset + new - ring.turn]
    assert sorted(written.values()) == kept


rows = st.lists(st.builds(Row, st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=3).map(tuple)


@given(rows, st.integers(1, 6), st.none() | st.integers(1, 20), st.booleans())
def test_mask_says_who_sees_whom(rows: tuple[Row, ...], new: int, window: int | None, return_array: bool) -> None:
    plan = plan_append(rows, new)
    mask = make_mask(plan, window, return_array)
    ((_, read),) = plan.ranges  # a few slots more than are needed where there is a mask anyway
    assert plan.needed <= read <= -(-plan.needed // 16) * 16
    for i, row in enumerate(rows):
        for j in range(new):
            query = row.offset + j
            wanted = []
            for slot in range(read):
                position = slot - row.start
                wanted.append(0 <= position <= query and (window is None or query - position < window))
            if mask is None:
                assert new == 1
                got = [True] * read
            elif isinstance(mask, str):
                assert mask == "causal"
                assert not return_array
                got = [slot <= read - new + j for slot in range(read)]  # aligned to the lower right
            else:
                assert mask.dtype == mx.bool_
                got = mx.broadcast_to(mask, (len(rows), 1, new, read))[i, 0, j].tolist()
            assert got == wanted


def test_the_fast_masks_are_used_where_they_are_right() -> None:
    even = (Row(0, 9), Row(0, 9))
    assert make_mask(plan_append(even, 1)) is None
    assert make_mask(plan_append(even, 3)) == "causal"
    assert make_mask(plan_append(even, 3), window=12) == "causal"
    assert make_mask(plan_append(even, 1), return_array=True) is None
    assert make_mask(plan_append(even, 3), window=11).shape == (3, 12)
    assert make_mask(plan_append((Row(0, 9), Row(0, 8)), 1)).shape == (2, 1, 1, 16)
