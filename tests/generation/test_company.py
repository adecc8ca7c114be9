"""A row in company is what it is alone: under each policy, in each kind of model, whatever the others are and do.

One table of policies and families. What else varies is drawn in each case: how many rows decode together, so that rows
join and leave in the middle, how many tokens each may have, who drafts, and in which classes of lengths rows stand.
Two prompts begin alike and are longer than the others.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from classes import anywhere, anywhere_in_each_layer
from effort import PROFILE
from engines import make_engine
from mlx_lm.generate import generate_step
from test_batch_generation import PROMPTS, alone, shaken
from tiny_models import VOCAB, make_model

from mlx_kv import CachePolicy, SpeculationStatistics, batch_generate, make_prompt_cache
from mlx_kv.cache import row_classes
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm.traverse import leaves

TOKENS, CHUNK = 24, 8  # of an answer; that are read at once
USUAL = PROFILE in ("quick", "usual")  # where every other prompt has to do
NEARLY, NEARLY_IF_COARSE = 2e-3, 2e-2  # differences of logits: in 8 bits; in fewer, where one rounding is more
HALF_ROUNDING = {mx.bfloat16: 2**-5, mx.float16: 2**-8}  # of the largest logit: four to eight units in the last place
BEGINNING: list[int] = mx.random.randint(1, VOCAB, (90,), key=mx.random.key(1)).tolist()
MIXED = [*PROMPTS[:6], [*BEGINNING, 7, 3, 9], *PROMPTS[6:], [*BEGINNING, 5, 11]]
BUDGET: dict[str, Any] = {"budget": 24, "keep_recent": 8, "sinks": 2, "margin": 9}
EIGHT_BITS: dict[str, Any] = {"bits": 8, "group_size": 32}
TABLE = ((3.0, 0.1), (1.0, 0.3), (0.0, 1.2))  # of three layers of two heads
POLICIES = {
    "full": CachePolicy(),
    "8 bits": CachePolicy(**EIGHT_BITS),
    "8 and 4 bits": CachePolicy(bits=(8, 4), group_size=32),
    "rotated": CachePolicy(**EIGHT_BITS, codec="rotated"),
    "mxfp8": CachePolicy(codec="mxfp8"),
    "8 bits from 30 on": CachePolicy(**EIGHT_BITS, quantized_start=30),
    "the newest as they came": CachePolicy(**EIGHT_BITS, residual_length=10),
    "max_kv_size": CachePolicy(max_kv_size=20, max_write=8),
    "max_kv_size, 8 bits": CachePolicy(max_kv_size=20, max_write=8, **EIGHT_BITS),
    "budget": CachePolicy(**BUDGET),
    "budget, wide margin": CachePolicy(budget=60, keep_recent=12, margin=40),
    "budget, 8 bits, by head": CachePolicy(**BUDGET, **EIGHT_BITS, share="head", score="key_norm"),
    "observes queries": CachePolicy(**BUDGET, share="layer", score="snap_kv"),
    "observes every query": CachePolicy(**BUDGET, share="head", score="tova"),
    "the newest": CachePolicy(**BUDGET, score="recent"),
    "adaptive": CachePolicy(**BUDGET, share="adaptive"),
    "adaptive, observes queries": CachePolicy(**BUDGET, share="adaptive", score="snap_kv"),
    "a table of heads": CachePolicy(**BUDGET, share="head", layers=TABLE),
    "a table of heads, 8 bits": CachePolicy(**BUDGET, share="head", layers=TABLE, score="key_norm", **EIGHT_BITS),
    "a table, a ranking by layer": CachePolicy(**BUDGET, share="adaptive", layers=TABLE),
    "a table of layers, rotated": CachePolicy(**BUDGET, share="layer", layers=TABLE, codec="rotated", **EIGHT_BITS),
}
COARSE = ("8 and 4 bits", "mxfp8")
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "lfm2")  # full attention, windows, windows and sinks, recurrent layers
OTHERS = ("qwen3", "olmo3", "mistral", "deepseek_v3", "deepseek_v32", "falcon_h1", "qwen3_next", "qwen3_5")
REFUSED = [("gpt_oss", "the newest as they came")]  # its sinks: make_prompt_cache says so
CASES = [
    *((family, policy) for policy in POLICIES for family in FAMILIES if (family, policy) not in REFUSED),
    *((family, "full") for family in OTHERS),
    *(("deepseek_v3", policy) for policy in ("8 bits", "max_kv_size", "budget", "budget, 8 bits, by head")),
]


def policy_for(family: str, name: str) -> CachePolicy:
    settings = POLICIES[name]
    if family == "llama" or isinstance(settings.layers, str):
        return settings
    return replace(settings, layers=TABLE[:1] if family == "lfm2" else TABLE[:2])  # as many layers keep all tokens


def until_a_tie(
    model: Any, policy: CachePolicy, prompts: list[list[int]], lengths: list[int], nearly: float
) -> list[list[int]]:
    """The tokens of each prompt by itself; in a quantised cache up to the first whose two best logits nearly tie.

    There the last bit of a sum, which depends on the rows of a batch and on the CPU, can turn the rounding of a key.
    """
    quantised, outputs = policy.bits is not None or policy.codec != CachePolicy().codec, list[list[int]]()
    for prompt, length in zip(prompts, lengths, strict=True):
        caches = make_prompt_cache(model, policy)
        # A budget evicts by chunks: mlx-lm's loop reads all but one token of a prompt in chunks, as a batch does.
        steps = generate_step(mx.array(prompt), model, max_tokens=length, prompt_cache=caches, prefill_step_size=CHUNK)
        outputs.append([])
        for token, logprobs in steps:
            second, best = mx.sort(logprobs)[-2:].tolist()
            if quantised and best - second < nearly:
                break
            outputs[-1].append(int(token))
    return outputs


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_row_in_company_is_what_it_is_alone(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(f"{family} {name}")
    model, policy, rows = make_model(family), policy_for(family, name), drawn.choice([2, 3, 5, 8])
    monkeypatch.setattr(row_classes, "CPU_SAVING", 64)
    rule = drawn.choice([None, 0, 1])
    if rule is not None:
        monkeypatch.setattr(row_classes, "assign_classes", anywhere(rule))
    prompts = MIXED[::2] if USUAL else MIXED
    prompts = [prompt for prompt in prompts if len(prompt) > policy.quantized_start]  # rows are quantised together
    lengths = [drawn.choice([TOKENS, TOKENS, 9]) for _ in prompts]
    noise = drawn.choice([None, 0.0, 0.05])
    how: dict[str, Any] = {}
    if noise is not None and policy.budget is None and family != "deepseek_v32":  # else drafts change when it evicts
        how = {"draft_model": shaken(model, noise, family), "num_draft_tokens": 3}
    counts, got = SpeculationStatistics(), list[list[int]]([] for _ in prompts)
    told = batch_generate(
        model, None, prompts, policy, lengths, max_batch_size=rows, prefill_step_size=CHUNK, statistics=counts, **how
    )
    for token in told:
        got[token.index].append(token.token)
    assert [len(row) for row in got] == lengths
    wanted = until_a_tie(model, policy, prompts, lengths, NEARLY_IF_COARSE if name in COARSE else NEARLY)
    # On another CPU, other tokens nearly tie: this is how much is compared at least.
    assert sum(map(len, wanted)) > (0.4 if name in COARSE else 0.8) * sum(lengths)
    assert [row[: len(each)] for row, each in zip(got, wanted, strict=True)] == wanted
    assert (counts.accepted > 0) == bool(how)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "adaptive, observes queries"),
        ("gemma3_text", "adaptive"),
        ("qwen3", "full"),
        pytest.param("falcon_h1", "observes queries", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "adaptive, observes queries", marks=pytest.mark.slow),
        pytest.param("llama", "a table, a ranking by layer", marks=pytest.mark.slow),
        pytest.param("llama", "max_kv_size, 8 bits", marks=pytest.mark.slow),
    ],
)
def test_layers_may_have_other_classes(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share one mask all the same: where a layer is in several parts, none serves the model by one cache."""
    monkeypatch.setattr(row_classes, "assign_classes", anywhere_in_each_layer(3))
    model, policy, prompts = make_model(family), policy_for(family, name), MIXED[::2]
    got = [list[int]() for _ in prompts]
    for token in batch_generate(model, None, prompts, policy, 16, max_batch_size=6, prefill_step_size=CHUNK):
        got[token.index].append(token.token)
    wanted = until_a_tie(model, policy, prompts, [16] * len(prompts), NEARLY)
    assert [row[: len(each)] for row, each in zip(got, wanted, strict=True)] == wanted


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "full"),
        ("gemma3_text", "budget"),
        *(pytest.param("llama", name, marks=pytest.mark.slow) for name in ("8 bits", "adaptive", "max_kv_size")),
        *(
            pytest.param(family, "full", marks=pytest.mark.slow)
            for family in ("gemma3_text", "lfm2", "deepseek_v3", "qwen3")
        ),
    ],
)
def test_a_row_in_company_in_half_precision(family: str, name: str, dtype: mx.Dtype) -> None:
    """Each token is the likeliest of the row alone after the same text, or one that a few roundings make so."""
    model, policy, prompts = make_model(family), policy_for(family, name), MIXED[::2]
    model.set_dtype(dtype)
    got = [list[int]() for _ in prompts]
    for token in batch_generate(model, None, prompts, policy, TOKENS, max_batch_size=3, prefill_step_size=CHUNK):
        got[token.index].append(token.token)
    for prompt, tokens in zip(prompts, got, strict=True):
        caches, text, read = make_prompt_cache(model, policy), mx.array([[*prompt, *tokens]]), 0
        while read < len(prompt) - 1:
            count = min(CHUNK, len(prompt) - 1 - read)
            model(text[:, read : read + count], cache=caches)
            read += count
        for place, token in enumerate(tokens, read):
            logits = model(text[:, place : place + 1], cache=caches)[0, -1].astype(mx.float32)
            assert (logits.max() - logits[token]).item() <= HALF_ROUNDING[dtype] * mx.abs(logits).max().item()


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "rule"), [("full", 0), ("budget", 1), ("max_kv_size", 0)])
def test_a_row_that_is_taken_out_goes_on(policy: str, rule: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the middle of a batch whose rows go from class to class, through its own caches alone."""
    monkeypatch.setattr(row_classes, "assign_classes", anywhere(rule))
    model, settings = make_model("llama"), POLICIES[policy]
    engine = make_engine(model, set(), settings, 5, 8)
    for index, prompt in enumerate(PROMPTS[:5]):
        engine.submit(TokenSequence(index, prompt, 24))
    counts = [0] * 5
    while min(counts) < 8:
        for token in engine.step():
            counts[token.index] += 1
    for index, prompt in enumerate(PROMPTS[:5]):
        caches: Any = engine.extract(index)
        assert not any(isinstance(cache, SegmentedCache) for cache in leaves(caches))
        text, read = [*prompt, *alone("llama", settings, 24, step=8)[index]], int(caches[0].offset)
        steps = generate_step(mx.array(text[read : read + 1]), model, max_tokens=5, prompt_cache=caches)
        assert [int(token) for token, _ in steps] == text[read + 1 :][:5]
    engine.close()


def test_a_long_row_beside_short_ones_has_a_class_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule itself: bytes of the batch stay near those of its tokens, and tokens are each row's own."""
    monkeypatch.setattr(row_classes, "CPU_SAVING", 256)
    model = make_model("llama", max_position_embeddings=4096)
    lengths = [1500, 100, 30, 200, 60]
    prompts = [mx.random.randint(1, VOCAB, (n,), key=mx.random.key(n)).tolist() for n in lengths]
    engine = make_engine(model, set(), None, 8)
    for index, prompt in enumerate(prompts):
        engine.submit(TokenSequence(index, prompt, 40))
    told: dict[int, list[int]] = {index: [] for index in range(5)}
    allocated = 0
    while engine.busy:
        for token in engine.step():
            told[token.index].append(token.token)
        if len(engine.rows) == 5:
            assert [len(cache.parts) for cache in engine.caches] == [2] * 3
            allocated = sum(cache.nbytes // 256 for cache in engine.caches)
    bytes_per_slot = 2 * 2 * 32 * 4 * 3
    assert allocated * 256 == (1792 + 4 * 256) * bytes_per_slot  # 1,540 tokens, and up to 240
    for index, prompt in enumerate(prompts):
        steps = generate_step(mx.array(prompt), model, max_tokens=40)
        assert told[index] == [int(token) for token, _ in steps]
    engine.close()
