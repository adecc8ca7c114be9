"""Speculation where layers are recurrent: what was right is read again, and the text is that of plain decoding."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from engines import as_on_a_gpu, make_engine
from families import make_family, shared_family
from family_model import distance
from family_parts import VOCAB
from mlx.utils import tree_map
from mlx_lm.models import cache as stock
from test_drafters import PROMPTS, Prophet, gathered, prophet

import mlx_kv
from mlx_kv import CachePolicy, SpeculationStatistics, TemperatureSampler, batch_generate, speculative_generate
from mlx_kv.generation import decode_batch
from mlx_kv.generation.decode_batch import DecodeBatch
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.speculation import drafters
from mlx_kv.mlxlm import recurrent
from mlx_kv.mlxlm.recurrent import RecurrentState, recurrent_states, with_checkpoints
from mlx_kv.mlxlm.traverse import attention_caches

TOGETHER = ["qwen3_next", "lfm2", "falcon_h1", "mamba2"]  # rows of different lengths in one pass
ALONE = ["mamba", "rwkv7", "jamba", "recurrent_gemma"]  # these would read the padding
BUDGET: dict[str, Any] = {"budget": 24, "keep_recent": 8, "sinks": 2, "margin": 10}
POLICIES = {
    "plain": CachePolicy(),
    "8 bits": CachePolicy(bits=8, group_size=32),
    "ring past its wrap": CachePolicy(max_kv_size=20, max_write=2),
    "budget": CachePolicy(**BUDGET),
    "budget, 8 bits, by head": CachePolicy(**BUDGET, share="head", bits=8, group_size=32),
}
KINDS = [
    *[(family, policy, 4) for family in ("qwen3_next", "lfm2", "falcon_h1") for policy in POLICIES],
    *[(family, "plain", 4) for family in ("mamba2", *ALONE)],
    *[(family, "plain", 1) for family in TOGETHER],
    ("jamba", "budget", 1),
    ("gear", "8 bits", 4),  # windows of its own beside convolutions
]
LENGTH, K = 20, 4


def length_under(policy: str) -> int:
    """Under a budget, so that each row evicts more than once."""
    return 2 * LENGTH if "budget" in policy else LENGTH


@functools.cache
def plain(family: str, policy: str = "plain", temp: float | None = None) -> list[list[int]]:
    return gathered(
        batch_generate(
            shared_family(family), None, PROMPTS, POLICIES[policy], length_under(policy), max_batch_size=4,
            sampler=None if temp is None else TemperatureSampler(temp), seed=None if temp is None else 7,
            prefill_step_size=8,
        )
    )  # fmt: skip


def drafted(family: str, drafter: Any, policy: str = "plain", rows: int = 4, **options: Any) -> Any:
    """What the model says with a drafter, and the counts."""
    counts = SpeculationStatistics()
    rules = {"num_draft_tokens": K, "prefill_step_size": 8, "statistics": counts, "max_batch_size": rows, **options}
    model, length = shared_family(family), length_under(policy)
    return gathered(batch_generate(model, None, PROMPTS, POLICIES[policy], length, drafter=drafter, **rules)), counts


@pytest.mark.parametrize(("family", "policy", "rows"), KINDS)
@pytest.mark.slow
def test_greedy_is_plain_decoding(family: str, policy: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a drafter that is right now and then, known by its name."""
    wanted = plain(family, policy)
    monkeypatch.setattr(drafters.DRAFTERS, "registered", dict(drafters.DRAFTERS.registered))
    mlx_kv.register_drafter("now and then", lambda context: prophet(wanted, seed=2))
    got, counts = drafted(family, "now and then", policy, rows)
    assert got == wanted
    assert counts.drafted > counts.accepted > 0.3 * counts.drafted
    assert rows == 1 or family in ALONE or counts.rounds < 0.7 * sum(map(len, wanted)) / 2  # rows share rounds


@pytest.mark.parametrize("family", TOGETHER)
@pytest.mark.slow
def test_drafts_without_a_model(family: str) -> None:
    """Of prompts that repeat themselves, on rings past their wrap where there is attention."""
    model = shared_family(family)
    prompts = [[*prompt[:7], *prompt[:7], *prompt[:3]] for prompt in PROMPTS[1:5]]
    policy = CachePolicy() if family == "mamba2" else POLICIES["ring past its wrap"]
    wanted = gathered(batch_generate(model, None, prompts, policy, 3 * LENGTH, max_batch_size=4, prefill_step_size=8))
    for drafter in ("ngram", "suffix"):
        counts = SpeculationStatistics()
        rules: dict[str, Any] = {"num_draft_tokens": K, "prefill_step_size": 8, "statistics": counts}
        told = batch_generate(model, None, prompts, policy, 3 * LENGTH, max_batch_size=4, drafter=drafter, **rules)
        assert gathered(told) == wanted
        assert counts.drafted > counts.accepted


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "mamba"])
def test_sampled_is_plain_sampling(family: str) -> None:
    wanted = plain(family, temp=0.8)
    got, counts = drafted(family, prophet(wanted), sampler=TemperatureSampler(0.8), seed=7)
    assert got == wanted
    assert counts.drafted > counts.accepted > 0


class Wrong(Prophet):
    """Always says another token than the one that comes."""

    def propose(self, most: int, choice: Any) -> list[list[int]]:
        pairs = zip(self.prompts, self.texts, strict=True)
        told = [(self.answers[tuple(prompt)], len(text) - len(prompt)) for prompt, text in pairs]
        return [[(token + 1) % VOCAB for token in answer[said : said + most]] for answer, said in told]


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
@pytest.mark.slow
def test_a_drafter_that_is_always_wrong_costs_no_more_than_its_passes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was right waits for the next drafts, but not for ever: at most K + 1 tokens wait where any is drafted."""
    wanted, passes = plain(family), []
    read = DecodeBatch.read

    def watched(self: DecodeBatch, rows: Sequence[Sequence[int]]) -> mx.array:
        passes.extend(len(row) for row in rows)
        assert all(len(held) <= 1 for state in recurrent_states(self.caches) for held in state._checkpoints)
        return read(self, rows)

    monkeypatch.setattr(DecodeBatch, "read", watched)

    oracle = Wrong({tuple(prompt): answer for prompt, answer in zip(PROMPTS, wanted, strict=True)})
    got, counts = drafted(family, oracle, rows=1)
    assert got == wanted
    assert counts.accepted == 0
    assert counts.rounds == sum(map(len, wanted))
    assert max(passes) == 2 * K + 1
    assert passes[:7] == [K + 1, K + 2, K + 3, K + 4, 2 * K + 1, K + 2, K + 1]  # the sixth commits


@pytest.mark.parametrize(
    ("family", "rows", "k"), [("qwen3_next", 3, 3), ("lfm2", 1, 1), ("mamba2", 3, 2), ("rwkv7", 1, 3), ("jamba", 3, 3)]
)
@pytest.mark.slow
def test_a_draft_model_may_be_recurrent(family: str, rows: int, k: int) -> None:
    """It reads its own drafts one by one, and goes back among them."""
    wanted, draft = plain(family), make_family(family)
    mx.random.seed(1)
    draft.update(tree_map(lambda p: p + 0.03 * mx.random.normal(p.shape) * p.std(), draft.parameters()))
    got, counts = drafted(family, None, rows=rows, draft_model=draft, num_draft_tokens=k)
    assert got == wanted
    assert 0 < counts.accepted < counts.drafted


@pytest.mark.slow
def test_a_recurrent_draft_of_another_model_and_the_other_way_round() -> None:
    for family, draft in (("qwen3", "lfm2"), ("lfm2", "qwen3")):
        got, counts = drafted(family, None, draft_model=shared_family(draft))
        assert got == plain(family)
        assert counts.drafted > 0


def test_rows_end_join_and_are_cancelled_while_something_waits() -> None:
    model, wanted = shared_family("lfm2"), plain("lfm2")
    oracle = prophet(wanted)
    engine = make_engine(model, set(), drafter=oracle, num_draft_tokens=K, max_batch_size=3, prefill_step_size=8)
    for index, prompt in enumerate(PROMPTS):
        engine.submit(TokenSequence(index, prompt, LENGTH - index))
    told: dict[int, list[int]] = {}
    cancelled = None
    while engine.busy:
        for token in engine.step():
            told.setdefault(token.index, []).append(token.token)
        waiting = [len(own) for own in engine._decoder.target.pending]  # type: ignore[attr-defined]
        if cancelled is None and len(waiting) == 3 and waiting[0] > 1 and len(set(waiting)) > 1:
            cancelled = engine.rows[0]
            engine.cancel(cancelled)
    assert cancelled is not None, "a row is to be cancelled while others wait for another number of tokens"
    for index, answer in told.items():
        ended = LENGTH - index if index != cancelled else len(answer)
        assert answer == wanted[index][:ended]


@pytest.mark.parametrize("draft", [None, "lfm2", "qwen3"])
@pytest.mark.parametrize("family", ["lfm2", "falcon_h1"])
@pytest.mark.slow
def test_caches_that_are_handed_out_stand_where_they_say(family: str, draft: str | None) -> None:
    """Of rows that decode and of those that end; they hold no checkpoints, and go on as a fresh reading would."""
    model, wanted = shared_family(family), plain(family)
    options = {"drafter": prophet(wanted)} if draft is None else {"draft_model": shared_family(draft)}
    engine = make_engine(model, set(), num_draft_tokens=K, max_batch_size=3, return_caches=True, **options)
    layers, handed, offsets = len(stock.make_prompt_cache(model)), 0, set()
    for index, prompt in enumerate(PROMPTS):
        engine.submit(TokenSequence(index, prompt, LENGTH))
    while engine.busy:
        tokens = engine.step()
        held = [(token.index, token.caches) for token in tokens if token.caches is not None]
        held += [(index, engine.extract(index)) for index in engine.rows]
        for index, caches in held:
            assert caches is not None
            (read,) = {int(cache.offset) for cache in attention_caches(caches)}
            text = [*PROMPTS[index], *wanted[index]]
            offsets.add(read - len(PROMPTS[index]))
            assert all(not any(state._checkpoints) for state in recurrent_states(caches))
            if handed % 5 == 0:  # some of them
                got = model(mx.array([text[read : read + 3] or [1]]), cache=caches[:layers])[0, -1]
                after = model(mx.array([text[: read + 3] + [1] * (read >= len(text))]))[0, -1]
                assert distance(got, after) < 1e-4
            handed += 1
    assert handed > 20
    assert len(offsets) >= 3


def test_caches_of_a_file_speculate() -> None:
    """They come as mlx-lm's own, which cannot go back: from where they stand on they can."""
    model, wanted = shared_family("falcon_h1"), plain("falcon_h1")
    engine = make_engine(model, set(), drafter=prophet(wanted), num_draft_tokens=K, max_batch_size=2)
    told: dict[int, list[int]] = {}
    for index in (1, 3):
        caches = mlx_kv.make_prompt_cache(model)
        assert not recurrent_states(caches)
        head, rest = PROMPTS[index][:20], PROMPTS[index][20:]
        model(mx.array([head]), cache=caches)
        engine.submit(TokenSequence(index, rest, LENGTH, caches=caches, before=head))
    while engine.busy:
        for token in engine.step():
            told.setdefault(token.index, []).append(token.token)
    assert told == {index: wanted[index] for index in (1, 3)}


def test_one_sequence_and_its_ends() -> None:
    model, wanted = shared_family("mamba2"), plain("mamba2")
    for index in (2, 3):
        oracle = Prophet({tuple(PROMPTS[index]): wanted[index]})
        got = speculative_generate(model, None, None, PROMPTS[index], LENGTH, K, drafter=oracle)
        assert [response.token for response in got] == wanted[index]


# --- one less, and planted faults -------------------------------------------------------------------------------


def test_one_token_less_of_rollback_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plain("lfm2")
    monkeypatch.setattr(
        decode_batch, "with_checkpoints", lambda caches, most, *rest: with_checkpoints(caches, most - 1, *rest)
    )
    wrong = Wrong({tuple(prompt): answer for prompt, answer in zip(PROMPTS, wanted, strict=True)})
    with pytest.raises(ValueError, match=f"cannot trim {2 * K + 1} tokens: .* with max_rollback={2 * K + 1}"):
        drafted("lfm2", wrong, rows=1)


@pytest.mark.slow
def test_one_checkpoint_less_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, less = plain("lfm2"), 0
    monkeypatch.setattr(
        decode_batch, "with_checkpoints", lambda caches, most, held: with_checkpoints(caches, most, held - less)
    )
    options: dict[str, Any] = {"draft_model": shared_family("mamba2"), "rows": 1}
    assert drafted("lfm2", None, **options)[0] == wanted
    less = 1
    for drafter, rules in ((prophet(wanted), {}), (None, options)):
        with pytest.raises(ValueError, match="this recurrent state was not kept there"):
            drafted("lfm2", drafter, **rules)


def not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RecurrentState.trim_per_sequence

    def trim(self: RecurrentState, counts: Any) -> None:
        now = list(self.cache)
        right(self, counts)
        self.cache = now

    monkeypatch.setattr(RecurrentState, "trim_per_sequence", trim)


def of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = recurrent._rows_of
    monkeypatch.setattr(recurrent, "_rows_of", lambda sources: right([*sources[1:], sources[0]]))


def not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DecodeBatch.accepted

    def accepted(self: DecodeBatch, tokens: Any) -> None:
        right(self, tokens)
        self.pending = [own[-1:] for own in self.pending]

    monkeypatch.setattr(DecodeBatch, "accepted", accepted)


def of_the_pass_before(monkeypatch: pytest.MonkeyPatch) -> None:
    right, last = RecurrentState._add_checkpoints, {}

    def note(self: RecurrentState, before: Any, lengths: Any) -> None:
        right(self, last.get(id(self), before), lengths)
        last[id(self)] = before

    monkeypatch.setattr(RecurrentState, "_add_checkpoints", note)


def looked_at_one_place_early(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DecodeBatch.verify

    def verify(self: DecodeBatch, drafted: Any) -> mx.array:
        logits = right(self, drafted)
        waits = mx.array([len(own) > 1 for own in self.pending])[:, None, None]
        return mx.where(waits, mx.roll(logits, 1, axis=1), logits)

    monkeypatch.setattr(DecodeBatch, "verify", verify)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [not_restored, of_another_row, not_read_again, of_the_pass_before, looked_at_one_place_early]
)
def test_planted_faults_show(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plain("mamba2")
    fault(monkeypatch)
    try:
        got, _ = drafted("mamba2", prophet(wanted))
    except (AssertionError, ValueError):  # the drafter notices another text than the one that it was told
        return
    assert got != wanted


def test_models_that_read_padding_get_none_on_a_gpu() -> None:
    """Rows of one length beside one another, whose prompts would be padded to 64 tokens otherwise."""
    model, answers = shared_family("mamba"), list[dict[int, list[int]]]()
    for context in (contextlib.nullcontext(), as_on_a_gpu()):
        with context:
            engine, tokens = make_engine(model, set(), None, 2), dict[int, list[int]]()
            for index in range(2):
                engine.submit(TokenSequence(index, [index, *PROMPTS[0]], 6))
            while engine.busy:
                for token in engine.step():
                    tokens.setdefault(token.index, []).append(token.token)
            engine.close()
        answers.append(tokens)
    assert answers[0] == answers[1]
