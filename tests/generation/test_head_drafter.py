"""Heads that draft: what they guess, against a slow reference, and that the text is the model's own in any case."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from draft_heads import TableHead, bigram_head, calm, random_head
from engines import make_engine
from tiny_models import VOCAB, make_model

from mlx_kv import (
    CachePolicy,
    PromptMemory,
    PromptStore,
    SpeculationStatistics,
    TemperatureSampler,
    batch_generate,
    make_prompt_cache,
    speculative_generate,
)
from mlx_kv.cache.layout import Budget
from mlx_kv.generation.admission import Admission
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.speculation import drafters
from mlx_kv.generation.speculation.drafters import DrafterContext, HeadDrafter, JointDrafter
from mlx_kv.mlxlm.heads import DraftHead
from mlx_kv.mlxlm.taps import HiddenTap
from mlx_kv.mlxlm.traverse import trim_all

PROMPTS = [mx.random.randint(1, VOCAB, (n,), key=mx.random.key(n)).tolist() for n in (5, 33, 1, 60, 18, 2)]
CHUNK = 16


def guesses(model: nn.Module, head: DraftHead, text: Sequence[int], most: int, unknown: int | None) -> list[int]:
    """What a head guesses after a text: all of it is read anew, without caches.

    Args:
        unknown: the token before which the state is not known.
    """
    tap = HiddenTap(model, head.hidden)
    _, states = tap(mx.array([list(text)]))
    before = mx.concatenate([mx.zeros_like(states[:, :1]), states[:, :-1]], axis=1)
    if unknown is not None:
        before[:, unknown] = 0.0
    tokens: list[int] = []
    for _ in range(most):
        outputs = head(mx.array([[*text, *tokens]]), None, before)
        tokens.append(int(mx.argmax(head.logits(outputs[:, -1])).item()))
        before = mx.concatenate([before, outputs[:, -1:]], axis=1)  # its own output is the state before the guess
    return tokens


class Checked(HeadDrafter):
    """Compares what it proposes with the reference."""

    unknown: int | None = None

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.model, self.texts, self.compared, self.random = context.model, list[list[int]](), 0, random.Random(3)

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any], states: mx.array | None = None) -> None:
        super().join(prompts, caches, states)
        self.texts += [list(prompt) for prompt in prompts]

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.texts = [self.texts[row] for row in rows]

    def propose(self, most: int, choice: Any) -> list[list[int]]:
        drafted = super().propose(self.random.randint(0, most), choice)
        for text, row in zip(self.texts, drafted, strict=True):
            assert row == guesses(self.model, self._head, text, len(row), self.unknown)
            self.compared += len(row)
        return drafted

    def accepted(self, tokens: Sequence[Sequence[int]], states: mx.array | None = None) -> None:
        super().accepted(tokens, states)
        for text, received in zip(self.texts, tokens, strict=True):
            text += received


@pytest.mark.parametrize("hidden", ["final", (1,)])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "lfm2"])
def test_it_guesses_what_a_slow_reference_guesses(family: str, hidden: Any) -> None:
    model = make_model(family)
    head = random_head(model, hidden=hidden)
    made = list[Checked]()

    def checked(context: DrafterContext) -> Checked:
        made.append(Checked(context))
        return made[0]

    engine = make_engine(
        model, max_batch_size=3, prefill_step_size=CHUNK, draft_model=head, drafter=checked, draft_length="fixed"
    )
    for index, prompt in enumerate(PROMPTS):  # rows join and leave at different times
        engine.submit(TokenSequence(index, list(prompt), 6 + 3 * index))
    while engine.busy:
        engine.step()
    assert made[0].compared > 60


def outputs_of(model: nn.Module, prompts: list[list[int]], length: int, **options: Any) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in prompts]
    for response in batch_generate(model, None, prompts, max_tokens=length, **options):
        outputs[response.index].append(response.token)
    return outputs


def forgetful(model: nn.Module) -> nn.Module:
    """What it says next depends on the last token alone: its attention says nothing."""
    for layer in model.layers:
        layer.self_attn.o_proj.weight *= 0.0
    return model


def expected(prompt: list[int], answer: list[int], following: list[int], most: int) -> tuple[int, int]:
    """How many tokens are drafted for a row by a table, and how many of them are right."""
    drafted = right = said = 0
    while said < len(answer):
        token, hits = [*prompt, *answer[:said]][-1], 0
        length = min(most, len(answer) - said - 1)
        for place in range(length):
            token = following[token]
            hits += hits == place and token == answer[said + place]
        drafted, right, said = drafted + length, right + hits, said + hits + 1
    return drafted, right


@pytest.mark.parametrize("sampler", [None, TemperatureSampler(0.5, 0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_a_head_that_knows_is_accepted_as_often_as_it_is_right(rate: float, sampler: Any) -> None:
    model = forgetful(make_model("llama"))
    head = random_head(model, kind=TableHead)
    likeliest = mx.argmax(model(mx.arange(VOCAB)[:, None])[:, -1], axis=-1)
    right = mx.random.uniform(shape=(VOCAB,), key=mx.random.key(5)) < rate
    head.following = mx.where(right, likeliest, (likeliest + 1) % VOCAB)
    table: Any = head.following.tolist()
    wanted = outputs_of(model, PROMPTS, 40, sampler=sampler, seed=1)
    options = {"draft_model": head, "draft_length": "fixed", "num_draft_tokens": 4, "sampler": sampler, "seed": 1}
    assert outputs_of(model, PROMPTS, 40, **options) == wanted
    statistics = SpeculationStatistics()
    assert outputs_of(model, PROMPTS, 40, statistics=statistics, max_batch_size=1, **options) == wanted
    sums = [expected(prompt, answer, table, 4) for prompt, answer in zip(PROMPTS, wanted, strict=True)]
    assert (statistics.drafted, statistics.accepted) == tuple(map(sum, zip(*sums, strict=True)))
    assert (statistics.accepted > 0) == (rate > 0)


def test_a_head_is_found_by_what_it_is() -> None:
    model = make_model("llama")
    head = random_head(model)
    context = DrafterContext(model, VOCAB, 3, head)
    assert type(drafters.find_drafter(None, context)) is HeadDrafter
    assert type(drafters.find_drafter("mtp", context)) is HeadDrafter
    assert type(drafters.find_drafter("auto", context)) is JointDrafter
    with pytest.raises(ValueError, match="give what load_draft_head returns"):
        drafters.find_drafter("mtp", DrafterContext(model, VOCAB, 3, model))
    with pytest.raises(ValueError, match="leave out the drafter"):
        drafters.find_drafter("model", context)


# --- every combination ------------------------------------------------------------------------------------------------

BUDGET: dict[str, Any] = {"budget": 24, "keep_recent": 8, "sinks": 2, "margin": 10}
POLICIES = {
    "8 bits": CachePolicy(bits=8, group_size=32),
    "8 and 4 bits": CachePolicy(bits=(8, 4), group_size=32),
    "the newest as they came": CachePolicy(bits=4, group_size=32, residual_length=16),
    "max_kv_size": CachePolicy(max_kv_size=20, max_write=8),
    "budget": CachePolicy(**BUDGET),
    "budget, 8 bits, by head": CachePolicy(**BUDGET, share="head", bits=8, group_size=32),
    "a table of heads": CachePolicy(**BUDGET, share="head", layers=((3, 0), (1, 0.2), (0.4, 2))),
    "kvzip": CachePolicy(**BUDGET, score="kvzip"),
}


def penalty(tokens: mx.array, logits: mx.array) -> mx.array:
    """What was said before is less likely."""
    return logits - 2.0 * mx.any(tokens[:, None] == mx.arange(logits.shape[-1]), axis=0)


def even(tokens: mx.array, logits: mx.array) -> mx.array:
    """A grammar: all tokens are even."""
    return mx.where(mx.arange(logits.shape[-1]) % 2 == 0, logits, -mx.inf)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("sampler", [None, TemperatureSampler(0.8, 0.95)], ids=["greedy", "sampled"])
def test_the_text_is_that_without_a_head(name: str, sampler: Any) -> None:
    policy, model = POLICIES[name], calm(make_model("llama"))
    options: dict[str, Any] = {"policy": policy, "sampler": sampler, "seed": 3, "prefill_step_size": 8}
    options |= {"max_batch_size": 3, "logits_processors": [penalty, even] if name in ("8 bits", "budget") else None}
    length = 24 if policy.budget is None else 48
    wanted = outputs_of(model, PROMPTS, length, **options)
    for head in (bigram_head(model), random_head(model)):
        statistics = SpeculationStatistics()
        drafting = {"draft_model": head, "draft_length": "fixed", "statistics": statistics}
        assert outputs_of(model, PROMPTS, length, **options, **drafting) == wanted
        assert statistics.drafted > 0
        assert isinstance(head, TableHead) == (statistics.acceptance_rate > 0.1)


def test_with_suffixes_the_head_guesses_for_rows_that_say_something_new() -> None:
    model = calm(make_model("llama"))
    asked: list[list[bool]] = []

    class Watched(JointDrafter):
        def propose(self, most: int, choice: Any) -> list[list[int]]:
            drafted = super().propose(most, choice)
            assert all(len(row) <= most for row in drafted)
            asked.append([count >= 4 for count in self._suffixes.matched])
            return drafted

    prompts = [PROMPTS[1], [*PROMPTS[0] * 5], PROMPTS[4]]
    wanted = outputs_of(model, prompts, 40)
    options: dict[str, Any] = {"draft_model": bigram_head(model), "draft_length": "fixed", "num_draft_tokens": 6}
    assert outputs_of(model, prompts, 40, drafter=Watched, **options) == wanted
    assert any(any(rows) and not all(rows) for rows in asked), "rows differ in one round"
    statistics = SpeculationStatistics()
    assert outputs_of(model, prompts, 40, drafter="auto", statistics=statistics, **options) == wanted
    assert statistics.drafter == "mtp and suffix"


def test_its_cache_follows_the_policy() -> None:
    model = make_model("llama")
    for name, policy in POLICIES.items():
        drafter = HeadDrafter(DrafterContext(model, VOCAB, 3, random_head(model), policy=policy))
        (cache,) = drafter.make_caches()
        assert cache.view.codecs == make_prompt_cache(model, policy)[0].view.codecs
        assert isinstance(cache.layout, Budget) == (policy.budget is not None), name


@pytest.mark.parametrize("policy", [CachePolicy(), POLICIES["kvzip"]], ids=["plain", "kvzip"])
def test_half_precision_and_prompts_of_one_token(policy: CachePolicy) -> None:
    """States that are not known have the dtype of the others."""
    model = make_model("llama")
    model.set_dtype(mx.bfloat16)
    head = random_head(model)
    head.set_dtype(mx.bfloat16)
    prompts = [[5], PROMPTS[1], [7, 8]]
    options: dict[str, Any] = {"policy": policy, "max_batch_size": 2, "prefill_step_size": 8}
    statistics = SpeculationStatistics()
    told = outputs_of(model, prompts, 6, draft_model=head, draft_length="fixed", statistics=statistics, **options)
    assert [len(row) for row in told] == [6, 6, 6]
    assert statistics.drafted > 0


def test_no_chunk_is_kept_for_the_state_of_a_row() -> None:
    model = make_model("llama")
    engine = make_engine(model, max_batch_size=4, prefill_step_size=64, draft_model=random_head(model))
    sequences = [TokenSequence(index, list(range(1, 90)), 4) for index in range(3)]
    for sequence in sequences:
        engine.submit(sequence)
    while not engine.rows:
        engine.step()
    assert all(sequence.state is None for sequence in sequences)
    engine.close()


def test_a_tap_forgets_a_pass_that_failed() -> None:
    model = make_model("llama")
    tap = HiddenTap(model, (0, 1))
    right = type(model.layers[2]).__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.layers[0]), "__call__", lambda *arguments, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tap(mx.array([[1, 2]]))
    assert type(model.layers[2]).__call__ is right
    assert tap(mx.array([[1, 2]]))[1].shape == (1, 2, 128)


def test_log_probabilities_are_the_models() -> None:
    model = calm(make_model("llama"))
    wanted = list(
        speculative_generate(
            model, None, None, PROMPTS[1], 20, drafter="ngram", prompt_lookup_min=30, prompt_lookup_max=30
        )
    )
    told = list(speculative_generate(model, bigram_head(model), None, PROMPTS[1], 20, draft_length="fixed"))
    for one, other in zip(told, wanted, strict=True):
        assert one.token == other.token
        assert mx.allclose(one.logprobs, other.logprobs, atol=1e-4).item()
    assert any(response.from_draft for response in told)


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_prefixes_go_on(family: str, kind: str, with_head: bool, tmp_path: Path) -> None:
    """From memory and disk, with the cache of the head, and without: it guesses by what comes behind them then."""
    model = make_model(family)
    head, made = random_head(model), list[Any]()
    prompt = [*PROMPTS[3], *PROMPTS[1], *PROMPTS[3]]
    wanted = outputs_of(model, [prompt], 16)[0]
    kept = PromptMemory(2**26, fingerprint="x") if kind == "memory" else PromptStore(tmp_path, fingerprint="x")

    def checked(context: DrafterContext) -> HeadDrafter:
        made.append(Checked(context) if with_head else HeadDrafter(context))
        return made[-1]

    how: dict[str, Any] = {"draft_model": head, "drafter": checked, "draft_length": "fixed"}
    first = make_engine(model, return_caches=True, prefill_step_size=CHUNK, **(how if with_head else {}))
    first.submit(TokenSequence(0, prompt[:100], 1, keep=kept.keep))
    while first.busy:
        first.step()
    found = kept.find(prompt)
    assert found is not None
    caches, read = found
    assert read >= 90
    engine = make_engine(model, **how)
    assert len(engine.make_caches()) == len(caches) + (not with_head)
    engine.submit(TokenSequence(0, prompt[read:], 16, caches=caches, before=prompt[:read]))
    told = []
    if with_head:
        made[-1].unknown = read  # the state before this token is not known: the reference has zeros there, too
    while engine.busy:
        told += [token.token for token in engine.step()]
    assert told == wanted
    (cache,) = made[-1].make_caches()
    assert cache.offset == 0


# --- planted faults ---------------------------------------------------------------------------------------------------


def one_place_on(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HeadDrafter.propose

    def propose(self: HeadDrafter, most: int, choice: Any) -> list[list[int]]:
        drafted = right(self, most, choice)
        if most and self.caches:
            trim_all(self.caches, 1)
        return drafted

    monkeypatch.setattr(HeadDrafter, "propose", propose)


def state_of_the_token_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HeadDrafter.accepted

    def accepted(self: HeadDrafter, tokens: Any, states: mx.array | None = None) -> None:
        assert states is not None
        right(self, tokens, mx.concatenate([states[:, 1:], states[:, :1]], axis=1))

    monkeypatch.setattr(HeadDrafter, "accepted", accepted)


def state_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HeadDrafter.accepted

    def accepted(self: HeadDrafter, tokens: Any, states: mx.array | None = None) -> None:
        assert states is not None
        right(self, tokens, mx.concatenate([states[1:], states[:1]]))

    monkeypatch.setattr(HeadDrafter, "accepted", accepted)


def drafts_stay_in_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "trim_all", lambda caches, n: True)


def the_last_state_of_a_chunk_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Admission.read

    def read(self: Admission, *arguments: Any) -> int:
        count = right(self, *arguments)
        for row in self.rows:
            row.sequence.state = None
        return count

    monkeypatch.setattr(Admission, "read", read)


FAULTS = [one_place_on, state_of_the_token_itself, state_of_another_row, drafts_stay_in_its_cache]
FAULTS.append(the_last_state_of_a_chunk_is_lost)


@pytest.mark.parametrize("plant", FAULTS)
@pytest.mark.slow
def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_it_guesses_what_a_slow_reference_guesses("llama", "final")
