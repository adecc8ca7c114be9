"""Shapes that follow what a sequence is doing: exact in every phase and across changes, small while tokens come one by
one, and no way back and forth."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Spec, attend, live_slots
from test_cache_properties import run
from test_rings import chunked, rings

from mlx_kv import (
    ChunkedKVCache,
    CompressedKVCache,
    KVCache,
    RingKVCache,
    compact,
    load_prompt_cache,
    save_prompt_cache,
)
from mlx_kv.cache import buffers, kv_cache
from mlx_kv.cache.layout import Chunks, Ring, Row, WriteCapacity, moves_between, planned, reshaped
from mlx_kv.cache.plan import plan_of

SETTLED = WriteCapacity.PERIOD + 1  # steps of decoding after which the room is that of decoding
fractions = st.floats(0, 1)
budgets = st.builds(
    lambda budget, keep_recent, **options: Spec(budget=budget, keep_recent=min(keep_recent, budget - 3), **options),
    budget=st.integers(6, 14),
    keep_recent=st.integers(0, 6),
    sinks=st.integers(0, 2),
    margin=st.integers(0, 4),
    max_write=st.integers(1, 8),
    score=st.sampled_from(["key_norm", "key_diff"]),
    share=st.sampled_from(["layers", "head"]),
    bits=st.sampled_from([None, 8]),
    rows=st.sampled_from([1, 3]),
    key_dim=st.just(32),
    value_dim=st.just(32),
)
operations = st.one_of(
    st.tuples(st.just("updates"), st.tuples(st.integers(1, 3), st.integers(1, 8))),  # of so many tokens, so often
    st.tuples(st.just("update"), st.integers(1, 30)),
    st.tuples(st.just("trim_few"), st.tuples(*[st.integers(0, 8)] * 3)),
    st.tuples(st.just("trim"), fractions),
    st.tuples(st.sampled_from(["copy", "load", "reset"]), st.none()),
)


@pytest.fixture
def period(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Looks often, so that short histories change phases."""
    monkeypatch.setattr(WriteCapacity, "PERIOD", 3)
    return iter([3])


def spelled_out(steps: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Runs of updates as single ones."""
    return [
        one
        for name, argument in steps
        for one in ([("update", argument[0])] * argument[1] if name == "updates" else [(name, argument)])
    ]


@given(rings | chunked | budgets, st.lists(operations, min_size=3, max_size=8), st.integers(1, 6), st.integers(0, 999))
def test_any_history_through_changing_phases(spec: Spec, steps: list[tuple[str, Any]], often: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriteCapacity, "PERIOD", often)
        run(spec, [("update", 5), *spelled_out(steps), ("update", 3), *[("update", 1)] * 4], seed)


@given(rings | chunked | budgets, st.lists(operations, min_size=3, max_size=8), st.integers(0, 999))
@pytest.mark.slow
def test_the_short_way_comes_to_the_same_as_the_whole(spec: Spec, steps: list[tuple[str, Any]], seed: int) -> None:
    states = []
    for short in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WriteCapacity, "PERIOD", 4)
            if not short:
                patch.setattr(KVCache, "_fast_update", lambda *_: None)
                patch.setattr(KVCache, "_next_plan", lambda *_: None)
            twins = run(spec, [("update", 5), *spelled_out(steps), *[("update", 1)] * 3], seed)
        cache = twins.cache
        live = [sorted(live_slots(cache, row)) for row in cache.view.rows]
        held = [np.array(p)[i][:, slots] for p in cache.state.keys for i, slots in enumerate(live)]
        states.append((cache.view.rows, cache.layout, cache.capacity, held))
    (*one, held), (*other, others) = states
    assert one == other
    assert all(np.array_equal(a, b) for a, b in zip(held, others, strict=True))


def test_decoding_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[int] = []
    monkeypatch.setattr(KVCache, "_full_update", lambda *_, of=KVCache._full_update: (whole.append(1), of(*_)))
    for cache in (KVCache(reserve=600), RingKVCache(16, 8), CompressedKVCache(256, max_write=64), KVCache(8, 32)):
        decode(cache, 5, 8)
        whole.clear()
        decode(cache, 200)
        # Growth, a compaction, and a look at what is written now and then.
        assert len(whole) <= 2 + 200 // WriteCapacity.PERIOD + 200 // 64


def decode(cache: KVCache, steps: int, new: int = 1, dim: int = 32) -> None:
    x = mx.ones((1, 2, new, dim))
    for _ in range(steps):
        mx.eval(cache.update_and_fetch(x, x))


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("sinks", [0, 4])
def test_a_ring_that_decodes_is_its_window_and_needs_no_mask(bits: int | None, sinks: int) -> None:
    cache = RingKVCache(512, 512, sinks, bits=bits, group_size=32)
    decode(cache, 4, 512)
    assert cache.capacity == 1024
    assert isinstance(cache.make_mask(1), mx.array)
    decode(cache, SETTLED)
    assert cache.capacity == 512
    assert cache.make_mask(1) is None
    decode(cache, 1, 200)  # a prompt comes: there is room for its writes again
    assert cache.capacity == 768
    decode(cache, 1, 512)
    assert cache.capacity == 1024


def test_rows_of_one_batch_need_no_mask_once_all_their_rings_are_full() -> None:
    cache = RingKVCache(8, 4)
    cache.update_and_fetch(*[mx.ones((2, 2, 4, 32))] * 2)
    cache.trim_per_sequence([0, 3])
    for _ in range(6):
        cache.update_and_fetch(*[mx.ones((2, 2, 1, 32))] * 2)
    assert isinstance(cache.make_mask(1), mx.array)  # the shorter one is not full yet
    for _ in range(SETTLED):
        cache.update_and_fetch(*[mx.ones((2, 2, 1, 32))] * 2)
    assert cache.make_mask(1) is None
    assert isinstance(cache.make_mask(2), mx.array)


def test_a_budget_that_decodes_has_room_for_its_margin_alone() -> None:
    cache = CompressedKVCache(1024, max_write=2048)
    decode(cache, 3, 2048)
    assert cache.capacity >= 3072
    decode(cache, SETTLED)
    assert cache.capacity == 1280  # 1,024 + 64 + 1
    decode(cache, 200)
    assert cache.capacity == 1280
    decode(cache, 1, 2048)
    assert cache.capacity >= 3072


def test_drafts_have_room_for_themselves_and_nothing_flips() -> None:
    """Writes of 1 to 5 tokens, of which some are taken back: one change of shape, whatever their lengths."""
    cache, shapes = RingKVCache(300, 512), []
    decode(cache, 2, 512)
    for number in range(300):
        new = 1 + number % 5
        decode(cache, 1, new)
        cache.trim(number % new)
        shapes.append(cache.layout.room)
    assert shapes[-1] == 8
    assert sum(a != b for a, b in pairwise(shapes)) == 1


def test_a_draft_models_ring_keeps_room_for_what_it_may_take_back() -> None:
    """Token by token, and then up to four taken back at once, as mlx-lm's loop does with draft models."""
    cache = RingKVCache(16, 64)
    decode(cache, 1, 40)
    for number in range(100):
        decode(cache, 4)
        assert cache.can_trim(4)
        cache.trim(number % 5)
    assert cache.layout.room == 4


@given(st.integers(1, 6), st.integers(1, 8), st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_what_was_promised_can_be_taken_back_in_every_phase(promised: int, most: int, writes: list[int]) -> None:
    for cache in (RingKVCache(8, most, max_rollback=promised), ChunkedKVCache(8, most, max_rollback=promised)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WriteCapacity, "PERIOD", 2)
            for new in writes:
                decode(cache, 1, new)
                assert cache.can_trim(min(promised, cache.offset))
                if new <= most:
                    assert cache.can_trim(new)


@given(
    st.sampled_from([Ring(5, 6), Ring(5, 6, 2), Chunks(4, 6)]),
    st.integers(0, 40),
    st.integers(0, 6),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_what_can_be_taken_back_after_a_change_is_what_was_left(
    layout: Any, offset: int, rejected: int, rooms: tuple[int, int]
) -> None:
    """By counting: which positions still lie in slots, before and after."""
    old, new = (layout.with_room(room) for room in rooms)
    rejected = min(rejected, old.max_trim(Row(0, offset + rejected, offset + rejected)))
    row = Row(0, offset, offset + rejected, layout.first_seen(offset))
    lies = {old.slot(row, p): p for p in range(offset + rejected)}  # the last that was written there
    slots = {}
    for source, target, count in moves_between(old, new, row):
        for step in range(count):
            assert target + step not in slots
            slots[target + step] = lies.get(source + step)
    (moved,) = reshaped(old, new, (row,))
    held = {p for slot, p in slots.items() if p is not None and p < offset and new.slot(moved, p) == slot}
    most = 0
    while most < offset:
        back = offset - most - 1
        first = new.first_seen(back)
        if not all(p in held for p in [*range(min(layout.sinks, back)), *range(max(first, layout.sinks), back)]):
            break
        most += 1
    assert new.max_trim(moved) == most if isinstance(layout, Ring) else new.max_trim(moved) <= most


@pytest.mark.parametrize(
    "spec", [Spec(ring=6, max_write=6, sinks=1), Spec(ring=5, max_write=8), Spec(chunk=5, max_write=6)]
)
@pytest.mark.usefixtures("period")
@pytest.mark.slow
def test_the_bound_is_exact_across_phases(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trim that is allowed continues exactly, before and after the ring has become narrow, and wide again."""
    refused = 0
    for singles in range(9):
        for then in (0, 4):
            before = [("update", 13), *[("update", 1)] * singles, *[("update", then)] * (then > 0)]
            after = [("update", 1), ("update", 3)]
            layout = run(spec, before).cache
            most = layout.layout.max_trim(layout.view.rows[0])
            for undone in range(most + 1):
                run(spec, [*before, ("trim_few", (undone,)), *after])
            if most == layout.offset:
                continue
            with monkeypatch.context() as patch:
                patch.setattr(type(layout.layout), "max_trim", lambda self, row, more=most + 1: more)
                try:
                    run(spec, [*before, ("trim_few", (most + 1,)), *after])
                except AssertionError:
                    refused += 1
    assert refused >= (12 if spec.chunk is None else 1)


def test_rows_that_come_take_the_shape_of_those_that_are_there() -> None:
    batch, arriving = RingKVCache(300, 512), RingKVCache(300, 512)
    for cache in (batch, arriving):
        decode(cache, 2, 512)
    decode(batch, SETTLED)
    batch.extend(arriving)
    assert (batch.capacity, batch.layout.room) == (512, 1)
    assert arriving.layout.room == 512
    budgeted, arriving = CompressedKVCache(300, max_write=512), CompressedKVCache(300, max_write=512)
    for cache in (budgeted, arriving):
        decode(cache, 2, 512)
        decode(cache, 1)
    decode(budgeted, SETTLED)
    budgeted.extend(arriving)
    assert budgeted.capacity == 512


def test_files_and_copies_go_on_in_the_phase_they_were_in() -> None:
    cache = RingKVCache(8, 64, max_rollback=2)
    decode(cache, 1, 40)
    decode(cache, SETTLED)
    again = KVCache.from_state(cache.state)
    assert again.layout == cache.layout == Ring(8, 64, 0, 2, 2)
    assert [list(again.view.rows)] == [list(cache.view.rows)]
    cache.reset()
    assert cache.layout.room == 64


@pytest.mark.parametrize("bits", [None, 8])
def test_saved_caches_go_on_in_the_phase_they_were_in(bits: int | None, tmp_path: Path) -> None:
    caches = [
        RingKVCache(300, 512, 4, bits=bits, group_size=32),
        RingKVCache(300, 512, max_rollback=5, bits=bits, group_size=32),
        CompressedKVCache(300, max_write=512, bits=bits, group_size=32),
    ]
    for number, cache in enumerate(caches):
        for new in (400, 500, *[1] * SETTLED):
            keys = mx.random.normal((1, 2, new, 32), key=mx.random.key(new + number))
            cache.update_and_fetch(keys, -keys)
    save_prompt_cache(tmp_path / "phases.safetensors", caches)
    loaded = load_prompt_cache(tmp_path / "phases.safetensors")
    for own, other in zip(caches, loaded, strict=True):
        assert (own.layout.parameters, own.capacity) == (other.layout.parameters, other.capacity)
        for new in (1, 1, 100, 3):
            x = mx.random.normal((1, 2, new, 32), key=mx.random.key(new))
            q = mx.random.normal((1, 4, new, 32), key=mx.random.key(new + 1))
            assert mx.array_equal(attend(own, q, x, x, None), attend(other, q, x, x, None)).item()


def test_a_compaction_on_demand_and_phases() -> None:
    cache = CompressedKVCache(64, 16, max_write=600)
    decode(cache, 1, 600)
    compact([cache])
    decode(cache, SETTLED)
    assert cache.capacity == 256


# --- the tests above must be able to fail: bugs planted one at a time ---------------------------------------------

LONG_AND_SHORT = [
    *[("update", 13), *[("update", 1)] * 7, ("update", 5), ("trim_few", (8,)), *[("update", 1)] * 6],
    *[("update", 7), ("trim_few", (3,)), *[("update", 1)] * 14],
]


def moves_one_too_low(*asked: Any) -> list[tuple[int, int, int]]:
    return [(max(0, s - 1), t, n) for s, t, n in genuine_moves(*asked)]


def forgets_the_sinks(*asked: Any) -> list[tuple[int, int, int]]:
    return genuine_moves(*asked)[1:]


def promises_more(old: Any, new: Any, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(row._replace(high=row.offset) for row in rows)


def masks_as_before(plan: Any, *asked: Any) -> Any:
    return genuine_mask(plan_of(planned(plan.layout), plan.rows, plan.new, None), *asked)


genuine_moves, genuine_mask = moves_between, kv_cache.make_mask
PLANTED: dict[str, tuple[list[Any], str, Any, Spec]] = {
    "a slot off": ([buffers], "moves_between", moves_one_too_low, Spec(ring=6, max_write=6)),
    "sinks stay behind": ([buffers], "moves_between", forgets_the_sinks, Spec(ring=6, max_write=6, sinks=2)),
    "one slot less": ([Ring], "max_slots", property(lambda s: s.window + s.room - 2), Spec(ring=6, max_write=6)),
    "the mask of before": ([kv_cache], "make_mask", masks_as_before, Spec(ring=6, max_write=6)),
    "it promises more than it holds": ([kv_cache], "reshaped", promises_more, Spec(ring=6, max_write=8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.usefixtures("period")
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, spec = PLANTED[bug]
    for known in (plan_of, reshaped):  # what others have found out, with bugs of their own
        known.cache_clear()
    run(spec, LONG_AND_SHORT)
    for module in where:
        monkeypatch.setattr(module, name, broken)
    with pytest.raises((AssertionError, ValueError)):
        run(spec, LONG_AND_SHORT)
