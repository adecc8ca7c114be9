"""Prompts that begin alike: each gets what it gets alone, and what they share is held once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import pytest
from engines import as_on_a_gpu, make_engine
from test_batch_generation import shaken
from tiny_models import VOCAB, make_model

from mlx_kv import CachePolicy, KVCache, PromptMemory, PromptReader, batch_generate, make_prompt_cache
from mlx_kv.cache import row_classes
from mlx_kv.cache.layout import NO_LIMIT
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.generation.admission import MIN_SHARED, Beginnings, PendingRow, prompt_text
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.server.memory import occupancy_of

SHARED: Any = mx.random.randint(1, VOCAB, (300,), key=mx.random.key(1)).tolist()
ENDINGS: Any = [mx.random.randint(1, VOCAB, (5 + 3 * i,), key=mx.random.key(9 + i)).tolist() for i in range(5)]
PROMPTS = [[*SHARED, *ending] for ending in ENDINGS]
PROMPTS.insert(2, ENDINGS[0] * 4)  # shares nothing
PROMPTS.append([*PROMPTS[3], *ENDINGS[1]])  # shares more with one than with the others
FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "mistral",
    "gpt_oss",
    "lfm2",
    "deepseek_v3",
    "falcon_h1",
)
SHARING = ("llama", "qwen3")  # all of whose layers keep all tokens in attention that can be patched
PACKED = CachePolicy(bits=8, group_size=32)
POLICIES = {
    "full": CachePolicy(),
    "8 bits": PACKED,
    "8, 4": CachePolicy(bits=(8, 4), group_size=32),
    "residual": CachePolicy(bits=8, group_size=32, residual_length=16),
    "8 bits from 128 tokens on": CachePolicy(bits=8, group_size=32, quantized_start=128),
    "evicts in answers": CachePolicy(budget=240, margin=88, keep_recent=32),
    "evicts in prompts": CachePolicy(budget=150, margin=40, keep_recent=32),
    "heads of their own": CachePolicy(budget=240, margin=88, keep_recent=32, share="adaptive"),
    "observes queries": CachePolicy(budget=240, margin=88, keep_recent=32, score="snap_kv"),
    "budget in 8 bits": CachePolicy(bits=8, group_size=32, budget=240, margin=88, keep_recent=32),
}
COPIES = ("evicts in prompts",)  # policies under which rows hold copies of what they share
LENGTH, CHUNK = 20, 64


@pytest.fixture(autouse=True)
def _sharing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_classes, "CPU_SAVING", 64)


def made(family: str) -> Any:
    return make_model(family, **({"max_position_embeddings": 4096} if family in SHARING else {}))


def alone(model: Any, policy: CachePolicy, prompts: Sequence[list[int]] = PROMPTS) -> dict[int, list[int]]:
    answers = {}
    for index, prompt in enumerate(prompts):
        engine = make_engine(model, set(), policy, 1, CHUNK)
        engine.submit(TokenSequence(index, list(prompt), LENGTH))
        answers |= finished(engine)[0]
        engine.close()
    return answers


def segments(caches: Sequence[Any]) -> set[Any]:
    return {segment for cache in leaves(caches) if isinstance(cache, SegmentedCache) for segment in cache.segments}


def finished(engine: Engine) -> tuple[dict[int, list[int]], int, int]:
    """The tokens of all rows; the most segments, and the most bytes on the way."""
    answers: dict[int, list[int]] = {}
    found = most = 0
    while engine.busy:
        for token in engine.step():
            answers.setdefault(token.index, []).append(token.token)
        found = max(found, len(segments(engine.caches)))
        most = max(most, sum(cache.nbytes for cache in engine.caches))
    return answers, found, most


@contextmanager
def counted_tokens(model: Any) -> Iterator[list[int]]:
    """The number of tokens that the model reads, padding included."""
    call, read = type(model).__call__, [0]

    def counted(self: Any, tokens: mx.array, *args: Any, **named: Any) -> Any:
        read[0] += tokens.size
        return call(self, tokens, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "__call__", counted)
        yield read


ALIKE = [*(("llama", policy) for policy in POLICIES), *((family, "full") for family in FAMILIES[1:])]


@pytest.mark.parametrize(
    ("family", "policy", "drafter"),
    [(*case, drafter) for case, drafter in zip(ALIKE, itertools.cycle([None, "suffix"]))],
)
@pytest.mark.slow
def test_prompts_that_begin_alike(family: str, policy: str, drafter: str | None) -> None:
    """One is read, and the others continue from copies, which share it where all layers can."""
    model = made(family)
    engine = make_engine(model, set(), POLICIES[policy], 8, CHUNK, drafter=drafter)
    prompts = [prompt for prompt in PROMPTS if len(prompt) > POLICIES[policy].quantized_start]  # quantised together
    for index, prompt in enumerate(prompts):
        engine.submit(TokenSequence(index, list(prompt), LENGTH))
    with counted_tokens(model) as read:
        answers, found, _ = finished(engine)
    assert answers == alone(model, POLICIES[policy], prompts)
    if family in SHARING:
        assert (found > 0) == (policy not in COPIES)
    if family != "gemma2":  # whose rows must be of equal length
        tokens = sum(map(len, PROMPTS)) - 4 * 256  # four of five prompts continue from others
        assert read.pop() < tokens + (len(PROMPTS) * LENGTH if drafter is None else 1000)
    engine.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.slow
def test_memory_shares_its_blocks(policy: str) -> None:
    model, settings = made("llama"), POLICIES[policy]
    engine, memory = make_engine(model, set(), settings, 8), PromptMemory(fingerprint="all")
    PromptReader(engine._decoder.read, engine.make_caches(), [*SHARED, 1], memory, CHUNK).finish()
    for index, prompt in enumerate(PROMPTS):
        caches, read = memory.find(prompt) or (None, 0)
        engine.submit(TokenSequence(index, prompt[read:], LENGTH, caches=caches, before=prompt[:read]))
    engine.step()
    blocks = {segment for block in memory._table.blocks for segment in block.segments.values()}
    assert segments(engine.caches) >= blocks
    # Newest tokens in full precision are not shared: 15 are seen so by the first query of a row's own.
    shared = 0 if policy in COPIES else len(SHARED) - max(0, settings.residual_length - 1)
    assert {len(blocks) // len(engine.caches)} <= ({1, 5} if shared else {0})  # kept whole, or after each chunk
    occupied = occupancy_of(engine.caches, positions=True)
    assert {row[0].shared for row in occupied.rows} == {0, shared}
    if policy not in COPIES:
        assert all(row[0].kept == [(0, row[0].offset)] and row[0].capacity >= row[0].live for row in occupied.rows)
    answers = finished(engine)[0]
    assert answers.keys() == set(range(len(PROMPTS)))
    assert not segments(engine.caches)
    engine.close()


def test_a_prompt_is_read_once_and_held_once() -> None:
    model = made("llama")
    prompts = [[*SHARED, 5, index] for index in range(1, 9)]
    with counted_tokens(model) as read:
        engine = make_engine(model, set(), CachePolicy(), 8)
        for index, prompt in enumerate(prompts):
            engine.submit(TokenSequence(index, prompt, LENGTH))
        answers, _, most = finished(engine)
    assert answers == alone(model, CachePolicy(), prompts)
    assert read.pop() < 2 * len(SHARED) + len(prompts) * LENGTH  # with tiny inputs that probe the model
    caches = make_engine(model, set(), CachePolicy(), 1).make_caches()
    model(mx.array([[1]]), cache=caches)
    per_token = sum(cache.nbytes // cache.capacity for cache in caches)
    # One prefix, and tails whose capacities are multiples of 32 slots and have room for a token more.
    assert most <= per_token * (len(SHARED) + len(prompts) * 64)


@pytest.mark.parametrize("gpu", [False, True])
def test_tails_of_any_length_hold_what_is_read_of_them(gpu: bool) -> None:
    """Beyond 1,024 slots, attention reads multiples of more than the 32 slots that short tails are multiples of."""
    model, generator = made("llama"), mx.random.key(5)
    own: Any = mx.random.randint(1, VOCAB, (3, 1100), key=generator).tolist()
    prompts = [[*SHARED, *tail[: 1000 + 7 * number]] for number, tail in enumerate(own)]
    with as_on_a_gpu() if gpu else nullcontext():
        engine = make_engine(model, set(), CachePolicy(), 3)
        for index, prompt in enumerate(prompts):
            engine.submit(TokenSequence(index, prompt, LENGTH))
        answers, shared, _ = finished(engine)
    assert shared
    assert answers == alone(model, CachePolicy(), prompts)


def test_all_that_wait_for_a_prompt_are_read_together() -> None:
    """Long prompts of which little is left to be read after the shared tokens take no steps one by one."""
    model = made("llama")
    engine = make_engine(model, set(), CachePolicy(), 8)
    for index in range(8):
        engine.submit(TokenSequence(index, [*SHARED * 4, 5, index, 7], LENGTH))
    while not engine.rows:
        engine.step()
    engine.step()
    assert len(engine.rows) == 8
    engine.close()


def test_what_a_cancelled_prompt_has_read_is_not_read_again() -> None:
    model = made("llama")
    engine = make_engine(model, set(), CachePolicy(), 8, prefill_step_size=64)
    for index, prompt in enumerate(PROMPTS):
        engine.submit(TokenSequence(index, list(prompt), LENGTH))
    early = [token for _ in range(3) for token in engine.step()]  # of the prompt that shares nothing
    assert 0 in engine.pending
    engine.cancel(0)
    assert engine.progress[1].left < len(PROMPTS[1]) - 100
    answers, found, _ = finished(engine)
    for token in reversed(early):
        answers[token.index].insert(0, token.token)
    wanted = alone(model, CachePolicy())
    del wanted[0]
    assert answers == wanted
    assert found
    engine.close()


def test_private_prompts_share_nothing() -> None:
    model = made("llama")
    engine = make_engine(model, set(), CachePolicy(), 8)
    for index, prompt in enumerate(PROMPTS):
        engine.submit(TokenSequence(index, list(prompt), LENGTH, private=True))
    answers, found, _ = finished(engine)
    assert answers == alone(model, CachePolicy())
    assert not found
    engine.close()


def test_caches_that_leave_are_whole() -> None:
    """They hold all tokens in slots of their own, and go on alone."""
    model = made("llama")
    engine = make_engine(model, set(), CachePolicy(), 8, return_caches=True)
    for index, prompt in enumerate(PROMPTS):
        engine.submit(TokenSequence(index, list(prompt), LENGTH))
    texts, left = {index: list(prompt) for index, prompt in enumerate(PROMPTS)}, {}
    while engine.busy:
        for token in engine.step():
            texts[token.index].append(token.token)
            if token.caches is not None:
                left[token.index] = token.caches
    for index, caches in left.items():
        whole = make_engine(model, set(), CachePolicy(), 1).make_caches()
        tokens = texts[index][: int(caches[0].offset)]
        model(mx.array([tokens]), cache=whole)
        for cache, wanted in zip(caches, whole, strict=True):
            assert type(cache) is KVCache
            assert cache.capacity >= cache.offset
            for got, plane in ((cache.keys, wanted.keys), (cache.values, wanted.values)):
                assert mx.allclose(got[:, :, : len(tokens)], plane[:, :, : len(tokens)], atol=1e-4)
    engine.close()


def test_batches_of_prompts_that_begin_alike() -> None:
    model = made("llama")
    answers: dict[int, list[int]] = {}
    for token in batch_generate(model, None, PROMPTS, CachePolicy(), LENGTH, max_batch_size=4):
        answers.setdefault(token.index, []).append(token.token)
    assert answers == alone(model, CachePolicy())


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.slow
def test_a_draft_model_continues_from_the_same_tokens(noise: float) -> None:
    """Caches of the draft model are copied with those of the model, and wrong drafts trim rows that share."""
    model = made("llama")
    draft = shaken(model, noise, "llama", max_position_embeddings=4096)
    answers: dict[int, list[int]] = {}
    for token in batch_generate(model, None, PROMPTS, CachePolicy(), LENGTH, draft, 3, max_batch_size=8):
        answers.setdefault(token.index, []).append(token.token)
    assert answers == alone(model, CachePolicy())


def test_prompts_that_evict_are_read_in_the_chunks_of_each_alone() -> None:
    """Else they would keep other tokens: what they share ends where a chunk does."""
    model, policy, chunk = made("llama"), POLICIES["evicts in prompts"], 110  # 300 tokens are two chunks and many more

    def kept(together: bool) -> dict[int, list[Any]]:
        held: dict[int, list[Any]] = {}
        for prompts in [list(enumerate(PROMPTS))] if together else [[pair] for pair in enumerate(PROMPTS)]:
            engine = make_engine(model, set(), policy, 8, chunk, return_caches=True)
            for index, prompt in prompts:
                engine.submit(TokenSequence(index, list(prompt), 1))
            while engine.busy:
                for token in engine.step():
                    assert token.caches is not None
                    held[token.index] = [cache.positions.tolist() for cache in token.caches]
            engine.close()
        return held

    with counted_tokens(model) as read:
        together = kept(together=True)
    assert read.pop() < sum(map(len, PROMPTS)) - 4 * 192
    assert together == kept(together=False)


def test_from_where_prompts_continue() -> None:
    model = made("llama")
    kinds = {
        (True, True, NO_LIMIT): [CachePolicy(), PACKED],
        (True, False, NO_LIMIT): [CachePolicy(max_kv_size=64), POLICIES["residual"]],
        (True, False, 128): [POLICIES["8 bits from 128 tokens on"]],
        (True, False, 328): [POLICIES["evicts in answers"]],
        (False, False, 328): [CachePolicy(budget=240, margin=88, keep_recent=32, score="kvzip")],
    }
    for wanted, policies in kinds.items():
        assert {Beginnings.of(make_prompt_cache(model, policy), CHUNK)[:3] for policy in policies} == {wanted}
    beginnings = Beginnings(shared=True, trimmable=False, by_chunk=328, step=CHUNK)

    def common(some: int, others: int) -> int:
        pair = [TokenSequence(0, [*SHARED, *[end] * count], 1) for end, count in ((1, some), (2, others))]
        for sequence in pair:
            sequence.text = prompt_text(sequence, 0)
        return beginnings.common(*pair)

    assert (common(9, 28), common(9, 29), common(29, 9)) == (300, 256, 256)
    row = PendingRow(TokenSequence(0, SHARED, 1), [])
    row.sequence.text = prompt_text(row.sequence, 0)
    for same, stop in ((100, 100), (MIN_SHARED - 1, NO_LIMIT)):  # for few tokens, no prompt is read in two passes
        heir = TokenSequence(1, [*SHARED[:same], 1, 2], 1)
        heir.text = prompt_text(heir, 0)
        assert beginnings.stop(row, [heir]) == stop
