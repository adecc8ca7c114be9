"""Prompts that ranks keep: what a server does with them, without HTTP, by one process and by several ranks.

A case is a place and a policy; what comes of it are the tokens of each answer and how many tokens of its prompt had
been read before, which must be the same for all numbers of ranks.
"""

from __future__ import annotations

import mlx_kv  # noqa: F401  it loads a tuned BLAS before MLX

# isort: split
import contextlib
import hashlib
import json
import queue
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "mlxlm"))

import mlx.nn as nn
from families import make_family

from mlx_kv import CachePolicy, PromptMemory, PromptStore
from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.files.fingerprint import model_fingerprint
from mlx_kv.generation.engine import Engine, make_engine
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.prefixes.rank_shards import RankShards, ShardFollower
from mlx_kv.prefixes.reader import PromptReader
from mlx_kv.ranks.engine import follow, lead
from mlx_kv.ranks.splitting import split_model
from mlx_kv.server.tiered_prefixes import TieredPrefixes

VOCAB, STEP, ANSWER = 96, 32, 6
LITTLE = 400_000  # bytes
TEXT = [(7 * i * i + 3 * i) % 90 for i in range(400)]
PROMPTS = [
    TEXT[:150],
    [*TEXT[:130], *TEXT[200:240]],
    TEXT[:150],
    [*TEXT[:100], *TEXT[300:380]],
    TEXT[200:330],
    [*TEXT[:130], *TEXT[200:240], *TEXT[90:150]],
]
POLICIES = {
    "plain": CachePolicy(),
    "8 bits": CachePolicy(bits=8, group_size=32),
    "the newest as they came": CachePolicy(bits=8, group_size=32, residual_length=8),
    "ring": CachePolicy(max_kv_size=64, max_write=STEP),
    "budget": CachePolicy(budget=96, keep_recent=8, margin=8, sinks=2),
}


class Run:
    """A model, or the part of it that this rank has, as a server has it."""

    def __init__(self, model: nn.Module, policy: CachePolicy, group: Any) -> None:
        self.model, self.policy, self.group = model, policy, group
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.engine: Any = None
        if group is None or group.leads:
            self.engine = self.make() if group is None else lead(self.make, group)

    def make(self, communicator: Communicator = LOCAL) -> Engine:
        return make_engine(self.model, {VOCAB}, self.policy, 2, STEP, return_caches=True, communicator=communicator)

    def parts(self) -> Any:
        return (
            None
            if self.group is None
            else RankShards(self.group, self.group.for_caches(self.model), lambda: self.engine.numbers, self.inbox.put)
        )

    def whose(self) -> str:
        return model_fingerprint(self.model) + repr(self.policy)

    def until(self, done: Callable[[], bool]) -> None:
        """Does what is asked of this thread meanwhile."""
        while not done():
            self.inbox.get(timeout=30)()

    def answers(self, prefixes: TieredPrefixes, prompts: list[list[int]]) -> list[Any]:
        told = []
        for number, tokens in enumerate(prompts):
            if prefixes.on_disk(tokens):
                arrived: list[bool] = []
                prefixes.fetch(tokens, partial(arrived.append, True))
                self.until(lambda arrived=arrived: bool(arrived))  # type: ignore[misc]
            reader = PromptReader(self.engine.read, self.engine.make_caches(), tokens, prefixes, STEP)
            caches = reader.finish()
            rest, before = tokens[reader.read :], tokens[: reader.read]
            self.engine.submit(TokenSequence(number, rest, ANSWER, caches=caches, before=before))
            del caches
            answer: list[int] = []
            while self.engine.busy:
                for token in self.engine.step():
                    answer.append(token.token)
                    if token.finish_reason is not None:
                        known = [*tokens, *answer]
                        read = max(int(cache.offset) for cache in token.caches)
                        if self.engine.trim(token.caches, max(0, read - len(known))):
                            prefixes.keep(known[:read], token.caches)
            self.until(lambda: prefixes._pending == 0)
            told.append([reader.reused, answer])
        return told


def case(run: Run, place: str, folder: str) -> list[Any]:
    """Where there is a store, twice the same prompts; between, the server is started anew."""
    told = []
    for _ in range(2 if "store" in place else 1):
        most = {"memory": 2**28, "little memory": LITTLE}.get(place, 0)
        memory = PromptMemory(most, parts=run.parts())
        store = None
        if place in ("store", "little store"):
            own = Path(folder) / hashlib.blake2b(f"{place} {run.policy}".encode()).hexdigest()[:8]
            store = PromptStore(own, 2**28 if place == "store" else LITTLE, parts=run.parts())
        prefixes = TieredPrefixes(memory, store, run.inbox.put, run.whose)
        told.append(run.answers(prefixes, PROMPTS))
        assert memory.nbytes <= most
        if store is not None:
            assert (store.damaged, store.unanswered) == (0, 0)
        prefixes.close()
    return told


CASES = [*((place, name) for place in ("memory", "store") for name in POLICIES), ("little memory", "plain")]
CASES += [("little store", "plain")]


def alone(family: str, folder: str) -> dict[str, Any]:
    model = make_family(family)
    runs = {name: Run(model, policy, None) for name, policy in POLICIES.items()}
    return {f"{place}, {name}": case(runs[name], place, folder) for place, name in CASES}


def ranked(family: str, split: str, folder: str) -> None:
    """Runs all cases on this rank; the leader writes down what came of each."""
    from mlx_kv.ranks.group import join_ranks

    group = join_ranks(split)  # type: ignore[arg-type]
    assert group is not None
    with group:
        model = make_family(family)
        split_model(model, group)
        for name, policy in POLICIES.items():
            if not group.leads:
                follow_one(Run(model, policy, group))
                continue
            run = Run(model, policy, group)
            for place in [place for place, policies in CASES if policies == name]:
                print(json.dumps([f"{place}, {name}", case(run, place, folder)]), flush=True)
            group.leader.tell("next")


def opening(family: str, folder: str) -> None:
    """Opens a store on all ranks."""
    from mlx_kv.ranks.group import join_ranks

    group = join_ranks("layers")
    assert group is not None
    with group:
        model = make_family(family)
        split_model(model, group)
        run = Run(model, CachePolicy(), group)
        if group.leads:
            PromptStore(folder, parts=run.parts())
        else:
            follow_one(run)


class NextCaseError(Exception):
    """The leader goes on with another policy."""


def follow_one(run: Run) -> None:
    """As a rank that follows, until the leader goes on."""

    def end() -> None:
        raise NextCaseError

    def more(caches: Any) -> dict[str, Any]:
        follower = ShardFollower(run.group, run.group.for_caches(run.model), run.whose, caches)
        return {**follower.handlers, "next": end}

    with contextlib.suppress(NextCaseError):
        follow(run.make, run.group, more)


if __name__ == "__main__":
    print(json.dumps(alone(*sys.argv[1:3])))
