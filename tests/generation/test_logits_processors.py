"""Processors, filters and penalties in every loop: the tokens that a slow and obvious one gets, in any company."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from engines import make_engine
from tiny_models import VOCAB, make_model

from mlx_kv import (
    CachePolicy,
    SpeculationStatistics,
    batch_generate,
    make_prompt_cache,
    speculative_generate,
    stream_generate,
)
from mlx_kv.generation.sampling import SeededSampler, TemperatureSampler
from mlx_kv.generation.sequence import BatchToken, TokenSequence
from mlx_kv.generation.settings import LogitsProcessor, SamplingSettings
from mlx_kv.generation.speculation.acceptance import RowContext, RowContexts

PROMPT = mx.random.randint(1, VOCAB, (20,), key=mx.random.key(1)).tolist()
TOKENS = 24
GREEDY = SamplingSettings(repetition_penalty=1.5, repetition_context_size=12, logit_bias={3: 1.0, 9: -100.0})
COUNTED = SamplingSettings(frequency_penalty=1.5, frequency_context_size=0, presence_penalty=0.5)
SAMPLED = SamplingSettings(
    temperature=0.9, top_p=0.97, top_k=40, min_p=0.005, repetition_penalty=1.2, presence_penalty=0.4, seed=5
)
EXCLUDED = replace(SAMPLED, xtc_probability=0.5, xtc_threshold=0.02, seed=8)
EACH = (GREEDY, COUNTED, SAMPLED, EXCLUDED)


def slowly(model: nn.Module, settings: SamplingSettings, count: int = TOKENS) -> tuple[list[int], list[mx.array]]:
    """Token by token, everything read anew: the tokens, and log-probabilities (V,) at their places."""
    sampler, tokens, told = settings.sampler(len(PROMPT)), list(PROMPT), []
    for _ in range(count):
        logits = model(mx.array([tokens]))[:, -1]
        for processor in settings.processors():
            logits = processor(mx.array(tokens), logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        drawn = mx.argmax(logprobs, axis=-1) if sampler is None else sampler(logprobs)
        tokens.append(int(drawn.item()))
        told.append(logprobs[0])
    return tokens[len(PROMPT) :], told


def drafting(model: nn.Module) -> nn.Module:
    """A draft that is right now and then."""
    draft = make_model("llama")
    mx.random.seed(1)
    draft.update(nn.utils.tree_map(lambda p: p + 0.1 * mx.random.normal(p.shape) * p.std(), model.parameters()))
    return draft


def sequence(index: int, settings: SamplingSettings, prompt: list[int] | None = None, **more: Any) -> TokenSequence:
    prompt = PROMPT if prompt is None else prompt
    processors = settings.processors()
    sampler = settings.sampler(len(prompt))
    return TokenSequence(index, prompt, TOKENS, sampler=sampler, processors=processors, **more)


def run(model: nn.Module, sequences: list[TokenSequence], late: int = 0, **options: Any) -> dict[int, list[BatchToken]]:
    """What each gets; the last so many join some steps later."""
    engine = make_engine(model, set(), max_batch_size=8, **options)
    found: dict[int, list[BatchToken]] = {own.index: [] for own in sequences}
    for own in sequences[: len(sequences) - late]:
        engine.submit(own)
    steps = 0
    while engine.busy:
        if steps == 3:
            for own in sequences[len(sequences) - late :]:
                engine.submit(own)
        for token in engine.step():
            found[token.index].append(token)
        steps += 1
    return found


WAYS: dict[str, Any] = {
    "plain": lambda model: {},
    "draft": lambda model: {"draft_model": drafting(model), "num_draft_tokens": 4, "draft_length": "fixed"},
    "paced": lambda model: {"draft_model": drafting(model), "num_draft_tokens": 3},
    "ngram": lambda model: {"drafter": "ngram", "draft_length": "fixed"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_rows_of_a_batch_get_what_each_gets_alone(way: str) -> None:
    model = make_model("llama")
    wanted = {index: slowly(model, settings) for index, settings in enumerate(EACH)}
    stuck = sequence(12, SamplingSettings(logit_bias={3: 100.0}), PROMPT[:5])  # what any drafter guesses
    company = [sequence(10, SamplingSettings(), PROMPT[:3]), stuck, sequence(11, COUNTED, PROMPT[:9])]
    rows = [sequence(index, settings, top_logprobs=3 * (index % 2)) for index, settings in enumerate(EACH)]
    found = run(model, [*company[:2], *rows, company[2]], late=2, **WAYS[way](model))
    for index, (tokens, logprobs) in wanted.items():
        assert [own.token for own in found[index]] == tokens, EACH[index]
        for own, told in zip(found[index], logprobs, strict=True):
            assert own.score is not None
            assert math.isclose(own.score.logprob, told[own.token].item(), abs_tol=2e-4)
            likeliest = sorted(enumerate(told.tolist()), key=lambda pair: -pair[1])[: len(own.score.top)]
            assert len(own.score.top) == 3 * (index % 2)
            assert all(
                math.isclose(got, value, abs_tol=2e-4)
                for (_, got), (_, value) in zip(own.score.top, likeliest, strict=True)
            )
    assert all(own.score is None for own in found[10]), "who asks for none is told none"
    if way != "plain":
        assert {own.token for own in found[12]} == {3}
        assert any(own.from_draft for row in found.values() for own in row), "nothing was accepted: nothing is shown"


@pytest.mark.parametrize("settings", EACH)
@pytest.mark.slow
def test_every_way_to_generate_gets_the_same(settings: SamplingSettings, reference: Any) -> None:
    model, (_, tokenizer) = make_model("llama"), reference
    wanted = slowly(model, settings)[0]
    given = settings.sampler(len(PROMPT))
    sampler: Any = given.rules if isinstance(given, SeededSampler) else given
    options: dict[str, Any] = {"sampler": sampler, "seed": settings.seed, "max_tokens": TOKENS}
    processors = settings.processors()
    plain = stream_generate(model, tokenizer, PROMPT, logits_processors=list(processors), **options)
    ends = tokenizer.eos_token_ids
    stop = next((place for place, token in enumerate(wanted) if token in ends), TOKENS)
    assert [own.token for own in plain][:stop] == wanted[:stop]
    counts = SpeculationStatistics()
    for drafter in (
        {"draft_model": drafting(model), "num_draft_tokens": 3},
        {"draft_model": None, "drafter": "suffix"},
    ):
        more: dict[str, Any] = options | drafter | {"draft_length": "fixed", "statistics": counts}
        got = speculative_generate(model, tokenizer=None, prompt=PROMPT, logits_processors=processors, **more)
        assert [own.token for own in got] == wanted
    assert 0 < counts.accepted < counts.drafted
    if settings.seed is None:  # else each prompt of a batch has a seed of its own
        batch = batch_generate(model, None, [PROMPT, PROMPT[:4]], logits_processors=processors, **options)
        assert [own.token for own in batch if own.index == 0] == wanted


@pytest.mark.parametrize("way", ["plain", "draft"])
def test_what_was_read_before_is_shown_to_processors(way: str) -> None:
    model = make_model("llama")
    settings = replace(COUNTED, presence_context_size=0)
    wanted = slowly(model, settings)[0]
    engine = make_engine(model, set(), **WAYS[way](model))
    caches = engine.make_caches()
    engine._decoder.read(mx.array([PROMPT[:15]]), caches)
    row = TokenSequence(0, PROMPT[15:], TOKENS, None, None, caches, PROMPT[:15], settings.processors())
    engine.submit(row)
    found = []
    while engine.busy:
        found += [token.token for token in engine.step()]
    assert found == wanted


def test_what_was_read_before_is_shown_to_processors_of_a_stream(reference: Any) -> None:
    model = make_model("llama")
    settings = replace(COUNTED, presence_context_size=0)
    caches, wanted = make_prompt_cache(model), slowly(model, settings, 8)[0]
    model(mx.array([PROMPT[:15]]), cache=caches)
    options: dict[str, Any] = {"logits_processors": settings.processors(), "before": PROMPT[:15]}
    got = [own.token for own in stream_generate(model, reference[1], PROMPT[15:], None, 8, None, caches, **options)]
    assert got == wanted[: len(got)]
    assert len(got) > 2


def test_the_prompt_of_a_second_reading_is_shown_to_processors(reference: Any) -> None:
    model, tokenizer = reference
    prompt = tokenizer.encode("class Stack:\n    def push(self, item):\n        self.items.append(item)\n")
    policy = CachePolicy(budget=len(prompt) + 100, score="kvzip", keep_recent=8)
    settings = SamplingSettings(presence_penalty=2.0, presence_context_size=0)
    seen: list[list[int]] = []

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    processors = [*settings.processors(), look]
    given = stream_generate(model, tokenizer, prompt, policy, 12, logits_processors=processors)
    tokens = [own.token for own in given]
    assert seen[0] == prompt
    again = speculative_generate(
        model, None, tokenizer, prompt, 12, policy=policy, drafter="ngram", logits_processors=processors
    )
    assert [own.token for own in again] == tokens


class Chain:
    """A grammar that remembers where it stands: each token is followed by the next number, up to an end."""

    def __init__(self, end: int) -> None:
        self.end, self.shown = end, list[list[int]]()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        known: Any = tokens.tolist()
        self.shown.append(known)
        mask = mx.full(logits.shape, -math.inf)
        mask[:, min(known[-1] + 1, self.end)] = 0.0
        return logits + mask

    def allowed(self, tokens: mx.array, drafted: list[int]) -> int:
        last: Any = tokens[-1].item()
        return next((i for i, token in enumerate(drafted) if token != min(last + 1 + i, self.end)), len(drafted))


@pytest.mark.parametrize("way", WAYS)
def test_a_processor_that_remembers_is_shown_each_place_and_cuts_drafts(way: str) -> None:
    model, chain = make_model("llama"), Chain(VOCAB - 1)
    start = [5, 9, 30]
    statistics = SpeculationStatistics()
    options = WAYS[way](model) | ({} if way == "plain" else {"statistics": statistics})
    sampler = SeededSampler(TemperatureSampler(1.0), 4, 3)
    row = TokenSequence(0, start, 15, sampler=sampler, processors=(chain,), top_logprobs=2)
    found = run(model, [row, sequence(1, SAMPLED)], **options)
    assert [own.token for own in found[0]] == list(range(31, 46))
    assert all(own.score is not None and abs(own.score.logprob) < 1e-4 for own in found[0])
    assert all(shown == [5, 9, *range(30, shown[-1] + 1)] for shown in chain.shown), "only what can stand was shown"
    assert [own.token for own in found[1]] == slowly(model, SAMPLED)[0]


def test_drafts_are_cut_where_a_processor_lets_no_more_stand() -> None:
    rows = RowContexts()
    rows.join([RowContext((Chain(VOCAB - 1),), [5, 30]), RowContext((), []), RowContext(GREEDY.processors(), [5])])
    assert rows.cut([[31, 32, 7, 34], [1, 2], [3]]) == [[31, 32], [1, 2], [3]]
    rows.record([[31, 32], [1], [4, 4]])
    assert rows.cut([[33, 34], [], []]) == [[33, 34], [], []]
    rows.keep([0])
    assert rows.cut([[31]]) == [[]]


def test_a_processor_of_another_type_changes_nothing_for_others() -> None:
    model = make_model("llama")
    model.set_dtype(mx.float16)

    def wide(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.astype(mx.float32)

    processors: tuple[LogitsProcessor, ...] = (wide,)
    rows = [TokenSequence(0, PROMPT, 4, processors=processors), TokenSequence(1, PROMPT[:7], 4, top_logprobs=0)]
    together = run(model, rows)[1]
    alone = run(model, [TokenSequence(1, PROMPT[:7], 4, top_logprobs=0)])[1]
    assert [own.score for own in together] == [own.score for own in alone]
