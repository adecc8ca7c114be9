"""Rows of a batch that come and go: each keeps its room, its tokens and what is known of them."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv import BatchKVCache, CompressedKVCache, KVCache


def some(rows: int, new: int) -> mx.array:
    return mx.random.normal((rows, 2, new, 32))


def test_what_was_announced_for_a_row_is_kept_apart() -> None:
    long, short = KVCache(), KVCache()
    long.reserve(3000)
    short.reserve(300)
    for cache in (long, short):
        cache.update_and_fetch(some(1, 5), some(1, 5))
    assert long.capacity == 3072
    batch = KVCache.merge([short, long, short])
    assert batch.capacity == 256  # empty slots are not copied
    both = copy.deepcopy(batch)
    batch.filter([2, 0])
    for cache, rows, capacity in ((both, 3, 3072), (batch, 2, 512)):  # it grows at once to what was announced
        for _ in range(252):
            cache.update_and_fetch(some(rows, 1), some(rows, 1))
        assert (cache.capacity, cache.growths) == (capacity, 1)
    both.filter([1])
    assert both.capacity == 768
    batch.trim(252)
    single = batch.extract(0)
    assert single.capacity == 256
    for _ in range(300):
        single.update_and_fetch(some(1, 1), some(1, 1))
    assert single.capacity == 512  # nothing is made room for that was announced for another request


def test_an_update_of_padding_alone() -> None:
    right = BatchKVCache([0, 0])
    right.prepare(lengths=[0, 0], right_padding=[3, 3])
    for cache in (BatchKVCache([5, 6]), right):
        mask = cache.make_mask(3)
        keys, _ = cache.update_and_fetch(some(2, 3), some(2, 3))
        assert mask.shape == (2, 1, 3, keys.shape[2])
        assert mask.all().item()
        assert cache.empty()


def test_a_batch_keeps_its_number_of_rows() -> None:
    for prepare in ({"left_padding": [1, 2, 3]}, {"lengths": [1, 2, 3]}):
        cache = BatchKVCache([0, 0, 0])
        cache.prepare(**prepare)
        with pytest.raises(ValueError, match="keys came with rows 2, but this batch has rows 3"):
            cache.update_and_fetch(some(2, 6), some(2, 6))


def test_rows_are_taken_once_and_by_any_integers() -> None:
    cache = BatchKVCache([0, 0, 0])
    cache.update_and_fetch(some(3, 6), some(3, 6))
    for bad in ([], [0, 0], [3], [-1]):
        with pytest.raises(ValueError, match="cannot take rows"):
            cache.filter(bad)
    assert cache.can_trim(np.int64(2))
    cache.trim_per_sequence(np.array([1, 2, 0]))
    cache.filter([np.int64(2), np.int64(0)])
    assert cache.offset.tolist() == [6, 5]


def test_merging_keeps_the_largest_reservation() -> None:
    merged = KVCache.merge([KVCache(reserve=10), KVCache(reserve=3000)])
    merged.update_and_fetch(some(2, 5), some(2, 5))
    assert merged.capacity >= 3000


def test_a_reset_batch_begins_anew_with_any_rows() -> None:
    batch = KVCache.merge([CompressedKVCache(20, keep_recent=2, margin=3) for _ in range(3)])
    batch.update_and_fetch(some(3, 40), some(3, 40))
    batch.compact()
    batch.reset()
    other = CompressedKVCache(20, keep_recent=2, margin=3)
    other.update_and_fetch(some(1, 40), some(1, 40))
    other.compact()
    kept = other.positions.tolist()
    batch.extend(other)
    assert batch.positions[1].tolist() == kept[0]
    batch.update_and_fetch(some(2, 1), some(2, 1))
    assert batch.positions[1, 0, :20].tolist() == kept[0][0]


def test_rows_that_come_and_go_leave_no_chain() -> None:
    """What is known of evicted rows is computed as they move, not at the next compaction."""
    made = CompressedKVCache(20, keep_recent=2, margin=3, score="key_norm")
    made.update_and_fetch(some(1, 40), some(1, 40))
    made.compact()
    short = CompressedKVCache(20, keep_recent=2, margin=3, score="key_norm")
    short.update_and_fetch(some(1, 4), some(1, 4))
    mx.eval(short.state)
    for _ in range(50):
        made.extend(short)
        made.filter([0])
        mx.eval(made.state)
    made.filter([0])
    assert made.evictor.metadata.kept.positions is not None
    made.extend(short)
    made.filter([1])
    assert made.evictor.metadata.kept.positions is None
