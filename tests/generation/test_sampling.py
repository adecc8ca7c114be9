"""Sampling: from which distribution, and that a seed gives the same tokens in any company."""

from __future__ import annotations

import itertools
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from engines import make_engine
from mlx_lm.sample_utils import make_sampler
from tiny_models import VOCAB, make_model

from mlx_kv import (
    SpeculationStatistics,
    TemperatureSampler,
    batch_generate,
    make_prompt_cache,
    speculative_generate,
    stream_generate,
)
from mlx_kv.generation.sampling import SeededSampler, derived_seed, gumbel_noise
from mlx_kv.generation.sequence import TokenSequence

PROMPT = mx.random.randint(1, VOCAB, (20,), key=mx.random.key(1)).tolist()
RULES = TemperatureSampler(1.0, 0.95)
TOKENS = 24


def guessing(model: nn.Module, noise: float = 0.1) -> nn.Module:
    """A draft that is right now and then."""
    draft = make_model("llama")
    mx.random.seed(1)
    draft.update(nn.utils.tree_map(lambda p: p + noise * mx.random.normal(p.shape) * p.std(), model.parameters()))
    return draft


def others(count: int) -> list[TokenSequence]:
    """Company of all kinds: greedy rows and sampled ones, with and without a seed, longer ones and shorter ones."""
    samplers = itertools.cycle([None, TemperatureSampler(0.8), make_sampler(0.9), SeededSampler(RULES, 77, 3)])
    made = zip(range(1, count + 1), samplers, strict=False)
    return [TokenSequence(i, PROMPT[: 3 + i], 6 + 25 * i % 34, sampler=sampler) for i, sampler in made]


def sampled(
    model: nn.Module, seed: int, company: int = 0, drafted: int = 0, draft: nn.Module | None = None
) -> list[int]:
    """The tokens of one sequence, in an engine with others; one of them joins later than it."""
    options: dict[str, Any] = {"draft_model": draft, "num_draft_tokens": drafted} if draft is not None else {}
    engine = make_engine(model, set(), max_batch_size=6, **options)
    engine.submit(TokenSequence(0, PROMPT, TOKENS, sampler=SeededSampler(RULES, seed, len(PROMPT))))
    late = others(company)
    for sequence in late[1:]:
        engine.submit(sequence)
    tokens: list[int] = []
    for step in itertools.count():
        if not engine.busy:
            return tokens
        if step == 2 and late:
            engine.submit(late[0])
        tokens += [token.token for token in engine.step() if token.index == 0]
    raise AssertionError


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_in_any_company(seed: int) -> None:
    model = make_model("llama")
    draft = guessing(model)
    wanted = sampled(model, seed)
    assert len(set(wanted)) > 5
    assert sampled(model, seed, company=5) == wanted
    assert sampled(model, seed, 0, 3, draft) == wanted
    assert sampled(model, seed, 5, 1 + seed % 6, draft) == wanted
    assert sampled(model, seed + 1) != wanted


def test_every_way_to_generate_draws_the_same(reference: Any, draft: nn.Module) -> None:
    model, tokenizer = reference
    prompt, options = (
        tokenizer.encode("class Stack:\n    def push(self"),
        {"max_tokens": 50, "sampler": RULES, "seed": 5},
    )
    wanted = [r.token for r in stream_generate(model, tokenizer, prompt, **options)]
    counts = SpeculationStatistics()
    got = speculative_generate(model, draft, tokenizer, prompt, num_draft_tokens=4, statistics=counts, **options)
    assert [r.token for r in got] == wanted
    assert 0 < counts.accepted < counts.drafted
    caches = make_prompt_cache(model)
    first = [
        r.token for r in stream_generate(model, tokenizer, prompt, prompt_cache=caches, **options | {"max_tokens": 20})
    ]
    assert first == wanted[:20]
    for cache in caches:
        cache.trim(cache.offset - len(prompt) - 19)
    rest = stream_generate(model, tokenizer, first[-1:], prompt_cache=caches, **options | {"max_tokens": 30})
    assert [r.token for r in rest] == wanted[20:], "a position has its key, wherever reading began"


@pytest.mark.parametrize("with_draft", [False, True])
@pytest.mark.slow
def test_a_prompt_of_a_batch_draws_by_its_index_alone(with_draft: bool) -> None:
    model = make_model("llama")
    options: dict[str, Any] = {"sampler": RULES, "seed": 3, "max_tokens": 30}
    if with_draft:
        options["draft_model"] = guessing(model)

    def tokens(prompts: list[list[int]], **more: Any) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        for token in batch_generate(model, None, prompts, **options | more):
            found[token.index].append(token.token)
        return found

    together = tokens([PROMPT] * 4)
    assert len({tuple(row) for row in together}) == 4
    assert tokens([PROMPT, PROMPT[:3]])[0] == together[0]
    assert tokens([PROMPT] * 4, max_batch_size=1) == together
    assert tokens([PROMPT] * 4, num_draft_tokens=1) == together


def test_a_seed_needs_a_sampler_that_can_be_told() -> None:
    model = make_model("llama")
    for generate in (
        lambda **options: speculative_generate(model, model, None, PROMPT, **options),
        lambda **options: batch_generate(model, None, [PROMPT], **options),
    ):
        with pytest.raises(ValueError, match="a seed is given, but this sampler draws by itself"):
            generate(sampler=make_sampler(0.7), seed=1)
        assert len(list(generate(seed=1, max_tokens=3))) == 3, "greedy needs no seed, and takes one"


# --- distributions ----------------------------------------------------------------------------------------------------


def test_tokens_of_a_seed_have_the_models_distribution_and_guesses_that_of_the_draft() -> None:
    """Against the probabilities themselves: 4 standard deviations for each of 5 tokens, over positions of one seed.

    How often both agree is known as well: sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i) (Daliri, Musco and
    Suresh 2025, "Coupling without communication and drafter-invariant speculative decoding").
    """
    p, q, trials = [0.5, 0.2, 0.15, 0.1, 0.05], [0.1, 0.4, 0.2, 0.05, 0.25], 6000
    draws = SeededSampler(TemperatureSampler(1.0), 3, 0)
    noise = gumbel_noise([draws.key(ahead) for ahead in range(trials)], 5)
    rows = [mx.argmax(draws.rules.scaled(mx.log(mx.array(each))) + noise, axis=-1) for each in (p, q)]
    for tokens, truth in zip(rows, (p, q), strict=True):
        for token, share in enumerate(truth):
            count = (tokens == token).sum().item()
            assert abs(count / trials - share) < 4 * math.sqrt(share * (1 - share) / trials)
    agreed = (rows[0] == rows[1]).mean().item()
    known = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(5)) for i in range(5))
    assert abs(agreed - known) < 4 * math.sqrt(known * (1 - known) / trials)
    following = (rows[0][1:] == rows[0][:-1]).mean().item()  # positions know nothing of each other
    same = sum(share**2 for share in p)
    assert abs(following - same) < 4 * math.sqrt(same * (1 - same) / trials)


def test_seeds_and_names_have_nothing_in_common() -> None:
    assert len({derived_seed(seed, name) for seed in range(50) for name in (*range(50), "1", '"1"')}) == 50 * 51


@pytest.mark.parametrize("temp", [5e-324, 1e-300, 1e-46, 1e-40, 1e-20, 1e-9])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_near_0_the_likeliest_token_is_drawn(temp: float, dtype: mx.Dtype) -> None:
    logprobs = nn.log_softmax(mx.random.normal((64, 500), key=mx.random.key(3)) * 3).astype(dtype)
    logprobs = mx.concatenate(
        [logprobs, nn.log_softmax(mx.array([[0.0] * 499 + [200]])).astype(dtype)]
    )  # one is certain
    likeliest = logprobs.max(axis=-1)  # there may be several
    for top_p in (1.0, 0.5, 5e-324):
        sampler = TemperatureSampler(temp, top_p)
        seeded = SeededSampler(sampler, 1, 0)
        for drawn in (sampler(logprobs), mx.concatenate([seeded(row[None]) for row in logprobs])):
            assert mx.array_equal(mx.take_along_axis(logprobs, drawn[:, None], axis=1)[:, 0], likeliest).item()
        assert not mx.isnan(sampler.scaled(logprobs)).any().item()


def test_tokens_that_are_equally_likely_share_a_temperature_near_0() -> None:
    logprobs = mx.log(mx.array([0.4, 0.4, 0.2]))
    drawn = TemperatureSampler(1e-40)(mx.broadcast_to(logprobs, (600, 3)))
    assert 0.4 < (drawn == 0).mean().item() < 0.6
    assert (drawn == 2).sum().item() == 0


@pytest.mark.parametrize("temp", [1e39, 1e308])
def test_a_temperature_without_end_is_uniform_over_what_top_p_leaves(temp: float) -> None:
    logprobs = mx.log(mx.array([0.5, 0.3, 0.15, 0.05]))
    drawn = TemperatureSampler(temp, 0.7)(mx.broadcast_to(logprobs, (800, 4)))
    assert 0.4 < (drawn == 0).mean().item() < 0.6
    assert (drawn >= 2).sum().item() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_what_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="temp is "):
        TemperatureSampler(value)
    with pytest.raises(ValueError, match="top_p is "):
        TemperatureSampler(1.0, value)
