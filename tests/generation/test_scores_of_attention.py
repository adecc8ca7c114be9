"""Scores that look at attention keep the same tokens alone and in a batch, with drafts and without."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_kv
from mlx_kv.generation.prefill import read_chunk
from tests.tiny_models import make_model

SCORES = ["snap_kv", "tova"]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return make_model("llama")


def policy(score: str, **how: Any) -> mlx_kv.CachePolicy:
    return mlx_kv.CachePolicy(budget=60, keep_recent=12, margin=6, score=score, group_size=32, **how)


def prompts() -> list[list[int]]:
    drawn = random.Random(3)
    return [[drawn.randrange(96) for _ in range(length)] for length in (150, 20, 230)]


def answers(model: nn.Module, texts: list[list[int]], **how: Any) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in texts]
    for token in mlx_kv.batch_generate(model, None, texts, max_tokens=60, prefill_step_size=32, **how):
        made[token.index].append(token.token)
    return made


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.slow
def test_rows_of_a_batch_say_what_they_say_alone(model: nn.Module, score: str, bits: int | None) -> None:
    how = policy(score, bits=bits)
    alone = [answers(model, [text], policy=how)[0] for text in prompts()]
    assert answers(model, prompts(), policy=how) == alone


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.slow
def test_drafts_that_were_taken_back_leave_no_trace(model: nn.Module, score: str) -> None:
    how = policy(score)
    assert answers(model, prompts(), policy=how, drafter="ngram", num_draft_tokens=4) == answers(
        model, prompts(), policy=how
    )


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "qwen3"])
def test_other_families_beside_windows_and_sinks(family: str, score: str) -> None:
    model, text = make_model(family), mx.array([prompts()[2]])
    caches = mlx_kv.make_prompt_cache(model, policy(score))
    looking = [cache for cache in caches if cache.evictor is not None]
    assert looking
    for first in range(0, text.shape[1], 50):
        read_chunk(model, caches, text[:, first : first + 50])
    mlx_kv.compact(caches)
    for cache in looking:
        assert cache.size() == 60
        assert cache.evictor.observation.ends == [text.shape[1]]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("share", ["adaptive", "head", "layer"])
@pytest.mark.slow
def test_heads_that_differ(model: nn.Module, score: str, share: Any) -> None:
    how = mlx_kv.CachePolicy(budget=60, keep_recent=12, margin=6, score=score, share=share)
    alone = [answers(model, [text], policy=how)[0] for text in prompts()]
    assert answers(model, prompts(), policy=how) == alone
