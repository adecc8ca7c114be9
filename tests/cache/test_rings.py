"""Rings and chunks: invariants 1 to 5, the bound on what can be undone both ways, and what is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import cache as stock
from oracle import Spec, Twins
from outside import STORED
from test_cache_properties import run, spec_of

from mlx_kv import ChunkedKVCache, KVCache, RingBufferKVCache, RingKVCache, RotatingKVCache
from mlx_kv.cache.layout import Chunks, Ring, Row

rings = st.builds(
    lambda ring, max_write, sinks, **options: spec_of(
        ring=ring, max_write=max_write, sinks=min(sinks, ring - 1), **options
    ),
    ring=st.integers(1, 12),
    max_write=st.integers(1, 8),
    sinks=st.integers(0, 3),
    stored=st.sampled_from(STORED),
    rows=st.sampled_from([1, 3]),
    key_dim=st.just(32),
    value_dim=st.sampled_from([32, 64]),
    packed_decode=st.booleans(),
    window=st.sampled_from([None, None, 3]),
)
chunked = st.builds(
    spec_of,
    chunk=st.integers(1, 12),
    max_write=st.integers(1, 8),
    stored=st.sampled_from(STORED),
    rows=st.sampled_from([1, 3]),
    key_dim=st.just(32),
    value_dim=st.sampled_from([32, 64]),
    packed_decode=st.booleans(),
)
fractions = st.floats(0, 1)
operations = st.one_of(
    st.tuples(st.just("update"), st.one_of(st.just(1), st.integers(1, 9), st.integers(10, 40))),
    st.tuples(st.just("trim_few"), st.tuples(*[st.integers(0, 8)] * 3)),
    st.tuples(st.just("trim"), fractions),
    st.tuples(st.sampled_from(["copy", "load", "reset"]), st.none()),
)


@given(rings | chunked, st.lists(operations, min_size=3, max_size=14), st.integers(0, 1000))
def test_any_history_around_the_window_and_its_slots(spec: Spec, steps: list[tuple[str, Any]], seed: int) -> None:
    run(spec, [("update", 5), *steps, ("update", 3), ("update", 1)], seed)


def test_a_short_row_beside_one_that_wraps_sees_no_sink_twice() -> None:
    """Found by the test above: an empty slot of the ring passed for a sink."""
    run(
        Spec(ring=2, max_write=4, sinks=1, rows=3, key_dim=32, value_dim=32),
        [("update", 5), ("trim_few", (0, 0, 2)), *[("update", 1)] * 9],
    )


@pytest.mark.slow
@given(st.integers(1, 700), st.integers(1, 300), st.booleans(), st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_short_prompts_stay_small_and_long_ones_bounded(
    ring: int, max_write: int, step_growth: bool, chunks: list[int]
) -> None:
    twins = run(Spec(ring=ring, max_write=max_write, step_growth=step_growth, key_dim=32, value_dim=32), [])
    for chunk in chunks:
        twins.update(chunk)
    slots = ring + max_write - 1
    assert twins.cache.capacity < min(2 * sum(chunks), slots) + 256


def undo_and_go_on(spec: Spec, written: int, undone: int) -> None:
    twins = Twins(spec)
    for _ in range(written):
        twins.update(1)
    twins.trim([undone])
    twins.update(1)
    twins.update(min(3, spec.max_write))


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize(("ring", "max_write"), [(4, 1), (4, 3), (5, 6), (7, 2)])
def test_the_rollback_bound_is_exact(ring: int, max_write: int, sinks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By brute force: every trim that is allowed continues exactly; one more than that would not."""
    bound_is_exact(Spec(ring=ring, max_write=max_write, sinks=sinks, key_dim=32, value_dim=32), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "max_write"), [(2, 1), (4, 1), (4, 3), (3, 6), (5, 2)])
def test_the_bound_for_chunks_is_exact(chunk: int, max_write: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bound_is_exact(Spec(chunk=chunk, max_write=max_write, key_dim=32, value_dim=32), monkeypatch)


def bound_is_exact(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, refused = spec.make().layout, 0
    for written in range(1, 3 * layout.max_slots):
        most = layout.max_trim(Row(0, written, written))
        assert most >= min(written, spec.max_write)
        for undone in range(most + 1):
            undo_and_go_on(spec, written, undone)
        if most < written:
            refused += 1
            with monkeypatch.context() as patch:
                patch.setattr(type(layout), "max_trim", lambda self, row, more=most + 1: more)
                with pytest.raises(AssertionError):
                    undo_and_go_on(spec, written, most + 1)
    assert refused


@pytest.mark.parametrize("bits", [None, 8])
def test_one_slot_less_is_too_few(bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [("update", 4)] * 6
    spec = Spec(ring=6, max_write=4, key_dim=32, value_dim=32, bits=bits)
    run(spec, steps)
    monkeypatch.setattr(Ring, "max_slots", property(lambda self: self.window + self.max_write - 2))
    with pytest.raises(AssertionError):
        run(spec, steps)


@pytest.mark.parametrize("bits", [None, 8])
def test_one_slot_less_is_too_few_for_chunks(bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the write begins at the end of a chunk, or what it rejects lies there."""
    steps = [("update", 5), *[("update", 1)] * 7, ("update", 4), ("trim_few", (4, 4, 4)), ("update", 1)]
    spec = Spec(chunk=6, max_write=4, key_dim=32, value_dim=32, bits=bits)
    run(spec, steps)
    monkeypatch.setattr(Chunks, "max_slots", property(lambda self: self.chunk_size + self.max_write - 1))
    with pytest.raises((AssertionError, ValueError)):
        run(spec, steps)


@given(st.integers(1, 9), st.integers(1, 6), st.lists(st.integers(1, 14), min_size=1, max_size=20))
def test_chunks_hand_out_what_mlx_lms_cache_does(chunk: int, max_write: int, writes: list[int]) -> None:
    """As llama4 uses it, which makes its own mask of `start_position` and `offset`."""
    ours, theirs, position = ChunkedKVCache(chunk, max_write), stock.ChunkedKVCache(chunk), 0
    for new in writes:
        for cache in (ours, theirs):
            cache.maybe_trim_front()
        assert (ours.start_position, ours.offset) == (theirs.start_position, theirs.offset)
        x = mx.arange(position, position + new).astype(mx.float32)[None, None, :, None]
        fetched = [cache.update_and_fetch(x, -x) for cache in (ours, theirs)]
        assert all(mx.array_equal(a, b).item() for a, b in zip(*fetched, strict=True))
        assert all(mx.array_equal(a, b).item() for a, b in zip(ours.keys_and_values(), fetched[1], strict=True))
        position += new


def test_a_trim_that_would_lose_tokens_says_what_would_help() -> None:
    cache = RingKVCache(8, 4)
    for _ in range(20):
        cache.update_and_fetch(mx.ones((1, 2, 1, 32)), mx.ones((1, 2, 1, 32)))
    assert cache.can_trim(4)
    assert not cache.can_trim(5)
    with pytest.raises(
        ValueError, match=r"cannot trim 6 tokens: this cache is a ring .* trim by 0 to 4, or .*max_rollback=6"
    ):
        cache.trim(6)
    assert cache.offset == 20
    assert cache.trim(4) == 4
    assert not cache.can_trim(1)  # trims add up until writes pass the high-water mark again


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RingKVCache(0), "window is 0"),
        (lambda: RingKVCache(8, 0), "max_write is 0"),
        (lambda: RingKVCache(8, sinks=8), "sinks is 8: a window of 8 tokens has room for 0 to 7"),
        (lambda: RingKVCache(8, sinks=-1), "sinks is -1"),
        (lambda: RotatingKVCache(-4), "window is -4"),
        (lambda: RotatingKVCache(4, keep=4), "sinks is 4"),
        (lambda: RingBufferKVCache(8, 0), "max_write is 0"),
        (lambda: ChunkedKVCache(0), "chunk_size is 0"),
        (lambda: ChunkedKVCache(8, 0), "max_write is 0"),
    ],
)
def test_impossible_rings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_all_names_make_the_same_thing() -> None:
    made = (RingKVCache(8), RotatingKVCache(8, keep=2), RingBufferKVCache(8), ChunkedKVCache(8, 3))
    assert all(type(cache) is KVCache for cache in made)
    assert [cache.layout for cache in made] == [Ring(8, 512), Ring(8, 512, 2), Ring(8, 8), Chunks(8, 3)]
