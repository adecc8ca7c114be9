"""Which rows are together: the rule for classes, held against all partitions, and what is left in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from engines import as_on_a_gpu
from hypothesis import given
from hypothesis import strategies as st

from mlx_kv.cache import row_classes
from mlx_kv.cache.plan import round_read, round_tail
from mlx_kv.cache.row_classes import MAX_CLASSES, MAX_PADDING, TARGET_PADDING, RowClasses, assign_classes, padded_slots

LEAST = 1024
sizes = st.integers(1, 130).map(lambda steps: 256 * steps)
needs = st.lists(sizes, min_size=1, max_size=7).map(tuple)


def partitions(rows: int) -> Iterator[RowClasses]:
    """All ways to part rows 0, 1, ... into groups."""
    if rows == 0:
        yield ()
        return
    for others in partitions(rows - 1):
        yield (*others, (rows - 1,))
        for i, group in enumerate(others):
            yield (*others[:i], (*group, rows - 1), *others[i + 1 :])


def fewest(needs: tuple[int, ...], count: int) -> int:
    return min(padded_slots(groups, needs) for groups in partitions(len(needs)) if len(groups) <= count)


def is_partition(groups: RowClasses, rows: int) -> bool:
    return sorted(row for group in groups for row in group) == list(range(rows)) and groups == tuple(sorted(groups))


@given(needs)
def test_new_classes_are_the_fewest_that_are_good_enough(needs: tuple[int, ...]) -> None:
    groups = assign_classes(needs, (), tuple((row,) for row in range(len(needs))), LEAST)
    assert is_partition(groups, len(needs))
    slots = [fewest(needs, count) for count in range(1, MAX_CLASSES + 2)]
    # As many as the rule wants, of all ways to part rows: no more where one more would not save enough.
    enough = [
        count
        for count in range(1, MAX_CLASSES + 1)
        if count == MAX_CLASSES
        or slots[count - 1] <= TARGET_PADDING * sum(needs)
        or slots[count - 1] - slots[count] < LEAST
    ]
    assert len(groups) <= enough[0]
    assert padded_slots(groups, needs) <= max(MAX_PADDING * sum(needs), slots[enough[0] - 1] + 2 * LEAST)


@given(needs, st.integers(0, 200), st.data())
def test_what_is_good_enough_stays(needs: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    """Asked again, whatever came before, nothing moves: nothing flips."""
    groups = assign_classes(needs, (), tuple((row,) for row in range(len(needs))), LEAST)
    assert assign_classes(needs, groups, (), LEAST) == groups
    grown = list(needs)
    grown[data.draw(st.integers(0, len(needs) - 1))] += 256
    later = assign_classes(tuple(grown), groups, (), LEAST)
    assert is_partition(later, len(needs))
    assert assign_classes(tuple(grown), later, (), LEAST) == later


@given(needs, st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_rows_that_come_leave_other_classes_alone(there: tuple[int, ...], like: list[int]) -> None:
    """Each goes where there is room for it, and nobody else moves, as long as that is good enough."""
    held = assign_classes(there, (), tuple((row,) for row in range(len(there))), LEAST)
    coming = tuple([there[row % len(there)] for row in like])
    everyone, new = there + coming, range(len(there), len(there) + len(coming))
    groups = assign_classes(everyone, held, tuple((row,) for row in new), LEAST)
    assert is_partition(groups, len(everyone))
    joined = {max(there[row] for row in group): list(group) for group in held}
    for row in new:
        joined[min(size for size in joined if size >= everyone[row])].append(row)
    fitted = tuple(sorted(map(tuple, joined.values())))
    anew = assign_classes(everyone, (), tuple((row,) for row in range(len(everyone))), LEAST)
    if len(held) <= len(anew) and padded_slots(fitted, everyone) <= MAX_PADDING * sum(everyone):
        assert groups == fitted


def test_one_long_row_among_fifteen_short_ones() -> None:
    needs = (768,) * 7 + (32_256,) + (768,) * 8
    groups = assign_classes(needs, (), tuple((row,) for row in range(16)), LEAST)
    assert groups == ((*range(7), *range(8, 16)), (7,))
    assert padded_slots(groups, needs) == sum(needs)
    # Another short one joins the short ones, and a long one the long one; alone it would be one class for all.
    assert assign_classes((*needs, 512), groups, ((16,),), LEAST) == ((*range(7), *range(8, 17)), (7,))
    assert assign_classes((*needs, 30_720), groups, ((16,),), LEAST) == ((*range(7), *range(8, 16)), (7, 16))
    assert assign_classes((768,) * 15, ((*range(15),),), (), LEAST) == (tuple(range(15)),)


@pytest.mark.parametrize("rows", [2, 16])
def test_alike_rows_are_one_class(rows: int) -> None:
    needs = tuple(8192 + 256 * (row % 3) for row in range(rows))
    assert assign_classes(needs, (), tuple((row,) for row in range(rows)), LEAST) == (tuple(range(rows)),)


def test_little_rows_are_one_class_however_they_differ() -> None:
    assert assign_classes((256, 256, 1024), (), ((0,), (1,), (2,)), 2048) == ((0, 1, 2),)


def test_on_a_gpu_the_saving_that_pays_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the time of a call, a device reads some thousand bytes at least, and not the whole measured array."""
    row_classes.bytes_in_a_call.cache_clear()
    assert 100 < row_classes.bytes_in_a_call() < 2 * row_classes.LARGE
    assert row_classes.min_saving() == 2048
    monkeypatch.setattr(row_classes, "bytes_in_a_call", lambda: 44e6)  # as on an H100: 20 us at 2.2 TB/s
    with as_on_a_gpu():
        assert row_classes.min_saving() == 107_421


@pytest.mark.parametrize("gpu", [False, True])
def test_a_tail_holds_whatever_attention_reads_of_it(gpu: bool) -> None:
    """For each number of its slots that is needed, and few numbers are read: a device prepares itself for each."""
    with as_on_a_gpu() if gpu else contextlib.nullcontext():
        read = [round_read(slots) for slots in range(1, 4097)]
        for slots in range(1, 4097):
            assert slots <= read[slots - 1] <= round_tail(slots)
            assert round_tail(slots) % 32 == 0
        assert read == sorted(read)
        assert len(set(read[:2048])) <= (16 if gpu else 64)
