"""Budgets that look at attention are shown it for as long as anybody holds a cache of theirs, and no longer."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3

import mlx_kv
from mlx_kv.cache.eviction.scores import Score, Wants
from mlx_kv.mlxlm.attention import AttentionCall, attention_hooked, show_attention
from tests.tiny_models import make_model

MLX_LM = qwen3.scaled_dot_product_attention


def newest(tokens: mlx_kv.ScoredTokens) -> mx.array:
    return mx.broadcast_to(tokens.positions, tokens.keys.shape[:3]).astype(mx.float32)


WATCHING = Score("watching", newest, wants=Wants(queries=2))
POLICY = mlx_kv.CachePolicy(budget=8, keep_recent=2, sinks=1, margin=2, score=WATCHING)


def stands() -> bool:
    # Of a module that no bundled model has: those that are loaded have their attention answered while they live.
    gc.collect()  # of engines and errors before this, which hold on to caches in circles
    return qwen3.scaled_dot_product_attention is not MLX_LM


def test_the_seam_is_open_while_a_cache_that_wants_it_is_there() -> None:
    model = make_model("qwen3")
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
    assert stands()
    assert batch.attention_hook is batch
    del batch
    assert not stands()


def test_a_hook_in_front_hands_on_to_the_cache_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = make_model("llama"), []

    class Before:
        def attend(self, call: AttentionCall) -> mx.array:
            seen.append("before")
            return call.forward()

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


def test_loaded_caches_are_shown_it_by_the_model_that_goes_on_with_them(tmp_path: Path) -> None:
    model, tokens = make_model("llama"), list(range(1, 40))
    for score in ("snap_kv", "tova"):
        policy = mlx_kv.CachePolicy(budget=24, keep_recent=4, margin=4, score=score)
        caches = mlx_kv.make_prompt_cache(model, policy)
        model(mx.array([tokens]), cache=caches)
        mlx_kv.save_prompt_cache(tmp_path / "cache.safetensors", caches)
        loaded = mlx_kv.load_prompt_cache(tmp_path / "cache.safetensors")
        assert loaded[0].seam is None
        show_attention(model, loaded)
        for each in (caches, loaded):
            for token in range(40):
                model(mx.array([[token]]), cache=each)
            mlx_kv.compact(each)
        for own, other in zip(caches, loaded, strict=True):
            assert other.seam is not None
            assert other.evictor.observation.standing(0) == own.evictor.observation.standing(0)
            assert mx.array_equal(own.positions, other.positions).item()


@pytest.mark.parametrize("score", ["snap_kv", "tova"])
@pytest.mark.slow
def test_loaded_caches_that_nobody_shows_it_do_not_go_by_what_is_past(score: str, tmp_path: Path) -> None:
    model, kept = make_model("qwen3"), []
    for name in (score, "key_diff"):
        caches = mlx_kv.make_prompt_cache(model, mlx_kv.CachePolicy(budget=24, keep_recent=4, margin=4, score=name))
        model(mx.array([list(range(1, 20))]), cache=caches)
        mlx_kv.save_prompt_cache(tmp_path / "cache.safetensors", caches)
        loaded = mlx_kv.load_prompt_cache(tmp_path / "cache.safetensors")
        del caches  # with their patch
        gc.collect()
        assert not stands()
        for token in range(40):
            model(mx.array([[token]]), cache=loaded)
        kept.append([cache.positions.tolist() for cache in loaded])
    assert kept[0] == kept[1]


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2"])
def test_models_that_hide_their_attention_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match="shows none of layer"):
        mlx_kv.make_prompt_cache(make_model(family), mlx_kv.CachePolicy(budget=128, score="snap_kv"))
