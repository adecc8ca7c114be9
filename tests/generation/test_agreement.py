"""How often ranks agree, in which order, and that what they agree on stays what it is: seen in one process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from calibrations import random_calibration
from tiny_models import VOCAB, make_model

from mlx_kv import CachePolicy, TemperatureSampler
from mlx_kv.files.fingerprint import model_fingerprint
from mlx_kv.generation.agreement import ALONE, Agreement, Alone, in_step
from mlx_kv.generation.distributed_caches import make_distributed_caches
from mlx_kv.generation.engine import make_engine
from mlx_kv.generation.sampling import SeededSampler
from mlx_kv.generation.sequence import TokenSequence

PROMPT = mx.random.randint(1, VOCAB, (60,), key=mx.random.key(1)).tolist()


class Witness(Alone):
    """Agrees with itself, and counts how often."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []  # the shapes of tokens

    def tokens(self, own: mx.array) -> mx.array:
        self.asked.append(own.shape)
        return own


@pytest.mark.parametrize("settings", [{}, {"drafter": "suffix", "num_draft_tokens": 3}], ids=["plain", "suffix"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_with_samplers_of_their_own_agree_in_one_collective_a_pass(settings: dict[str, Any], seed: int) -> None:
    def lived(agreement: Agreement) -> tuple[dict[int, list[int]], int]:
        engine = make_engine(make_model("llama"), set(), None, 4, 8, agreement=agreement, **settings)
        chance, told, steps = random.Random(seed), dict[int, list[int]](), 0
        for index in range(12):
            prompt = PROMPT[index : index + chance.choice((1, 4, 9, 30))]
            rules = TemperatureSampler(chance.choice((0.5, 1.5)))
            sampler = SeededSampler(rules, index, len(prompt)) if chance.random() < 0.6 else None
            engine.submit(TokenSequence(index, prompt, chance.randint(1, 12), sampler=sampler))
            if chance.random() < 0.3:
                engine.cancel(chance.randrange(index + 1))
            for _ in range(chance.randint(0, 3) if index < 11 else 99):
                steps += engine.busy
                for token in engine.step():
                    told.setdefault(token.index, []).append(token.token)
        assert not engine.busy
        return told, steps

    witness = Witness()
    wanted, _ = lived(ALONE)
    got, steps = lived(witness)
    assert got == wanted
    # Rows that begin to decode have a pass of their own, in a step in which the others have theirs.
    assert len(witness.asked) <= 2 * steps
    assert max(shape[0] for shape in witness.asked) > 1


def rounds(count: int, closed: list[bool]) -> Iterator[int]:
    try:
        yield from range(count)
    finally:
        closed.append(True)


class Words(Alone):
    """A rank that writes down what is said, or follows what was written."""

    def __init__(self, said: list[Any], leads: bool) -> None:
        self.said, self.leads = said, leads

    def goes_on(self, seen: int) -> bool:
        if self.leads:
            self.said.append(seen)
            return True
        word = self.said.pop(0)
        assert word in ("end", seen)
        return word != "end"

    def ends(self) -> None:
        self.said.append("end")


@pytest.mark.parametrize(("leaders", "others"), [(9, 9), (3, 9), (3, 1), (9, 1), (1, 1), (5, 5)])
def test_all_ranks_go_as_many_rounds_as_the_leader_asks_for(leaders: int, others: int) -> None:
    said: list[Any] = []
    taken, closed = [], list[bool]()
    for leads, wanted in ((True, leaders), (False, others)):
        done: list[int] = []
        agreed = in_step(Words(said, leads), counted(rounds(5, closed), done), lambda given: given)
        for number, _ in enumerate(agreed, 1):
            if number == wanted:
                break
        agreed.close()
        taken.append(done)
    assert said == []
    assert taken[0] == taken[1] == list(range(min(5, leaders)))
    assert closed == [True, True]


def counted(given: Iterator[int], done: list[int]) -> Any:
    for each in given:
        done.append(each)
        yield each


def test_a_rank_that_has_seen_other_tokens_is_found_out() -> None:
    said: list[Any] = []
    list(in_step(Words(said, True), counted(iter((1, 2, 3)), []), lambda given: given))
    with pytest.raises(AssertionError):
        list(in_step(Words(said, False), counted(iter((1, 5, 3)), []), lambda given: given))


class Leads(Alone):
    """Keeps what it sent, as the link sends it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def told(self, say: Any) -> Any:
        self.sent.append(json.loads(json.dumps(say())))
        return self.sent[-1]


class Follows(Alone):
    leads = False

    def __init__(self, leader: Leads) -> None:
        self._leader = leader

    def told(self, say: Any) -> Any:
        return self._leader.sent[-1]


def test_another_policy_than_the_leaders_is_refused() -> None:
    model, leader = make_model("llama"), Leads()
    follower = Follows(leader)
    pairs = CachePolicy(bits=(8, 4), group_size=32)
    make_distributed_caches(model, pairs, leader)
    assert make_distributed_caches(model, pairs, follower)
    for bits in ((4, 8), (8, None), 8, None):
        with pytest.raises(ValueError, match=r"the leader's policy has bits=\[8, 4\], that of this rank bits="):
            make_distributed_caches(model, CachePolicy(bits=bits, group_size=32), follower)
    budget = CachePolicy(budget=80, share="layer")
    make_distributed_caches(model, budget, leader)
    assert make_distributed_caches(model, budget, follower)
    for other, theirs, here in (
        (CachePolicy(), "budget=80, keep_recent=20, share='layer'", "budget=None, keep_recent=64, share='layers'"),
        (CachePolicy(budget=81, share="layer"), "budget=80", "budget=81"),
        (CachePolicy(budget=80), "share='layer'", "share='layers'"),
    ):
        with pytest.raises(ValueError, match=f"^the leader's policy has {theirs}, that of this rank {here}: give all"):
            make_distributed_caches(model, other, follower)


def test_another_table_than_the_leaders_is_refused() -> None:
    leader = Leads()
    follower = Follows(leader)
    model = make_model("llama")
    tables = [((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)), ((2.0, 1.0), (3.0, 4.0), (5.0, 6.0))]
    policies = [CachePolicy(budget=80, layers=table) for table in tables]
    make_distributed_caches(model, policies[0], leader)
    assert make_distributed_caches(model, policies[0], follower)
    with pytest.raises(
        ValueError, match=r"the leader's policy has .*layers='table [0-9a-f]{12}'.*give all ranks the same"
    ):
        make_distributed_caches(model, policies[1], follower)
    measured = [random_calibration(2, 32, 3, fingerprint=model_fingerprint(model), seed=10 * seed) for seed in (0, 1)]
    calibrated = [CachePolicy(budget=80, calibration=own, score="fitted") for own in measured]
    make_distributed_caches(model, calibrated[0], leader)
    assert make_distributed_caches(model, calibrated[0], follower)
    with pytest.raises(ValueError, match=f"calibration='{measured[0].name}'"):
        make_distributed_caches(model, calibrated[1], follower)
