"""Processed prompts for the worker: in memory, and behind it in a store, whose disk nobody waits for.

Decides when the disk is asked, for how long a prompt waits for it, and what is too much for it. What takes the disk's
time runs in a thread of its own, one thing after the other, and only with bytes: arrays are made and read in the
worker's thread. Whatever fails here costs a prompt the time to be read, and no row its end. A store that has failed is
asked again, but no prompt waits for it before it has answered. Knows nothing about jobs or rows.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from mlx_kv.prefixes.index import MIN_SHARED, packed
from mlx_kv.prefixes.memory import PromptMemory
from mlx_kv.prefixes.store import PromptStore, StoredPrompt
from mlx_kv.prefixes.store_index import PackedEntry
from mlx_kv.server.task_thread import TaskThread

MOST_PENDING = 256 * 2**20  # bytes that wait for the disk; what comes on top is not stored
REFUSED_FOR = 10.0  # seconds for which a disk that could not be written is not tried again
FULL = (errno.ENOSPC, errno.EDQUOT)
REFRESH_EVERY = 1.0  # seconds after which entries of other processes are looked for
T = TypeVar("T")
log = logging.getLogger("mlx_kv.server")


class FoundOnly:
    """A `Prefixes` of which prompts go on, and that keeps nothing of them."""

    def __init__(self, prefixes: TieredPrefixes) -> None:
        self.bind, self.find = prefixes.bind, prefixes.find

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """Nothing: whoever asked wanted that."""


class TieredPrefixes:
    """A `Prefixes` for one thread.

    Args:
        store: None keeps prompts in memory alone.
        call: runs something in that thread, soon; called from another.
        whose: what tells its model and policy from others; asked for a place that was given no fingerprint.
    """

    def __init__(
        self,
        memory: PromptMemory,
        store: PromptStore | None,
        call: Callable[[Callable[[], None]], None],
        whose: Callable[[], str],
    ) -> None:
        memory.bind(whose)
        if store is not None:
            store.bind(whose)
            if store.other_versions:
                log.warning("the prompt store has %d entries of other versions: left alone", store.other_versions)
        self.memory, self.store, self._call = memory, store, call
        self._disk = TaskThread("mlx-kv disk")
        self._pending = 0  # bytes
        self._refreshed = -REFRESH_EVERY  # when somebody last began to look for entries
        self._looking = False  # somebody does so now
        self._failing = False  # the last look has failed
        self._refused = False  # the last entry could not be written
        self._refused_until = 0.0  # until when none is tried
        self._late = False  # the disk owes an answer that nobody waits for any longer
        self._fetched: tuple[list[int], list[Any], int] | None = None  # for the prompt that was asked for last

    def bind(self, find: Callable[[], str]) -> None:
        """Nothing to say: all that reads here is one worker's."""

    def serves(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt are in memory."""
        return self._attempt(lambda: self.memory.serves(tokens)) or 0

    @property
    def patience(self) -> float:
        """Seconds that a prompt may wait for the disk."""
        return 0.0 if self.store is None else self.store.deadline

    def on_disk(self, tokens: Sequence[int]) -> bool:
        """Whether the store may have much more of a prompt than memory has: then `fetch` it first.

        It may where its entries have not been looked at for a while: others may have stored some.
        """
        store = self.store
        if store is None or self._late:
            return False
        if self._failing:
            if not self._looking:
                self._on_disk(self._look(lambda: None, anew=True), self._looked)
            return False
        wanted = self.serves(tokens) + MIN_SHARED
        if len(packed(tokens)) // 4 <= wanted:
            return False
        return self._looking or self._stale or (self._attempt(lambda: store.serves(tokens)) or 0) >= wanted

    @property
    def _stale(self) -> bool:
        return time.monotonic() - self._refreshed > REFRESH_EVERY

    def _look(self, then: Callable[[], T], anew: bool = False) -> Callable[[], T]:
        """What looks for entries of others, if nobody did so a moment ago, and then does something with the disk."""
        store, refresh = self.store, anew or self._stale
        assert store is not None
        self._looking = True
        if refresh:
            self._refreshed = time.monotonic()

        def look() -> T:
            try:
                with store.within():
                    if refresh:
                        store.refresh()
                    found = then()
            except BaseException:
                self._failing = True
                raise
            self._failing = False
            return found

        return look

    def _looked(self, found: object) -> None:
        self._looking = False

    def fetch(self, tokens: list[int], done: Callable[[], None], seconds: float | None = None) -> None:
        """Reads what the store has of a prompt. When `done` is called, the next `find` comes with it.

        Args:
            seconds: after which it has nothing; None is its deadline.
        """
        assert self.store is not None
        store, patience = self.store, self.patience if seconds is None else seconds

        def arrived(fetched: StoredPrompt | None) -> None:
            self._looked(fetched)
            late, self._late = self._late, False
            if late:
                return
            timer.cancel()
            if fetched is not None:
                self._attempt(lambda: self._restored(tokens, fetched))
            done()

        def waited() -> None:
            if not work.done():
                log.warning("the prompt store has not answered for %.3g seconds", patience)
                self._late = True
                done()

        work = self._on_disk(self._look(lambda: store.fetch(tokens)), arrived)
        timer = threading.Timer(patience, self._call, [waited])
        timer.daemon = True
        timer.start()

    def _restored(self, tokens: list[int], fetched: StoredPrompt) -> None:
        caches = None if self.store is None else self.store.restore(fetched)
        if caches is not None:
            self._fetched = tokens, caches, fetched.count
            self.memory.keep(tokens[: fetched.count], caches)

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        fetched, self._fetched = self._fetched, None
        if fetched is not None and fetched[0] == tokens:
            return fetched[1:]
        return self._attempt(lambda: self.memory.find(tokens))

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        self._attempt(lambda: self.memory.keep(tokens, caches))
        if self.store is not None and time.monotonic() >= self._refused_until:
            self._attempt(lambda: self._store(tokens, caches))

    def _store(self, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        store = self.store
        assert store is not None
        new = store.pack(tokens, caches)
        if new is None:
            return
        if self._pending and self._pending + new.caches.nbytes > MOST_PENDING:
            log.warning("the prompt store is slower than prompts come: one was not stored")
            store.discard(new)
            return
        self._pending += new.caches.nbytes
        self._on_disk(lambda: self._write(store, new), lambda stored: self._written(new))

    def _write(self, store: PromptStore, new: PackedEntry) -> None:
        """Writes an entry. A local disk that refuses one is left alone for a while, and logged once until it takes one.

        A long prompt has an entry for each of many chunks, each of which would fail alike.
        """
        if time.monotonic() < self._refused_until:  # it was packed before
            store.discard(new)
            return
        try:
            if store.write(new) and self._refused:
                self._refused = False
                log.warning("the prompt store can be written again")
        except OSError as error:
            if store.far:
                raise
            self._refused_until = time.monotonic() + REFUSED_FOR
            if not self._refused:
                self._refused = True
                fix = ": free space, or start with fewer --prompt-store-bytes" if error.errno in FULL else ""
                log.warning(
                    "the prompt store cannot be written (%s)%s. New prompts stay in memory alone until it can",
                    error.strerror or error,
                    fix,
                )

    def _written(self, new: PackedEntry) -> None:
        self._pending -= new.caches.nbytes

    def _on_disk(self, what: Callable[[], T], then: Callable[[T | None], None]) -> Future[T | None]:
        """Does something in the thread of the disk, and then, whatever came of it, something in the worker's."""

        def ended(work: Future[T | None]) -> None:
            dead = work.exception()  # of the thread, over it or before
            if dead is not None:
                log.warning("the prompt store could not be used: %s", dead)
            came = None if dead is not None else work.result()
            self._call(lambda: then(came))

        work = self._disk.submit(partial(self._attempt, what))
        work.add_done_callback(ended)
        return work

    def _attempt(self, what: Callable[[], T]) -> T | None:
        """A full disk costs later requests time, and this one nothing."""
        try:
            return what()
        except Exception as error:  # every file system has errors of its own, and memory may be full
            log.warning("the prompt store could not be used: %s", " ".join(str(error).split()) or type(error).__name__)
            return None

    def close(self) -> None:
        """Ends when all is written; a store elsewhere that does not answer is not waited for."""
        if self.store is not None:
            self.store.by_themselves()
        self._disk.close(self.store.deadline if self.store is not None and self.store.far else None)
