"""Chunks of prompts beside rows that decode: as small as a wait wants them, and of no effect on any token."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from engines import make_engine

from mlx_kv import CachePolicy
from mlx_kv.generation.admission import FIRST_CHUNK, MIN_CHUNK, PrefillPace
from mlx_kv.generation.sequence import TokenSequence

PROMPTS = {0: [(5 * i + 3) % 90 for i in range(30)], 1: [(7 * i * i + 3 * i) % 90 for i in range(900)]}


def test_a_chunk_has_as_many_tokens_as_fit_into_a_wait() -> None:
    pace = PrefillPace(0.5, 2048)
    assert pace.chunk(1) == FIRST_CHUNK
    pace.record(128, 0.064)  # half a millisecond each
    assert pace.chunk(1) == 960
    assert pace.chunk(4) == 192
    pace.record(10, 5.0)  # a pass of so few says nothing
    assert pace.chunk(1) == 960
    pace.record(1000, 100.0)
    assert pace.chunk(1) == MIN_CHUNK
    pace.record(1000, 1e-9)
    assert pace.chunk(3) == 2048


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
