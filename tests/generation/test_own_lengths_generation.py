"""Engines over layers and heads of different lengths: each prompt gets what it gets alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from classes import anywhere
from mlx_lm.generate import generate_step
from test_batch_generation import PROMPTS, gathered
from tiny_models import make_model

from mlx_kv import CachePolicy, batch_generate, make_prompt_cache
from mlx_kv.cache.segments import moving

TOKENS, NEARLY = 24, 2e-3  # generated; a difference of logits
SHAPE: dict[str, Any] = {"budget": 24, "keep_recent": 8, "sinks": 2, "margin": 9}
TABLE = ((3.0, 0.1), (1.0, 0.3), (0.0, 1.2))  # of three layers of two heads
EIGHT_BITS: dict[str, Any] = {"bits": 8, "group_size": 32}
POLICIES = {
    "adaptive": CachePolicy(**SHAPE, share="adaptive"),
    "pyramid, 8 bits": CachePolicy(**SHAPE, share="head", layers="pyramid", bits=8, group_size=32, score="value_norm"),
    "both": CachePolicy(**SHAPE, share="adaptive", layers="pyramid", score="value_norm"),
    "one ranking": CachePolicy(**SHAPE, share="adaptive", layers="global", score="value_norm"),
    "a table of heads": CachePolicy(**SHAPE, share="head", layers=TABLE),
    "a table of heads, 8 bits": CachePolicy(**SHAPE, share="head", layers=TABLE, score="value_norm", **EIGHT_BITS),
    "a table, a ranking by layer": CachePolicy(**SHAPE, share="adaptive", layers=TABLE),
    "a table of layers, rotated": CachePolicy(**SHAPE, share="layer", layers=TABLE, codec="rotated", **EIGHT_BITS),
}


def until_a_tie(family: str, policy: CachePolicy) -> list[list[int]]:
    """The tokens of each prompt by itself; in a quantised cache up to the first whose two best logits nearly tie.

    There the last bit of a sum, which depends on the rows of a batch and on the CPU, can turn the rounding of a key.
    """
    model, outputs = make_model(family), list[list[int]]()
    for prompt in PROMPTS:
        caches = make_prompt_cache(model, policy)
        steps = generate_step(mx.array(prompt), model, max_tokens=TOKENS, prompt_cache=caches, prefill_step_size=8)
        outputs.append([])
        for token, logprobs in steps:
            second, best = mx.sort(logprobs)[-2:].tolist()
            if best - second < NEARLY and policy.bits is not None:
                break
            outputs[-1].append(int(token))
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("turn", [None, 0, 1])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_batches_whose_layers_differ(
    family: str, policy: str, turn: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one class, by the rule, or from class to class."""
    if turn is not None:
        monkeypatch.setattr(moving, "settled", anywhere(turn))
    settings = POLICIES[policy]
    if family != "llama" and not isinstance(settings.layers, str):  # half of their four layers have windows
        settings = replace(settings, layers=TABLE[:2])
    wanted = until_a_tie(family, settings)
    assert sum(map(len, wanted)) > 0.8 * TOKENS * len(PROMPTS)
    model = make_model(family)
    got = gathered(batch_generate(model, None, PROMPTS, settings, TOKENS, max_batch_size=5, prefill_step_size=8))
    assert [row[: len(alone)] for row, alone in zip(got, wanted, strict=True)] == wanted
