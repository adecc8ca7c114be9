"""Prompts that are read twice, where that ends early or is parted; and models with attention sinks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv import CachePolicy, PromptReader, make_prompt_cache
from mlx_kv.cache.eviction.scoring import largest_shares
from mlx_kv.generation.prefill import Instructions, TwoPassQueue, hold
from mlx_kv.generation.sequence import TokenSequence
from tests.tiny_models import VOCAB, make_model

BUDGET = 16
ASKED = Instructions(first=(7, 8, 9), later=(10, 11), answer=(12,))


def policy() -> CachePolicy:
    return CachePolicy(budget=BUDGET, sinks=2, keep_recent=4, margin=4, score="kvzip")


def text(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


@pytest.mark.parametrize("passes", [1, 4])
def test_what_is_broken_off_leaves_caches_that_evict(passes: int) -> None:
    """In the first reading or in the second, of a row of an engine or of a prompt reader."""
    model = make_model("llama")

    def check(caches: list[Any], end: Callable[[], object]) -> None:
        assert all(cache.evictor.paused for cache in caches)
        end()
        stands = caches[0].offset
        assert 0 < stands <= 59
        model(mx.array([text(9)]), cache=caches)
        model(mx.array([[1]]), cache=caches)
        for cache in caches:
            assert not cache.evictor.paused
            assert cache.layout.visible_tokens(cache.view.rows[0]) == BUDGET + 1

    caches = make_prompt_cache(model, policy())
    twice = TwoPassQueue(model, lambda: make_prompt_cache(model, policy()), 20, ASKED)
    twice.append(TokenSequence(0, text(60), 5, caches=caches))
    for _ in range(passes):
        assert twice.step() is None
    check(caches, lambda: twice.cancel(0))
    caches = make_prompt_cache(model, policy())
    reader = PromptReader(model, caches, text(60), step=20, instructions=ASKED)
    for _ in range(passes):
        reader.step()
    check(caches, reader.close)


def test_a_row_taken_out_of_a_batch_that_waits_waits_too() -> None:
    model = make_model("llama")
    caches = make_prompt_cache(model, policy())
    hold(caches)
    model(mx.array([text(30, 1), text(30, 2)]), cache=caches)
    for own in [[cache.extract(1) for cache in caches], copy.deepcopy(caches)]:
        model(mx.array([text(3)] * len(own[0].view.rows)), cache=own)
        for cache in own:
            assert cache.evictor.paused
            assert cache.view.rows[0].evicted == 0
            cache.release()
        model(mx.array([[1]] * len(own[0].view.rows)), cache=own)
        assert [cache.layout.visible_tokens(cache.view.rows[0]) for cache in own] == [BUDGET + 1] * len(own)


def test_shares_are_divided_by_attention_sinks_too() -> None:
    keys = np.random.default_rng(0)
    q, k, sinks = (mx.array(keys.normal(size=size).astype(np.float32)) for size in ((1, 4, 3, 8), (1, 2, 9, 8), (4,)))
    got = np.array(largest_shares(q, k, 0.5, slice(2, 6), sinks))
    wanted = np.zeros((1, 2, 4))
    for head in range(4):
        for query in range(3):
            logits = np.array(k)[0, head // 2, : 7 + query] @ np.array(q)[0, head, query] * 0.5
            shares = np.exp(logits) / (np.exp(logits).sum() + np.exp(np.array(sinks)[head]))
            wanted[0, head // 2] = np.maximum(wanted[0, head // 2], shares[2:6])
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
