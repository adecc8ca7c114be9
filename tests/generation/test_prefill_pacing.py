"""Chunks of prompts beside rows that decode: as small as a wait wants them, and of no effect on any token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import mlx.core as mx
import pytest
from engines import Shapes, as_on_a_gpu, make_engine
from tiny_models import make_model

from mlx_kv import CachePolicy
from mlx_kv.cache.layout import Append, Row
from mlx_kv.cache.mask import make_mask
from mlx_kv.cache.plan import Plan
from mlx_kv.generation.admission import FIRST_CHUNK, MIN_CHUNK, PassSize, PrefillPace
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm.attention import AttentionPatch

PROMPTS = {0: [(5 * i + 3) % 90 for i in range(30)], 1: [(7 * i * i + 3 * i) % 90 for i in range(900)]}


def test_a_chunk_has_as_many_tokens_as_fit_into_a_wait() -> None:
    pace = PrefillPace(0.5, 2048)
    assert pace.chunk(1) == FIRST_CHUNK
    pace.record(128, 0.064)  # half a millisecond each
    assert pace.chunk(1) == 768
    assert pace.chunk(4) == 192
    pace.record(10, 5.0)  # a pass of so few says nothing
    assert pace.chunk(1) == 768
    pace.record(1000, 100.0)
    assert pace.chunk(1) == MIN_CHUNK
    pace.record(1000, 1e-9)
    assert pace.chunk(3) == 2048


def test_passes_grow_while_more_tokens_are_read_faster() -> None:
    size = PassSize(2048)
    assert size.tokens == 2048
    size.record(1500, 0.050)  # 30,000 tokens a second
    size.record(300, 0.015)
    assert size.tokens == 4096  # to compare with
    size.record(3000, 0.095)  # hardly more
    assert size.tokens == 4096
    size.record(4000, 0.100)
    assert size.tokens == 8192
    size.record(4000, 0.050)  # no pass as large as it may be now
    assert size.tokens == 8192
    size.record(8000, 0.050)
    size.record(16_000, 0.090)
    assert size.tokens == 16_384  # eight prompts of 2,048 tokens


def test_passes_do_not_grow_without_a_smaller_one_to_compare_with() -> None:
    size = PassSize(256)
    size.record(40, 0.1)
    for _ in range(3):
        size.record(512, 0.1)
    assert size.tokens == 512


def test_no_pass_is_to_take_a_second() -> None:
    size = PassSize(512)
    size.record(512, 0.8)
    size.record(1000, 0.9)  # twice as fast, but twice as many would take 1.8 s
    assert size.tokens == 1024
    size.record(1000, 0.4)
    assert size.tokens == 2048


def test_processes_of_one_model_read_passes_of_one_size() -> None:
    size = PassSize(512, fixed=True)
    size.record(512, 0.8)
    size.record(1000, 0.1)
    assert size.tokens == 1024


def closed_loop(
    model: Any, lengths: Iterator[int], clients: int, total: int
) -> tuple[dict[tuple[int, int, int], int], float]:
    """The shapes of attention over prompts of such lengths, and the share of stalls.

    Each client sends the next when its last one was answered. Answers have 1 to 64 tokens.
    """
    shapes, draw = Shapes(), random.Random(0)
    prompts = [[draw.randrange(60) for _ in range(count)] for count in islice(lengths, total)]
    coming = iter([TokenSequence(index, prompt, draw.randint(1, 64)) for index, prompt in enumerate(prompts)])
    with AttentionPatch(model, default_hook=shapes), as_on_a_gpu():
        engine = make_engine(model, set(), None, clients, 2048)
        for sequence in islice(coming, clients):
            engine.submit(sequence)
        while engine.busy:
            for token in engine.step():
                if token.finish_reason is not None and (following := next(coming, None)) is not None:
                    engine.submit(following)
        engine.close()
    stalls, passes = engine.stalls
    return shapes.seen, stalls / passes


@pytest.mark.slow
def test_a_thousand_prompts_of_any_length_need_few_shapes_of_attention() -> None:
    """A GPU prepares itself for each new one. With 16 clients; 214 shapes in 233 passes where nothing is padded."""
    draw, heads = random.Random(5), {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    model = make_model("llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1, **heads)
    shapes, _ = closed_loop(model, iter(lambda: draw.randint(1, 1000), 0), 16, 1000)
    assert sum(shapes.values()) > 500
    assert len(shapes) <= 40


def test_prompts_are_padded_to_few_lengths_and_read_alone_without_an_array() -> None:
    """As on a GPU: 128 for 65 to 128 tokens; the mask is "causal" then, since padding stands behind all tokens."""
    shapes, _ = closed_loop(make_model("llama"), iter([70, 97, 128, 100, 90]), 2, 5)
    assert shapes.keys() <= {(1, 128, 128), (2, 128, 128)}
    with as_on_a_gpu():
        plan = Plan(Append(), (Row(offset=256, high=256),), 128, (99,))
        assert plan.ranges == ((0, 384),)
        assert make_mask(plan) == "causal"
        for rows, counts in (((Row(), Row()), (99, 98)), ((Row(offset=250, high=250),), (99,))):
            assert isinstance(make_mask(Plan(Append(), rows, 128, counts)), mx.array)


def test_a_gpu_has_something_to_do_while_rows_come_and_go() -> None:
    """Passes are launched behind others that are on their way, also where prompts join, but for one step of 32."""
    draw = random.Random(7)
    _, share = closed_loop(make_model("llama"), iter(lambda: draw.randint(1, 300), 0), 16, 150)
    assert 0 < share <= 0.05


def run(model: Any, policy: CachePolicy, max_wait: float | None) -> tuple[dict[int, list[int]], list[int]]:
    """The tokens of a short prompt, and of a long one that joins it; how much was read at once while a row decoded."""
    read: list[int] = []
    engine = make_engine(model, {-1}, policy, prefill_step_size=512, max_wait=max_wait)
    answers: dict[int, list[int]] = {0: [], 1: []}

    def left() -> int:
        return engine.progress[1].left if 1 in engine.progress else 0

    def step() -> None:
        before = left()
        decodes = bool(engine.rows)
        for token in engine.step():
            answers[token.index].append(token.token)
        if decodes and before > left():
            read.append(before - left())

    engine.submit(TokenSequence(0, PROMPTS[0], 60))
    while not answers[0]:
        step()
    engine.submit(TokenSequence(1, PROMPTS[1], 5))
    while engine.busy:
        step()
    engine.close()
    return answers, read


@pytest.mark.parametrize(("policy", "chunk"), [(CachePolicy(), 100), (CachePolicy(budget=64), 128)])
def test_prompts_are_read_in_equal_chunks_where_nothing_depends_on_them(
    policy: CachePolicy, chunk: int, reference: Any
) -> None:
    engine = make_engine(reference[0], {-1}, policy, prefill_step_size=128)
    for index, length in enumerate((301, 271)):
        engine.submit(TokenSequence(index, PROMPTS[1][400 * index :][:length], 4))
    for number in (1, 2):
        engine.step()
        assert engine.progress[0].left == 300 - number * chunk
    engine.close()


@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(bits=8), CachePolicy(max_kv_size=200)], ids=repr)
@pytest.mark.slow
def test_small_chunks_change_no_token(policy: CachePolicy, reference: Any) -> None:
    model = reference[0]
    wanted, whole = run(model, policy, None)
    paced, small = run(model, policy, 1e-9)
    assert paced == wanted
    assert max(whole) > MIN_CHUNK >= max(small[1:])  # the speed of the first is not known yet
    mx.clear_cache()


@pytest.mark.parametrize("policy", [CachePolicy(budget=128), CachePolicy(bits=2, quantized_start=100)], ids=repr)
@pytest.mark.slow
def test_what_chunks_decide_is_read_in_whole_ones(policy: CachePolicy, reference: Any) -> None:
    assert run(reference[0], policy, 1e-9) == run(reference[0], policy, None)
