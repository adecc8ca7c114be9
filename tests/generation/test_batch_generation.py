"""Many prompts at once: each gets what it gets alone, with and without speculation, on every attention family."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from effort import THOROUGH
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as stock
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import FAMILIES, VOCAB, make_model

from mlx_kv import CachePolicy, SpeculationStatistics, batch_generate, cache_statistics, make_prompt_cache
from mlx_kv.generation.decoder import Decoder, make_decoder
from mlx_kv.generation.sampling import TemperatureSampler
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.generation.speculation.drafters import DrafterContext, ModelDrafter

UNBATCHED = ("gemma2", "llama4")  # mlx-lm's models are not made for rows of different lengths
BATCHED = sorted(set(FAMILIES) - set(UNBATCHED))
PROMPTS = [mx.random.randint(1, VOCAB, (n,), key=mx.random.key(n)).tolist() for n in (5, 33, 1, 60, 18, 2, 12, 13, 40)]
SEVERAL = 4  # prompts that are read one after the other: more of them show nothing more
NOISES = [0.0, 0.05, None]  # in the draft's weights; None is another model
ROWS_AND_DRAFTED = [(1, 2), (3, 4), (8, 3)]
POLICIES = {
    "full": CachePolicy(),
    "8 bits": CachePolicy(bits=8, group_size=32),
    "max_kv_size": CachePolicy(max_kv_size=20, max_write=8),
    "budget": CachePolicy(budget=24, keep_recent=8, sinks=2, margin=9),
    "budget, 8 bits, by head": CachePolicy(
        budget=24, keep_recent=8, sinks=2, margin=9, share="head", bits=8, group_size=32, score="key_norm"
    ),
}


@functools.cache
def alone(family: str, policy: CachePolicy | None, tokens: int, step: int = 2048, **changes: Any) -> list[list[int]]:
    """Each prompt by itself, through mlx-lm's own loop; over mlx-lm's own caches without a policy."""
    model, outputs = make_model(family, **changes), []
    for prompt in PROMPTS:
        caches = stock.make_prompt_cache(model) if policy is None else make_prompt_cache(model, policy)
        steps = generate_step(mx.array(prompt), model, max_tokens=tokens, prompt_cache=caches, prefill_step_size=step)
        outputs.append([int(token) for token, _ in steps])
    return outputs


def gathered(responses: Any, count: int = len(PROMPTS)) -> list[list[int]]:
    """The tokens of each prompt; every one must end, and once."""
    outputs: list[list[int]] = [[] for _ in range(count)]
    ended = set()
    for response in responses:
        assert response.index not in ended
        outputs[response.index].append(response.token)
        if response.finish_reason is not None:
            ended.add(response.index)
    assert len(ended) == count
    return outputs


def shaken(model: nn.Module, noise: float, family: str, **changes: Any) -> nn.Module:
    """A draft that is right now and then."""
    draft = make_model(family, **changes)
    mx.random.seed(1)
    draft.update(nn.utils.tree_map(lambda p: p + noise * mx.random.normal(p.shape) * p.std(), model.parameters()))
    return draft


@pytest.mark.slow
@pytest.mark.parametrize("family", BATCHED)
def test_mlx_lms_batches_over_our_caches(family: str) -> None:
    """mlx-lm's BatchGenerator: the same tokens over our caches as over its own, and as each prompt alone."""
    model = make_model(family)
    wanted = alone(family, None, 24)

    def batched(make: Any) -> list[list[int]]:
        generator = BatchGenerator(
            model, max_tokens=24, prefill_batch_size=2, completion_batch_size=3, prefill_step_size=16
        )
        uids = generator.insert(PROMPTS, caches=[make() for _ in PROMPTS])
        outputs: dict[int, list[int]] = {uid: [] for uid in uids}
        ended = 0
        while ended < len(uids):
            for response in generator.next_generated():
                outputs[response.uid].append(response.token)
                ended += response.finish_reason is not None
        return list(outputs.values())

    assert batched(lambda: stock.make_prompt_cache(model)) == wanted
    assert batched(lambda: make_prompt_cache(model)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES, ids=["all accepted", "some accepted", "none accepted"])
@pytest.mark.parametrize("family", BATCHED)
def test_speculation_is_each_rows_own_greedy(family: str, noise: float | None) -> None:
    """Acceptance differs from row to row; windows of 12 wrap; rows join and leave."""
    model = make_model(family)
    draft = make_model(family, seed=5) if noise is None else shaken(model, noise, family)
    wanted = alone(family, None, 30)
    # Each family with each size of batch, and each draft too: in turns, unless there is time for all of them together.
    turn = (BATCHED.index(family) + NOISES.index(noise)) % len(ROWS_AND_DRAFTED)
    for rows, drafted in ROWS_AND_DRAFTED if THOROUGH else ROWS_AND_DRAFTED[turn : turn + 1]:
        prompts = PROMPTS[: SEVERAL if rows == 1 else None]
        counts = SpeculationStatistics()
        policy = CachePolicy(max_write=2)  # as little slack as may be: the rest must come from drafted
        if family not in ("gemma3_text", "gpt_oss", "mistral", "olmo3"):
            policy = CachePolicy()
        told = batch_generate(model, None, prompts, policy, 30, draft, drafted, rows, statistics=counts)
        assert gathered(told, len(prompts)) == wanted[: len(prompts)]
        if noise == 0.0:
            assert counts.accepted > 0.85 * counts.drafted
        elif noise is None:
            assert counts.accepted < 0.2 * counts.drafted
        else:
            assert 0 < counts.accepted < counts.drafted


@pytest.mark.slow
@pytest.mark.parametrize("window", [16, 32, 64])
@pytest.mark.parametrize("drafted", [1, 5])
def test_speculation_across_windows(window: int, drafted: int) -> None:
    model = make_model("gemma3_text", sliding_window=window)
    draft = shaken(model, 0.1, "gemma3_text", sliding_window=window)
    wanted = alone("gemma3_text", None, 90, sliding_window=window)
    assert gathered(batch_generate(model, None, PROMPTS, None, 90, draft, drafted, 4)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["8 bits", "max_kv_size"])
def test_speculation_under_policies(policy: str) -> None:
    model = make_model("llama")
    draft = shaken(model, 0.05, "llama")
    settings = CachePolicy(**{**vars(POLICIES[policy]), "max_write": 512})
    # Packed attention has its own rounding: for this comparison, alone means a batch of one.
    wanted = gathered(batch_generate(model, None, PROMPTS, settings, 30, draft, 3, 1))
    assert gathered(batch_generate(model, None, PROMPTS, settings, 30, draft, 3, 5)) == wanted


@pytest.mark.slow
def test_speculation_under_a_budget() -> None:
    """Within one margin nothing is evicted while decoding: the schedule, and so the text, is that of plain decoding."""
    model = make_model("llama")
    draft = shaken(model, 0.05, "llama")
    policy = CachePolicy(budget=24, keep_recent=8, sinks=2, margin=30)
    wanted = alone("llama", policy, 12, step=8)
    got = gathered(batch_generate(model, None, PROMPTS, policy, 12, draft, 3, 4, prefill_step_size=8))
    assert got == wanted
    counts = SpeculationStatistics()
    tight = CachePolicy(budget=24, keep_recent=8, sinks=2, margin=2)
    for _ in batch_generate(model, None, PROMPTS[:4], tight, 60, draft, 3, 4, statistics=counts):
        if counts.caches:
            assert max(cache.size() for cache in counts.caches) <= 24 + 2 + 4 + 512
    assert counts.rounds > 10


@pytest.mark.slow
def test_ends_inside_a_block(reference: Any, draft: nn.Module) -> None:
    """A token that the model writes often becomes the end: text stops before it, in every row, drafted or not."""
    model, tokenizer = reference
    prompts = ["def main():", "import os", "class Foo:\n    def", "for i in range(", "# The", "return x"]
    plain = [[t for t, _ in generate_step(mx.array(tokenizer.encode(p)), model, max_tokens=40)] for p in prompts]
    flat = [token for row in plain for token in row]
    end = max(set(flat), key=lambda token: sum(token in row for row in plain))
    assert sum(end in row for row in plain) >= 3
    ending = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=[end])
    for options in ({}, {"draft_model": draft, "num_draft_tokens": 4}):
        texts, tokens, reasons = {}, {}, {}
        for r in batch_generate(model, ending, prompts, max_tokens=40, max_batch_size=4, **options):
            texts[r.index] = texts.get(r.index, "") + r.text
            tokens.setdefault(r.index, []).append(r.token)
            reasons[r.index] = r.finish_reason
        for index, row in enumerate(plain):
            cut = row[: row.index(end) + 1] if end in row else row
            assert tokens[index] == cut
            assert reasons[index] == ("stop" if end in row else "length")
            assert texts[index] == tokenizer.decode([t for t in cut if t != end])


def test_a_row_of_its_own_length_each(reference: Any) -> None:
    model, tokenizer = reference
    lengths = [1, 7, 20, 3]
    prompts = ["x", "def f(a, b):", "import", "while True:"]
    got = gathered(batch_generate(model, tokenizer, prompts, max_tokens=lengths, max_batch_size=2), 4)
    assert [len(row) for row in got] == lengths


@pytest.mark.slow
def test_sampling_follows_the_models_distribution() -> None:
    """Keys of its own in every row: the first token of many rows, against the model's own probabilities."""
    model = make_model("llama")
    draft = shaken(model, 0.3, "llama")
    sampler = TemperatureSampler(1.0, 1.0)
    mx.random.seed(7)
    rows = 512
    logits = model(mx.array([PROMPTS[0]]))[0, -1]
    counts = SpeculationStatistics()
    firsts, seconds = [], []
    for r in batch_generate(
        model, None, [PROMPTS[0]] * rows, None, 2, draft, 2, 64, sampler=sampler, statistics=counts
    ):
        (seconds if r.finish_reason else firsts).append(r.token)
    wanted = mx.softmax(logits)
    seen = mx.zeros(VOCAB)
    for token in firsts:
        seen[token] += 1 / rows
    # The total variation of 512 draws from this distribution itself, measured over repeated draws.
    mx.random.seed(8)
    own = []
    for _ in range(20):
        drawn = mx.random.categorical(mx.broadcast_to(mx.log(wanted), (rows, VOCAB)))
        own.append(mx.abs((drawn[:, None] == mx.arange(VOCAB)).mean(axis=0) - wanted).sum().item() / 2)
    assert mx.abs(seen - wanted).sum().item() / 2 < 1.3 * max(own)
    assert 0 < counts.accepted < counts.drafted


def join(decoder: Decoder, sequences: list[TokenSequence]) -> None:
    admission = decoder.admission(batched=True)
    admission.add([decoder.pending(sequence) for sequence in sequences])
    while admission.read([512] * len(admission.rows)):
        pass
    decoder.join(*admission.take_finished())


def test_memory_of_rows_that_have_left_is_given_back() -> None:
    model = make_model("llama")
    drafter = ModelDrafter(DrafterContext(model, VOCAB, 2, make_model("llama", seed=1)))
    decoder = make_decoder(model, CachePolicy(), None, DraftSettings(drafter, 2))
    join(decoder, [TokenSequence(index, PROMPTS[0], 10) for index in range(8)])
    whole = cache_statistics(decoder.target.caches).bytes_allocated
    decoder.keep([3])
    assert cache_statistics(decoder.target.caches).bytes_allocated == whole // 8
    decoder.keep([])
    assert decoder.target.caches == drafter.caches == []
    join(decoder, [TokenSequence(8, PROMPTS[1], 10)])
    assert len(decoder.round(5, SpeculationStatistics())) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "prompts is one text or empty"),
        ({"prompts": "text"}, "prompts is one text or empty"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1], "text"]}, "prompt 1 is a text, but there is no tokenizer"),
        ({"prompts": [[1], [1] * 512]}, "prompt 1 has 512 tokens, but this model was made for 512: shorten it"),
        ({"max_tokens": 0}, "max_tokens of prompt 0 is 0"),
        ({"max_tokens": [1, 2]}, "got 2 max_tokens for 1 prompts"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    arguments = {"prompts": [[1]], **changes}
    with pytest.raises(ValueError, match=message):
        batch_generate(make_model("llama"), None, **arguments)


def test_refuses_what_a_model_cannot() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 64 tokens"):
        batch_generate(make_model("llama"), None, PROMPTS, draft_model=make_model("llama", vocab_size=64))
