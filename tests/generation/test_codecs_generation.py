"""Models over every way to store: drafts change nothing, rows of a batch say what they say alone, budgets or not."""

from __future__ import annotations

import itertools
import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from calibrations import centred
from mlx_lm.generate import generate_step

import mlx_kv
from mlx_kv.cache import attention
from mlx_kv.cache.attention import Packed
from mlx_kv.cache.codecs import Affine
from mlx_kv.mlxlm.traverse import attention_caches
from tests.tiny_models import VOCAB, make_model

LENGTH = 24
EIGHT = Affine(8, 32, rotate=True)
STORED: dict[str, dict[str, Any]] = {
    "8 and 4 bits": {"bits": (8, 4), "group_size": 32},
    "rotated": {"bits": 8, "group_size": 32, "codec": "rotated"},
    "rotated keys": {"bits": (4, 8), "group_size": 32, "codec": ("rotated", "affine")},
    "mxfp8": {"codec": "mxfp8"},
    "centred keys": {"codec": ("centred", EIGHT)},
    "the newest as they came": {"bits": (8, 4), "group_size": 32, "codec": "rotated", "residual_length": 10},
    "the newest as they came, arrays": {"codec": ("mxfp8", "plain"), "residual_length": 10},
}
# Within one margin nothing is evicted while decoding: drafts do not change when.
BUDGETS: dict[str, dict[str, Any]] = {
    "full": {},
    "key_diff": {"budget": 60, "keep_recent": 12, "margin": 40},
    "snap_kv": {"budget": 60, "keep_recent": 12, "margin": 40, "score": "snap_kv", "share": "adaptive"},
}


def prompts() -> list[list[int]]:
    drawn = random.Random(3)
    return [[drawn.randrange(VOCAB) for _ in range(length)] for length in (150, 20, 230)]


def policy_of(model: nn.Module, stored: str, **options: Any) -> mlx_kv.CachePolicy:
    """With the centres of this model's keys, where they are to be centred."""
    told = dict(STORED[stored])
    if stored == "centred keys":
        told["codec"] = (centred(model, prompts()[0], EIGHT), EIGHT)
    if "residual_length" in told and options.get("share") == "adaptive":  # is refused: the newest lie where they lie
        options["share"] = "head"
    return mlx_kv.CachePolicy(**told, **options)


def draft_of(model: nn.Module) -> nn.Module:
    """One that is right now and then."""
    draft = make_model("llama")
    mx.random.seed(1)
    draft.update(nn.utils.tree_map(lambda p: p + 0.1 * mx.random.normal(p.shape) * p.std(), model.parameters()))
    return draft


def answers(model: nn.Module, texts: list[list[int]], policy: mlx_kv.CachePolicy, **how: Any) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in texts]
    for token in mlx_kv.batch_generate(model, None, texts, policy, LENGTH, prefill_step_size=32, **how):
        made[token.index].append(token.token)
    return made


@pytest.mark.parametrize(("stored", "budget"), [*zip(STORED, itertools.cycle(BUDGETS)), ("rotated", "full")])
@pytest.mark.slow
def test_drafts_change_nothing(stored: str, budget: str) -> None:
    """Under each way to store, with and without budgets; rows in company under other policies: test_company.py."""
    model = make_model("llama")
    draft, policy = draft_of(model), policy_of(model, stored, **BUDGETS[budget])
    alone = [answers(model, [text], policy)[0] for text in prompts()]
    counts = mlx_kv.SpeculationStatistics()
    assert answers(model, prompts(), policy, draft_model=draft, num_draft_tokens=3, statistics=counts) == alone
    assert 0 < counts.accepted < counts.drafted
    for text, wanted in zip(prompts(), alone, strict=True):
        told = mlx_kv.speculative_generate(
            model, draft, None, text, policy=policy, max_tokens=LENGTH, num_draft_tokens=3, prefill_step_size=32
        )
        assert [each.token for each in told] == wanted


@pytest.mark.slow
def test_drafts_that_see_later_ones_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_masked", lambda scores, mask, first, last: scores)
    with pytest.raises(AssertionError):
        test_drafts_change_nothing("8 and 4 bits", "full")


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "gemma2", "deepseek_v3"])
def test_other_families_decode_what_a_prompt_reads(family: str, stored: str) -> None:
    """Windows, sinks, latent attention, and attention that hides itself: its planes are decoded."""
    model, text = make_model(family), mx.array([prompts()[1]])
    policy = policy_of(model, stored)
    if policy.residual_length and family != "gemma3_text":
        with pytest.raises(ValueError, match=f"attention of {family} cannot be answered here: leave it out"):
            mlx_kv.make_prompt_cache(model, policy)
        return
    caches = mlx_kv.make_prompt_cache(model, policy)
    seen = all(cache.seam is not None for cache in attention_caches(caches))
    assert seen == (family == "gemma3_text")
    read = [model(text[:, :12], cache=caches), *(model(text[:, i : i + 1], cache=caches) for i in range(12, 20))]
    handed = [isinstance(cache.keys_and_values()[0], tuple) for cache in attention_caches(caches)]
    assert handed == [seen and policy.codecs[1].packed is not None] * len(handed)
    # What decoding read, packed or not, is what a prompt reads, which is decoded always.
    whole = model(text, cache=mlx_kv.make_prompt_cache(model, policy))
    assert (mx.abs(mx.concatenate(read, axis=1) - whole).max() / mx.abs(whole).max()).item() < 0.05
    steps = generate_step(text[0], model, max_tokens=8, prompt_cache=mlx_kv.make_prompt_cache(model, policy))
    assert [int(token) for token, _ in steps] == answers(model, [prompts()[1]], policy)[0][:8]


@pytest.mark.parametrize("stored", [each for each in STORED if not each.endswith("arrays")])
@pytest.mark.slow
def test_planes_that_are_read_wrongly_are_caught(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Packed.mixed
    monkeypatch.setattr(Packed, "mixed", lambda self, weights, slots: genuine(self, mx.roll(weights, 1, -1), slots))
    with pytest.raises(AssertionError):
        test_other_families_decode_what_a_prompt_reads("gemma3_text", stored)
