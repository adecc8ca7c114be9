"""Budgets that look at attention are shown it for as long as anybody holds a cache of theirs, and no longer."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import pytest
from mlx_lm.models import llama

import mlx_kv
from mlx_kv.cache.eviction.scores import Score, Wants
from mlx_kv.mlxlm.attention import AttentionCall, attention_hooked
from tests.tiny_models import make_model

MLX_LM = llama.scaled_dot_product_attention


def newest(tokens: mlx_kv.ScoredTokens) -> mx.array:
    return mx.broadcast_to(tokens.positions, tokens.keys.shape[:3]).astype(mx.float32)


WATCHING = Score("watching", newest, wants=Wants(queries=2))
POLICY = mlx_kv.CachePolicy(budget=8, keep_recent=2, sinks=1, margin=2, score=WATCHING)


def stands() -> bool:
    return llama.scaled_dot_product_attention is not MLX_LM


def test_the_seam_is_open_while_a_cache_that_wants_it_is_there() -> None:
    model = make_model("llama")
    plain = mlx_kv.make_prompt_cache(model, mlx_kv.CachePolicy(budget=8, keep_recent=2, sinks=1))
    assert plain[0].attention_hook is None
    assert not stands()
    caches = mlx_kv.make_prompt_cache(model, POLICY)
    assert stands()
    assert caches[0].attention_hook is caches[0]
    copies = copy.deepcopy(caches)
    row = copies[0].extract(0)
    batch = type(row).merge([row, row])
    del caches, copies, row
    gc.collect()
    assert stands()
    assert batch.attention_hook is batch
    del batch
    gc.collect()
    assert not stands()


def test_a_hook_in_front_hands_on_to_the_cache_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = make_model("llama"), []

    class Before:
        def attend(self, call: AttentionCall) -> mx.array:
            seen.append("before")
            return call.hand_on()

    caches = mlx_kv.make_prompt_cache(model, POLICY)
    own = type(caches[0].evictor).attend
    monkeypatch.setattr(
        type(caches[0].evictor), "attend", lambda self, call, *told: (seen.append("own"), own(self, call, *told))[1]
    )
    with attention_hooked(model, caches, Before()):
        copies = copy.deepcopy(caches)
        model(mx.array([[1, 2, 3]]), cache=copies)
    assert seen == ["before", "own"] * len(caches)
    assert caches[0].attention_hook is caches[0]
