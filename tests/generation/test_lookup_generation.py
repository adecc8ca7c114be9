"""Text drafted without a model: the tokens of plain decoding, whatever the caches are, and the same distribution."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import pytest
from engines import make_engine
from tiny_models import VOCAB, make_model

from mlx_kv import (
    CachePolicy,
    SpeculationStatistics,
    TemperatureSampler,
    batch_generate,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    speculative_generate,
)
from mlx_kv.generation.prefill import prefill_all
from mlx_kv.generation.sampling import SeededSampler
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.generation.speculation.drafters import NgramDrafter, SuffixDrafter

LOOKUPS = ["ngram", "suffix"]
WORDS = [mx.random.randint(1, VOCAB, (n,), key=mx.random.key(n)).tolist() for n in (4, 9, 15)]
# Of different lengths, and in each something comes again.
PROMPTS = [words * times for words, times in zip(WORDS, (3, 2, 4), strict=True)]
RULES = TemperatureSampler(0.3, 0.9)
CASES = {
    "llama": ("llama", CachePolicy()),
    "llama, 8 bits": ("llama", CachePolicy(bits=8, group_size=32)),
    "llama, a budget": ("llama", CachePolicy(budget=24, keep_recent=16, sinks=2, margin=30)),
    "llama, max_kv_size": ("llama", CachePolicy(max_kv_size=20, max_write=12)),
    "gemma3, rings past their wrap": ("gemma3_text", CachePolicy(max_write=2)),
    "gemma3, 8 bits": ("gemma3_text", CachePolicy(max_write=2, bits=8, group_size=32)),
    "gpt_oss, rings with sinks": ("gpt_oss", CachePolicy(max_write=2)),
}


def by_row(responses: Any) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in PROMPTS]
    for response in responses:
        rows[response.index].append(response.token)
    return rows


@pytest.mark.parametrize(
    ("case", "sampler"),
    [*((case, None) for case in CASES), ("llama", RULES), ("gemma3, rings past their wrap", RULES)],
)
@pytest.mark.slow
def test_rows_get_what_they_get_without_drafts(case: str, sampler: TemperatureSampler | None) -> None:
    """Ragged: two rows at once, then those that waited. Within a margin: else a budget evicts at other times."""
    family, policy = CASES[case]
    model, length = make_model(family), 24
    options: dict[str, Any] = {"max_batch_size": 2, "prefill_step_size": 16, "sampler": sampler}
    options["seed"] = None if sampler is None else 7
    wanted = by_row(batch_generate(model, None, PROMPTS, policy, length, **options))
    for drafter in LOOKUPS:
        counts = SpeculationStatistics()
        drafting: dict[str, Any] = {"drafter": drafter, "statistics": counts}
        assert by_row(batch_generate(model, None, PROMPTS, policy, length, **options, **drafting)) == wanted
        assert counts.drafted > counts.accepted >= (sampler is None), "some drafts are to be right, and some wrong"


@pytest.mark.chosen_length
@pytest.mark.parametrize("drafter", LOOKUPS)
def test_rows_get_the_same_whatever_length_is_chosen(drafter: str) -> None:
    model = make_model("llama")
    wanted = by_row(batch_generate(model, None, PROMPTS, None, 60))
    assert by_row(batch_generate(model, None, PROMPTS, None, 60, drafter=drafter)) == wanted


def plain(model: nn.Module, policy: CachePolicy | None, prompt: list[int], length: int, seed: int | None) -> list[int]:
    """One sequence alone, by mlx-lm's loop."""
    engine = make_engine(model, set(), policy, 1)
    sampler = None if seed is None else SeededSampler(RULES, seed, len(prompt))
    engine.submit(TokenSequence(0, prompt, length, sampler=sampler))
    tokens = []
    while engine.busy:
        tokens += [token.token for token in engine.step()]
    return tokens


@pytest.mark.parametrize("seed", [None, 5], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_one_sequence(family: str, seed: int | None) -> None:
    model = make_model(family)
    policy = None if family == "llama" else CachePolicy(max_write=2)
    wanted = plain(model, policy, PROMPTS[2], 60, seed)
    for drafter in LOOKUPS:
        counts = SpeculationStatistics()
        options: dict[str, Any] = {"sampler": None if seed is None else RULES, "seed": seed, "policy": policy}
        options |= {"max_tokens": 60, "drafter": drafter, "statistics": counts}
        got = list(speculative_generate(model, None, None, PROMPTS[2], **options))
        assert [r.token for r in got] == wanted
        assert sum(r.from_draft for r in got) == counts.accepted >= (seed is None)
        assert counts.drafted > 0
        assert counts.rounds == 60 - counts.accepted


def test_how_much_is_drafted_where_nobody_says() -> None:
    """The model says token 0 for ever: what followed it before will follow it again."""
    model = make_model("llama")
    model.update(nn.utils.tree_map(mx.zeros_like, model.parameters()))

    def counted(**options: Any) -> tuple[int, int, int]:
        counts = SpeculationStatistics()
        got = speculative_generate(model, None, None, [1, *[0] * 12], 22, statistics=counts, **options)
        assert [r.token for r in got] == [0] * 22
        return counts.rounds, counts.drafted, counts.accepted

    for drafter in ("ngram", "suffix", "auto"):
        assert counted(drafter=drafter) == (2, 20, 20)
        assert counted(drafter=drafter, num_draft_tokens=1) == (11, 11, 11)
        alike = {"prompt_lookup_min": 12, "prompt_lookup_max": 12}
        assert counted(drafter=drafter, **alike) == (3, 19, 19), "11 of the 12 were there before: not enough yet"


# --- caches that have read something ----------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("case", ["llama", "llama, a budget", "gemma3, rings past their wrap"])
def test_caches_are_gone_on_from(case: str, known: bool, tmp_path: Path) -> None:
    """Made without a thought of drafts, and out of a file: a ring can take back its last write, however it was made."""
    family, policy = CASES[case]
    if family != "llama":
        policy = CachePolicy(max_write=11)
    model, prompt = make_model(family), PROMPTS[2]
    caches = make_prompt_cache(model, policy)
    prefill_all(model, caches, prompt[:40], 8)
    save_prompt_cache(tmp_path / "p.safetensors", caches)
    wanted = plain(model, policy, prompt, 30, None)
    for kind in (NgramDrafter, SuffixDrafter):

        class Watched(kind):  # type: ignore[valid-type, misc]
            seen: ClassVar[list[list[int]]] = []

            def join(self, prompts: Any, caches: list[Any]) -> None:
                self.seen.extend(prompts)
                super().join(prompts, caches)

        caches = load_prompt_cache(tmp_path / "p.safetensors")
        counts = SpeculationStatistics()
        options: dict[str, Any] = {"prompt_cache": caches, "before": prompt[:40] if known else []}
        options |= {"max_tokens": 30, "drafter": Watched, "statistics": counts}
        got = speculative_generate(model, None, None, prompt[40:], **options)
        assert [r.token for r in got] == wanted
        assert Watched.seen == [prompt if known else prompt[40:]]
        assert counts.drafted > counts.accepted > 0
        assert {cache.offset for cache in caches} == {len(prompt) + 29}


def test_caches_that_do_not_fit_are_refused() -> None:
    model, prompt = make_model("llama"), PROMPTS[0]
    caches, narrow = make_prompt_cache(model), make_prompt_cache(model, CachePolicy(max_kv_size=20, max_write=4))
    for options, message in (
        ({"policy": CachePolicy(), "prompt_cache": caches, "drafter": "ngram"}, "got a policy and a prompt_cache"),
        ({"prompt_cache": caches[1:], "drafter": "ngram"}, "the prompt_cache has 2 layers, the model and its drafter"),
        ({"prompt_cache": narrow, "drafter": "ngram"}, "plans for writes of 4 tokens, .*: use num_draft_tokens=3"),
        ({"prompt_cache": caches, "drafter": "model", "draft_model": model}, "the prompt_cache has 3 layers"),
    ):
        draft: Any = options.pop("draft_model", None)
        with pytest.raises(ValueError, match=message):
            speculative_generate(model, draft, None, prompt, **options)


def test_what_a_user_says_of_drafts_is_checked() -> None:
    for settings, message in (
        ({"drafter": "nobody"}, "there is no drafter 'nobody': choose one of auto, model, mtp, ngram, suffix"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        ({"prompt_lookup_max": 1}, "prompt_lookup_min is 2, more than prompt_lookup_max=1: give a smaller one"),
    ):
        options: dict[str, Any] = settings
        with pytest.raises(ValueError, match=message):
            DraftSettings(**options)
    assert [DraftSettings(drafter).draft_tokens for drafter in (None, "model", "ngram", "suffix", "auto")] == [
        3,
        3,
        10,
        10,
        10,
    ]
    assert DraftSettings("ngram", 4).draft_tokens == 4


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, *LOOKUPS])
@pytest.mark.slow
def test_what_is_sampled_has_the_models_distribution(drafter: str | None) -> None:
    """Two tokens of a vocabulary of four, against the probability of each of the 16 outcomes.

    Of n draws the total variation distance from their own distribution over k outcomes is sqrt(k / n) / 2 at the most
    on average, and above that by t with a probability below exp(-2 n t^2) (McDiarmid 1989): so far it may be once in a
    million. Drafts are right at times, as the prompt has both tokens after the same two.
    """
    model, prompt, n, tokens = make_model("llama", vocab_size=4, num_hidden_layers=1), [0, 1, 2, 0, 1, 3, 0, 1], 2000, 2
    rules = TemperatureSampler(1.5)

    def chances(*context: int) -> list[float]:
        listed: Any = mx.softmax(model(mx.array([[*prompt, *context]]))[0, -1] / rules.temp).tolist()
        return list(listed)

    truth = {(): 1.0}
    for _ in range(tokens):
        truth = {(*had, t): p * q for had, p in truth.items() for t, q in enumerate(chances(*had))}
    counts, drawn = SpeculationStatistics(), Counter[tuple[int, ...]]()
    mx.random.seed(11)
    options: dict[str, Any] = {} if drafter is None else {"drafter": drafter, "statistics": counts}
    rows: list[list[int]] = [[] for _ in range(n)]
    for token in batch_generate(model, None, [prompt] * n, None, tokens, max_batch_size=250, sampler=rules, **options):
        rows[token.index].append(token.token)
    drawn.update(map(tuple, rows))
    distance = sum(abs(drawn[outcome] / n - p) for outcome, p in truth.items()) / 2
    assert distance < math.sqrt(len(truth) / n) / 2 + math.sqrt(math.log(1e6) / (2 * n))
    if drafter is not None:
        assert 0.1 * counts.drafted < counts.accepted < 0.9 * counts.drafted
        assert counts.drafted > n / 2


def test_answers_of_other_rows_change_no_text() -> None:
    """The same prompts again, one after another: what was said for one is drafted for the next, and it comes faster."""
    model = make_model("llama")
    wanted = [plain(model, None, prompt, 30, None) for prompt in PROMPTS]
    counts = SpeculationStatistics()
    engine = make_engine(model, set(), None, 1, drafter="suffix", statistics=counts)
    rounds = []
    for _ in range(2):
        for index, prompt in enumerate(PROMPTS):
            engine.submit(TokenSequence(index, prompt, 30))
        answers: list[list[int]] = [[] for _ in PROMPTS]
        while engine.busy:
            for token in engine.step():
                answers[token.index].append(token.token)
        assert answers == wanted
        rounds.append(counts.rounds)
    first, second = rounds[0], rounds[1] - rounds[0]
    assert second <= len(PROMPTS) * math.ceil(30 / 11) + 1 < first
    assert list(itertools.chain(engine.rows, engine.pending)) == []
