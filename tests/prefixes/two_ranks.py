"""Two ranks in one process, with a link that does at once what is told: the first has the first layer."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_kv import PromptMemory, PromptStore
from mlx_kv.communicator import LOCAL
from mlx_kv.prefixes.rank_shards import RankShards, ShardFollower
from mlx_kv.ranks.engine import CacheNumbers


class Link:
    """Between two ranks of one process: what is told is done at once.

    Attributes:
        stopped: kinds of messages that the other rank never hears.
    """

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[..., object]] = {}
        self.stopped: set[str] = set()
        self._answers: deque[Any] = deque()
        self.answer: Callable[[Any], None] = self._answers.append

    def tell(self, kind: str, *content: Any) -> None:
        if kind not in self.stopped:
            self.handlers[kind](*json.loads(json.dumps(content)))

    def answers(self) -> list[Any]:
        return [json.loads(json.dumps(self._answers.popleft()))]

    def listen(self, heard: Callable[[Any], None]) -> None:
        self.report = heard


class TwoRanks:
    """The first has the first layer, the second the other one.

    Attributes:
        theirs: the second rank's caches, by their numbers.
    """

    def __init__(self) -> None:
        self.link: Any = Link()
        group: Any = SimpleNamespace(size=2, split="layers", leader=self.link, follower=self.link, rank=1)
        self.numbers = CacheNumbers(self.link)
        self.theirs: dict[int, list[Any]] = {}
        self.keeper = ShardFollower(group, LOCAL, lambda: "the second layer", self.theirs)
        self.link.handlers = {**self.keeper.handlers, "drop": self._drop, "copy": lambda *numbers: None}
        self.parts = RankShards(group, LOCAL, lambda: self.numbers)

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self.theirs.pop(number, None)

    def named(self, caches: list[Any]) -> Any:
        own = self.numbers.named(caches[:1])
        self.theirs[own.number] = caches[1:]
        return own

    def whole(self, own: Any) -> list[Any]:
        return [*own, *self.theirs[own.number]]

    def memory(self, most: int = 2**30) -> PromptMemory:
        return PromptMemory(most, "a", self.parts)

    def store(self, path: Path | str, **options: Any) -> PromptStore:
        return PromptStore(path, parts=self.parts, **{"fingerprint": "a", **options})


def keep(ranks: TwoRanks, place: Any, tokens: list[int], caches: list[Any]) -> bool:
    return bool(place.keep(tokens, ranks.named(copy.deepcopy(caches))))


def settled(ranks: TwoRanks) -> None:
    """When the other rank has done all that it was told."""
    ranks.keeper._disk.submit(int).result()
