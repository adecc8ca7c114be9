"""Engines whose rows go from class to class: each prompt gets what it gets alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from classes import anywhere
from mlx_lm.generate import generate_step
from test_batch_generation import POLICIES, PROMPTS, alone, gathered, shaken
from tiny_models import VOCAB, make_model

from mlx_kv import CachePolicy, batch_generate
from mlx_kv.cache.segments import SegmentedCache, moving
from mlx_kv.generation.engine import make_engine
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm.traverse import leaves

TOGETHER = ("llama", "gemma3_text", "gpt_oss", "lfm2")


@pytest.fixture(params=[0, 1])
def _anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "settled", anywhere(request.param))


@pytest.mark.slow
@pytest.mark.usefixtures("_anywhere")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", TOGETHER)
def test_rows_of_any_class_under_any_policy(family: str, policy: str) -> None:
    settings = POLICIES[policy]
    wanted = alone(family, settings, 24, step=8)
    model = make_model(family)
    got = gathered(batch_generate(model, None, PROMPTS, settings, 24, max_batch_size=5, prefill_step_size=8))
    assert got == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("_anywhere")
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_drafts_of_rows_of_any_class(family: str, noise: float) -> None:
    model, policy = make_model(family), CachePolicy(max_write=2) if family != "llama" else CachePolicy()
    draft = shaken(model, noise, family)
    assert gathered(batch_generate(model, None, PROMPTS, policy, 24, draft, 3, 5)) == alone(family, None, 24)


@pytest.mark.slow
@pytest.mark.usefixtures("_anywhere")
@pytest.mark.parametrize("policy", ["full", "budget", "max_kv_size"])
def test_a_row_that_is_taken_out_goes_on(policy: str) -> None:
    """From the middle of a batch, through its own caches alone."""
    model, settings = make_model("llama"), POLICIES[policy]
    engine = make_engine(model, set(), settings, 5, 8)
    for index, prompt in enumerate(PROMPTS[:5]):
        engine.submit(TokenSequence(index, prompt, 24))
    counts = [0] * 5
    while min(counts) < 8:
        for token in engine.step():
            counts[token.index] += 1
    for index, prompt in enumerate(PROMPTS[:5]):
        caches: Any = engine.extract(index)
        assert not any(isinstance(cache, SegmentedCache) for cache in leaves(caches))
        text, read = [*prompt, *alone("llama", settings, 24, step=8)[index]], int(caches[0].offset)
        steps = generate_step(mx.array(text[read : read + 1]), model, max_tokens=5, prompt_cache=caches)
        assert [int(token) for token, _ in steps] == text[read + 1 :][:5]
    engine.close()


def test_a_long_row_beside_short_ones_has_a_class_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule itself: bytes of the batch stay near those of its tokens, and tokens are each row's own."""
    monkeypatch.setitem(moving.LEAST_SAVED, mx.default_device().type, 256)
    model = make_model("llama", max_position_embeddings=4096)
    lengths = [1500, 100, 30, 200, 60]
    prompts = [mx.random.randint(1, VOCAB, (n,), key=mx.random.key(n)).tolist() for n in lengths]
    engine = make_engine(model, set(), None, 8)
    for index, prompt in enumerate(prompts):
        engine.submit(TokenSequence(index, prompt, 40))
    told: dict[int, list[int]] = {index: [] for index in range(5)}
    allocated = 0
    while engine.busy:
        for token in engine.step():
            told[token.index].append(token.token)
        if len(engine.rows) == 5:
            assert [len(cache.parts) for cache in engine.caches] == [2] * 3
            allocated = sum(cache.nbytes // 256 for cache in engine.caches)
    bytes_per_slot = 2 * 2 * 32 * 4 * 3
    assert allocated * 256 == (1792 + 4 * 256) * bytes_per_slot  # 1,540 tokens, and up to 240
    for index, prompt in enumerate(prompts):
        steps = generate_step(mx.array(prompt), model, max_tokens=40)
        assert told[index] == [int(token) for token, _ in steps]
    engine.close()
