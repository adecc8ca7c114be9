"""One engine on all ranks: the leader sends each call to the followers, which do the same with their part of the model.

Caches are known by numbers, as each rank has its part of them.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Self

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.prefill import read_chunk
from mlx_kv.generation.sequence import BatchToken, SequenceProgress, TokenSequence
from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.mlxlm.traverse import can_trim
from mlx_kv.ranks.communicator import checksum
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.link import Leader, RanksError

MakeEngine = Callable[[Communicator], Engine]
Caches = dict[int, list[Any]]  # a follower's part of each list of caches, by number
MoreHandlers = Callable[[Caches], Mapping[str, Callable[..., object]]]
FAILED = -1  # instead of the checksum of a step that raised
FAILED_ALONE_SECONDS = 5.0  # within which a leader that has failed in the same way sends its next message


# --- the leader -------------------------------------------------------------------------------------------------------


def lead(make_engine: MakeEngine, group: RankGroup | None) -> Engine:
    """An engine on all ranks; the followers make theirs and free the previous one. Without a group, on this one."""
    if group is None:
        return make_engine(LOCAL)
    group.leader.tell("engine")
    with group.watch("beginning"):
        return LedEngine(make_engine(group), group)


class LedEngine:
    """The leader's `Engine`. Its caches are `RankCaches`.

    A call is sent before it is done if ranks communicate during it, and after it if the leader may refuse it.

    Attributes:
        numbers: of the caches of all ranks.
    """

    def __init__(self, engine: Engine, group: RankGroup) -> None:
        self._engine, self._group = engine, group
        self.numbers = CacheNumbers(group.leader)
        self._last_step = 0  # checksum

    def submit(self, sequence: TokenSequence) -> None:
        caches = sequence.caches
        number = None if caches is None else self.numbers.of(caches)
        sequence.caches = None if caches is None else list(caches)
        self._engine.submit(sequence)
        content = sequence.index, list(sequence.tokens), sequence.max_tokens, number, len(sequence.before)
        self.numbers.tell("submit", *content)

    def cancel(self, index: int) -> None:
        self.numbers.tell("cancel", index)
        self._engine.cancel(index)

    def step(self) -> list[BatchToken]:
        self.numbers.tell("step", state_checksum(self._engine, self._last_step))
        self._last_step = FAILED
        with self._group.watch():
            tokens = self._engine.step()
        self._last_step = step_checksum(tokens)
        ended = {token.index: self.numbers.named(token.caches) for token in tokens if token.caches is not None}
        if ended:
            self.numbers.tell("ended", [[index, caches.number] for index, caches in ended.items()])
        return [token if token.caches is None else replace(token, caches=ended[token.index]) for token in tokens]

    @property
    def busy(self) -> bool:
        return self._engine.busy

    @property
    def caches(self) -> list[Any]:
        return self._engine.caches

    @property
    def reading(self) -> list[Any]:
        return self._engine.reading

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
        caches = self.numbers.named(self._engine.make_caches())
        self.numbers.tell("make", caches.number)
        return caches

    def read(self, tokens: mx.array, cache: list[Any]) -> Any:
        self.numbers.tell("read", self.numbers.of(cache), tokens.tolist())
        with self._group.watch("reading"), mx.stream(generation_stream):
            return self._engine.read(tokens, list(cache))

    def trim(self, caches: list[Any], n: int) -> bool:
        self.numbers.tell("trim", self.numbers.of(caches), n)
        with self._group.watch():
            return trim_all_ranks(self._group, self._engine, caches, n)

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


class CacheNumbers:
    """Numbers for caches of which each rank has its part.

    Numbers of caches that the leader no longer uses are sent with the next message, or by `tell_dropped`: a destructor
    may run at any time, also between a request and its answers.
    """

    def __init__(self, link: Leader) -> None:
        self._link = link
        self._numbers = count(1)
        self._dropped: deque[int] = deque()

    def tell(self, *message: Any) -> None:
        """Sends a message to the followers, after the numbers of dropped caches."""
        self.tell_dropped()
        self._link.tell(*message)

    def tell_dropped(self) -> None:
        """The followers drop caches that the leader no longer uses. Call this when there is nothing else to send."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if dropped:
            self._link.tell("drop", dropped)

    def named(self, caches: Iterable[Any]) -> RankCaches:
        """Caches of this rank with a new number, which the followers have yet to receive."""
        return RankCaches(caches, next(self._numbers), self)

    def of(self, caches: object) -> int:
        """The number of caches.

        Raises:
            ValueError: these caches are not on all ranks, or belong to an earlier engine.
        """
        if isinstance(caches, RankCaches) and caches.numbers is self:
            return caches.number
        raise ValueError("these caches are not on all ranks: use those of this engine's make_caches")

    def drop(self, number: int) -> None:
        """The leader no longer uses these caches."""
        self._dropped.append(number)


class RankCaches(list[Any]):
    """The leader's part of the caches of a sequence. A deep copy copies the part of every rank.

    Attributes:
        number: the same on all ranks.
        numbers: where the number is from.
    """

    def __init__(self, caches: Iterable[Any], number: int, numbers: CacheNumbers) -> None:
        super().__init__(caches)
        self.number, self.numbers = number, numbers

    def __deepcopy__(self, memo: dict[int, Any]) -> Self | RankCaches:
        copied = self.numbers.named(copy.deepcopy(list(self), memo))
        self.numbers.tell("copy", self.number, copied.number)
        return copied

    def __del__(self) -> None:
        self.numbers.drop(self.number)


# --- on all ranks -----------------------------------------------------------------------------------------------------


def trim_all_ranks(communicator: Communicator, engine: Engine, caches: list[Any], n: int) -> bool:
    """Trims the caches of all ranks, or of none."""
    (possible,) = communicator.all_min([int(n == 0 or can_trim(caches, n))])
    return bool(possible) and engine.trim(caches, n)


def state_checksum(engine: Engine, last_step: int) -> int:
    """Of the state that must be the same on all ranks before a step: the result of the last one, and the rows."""
    return checksum([last_step, engine.rows, engine.pending])


def step_checksum(tokens: Iterable[BatchToken]) -> int:
    """Of the results of a step that must be the same on all ranks."""
    return checksum([(token.index, token.token, token.finish_reason, token.caches is not None) for token in tokens])


# --- the followers ----------------------------------------------------------------------------------------------------


def follow(make_engine: MakeEngine, group: RankGroup, more: MoreHandlers | None = None) -> None:
    """Does what the leader does, with this rank's part of the model, until the leader ends.

    Args:
        make_engine: makes an engine like the leader's.
        more: returns handlers of other messages, by name, given the numbered caches of this rank.

    Raises:
        ValueError: the engine cannot be made, on any rank.
        RanksError: the group is broken.
    """
    engine = FollowingEngine(make_engine, group)
    handlers = {} if more is None else more(engine.caches)
    while (message := group.follower.next()) is not None:
        engine.leader_goes_on()
        kind, *content = message
        handler = handlers.get(kind) or getattr(engine, f"do_{kind}", None)
        if handler is None:
            group.abort(f"the leader sent {kind!r}, which is unknown here")
        handler(*content)
    group.finish()


class FollowingEngine:
    """The engine of a follower, and its part of the numbered caches. Each message has its method, `do_<name>`.

    Attributes:
        caches: by number.
    """

    def __init__(self, make_engine: MakeEngine, group: RankGroup) -> None:
        self._make_engine, self._group = make_engine, group
        self._engine: Engine | None = None
        self.caches: Caches = {}
        self._ended: Caches = {}  # of the last step, by the index of the sequence
        self._last_step, self._error = 0, ""
        self._failed_alone: threading.Timer | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "the leader makes an engine first"
        return self._engine

    def leader_goes_on(self) -> None:
        """The leader has sent a message, so it does not wait for this rank in a collective."""
        if self._failed_alone is not None:
            self._failed_alone.cancel()
            self._failed_alone = None

    def _failed(self, what: str, error: Exception) -> None:
        """A leader that has failed in the same way goes on with another engine. If it sends nothing, all ranks end."""
        self._last_step, self._error = FAILED, f"{what} failed with {type(error).__name__}: {error}"
        reason = f"rank {self._group.rank} alone cannot go on: {self._error}"
        self._failed_alone = threading.Timer(FAILED_ALONE_SECONDS, self._group.link.break_up, [reason])
        self._failed_alone.daemon = True
        self._failed_alone.start()

    def do_engine(self) -> None:
        self._engine = None
        self.caches.clear()
        self._ended, self._last_step = {}, 0
        mx.clear_cache()
        with self._group.watch("beginning"):
            self._engine = self._make_engine(self._group)

    def do_submit(self, index: int, tokens: list[int], max_tokens: int, number: int | None, before: int) -> None:
        caches = None if number is None else list(self.caches[number])
        # Only the leader's drafter uses the tokens before; here their number counts.
        self.engine.submit(TokenSequence(index, tokens, max_tokens, caches=caches, before=range(before)))

    def do_cancel(self, index: int) -> None:
        self.engine.cancel(index)

    def do_step(self, expected: int) -> None:
        if self._last_step == FAILED:
            self._group.abort(self._error)
        if expected != state_checksum(self.engine, self._last_step):
            self._group.abort("it has other tokens, or other rows, than the leader")
        self._ended, self._last_step = {}, FAILED
        try:
            with self._group.watch():
                tokens = self.engine.step()
        except RanksError:
            raise
        except Exception as error:
            self._failed("a step", error)
            return
        self._last_step = step_checksum(tokens)
        self._ended = {token.index: token.caches for token in tokens if token.caches is not None}

    def do_ended(self, numbers: list[tuple[int, int]]) -> None:
        if self._last_step == FAILED:
            self._group.abort(self._error)
        for index, number in numbers:
            self.caches[number] = self._ended.pop(index)

    def do_make(self, number: int) -> None:
        self.caches[number] = self.engine.make_caches()

    def do_read(self, number: int, tokens: list[list[int]]) -> None:
        try:
            with self._group.watch("reading"), mx.stream(generation_stream):
                read_chunk(self.engine.read, self.caches[number], tokens)
        except RanksError:
            raise
        except Exception as error:
            self._failed("reading a prompt", error)

    def do_copy(self, number: int, copied: int) -> None:
        self.caches[copied] = copy.deepcopy(self.caches[number])

    def do_trim(self, number: int, n: int) -> None:
        with self._group.watch():
            trim_all_ranks(self._group, self.engine, self.caches[number], n)

    def do_extract(self, index: int, number: int) -> None:
        with self._group.watch():
            found = self.engine.extract(index)
        if found is not None:
            self.caches[number] = found

    def do_drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self.caches.pop(number, None)

    def do_close(self) -> None:
        self.engine.close()
