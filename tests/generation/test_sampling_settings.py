"""What settings mean: the same distributions as mlx-lm's samplers and processors, and what a model's defaults are."""

from __future__ import annotations

import math
from dataclasses import replace
from types import FunctionType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import sample_utils

from mlx_kv.generation import sampling
from mlx_kv.generation.sampling import SeededSampler, TemperatureSampler
from mlx_kv.generation.settings import SamplingSettings

V = 60
LOGITS = mx.random.normal((8, V), key=mx.random.key(5)) * 2.5
LOGPROBS = LOGITS - mx.logsumexp(LOGITS, axis=-1, keepdims=True)
TOKENS = mx.random.randint(0, V, (45,), key=mx.random.key(6))


def of_mlx_lm(monkeypatch: pytest.MonkeyPatch, **given: Any) -> mx.array:
    """The probabilities (8, V) from which mlx-lm's own sampler would draw."""
    seen = []

    def draw(logits: mx.array, temp: float) -> mx.array:
        seen.append(mx.softmax(logits.astype(mx.float32) / temp, axis=-1))
        return mx.argmax(logits, axis=-1)

    monkeypatch.setattr(sample_utils, "categorical_sampling", draw)
    sample_utils.make_sampler(**given)(LOGPROBS)
    return seen[0]


@pytest.mark.parametrize(
    "given",
    [
        {"temp": 0.3},
        {"temp": 1.7},
        {"top_p": 0.6},
        {"top_p": 0.02},
        {"top_k": 1},
        {"top_k": 7},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0, "xtc_special_tokens": [3, 9, 20]},
        {"temp": 0.7, "top_p": 0.9, "min_p": 0.03, "top_k": 9, "xtc_probability": 1.0, "xtc_threshold": 0.08},
    ],
    ids=str,
)
def test_each_filter_leaves_the_probabilities_that_mlx_lms_does(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"temp": 1.0} | given
    ours = TemperatureSampler(**given | {"xtc_special_tokens": tuple(given.get("xtc_special_tokens", ()))})
    wanted = of_mlx_lm(monkeypatch, **given)
    assert mx.allclose(mx.softmax(ours.scaled(LOGPROBS), axis=-1), wanted, atol=1e-6).item()
    assert mx.array_equal(ours.scaled(LOGPROBS) > -math.inf, wanted > 0).item()
    alone = mx.concatenate([ours.scaled(row[None]) for row in LOGPROBS])
    assert mx.array_equal(alone, ours.scaled(LOGPROBS)).item(), "a row has the same, whoever is beside it"
    several = ours.scaled(LOGPROBS.reshape(2, 4, V)).reshape(8, V)
    assert mx.array_equal(several, ours.scaled(LOGPROBS)).item(), "and at any place of a draft"


def test_a_new_number_compiles_nothing() -> None:
    for name in ("apply_min_p", "apply_top_k", "apply_top_p", "apply_xtc"):
        compiled, plain = getattr(sample_utils, name), getattr(sampling, name)
        assert type(plain) is FunctionType
        assert type(compiled) is not FunctionType, "mlx-lm no longer compiles it: take it as it is"
        assert (plain.__module__, plain.__name__) == (sample_utils.__name__, name)


def test_top_choices_are_excluded_as_often_as_asked_and_by_seed_and_position_alone() -> None:
    rules = TemperatureSampler(1.0, xtc_probability=0.3, xtc_threshold=0.05)
    trials = 4000
    draws = SeededSampler(rules, 11, 0)
    coins = draws.coins(range(trials))
    assert coins is not None
    assert coins.shape == (trials, 1)
    rows = mx.broadcast_to(LOGPROBS[:1], (trials, V))
    excluded = (rules.scaled(rows, coins).argmax(axis=-1) != LOGPROBS[0].argmax()).mean().item()
    assert abs(excluded - 0.3) < 4 * math.sqrt(0.3 * 0.7 / trials)
    again = SeededSampler(rules, 11, 100).coins(range(5))
    assert again is not None
    assert mx.array_equal(again, coins[100:105]).item()
    other = SeededSampler(rules, 12, 0).coins(range(5))
    assert other is not None
    assert not mx.array_equal(other, coins[:5]).item()
    unseeded = (rules.scaled(rows).argmax(axis=-1) != LOGPROBS[0].argmax()).mean().item()
    assert abs(unseeded - 0.3) < 4 * math.sqrt(0.3 * 0.7 / trials), "each row tosses its own coin"
    assert SeededSampler(TemperatureSampler(1.0), 11, 0).coins(range(3)) is None


def test_a_seeded_draw_excludes_with_the_coin_of_its_position() -> None:
    rules = TemperatureSampler(1e-9, xtc_probability=0.5, xtc_threshold=0.05)  # the likeliest that is left
    draws = SeededSampler(rules, 1, 0)
    coins = draws.coins(range(40))
    assert coins is not None
    wanted = mx.argmax(rules.scaled(mx.broadcast_to(LOGPROBS[:1], (40, V)), coins), axis=-1).tolist()
    got = [draws(LOGPROBS[:1]).item() for _ in range(40)]
    assert got == wanted
    assert len(set(got)) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.5, "repetition_context_size": 5},
        {"presence_penalty": 1.5, "presence_context_size": 0},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.7, "frequency_context_size": 40},
        {"logit_bias": {3: 5.0, 7: -100.0}},
        {"logit_bias": {4: 1.5}, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.2},
    ],
    ids=str,
)
def test_each_penalty_changes_logits_as_mlx_lms_does(given: dict[str, Any]) -> None:
    ours, theirs = LOGITS[:1], LOGITS[:1]
    for processor in SamplingSettings(**given).processors():
        ours = processor(TOKENS, ours)
    for processor in sample_utils.make_logits_processors(**given):
        theirs = processor(TOKENS, theirs)
    assert mx.array_equal(ours, theirs).item()
    assert not mx.array_equal(ours, LOGITS[:1]).item()


def test_settings_that_change_nothing_cost_nothing() -> None:
    settings = SamplingSettings(repetition_penalty=1.0, presence_penalty=0.0, logit_bias={}, top_k=0)
    assert settings.processors() == ()
    assert SamplingSettings(repetition_penalty=0.0).processors() == ()
    assert settings.sampler(5) is None
    assert SamplingSettings(temperature=0.8, top_p=0.0).sampler(5) is None
    shared = SamplingSettings(temperature=0.8, top_k=3)
    assert shared.sampler(5) is replace(shared).sampler(9), "rows that sample alike are sampled in one call"
    seeded = replace(shared, seed=3).sampler(9)
    assert isinstance(seeded, SeededSampler)
    assert (seeded.seed, seeded.position, seeded.rules) == (3, 9, TemperatureSampler(0.8, top_k=3))


def test_ends_and_line_breaks_are_no_top_choices() -> None:
    class Tokenizer:
        eos_token_ids = frozenset({2})

        def encode(self, text: str) -> list[int]:
            return [13]

    sampler = SamplingSettings(temperature=1.0, xtc_probability=0.5).sampler(0, Tokenizer())
    assert isinstance(sampler, TemperatureSampler)
    assert sampler.xtc_special_tokens == (13, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1: give a number from 0 up"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 1.1}, "top_p is 1.1: give a number from 0 to 1"),
        ({"top_k": -1}, "top_k is -1: give a whole number from 0 up"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"xtc_threshold": 0.6}, "xtc_threshold is 0.6: give a number from 0 to 0.5"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf: give a finite number"),
        ({"repetition_context_size": -1}, "repetition_context_size is -1"),
        ({"logit_bias": {-3: 1.0}}, "logit_bias has 1.0 for token -3"),
        ({"logit_bias": {3: math.nan}}, "logit_bias has nan for token 3"),
        ({"logit_bias": {2**31: 1.0}}, "logit_bias has 1.0 for token 2147483648"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**given)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, SamplingSettings()),
        ({"temperature": 0.7, "top_p": 0.8}, SamplingSettings()),
        ({"do_sample": True}, SamplingSettings(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
            SamplingSettings(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05),
        ),
        ({"do_sample": True, "temperature": "hot", "top_p": 7, "top_k": None}, SamplingSettings(temperature=1.0)),
        ({"repetition_penalty": 1.1}, SamplingSettings(repetition_penalty=1.1)),
    ],
)  # fmt: skip
def test_a_models_own_defaults(config: dict[str, Any], wanted: SamplingSettings) -> None:
    assert SamplingSettings.of_model(config) == wanted
