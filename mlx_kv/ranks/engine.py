"""One engine on all ranks: followers do with their part of the model what the leader submits, cancels and steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

import mlx.core as mx

from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.sequence import BatchToken, TokenSequence
from mlx_kv.ranks.group import RankGroup, checksum
from mlx_kv.ranks.link import RanksError

MakeEngine = Callable[[Communicator], Engine]
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


class LedEngine(Engine):
    """The leader's engine. Sequences are submitted without caches: ranks read each prompt in full.

    A message is sent before what it says is done if ranks communicate during that, and after it if the leader may
    refuse it.
    """

    def __init__(self, engine: Engine, group: RankGroup) -> None:
        vars(self).update(vars(engine))  # it is that engine from here on
        self._group, self._last_step = group, 0  # its checksum

    def submit(self, sequence: TokenSequence) -> None:
        if sequence.caches is not None:
            raise ValueError("several ranks read prompts in full: leave out caches")
        super().submit(sequence)
        self._group.leader.tell("submit", sequence.index, list(sequence.tokens), sequence.max_tokens)

    def cancel(self, index: int) -> None:
        self._group.leader.tell("cancel", index)
        super().cancel(index)

    def step(self) -> list[BatchToken]:
        self._group.leader.tell("step", state_checksum(self, self._last_step))
        self._last_step = FAILED
        with self._group.watch():
            tokens = super().step()
        self._last_step = step_checksum(tokens)
        return tokens

    def extract(self, index: int) -> list[object] | None:
        return None  # a sequence cannot go on from the caches of one rank


def state_checksum(engine: Engine, last_step: int) -> int:
    """Of the state that must be the same on all ranks before a step: the result of the last one, and the rows."""
    return checksum([last_step, engine.rows, engine.pending])


def step_checksum(tokens: Iterable[BatchToken]) -> int:
    """Of the results of a step that must be the same on all ranks."""
    return checksum([(token.index, token.token, token.finish_reason) for token in tokens])


# --- the followers ----------------------------------------------------------------------------------------------------


def follow(make_engine: MakeEngine, group: RankGroup, handlers: Mapping[str, Callable[..., object]] = {}) -> None:
    """Does what the leader does, with this rank's part of the model, until the leader ends.

    Args:
        make_engine: makes an engine like the leader's.
        handlers: of other messages, by name.

    Raises:
        ValueError: the engine cannot be made, on any rank.
        RanksError: the group is broken.
    """
    follower = FollowingEngine(make_engine, group)
    while (message := group.follower.next()) is not None:
        follower.leader_goes_on()
        kind, *content = message
        handler = handlers.get(kind) or getattr(follower, f"do_{kind}", None)
        if handler is None:
            group.abort(f"the leader sent {kind!r}, which is unknown here")
        handler(*content)
    group.finish()


class FollowingEngine:
    """The engine of a follower. Each message of the leader has its method, `do_<name>`."""

    def __init__(self, make_engine: MakeEngine, group: RankGroup) -> None:
        self._make_engine, self._group = make_engine, group
        self._engine: Engine | None = None
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

    def do_engine(self) -> None:
        self._engine, self._last_step = None, 0
        mx.clear_cache()
        with self._group.watch("beginning"):
            self._engine = self._make_engine(self._group)

    def do_submit(self, index: int, tokens: list[int], max_tokens: int) -> None:
        self.engine.submit(TokenSequence(index, tokens, max_tokens))

    def do_cancel(self, index: int) -> None:
        self.engine.cancel(index)

    def do_step(self, expected: int) -> None:
        if self._last_step == FAILED:
            self._group.abort(self._error)
        if expected != state_checksum(self.engine, self._last_step):
            self._group.abort("it has other tokens, or other rows, than the leader")
        self._last_step = FAILED
        try:
            with self._group.watch():
                self._last_step = step_checksum(self.engine.step())
        except RanksError:
            raise
        except Exception as error:
            self._step_failed(error)

    def _step_failed(self, error: Exception) -> None:
        """A leader that has failed in the same way goes on with another engine. If it sends nothing, all ranks end."""
        self._error = f"a step failed with {type(error).__name__}: {error}"
        reason = f"rank {self._group.rank} alone cannot go on: {self._error}"
        self._failed_alone = threading.Timer(FAILED_ALONE_SECONDS, self._group.link.break_up, [reason])
        self._failed_alone.daemon = True
        self._failed_alone.start()
