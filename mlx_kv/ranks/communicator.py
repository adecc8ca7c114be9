"""Communication between ranks: tokens and scores by MLX's collectives, all else over the link.

A pass of the model has at most one collective besides the model's own.
B rows, H KV heads of one rank, n tokens, L layers of one rank, R ranks.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.communicator import LOCAL, CacheCommunicator, Communicator, Steps
from mlx_kv.ranks.link import Follower, Leader, RanksError
from mlx_kv.ranks.splitting import all_gather, part_of

T = TypeVar("T")


class RankCommunicator(Communicator):
    """The `Communicator` of several ranks, seen from one of them.

    Args:
        raw: MLX's own group, for collectives.
        link: of this rank.

    Attributes:
        rank: the number of this rank; 0 is the leader.
    """

    def __init__(self, raw: mx.distributed.Group, link: Leader | Follower) -> None:
        self.raw, self.link, self.rank = raw, link, raw.rank()

    @property
    def distributed(self) -> bool:
        return True

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @abstractmethod
    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks."""

    @abstractmethod
    def watch(self, step: str = "a step") -> contextlib.AbstractContextManager[None]:
        """For the time of a step: if it takes far longer than those before it, all ranks end."""

    def for_caches(self, model: nn.Module) -> CacheCommunicator:
        return cache_communicator_of(model)

    def broadcast(self, make: Callable[[], T]) -> T:
        if isinstance(self.link, Leader):
            try:
                value = make()
                self.link.tell("value", value)
            except RanksError:
                raise
            except Exception as error:  # of a drafter, or of anything else that the leader alone has
                self.link.tell("refused", str(error) or type(error).__name__)
                raise
            return value
        kind, content = self._next("value", "refused")
        if kind == "refused":
            raise ValueError(content)
        received: T = content
        return received

    def all_min(self, values: Sequence[int]) -> list[int]:
        every = self.gathered([int(value) for value in values])
        if len({len(each) for each in every}) > 1:
            self.abort("it was asked something else than others")
        return [min(each) for each in zip(*every, strict=True)]

    def all_reduce_sum(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(x, group=self.raw)

    def sync_steps(self, steps: Steps[T], key: Callable[[T], object]) -> Steps[T]:
        seen = 0
        while True:
            if not self._begins(seen):
                return
            try:
                with self.watch():
                    result = next(steps)
            except StopIteration:  # on all ranks at once
                return
            seen = checksum(key(result))
            try:
                yield result
            except GeneratorExit:
                if self.leads:
                    self._end()
                while not self.leads and self._begins(seen) and (more := next(steps, None)) is not None:
                    seen = checksum(key(more))
                raise

    def _begins(self, seen: int) -> bool:
        """Whether all ranks take another step: the leader does so by calling this.

        Args:
            seen: a checksum of the last step's result, which must be the leader's.
        """
        if isinstance(self.link, Leader):
            self.link.tell("on", seen)
            return True
        kind, content = self._next("on", "end")
        if kind == "on" and content != seen:
            self.abort("it has generated other tokens than the leader")
        return bool(kind == "on")

    def _end(self) -> None:
        """On the leader: no rank takes another step."""
        assert isinstance(self.link, Leader)
        self.link.tell("end", None)

    def abort(self, why: str) -> NoReturn:
        """Ends all ranks, since this one no longer does what the leader does: collectives would not match."""
        reason = f"rank {self.rank} is out of step: {why}"
        self.link.break_up(reason)
        raise RanksError(reason)

    def _next(self, *kinds: str) -> list[Any]:
        assert isinstance(self.link, Follower)
        message = self.link.next()
        if message is None:
            raise RanksError("the leader has ended")
        if message[0] not in kinds:
            self.abort(f"the leader says {message[0]!r} where it waits for {' or '.join(map(repr, kinds))}")
        return message


def checksum(value: object) -> int:
    """Of plain values, the same in every process."""
    return zlib.crc32(repr(value).encode())


# --- scores of a budget -----------------------------------------------------------------------------------------------


def cache_communicator_of(model: nn.Module) -> CacheCommunicator:
    """The communicator for the caches of a model: local where this process has the whole of it."""
    part = part_of(model)
    if part is None:
        return LOCAL
    return SplitHeads(part.raw, part.copies) if part.split == "heads" else SplitLayers(part.raw, part.full_layers)


class SplitHeads(CacheCommunicator):
    """Ranks that each have some heads of every layer.

    Scores are gathered and then added up as one process would: of sums made by each rank, the last bit would depend on
    the order of additions.

    Args:
        group: the ranks.
        copies: whether each of them has all heads of which keys and values are kept. All then use those of the first
            rank: the others' need not be equal to the last bit.
    """

    def __init__(self, group: mx.distributed.Group, copies: bool) -> None:
        self._group, self._copies = group, copies
        split = "heads are split over ranks, and"
        if not copies:  # other heads' tokens lie in other slots
            self.unsupported = {
                (
                    "score",
                    "fitted",
                ): f"{split} {{score:='fitted'}} reads the keys and values of all of them: use another "
                "score, such as 'key_diff', or {split:='layers'}",
                (
                    "share",
                    "adaptive",
                ): f"{split} {{share:='adaptive'}} compares the tokens of all of them: use {{share:='head'}}",
            }

    def first_head(self, heads: int) -> int:
        return 0 if self._copies else self._group.rank() * heads

    def total_heads(self, heads: int) -> int:
        return heads if self._copies else self._group.size() * heads

    def needs_all_heads(self, scope: str) -> bool:
        return self._copies or scope != "head"

    def gather_heads(self, scores: Sequence[mx.array]) -> list[mx.array]:
        flat = mx.concatenate([each.reshape(-1) for each in scores])
        every = all_gather(flat, self._group).reshape(self._group.size(), -1)  # (R, sum of B * H * n)
        sizes = [math.prod(each.shape) for each in scores]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [
            self._whole(every[:, end - size : end].reshape(-1, *each.shape))
            for each, size, end in zip(scores, sizes, ends, strict=True)
        ]

    def _whole(self, of_ranks: mx.array) -> mx.array:
        """(B, R * H, n) of (R, B, H, n); (B, H, n) of copies."""
        return of_ranks[0] if self._copies else mx.concatenate(list(of_ranks), axis=1)


class SplitLayers(CacheCommunicator):
    """Ranks that each have some layers, the last rank the first of them.

    Args:
        group: the ranks.
        full_layers: layers of full attention of each rank.
    """

    splits_layers = True

    def __init__(self, group: mx.distributed.Group, full_layers: Sequence[int]) -> None:
        self._group, self._max_layers = group, max(full_layers)
        self.first_layer, self._total = sum(full_layers[group.rank() + 1 :]), sum(full_layers)
        if min(full_layers) == 0:  # such a rank cannot take part when the others decide
            self.unsupported = {
                (
                    "share",
                    "layers",
                ): "a rank has no layer of full attention, and cannot decide with the others what a budget keeps: use "
                "{share:='layer'}, or give each rank such a layer"
            }

    def total_layers(self, layers: int) -> int:
        return self._total

    def gather_layers(self, scores: Sequence[mx.array]) -> list[mx.array]:
        padding = mx.zeros((self._max_layers - len(scores), scores[0].shape[1]))
        padded = mx.concatenate([*scores, padding])  # (L, n); to add zeros changes nothing
        every = all_gather(padded, self._group).reshape(self._group.size(), self._max_layers, 1, -1)
        return [each for rank in reversed(range(self._group.size())) for each in every[rank]]
