"""Recurrent layers of the gated delta rule go back within their last pass, without reading anything again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny_models import GATED_DELTA, VOCAB, make_model

from mlx_kv import CachePolicy, Drafter, SpeculationStatistics, batch_generate, make_prompt_cache
from mlx_kv.generation import decode_batch
from mlx_kv.generation.prefill import read_ragged
from mlx_kv.mlxlm.recurrent import recurrent_states
from mlx_kv.mlxlm.replay import PassRecorder, can_replay
from mlx_kv.mlxlm.traverse import trim_prompt_cache

PROMPTS = [mx.random.randint(1, VOCAB, (n,), key=mx.random.key(n)).tolist() for n in (5, 33, 1, 60)]


def test_which_models_can() -> None:
    assert all(can_replay(make_model(family)) for family in GATED_DELTA)
    assert not any(can_replay(make_model(family)) for family in ("llama", "lfm2", "falcon_h1"))


@pytest.mark.parametrize("family", GATED_DELTA)
@pytest.mark.parametrize("seed", range(4))
def test_the_state_is_that_of_the_tokens_that_are_left(family: str, seed: int) -> None:
    drawn = random.Random(f"{family} {seed}")
    model = make_model(family)

    def batch(rows: list[list[int]]) -> list[Any]:
        caches = [make_prompt_cache(model, CachePolicy(max_rollback=16)) for _ in rows]
        for row, tokens in zip(caches, rows, strict=True):
            model(mx.array([tokens]), cache=row)
        return [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]

    rows = 1 if family == "olmo_hybrid" else drawn.randint(1, 4)  # its convolutions read padding
    prompts = [[drawn.randrange(VOCAB) for _ in range(drawn.randint(1, 9))] for _ in range(rows)]
    passes = [[drawn.randrange(VOCAB) for _ in range(drawn.randint(1, 7))] for _ in prompts]
    caches, recorder = batch(prompts), PassRecorder(model)
    for _ in range(2):  # the second pass goes on from what the first has left
        with recorder.recording(caches):
            read_ragged(model, caches, passes)
        trimmed = [drawn.randint(0, len(tokens) - 1) for tokens in passes]
        trim_prompt_cache(caches, trimmed, strict=True)
        kept = [tokens[: len(tokens) - n] for tokens, n in zip(passes, trimmed, strict=True)]
        prompts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, kept, strict=True)]
        for state, wanted in zip(recurrent_states(caches), recurrent_states(batch(prompts)), strict=True):
            for array, other in zip(state.cache, wanted.cache, strict=True):
                assert mx.allclose(array, other, atol=1e-4, rtol=1e-4).item()
        passes = [[drawn.randrange(VOCAB) for _ in range(drawn.randint(1, 7))] for _ in prompts]


def test_only_the_last_pass_and_never_all_of_it() -> None:
    model = make_model("qwen3_next")
    caches = make_prompt_cache(model, CachePolicy(max_rollback=16))
    with PassRecorder(model).recording(caches):
        read_ragged(model, caches, [[1, 2, 3]])
    state = recurrent_states(caches)[0]
    assert state.can_trim(2)
    assert state.can_trim(3)  # by its checkpoint
    assert not state.can_trim(4)
    read_ragged(model, caches, [[4]])
    assert not state.can_trim(2)
    with PassRecorder(model).recording(caches):
        read_ragged(model, caches, [[1, 2, 3]])
    assert state.extract(0).record is None
    model(mx.array([[4, 5]]), cache=caches)  # as mlx-lm's loop reads: nobody announces it
    assert state.record is None
    assert not state.can_trim(1)


class Knowing(Drafter):
    """Says what comes, with a mistake now and then."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers, self.rows, self.random = answers, list[list[int]](), random.Random(1)

    def join(self, prompts: Any, caches: Any) -> None:
        self.rows += [[PROMPTS.index(list(prompt)), 0] for prompt in prompts]

    def keep(self, rows: Any) -> None:
        self.rows = [self.rows[row] for row in rows]

    def propose(self, most: int, choice: Any) -> list[list[int]]:
        drafts = [self.answers[which][said : said + most] for which, said in self.rows]
        return [[(t + (self.random.random() < 0.2)) % VOCAB for t in row] for row in drafts]

    def accepted(self, tokens: Any) -> None:
        for row, received in zip(self.rows, tokens, strict=True):
            row[1] += len(received)


class Counted(nn.Linear):
    """Counts the tokens that a projection gets."""

    tokens = 0

    def __call__(self, x: mx.array) -> mx.array:
        Counted.tokens += x.shape[0] * x.shape[1]
        return super().__call__(x)


@pytest.fixture
def counted() -> Iterator[None]:
    Counted.tokens = 0
    yield
    Counted.tokens = 0


def told(model: nn.Module, **options: Any) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    for response in batch_generate(model, None, PROMPTS, max_tokens=40, **options):
        outputs[response.index].append(response.token)
    return outputs


@pytest.mark.parametrize("family", GATED_DELTA)
def test_the_same_tokens_and_none_through_a_projection_twice(family: str, counted: None) -> None:
    model = make_model(family)
    wanted = told(model)
    layer: Any = next(layer for layer in model.layers if hasattr(layer, "linear_attn") or layer is model.layers[0])
    parts: Any = [module for module in layer.modules() if type(module) is nn.Linear]
    parts[0].__class__ = Counted
    options: dict[str, Any] = {"draft_length": "fixed", "num_draft_tokens": 5, "max_batch_size": 1}
    tokens = {}
    for replays in (True, False):
        Counted.tokens = 0
        statistics = SpeculationStatistics()
        with mock.patch.object(decode_batch, "can_replay", return_value=replays):
            assert told(model, drafter=Knowing(wanted), statistics=statistics, **options) == wanted
        tokens[replays] = Counted.tokens
        assert 0.3 < statistics.acceptance_rate < 0.95
        if replays:  # each prompt, a token of each round, and its draft
            assert Counted.tokens == sum(map(len, PROMPTS)) - len(PROMPTS) + statistics.rounds + statistics.drafted
    assert tokens[True] < 0.9 * tokens[False]
