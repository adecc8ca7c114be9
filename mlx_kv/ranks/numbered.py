"""Caches of which every rank has its part, known by numbers: what the leader does with its own, the others do, too.

Decides the numbers, and when it is told what nobody holds any more: with the next thing that is told, or when the
leader has nothing to do, since a destructor runs at any time, also between a question and its answer. Knows nothing
about engines.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Any, Self

from mlx_kv.ranks.link import Leader


class Numbers:
    """The leader's list of caches that all ranks have, and what it tells of them."""

    def __init__(self, link: Leader) -> None:
        self._link = link
        self._numbers = count(1)
        self._dropped: deque[int] = deque()

    def tell(self, *message: Any) -> None:
        """All others do this; first they let go of caches that nobody holds here."""
        self.tell_dropped()
        self._link.tell(*message)

    def tell_dropped(self) -> None:
        """The others let go of caches that nobody holds here; for whoever has nothing else to tell for a while."""
        gone = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if gone:
            self._link.tell("drop", gone)

    def named(self, caches: Iterable[Any]) -> RankCaches:
        """Caches of this rank under a new number, which the others are yet to be told."""
        return RankCaches(caches, next(self._numbers), self)

    def of(self, caches: object) -> int:
        """The number of caches that have one.

        Raises:
            ValueError: they are of this rank alone, or of an engine that is gone.
        """
        if isinstance(caches, RankCaches) and caches.numbers is self:
            return caches.number
        raise ValueError("these caches are of one rank alone: take those of this engine's make_caches")

    def drop(self, number: int) -> None:
        """Nobody here holds them any longer."""
        self._dropped.append(number)


class RankCaches(list[Any]):
    """The leader's part of the caches of a sequence. A copy of it is a copy of every rank's part.

    Attributes:
        number: by which all ranks know them.
        numbers: where it is from.
    """

    def __init__(self, caches: Iterable[Any], number: int, numbers: Numbers) -> None:
        super().__init__(caches)
        self.number, self.numbers = number, numbers

    def __deepcopy__(self, memo: dict[int, Any]) -> Self | RankCaches:
        copied = self.numbers.named(copy.deepcopy(list(self), memo))
        self.numbers.tell("copy", self.number, copied.number)
        return copied

    def __del__(self) -> None:
        self.numbers.drop(self.number)
