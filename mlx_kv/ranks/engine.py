"""One engine on all ranks: followers do with their part of the model what the leader submits, cancels and steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.engine import Engine
from mlx_kv.generation.sequence import BatchToken, TokenSequence
from mlx_kv.mlxlm.traverse import can_trim, trim_all
from mlx_kv.ranks.group import Parts, RankGroup, checksum
from mlx_kv.ranks.link import RanksError

MakeEngine = Callable[[Communicator], Engine]
FAILED = -1  # instead of the checksum of a step that raised
FAILED_ALONE_SECONDS = 5.0  # within which a leader that has failed in the same way sends its next message


# --- the leader -------------------------------------------------------------------------------------------------------


def lead(make_engine: MakeEngine, group: RankGroup | None) -> Engine:
    """An engine on all ranks; the followers make theirs and free the previous one. Without a group, on this one."""
    if group is None:
        return make_engine(LOCAL)
    group.parts = Parts()
    group.leader.tell("engine")
    with group.watch("beginning"):
        return LedEngine(make_engine(group), group)


class Part:
    """The leader's part of what all ranks have. Followers free theirs some time after this one is gone.

    Args:
        arguments: of the other base class.

    Attributes:
        number: by which all ranks know it.
    """

    def __init__(self, group: RankGroup, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.group, self.parts = group, group.parts
        self.number = self.parts.count = self.parts.count + 1

    def __del__(self) -> None:
        self.parts.unused.append(self.number)


class RankCaches(Part, list[Any]):
    """The leader's part of the caches of a sequence."""


class LedEngine(Engine):
    """The leader's engine. The caches that it gives, and continues from, are `RankCaches`.

    A message is sent before what it says is done if ranks communicate during that, and after it if the leader may
    refuse it.
    """

    def __init__(self, engine: Engine, group: RankGroup) -> None:
        vars(self).update(vars(engine))  # it is that engine from here on
        self._group, self._last_step = group, 0  # its checksum
        # Prefixes that were read in this step, and what keeps them.
        self._prefixes: list[tuple[Callable[[list[int], list[Any]], object], list[int], Any]] = []

    def submit(self, sequence: TokenSequence) -> None:
        caches: Any = sequence.caches
        if caches is not None and getattr(caches, "parts", None) is not self._group.parts:
            raise ValueError("other ranks have no part of these caches: leave them out, or give those of this engine")
        if (keep := sequence.keep) is not None:
            sequence.keep = lambda tokens, caches: self._prefixes.append((keep, tokens, self._all(caches)))
        super().submit(sequence)
        names = "index", "tokens", "max_tokens", "before", "private", "resumed", "room"
        fields = {name: getattr(sequence, name) for name in names}
        self._group.tell("submit", fields, None if caches is None else caches.number, keep is not None)

    def cancel(self, index: int) -> None:
        self._group.tell("cancel", index)
        super().cancel(index)

    def make_room(self, index: int, tokens: int) -> None:
        self._group.tell("make_room", index, tokens)
        super().make_room(index, tokens)

    def step(self) -> list[BatchToken]:
        self._group.tell("step", state_checksum(self, self._last_step, self._group.parts.count))
        self._last_step = FAILED
        with self._group.watch():
            tokens = super().step()
        self._last_step = step_checksum(tokens)
        tokens = [replace(token, caches=self._all(token.caches)) if token.finish_reason else token for token in tokens]
        prefixes, self._prefixes = self._prefixes, []
        for keep, text, caches in prefixes:  # after the step, when followers wait for messages
            keep(text, caches)
        return tokens

    def extract(self, index: int) -> list[Any] | None:
        self._group.tell("extract", index)
        with self._group.watch():
            return self._all(super().extract(index))

    def trim(self, caches: Any, n: int) -> bool:
        self._group.tell("trim", caches.number, n)
        return trim_all_ranks(self._group, caches, n)

    def _all(self, caches: list[Any] | None) -> RankCaches | None:
        """Caches of this rank as those of all ranks, each of which adds its own part, or None."""
        all_ranks = RankCaches(self._group, caches or ())
        return None if caches is None else all_ranks


def trim_all_ranks(group: RankGroup, caches: list[Any] | None, n: int) -> bool:
    """Trims the caches of all ranks, or of none, as where a rank has none."""
    with group.watch():
        (possible,) = group.all_min([caches is not None and (n == 0 or can_trim(caches, n))])
    return bool(possible) and trim_all(caches or (), n)


def state_checksum(engine: Engine, last_step: int, parts: int) -> int:
    """Of the state that must be the same on all ranks before a step: the result of the last one, rows, and parts."""
    return checksum([last_step, engine.rows, engine.pending, parts])


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
        self._engine, self._last_step, self._group.parts = None, 0, Parts()
        mx.clear_cache()
        with self._group.watch("beginning"):
            self._engine = self._make_engine(self._group)

    def do_submit(self, fields: dict[str, Any], number: int | None, keep: bool) -> None:
        parts = self._group.parts
        sequence = TokenSequence(**fields, caches=None if number is None else parts.pop(number))
        if keep:
            sequence.keep = lambda tokens, caches: parts.add(caches)
        self.engine.submit(sequence)

    def do_cancel(self, index: int) -> None:
        self.engine.cancel(index)

    def do_make_room(self, index: int, tokens: int) -> None:
        self.engine.make_room(index, tokens)

    def do_extract(self, index: int) -> None:
        self._group.parts.add(self.engine.extract(index))

    def do_trim(self, number: int, n: int) -> None:
        trim_all_ranks(self._group, self._group.parts[number], n)

    def do_free(self, numbers: list[int]) -> None:
        for number in numbers:
            self._group.parts.pop(number, None)

    def do_step(self, expected: int) -> None:
        if self._last_step == FAILED:
            self._group.abort(self._error)
        if expected != state_checksum(self.engine, self._last_step, self._group.parts.count):
            self._group.abort("it has other tokens, or other rows, than the leader")
        self._last_step = FAILED
        try:
            with self._group.watch():
                tokens = self.engine.step()
            self._last_step = step_checksum(tokens)
            for token in tokens:
                if token.finish_reason is not None:
                    self._group.parts.add(token.caches)
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
