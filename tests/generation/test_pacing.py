"""How many tokens are drafted: as many as pay; and whatever is chosen, the text is the model's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from engines import make_engine
from families import shared_family
from family_parts import VOCAB as FAMILY_VOCAB
from test_drafters import LENGTH, MODELS, PROMPTS, Prophet, gathered, prophet
from tiny_models import make_model

from mlx_kv import CachePolicy, SpeculationStatistics, TemperatureSampler, batch_generate
from mlx_kv.generation import decoder
from mlx_kv.generation.sampling import derived_seed, sampler_of_sequence
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.generation.speculation.drafters import ModelDrafter
from mlx_kv.generation.speculation.pacing import BASELINE_ROUNDS, GUESSED_ROUNDS, MAX_WAIT, Acceptance, Costs, Pace

pytestmark = pytest.mark.chosen_length


# --- whatever is chosen, the text is the same -------------------------------------------------------------------------


class Whim(Pace):
    """Chooses anything: nothing, for a while or once; all that may be; or some of it."""

    random = random.Random(4)
    chosen: set[int]

    def choose(self, limit: int, waiting: int = 0, proposed: Any = None) -> int:
        longest = min(limit, self.max_tokens) if proposed is None else min(limit, max(proposed, default=0))
        length = 0 if longest == 0 or self.random.random() < 0.5 else self.random.randint(0, longest)
        type(self).chosen.add(length)
        return length


@pytest.fixture
def whims(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    Whim.chosen = set()
    monkeypatch.setattr(decoder, "Pace", Whim)
    return Whim.chosen


@pytest.mark.parametrize("costs", [True, False], ids=["asked when it drafts", "asked always"])
@pytest.mark.parametrize("sampler", [None, TemperatureSampler(0.8, 0.95)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.slow
def test_a_step_ahead_or_drafts_of_any_length(
    kind: str, sampler: TemperatureSampler | None, costs: bool, whims: set[int]
) -> None:
    """Rows come and go meanwhile: there is room for three of them."""
    family, policy = MODELS[kind]
    model = make_model(family)
    lengths = [LENGTH + 7 * row for row in range(len(PROMPTS))]
    rules: dict[str, Any] = {"sampler": sampler, "seed": None if sampler is None else 7, "prefill_step_size": 8}
    wanted = gathered(batch_generate(model, None, PROMPTS, policy, lengths, max_batch_size=3, **rules))
    drafter, counts = prophet(wanted), SpeculationStatistics()
    drafter.proposals_cost = costs
    rules |= {"drafter": drafter, "num_draft_tokens": 5, "statistics": counts}
    assert gathered(batch_generate(model, None, PROMPTS, policy, lengths, max_batch_size=3, **rules)) == wanted
    assert drafter.texts == []
    assert counts.accepted > 10
    assert counts.tokens >= sum(lengths)
    assert {0, 1, 4} <= whims


@pytest.mark.parametrize("costs", [True, False], ids=["asked when it drafts", "asked always"])
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("qwen3_next", CachePolicy(max_kv_size=20, max_write=2)),
        ("lfm2", CachePolicy(budget=24, keep_recent=8, sinks=2, margin=6)),
        ("falcon_h1", CachePolicy(budget=24, keep_recent=8, sinks=2, margin=6, bits=8, group_size=32, share="head")),
        ("mamba2", CachePolicy()),
        ("jamba", CachePolicy(budget=24, keep_recent=8, sinks=2, margin=6)),  # one row after the other
    ],
)
@pytest.mark.slow
def test_recurrent_layers_go_on_from_what_waits(
    family: str, policy: CachePolicy, costs: bool, whims: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was right waits, and is read with drafts, without, or by a step ahead; and budgets evict on time."""
    model = shared_family(family)
    prompts = [[token % FAMILY_VOCAB for token in prompt] for prompt in PROMPTS]
    rules: dict[str, Any] = {"prefill_step_size": 8, "max_batch_size": 3}
    wanted = gathered(batch_generate(model, None, prompts, policy, 40, **rules))
    drafter = Prophet({tuple(prompt): answer for prompt, answer in zip(prompts, wanted, strict=True)})
    drafter.proposals_cost = costs
    counts = SpeculationStatistics()
    rules |= {"drafter": drafter, "num_draft_tokens": 4, "statistics": counts}
    assert gathered(batch_generate(model, None, prompts, policy, 40, **rules)) == wanted
    assert counts.drafted > counts.accepted > 5


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.slow
def test_a_draft_model_that_was_not_asked_for_long(family: str, whims: set[int], monkeypatch: Any) -> None:
    model, draft = make_model(family), make_model(family)
    draft.update(model.parameters())  # so it is always right, if it has read what came meanwhile
    wanted = gathered(batch_generate(model, None, PROMPTS, None, 80, max_batch_size=3))
    turns = iter(range(10**6))
    monkeypatch.setattr(
        Whim, "choose", lambda self, most, waiting, proposed=None: min(most, 4) if next(turns) % 25 < 6 else 0
    )
    counts = SpeculationStatistics()
    options: dict[str, Any] = {"draft_model": draft, "num_draft_tokens": 4, "statistics": counts, "max_batch_size": 3}
    assert gathered(batch_generate(model, None, PROMPTS, None, 80, **options)) == wanted
    assert counts.accepted > 0.97 * counts.drafted > 0


@pytest.mark.parametrize("drafter", ["prophet", "model"])
@pytest.mark.slow
def test_caches_taken_at_any_time_go_on(drafter: str, whims: set[int]) -> None:
    """Also while a step is on its way, and when its tokens are known but not yet told."""
    model = make_model("llama")
    answers = gathered(batch_generate(model, None, PROMPTS, None, 60))
    known = prophet(answers) if drafter == "prophet" else (lambda context: ModelDrafter(context))
    options: dict[str, Any] = {"draft_model": make_model("llama", seed=3)} if drafter == "model" else {}
    engine = make_engine(model, set(), max_batch_size=3, drafter=known, num_draft_tokens=3, **options)
    for index, prompt in enumerate(PROMPTS):
        engine.submit(TokenSequence(index, prompt, 60))
    texts = [list(prompt) for prompt in PROMPTS]
    taken = 0
    while engine.busy:
        for token in engine.step():
            texts[token.index].append(token.token)
        for index in engine.rows:
            held = engine.extract(index)
            assert held is not None
            layers = len(model.layers)
            read = held[0].offset
            assert {cache.offset for cache in held} == {read}
            whole = [*PROMPTS[index], *answers[index]]
            if read >= len(whole):
                continue
            assert len(texts[index]) - 5 <= read <= len(texts[index]) + 1
            logits = model(mx.array([whole[read : read + 1]]), cache=held[:layers])
            fresh = model(mx.array([whole[: read + 1]]))
            assert mx.allclose(logits[:, -1], fresh[:, -1], atol=1e-4).item()
            taken += 1
    assert taken > 60


@pytest.mark.parametrize("sampler", [None, TemperatureSampler(0.8)], ids=["greedy", "sampled"])
@pytest.mark.slow
def test_rows_that_are_let_go_leave_the_others_what_is_on_its_way(
    sampler: TemperatureSampler | None, whims: set[int]
) -> None:
    model = make_model("llama")
    rules: dict[str, Any] = {"sampler": sampler, "seed": None if sampler is None else 7}
    wanted = gathered(batch_generate(model, None, PROMPTS, None, 60, max_batch_size=3, **rules))
    drafter = prophet(wanted)
    engine = make_engine(model, set(), max_batch_size=3, drafter=drafter, num_draft_tokens=3)
    for index, prompt in enumerate(PROMPTS):
        own = sampler_of_sequence(sampler, None if sampler is None else derived_seed(7, index), len(prompt))
        engine.submit(TokenSequence(index, prompt, 60, sampler=own))
    texts: list[list[int]] = [[] for _ in PROMPTS]
    while engine.busy:
        for token in engine.step():
            texts[token.index].append(token.token)
        for index in (0, 4):
            if len(texts[index]) >= 10 + index and index in engine.rows:
                engine.cancel(index)
                assert index not in engine.rows
    for index, text in enumerate(texts):
        assert text == wanted[index][: len(text)]
        assert len(text) == 60 or index in (0, 4)


# --- what is chosen ---------------------------------------------------------------------------------------------------


class Machine:
    """Rounds against a clock of its own: of one row, with drafts that are right with a chance, and passes of a cost."""

    def __init__(
        self,
        free: bool,
        most: int = 8,
        pass_cost: Callable[[int], float] = lambda n: 1 + 0.1 * (n - 1),
        replays: bool = False,
    ):
        self.pace, self.random, self.cost = Pace(most, free, replays=replays), random.Random(0), pass_cost
        self.pace.join(1)
        self.replays, self.waiting = replays, 0
        self.most, self.time, self.tokens = most, 0.0, 0
        self.lengths: list[int] = []
        self.load = 1.0  # how much longer everything takes, by the clock; what is judged here is without it

    def run(self, rounds: int, chance: float, draft_cost: float = 0.0) -> float:
        """Tokens for each unit of time, of which a token alone takes one."""
        time, tokens = self.time, self.tokens
        for _ in range(rounds):
            right = next((n for n in range(self.most) if self.random.random() >= chance), self.most)
            room, waiting = self.most if self.waiting <= self.most else 0, self.waiting
            length = self.pace.choose(room, waiting, [room] if self.pace.free else None)
            self.lengths.append(length)
            right = min(right, length) if length else right
            if length:
                self.pace.record_acceptance([length], [right])
            elif self.pace.free:
                said = [1] * self.most
                self.pace.add_unused([said])
                truth = [1] * right + [0]
                self.pace.match_unused([truth])
            got = 1 + (right if length else 0)
            self.waiting = waiting + got if self.replays and right < length else 0
            load = self.load
            self.pace.record_pass(length, waiting, load * self.cost(length + 1 + waiting), load * draft_cost * length)
            self.time += self.cost(length + 1 + waiting) + draft_cost * length
            self.tokens += got
        return (self.tokens - tokens) / (self.time - time)


@pytest.mark.parametrize("free", [True, False])
def test_text_that_can_be_guessed_and_then_cannot_and_then_can(free: bool) -> None:
    machine = Machine(free)
    draft_cost = 0.0 if free else 0.05
    machine.run(100, 0.95, draft_cost)
    assert machine.run(300, 0.95, draft_cost) > 3
    assert sum(machine.lengths[-100:]) > 600
    machine.run(100, 0.0, draft_cost)
    assert machine.run(2 * MAX_WAIT, 0.0, draft_cost) > 0.995, "what is off costs nothing"
    machine.run(MAX_WAIT + 100, 0.95, draft_cost)
    assert machine.run(300, 0.95, draft_cost) > 3


def test_passes_that_cost_as_much_as_their_tokens_are_not_drafted_for() -> None:
    machine = Machine(True, pass_cost=lambda n: float(n))
    machine.run(100, 0.6)
    assert machine.run(300, 0.6) > 0.99
    assert set(machine.lengths[-200:]) == {0}


def test_the_best_length_is_found() -> None:
    """With a chance of 0.7 and tokens at 0.2 each, two to four of eight are the best."""

    def speed(length: int) -> float:
        return sum(0.7**i for i in range(length + 1)) / (1 + 0.2 * length)

    best = max(range(9), key=speed)
    machine = Machine(True, pass_cost=lambda n: 1 + 0.2 * (n - 1))
    machine.run(300, 0.7)
    assert machine.run(1000, 0.7) > 0.95 * speed(best)


def test_what_is_to_be_read_again_counts() -> None:
    """Where a wrong token has all of its pass read again, drafts that would pay elsewhere are a loss."""

    def speed(chance: float, aware: bool) -> float:
        machine = Machine(True, pass_cost=lambda n: 1 + 0.3 * (n - 1), replays=True)
        machine.pace.replays = aware
        machine.run(300, chance)
        return machine.run(2000, chance)

    assert speed(0.7, aware=False) < 1 < speed(0.7, aware=True)
    assert speed(0.98, aware=True) > 2


def test_nothing_is_drafted_before_it_is_known_what_a_token_costs() -> None:
    machine = Machine(False)
    machine.run(20, 1.0)
    assert machine.lengths[:BASELINE_ROUNDS] == [0] * BASELINE_ROUNDS
    assert machine.lengths[BASELINE_ROUNDS] > 0


def test_rows_that_are_new_are_taken_for_what_is_known_of_others() -> None:
    """For some rounds; then it is measured what they cost without drafts. Many more rows are measured at once."""
    pace = Pace(8, free=True)
    pace.join(4)
    for _ in range(BASELINE_ROUNDS):
        assert pace.choose(8, 0, [8] * 4) == 0
        pace.record_pass(0, 0, 1.0)
    assert pace.choose(8, 0, [8] * 4) > 0
    pace.join(5)
    assert pace.choose(8, 0, [8] * 9) == 0, "more than twice as many"
    pace.keep(range(7))
    for _ in range(GUESSED_ROUNDS):
        length = pace.choose(8, 0, [8] * 7)
        assert length > 0
        assert pace.seconds_without(7) is not None
        pace.record_pass(length, 0, 1.5)
    assert pace.choose(8, 0, [8] * 7) == 0
    for _ in range(BASELINE_ROUNDS):
        pace.record_pass(0, 0, 1.0)
    assert pace.choose(8, 0, [8] * 7) > 0


@pytest.mark.parametrize("busy_first", [True, False])
@pytest.mark.parametrize(("more", "pays"), [(1.0, False), (0.1, True)])
def test_a_machine_that_is_busy_for_a_while_changes_nothing(busy_first: bool, more: float, pays: bool) -> None:
    """All passes take three times as long, for some seconds again and again: passes with drafts as those without."""
    machine = Machine(True, pass_cost=lambda n: 1 + more * (n - 1))
    machine.load = 3.0 if busy_first else 1.0
    machine.run(BASELINE_ROUNDS, 0.9)  # all that is known at first of rounds without drafts
    speeds = []
    for turn in range(40):
        machine.load = 1.0 if (turn % 2 == 0) == busy_first else 3.0
        speeds.append(machine.run(40, 0.5 if not pays else 0.9))
    alike = Machine(True, pass_cost=lambda n: 1 + more * (n - 1))
    usual = alike.run(1000, 0.5 if not pays else 0.9)
    assert sum(speeds[4:]) / 36 > 0.95 * usual
    assert (usual > 2) == pays


def test_places_are_told_apart() -> None:
    """The first token is right half of the time, and those after a right one always."""
    seen = Acceptance(4)
    for turn in range(400):
        seen.record(4, 4 * (turn % 2))
    first, *others = seen.chances()
    assert abs(first - 0.5) < 0.05
    assert min(others) > 0.85  # the guess for the second is the first's chance, which counts for some tokens
    assert Acceptance(4).chances(prior=[0.1, 0.2, 0.3, 0.4]) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_costs_are_worked_out_of_what_was_seen() -> None:
    costs = Costs()
    assert costs.of(1, 4) > costs.of(1, 1) > 0
    costs.record(1, 5, 4.0)
    for seconds in (2.0, 2.0, 90.0):
        costs.record(1, 1, seconds)
    assert [costs.of(1, n) for n in (1, 2, 3, 5)] == [2.0, 2.5, 3.0, 4.0]
    assert 4.0 < costs.of(1, 9) < 8.0
    assert costs.passes(1, 1) == 3
    assert costs.passes(2, 1) == 0
    assert costs.of(2, 5) / costs.of(2, 1) == 2.0, "rows that are new have the proportions of others"
    costs.record(2, 5, 12.0 * costs.load)
    assert [costs.of(2, n) for n in (1, 3, 5)] == pytest.approx([6.0, 9.0, 12.0])


def test_a_busy_machine_is_told_from_passes_that_cost_more() -> None:
    costs = Costs()
    for _ in range(5):
        costs.record(1, 1, 1.0)
    for _ in range(20):
        costs.record(1, 1, 3.0)
    assert costs.load > 2.4, "the rest is taken for what passes cost"
    for _ in range(8):
        costs.record(1, 5, 6.0)  # the first of its size, on a busy machine
    assert costs.of(1, 5) / costs.of(1, 1) == pytest.approx(2.0, rel=0.1)
    for _ in range(20):
        costs.record(1, 5, 2.0)  # not busy any more, and nothing of one token is seen
    assert costs.of(1, 1) * costs.load == pytest.approx(1.0, rel=0.15)
    assert costs.of(1, 5) / costs.of(1, 1) == pytest.approx(2.0, rel=0.15)


def test_a_length_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of chosen, fixed"):
        DraftSettings("suffix", draft_length="long")  # type: ignore[arg-type]
