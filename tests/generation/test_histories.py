"""Random histories of an engine: sequences come, go on from prefixes and drafts, lose their rows, and are cancelled.

Each that ends has the tokens that it has alone on a CPU, also where everything is chosen as on a GPU. This runs 2,000,
and 1,000 of which all draft with a head of the model, where they can draft:

    PYTHONPATH=.:tests python tests/generation/test_histories.py 2000
    PYTHONPATH=.:tests python tests/generation/test_histories.py 1000 heads
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from draft_heads import bigram_head, calm, trained_head
from engines import as_on_a_gpu, make_engine
from test_batch_generation import shaken
from test_company import BEGINNING, CASES, CHUNK, COARSE, NEARLY, NEARLY_IF_COARSE, policy_for, until_a_tie
from tiny_models import VOCAB, make_model

from mlx_kv import PromptMemory, SpeculationStatistics
from mlx_kv.generation.admission import tokens_of
from mlx_kv.generation.sequence import TokenSequence

HISTORIES = 200
PARTS = 5  # of the test
MODELS = 12  # of a process, at once
REREADS = ("8 bits from 30 on", "the newest as they came")  # what is read again of these, is quantised at other places


@dataclass
class Request:
    prompt: list[int]
    length: int
    tokens: list[int] = field(default_factory=list)
    ended: bool = False


@functools.lru_cache(MODELS)
def models(family: str, heads: bool) -> tuple[Any, Any, Any]:
    """A model, one that says nearly the same, and a head of it; of a model of which heads know more, if they draft."""
    model = calm(make_model(family)) if heads else make_model(family)
    make_head = trained_head if heads and family == "llama" else bigram_head
    return model, shaken(model, 0.05, family), make_head(model)


class History:
    """One engine, and what happens to it."""

    def __init__(self, number: int, heads: bool = False) -> None:
        self.drawn = random.Random(number)
        self.family, self.name = CASES[number % len(CASES)]
        self.policy, (self.model, *drafts) = policy_for(self.family, self.name), models(self.family, heads)
        self.whole = self.policy.budget is None and self.name not in REREADS  # prefixes are as if read anew
        how: dict[str, Any] = {}
        self.statistics = SpeculationStatistics()
        if self.family != "deepseek_v32" and (heads or self.drawn.random() < 0.4):
            how = {"draft_model": drafts[1] if heads else self.drawn.choice(drafts), "num_draft_tokens": 3}
            how |= {"draft_length": "fixed", "statistics": self.statistics}
        rows = self.drawn.choice([1, 2, 3, 5])
        self.engine = make_engine(self.model, set(), self.policy, rows, CHUNK, return_caches=True, **how)
        self.memory = PromptMemory(2**26, fingerprint="history")
        self.requests: list[Request] = []
        self.preempted = self.reused = 0

    def run(self) -> None:
        """All of it, to the last token."""
        coming, often = self.drawn.randint(3, 7), self.drawn.choice([0.05, 0.3])
        while coming or self.engine.busy:
            if coming and (not self.engine.busy or self.drawn.random() < often):
                coming -= 1
                self.submit()
            self.step()
            open_ones = [index for index, request in enumerate(self.requests) if not request.ended]
            if open_ones and (event := self.drawn.random()) < 0.1:
                index = self.drawn.choice(open_ones)
                self.preempt(index) if event < 0.07 else self.cancel(index)
        self.engine.close()

    def submit(self) -> None:
        drawn = self.drawn
        tail = [drawn.randrange(1, VOCAB) for _ in range(drawn.randint(1, drawn.choice([40, 150])))]
        ended = [request for request in self.requests if request.ended]
        if ended and drawn.random() < 0.7:  # a conversation goes on, here and there from an earlier place
            earlier = drawn.choice(ended)
            text = [*earlier.prompt, *earlier.tokens]
            start = text[: drawn.choice([len(text), len(text), drawn.randint(1, len(text))])]
        else:
            start = BEGINNING[: drawn.choice([0, 0, 17, 40, 90])]
        prompt = [*start, *tail]
        request = Request(prompt, drawn.randint(1, 16))
        self.requests.append(request)
        caches, count = (self.memory.find(request.prompt) if self.whole else None) or (None, 0)
        self.reused += count
        self.engine.submit(self.sequence(len(self.requests) - 1, caches, count))

    def sequence(self, index: int, caches: Any, read: int) -> TokenSequence:
        request = self.requests[index]
        text = [*request.prompt, *request.tokens]
        keep = self.memory.keep if self.whole and self.drawn.random() < 0.5 else None
        return TokenSequence(
            index,
            text[read:],
            request.length,
            caches=caches,
            before=text[:read],
            resumed=len(request.tokens),
            keep=keep,
        )

    def step(self) -> None:
        for token in self.engine.step():
            request = self.requests[token.index]
            request.tokens.append(token.token)
            if token.finish_reason is not None:
                request.ended = True
                text = [*request.prompt, *request.tokens]
                if self.whole and token.caches is not None and (read := tokens_of(token.caches)) <= len(text):
                    self.memory.keep(text[:read], token.caches)

    def preempt(self, index: int) -> None:
        """A row is lost, and goes on from its caches, or else from nothing."""
        request = self.requests[index]
        if (caches := self.engine.extract(index)) is None and not self.whole:
            return
        text, read = [*request.prompt, *request.tokens], 0
        if caches is not None:
            read = min(tokens_of(caches), len(text) - 1)
            if not self.engine.trim(caches, tokens_of(caches) - read):
                if not self.whole:
                    return
                caches, read = None, 0
        self.engine.cancel(index)
        self.preempted += 1
        self.engine.submit(self.sequence(index, caches, read))

    def cancel(self, index: int) -> None:
        self.engine.cancel(index)
        self.requests[index].ended, self.requests[index].length = True, 0

    def check(self) -> None:
        """Fails unless each request that was not cancelled has the tokens that it has alone."""
        told = [request for request in self.requests if request.length]
        assert [len(request.tokens) for request in told] == [request.length for request in told]
        if self.policy.quantized_start:  # rows are quantised together: when depends on the others
            return
        nearly = NEARLY_IF_COARSE if self.name in COARSE else NEARLY
        prompts, lengths = [request.prompt for request in told], [request.length for request in told]
        wanted = until_a_tie(self.model, self.policy, prompts, lengths, nearly)
        assert [request.tokens[: len(each)] for request, each in zip(told, wanted, strict=True)] == wanted


def play(numbers: range, heads: bool = False) -> tuple[int, int, int, int]:
    """Checks histories; returns how often rows were preempted, and tokens that were reused, drafted and accepted."""
    preempted = reused = drafted = accepted = 0
    for number in numbers:
        family, name = CASES[number % len(CASES)]
        policy = policy_for(family, name)
        # Where quantised keys decide what is evicted, the rounding of one, which padding turns, decides the text.
        coarse = policy.bits is not None and policy.budget is not None
        try:
            with as_on_a_gpu() if number // len(CASES) % 2 and not coarse else contextlib.nullcontext():
                history = History(number, heads)
                history.run()
            history.check()
        except BaseException as error:
            error.add_note(f"history {number}: {family}, {name}")
            raise
        preempted, reused = preempted + history.preempted, reused + history.reused
        drafted, accepted = drafted + history.statistics.drafted, accepted + history.statistics.accepted
    return preempted, reused, drafted, accepted


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_to_an_engine_each_sequence_has_the_tokens_that_it_has_alone(part: int) -> None:
    assert all(count > 0 for count in play(range(HISTORIES)[part::PARTS]))


@pytest.mark.parametrize("heads", [False, True])
def test_a_few_histories(heads: bool) -> None:
    play(range(0, 4 * len(CASES), 29), heads)


if __name__ == "__main__":
    print(play(range(int(sys.argv[1])), sys.argv[2:] == ["heads"]))
