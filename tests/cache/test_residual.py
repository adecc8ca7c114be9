"""Newest tokens are seen as they came, whatever stores the others and however they are written: so a reference says."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from oracle import Spec, Twins
from outside import PACKED, ROTATED
from test_cache_properties import run
from tiny_models import make_model

from mlx_kv import (
    CachePolicy,
    ChunkedKVCache,
    CompressedKVCache,
    KVCache,
    RingKVCache,
    make_prompt_cache,
    show_attention,
)
from mlx_kv.cache.codecs import Affine
from mlx_kv.cache.residual import ROOM
from mlx_kv.mlxlm.attention import AttentionCall

CODECS: tuple[Any, ...] = (Affine(4, 32), *PACKED, "half", ("plain", Affine(4, 32)))
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 7},
    {"ring": 20, "max_write": 8},
    {"ring": 50, "max_write": 70, "sinks": 2},
    {"chunk": 16, "max_write": 8},
    {"budget": 30, "keep_recent": 12, "margin": 5},
    {"budget": 30, "keep_recent": 12, "margin": 5, "share": "head"},
)
fractions = st.floats(0, 1)
steps = st.one_of(
    st.tuples(
        st.just("update"),
        st.one_of(st.just(1), st.integers(1, 12), st.integers(30, 90), st.sampled_from([ROOM + 1, ROOM + 2])),
    ),
    st.tuples(st.just("update"), st.integers(1, 3)),
    st.tuples(st.just("trim"), fractions),
    st.tuples(st.just("trim_few"), st.tuples(*[st.integers(0, 12)] * 3)),
    st.tuples(st.sampled_from(["copy", "load", "reset"]), st.none()),
)


@given(
    codec=st.sampled_from(CODECS),
    layout=st.sampled_from(LAYOUTS),
    residual=st.sampled_from([1, 3, 12]),
    rows=st.sampled_from([1, 3]),
    carries=st.booleans(),
    room=st.sampled_from([4, ROOM]),
    history=st.lists(steps, min_size=2, max_size=9),
    seed=st.integers(0, 1000),
)
def test_any_history(
    codec: Any,
    layout: dict[str, Any],
    residual: int,
    rows: int,
    carries: bool,
    room: int,
    history: list[Any],
    seed: int,
) -> None:
    spec = Spec(codec=codec, residual=residual, rows=rows, carries=carries, room=room, **layout)
    run(spec, [("update", 5), *history, ("update", 2), ("update", 1)], seed)


@given(
    codec=st.sampled_from(CODECS),
    share=st.sampled_from(["layers", "layer", "head"]),
    residual=st.integers(1, 8),
    rows=st.sampled_from([1, 3]),
    carries=st.booleans(),
    history=st.lists(
        st.one_of(
            st.tuples(st.just("update"), st.integers(1, 24)),
            st.tuples(st.just("trim_few"), st.tuples(*[st.integers(0, 12)] * 3)),
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 1000),
)
@pytest.mark.slow
def test_trims_after_a_compaction(
    codec: Any, share: Any, residual: int, rows: int, carries: bool, history: list[Any], seed: int
) -> None:
    """Slots before the cut follow no order: a trim stops where the newest tokens as they came would reach there."""
    spec = Spec(
        codec=codec, residual=residual, rows=rows, carries=carries, budget=20, keep_recent=8, margin=4, share=share
    )
    twins = run(spec, [("update", 40), ("update", 1), *history, ("update", 12)], seed)
    evicted = [row.evicted for row in twins.cache.view.rows]
    for most, row in zip(twins.cache.most_trims, twins.cache.view.rows, strict=True):
        assert most == row.end - 12 - (residual - 1)
    twins.trim(list(twins.cache.most_trims))
    twins.update(1)
    assert [row.evicted for row in twins.cache.view.rows] == evicted


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_quantised_later(layout: dict[str, Any]) -> None:
    spec = Spec(codec=ROTATED, residual=4, quantized_start=10, carries=True, **layout)
    run(spec, [("update", 9), ("update", 1), ("update", 3), ("update", 40), ("update", 1)])


@pytest.mark.parametrize("residual", [1, 12])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("new", range(ROOM, ROOM + 4))
def test_writes_as_long_as_there_is_room_and_longer(new: int, rows: int, residual: int) -> None:
    """What the first queries of a longer one see is not in the ring any more when they see it."""
    run(Spec(codec=ROTATED, residual=residual, rows=rows), [("update", 40), ("update", new), ("update", 1)])


def test_the_last_of_them_counts() -> None:
    """A reference with one token fewer, or one more, is another."""
    for wrong in (7, 9):
        twins = Twins(Spec(codec=ROTATED, residual=8, carries=True))
        twins.update(20)
        object.__setattr__(twins.spec, "residual", wrong)
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            twins.update(1)


def test_trims_go_back_as_far_as_all_is_there() -> None:
    for count, most in ((5, 5), (8 + ROOM, 8 + ROOM), (9 + ROOM, ROOM + 1), (200, ROOM + 1)):
        cache = KVCache(bits=4, residual_length=8)
        x = mx.zeros((1, 2, count, 64))
        cache.update_and_fetch(x, x)
        assert cache.most_trims == (most,)
        assert cache.is_trimmable() == (most == count)
        with pytest.raises(ValueError, match=f"trim by 0 to {most}|holds {count}"):
            cache.trim(most + 1)
        assert cache.trim(most) == most


def test_rows_take_with_them_how_far_they_can_go_back() -> None:
    cache, x = KVCache.merge([KVCache(bits=4, residual_length=8)] * 2), mx.zeros((2, 2, 200, 64))
    cache.prepare(lengths=[200, 5])
    cache.update_and_fetch(x, x)
    cache.finalize()
    assert cache.most_trims == (ROOM + 1, 5)
    assert copy.deepcopy(cache).most_trims == KVCache.from_state(cache.state).most_trims == (ROOM + 1, 5)
    one, other = cache.extract(0), cache.extract(1)
    assert one.most_trims + other.most_trims == (ROOM + 1, 5)
    assert KVCache.merge([other, one, KVCache(bits=4, residual_length=8)]).most_trims == (5, ROOM + 1, 0)
    other.extend(one)
    assert other.most_trims == (5, ROOM + 1)
    cache.filter([1, 0])
    assert cache.most_trims == (5, ROOM + 1)
    cache.trim_per_sequence([1, 2])
    assert cache.most_trims == (4, ROOM - 1)
    cache.reset()
    assert cache.most_trims == (0,)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="residual_length is 8, but bits is None"):
        CachePolicy(residual_length=8)
    with pytest.raises(ValueError, match="give no more than keep_recent=64"):
        CachePolicy(bits=4, residual_length=65, budget=200)
    with pytest.raises(ValueError, match="another share than 'adaptive'"):
        CachePolicy(bits=4, residual_length=8, budget=200, share="adaptive")
    with pytest.raises(ValueError, match="residual_length"):
        CachePolicy(bits=4, residual_length=-1)
    assert CachePolicy(bits=4, residual_length=8, max_rollback=ROOM).max_rollback == ROOM
    with pytest.raises(ValueError, match=f"no more than {ROOM} tokens can be taken back.*draft fewer"):
        CachePolicy(bits=4, residual_length=8, max_rollback=ROOM + 1)
    one, other = (KVCache(bits=4, residual_length=length) for length in (8, 9))
    with pytest.raises(ValueError, match="has a residual of 9, the first one 8"):
        one.extend(other)


def test_attention_that_cannot_be_answered_is_refused() -> None:
    """Also where nobody asked for caches by a policy."""
    model = make_model("gemma2")
    with pytest.raises(ValueError, match="attention of gemma2 cannot be answered here: leave it out"):
        make_prompt_cache(model, CachePolicy(bits=4, group_size=32, residual_length=8))
    caches = [KVCache(bits=4, group_size=32, residual_length=8) for _ in model.layers]
    with pytest.raises(ValueError, match=r"gemma2 shows none of layer 0.*leave out residual_length"):
        show_attention(model, caches)


@pytest.mark.parametrize("addends", [False, True])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("carries", [False, True])
def test_what_a_model_hides_of_them_stays_hidden(carries: bool, new: int, addends: bool) -> None:
    """A mask of the model's own counts for the newest tokens as for all others; so do numbers that it adds."""
    random = np.random.default_rng(new)
    q, k, v = (mx.array(random.normal(size=(1, heads, 12, 64)).astype(np.float32)) for heads in (4, 2, 2))
    cache = KVCache(bits=4, group_size=32, residual_length=4)
    if carries:
        cache.carry(object())
    cache.update_and_fetch(k[:, :, : 12 - new], v[:, :, : 12 - new])
    held = cache.update_and_fetch(k[:, :, 12 - new :], v[:, :, 12 - new :])
    shown = np.tril(random.random((new, 12)) < 0.5, 12 - new)
    shown[:, [0, 10]] = [True, False]
    told = np.where(shown, random.normal(size=shown.shape) if addends else 0, -np.inf)
    mask = mx.array(told.astype(np.float32)) if addends else mx.array(shown)
    named = {"cache": cache, "scale": 0.125, "mask": mask}
    got = cache.attention_hook.attend(AttentionCall(scaled_dot_product_attention, (q[:, :, 12 - new :], *held), named))
    for j in range(new):
        near = (np.arange(12) > 12 - new + j - 4)[:, None]
        keys, values = (
            np.repeat(np.where(near, x, Spec(bits=4).left(which, x)), 2, axis=1).astype(np.float64)
            for which, x in enumerate((np.array(k), np.array(v)))
        )
        scores = np.einsum("hd,hnd->hn", np.array(q[0, :, 12 - new + j], np.float64), keys[0]) / 8 + told[j]
        weights = np.exp(scores - scores.max(1, keepdims=True))
        wanted = np.einsum("hn,hnd->hd", weights / weights.sum(1, keepdims=True), values[0])
        np.testing.assert_allclose(np.array(got[0, :, j]), wanted, atol=2e-5, rtol=2e-5)


def test_a_cache_alone_refuses_it_as_a_policy_does() -> None:
    options: dict[str, Any] = {"bits": 4, "residual_length": 8}
    CompressedKVCache(200, keep_recent=8, **options)
    RingKVCache(99, 80, max_rollback=ROOM, **options)
    with pytest.raises(ValueError, match="give no more than keep_recent=7"):
        CompressedKVCache(200, keep_recent=7, **options)
    with pytest.raises(ValueError, match="another share than 'adaptive'"):
        CompressedKVCache(200, share="adaptive", **options)
    for make in (RingKVCache, ChunkedKVCache):
        with pytest.raises(ValueError, match=f"no more than {ROOM} tokens can be taken back"):
            make(99, 80, max_rollback=ROOM + 1, **options)
