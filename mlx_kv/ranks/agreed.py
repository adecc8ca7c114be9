"""How ranks agree while they generate: tokens in the passes of the model, all else over the link.

Decides that no pass has more than one collective beside the model's own, and what is said when ranks no longer do the
same. Knows nothing about prompts, caches or drafts. B rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.eviction.peers import Peers
from mlx_kv.ranks.link import Follower, Leader, RanksError
from mlx_kv.ranks.peers import peers_of

T = TypeVar("T")


class Joined(Protocol):
    """Ranks that have found each other, as far as they must to agree.

    Attributes:
        link: of this rank.
        raw: for collectives.
    """

    def gathered(self, value: Any) -> list[Any]:
        """What each rank has called this with."""
        ...

    def watch(self) -> contextlib.AbstractContextManager[None]:
        """For the time of a step."""
        ...

    def progress(self) -> None:
        """A part of the step is done."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def link(self) -> Leader | Follower: ...

    @property
    def raw(self) -> mx.distributed.Group: ...


class Agreed:
    """An `Agreement` of the ranks of a group."""

    def __init__(self, group: Joined) -> None:
        self._group = group
        self.leads = isinstance(group.link, Leader)

    def peers(self, model: nn.Module) -> Peers:
        return peers_of(model)

    def tokens(self, own: mx.array) -> mx.array:
        # Zeros that follow from the logits: so the collective comes after all that the model sends, on every rank.
        own = own.astype(mx.uint32)
        return mx.distributed.all_sum(own if self.leads else own * 0, group=self._group.raw)

    def told(self, say: Callable[[], T]) -> T:
        link = self._group.link
        if isinstance(link, Leader):
            try:
                said = say()
                link.tell("told", said)
            except RanksError:
                raise
            except Exception as error:  # of a drafter, or of whatever else is the leader's alone
                link.tell("refused", str(error) or type(error).__name__)
                raise
            return said
        kind, content = self._next("told", "refused")
        if kind == "refused":
            raise ValueError(content)
        told: T = content
        return told

    def least(self, own: Sequence[int]) -> list[int]:
        every = self._group.gathered([int(number) for number in own])
        if len({len(numbers) for numbers in every}) > 1:
            self.part("it was asked something else than others")
        return [min(numbers) for numbers in zip(*every, strict=True)]

    def goes_on(self, seen: int) -> bool:
        link = self._group.link
        if isinstance(link, Leader):
            link.tell("on", seen)
            return True
        kind, content = self._next("on", "end")
        if kind == "on" and content != seen:
            self.part("it has generated other tokens than the leader")
        return bool(kind == "on")

    def ends(self) -> None:
        link = self._group.link
        assert isinstance(link, Leader)
        link.tell("end", None)

    def watch(self) -> contextlib.AbstractContextManager[None]:
        return self._group.watch()

    def progress(self) -> None:
        self._group.progress()

    def part(self, why: str) -> NoReturn:
        """Ranks that no longer do the same end: each collective would meet another one's."""
        reason = f"rank {self._group.rank} is out of step: {why}"
        self._group.link.break_up(reason)
        raise RanksError(reason)

    def _next(self, *kinds: str) -> list[Any]:
        link = self._group.link
        assert isinstance(link, Follower)
        message = link.next()
        if message is None:
            raise RanksError("the leader has ended")
        if message[0] not in kinds:
            self.part(f"the leader says {message[0]!r} where it waits for {' or '.join(map(repr, kinds))}")
        return message
