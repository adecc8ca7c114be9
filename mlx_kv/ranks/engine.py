"""The leader's engine: each call is told to the other ranks, and then done, as they do it.

Decides what is told, and in which order with what is done: first where ranks must speak to each other meanwhile, last
where the leader may refuse. Knows nothing about requests or files; what the others make of it is in `following`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.sequence import BatchToken, SequenceProgress, TokenSequence
from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.mlxlm.traverse import can_trim
from mlx_kv.ranks.communicator import checksum
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.numbered import Numbers, RankCaches

MakeEngine = Callable[[Communicator], Engine]
FAILED = -1  # no checksum of tokens: a step that raised


def lead(make_engine: MakeEngine, group: RankGroup | None) -> Engine:
    """An engine on all ranks; the others make one like it, and let go of the one that they had. None is alone."""
    if group is None:
        return make_engine(LOCAL)
    group.leader.tell("engine")
    with group.watch("beginning"):
        return LedEngine(make_engine(group), group)


class LedEngine:
    """An `Engine` whose steps all ranks take, each with its part of the model. Its caches are `RankCaches`.

    Attributes:
        numbers: of caches, for others who keep some of all ranks.
    """

    def __init__(self, engine: Engine, group: RankGroup) -> None:
        self._engine, self._group = engine, group
        self.numbers = Numbers(group.leader)
        self._seen = 0

    def submit(self, sequence: TokenSequence) -> None:
        held = sequence.caches
        number = None if held is None else self.numbers.of(held)
        sequence.caches = None if held is None else list(held)
        self._engine.submit(sequence)  # it may refuse
        told = sequence.index, list(sequence.tokens), sequence.max_tokens, number, len(sequence.before)
        self.numbers.tell("submit", *told)

    def cancel(self, index: int) -> None:
        self.numbers.tell("cancel", index)
        self._engine.cancel(index)

    def step(self) -> list[BatchToken]:
        self.numbers.tell("step", standing(self._engine, self._seen))
        self._seen = FAILED
        with self._group.watch():
            tokens = self._engine.step()
        self._seen = seen_of(tokens)
        held = [(token.index, self.numbers.named(token.caches)) for token in tokens if token.caches is not None]
        if held:
            self.numbers.tell("held", [[index, caches.number] for index, caches in held])
        by_index: dict[int, list[Any]] = dict(held)
        return [token if token.caches is None else replace(token, caches=by_index[token.index]) for token in tokens]

    @property
    def busy(self) -> bool:
        return self._engine.busy

    @property
    def caches(self) -> list[Any]:
        return self._engine.caches

    @property
    def step_size(self) -> int:
        return self._engine.step_size

    @property
    def rows(self) -> list[int]:
        return self._engine.rows

    @property
    def pending(self) -> list[int]:
        return self._engine.pending

    @property
    def progress(self) -> dict[int, SequenceProgress]:
        return self._engine.progress

    @property
    def speculation(self) -> SpeculationStatistics | None:
        return self._engine.speculation

    def make_caches(self) -> list[Any]:
        made = self.numbers.named(self._engine.make_caches())
        self.numbers.tell("make", made.number)
        return made

    def read(self, tokens: mx.array, cache: list[Any]) -> Any:
        self.numbers.tell("read", self.numbers.of(cache), tokens.tolist())
        with self._group.watch("reading"), mx.stream(generation_stream):
            return self._engine.read(tokens, list(cache))

    def trim(self, caches: list[Any], n: int) -> bool:
        self.numbers.tell("trim", self.numbers.of(caches), n)
        with self._group.watch():
            return trim_everywhere(self._group, self._engine, caches, n)

    def extract(self, index: int) -> list[Any] | None:
        extracted = self.numbers.named([])
        self.numbers.tell("extract", index, extracted.number)
        with self._group.watch():
            found = self._engine.extract(index)
        extracted += found or []
        return None if found is None else extracted

    def close(self) -> None:
        self.numbers.tell("close")
        self._engine.close()


def trim_everywhere(communicator: Communicator, engine: Engine, caches: list[Any], n: int) -> bool:
    """Trims the caches of all ranks, or of none."""
    (everywhere,) = communicator.all_min([int(n == 0 or can_trim(caches, n))])
    return bool(everywhere) and engine.trim(caches, n)


def standing(engine: Engine, seen: int) -> int:
    """What must be the same on all ranks before a step: what came of the last one, and who is there."""
    return checksum([seen, engine.rows, engine.pending])


def seen_of(tokens: Iterable[BatchToken]) -> int:
    """What of a step must be the same on all ranks."""
    return checksum([(token.index, token.token, token.finish_reason, token.caches is not None) for token in tokens])


__all__ = ["FAILED", "LedEngine", "MakeEngine", "RankCaches", "lead", "seen_of", "standing", "trim_everywhere"]
