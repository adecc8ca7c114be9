"""What moves when rows come, go and grow, and what stays in place; attention beside each row alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from classes import attend
from oracle import HEADS, QUERY_HEADS

from mlx_kv import Geometric, KVCache, RingKVCache
from mlx_kv.cache import row_classes
from mlx_kv.cache.growth import DEFAULT, Growth
from mlx_kv.cache.segmented import SegmentedCache

DIM = 32


@pytest.fixture(autouse=True)
def _little_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_classes, "CPU_SAVING", 256)


def random(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def row_of(tokens: int, announced: int = 0, growth: Growth = DEFAULT) -> KVCache:
    cache = KVCache(growth=growth)
    cache.reserve(announced)
    cache.update_and_fetch(random(1, HEADS, tokens, DIM), random(1, HEADS, tokens, DIM))
    return cache


def batch_of(rows: list[KVCache]) -> SegmentedCache:
    return SegmentedCache.merge([SegmentedCache(row) for row in rows])


def check_steps(
    batch: SegmentedCache, alone: list[KVCache], steps: int, window: int | None = None, new: int = 1
) -> None:
    """Writes of some tokens, each row as if it were alone."""
    for _ in range(steps):
        q, k, v = (random(len(alone), heads, new, DIM) for heads in (QUERY_HEADS, HEADS, HEADS))
        got = attend(batch, q, k, v, window)
        for row, cache in enumerate(alone):
            wanted = attend(cache, *(x[row : row + 1] for x in (q, k, v)), window)
            np.testing.assert_allclose(np.array(got[row]), np.array(wanted[0]), atol=2e-5, rtol=2e-5)


def rows_by_capacity(batch: SegmentedCache) -> dict[int, int]:
    """Rows of each capacity."""
    return {cache.capacity: len(cache.view.rows) for cache in batch.parts}


def test_who_comes_and_goes_leaves_other_classes_in_place() -> None:
    rows = [row_of(30), row_of(6000), row_of(40)]
    batch = batch_of(rows)
    assert rows_by_capacity(batch) == {256: 2, 6144: 1}
    long = next(cache for cache in batch.parts if cache.size() == 6000)
    rows.append(row_of(50))
    batch.extend(SegmentedCache(rows[3]))
    assert rows_by_capacity(batch) == {256: 3, 6144: 1}
    assert any(cache is long for cache in batch.parts)
    check_steps(batch, rows, 3)
    batch.filter([3, 1])
    assert any(cache is long for cache in batch.parts)
    assert rows_by_capacity(batch) == {256: 1, 6144: 1}
    check_steps(batch, [rows[3], rows[1]], 3, new=4)
    (short,) = (cache for cache in batch.parts if cache is not long)
    batch.filter([0])  # and with the long row goes what it needed
    assert batch.parts == (short,)
    check_steps(batch, [rows[3]], 2)


def test_bytes_are_near_those_of_tokens() -> None:
    batch = batch_of([row_of(500, 756) for _ in range(7)] + [row_of(16_000, 16_256)] + [row_of(480) for _ in range(8)])
    assert batch.nbytes_live == sum(cache.nbytes_live for cache in batch.parts)
    assert batch.nbytes <= 1.5 * batch.nbytes_live
    assert batch.nbytes_full == batch.nbytes_live


def test_a_row_that_outgrows_its_class_moves_alone() -> None:
    doubles = Geometric()
    rows = [row_of(3000, 3072), row_of(1015, 1024, doubles), *(row_of(30, 1024, doubles) for _ in range(7))]
    batch = batch_of(rows)
    assert rows_by_capacity(batch) == {3072: 1, 1024: 8}
    check_steps(batch, rows, 20)
    assert [len(cache.view.rows) for cache, _ in batch.places] == [2, 2, *[7] * 7], "it has room beside the long one"
    assert {cache.capacity for cache in batch.parts if len(cache.view.rows) == 7} == {256}, "empty slots are not copied"


def test_a_class_that_grows_as_a_whole_stays_together() -> None:
    rows = [row_of(6000, 6144), *(row_of(250 + i, 256) for i in range(4))]
    batch = batch_of(rows)
    check_steps(batch, rows, 10)
    assert [len(cache.view.rows) for cache, _ in batch.places] == [1, 4, 4, 4, 4]


def test_prompts_that_are_announced_have_classes_before_they_are_read() -> None:
    batch = batch_of([KVCache() for _ in range(4)])
    batch.prepare(lengths=[3000, 100, 0, 20], right_padding=[0, 2900, 3000, 2980])
    for first in range(0, 3000, 1000):
        q, k, v = (random(4, heads, 1000, DIM) for heads in (QUERY_HEADS, HEADS, HEADS))
        out = attend(batch, q, k, v)
        assert out.shape == (4, QUERY_HEADS, 1000, DIM)
        if first:  # nothing but padding: not even looked at
            assert not np.array(out[1:]).any()
    batch.finalize()
    assert batch.offset.tolist() == [3000, 100, 0, 20]
    assert [len(cache.view.rows) for cache, _ in batch.places] == [1, 3, 3, 3]
    assert batch.parts[1].capacity == 256


@pytest.mark.parametrize("window", [None, 7])
def test_a_window_that_a_model_asks_for_is_each_rows(window: int | None) -> None:
    rows = [row_of(900), row_of(20), row_of(3)]
    check_steps(batch_of(rows), rows, 3, window)
    check_steps(batch_of(rows), rows, 2, window, new=5)


def test_layers_that_stand_alike_share_a_mask() -> None:
    layers = [batch_of([row_of(900), row_of(20), row_of(3)]) for _ in range(2)]
    mask: Any = layers[0].make_mask(1)
    masks = [[mask.of(number, cache) for number, cache in enumerate(batch.parts)] for batch in layers]
    assert masks[0][1] is masks[1][1] is not None


def test_other_kinds_of_caches_are_refused() -> None:
    batch = batch_of([row_of(900), row_of(20)])
    with pytest.raises(ValueError, match="layout"):
        batch.extend(SegmentedCache(RingKVCache(32)))
    with pytest.raises(ValueError, match="one kind"):
        batch.extend(row_of(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        SegmentedCache.merge([])
    with pytest.raises(ValueError, match="rows 3, but this batch has rows 2"):
        batch.update_and_fetch(random(3, HEADS, 1, DIM), random(3, HEADS, 1, DIM))
    with pytest.raises(ValueError, match="lengths is"):
        batch.prepare(lengths=[1])
    with pytest.raises(ValueError, match="left padding can only come first"):
        batch.prepare(left_padding=[1, 0])
    assert not batch.can_trim([0, 21])
    assert batch.offset.tolist() == [900, 20]
