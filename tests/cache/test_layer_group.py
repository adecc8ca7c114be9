"""The layers of a model stay in step, under mlx-lm's own loop, and through copies and files."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from shadowing import Shadowed
from slow_cache import SlowCache
from tiny_models import FAMILIES, VOCAB, make_model

from mlx_kv import (
    CachePolicy,
    KVCache,
    ScoredTokens,
    SpeculationStatistics,
    cache_statistics,
    compact,
    make_prompt_cache,
    speculative_generate,
)
from mlx_kv.cache.eviction.evictor import LayerGroup
from mlx_kv.mlxlm.traverse import attention_caches

POLICY = CachePolicy(budget=40, keep_recent=6, sinks=2, margin=5)
PROMPT = mx.random.randint(0, VOCAB, (90,), key=mx.random.key(3))


def feed(model: nn.Module, caches: list[Any], tokens: mx.array, chunk: int) -> mx.array:
    out = []
    for first in range(0, tokens.shape[-1], chunk):
        out.append(model(tokens[None, first : first + chunk], cache=caches))
        mx.eval(out[-1], [cache.state for cache in caches])
    return mx.concatenate(out, axis=1)


def positions(caches: list[Any]) -> list[list[list[int]]]:
    return [cache.positions[0].tolist() for cache in caches]


def one_sequence(policy: CachePolicy, layers: int) -> list[KVCache]:
    group = LayerGroup()
    return [policy.make_cache(layer_group=group, layer=layer) for layer in range(layers)]


@pytest.mark.parametrize("share", ["layers", "layer", "head"])
def test_layers_under_mlx_lms_own_loop(share: Any) -> None:
    model = make_model("llama")
    policy = CachePolicy(budget=40, keep_recent=6, sinks=2, margin=5, share=share)
    caches = make_prompt_cache(model, policy)
    for _ in generate_step(PROMPT, model, max_tokens=60, prompt_cache=caches, prefill_step_size=16):
        pass
    assert {cache.offset for cache in caches} == {90 + 60}  # mlx-lm's loop computes one token ahead
    held = positions(caches)
    assert len({len(layer[0]) for layer in held}) == 1
    assert (held[0] == held[1] == held[2]) == (share == "layers")
    assert {len(layer) for layer in held} == ({2} if share == "head" else {1})
    statistics = cache_statistics(caches)
    assert statistics.tokens_evicted == 150 - caches[0].size()
    assert statistics.compactions > 5
    assert statistics.bytes_live < statistics.bytes_full / 3


class Evicting(SlowCache):
    """A slow cache that forgets the positions that one of ours has evicted."""

    def __init__(self, watched: KVCache) -> None:
        super().__init__()
        self.watched = watched

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        kept = set(self.watched.positions[0, 0].tolist())  # asked after the update of the one that is watched
        rows = [
            [p <= q and (p in kept or p >= self.offset) for p in range(self.offset + N)]
            for q in range(self.offset, self.offset + N)
        ]
        return mx.array(rows)


class Watched(Shadowed):
    """Compares after the update, when it is known what was evicted."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        fetched = self.cache.update_and_fetch(keys, values)
        mask = self.slow.make_mask(keys.shape[2])
        slow = self.slow.update_and_fetch(keys, values)
        last = np.array(mask)[-1]  # the last query sees all that is left
        for got, wanted in zip(fetched, slow, strict=True):
            got, wanted = (np.moveaxis(np.array(x)[0], 0, 1).reshape(x.shape[2], -1) for x in (got, wanted))
            wanted = wanted[last]
            assert got.shape == wanted.shape
            assert np.array_equal(got[np.lexsort(got.T)], wanted[np.lexsort(wanted.T)])
        self.checked += 1
        return fetched


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"deepseek_v32"}))
def test_every_family_attends_to_what_is_left(family: str) -> None:
    """Layers of full attention are budgeted, in step; others are as they were; bounded from the first chunk on."""
    model = make_model(family)
    caches = make_prompt_cache(model, POLICY)
    budgeted = [cache for cache in attention_caches(caches) if cache.evictor is not None]
    assert budgeted
    wrapped = {id(cache): Watched(cache, Evicting(cache)) for cache in budgeted}

    def with_shadow(cache: Any) -> Any:
        if id(cache) in wrapped:
            return wrapped[id(cache)]
        if hasattr(cache, "caches"):
            cache.caches = tuple(map(with_shadow, cache.caches))
        return cache

    shadowed = [with_shadow(cache) for cache in caches]
    for first, last in ((0, 30), (30, 60), (60, 61), (61, 62), (62, 80), (80, 81), (81, 90)):
        logits = model(PROMPT[None, first:last], cache=shadowed)
        assert mx.isfinite(logits).all().item()
    assert all(shadow.checked == 7 for shadow in wrapped.values())
    assert {cache.offset for cache in budgeted} == {90}
    kept = [cache.positions[0, 0].tolist() for cache in budgeted]
    assert all(layer == kept[0] for layer in kept)
    assert len(kept[0]) <= 40 + 5 + 9


def test_a_model_whose_indexer_counts_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer of this model can honour budget"):
        make_prompt_cache(make_model("deepseek_v32"), CachePolicy(budget=80))


def test_a_model_without_full_attention_is_refused() -> None:
    model = make_model("gemma3_text", sliding_window_pattern=9)
    assert not any(type(cache).__name__ == "KVCache" for cache in model.make_cache())
    with pytest.raises(ValueError, match="no layer of this model can honour budget"):
        make_prompt_cache(model, CachePolicy(budget=80))


def test_quantising_later_keeps_layers_in_step() -> None:
    """mlx-lm's loop calls to_quantized layer by layer and puts the copies in place of the caches."""
    model = make_model("llama")
    caches = make_prompt_cache(model, POLICY)
    feed(model, caches, PROMPT[:60], 30)
    caches[:] = [cache.to_quantized(group_size=32, bits=8) for cache in caches]
    feed(model, caches, PROMPT, 10)
    held = positions(caches)
    assert held[0] == held[1] == held[2]


@pytest.mark.parametrize("share", ["layers", "layer", "head"])
def test_layers_that_have_diverged_are_named_and_nothing_changes(share: Any) -> None:
    model = make_model("llama")
    caches = make_prompt_cache(model, CachePolicy(budget=40, keep_recent=6, sinks=2, margin=5, share=share))
    feed(model, caches, PROMPT[:44], 44)
    caches[1].trim(3)
    x = mx.random.normal((1, 2, 2, 32))
    for cache in (caches[0], caches[2]):
        cache.update_and_fetch(x, x)
    message = (
        "the layers of one sequence have diverged, and cannot decide together what to evict: "
        "they hold 46 of 46 tokens in "
    )
    with pytest.raises(ValueError, match=re.escape(message + "layer 0, 2; 41 of 41 tokens in layer 1")):
        caches[0].update_and_fetch(x, x)
    with pytest.raises(ValueError, match="have diverged"):
        compact(caches)
    assert [cache.offset for cache in caches] == [46, 41, 46]
    assert all(cache.evictor.evicted == 0 for cache in caches)


@pytest.mark.parametrize("compactions", [0, 1])
@pytest.mark.parametrize("share", ["layers", "layer", "head"])
def test_a_score_that_breaks_in_one_layer_stops_all_before_any_has_changed(share: Any, compactions: int) -> None:
    model = make_model("llama")
    calls = []

    def breaks_in_the_third_layer(tokens: ScoredTokens) -> mx.array:
        calls.append(1)
        breaks = len(calls) % 3 == 0 and len(calls) > 3 * compactions
        return mx.full(tokens.keys.shape[:3], float("nan") if breaks else 1.0)

    caches = make_prompt_cache(
        model, CachePolicy(budget=40, keep_recent=6, margin=5, score=breaks_in_the_third_layer, share=share)
    )
    feed(model, caches, PROMPT, 90)
    for _ in range(compactions):
        compact(caches)
        feed(model, caches, PROMPT[:5], 5)
    before, held = [np.array(cache.keys) for cache in caches], caches[0].size()
    with pytest.raises(ValueError, match="not a finite number"):
        compact(caches)
    assert [(cache.offset, cache.size()) for cache in caches] == [(90 + 5 * compactions, held)] * 3
    assert held == (45 if compactions else 90)
    assert all(np.array_equal(np.array(cache.keys), old) for cache, old in zip(caches, before, strict=True))


def test_layers_weigh_alike_however_large_their_scores() -> None:
    """Added up as they are, the scores of the layer with the largest values would decide alone."""
    caches = one_sequence(CachePolicy(budget=20, keep_recent=2, sinks=1, score="key_norm"), 2)
    x = mx.random.normal((2, 1, 1, 40, 32), key=mx.random.key(5))
    norms = -np.linalg.norm(np.array(x, np.float64)[:, 0, 0, 1:38], axis=-1)  # (2, 37) of the tokens that may go
    for cache, keys, scale in zip(caches, x, (1, 30), strict=True):
        cache.update_and_fetch(scale * keys, keys)
    compact(caches)
    together = ((norms - norms.mean(axis=1, keepdims=True)) / norms.std(axis=1, keepdims=True)).sum(axis=0)
    kept = {0, 38, 39, *(1 + np.argsort(together)[-17:]).tolist()}
    assert [set(cache.positions[0, 0].tolist()) for cache in caches] == [kept] * 2


def test_every_row_of_a_new_batch_is_one_sequence_in_all_layers() -> None:
    caches = one_sequence(CachePolicy(budget=20, keep_recent=2, score="key_norm"), 2)
    x = mx.random.normal((2, 3, 2, 40, 32), key=mx.random.key(5))
    for cache, new in zip(caches, x, strict=True):
        cache.update_and_fetch(new, new)
    compact(caches)
    assert caches[0].positions.tolist() == caches[1].positions.tolist()
    for alone in (True, False):
        for cache, new in zip(caches, x, strict=True):
            cache.update_and_fetch(new[:, :, :1], new[:, :, :1])
        if alone:
            caches[0].compact()  # from here on, of as many tokens another number is gone
    with pytest.raises(ValueError, match="diverged"):
        caches[1].compact()


@pytest.mark.parametrize("share", ["layers", "layer", "head"])
def test_a_new_session_decides_anew(share: Any) -> None:
    policy = CachePolicy(budget=20, keep_recent=2, score="key_norm", share=share)
    used, fresh = one_sequence(policy, 2), one_sequence(policy, 2)
    x = mx.random.normal((2, 2, 1, 2, 40, 32), key=mx.random.key(5))
    for session, keys in enumerate(x):
        for cache, new in zip(used, keys, strict=True):
            cache.reset()
            cache.update_and_fetch(new, new)
        if session == 1:
            for cache, new in zip(fresh, keys, strict=True):
                cache.update_and_fetch(new, new)
        compact(used)
    compact(fresh)
    assert positions(used) == positions(fresh)


def test_a_layer_that_is_filled_later_follows_the_decision() -> None:
    """Whole layers one after the other: those that held nothing when the first was compacted keep what it kept."""
    caches = one_sequence(CachePolicy(budget=20, keep_recent=2, margin=4, score="key_norm"), 2)
    x = mx.random.normal((2, 1, 2, 30, 32), key=mx.random.key(5))
    for cache, new in zip(caches, x, strict=True):
        for first in range(0, 30, 5):
            cache.update_and_fetch(new[:, :, first : first + 5], new[:, :, first : first + 5])
    assert [cache.evictor.compactions for cache in caches] == [1, 1]
    held = positions(caches)
    assert held[0] == held[1]


def test_compact_on_demand() -> None:
    model = make_model("llama")
    caches = make_prompt_cache(model, POLICY)
    feed(model, caches, PROMPT[:43], 43)  # above the budget, within the margin
    compact(caches)
    assert [cache.size() for cache in caches] == [40] * 3
    held = positions(caches)
    assert held[0] == held[1] == held[2]
    compact(caches)
    assert positions(caches) == held


@pytest.mark.parametrize("draft_tokens", [1, 4])
@pytest.mark.slow
def test_under_speculation(draft_tokens: int) -> None:
    """Rejected tokens are never scored, and budgets hold. Within one margin the schedule is that of plain decoding."""
    model, draft = make_model("llama"), make_model("llama", seed=1)
    policy = CachePolicy(budget=40, keep_recent=6, sinks=2, margin=30)
    options = {"max_tokens": 25, "num_draft_tokens": draft_tokens, "policy": policy}
    got = [r.token for r in speculative_generate(model, draft, None, PROMPT, **options)]
    plain = make_prompt_cache(model, policy)
    steps = generate_step(PROMPT, model, max_tokens=25, prompt_cache=plain)
    wanted = [token for token, _ in steps]
    assert got == wanted
    statistics = SpeculationStatistics()
    options = {"max_tokens": 100, "num_draft_tokens": draft_tokens, "policy": POLICY, "statistics": statistics}
    list(speculative_generate(model, draft, None, PROMPT, **options))
    held = positions(statistics.caches)
    assert held[0] == held[1] == held[2]
    assert len(held[0][0]) <= 40 + 5 + draft_tokens + 1
    assert statistics.caches[0].evictor.compactions > 10


def test_a_window_that_a_model_asks_for_goes_by_true_positions() -> None:
    cache = CachePolicy(budget=20, keep_recent=3, sinks=1, margin=4, score="random").make_cache()
    x = mx.random.normal((2, 2, 40, 32))
    cache.update_and_fetch(x, x)
    mask = cache.make_mask(2, window_size=12)
    kept = cache.positions
    cache.update_and_fetch(x[:, :, :2], x[:, :, :2])
    assert kept.shape == (2, 1, 20)
    for row in range(2):
        places = [*kept[row, 0].tolist(), 40, 41]
        assert mask[row, 0].tolist() == [[p <= q and q - p < 12 for p in places] for q in (40, 41)]
    cache.trim_per_sequence([0, 2])
    cache.prepare(lengths=[1, 3], right_padding=[2, 0])
    ragged, kept = cache.make_mask(3, window_size=12), cache.positions
    keys, _ = cache.update_and_fetch(x[:, :, :3], x[:, :, :3])
    assert ragged.shape == (2, 1, 3, keys.shape[2])
    for row, (offset, new) in enumerate(((42, 1), (40, 3))):
        places = [*[p for p in kept[row, 0].tolist() if p >= 0], *range(offset, offset + new)]
        places += [-1] * (keys.shape[2] - len(places))
        seen = [[0 <= p <= q and q - p < 12 for p in places] for q in range(offset, offset + new)]
        assert ragged[row, 0, :new].tolist() == seen
    own = CachePolicy(budget=20, keep_recent=3, margin=4, share="layer").make_cache()
    own.update_and_fetch(x, x)
    with pytest.raises(ValueError, match="use share='layers'"):
        own.make_mask(2, window_size=12)


def test_a_window_goes_by_true_positions_also_beside_a_row_that_has_evicted_nothing() -> None:
    policy = CachePolicy(budget=20, keep_recent=3, sinks=1, margin=4, score="random")
    x = mx.random.normal((1, 2, 40, 32))
    rows = []
    for tokens in (40, 9):
        rows.append(policy.make_cache())
        rows[-1].update_and_fetch(x[:, :, :tokens], x[:, :, :tokens])
    both = KVCache.merge(rows)
    mask, kept = both.make_mask(2, window_size=12), both.positions
    keys, _ = both.update_and_fetch(mx.zeros((2, 2, 2, 32)), mx.zeros((2, 2, 2, 32)))
    assert [row.evicted for row in both.view.rows] == [20, 0]
    for row, offset in enumerate((40, 9)):
        places = [*[p for p in kept[row, 0].tolist() if p >= 0], offset, offset + 1]
        places += [-1] * (keys.shape[2] - len(places))
        assert mask[row, 0].tolist() == [[0 <= p <= q and q - p < 12 for p in places] for q in (offset, offset + 1)]
