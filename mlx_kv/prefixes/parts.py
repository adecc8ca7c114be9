"""Prompts that several ranks keep, each its part of the caches: what a place asks of the other ranks.

Decides nothing about what is kept, found or removed: that is for the place of the leader, by names that count on all
ranks. An entry takes the bytes that it takes where it takes most, and goes back as far as it does where that is least.
Knows nothing about engines, nor what the others do with what they are told (`part_keeper`). `Alone` is for whoever has
all of the caches himself.

What the disk's thread wants told waits for the thread that speaks to the other ranks: between a question and its
answer nobody else may speak. What comes of it is heard by whoever waits for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from mlx_kv.cache.eviction.peers import Peers
from mlx_kv.mlxlm.traverse import hear_from
from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.numbered import Numbers

WRITE_SECONDS = 60.0  # that the other parts of an entry may take
Measure = Literal["kept", "live"]


class Parts(Protocol):
    """The other ranks.

    Attributes:
        words: which part of what this is; "" where it is all.
    """

    words: str

    def fingerprint(self, own: str) -> str:
        """Whose caches these are, on all ranks together."""
        ...

    def most(self, caches: Sequence[Any], tokens: int, measure: Measure, nbytes: int, least: int) -> tuple[int, int]:
        """The bytes of a sequence's caches, and how many tokens must stay of them, where each is most.

        Args:
            tokens: that they have read.
            nbytes, least: of this rank's part.
        """
        ...

    # --- in memory --------------------------------------------------------------------------------------------------

    def keep(self, name: str, caches: Sequence[Any], tokens: int, like: str | None, shared: int) -> int:
        """All keep their part under a name, beside what they have of the entry `like`.

        Returns:
            The bytes of all entries, on the other rank that has most.

        Raises:
            MemoryError: one cannot; then none does.
        """
        ...

    def take(self, name: str, own: list[Any], excess: int, room: int) -> list[Any]:
        """The caches of all ranks of which `own` are this one's part."""
        ...

    def drop(self, name: str) -> int:
        """All let go of theirs; returns as `keep`."""
        ...

    # --- in a directory ---------------------------------------------------------------------------------------------

    def open(self, directory: str, deadline: float) -> None:
        """All open their part of a directory. Raises ValueError where one cannot."""
        ...

    def pack(self, name: str, caches: Sequence[Any], tokens: Sequence[int], fingerprint: str) -> None:
        """All pack theirs, to be written or forgotten."""
        ...

    def writing(self, name: str) -> AbstractContextManager[None]:
        """Meanwhile all write what was packed under a name. At the end raises OSError where one could not."""
        ...

    def reading(self, name: str, seconds: float) -> AbstractContextManager[None]:
        """Meanwhile all read theirs.

        Raises, at the end:
            FileNotFoundError: one has none.
            ValueError: one has a damaged one.
            OSError: one could not, or not in so many seconds.
        """
        ...

    def restore(self, name: str, own: list[Any], excess: int) -> list[Any]:
        """The caches of all ranks, of what was read last. Raises ValueError where one's cannot be made."""
        ...

    def remove(self, name: str) -> None:
        """All remove theirs, whether it was only packed, or written."""
        ...

    def only(self, names: Collection[str]) -> None:
        """All remove what they have of others, if it was there for long."""
        ...

    def by_themselves(self) -> None:
        """From now on the thread that speaks to the others does nothing but wait for the disk's."""
        ...


class Alone:
    """Nobody else is asked.

    Args:
        words: as those of `Parts`.
    """

    def __init__(self, words: str = "") -> None:
        self.words = words

    def fingerprint(self, own: str) -> str:
        return own

    def most(self, caches: Sequence[Any], tokens: int, measure: Measure, nbytes: int, least: int) -> tuple[int, int]:
        return nbytes, least

    def keep(self, name: str, caches: Sequence[Any], tokens: int, like: str | None, shared: int) -> int:
        return 0

    def take(self, name: str, own: list[Any], excess: int, room: int) -> list[Any]:
        return own

    def drop(self, name: str) -> int:
        return 0

    def open(self, directory: str, deadline: float) -> None:
        pass

    def pack(self, name: str, caches: Sequence[Any], tokens: Sequence[int], fingerprint: str) -> None:
        pass

    def writing(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reading(self, name: str, seconds: float) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def restore(self, name: str, own: list[Any], excess: int) -> list[Any]:
        return own

    def remove(self, name: str) -> None:
        pass

    def only(self, names: Collection[str]) -> None:
        pass

    def by_themselves(self) -> None:
        pass


class RankParts:
    """The other ranks of a group, for its leader.

    Args:
        peers: whom caches with a budget hear, which files know nothing of.
        numbers: asks for those of the caches that the leader's engine now has.
        call: runs something soon in the thread that speaks to the other ranks; None is at once, where there is one.
    """

    def __init__(
        self,
        group: RankGroup,
        peers: Peers,
        numbers: Callable[[], Numbers],
        call: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.words = f"{group.size} ranks, of which each has some {group.split}"
        self._link, self._peers, self._numbers = group.leader, peers, numbers
        self._others = group.size - 1
        self._cleared = False  # what others may have in memory of a leader's memory before this one
        self._call = call
        self._to_tell: deque[tuple[Any, ...]] = deque()
        self._telling = threading.Lock()
        self._heard: dict[tuple[str, str], list[tuple[str, str]]] = {}  # what came of what, with which name
        self._news = threading.Condition()
        group.leader.listen(self._hear)

    def _ask(self, *message: Any) -> list[Any]:
        """What each other rank answers, or a text that says why it cannot."""
        self._numbers().tell(*message)
        return self._link.answers()

    def _hear(self, content: Sequence[str]) -> None:
        what, name, kind, why = content
        with self._news:
            if (what, name) in self._heard:
                self._heard[what, name].append((kind, why))
                self._news.notify_all()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def _tell_soon(self, *message: Any) -> None:
        self._to_tell.append(message)
        if self._call is None:
            self._tell_waiting()
        else:
            self._call(self._tell_waiting)

    def _tell_waiting(self) -> None:
        with self._telling:
            while self._to_tell:
                self._link.tell(*self._to_tell.popleft())

    def by_themselves(self) -> None:
        self._call = None
        self._tell_waiting()

    @contextlib.contextmanager
    def _meanwhile(self, what: str, name: str, seconds: float) -> Iterator[None]:
        heard: list[tuple[str, str]] = []
        with self._news:
            self._heard[what, name] = heard
        try:
            self._tell_soon(what, name)
            ends = time.monotonic() + seconds
            yield
            with self._news:
                while len(heard) < self._others and (left := ends - time.monotonic()) > 0:
                    self._news.wait(left)
        finally:
            with self._news:
                del self._heard[what, name]
        for kind, why in heard:
            if kind:
                raise {"gone": FileNotFoundError, "damaged": ValueError}.get(kind, OSError)(why)
        if len(heard) < self._others:
            raise TimeoutError(f"other ranks have not answered for {seconds:.3g} seconds")

    def writing(self, name: str) -> AbstractContextManager[None]:
        return self._meanwhile("write_part", name, WRITE_SECONDS)

    def reading(self, name: str, seconds: float) -> AbstractContextManager[None]:
        return self._meanwhile("read_part", name, seconds)

    def only(self, names: Collection[str]) -> None:
        self._tell_soon("only_parts", sorted(names))

    def remove(self, name: str) -> None:
        self._tell_soon("remove_part", name)

    # --- from the thread that speaks to the others --------------------------------------------------------------------

    def fingerprint(self, own: str) -> str:
        told = " ".join([own, *map(str, self._ask("whose_parts"))])
        return f"{own} of {self.words} {hashlib.blake2b(told.encode(), digest_size=16).hexdigest()}"

    def most(self, caches: Sequence[Any], tokens: int, measure: Measure, nbytes: int, least: int) -> tuple[int, int]:
        others = self._ask("weigh_part", self._numbers().of(caches), tokens, measure)
        return max(nbytes, *(size for size, _ in others)), max(least, *(other for _, other in others))

    def keep(self, name: str, caches: Sequence[Any], tokens: int, like: str | None, shared: int) -> int:
        if not self._cleared:
            self._cleared = True
            self._link.tell("clear_parts")
        sizes = self._ask("keep_part", name, self._numbers().of(caches), tokens, like, shared)
        if failed := [why for why in sizes if isinstance(why, str)]:
            self.drop(name)
            raise MemoryError(failed[0])
        return max(map(int, sizes))

    def take(self, name: str, own: list[Any], excess: int, room: int) -> list[Any]:
        taken = self._numbers().named(own)
        self._numbers().tell("take_part", name, excess, room, taken.number)
        return taken

    def drop(self, name: str) -> int:
        return max(map(int, self._ask("drop_part", name)))

    def open(self, directory: str, deadline: float) -> None:
        for why in self._ask("open_parts", directory, deadline):
            if why:
                raise ValueError(why)

    def pack(self, name: str, caches: Sequence[Any], tokens: Sequence[int], fingerprint: str) -> None:
        self._numbers().tell("pack_part", name, self._numbers().of(caches), list(tokens), fingerprint)

    def restore(self, name: str, own: list[Any], excess: int) -> list[Any]:
        hear_from(own, self._peers)
        restored = self._numbers().named(own)
        for why in self._ask("restore_part", name, excess, restored.number):
            if why:
                raise ValueError(why)
        return restored
