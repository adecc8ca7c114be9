"""What generation loops send to other processes, seen in one process."""

from __future__ import annotations

import json
import random
from typing import Any

import mlx.core as mx
import pytest
from calibrations import random_calibration
from engines import make_engine
from tiny_models import VOCAB, make_model

from mlx_kv import CachePolicy, TemperatureSampler
from mlx_kv.communicator import LOCAL, Communicator, LocalCommunicator
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.generation.decode_batch import make_distributed_caches
from mlx_kv.generation.sampling import SeededSampler
from mlx_kv.generation.sequence import TokenSequence

PROMPT = mx.random.randint(1, VOCAB, (60,), key=mx.random.key(1)).tolist()


class Witness(LocalCommunicator):
    """One of several processes that is alone, and counts its collectives."""

    distributed = True

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []  # the shapes of tokens

    def all_reduce_sum(self, x: mx.array) -> mx.array:
        self.asked.append(x.shape)
        return x


@pytest.mark.parametrize("settings", [{}, {"drafter": "suffix", "num_draft_tokens": 3}], ids=["plain", "suffix"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_with_samplers_of_their_own_agree_in_one_collective_a_pass(settings: dict[str, Any], seed: int) -> None:
    def lived(communicator: Communicator) -> tuple[dict[int, list[int]], int]:
        engine = make_engine(make_model("llama"), set(), None, 4, 8, communicator=communicator, **settings)
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
    wanted, _ = lived(LOCAL)
    got, steps = lived(witness)
    assert got == wanted
    # Rows that begin to decode have a pass of their own, in a step in which the others have theirs.
    assert len(witness.asked) <= 2 * steps
    assert max(shape[0] for shape in witness.asked) > 1


class Leads(LocalCommunicator):
    """Keeps what it sent, as the link sends it."""

    distributed = True

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def broadcast(self, make: Any) -> Any:
        self.sent.append(json.loads(json.dumps(make())))
        return self.sent[-1]


class Follows(LocalCommunicator):
    leads, distributed = False, True

    def __init__(self, leader: Leads) -> None:
        self._leader = leader

    def broadcast(self, make: Any) -> Any:
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
