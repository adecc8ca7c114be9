"""Budgets: any history equals attention over what is left, and what is left is what the score says."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept import FORMULAS
from oracle import Spec
from test_cache_properties import STORAGE, fractions, run, spec_of

from mlx_kv import CachePolicy, CompressedKVCache, KVCache
from mlx_kv.cache.eviction import compaction
from mlx_kv.cache.eviction.compaction import Moves, lowest
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.layout import Budget, Ring, Row

SCORES = sorted(FORMULAS)

specs = st.builds(
    spec_of,
    **STORAGE,
    budget=st.integers(9, 24),
    keep_recent=st.integers(0, 5),
    sinks=st.integers(0, 3),
    margin=st.integers(0, 6),
    score=st.sampled_from(SCORES),
    share=st.sampled_from(["layers", "layer", "head", "adaptive"]),
)
operations = st.one_of(
    st.tuples(st.just("update"), st.one_of(st.just(1), st.integers(1, 12), st.integers(20, 60))),
    st.tuples(st.just("update"), st.integers(1, 9)),
    st.tuples(st.just("trim_few"), st.tuples(*[st.integers(0, 9)] * 3)),
    st.tuples(st.just("trim_rows"), st.tuples(fractions, fractions, fractions)),
    st.tuples(st.sampled_from(["copy", "load", "reset", "copy", "load"]), st.none()),
)


@pytest.mark.slow
@given(specs, st.lists(operations, min_size=2, max_size=10), st.integers(0, 1000))
def test_any_history(spec: Spec, steps: list[tuple[str, Any]], seed: int) -> None:
    run(spec, [("update", 25), *steps, ("update", 20), ("update", 2), ("update", 1)], seed)


@pytest.mark.parametrize("share", ["layers", "layer", "head", "adaptive"])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("score", SCORES)
def test_every_score_in_every_combination(score: str, rows: int, bits: int | None, share: str) -> None:
    spec = Spec(bits=bits, rows=rows, budget=14, keep_recent=4, sinks=2, margin=3, score=score, share=share)
    twins = run(spec, [("update", 30), ("update", 1), ("trim_rows", (0.1, 0.0, 0.06)), ("update", 9), ("load", None)])
    for new in (1, 1, 1, 1, 7):
        twins.update(new)
    assert twins.cache.evictor.compactions >= 2


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("bits", [None, 8])
def test_a_budget_that_is_not_exceeded_changes_nothing(score: str, bits: int | None) -> None:
    budget, plain = CompressedKVCache(100, score=score, bits=bits), KVCache(bits=bits)
    for new in (70, 1, 28, 1):
        x = mx.random.normal((2, 2, new, 64), key=mx.random.key(new))
        assert str(budget.make_mask(new)) == str(plain.make_mask(new))
        for got, wanted in zip(
            *(nn.utils.tree_flatten(c.update_and_fetch(x, -x)) for c in (budget, plain)), strict=True
        ):
            assert mx.array_equal(got[1], wanted[1]).item()
    assert budget.evictor.compactions == 0


@pytest.mark.parametrize("chunk", [1, 512])
def test_prefill_in_any_chunks_keeps_the_exact_budget_and_true_offsets(chunk: int) -> None:
    cache = CompressedKVCache(200, keep_recent=10, sinks=2, margin=7)
    total, sizes = 1536, set()
    for first in range(0, total, chunk):
        before = cache.evictor.compactions
        x = mx.random.normal((1, 2, chunk, 32), key=mx.random.key(first))
        cache.update_and_fetch(x, x)
        if cache.evictor.compactions > before:
            sizes.add(cache.size() - chunk)
        assert cache.offset == first + chunk
    assert sizes == {200}
    cache.compact()
    assert (cache.size(), cache.offset, cache.evictor.evicted) == (200, total, total - 200)
    assert cache.capacity <= 1024  # budget + margin + one chunk of 512, rounded up to 256


def moved(cache: KVCache) -> int:
    """Slots that were moved in each head, for all rows together."""
    return sum(work.moved for work in cache.evictor.metadata.work)


def test_a_compaction_runs_once_a_margin_and_moves_no_more_than_it_evicts() -> None:
    cache = CompressedKVCache(300, keep_recent=16, sinks=4, margin=20, score="key_norm")
    x = mx.random.normal((1, 2, 300 + 21 * 10, 32))
    for first in range(0, x.shape[2], 1):
        cache.update_and_fetch(x[:, :, first : first + 1], x[:, :, first : first + 1])
    assert (cache.evictor.compactions, cache.evictor.evicted) == (9, 9 * 21)
    assert moved(cache) <= 9 * (21 + 16)


def test_a_budget_as_a_layout_evicts() -> None:
    x = mx.random.normal((1, 2, 300, 32))
    cache = KVCache(layout=Budget(100, keep_recent=8))
    assert KVCache.from_state(cache.state).evictor is not None
    cache.update_and_fetch(x, x)
    cache.update_and_fetch(x[:, :, :1], x[:, :, :1])
    assert (cache.size(), cache.offset, cache.evictor.evicted) == (101, 301, 200)
    same = CompressedKVCache(100, keep_recent=8)
    same.update_and_fetch(x, x)
    same.update_and_fetch(x[:, :, :1], x[:, :, :1])
    assert cache.positions.tolist() == same.positions.tolist()
    with pytest.raises(ValueError, match="leave the layout out"):
        KVCache(layout=Ring(8, 4), evictor=Evictor(Budget(100)))


def test_work_is_counted_by_row_and_goes_with_it() -> None:
    """Copies of a prefix have not done its work again, and a row that leaves takes its own along."""
    x = mx.random.normal((1, 2, 40, 32))

    def filled(steps: int) -> KVCache:
        cache = CompressedKVCache(20, keep_recent=2, margin=3)
        for _ in range(steps):
            cache.update_and_fetch(x, x)
        return cache

    one, other = filled(5), filled(3)
    assert (one.evictor.compactions, other.evictor.compactions) == (4, 2)
    many = KVCache.merge([one] * 24)
    assert many.evictor.compactions == 4
    batch = KVCache.merge([other, one])
    assert batch.evictor.compactions == 4
    assert moved(batch) == moved(one) + moved(other)
    batch.update_and_fetch(*[mx.concatenate([x, x])] * 2)  # compacts both, whose last write is still whole
    assert [batch.extract(row).evictor.compactions for row in (0, 1)] == [3, 5]
    loaded = KVCache.from_state(batch.state)
    assert loaded.evictor.metadata.work == batch.evictor.metadata.work
    batch.filter([0])
    assert batch.evictor.compactions == 3
    batch.extend(one)
    assert batch.evictor.compactions == 4
    old = list(one.state)[:-1]  # nor any residual
    old[-1] = [*old[-1][:6], [7, 4, 0.5]]  # as it was written before rows were told apart
    assert KVCache.from_state(tuple(old)).evictor.metadata.work == ((7, 4, 0.5),)


@given(st.integers(1, 60), st.integers(1, 4), st.data())
def test_lowest(n: int, heads: int, data: st.DataObject) -> None:
    """Against a sort of (score, position) pairs, for all floats."""
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    drawn = data.draw(st.lists(st.lists(floats, min_size=n, max_size=n), min_size=heads, max_size=heads))
    positions = data.draw(st.permutations(range(n)))
    count = data.draw(st.integers(1, n))
    got = lowest(mx.array(drawn), mx.array([positions] * heads), count).tolist()
    for head in range(heads):
        pairs = sorted((float(np.float32(drawn[head][i])) + 0.0, positions[i], i) for i in range(n))
        assert got[head] == sorted(i for _, _, i in pairs[:count])


@pytest.mark.parametrize(
    ("budget", "residual", "kept"),
    [(20, 0, 5), (128, 0, 32), (128, 64, 64), (128, 16, 32), (256, 0, 64), (4096, 0, 64)],
)
def test_recent_tokens_take_a_quarter_of_a_small_budget(budget: int, residual: int, kept: int) -> None:
    bits = 4 if residual else None
    assert CompressedKVCache(budget, bits=bits, residual_length=residual).layout == Budget(budget, kept)
    policy = CachePolicy(budget=budget, bits=bits, residual_length=residual)
    assert policy.keep_recent == kept
    assert "keep_recent" not in policy.changed()
    assert CachePolicy(**policy.settings()) == policy
    larger = CachePolicy(budget=4096, bits=bits, residual_length=residual)
    assert CachePolicy(**larger.settings() | {"budget": budget}) == policy
    assert "keep_recent" in CachePolicy(budget=budget, keep_recent=kept - 1).changed()


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 68, "keep_recent": 64}, "4 sinks and keep_recent=64 are kept: give a budget from 69 up"),
        ({"budget": 5}, "4 sinks and keep_recent=1 are kept: give a budget from 6 up"),
        ({"budget": 0}, "budget is 0: give a whole number of tokens from 1 up"),
        ({"budget": -5}, "budget is -5"),
        ({"budget": 2.5}, "budget is 2.5"),
        ({"budget": 100, "keep_recent": -1}, "keep_recent is -1: give a whole number of tokens from 0 up"),
        ({"budget": 100, "sinks": -1}, "sinks is -1"),
        ({"budget": 100, "margin": -1}, "margin is -1"),
        ({"budget": 100, "max_write": 0}, "max_write is 0: give a"),
        ({"budget": 100, "score": "best"}, "there is no score 'best': choose one of key_diff, key_norm"),
        ({"budget": 100, "score": "h2o"}, "score is 'h2o', which was removed in 0.4: use score='snap_kv' or a"),
        ({"budget": 100, "score": "lag_kv"}, "score is 'lag_kv', which was removed in 0.4: use score='key_diff'"),
        ({"budget": 100, "share": "all"}, "share is 'all': choose one of layers, layer, head"),
    ],
)
def test_refuses_what_cannot_be(arguments: dict[str, Any], message: str) -> None:
    for make in (CompressedKVCache, CachePolicy):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(**arguments)


def test_a_policy_refuses_what_contradicts_itself() -> None:
    with pytest.raises(ValueError, match="got a budget and max_kv_size"):
        CachePolicy(budget=100, max_kv_size=200)
    with pytest.raises(ValueError, match="score, margin is for a budget, but budget is None"):
        CachePolicy(score="recent", margin=3)


def test_trims_back_to_what_was_recent_and_no_further() -> None:
    cache = CompressedKVCache(20, keep_recent=6, sinks=1, margin=5)
    cache.update_and_fetch(*[mx.random.normal((1, 2, 40, 32))] * 2)
    assert cache.is_trimmable()
    cache.update_and_fetch(*[mx.random.normal((1, 2, 3, 32))] * 2)
    assert not cache.is_trimmable()
    assert [cache.can_trim(n) for n in (0, 9, 10)] == [True, True, False]
    with pytest.raises(
        ValueError, match="has evicted tokens from before its recent ones; trim by 0 to 9, or keep more"
    ):
        cache.trim(10)
    cache.trim(9)
    assert (cache.offset, cache.size()) == (34, 14)


# --- the tests above must be able to fail: bugs planted one at a time ---------------------------------------------


def forgets_the_slide(layout: Budget, row: Row, after: Row) -> Moves:
    block = mx.arange(layout.keep_recent, dtype=mx.int32)
    return Moves(block + layout.cut, block + layout.cut)


def evicts_the_highest(scores: mx.array, positions: mx.array, count: int) -> mx.array:
    return lowest(-scores, positions, count)


def leaves_one_more(self: Budget, row: Row, longer: int = 0) -> Row:
    return row._replace(start=self.budget + 1 - row.offset)


def counts_what_is_held(self: Budget, row: Row, longer: int = 0) -> Row:
    return row._replace(start=0, offset=self.budget)


def trims_one_too_far(self: Budget, row: Row) -> int:
    return row.offset if row.start >= 0 else row.end - self.cut + 1


PLANTED = {
    "the recent block stays where it is": (compaction, "slide", forgets_the_slide),
    "the best tokens go": (compaction, "lowest", evicts_the_highest),
    "one token above the budget stays": (Budget, "compacted", leaves_one_more),
    "offset is what is held": (Budget, "compacted", counts_what_is_held),
    "a trim goes one token too far": (Budget, "max_trim", trims_one_too_far),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec(rows=3, budget=14, keep_recent=4, sinks=2, margin=3)
    steps = [("update", 30), ("update", 1), ("trim", 0.2), ("update", 9), ("update", 2), ("update", 1)]
    run(spec, steps)
    where, name, broken = PLANTED[bug]
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError):
        run(spec, steps)
