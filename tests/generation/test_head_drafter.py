"""Heads that draft: what they guess, against a slow reference, and that the text is the model's own in any case."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from draft_heads import TableHead, random_head
from engines import make_engine
from tiny_models import VOCAB, make_model

from mlx_kv import SpeculationStatistics, TemperatureSampler, batch_generate
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.speculation import drafters
from mlx_kv.generation.speculation.drafters import DrafterContext, HeadDrafter
from mlx_kv.mlxlm.heads import DraftHead
from mlx_kv.mlxlm.taps import HiddenTap

PROMPTS = [mx.random.randint(1, VOCAB, (n,), key=mx.random.key(n)).tolist() for n in (5, 33, 1, 60, 18, 2)]
CHUNK = 16


def guesses(model: nn.Module, head: DraftHead, text: Sequence[int], most: int) -> list[int]:
    """What a head guesses after a text: all of it is read anew, without caches."""
    tap = HiddenTap(model, head.hidden)
    _, states = tap(mx.array([list(text)]))
    before = mx.concatenate([mx.zeros_like(states[:, :1]), states[:, :-1]], axis=1)
    tokens: list[int] = []
    for _ in range(most):
        outputs = head(mx.array([[*text, *tokens]]), None, before)
        tokens.append(int(mx.argmax(head.logits(outputs[:, -1])).item()))
        before = mx.concatenate([before, outputs[:, -1:]], axis=1)  # its own output is the state before the guess
    return tokens


class Checked(HeadDrafter):
    """Compares what it proposes with the reference."""

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
            assert row == guesses(self.model, self._head, text, len(row))
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
    with pytest.raises(ValueError, match="give what load_draft_head returns"):
        drafters.find_drafter("mtp", DrafterContext(model, VOCAB, 3, model))
    with pytest.raises(ValueError, match="leave out the drafter"):
        drafters.find_drafter("model", context)
