"""Scores: the published formulas, each written independently in tests/kept.py; what may be one, and how it is found."""

from __future__ import annotations

import copy
from dataclasses import make_dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from brought import bring
from kept import FORMULAS

from mlx_kv import CachePolicy, CompressedKVCache, KVCache, ScoredTokens, register_score
from mlx_kv.cache.eviction import scores

SCORES = sorted(FORMULAS)


@pytest.mark.parametrize("score", ["key_norm", "key_diff"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_selects_what_the_published_formula_selects(score: str, dtype: mx.Dtype) -> None:
    k, v = (mx.random.normal((1, 2, 400, 64), key=mx.random.key(seed)).astype(dtype) for seed in (1, 2))
    cache = CompressedKVCache(150, keep_recent=10, sinks=4, score=score, share="head")
    cache.update_and_fetch(k, v)
    cache.compact()
    keys, values = (np.array(x.astype(mx.float32))[0] for x in (k, v))
    wanted = FORMULAS[score](keys, values, np.arange(400))
    for head in range(2):
        order = np.argsort(wanted[head, 4:390])[::-1] + 4
        kept = {*range(4), *order[: 150 - 14].tolist(), *range(390, 400)}
        assert set(cache.positions[0, head].tolist()) == kept


def test_the_direction_of_the_key_norm() -> None:
    """Low norms stay, high norms go (Devoto et al. 2024); key_norm_high is the reverse."""
    norms = mx.array([5.0, 1, 9, 2, 8, 3, 7, 4])[None, None, :, None]
    keys = norms * mx.array([1.0] + [0] * 31)
    for score, kept in (("key_norm", {1, 3, 5, 7}), ("key_norm_high", {0, 2, 4, 6})):
        cache = CompressedKVCache(4, keep_recent=0, sinks=0, score=score)
        cache.update_and_fetch(keys, keys)
        cache.compact()
        assert set(cache.positions[0, 0].tolist()) == kept


def test_of_equal_scores_the_oldest_go() -> None:
    cache = CompressedKVCache(6, keep_recent=0, sinks=1, score=lambda tokens: mx.zeros(tokens.keys.shape[:3]))
    cache.update_and_fetch(*[mx.ones((1, 1, 10, 32))] * 2)
    cache.compact()
    assert set(cache.positions[0, 0].tolist()) == {0, 5, 6, 7, 8, 9}
    cache.update_and_fetch(*[mx.ones((1, 1, 4, 32))] * 2)
    cache.compact()  # of tokens that no longer lie in order
    assert set(cache.positions[0, 0].tolist()) == {0, 9, 10, 11, 12, 13}


@pytest.mark.parametrize("score", SCORES)
def test_heads_that_are_split_over_machines_are_scored_as_together(score: str) -> None:
    """No head knows its number: whoever has heads 2 and 3 says of them what one who has all of them says."""
    k, v = (mx.random.normal((1, 4, 300, 64), key=mx.random.key(seed)) for seed in (1, 2))
    function, where = scores.find_score(score).function, mx.arange(300)[None, None]
    halves = (slice(0, 2), slice(2, 4))
    split = [function(ScoredTokens(keys=k[:, half], values=v[:, half], positions=where)) for half in halves]
    together = function(ScoredTokens(keys=k, values=v, positions=where))
    assert mx.array_equal(mx.concatenate(split, axis=1), together).item()


@pytest.mark.parametrize("score", SCORES)
def test_what_comes_to_be_known_of_tokens_changes_no_score(score: str) -> None:
    """A field more, of which none of these scores knows, and they say what they said."""
    wider = make_dataclass("Wider", ["queries"], bases=(ScoredTokens,), frozen=True, eq=False, kw_only=True)
    known = {name: mx.random.normal((2, 2, 300, 32), key=mx.random.key(i)) for i, name in enumerate(("keys", "values"))}
    known["positions"], function = mx.arange(300)[None, None], scores.find_score(score).function
    assert mx.array_equal(function(wider(**known, queries=None)), function(ScoredTokens(**known))).item()


def test_a_score_of_single_tokens_is_asked_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counting(tokens: ScoredTokens) -> mx.array:
        asked.extend(tokens.positions[0, 0].tolist())
        return mx.random.uniform(shape=tokens.keys.shape[:3])

    monkeypatch.setattr(scores.SCORES, "registered", dict(scores.SCORES.registered))
    register_score("counting", counting, per_token=True)
    cache = CompressedKVCache(50, keep_recent=6, sinks=3, margin=4, score="counting")
    for new in (70, 3, 3, 9, 1, 1, 1, 1, 1, 1, 1, 80, 1):
        cache.update_and_fetch(*[mx.random.normal((1, 2, new, 32))] * 2)
    assert len(asked) == len(set(asked))
    assert set(asked) == set(range(max(asked) + 1))


# --- functions handed in, and names ----------------------------------------------------------------------------------


def takes_three(keys: mx.array, values: mx.array, positions: mx.array) -> mx.array:
    return keys[..., 0]


@pytest.mark.parametrize("takes", [takes_three, mx.compile(takes_three), lambda: mx.zeros(1), partial(takes_three)])
def test_a_function_of_other_arguments_is_refused_where_it_is_handed_in(takes: Any) -> None:
    before = scores.score_names()
    ways = (
        lambda: register_score("of three", takes, per_token=True),
        lambda: scores.Score("of three", takes),
        lambda: CompressedKVCache(100, score=takes),
        lambda: CachePolicy(budget=100, score=takes),
    )
    for way in ways:
        with pytest.raises(
            ValueError, match=r"takes \(.*\): a score takes one argument \(tokens\), of which tokens.keys"
        ):
            way()
    assert scores.score_names() == before
    with pytest.raises(ValueError, match=r"the score none is 5: give a function \(tokens\) -> \(B, H, n\)"):
        register_score("none", 5)


class Callable:
    def __call__(self, tokens: ScoredTokens, sign: float = 1.0) -> mx.array:
        return sign * tokens.keys[..., 0]


@pytest.mark.parametrize("takes", [lambda tokens, *more, sign=1: tokens.keys[..., 0], Callable(), mx.abs])
def test_whatever_takes_one_argument_may_be_a_score(takes: Any) -> None:
    """Also what does not tell what it takes."""
    assert scores.find_score(takes).function is takes


def test_two_functions_of_one_name_are_not_one_score() -> None:
    first, second = (
        CompressedKVCache(20, keep_recent=2, score=lambda x, sign=sign: sign * mx.linalg.norm(x.keys, axis=-1))
        for sign in (1, -1)
    )
    assert first.evictor.score.name == second.evictor.score.name
    x = mx.random.normal((1, 2, 9, 32))
    for cache in (first, second):
        cache.update_and_fetch(x, x)
    for join in (lambda: KVCache.merge([first, second]), lambda: first.extend(second)):
        with pytest.raises(ValueError, match="only caches of one kind can be one batch"):
            join()
    assert KVCache.merge([first, copy.deepcopy(first)]).size() == 9
    register_score("changes", scores.find_score("key_norm").function)
    try:
        before = CompressedKVCache(20, keep_recent=2, score="changes")
        register_score("changes", scores.find_score("key_diff").function)
        with pytest.raises(ValueError, match="only caches of one kind can be one batch"):
            KVCache.merge([before, CompressedKVCache(20, keep_recent=2, score="changes")])
    finally:
        scores.SCORES.registered.pop("changes")


def test_scores_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, scores.SCORES, "mlx_kv.scores", "longest", scores.key_norm_high)
    assert "longest" in scores.score_names()
    assert scores.find_score("longest").function is scores.key_norm_high


def test_a_loaded_cache_needs_its_score() -> None:
    cache = CachePolicy(budget=80, score=lambda tokens: mx.zeros(tokens.keys.shape[:3])).make_cache()
    with pytest.raises(ValueError, match="there is no score"):
        KVCache.from_state(cache.state)


# --- scores that break -----------------------------------------------------------------------------------------------


BROKEN: dict[str, tuple[Any, str]] = {
    "nan": (lambda x: mx.full(x.keys.shape[:3], float("nan")), "gave what is not a finite number"),
    "infinite": (lambda x: mx.full(x.keys.shape[:3], float("inf")), "gave what is not a finite number"),
    "shape": (lambda x: mx.zeros(x.keys.shape[:2]), r"expected an mx.array \(1, 2, 40\) of float32"),
    "dtype": (lambda x: mx.zeros(x.keys.shape[:3], mx.float16), "of mlx.core.float16, expected an mx.array"),
    "type": (lambda x: [1.0] * x.keys.shape[2], "gave list, expected an mx.array"),
}


@pytest.mark.parametrize("share", ["layers", "layer", "head"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_score_loses_nothing(broken: str, share: Any) -> None:
    score, message = BROKEN[broken]
    cache = CompressedKVCache(20, keep_recent=2, sinks=1, margin=5, score=score, share=share)
    x = mx.random.normal((1, 2, 40, 32))
    cache.update_and_fetch(x, x)
    for _ in range(2):
        for attempt in (lambda: cache.update_and_fetch(x[:, :, :1], x[:, :, :1]), cache.compact):
            with pytest.raises(ValueError, match=message):
                attempt()
        assert (cache.offset, cache.size()) == (40, 40)
        assert mx.array_equal(cache.keys_and_values()[0], x).item()


@pytest.mark.parametrize("taken_back", [0, 1])
@pytest.mark.parametrize("share", ["layers", "layer", "head"])
def test_nothing_is_left_of_a_compaction_that_failed(share: Any, taken_back: int) -> None:
    """Neither for more tokens, nor for others in the place of some: as if it had never been tried."""
    breaks = False

    def sometimes(tokens: ScoredTokens) -> mx.array:
        return mx.full(tokens.keys.shape[:3], float("nan")) if breaks else tokens.keys.square().sum(axis=-1)

    one, other = (CompressedKVCache(20, keep_recent=2, sinks=1, margin=30, score=sometimes, share=share) for _ in "ab")
    x = mx.random.normal((1, 2, 43, 32), key=mx.random.key(5))
    for cache in (one, other):
        cache.update_and_fetch(x[:, :, :40], x[:, :, :40])
        if cache is one:
            breaks = True
            with pytest.raises(ValueError, match="not a finite number"):
                cache.compact()
            breaks = False
        if taken_back:
            cache.trim(taken_back)
        new = x[:, :, 40 : 40 + (taken_back or 3)]
        cache.update_and_fetch(new, new)
        cache.compact()
    assert one.positions.tolist() == other.positions.tolist()
