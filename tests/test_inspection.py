"""What a budget leaves of a prompt: what the caches hold, and how much of what is looked at that is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from tiny_models import VOCAB, make_model

from mlx_kv import inspection
from mlx_kv.inspection import KeptLayer, KeptTokens, attention_of_last, inspect_prompt
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.policy import CachePolicy


def ids(tokens: int) -> list[int]:
    return [(7 * i * i + 3 * i) % VOCAB for i in range(tokens)]


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("score", ["key_diff", "key_norm"])
@pytest.mark.parametrize("share", ["layers", "layer", "head"])
def test_it_says_what_the_caches_hold(
    share: Any, score: str, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def spy(*arguments: Any) -> list[Any]:
        made.append(make_prompt_cache(*arguments))
        return made[-1]

    monkeypatch.setattr(inspection, "make_prompt_cache", spy)
    policy = CachePolicy(
        budget=24, keep_recent=6, sinks=3, margin=5, max_write=16, share=share, score=score, bits=bits, group_size=32
    )
    found = inspect_prompt(make_model("llama"), ids(90), policy)
    (caches,) = made
    assert (found.tokens, found.kept, found.evicted) == (90, 24, 66)
    assert [(layer.index, layer.cache) for layer in found.layers] == [(0, 0), (1, 1), (2, 2)]
    assert found.compactions == caches[0].evictor.compactions > 1
    for cache, layer in zip(caches, found.layers, strict=True):
        scores = np.array(cache.evictor.live_scores(0)).reshape(-1, 24)
        positions = np.array(cache.positions[0])
        assert len(layer.heads) == len(positions) == len(scores) == (2 if share == "head" else 1)
        for head, own_positions, own_scores in zip(layer.heads, positions, scores, strict=True):
            assert list(head.positions) == sorted(set(own_positions.tolist()))
            assert dict(zip(head.positions, head.scores, strict=True)) == dict(
                zip(own_positions.tolist(), own_scores.tolist(), strict=True)
            )
            assert head.positions[:3] == (0, 1, 2)
            assert head.positions[-6:] == tuple(range(84, 90))
    same = len({head.positions for layer in found.layers for head in layer.heads}) == 1
    assert same == (share == "layers")


def test_a_prompt_is_read_in_the_chunks_of_generation() -> None:
    model, seen, expected = make_model("llama"), [], []
    policy = CachePolicy(budget=24, keep_recent=6, max_write=16)
    inspect_prompt(model, ids(50), policy, progress=lambda done, total: seen.append((done, total)))
    options = {"prefill_step_size": 16, "prompt_cache": make_prompt_cache(model, policy), "max_tokens": 1}
    steps = generate_step(
        mx.array(ids(50)), model, prompt_progress_callback=lambda *step: expected.append(step), **options
    )
    next(steps)
    assert seen == [step for step in expected if step[0]] == [(16, 50), (32, 50), (48, 50), (49, 50), (50, 50)]


@pytest.mark.parametrize("share", ["layers", "head"])
@pytest.mark.parametrize("tokens", [1, 24])
def test_within_the_budget_nothing_is_evicted(tokens: int, share: Any) -> None:
    policy = CachePolicy(budget=24, keep_recent=6, share=share)
    found = inspect_prompt(make_model("llama"), ids(tokens), policy)
    assert (found.kept, found.evicted, found.compactions) == (tokens, 0, 0)
    assert [len(layer.heads) for layer in found.layers] == [2 if share == "head" else 1] * 3
    assert all(head.positions == tuple(range(tokens)) for layer in found.layers for head in layer.heads)
    assert found.share_evicted() == [0.0] * tokens


@pytest.mark.parametrize(("family", "places"), [("gemma3_text", [1, 3]), ("lfm2", None), ("falcon_h1", None)])
def test_only_layers_with_a_budget_are_listed(family: str, places: list[int] | None) -> None:
    policy = CachePolicy(budget=24, keep_recent=6, max_write=16)
    model = make_model(family)
    found = inspect_prompt(model, ids(60), policy)
    caches = make_prompt_cache(model, policy)
    expected = [i for i, each in enumerate(caches) if any(c.evictor is not None for c in attention_caches([each]))]
    assert [layer.cache for layer in found.layers] == expected
    assert places is None or expected == places
    assert [layer.index for layer in found.layers] == list(range(len(expected)))
    assert found.without_budget > 0


@pytest.mark.parametrize("share", ["layers", "layer", "head"])
def test_the_attention_that_is_left(share: Any) -> None:
    """What each head keeps of it, and all of it where nothing goes."""
    model, tokens = make_model("llama"), ids(90)
    policy = CachePolicy(budget=24, keep_recent=6, share=share, max_write=16)
    steps: list[tuple[int, int]] = []
    found = inspect_prompt(model, tokens, policy, attention_of=8, progress=lambda *step: steps.append(step))
    received = attention_of_last(model, tokens, 8)
    assert [layer.heads for layer in inspect_prompt(model, tokens, policy).layers] == [
        tuple(replace(head, attention=None) for head in layer.heads) for layer in found.layers
    ]
    for layer in found.layers:
        of_heads = received[layer.index]
        rows = of_heads if share == "head" else of_heads.mean(axis=0, keepdims=True)
        expected = [sum(row[position] for position in h.positions) for h, row in zip(layer.heads, rows, strict=True)]
        assert [head.attention for head in layer.heads] == pytest.approx(expected, abs=1e-6)
        assert layer.attention_kept == pytest.approx(sum(expected) / len(expected), abs=1e-6)
        assert layer.attention == pytest.approx(of_heads.mean(axis=0), abs=1e-6)
        assert 0.0 < layer.attention_kept < 0.999
    assert steps[-1] == (180, 180)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    whole = inspect_prompt(model, tokens, CachePolicy(budget=90, keep_recent=6), attention_of=8)
    assert [layer.attention_kept for layer in whole.layers] == pytest.approx([1.0] * 3, abs=1e-5)


def test_the_share_of_heads_that_evicted() -> None:
    heads = [
        KeptTokens((0, 1), (0.0, 0.0)),
        KeptTokens((0, 3), (0.0, 0.0)),
        KeptTokens((0, 1), (0.0, 0.0)),
        KeptTokens((0, 1), (0.0, 0.0)),
    ]
    layers = (KeptLayer(0, 0, tuple(heads[:2])), KeptLayer(1, 1, tuple(heads[2:])))
    found = inspection.Inspection(4, 2, 2, 1, 0, layers)
    assert found.share_evicted() == [0.0, 0.25, 1.0, 0.75]
    assert found.share_evicted(1) == [0.0, 0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"there is no layer 2 with a budget: give one from 0 to 1"):
        found.share_evicted(2)


def test_the_library_refuses_what_it_cannot_show() -> None:
    with pytest.raises(ValueError, match="has no budget"):
        inspect_prompt(make_model("llama"), ids(9), CachePolicy())
    with pytest.raises(ValueError, match="the prompt is empty"):
        inspect_prompt(make_model("llama"), [], CachePolicy(budget=100))
