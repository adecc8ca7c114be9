"""Drafters of others: whatever they propose, and however much of it for each row, the text is the model's own."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from brought import bring
from engines import make_engine
from tiny_models import VOCAB, make_model

import mlx_kv
from mlx_kv import CachePolicy, SpeculationStatistics, TemperatureSampler, batch_generate, speculative_generate
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.speculation import drafters
from mlx_kv.generation.speculation.drafters import Drafter, DrafterContext, ModelDrafter

PROMPTS = [mx.random.randint(1, VOCAB, (n,), key=mx.random.key(n)).tolist() for n in (5, 33, 1, 60, 18, 2)]
LENGTH = 30
OURS = ["auto", "model", "mtp", "ngram", "suffix"]


def documented() -> type[Drafter]:
    """The example of the documentation: it says the last token again."""
    page = (Path(mlx_kv.__file__).parent.parent / "docs" / "speculative.md").read_text()
    (example,) = re.findall(r"^```python\n(class .*?)^```", page, re.M | re.S)
    names: dict[str, Any] = {"mlx_kv": mlx_kv}
    exec(example, names)
    assert len(example.splitlines()) <= 15
    return names["Repeat"]


Repeat = documented()


class Prophet(Drafter):
    """Knows what comes, for it was told; says some of it, of another length for each row, and errs now and then."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], seed: int = 0) -> None:
        self.answers, self.random = answers, random.Random(seed)
        self.prompts: list[list[int]] = []
        self.texts: list[list[int]] = []  # all of each row, prompt and answer
        self.lengths: set[tuple[int, ...]] = set()

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any]) -> None:
        self.prompts += [list(prompt) for prompt in prompts]
        self.texts += [list(prompt) for prompt in prompts]

    def keep(self, rows: Sequence[int]) -> None:
        self.prompts, self.texts = ([of[row] for row in rows] for of in (self.prompts, self.texts))

    def propose(self, most: int, choice: Any) -> list[list[int]]:
        drafted = []
        for prompt, text in zip(self.prompts, self.texts, strict=True):
            answer = self.answers[tuple(prompt)]
            said = len(text) - len(prompt)
            assert text[len(prompt) :] == answer[:said], "it is told what each row got"
            known = answer[said : said + self.random.randint(0, most)]
            drafted.append([t if self.random.random() < 0.8 else self.random.randrange(VOCAB) for t in known])
        self.lengths.add(tuple(map(len, drafted)))
        return drafted

    def accepted(self, tokens: Sequence[Sequence[int]]) -> None:
        for text, new in zip(self.texts, tokens, strict=True):
            text += new


class Hesitant(ModelDrafter):
    """Passes on some of what the draft model says, for each row another number; now and then it does not ask it."""

    random = random.Random(2)

    def propose(self, most: int, choice: Any) -> list[list[int]]:
        drafted = super().propose(self.random.randint(0, most), choice)
        return [row[: self.random.randint(0, len(row))] for row in drafted]


def gathered(responses: Any) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    for response in responses:
        outputs[response.index].append(response.token)
    return outputs


def prophet(answers: list[list[int]], seed: int = 0) -> Prophet:
    return Prophet({tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}, seed)


MODELS = {
    "full": ("llama", CachePolicy()),
    "rings past their wrap": ("gemma3_text", CachePolicy(max_write=2)),
    "sinks": ("gpt_oss", CachePolicy(max_write=2)),
    "MLA": ("deepseek_v3", CachePolicy()),
    "max_kv_size": ("llama", CachePolicy(max_kv_size=20, max_write=8)),
    "8 bits": ("llama", CachePolicy(bits=8, group_size=32)),
    "budget": ("llama", CachePolicy(budget=24, keep_recent=8, sinks=2, margin=10)),
    "budget, 8 bits, by head": (
        "llama",
        CachePolicy(budget=24, keep_recent=8, sinks=2, margin=10, share="head", bits=8, group_size=32),
    ),
    "a table of heads": (
        "llama",
        CachePolicy(budget=24, keep_recent=8, sinks=2, margin=10, share="head", layers=((3, 0), (1, 0.2), (0.4, 2))),
    ),
}


@pytest.mark.parametrize("sampler", [None, TemperatureSampler(0.8, 0.95)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.slow
def test_rows_with_drafts_of_any_length_get_the_same(kind: str, sampler: TemperatureSampler | None) -> None:
    family, policy = MODELS[kind]
    model = make_model(family)
    length = LENGTH if policy.budget is None else 2 * LENGTH  # so that each row evicts more than once
    rules: dict[str, Any] = {"sampler": sampler, "seed": None if sampler is None else 7, "prefill_step_size": 8}
    wanted = gathered(batch_generate(model, None, PROMPTS, policy, length, max_batch_size=4, **rules))
    for drafter in (prophet(wanted), prophet(wanted, 1), Repeat):
        counts = SpeculationStatistics()
        rules |= {"drafter": drafter, "num_draft_tokens": 5, "statistics": counts}
        assert gathered(batch_generate(model, None, PROMPTS, policy, length, max_batch_size=4, **rules)) == wanted
        if isinstance(drafter, Prophet):
            assert counts.drafted > counts.accepted > 0.3 * counts.drafted
            assert any(len(set(lengths)) > 2 for lengths in drafter.lengths), "rows differ in one pass"
            assert any(0 in lengths and max(lengths) for lengths in drafter.lengths)
            assert drafter.texts == []


@pytest.mark.parametrize("sampler", [None, TemperatureSampler(0.8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.slow
def test_lengths_may_be_chosen_for_a_drafter_with_caches(family: str, sampler: TemperatureSampler | None) -> None:
    model = make_model(family)
    draft = make_model(family)
    mx.random.seed(1)
    draft.update(nn.utils.tree_map(lambda p: p + 0.05 * mx.random.normal(p.shape) * p.std(), model.parameters()))
    rules: dict[str, Any] = {"sampler": sampler, "seed": None if sampler is None else 7, "max_batch_size": 4}
    wanted = gathered(batch_generate(model, None, PROMPTS, None, LENGTH, **rules))
    counts = SpeculationStatistics()
    rules |= {"draft_model": draft, "drafter": Hesitant, "num_draft_tokens": 4, "statistics": counts}
    assert gathered(batch_generate(model, None, PROMPTS, None, LENGTH, **rules)) == wanted
    assert 0 < counts.accepted < counts.drafted


def test_a_sampler_of_others_sees_the_places_of_its_own_row() -> None:
    model = make_model("llama")
    wanted = gathered(batch_generate(model, None, PROMPTS, None, LENGTH))
    shapes = set()

    def sampler(logprobs: mx.array) -> mx.array:
        shapes.add(logprobs.shape)
        assert mx.isfinite(logprobs).all().item()
        return mx.argmax(logprobs, axis=-1)

    options: dict[str, Any] = {"drafter": prophet(wanted), "num_draft_tokens": 3, "sampler": sampler}
    assert gathered(batch_generate(model, None, PROMPTS, None, LENGTH, **options)) == wanted
    assert shapes == {(places, VOCAB) for places in (1, 2, 3, 4)}


@pytest.mark.parametrize("seed", [None, 3])
def test_one_sequence(seed: int | None) -> None:
    model = make_model("gemma3_text")
    rules: dict[str, Any] = {"sampler": None if seed is None else TemperatureSampler(1.0), "seed": seed}
    draft = make_model("gemma3_text", seed=5)
    wanted = [r.token for r in speculative_generate(model, draft, None, PROMPTS[1], 60, **rules)]
    drafter = Prophet({tuple(PROMPTS[1]): wanted})
    counts = SpeculationStatistics()
    got = list(speculative_generate(model, None, None, PROMPTS[1], 60, drafter=drafter, statistics=counts, **rules))
    assert [r.token for r in got] == wanted
    assert sum(r.from_draft for r in got) == counts.accepted > 0
    assert counts.rounds == 60 - counts.accepted


def test_passes_are_saved_where_a_drafter_is_right() -> None:
    """The model repeats itself: of a drafter that says so, a pass of the model gives K + 1 tokens."""
    model = make_model("llama")
    model.update(nn.utils.tree_map(mx.zeros_like, model.parameters()))  # greedy, it says token 0 for ever
    counts = SpeculationStatistics()
    got = list(speculative_generate(model, None, None, [1, 0], 20, 4, drafter=Repeat, statistics=counts))
    assert [r.token for r in got] == [0] * 20
    assert (counts.rounds, counts.drafted, counts.accepted) == (4, 16, 16)


def test_caches_of_a_row_go_on_and_the_text_before_them_is_told() -> None:
    """A drafter without caches adds none; one that looks at the text sees also what others have read."""
    model = make_model("llama")
    plain = make_engine(model, set())
    plain.submit(TokenSequence(0, PROMPTS[3], 20))
    (wanted,) = drained(plain)
    drafter = Prophet({tuple(PROMPTS[3]): wanted})
    engine = make_engine(model, set(), drafter=drafter, return_caches=True)
    caches = engine.make_caches()
    assert len(caches) == len(plain.make_caches())
    engine._decoder.read(mx.array([PROMPTS[3][:40]]), caches)
    engine.submit(TokenSequence(0, PROMPTS[3][40:], 20, caches=caches, before=PROMPTS[3][:40]))
    assert engine.pending == [0]
    taken = []
    told = []
    while engine.busy:
        for token in engine.step():
            told.append(token.token)
            taken.append(token.caches)
        if engine.rows:
            (copied,) = {cache.offset for cache in engine.extract(0) or []}
            assert copied == 60 + len(told) - 1
    assert told == wanted
    assert taken[-1] is not None


def drained(engine: Any) -> list[list[int]]:
    tokens: dict[int, list[int]] = {}
    while engine.busy:
        for token in engine.step():
            tokens.setdefault(token.index, []).append(token.token)
    return [tokens[index] for index in sorted(tokens)]


def test_rows_that_are_cancelled_leave_the_drafter_too() -> None:
    model = make_model("llama")
    wanted = gathered(batch_generate(model, None, PROMPTS, None, LENGTH))
    drafter = prophet(wanted)
    engine = make_engine(model, set(), drafter=drafter, prefill_step_size=16)
    for index, prompt in enumerate(PROMPTS):
        engine.submit(TokenSequence(index, prompt, LENGTH))
    engine.step()
    engine.cancel(3)  # while it is read
    for _ in range(6):
        engine.step()
    engine.cancel(0)
    assert len(drafter.texts) == len(engine.rows)
    drained(engine)
    engine.submit(TokenSequence(9, PROMPTS[1], LENGTH))
    assert drained(engine) == [wanted[1]]
    engine.close()
    assert drafter.texts == []


# --- names --------------------------------------------------------------------------------------------------------


def test_drafters_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters.DRAFTERS, "registered", dict(drafters.DRAFTERS.registered))
    assert mlx_kv.drafter_names() == OURS
    mlx_kv.register_drafter("repeat", Repeat)
    assert mlx_kv.drafter_names() == sorted([*OURS, "repeat"])
    model = make_model("llama")
    wanted = gathered(batch_generate(model, None, PROMPTS, None, 8))
    assert gathered(batch_generate(model, None, PROMPTS, None, 8, drafter="repeat")) == wanted
    draft = make_model("llama", seed=5)
    assert gathered(batch_generate(model, None, PROMPTS, None, 8, drafter="model", draft_model=draft)) == wanted
    with pytest.raises(
        ValueError, match="there is no drafter 'nobody': choose one of auto, model, mtp, ngram, repeat, suffix"
    ):
        make_engine(model, set(), drafter="nobody")
    with pytest.raises(ValueError, match="the drafter nothing is None"):
        mlx_kv.register_drafter("nothing", None)  # type: ignore[arg-type]


def test_drafters_of_other_packages_are_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, drafters.DRAFTERS, "mlx_kv.drafters", "theirs", Repeat)
    assert mlx_kv.drafter_names() == [*OURS, "theirs"]
    context = DrafterContext(make_model("llama"), VOCAB, 3)
    assert isinstance(drafters.find_drafter("theirs", context), Repeat)


def test_what_cannot_be_drafted_with_is_refused() -> None:
    model = make_model("llama")
    made = Repeat(DrafterContext(model, VOCAB, 3))
    for options, message in (
        ({}, "got neither a draft_model nor a drafter"),
        ({"drafter": "model"}, "the drafter model drafts with a model of its own: give a draft_model"),
        ({"drafter": made, "draft_model": model}, "a draft_model that it cannot use: give one of them"),
    ):
        draft: Any = options.pop("draft_model", None)
        with pytest.raises(ValueError, match=message):
            speculative_generate(model, draft, None, [1, 2], **options)


@pytest.mark.parametrize(
    ("drafted", "message"),
    [
        ([[1, 2, 3, 4]], "the drafter proposed 4 tokens, but was asked for 3 at the most"),
        ([[1], [2]], "the drafter proposed for 2 rows, but there are 1"),
        ([[1, VOCAB]], "the vocabulary has 96 tokens: propose ids from 0 to 95"),
        ([[-1]], "the vocabulary has 96 tokens"),
    ],
)
def test_a_drafter_that_says_what_it_may_not_is_told(drafted: list[list[int]], message: str) -> None:
    class Wrong(Repeat):  # type: ignore[valid-type, misc]
        def propose(self, most: int, choice: Any) -> list[list[int]]:
            return drafted

    with pytest.raises(ValueError, match=message):
        list(speculative_generate(make_model("llama"), None, None, [1, 2], drafter=Wrong))
