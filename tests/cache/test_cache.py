"""One cache at a time: what it refuses, what it costs, and how it looks from mlx-lm's side."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock

from mlx_kv import Cache, ChunkedKVCache, FixedStep, KVCache, QuantizedKVCache, RingKVCache
from mlx_kv.cache.layout import Ring


def tokens(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def filled(cache: KVCache, new: int = 10, rows: int = 1) -> KVCache:
    cache.update_and_fetch(tokens(rows, 2, new, 64), tokens(rows, 2, new, 32))
    return cache


BAD_UPDATES: dict[str, tuple[tuple[Any, Any], str]] = {
    "no arrays": (([[1.0]], None), "keys are a list, expected an mx.array"),
    "3-D keys": ((tokens(2, 3, 64), tokens(1, 2, 3, 32)), r"keys have shape \(2, 3, 64\), expected"),
    "3-D values": ((tokens(1, 2, 3, 64), tokens(2, 3, 32)), r"values have shape"),
    "no tokens": ((tokens(1, 2, 0, 64), tokens(1, 2, 0, 32)), "at least one"),
    "no head dim": ((tokens(1, 2, 3, 0), tokens(1, 2, 3, 32)), "at least one"),
    "integers": ((mx.zeros((1, 2, 3, 64), mx.int32), tokens(1, 2, 3, 32)), "expected floating point"),
    "different lengths": ((tokens(1, 2, 3, 64), tokens(1, 2, 4, 32)), "differ in tokens"),
    "different heads": ((tokens(1, 2, 3, 64), tokens(1, 1, 3, 32)), "differ in KV heads"),
    "different rows": ((tokens(1, 2, 3, 64), tokens(2, 2, 3, 32)), "differ in rows"),
    "rows changed": ((tokens(2, 2, 3, 64), tokens(2, 2, 3, 32)), "rows 2, but this cache holds rows 1"),
    "heads changed": ((tokens(1, 4, 3, 64), tokens(1, 4, 3, 32)), "KV heads 4"),
    "head dim changed": ((tokens(1, 2, 3, 32), tokens(1, 2, 3, 32)), "keys came with head dim 32"),
    "dtype changed": ((tokens(1, 2, 3, 64), tokens(1, 2, 3, 32, dtype=mx.float16)), "values came with dtype"),
}


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("case", BAD_UPDATES)
def test_a_refused_update_changes_nothing(case: str, bits: int | None) -> None:
    (keys, values), message = BAD_UPDATES[case]
    cache = filled(KVCache(bits=bits, group_size=32))
    before = [(name, mx.array(x) if isinstance(x, mx.array) else x) for name, x in tree_flatten(cache.state)]
    with pytest.raises(ValueError, match=message):
        cache.update_and_fetch(keys, values)
    after = tree_flatten(cache.state)
    assert len(before) == len(after)
    for (_, old), (_, new) in zip(before, after, strict=True):
        assert mx.array_equal(old, new).item() if isinstance(old, mx.array) else old == new


def test_head_dims_that_no_group_divides_are_refused_with_the_mend() -> None:
    cache = KVCache(bits=4)
    with pytest.raises(ValueError, match="head dim 96, not a multiple of group_size=64; use group_size=32"):
        cache.update_and_fetch(tokens(1, 2, 3, 96), tokens(1, 2, 3, 96))
    with pytest.raises(ValueError, match="use bits=None: no group size divides it"):
        cache.update_and_fetch(tokens(1, 2, 3, 80), tokens(1, 2, 3, 80))
    assert cache.empty()
    assert cache.nbytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 7}, "bits is 7: a quantised cache has 2, 3, 4, 5, 6, 8 bits"),
        ({"bits": 0}, "bits is 0"),
        ({"bits": 8, "group_size": 48}, "group_size is 48: choose one of 32, 64, 128"),
        ({"bits": 8, "group_size": 0}, "group_size is 0"),
        ({"reserve": -1}, "reserve is -1"),
        ({"reserve": 1.5}, "reserve is 1.5: give a whole number"),
        ({"reserve": None}, "reserve is None"),
        ({"reserve": 3_000_000_000}, "reserve is 3000000000: give a whole number of tokens from 0 to 2,147,483,647"),
        ({"bits": "8"}, "bits is '8'"),
        ({"bits": 8.0}, "bits is 8.0"),
        ({"quantized_start": 5}, "quantized_start is 5, but bits is None"),
        ({"bits": 8, "quantized_start": -5}, "quantized_start is -5"),
        ({"growth": 256}, "growth is 256: give a rule"),
        ({"growth": FixedStep}, r"growth is <class .*FixedStep'>: give a rule such as Tapered\(\) or FixedStep\(256\)"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCache(**options)


def test_trims_that_would_lose_tokens_are_refused() -> None:
    cache = filled(KVCache(), rows=2)
    for n in (11, -1):
        assert not cache.can_trim(n)
        with pytest.raises(ValueError, match=f"cannot trim {n} tokens"):
            cache.trim(n)
    with pytest.raises(ValueError, match="row 1 holds 10"):
        cache.trim_per_sequence([3, 11])
    with pytest.raises(ValueError, match="3 counts to trim by, but this cache has 2 rows"):
        cache.trim_per_sequence([1, 1, 1])
    assert cache.offset == 10
    cache.trim_per_sequence(mx.array([3, 1]))
    assert cache.offset.tolist() == [7, 9]
    assert cache.can_trim(7)
    assert not cache.can_trim(8)


def test_memory_is_counted_from_shapes() -> None:
    cache = KVCache()
    assert (cache.nbytes, cache.nbytes_live, cache.capacity) == (0, 0, 0)
    filled(cache, new=10, rows=3)
    assert cache.capacity == 256
    assert cache.nbytes == 3 * 2 * 256 * (64 + 32) * 4
    assert cache.nbytes_live == 3 * 2 * 10 * (64 + 32) * 4
    packed = filled(KVCache(bits=4, group_size=32))
    per_token = 2 * sum(dim * 4 // 8 + dim // 32 * 2 * 4 for dim in (64, 32))
    assert packed.nbytes_live == 10 * per_token
    assert packed.nbytes == 256 * per_token


def test_reserve_makes_room_once() -> None:
    cache = KVCache(reserve=1000)
    for _ in range(10):
        filled(cache, new=100)
    assert (cache.capacity, cache.growths) == (1024, 0)
    cache.reserve(3000)
    filled(cache, new=100)
    assert (cache.capacity, cache.growths) == (3072, 1)


def test_growth_counts_reallocations() -> None:
    for cache, wanted in ((KVCache(), 2), (KVCache(growth=FixedStep()), 3)):
        for _ in range(1000):
            filled(cache, new=1)
        assert cache.growths == wanted


def test_reset_keeps_the_memory_for_a_session_of_the_same_shape_only() -> None:
    cache = filled(KVCache(), new=300)
    keys = cache.keys
    cache.reset()
    assert (cache.offset, cache.empty(), cache.nbytes_live) == (0, True, 0)
    filled(cache, new=2)
    assert cache.capacity == keys.shape[2]
    cache.reset()
    cache.update_and_fetch(tokens(3, 4, 5, 16), tokens(3, 4, 5, 16))
    assert (cache.offset, cache.capacity) == (5, 256)


def test_to_quantized_is_idempotent_and_leaves_the_original_alone() -> None:
    plain = filled(KVCache())
    before = mx.array(plain.keys)
    packed = plain.to_quantized(group_size=32, bits=8)
    assert packed.offset == 10
    assert packed.to_quantized(group_size=64, bits=4) is packed
    assert mx.array_equal(plain.keys, before).item()
    k, v = tokens(1, 2, 1, 64), tokens(1, 2, 1, 32)
    got, _ = packed.update_and_fetch(k, v)
    history = mx.concatenate([before[:, :, :10], k], axis=2)
    assert mx.array_equal(got, mx.dequantize(*mx.quantize(history, 32, 8), 32, 8)).item()
    empty = KVCache().to_quantized(group_size=32, bits=4)
    assert filled(empty).nbytes == filled(KVCache(bits=4, group_size=32)).nbytes


def test_quantized_cache_has_mlx_lms_signature_and_stays_usable_when_empty() -> None:
    cache = QuantizedKVCache(64, 4)
    assert (cache.nbytes, cache.empty()) == (0, True)
    assert copy.deepcopy(cache).state == cache.state
    assert KVCache.from_state(cache.state).state == cache.state
    with pytest.raises(ValueError, match="this cache is empty"):
        cache.keys_and_values()


def test_it_is_a_cache_and_truthy_when_empty() -> None:
    """mlx-lm asks `if cache and hasattr(...)`: a length of 0 would switch the mask off."""
    assert isinstance(KVCache(), Cache)
    assert KVCache()
    assert not isinstance(stock.KVCache(), Cache)  # it has no reset and no can_trim


def test_pipelined_models_may_hang_a_dependency_on_the_buffer() -> None:
    for cache in (filled(KVCache()), filled(KVCache(bits=8, group_size=32))):
        cache.keys = mx.depends(cache.keys, mx.ones(3))
        cache.update_and_fetch(tokens(1, 2, 1, 64), tokens(1, 2, 1, 32))
        mx.eval(cache.state)
        assert cache.offset == 11
        with pytest.raises(ValueError, match="keep its shape"):
            cache.values = mx.zeros((1, 2, 3, 4))


def test_offset_handles_are_not_changed_by_later_updates() -> None:
    cache = filled(KVCache(), rows=2)
    cache.trim_per_sequence([1, 2])
    handle = cache.offset
    filled(cache, new=3, rows=2)
    assert handle.tolist() == [9, 8]
    assert cache.offset.tolist() == [12, 11]


def test_what_is_loaded_hands_out_the_same_planes_and_quantises_at_the_same_length() -> None:
    packed = filled(filled(KVCache(bits=8, group_size=32)), new=1)
    packed.update_and_fetch(tokens(1, 2, 1, 64), tokens(1, 2, 1, 32))
    same_dims = KVCache(bits=8, group_size=32)
    for new in (5, 1):
        same_dims.update_and_fetch(tokens(1, 2, new, 64), tokens(1, 2, new, 64))
    for cache in (packed, same_dims, KVCache(bits=8, packed_decode=False), KVCache(bits=8, quantized_start=9)):
        loaded = KVCache.from_state(cache.state)
        assert hasattr(loaded, "bits") == hasattr(cache, "bits")
        assert loaded.state[3:] == cache.state[3:]
        if cache.empty():
            continue
        for got, wanted in zip(
            tree_flatten(loaded.keys_and_values()), tree_flatten(cache.keys_and_values()), strict=True
        ):
            assert mx.array_equal(got[1], wanted[1]).item()
    late = KVCache.from_state(KVCache(bits=8, group_size=32, quantized_start=9).state)
    assert filled(late, new=9).nbytes == filled(KVCache(), new=9).nbytes
    assert filled(late, new=1).nbytes == filled(KVCache(bits=8, group_size=32)).nbytes


def test_a_new_session_begins_plain_again_and_rings_quantise_by_position() -> None:
    cache = KVCache(bits=8, group_size=32, quantized_start=5)
    for new in (6, 1):
        filled(cache, new=new)
    cache.reset()
    with pytest.raises(ValueError, match="this cache is empty"):
        cache.keys_and_values()
    assert filled(cache, new=3).nbytes == filled(KVCache(), new=3).nbytes
    ring = KVCache(bits=8, group_size=32, quantized_start=40, layout=Ring(8, 4))
    for _ in range(41):
        filled(ring, new=1)
    assert ring.nbytes == filled(KVCache(bits=8, group_size=32)).nbytes


def test_a_reservation_never_shrinks_and_outlives_a_growth() -> None:
    cache = KVCache()
    cache.reserve(2000)
    cache.reserve(10)
    assert filled(cache).capacity == 2048


@pytest.mark.parametrize("bits", [None, 8])
def test_what_is_announced_on_top_of_what_is_held_is_all_that_is_allocated(bits: int | None) -> None:
    cache = filled(KVCache(bits=bits, group_size=32), new=1000)
    per_slot = cache.nbytes // 1024
    cache.reserve(1100)
    for _ in range(20):
        filled(cache, new=5)
    assert (cache.nbytes, cache.growths) == (1280 * per_slot, 1)
    for _ in range(181):  # one more than that: the rule again
        filled(cache, new=1)
    assert (cache.nbytes, cache.growths) == (1792 * per_slot, 2)


def test_a_growth_rule_that_gives_too_little_gets_what_is_needed() -> None:
    class Stingy:
        def capacity(self, needed: int, current: int) -> int:
            return 1

    assert filled(KVCache(growth=Stingy()), new=300).capacity == 512


@pytest.mark.parametrize("n", [1.5, None, "2"])
def test_trims_by_no_number_are_refused(n: Any) -> None:
    cache = filled(KVCache())
    assert not cache.can_trim(n)
    with pytest.raises(ValueError, match="give whole numbers"):
        cache.trim(n)
    assert filled(cache, new=1).offset == 11


def test_repr_says_what_is_held() -> None:
    assert repr(filled(KVCache(bits=8, group_size=32))) == "KVCache(offset=10, capacity=256, nbytes=61440, bits=8)"


@pytest.mark.parametrize("extend", [False, True])
def test_rows_trimmed_to_nothing_join_rows_that_never_had_anything(extend: bool) -> None:
    trimmed = filled(KVCache.merge([KVCache(), KVCache()]), 3, 2)
    trimmed.trim(3)
    fresh = KVCache.merge([KVCache(), KVCache(), KVCache()])
    if extend:
        trimmed.extend(fresh)
    joined = trimmed if extend else KVCache.merge([trimmed, fresh])
    assert joined.keys is None or joined.keys.shape[0] == 5
    joined.filter([4, 0])
    assert joined.keys is None or joined.keys.shape[0] == 2
    assert [x.shape for x in filled(joined, 2, 2).keys_and_values()] == [(2, 2, 2, 64), (2, 2, 2, 32)]


def test_a_trim_of_nothing_while_padding_is_to_come() -> None:
    cache = KVCache()
    cache.prepare(left_padding=[3])
    assert cache.trim(0) == 0
    with pytest.raises(ValueError, match="holds 0; trim by 0 to 0"):
        cache.trim(1)


@pytest.mark.parametrize("make", [KVCache, lambda: RingKVCache(8, 4), lambda: ChunkedKVCache(64, 4)])
def test_a_front_that_does_not_move_leaves_the_fast_path_open(make: Any) -> None:
    """Models with chunked attention trim the front of every cache before every step."""
    cache, x = make(), mx.zeros((1, 1, 1, 32))
    for _ in range(3):
        cache.maybe_trim_front()
        cache.update_and_fetch(x, x)
    assert cache._next_plan(1) is not None
    cache.maybe_trim_front()
    assert cache._next_plan(1) is not None
