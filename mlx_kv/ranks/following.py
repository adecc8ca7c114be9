"""What ranks do that follow: what the leader's engine tells, until it ends.

Decides nothing. A rank that can no longer do as the leader does ends all: its part of the model is missing then.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_kv.generation.engine import Engine
from mlx_kv.generation.prefill import read_chunk
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.ranks.engine import FAILED, MakeEngine, seen_of, standing, trim_everywhere
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.link import RanksError

FAILED_ALONE_SECONDS = 5.0  # in which a leader that has failed in the same way says something

Caches = dict[int, list[Any]]  # this rank's part of each, by the leader's numbers
More = Callable[[Caches], Mapping[str, Callable[..., object]]]


def follow(make_engine: MakeEngine, group: RankGroup, more: More | None = None) -> None:
    """Does what the leader does, with this rank's part of the model, until the leader ends.

    Args:
        make_engine: makes an engine like the leader's.
        more: what else the leader tells, by its name; given the caches that all ranks have.

    Raises:
        ValueError: what making an engine refuses, on all ranks alike.
        RanksError: the group is broken.
    """
    following = Following(make_engine, group)
    others = {} if more is None else more(following.caches)
    while (message := group.follower.next()) is not None:
        following.heard()
        kind, *content = message
        done = others.get(kind) or getattr(following, f"do_{kind}", None)
        if done is None:
            group.abort(f"the leader says {kind!r}, which it does not know")
        done(*content)
    group.finish()


class Following:
    """The engine of a rank that follows, and its part of the caches that have numbers."""

    def __init__(self, make_engine: MakeEngine, group: RankGroup) -> None:
        self._make_engine, self._group = make_engine, group
        self._engine: Engine | None = None
        self.caches: Caches = {}
        self._ended: Caches = {}  # of the last step, by the index of the sequence
        self._seen, self._error = 0, ""
        self._overdue: threading.Timer | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "the leader makes an engine first"
        return self._engine

    def heard(self) -> None:
        """The leader has said something: it waits in no collective."""
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _failed(self, what: str, error: Exception) -> None:
        """Where the leader has failed in the same way, it makes another engine; else all end, and this is why."""
        self._seen, self._error = FAILED, f"{what} failed with {type(error).__name__}: {error}"
        reason = f"rank {self._group.rank} alone cannot go on: {self._error}"
        self._overdue = threading.Timer(FAILED_ALONE_SECONDS, self._group.link.break_up, [reason])
        self._overdue.daemon = True
        self._overdue.start()

    def do_engine(self) -> None:
        self._engine = None
        self.caches.clear()
        self._ended, self._seen = {}, 0
        mx.clear_cache()
        with self._group.watch("beginning"):
            self._engine = self._make_engine(self._group)

    def do_submit(self, index: int, tokens: list[int], max_tokens: int, number: int | None, before: int) -> None:
        caches = None if number is None else list(self.caches[number])
        # What was read before only a drafter looks at, which is the leader's; here it counts.
        self.engine.submit(TokenSequence(index, tokens, max_tokens, caches=caches, before=range(before)))

    def do_cancel(self, index: int) -> None:
        self.engine.cancel(index)

    def do_step(self, seen: int) -> None:
        if self._seen == FAILED:
            self._group.abort(self._error)
        if seen != standing(self.engine, self._seen):
            self._group.abort("it has other tokens, or other rows, than the leader")
        self._ended, self._seen = {}, FAILED
        try:
            with self._group.watch():
                tokens = self.engine.step()
        except RanksError:
            raise
        except Exception as error:
            self._failed("a step", error)
            return
        self._seen = seen_of(tokens)
        self._ended = {token.index: token.caches for token in tokens if token.caches is not None}

    def do_held(self, numbers: list[tuple[int, int]]) -> None:
        if self._seen == FAILED:
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

    def do_copy(self, number: int, other: int) -> None:
        self.caches[other] = copy.deepcopy(self.caches[number])

    def do_trim(self, number: int, n: int) -> None:
        with self._group.watch():
            trim_everywhere(self._group, self.engine, self.caches[number], n)

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
