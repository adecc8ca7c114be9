"""Engines over layers and heads of different lengths: each prompt gets what it gets alone."""

from __future__ import annotations

from typing import Any

import pytest
from classes import anywhere
from test_batch_generation import PROMPTS, alone, gathered
from tiny_models import make_model

from mlx_kv import CachePolicy, batch_generate
from mlx_kv.cache.classes import moving

SHAPE: dict[str, Any] = {"budget": 24, "keep_recent": 8, "sinks": 2, "margin": 9}
POLICIES = {
    "adaptive": CachePolicy(**SHAPE, share="adaptive"),
    "pyramid, 8 bits": CachePolicy(**SHAPE, share="head", layers="pyramid", bits=8, group_size=32, score="value_norm"),
    "both": CachePolicy(**SHAPE, share="adaptive", layers="pyramid", score="value_norm"),
}


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
    wanted = alone(family, settings, 24, step=8)
    model = make_model(family)
    assert gathered(batch_generate(model, None, PROMPTS, settings, 24, max_batch_size=5, prefill_step_size=8)) == wanted
