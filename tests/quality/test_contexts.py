"""A context that is written again is what was read, also for scores that look at what attention was asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import make_model

from benchmarks.eval.contexts import Context, queries_wanted
from benchmarks.eval.results import Settings
from mlx_kv.cache.eviction.scores import Wants, find_score, score_names
from mlx_kv.generation.prefill import prefill_all, prefill_step
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.traverse import compact

SETTINGS = Settings(budgets=(60,), scores=tuple(score_names()), context=300, keep_recent=16)
OBSERVING = [name for name in score_names() if find_score(name).wants is not None]


def kept(caches: list[Any]) -> list[np.ndarray]:
    compact(caches)
    return [np.sort(np.array(cache.positions), axis=-1) for cache in caches if cache.evictor is not None]


@pytest.mark.parametrize("score", score_names())
@pytest.mark.parametrize(("family", "bits"), [("llama", None), ("llama", 8), ("gemma3_text", None)])
def test_every_score_keeps_what_it_keeps_where_it_reads_for_itself(score: str, family: str, bits: int | None) -> None:
    settings = replace(SETTINGS, share="layer", bits=bits)
    changes = {"head_dim": 64} if bits else {}
    model = make_model(family, **changes)
    for layer in model.layers if family == "gemma3_text" else ():  # its keys have one norm, but for rounding: not these
        weight = layer.self_attn.k_norm.weight
        layer.self_attn.k_norm.weight = mx.random.normal(weight.shape, key=mx.random.key(1))
    tokens = np.random.default_rng(0).integers(2, 90, size=(1, 300))
    policy, context = settings.policy(score, 60), Context(model, tokens, settings)
    direct = make_prompt_cache(model, policy)
    prefill_all(model, direct, tokens[0].tolist(), prefill_step(model, direct, None))
    assert kept(context.caches(settings.policy(score, 90)))[0].shape[-1] == 90  # of which nothing is left
    again, once_more, own = kept(context.caches(policy)), kept(context.caches(policy)), kept(direct)
    assert own[0].shape[-1] == 60
    for a, b, c in zip(own, again, once_more, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_a_context_longer_than_its_settings_say_is_filled_whole() -> None:
    """A question that is seen comes on top of the context's named length; nothing may be evicted before it is asked."""
    settings = replace(SETTINGS, scores=("key_diff",), share="layer")
    tokens = np.random.default_rng(0).integers(2, 90, size=(1, 1200))  # written in pieces, 900 above the named length
    for cache in Context(make_model("llama"), tokens, settings).caches(settings.policy("key_diff", 60)):
        assert np.array(cache.positions).shape[-1] == 1200


def test_as_many_queries_are_kept_as_any_score_wants() -> None:
    model, tokens = make_model("llama"), np.random.default_rng(0).integers(2, 90, size=(1, 1200))
    for scores, wanted in ((("key_diff",), 0), (("tova", "snap_kv"), 64)):
        assert queries_wanted(scores) == wanted
        context = Context(model, tokens, replace(SETTINGS, scores=scores))
        assert len(context.recordings[0].writes) > 2
        for recording in context.recordings:
            kept = [each.queries is not None for each in recording.writes]
            count = sum(each.keys.shape[2] for each in recording.writes if each.queries is not None)
            assert wanted <= count < wanted + 512 or count == wanted == 0
            assert kept == sorted(kept)  # the last ones


def test_nothing_is_left_of_the_seam_that_shows_queries() -> None:
    from mlx_lm.models import llama

    own = llama.scaled_dot_product_attention
    Context(make_model("llama"), np.zeros((1, 20), np.int64), SETTINGS)
    assert llama.scaled_dot_product_attention is own


def test_scores_that_see_queries_are_among_those_compared() -> None:
    assert {"snap_kv", "tova", "kvzip"} <= set(OBSERVING)
    assert all(isinstance(find_score(name).wants, Wants) for name in OBSERVING)
