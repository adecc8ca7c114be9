"""Names that are classes in mlx-lm: what they make, of which caches they are true, what users reach for in them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

import mlx_kv
from mlx_kv import (
    BatchKVCache,
    BatchRotatingKVCache,
    CachePolicy,
    ChunkedKVCache,
    CompressedKVCache,
    KVCache,
    QuantizedKVCache,
    RingBufferKVCache,
    RingKVCache,
    RotatingKVCache,
)

RINGS = (RingKVCache, RotatingKVCache, RingBufferKVCache, BatchRotatingKVCache)
MADE: dict[type, Callable[[], KVCache]] = {
    QuantizedKVCache: QuantizedKVCache,
    RingKVCache: lambda: RingKVCache(8),
    RotatingKVCache: lambda: RotatingKVCache(8, keep=2),
    RingBufferKVCache: lambda: RingBufferKVCache(8),
    BatchRotatingKVCache: lambda: BatchRotatingKVCache(8, [0, 2]),
    ChunkedKVCache: lambda: ChunkedKVCache(8),
    CompressedKVCache: lambda: CompressedKVCache(100),
    BatchKVCache: lambda: BatchKVCache([0, 2]),
}


def tokens(new: int, rows: int = 1, seed: int = 0) -> tuple[mx.array, mx.array]:
    keys, values = (mx.random.normal((rows, 2, new, 64), key=mx.random.key(seed + i)) for i in range(2))
    return keys, values


# --- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE, ids=lambda name: name.__name__)
def test_a_name_makes_a_cache_of_its_parts(name: Any) -> None:
    cache = MADE[name]()
    assert type(cache) is KVCache
    assert isinstance(cache, name)
    assert isinstance(copy.deepcopy(cache), name)
    assert isinstance(KVCache.from_state(cache.state), name)
    loaded = name.from_state(cache.state)
    assert type(loaded) is KVCache
    assert loaded.layout.parameters == cache.layout.parameters
    assert isinstance(KVCache.merge([cache, cache]), name)
    assert repr(cache).startswith("KVCache(")


@pytest.mark.parametrize(
    ("cache", "names"),
    [
        (lambda: KVCache(), {BatchKVCache}),
        (lambda: KVCache(8), {BatchKVCache, QuantizedKVCache}),
        (lambda: KVCache(codec="mxfp8"), {BatchKVCache, QuantizedKVCache}),
        (lambda: CachePolicy(max_kv_size=8).make_cache(), set(RINGS)),
        (lambda: CachePolicy(max_kv_size=8, bits=4).make_cache(), {*RINGS, QuantizedKVCache}),
        (lambda: CachePolicy(budget=100).make_cache(), {BatchKVCache, CompressedKVCache}),
        (lambda: ChunkedKVCache(8, bits=8), {BatchKVCache, ChunkedKVCache, QuantizedKVCache}),
        (lambda: KVCache().to_quantized(), {BatchKVCache, QuantizedKVCache}),
        (lambda: stock.RotatingKVCache(8), set()),
        (lambda: 8, set()),
    ],
)
def test_a_name_is_true_of_what_has_its_parts_whoever_made_it(cache: Callable[[], Any], names: set[type]) -> None:
    made = cache()
    assert {name for name in MADE if isinstance(made, name)} == names


def test_names_say_what_they_take() -> None:
    for name in ("KVCache", "QuantizedKVCache", "RotatingKVCache", "BatchKVCache", "BatchRotatingKVCache"):
        ours, theirs = (inspect.signature(getattr(module, name)) for module in (mlx_kv, stock))
        assert list(ours.parameters)[: len(theirs.parameters)] == list(theirs.parameters)
    with pytest.raises(TypeError, match="max_size"):
        RotatingKVCache()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="left_padding is empty"):
        BatchKVCache([])


def test_who_makes_a_class_of_their_own_of_a_name_gets_it() -> None:
    class Told(RotatingKVCache):
        def __init__(self, told: str) -> None:
            super().__init__(8, keep=2)
            self.told = told

    cache = Told("so")
    assert (type(cache), cache.told, cache.max_size, cache.keep) == (Told, "so", 8, 2)
    assert isinstance(cache, RotatingKVCache)
    assert not isinstance(RotatingKVCache(8), Told)
    assert copy.deepcopy(cache).told == "so"
    assert type(Told.from_state(cache.state)) is Told


# --- what users reach for ---------------------------------------------------------------------------------------------


def test_rings_tell_their_size_and_chunks_theirs() -> None:
    ring, chunked, full = RotatingKVCache(max_size=8, keep=2), ChunkedKVCache(16), KVCache()
    for cache in (ring, KVCache.merge([ring, ring]), KVCache.from_state(ring.state)):
        assert (cache.max_size, cache.keep) == (8, 2)
        assert not hasattr(cache, "chunk_size")
    assert chunked.chunk_size == 16
    for cache in (chunked, full):
        assert not hasattr(cache, "max_size")
        assert not hasattr(cache, "keep")
    assert not hasattr(full, "chunk_size")
    full.update_and_fetch(*tokens(5))
    assert full.capacity % KVCache.step == 0


def test_left_padding_is_what_is_still_to_come() -> None:
    cache = BatchKVCache(left_padding=[3, 0, 1])
    assert cache.left_padding.tolist() == [3, 0, 1]
    cache.update_and_fetch(*tokens(2, rows=3))
    assert cache.left_padding.tolist() == [1, 0, 0]
    cache.update_and_fetch(*tokens(2, rows=3))
    assert cache.left_padding.tolist() == [0, 0, 0]
    assert cache.offset.tolist() == [1, 4, 3]


def test_bits_are_told_but_after_a_fetch_of_arrays() -> None:
    cache = QuantizedKVCache(group_size=32, bits=4)
    assert (cache.bits, cache.group_size) == (4, 32)
    for new, packed in ((20, False), (1, True), (20, False), (2, True)):
        keys, _ = cache.update_and_fetch(*tokens(new))
        assert isinstance(keys, tuple) is packed
        assert hasattr(cache, "bits") is packed
        assert hasattr(copy.deepcopy(cache), "group_size") is packed
    assert (cache.bits, cache.group_size) == (4, 32)


@pytest.mark.parametrize(
    "cache",
    [
        lambda: KVCache(8, packed_decode=False),
        lambda: KVCache(8, quantized_start=9),
        lambda: KVCache((8, 4)),
        lambda: KVCache(8, codec="rotated"),
        lambda: KVCache(codec="mxfp8"),
        lambda: KVCache(),
    ],
)
def test_bits_are_never_told_where_no_attention_of_mlx_lms_could_use_them(cache: Callable[[], KVCache]) -> None:
    made = cache()
    for write in (None, 5, 1):
        if write:
            made.update_and_fetch(*tokens(write))
        assert not hasattr(made, "bits")
        assert not hasattr(made, "group_size")


def test_bits_are_told_once_quantised_not_before() -> None:
    cache = KVCache(8, quantized_start=9)
    for new in (8, 1, 12):
        assert not hasattr(cache, "bits")
        cache.update_and_fetch(*tokens(new))
    cache.update_and_fetch(*tokens(1))
    assert cache.bits == 8
    unequal = KVCache(8)
    unequal.update_and_fetch(tokens(1)[0], mx.zeros((1, 2, 1, 128)))
    assert not hasattr(unequal, "bits")


# --- layouts that differ, attention that does not ---------------------------------------------------------------------


def attended(cache: Any, writes: list[tuple[mx.array, mx.array, mx.array]]) -> list[mx.array]:
    """(B, 2, S, 64) of the queries, keys and values of each write, as mlx-lm's models ask."""
    found = []
    for queries, *new in writes:
        mask = create_attention_mask(queries[:, 0], cache)
        keys, values = cache.update_and_fetch(*(x[:] for x in new))  # mlx-lm's write into what they are given
        found.append(scaled_dot_product_attention(queries, keys, values, cache=cache, scale=0.125, mask=mask))
        mx.eval(found[-1])
    return found


@pytest.mark.parametrize(
    ("window", "left_padding", "lengths", "as_mlx_lms"),
    [
        (None, [2, 3, 4], [4, 1, 3], True),
        (4, [2, 0], [4, 4, 1], True),
        (4, [2, 0], [4, 1, 1], True),
        (4, [2, 2], [5, 1, 3], True),
        (8, [4], [8, 1, 2], False),
        (8, [0], [10, 3, 1, 1], True),
    ],
)
def test_rows_attend_as_alone(
    window: int | None, left_padding: list[int], lengths: list[int], as_mlx_lms: bool
) -> None:
    """Each as a cache of mlx-lm's that gets its tokens and no padding, and as in its batches.

    Not there where these have rotated since the padding: then they lose a token that is in the window.
    """
    named: dict[str, Any] = {} if window is None else {"max_size": window}
    name = "KVCache" if window is None else "RotatingKVCache"
    writes: list[Any] = [
        [mx.random.normal((len(left_padding), 2, new, 64), key=mx.random.key(10 * step + i)) for i in range(3)]
        for step, new in enumerate(lengths)
    ]
    ours = getattr(mlx_kv, f"Batch{name}")(left_padding=left_padding, **named)
    theirs = getattr(stock, f"Batch{name}")(left_padding=left_padding, **named)
    got, batch = attended(ours, writes), attended(theirs, writes)
    same = []
    for row, padding in enumerate(left_padding):
        begins = [max(0, padding - sum(lengths[:step])) for step in range(len(lengths))]
        own = [[x[row : row + 1, :, begin:] for x in write] for write, begin in zip(writes, begins, strict=True)]
        wanted = attended(getattr(stock, name)(**named), [write for write in own if write[0].size])
        skipped = len(lengths) - len(wanted)
        for step, alone in enumerate(wanted, skipped):
            begin = begins[step]
            assert mx.allclose(got[step][row, :, begin:], alone[0], atol=1e-5)
            same.append(mx.allclose(batch[step][row, :, begin:], alone[0], atol=1e-5).item())
    assert all(same) == as_mlx_lms
    assert mx.array_equal(mx.array(ours.offset) + mx.zeros(len(left_padding)), theirs.offset)
