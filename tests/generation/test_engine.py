"""One bad request hurts nobody else, and what has left holds no memory."""

from __future__ import annotations

import contextlib
import copy
import gc
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from engines import as_on_a_gpu, make_engine
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.cache import make_prompt_cache as make_stock_cache
from tiny_models import VOCAB, make_model

from mlx_kv import (
    CachePolicy,
    batch_generate,
    cache_statistics,
    make_prompt_cache,
    stream_generate,
    trim_prompt_cache,
)
from mlx_kv.generation.admission import PassSize
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.prefill import max_freed
from mlx_kv.generation.sequence import UNLIMITED, AnswerLengths, TokenSequence
from mlx_kv.mlxlm.traverse import attention_caches

PROMPT = mx.random.randint(1, VOCAB, (20,), key=mx.random.key(1)).tolist()
ENGINES = ["plain", "speculative"]


def engine(kind: str, model: nn.Module, policy: CachePolicy | None = None, **options: Any) -> Engine:
    draft = make_model("llama", seed=3) if kind == "speculative" else None
    return make_engine(model, set(), policy, draft_model=draft, **options)


def drained(made: Engine) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while made.busy:
        for token in made.step():
            tokens.setdefault(token.index, []).append(token.token)
    return tokens


def alone(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(bits=8, group_size=32)])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_limit_that_is_never_reached_takes_no_memory(kind: str, policy: CachePolicy) -> None:
    made = engine(kind, make_model("llama", max_position_embeddings=8192), policy)
    for index, most in enumerate((40, 5000, 40, UNLIMITED)):
        made.submit(TokenSequence(index, PROMPT, most))
    while len(made.rows) < 4:
        made.step()
    assert {cache.capacity for cache in made.caches} == {512}  # 20 tokens, and the 256 that are expected of an answer
    while max(row.offset for cache in attention_caches(made.caches) for row in cache.view.rows) < 513:
        made.step()
    assert {cache.capacity for cache in attention_caches(made.caches)} == {1024}
    made.cancel(1)
    made.cancel(3)


@pytest.mark.parametrize("kind", ENGINES)
def test_room_that_a_row_has_grown_into_leaves_with_it(kind: str) -> None:
    made = engine(kind, make_model("llama"))
    made.submit(TokenSequence(0, PROMPT * 20, 40))
    made.submit(TokenSequence(1, PROMPT, 40))
    while len(made.rows) < 2:
        made.step()
    of_both = cache_statistics(made.caches).bytes_allocated
    made.cancel(0)
    assert {cache.capacity for cache in made.caches} == {256}
    assert cache_statistics(made.caches).bytes_allocated < of_both / 3


def test_a_draft_model_gets_the_room_of_the_model() -> None:
    made = engine("speculative", make_model("llama"))
    made.submit(TokenSequence(0, PROMPT, 2000))
    while not made.rows:
        made.step()
    made.make_room(0, 1500)
    for _ in range(600):  # beyond the 512 slots that there are
        made.step()
    assert made._decoder.drafter is not None
    caches = attention_caches([*made.caches, *made._decoder.drafter.caches])
    assert len(caches) > len(made.caches)
    assert {cache.capacity for cache in caches} == {1536}


@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(bits=8, group_size=32)])
def test_layers_grow_one_after_the_other(policy: CachePolicy) -> None:
    model = make_model("llama", num_hidden_layers=10)
    made, other = make_engine(model, set(), policy), make_engine(model, set(), policy)
    for each in (made, other):
        each.submit(TokenSequence(0, PROMPT, 700))
        each.submit(TokenSequence(1, PROMPT[3:], 30))
    before, steps, told = [512] * 10, 0, list[int]()
    while made.busy:
        told += [token.token for token in made.step() if token.index == 0]
        if made.rows:
            capacities = [cache.capacity for cache in made.caches]
            steps += (grown := sum(a < b for a, b in zip(before, capacities, strict=True))) > 0
            assert grown <= 2
            before = capacities
    assert steps >= 5
    assert set(before) == {768}  # 700 tokens and the prompt, in multiples of 256: never more than it may have
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_kv.generation.engine.grow_early", lambda cache, ahead: False)
        assert drained(other)[0] == told


def test_room_follows_the_answers_that_were_seen() -> None:
    answers = AnswerLengths()
    assert [answers.expect(most) for most in (10, 256, 7000, UNLIMITED)] == [10, 256, 288, 288]
    for tokens in (*range(100, 110), 5000):
        answers.count(7000, tokens)
    assert answers.expect(7000) == 109 + 32  # one in eleven was longer
    assert answers.expect(5000) == 109 + 32  # of the same class
    assert answers.expect(32_000) == 288
    for _ in range(64):  # what is long ago is forgotten
        answers.count(7000, 900)
    assert (answers.expect(7000), answers.expect(4100)) == (932, 932)


@pytest.mark.parametrize(
    "policy", [CachePolicy(), CachePolicy(bits=8, group_size=32), CachePolicy(budget=24, keep_recent=8, margin=4)]
)
@pytest.mark.parametrize("kind", ENGINES)
def test_a_prompt_that_is_let_go_while_it_is_read_holds_up_nobody(kind: str, policy: CachePolicy) -> None:
    model, expected = make_model("llama"), {}
    for letting_go in (False, True):
        made = engine(kind, model, policy, prefill_step_size=16)
        for index, prompt in enumerate((PROMPT[:9], PROMPT * 20, PROMPT + PROMPT[:3])):
            if letting_go or index != 1:
                made.submit(TokenSequence(index, prompt, 12))
        if not letting_go:
            expected = drained(made)
            continue
        made.step()
        made.cancel(1)
        for _ in range(4):  # of two chunks, and no more of the 25
            made.step()
        assert sorted(made.rows) == [0, 2]
        assert drained(made)[2][-4:] == expected[2][-4:]


@pytest.mark.parametrize("kind", ENGINES)
def test_requests_that_cannot_be_are_refused_before_they_join(kind: str) -> None:
    model = make_model("llama")
    made = engine(kind, model)
    made.submit(TokenSequence(0, PROMPT, 8))
    foreign = make_prompt_cache(model, CachePolicy(bits=8, group_size=32))
    for bad, message in (
        (TokenSequence(1, [], 5), "sequence 1 is empty"),
        (TokenSequence(1, PROMPT, 0), "max_tokens of sequence 1 is 0"),
        (TokenSequence(1, PROMPT, 5, caches=foreign), "cache 1 has bits and group size|got 3 caches"),
        (TokenSequence(1, PROMPT, 5, caches=foreign[:1]), "got 1 caches for a model that has"),
    ):
        with pytest.raises(ValueError, match=message):
            made.submit(bad)
    made.submit(TokenSequence(2, PROMPT[:5], 6))
    assert drained(made) == {0: alone(model, PROMPT, 8), 2: alone(model, PROMPT[:5], 6)}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.slow
def test_cancel_at_any_stage_leaves_the_others_alone(kind: str) -> None:
    model = make_model("llama")
    wanted = {i: alone(model, PROMPT[: 4 + i], 12) for i in range(5)}
    for stage in range(8):
        made = engine(kind, model, max_batch_size=3)
        for i in range(5):
            made.submit(TokenSequence(i, PROMPT[: 4 + i], 12))
        tokens: dict[int, list[int]] = {}
        for _ in range(stage):
            for token in made.step():
                tokens.setdefault(token.index, []).append(token.token)
        made.cancel(1)
        made.cancel(99)
        for index, more in drained(made).items():
            assert index != 1
            tokens.setdefault(index, []).extend(more)
        assert {i: t for i, t in tokens.items() if i != 1} == {i: t for i, t in wanted.items() if i != 1}


@pytest.mark.parametrize("kind", ENGINES)
def test_close_and_idle_hold_no_memory(kind: str) -> None:
    model = make_model("llama")
    made = engine(kind, model)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    made.submit(TokenSequence(0, PROMPT * 20, 4))
    drained(made)
    gc.collect()
    assert mx.get_active_memory() - before < 100_000
    made.submit(TokenSequence(1, PROMPT, 9))
    made.submit(TokenSequence(2, PROMPT, 9))
    made.step()
    made.close()
    assert not made.busy
    assert made.step() == []
    assert made.caches == []


POLICIES = {
    "full": CachePolicy(),
    "8 bits": CachePolicy(bits=8, group_size=32),
    "window": CachePolicy(max_kv_size=16, max_write=8),
    "budget": CachePolicy(budget=1000),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draft", [None, 0, 3], ids=["plain", "a draft that is always right", "a draft that rarely is"])
def test_caches_of_a_row_go_on(draft: int | None, policy: str) -> None:
    """Of a row that still decodes, and of one that has ended: in a new engine, beside others, they are continued."""
    model = make_model("llama")
    net = None if draft is None else make_model("llama", seed=draft)

    def new() -> Engine:
        return make_engine(model, set(), POLICIES[policy], draft_model=net, return_caches=True)

    wanted: dict[int, list[int]] = {}
    reference = new()
    for index, prompt in enumerate((PROMPT, PROMPT[:7])):
        reference.submit(TokenSequence(index, prompt, 30))
    wanted = drained(reference)
    if POLICIES[policy] == CachePolicy():
        assert wanted[1] == alone(model, PROMPT[:7], 30)
    made = new()
    made.submit(TokenSequence(0, PROMPT, 12))
    made.submit(TokenSequence(1, PROMPT[:7], 20))
    told: dict[int, list[int]] = {0: [], 1: []}
    halfway, ended = None, {}
    assert made.extract(0) is None
    while made.busy:
        for token in made.step():
            told[token.index].append(token.token)
            if token.finish_reason is not None:
                ended[token.index] = token.caches
        if halfway is None and len(told[1]) >= 6:
            halfway = (list(told[1]), made.extract(1))
    assert halfway is not None
    again = new()
    starts = [(0, told[0], ended[0]), (1, told[1], ended[1]), (1, *halfway)]
    for number, (row, tokens, caches) in enumerate(starts):
        assert caches is not None
        (read,) = {cache.offset for cache in caches}
        known = [*(PROMPT if row == 0 else PROMPT[:7]), *tokens]
        assert len(known) - 2 <= read
        if read > len(known) - 1:
            trim_prompt_cache(caches, read - (len(known) - 1), strict=True)
            read = len(known) - 1
        again.submit(TokenSequence(number, known[read:], 8, caches=caches))
    again.submit(TokenSequence(3, PROMPT[:7], 8))
    tokens_of = drained(again)
    for number, (row, tokens, _) in enumerate(starts):
        assert tokens_of[number] == wanted[row][len(tokens) : len(tokens) + 8]
    assert tokens_of[3] == wanted[1][:8]


def test_state_that_was_taken_out_holds_no_other_row() -> None:
    """mlx-lm's recurrent state comes as a slice of the batch's: kept like that, one row would keep all of them."""
    rows, model = 16, make_model("lfm2")
    made = make_engine(model, set(), return_caches=True, max_batch_size=rows)
    for index in range(rows):
        made.submit(TokenSequence(index, PROMPT, 30 if index else 8))
    held: list[Any] = []
    while made.busy:
        for token in made.step():
            if token.caches is not None and token.index == 0:
                held += [cache for cache in token.caches if isinstance(cache, ArraysCache)]
    made.close()
    del made, token
    gc.collect()
    before, size = mx.get_active_memory(), sum(cache.nbytes for cache in held)
    held.clear()
    gc.collect()
    assert size <= before - mx.get_active_memory() < 2 * size


def test_prompts_are_read_together_as_far_as_they_fit() -> None:
    model = make_model("llama")
    made = make_engine(model, set())
    assert isinstance(made, Engine)
    made.pass_size = PassSize(15, fixed=True)
    prompts = [PROMPT, PROMPT[:12], PROMPT[:9], PROMPT[:8], [5], PROMPT[:19]]
    for index, prompt in enumerate(prompts):
        made.submit(TokenSequence(index, prompt, 6))
    tokens: dict[int, list[int]] = {}
    read_at: dict[int, int] = {}  # by prompt: the step in which it joined
    for step in range(100):
        waiting = {sequence.index for sequence in made._waiting}
        for token in made.step():
            tokens.setdefault(token.index, []).append(token.token)
        read_at |= dict.fromkeys(waiting - {sequence.index for sequence in made._waiting}, step)
    assert not made.busy
    assert tokens == {index: alone(model, prompt, 6) for index, prompt in enumerate(prompts)}
    joined = [{index for index in read_at if read_at[index] == step} for step in sorted(set(read_at.values()))]
    assert joined == [{0}, {1, 2, 3, 4}, {5}]
    assert made._admission.rows == []


def test_a_gpu_reads_eight_prompts_in_a_pass_and_keeps_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many tokens as a chunk has; and what a pass frees is there for the next, up to a share of its memory."""
    monkeypatch.setattr("mlx_kv.generation.decoder.chunk_for", lambda model: len(PROMPT))
    cleared, passes = [0], []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(cleared.pop() + 1))
    monkeypatch.setattr("mlx_kv.generation.prefill.on_cpu", lambda: False)
    monkeypatch.setattr(mx, "device_info", lambda: {"memory_size": 2**40})
    max_freed.cache_clear()
    try:
        model = make_model("llama")
        made = make_engine(model, set(), max_batch_size=16)
        assert isinstance(made, Engine)
        made.pass_size.tokens *= 8  # as if larger passes had been faster
        prompts = [[index, *PROMPT[1:]] for index in range(16)]
        for index, prompt in enumerate(prompts):
            made.submit(TokenSequence(index, prompt, 3))
        tokens: dict[int, list[int]] = {}
        while made.busy:
            waiting = len(made.pending)
            for token in made.step():
                tokens.setdefault(token.index, []).append(token.token)
            passes.append(waiting - len(made.pending))
        assert [number for number in passes if number] == [8, 8]
        assert cleared == [0]
        assert tokens == {index: alone(model, prompt, 3) for index, prompt in enumerate(prompts)}
    finally:
        max_freed.cache_clear()
    monkeypatch.undo()
    assert max_freed() == 0  # on the CPU


@pytest.mark.parametrize("kind", ENGINES)
def test_a_prompt_of_several_passes_delays_no_other(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_kv.generation.decoder.chunk_for", lambda model: 8)  # two of which are read together
    model = make_model("llama")
    made = engine(kind, model, prefill_step_size=8)
    made.submit(TokenSequence(0, PROMPT * 4, 3))
    made.submit(TokenSequence(1, PROMPT[:7], 3))
    order = []
    while made.busy:
        order += [token.index for token in made.step()]
    assert order == [1, 1, 1, 0, 0, 0]
    made.submit(TokenSequence(2, PROMPT * 4, 3))
    made.step()
    made.cancel(2)  # while it is read
    made.submit(TokenSequence(3, PROMPT, 3))
    assert drained(made) == {3: alone(model, PROMPT, 3)}


@pytest.mark.parametrize("kind", ENGINES)
def test_prompt_caches_are_continued(kind: str) -> None:
    model = make_model("llama")
    made = engine(kind, model)
    caches = made.make_caches()
    made._decoder.read(mx.array([PROMPT[:12]]), caches)
    made.submit(TokenSequence(0, PROMPT[12:], 10, caches=copy.deepcopy(caches)))
    made.submit(TokenSequence(1, PROMPT, 10))
    tokens = drained(made)
    assert tokens[0] == tokens[1] == alone(model, PROMPT, 10)
    assert {cache.offset for cache in caches} == {12}


@pytest.mark.parametrize("draft", [None, "llama"])
@pytest.mark.parametrize("step", [0, -1])
def test_a_prefill_step_that_reads_nothing_is_refused(step: int, draft: str | None) -> None:
    model = make_model("llama")
    drafting = None if draft is None else make_model(draft, seed=3)
    with pytest.raises(ValueError, match=f"prefill_step_size is {step}: give a whole number|prefill_step_size is"):
        list(batch_generate(model, None, [PROMPT], draft_model=drafting, prefill_step_size=step))
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        make_engine(model, set(), max_batch_size=0)


@pytest.mark.parametrize("step", [4, 512])
def test_embeddings_in_place_of_tokens(step: int, reference: Any) -> None:
    """What mlx-lm's own loop gives, in one chunk and in several."""
    model, tokenizer = reference
    embeddings = model.model.embed_tokens(mx.array(PROMPT[::-1]))  # other than those of the tokens
    options: dict[str, Any] = {"max_tokens": 8, "input_embeddings": embeddings, "prefill_step_size": step}
    wanted = [int(token) for token, _ in generate_step(mx.array(PROMPT), model, **options)]
    got = [response.token for response in stream_generate(model, tokenizer, PROMPT, **options)]
    assert got == wanted[: len(got)]
    assert got != alone(model, PROMPT, 8)[: len(got)]


def test_rows_that_must_have_equal_lengths_are_admitted_together_on_a_gpu() -> None:
    """They are not padded, and what were left for the next pass would wait until all rows have ended."""
    model = make_model("llama")
    with as_on_a_gpu():
        made = make_engine(model, set(), max_batch_size=8)
        assert isinstance(made, Engine)
        made._equal_rows, made._pads = True, False
        for index in range(7):
            made.submit(TokenSequence(index, [index, *PROMPT[1:]], 5))
        steps = 0
        while made.busy:
            made.step()
            steps += 1
    assert steps <= 7


def test_a_single_row_gets_no_padding_on_a_gpu() -> None:
    """Some models would read it, and caches of mlx-lm, which are given here, do not know it."""
    model, answers = make_model("llama"), list[list[int]]()
    for context in (contextlib.nullcontext(), as_on_a_gpu()):
        with context:
            made = make_engine(model, set(), max_batch_size=1)
            made.submit(TokenSequence(0, PROMPT, 6, caches=make_stock_cache(model)))
            answers.append([])
            while made.busy:
                answers[-1] += [token.token for token in made.step()]
    assert answers[0] == answers[1]


def test_what_is_put_back_in_the_queue_holds_no_buffers_of_others() -> None:
    """Three prompts that begin as a row that decodes: two are read, and the third waits with a copy of its own."""
    model = make_model("llama")
    shared = [(7 * i) % VOCAB for i in range(2000)]
    with as_on_a_gpu():
        made = make_engine(model, set(), max_batch_size=8)
        assert isinstance(made, Engine)
        made.submit(TokenSequence(0, [*shared, 1], 50))
        while not made.rows:
            made.step()
        for index in range(1, 4):
            made.submit(TokenSequence(index, [*shared, index + 1, 5, 6], 3))
        made._admit()
        (waiting,) = made._waiting
        held = mx.get_active_memory()
        mx.eval([cache.state for cache in waiting.caches or ()])
        assert waiting.caches is not None
        assert mx.get_active_memory() == held  # nothing was left to compute
        made.close()


@pytest.mark.parametrize("between", ["nothing", "cancel", "flush"])
def test_a_row_that_joins_behind_a_pass_has_the_tokens_that_it_has_alone(between: str) -> None:
    """Whatever happens before the next pass; its processors are shown its own tokens, and no others."""
    model, prompts, shown = make_model("llama"), [PROMPT, PROMPT[3:], PROMPT[5:] * 2], list[list[int]]()

    def record(tokens: mx.array, logits: mx.array) -> mx.array:
        shown.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    made = make_engine(model, set(), max_batch_size=4)
    assert isinstance(made, Engine)
    answers: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for index in (0, 1):
        made.submit(TokenSequence(index, prompts[index], 9))
    while not answers[1]:
        for token in made.step():
            answers[token.index].append(token.token)
    made.submit(TokenSequence(2, prompts[2], 6, processors=(record,)))
    with mx.stream(made.stream):
        made._read_prompts()
        assert len(made.rows) == 3
        if between == "cancel":
            made.cancel(0)
        elif between == "flush":
            made._decoder._flush()
    while made.busy:
        for token in made.step():
            answers[token.index].append(token.token)
    for index, count in ((0, 9), (1, 9), (2, 6)):
        if between != "cancel" or index:
            assert answers[index] == alone(model, prompts[index], count)
    text = [*prompts[2], *answers[2]]
    assert shown[:6] == [text[: len(prompts[2]) + done] for done in range(6)]
