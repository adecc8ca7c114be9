"""Cached prefixes of the worker: in memory, and in a store on a disk or elsewhere.

Work of the disk runs one task after the other in its own thread, on bytes only: arrays are made and read in the
worker's thread. A failure costs a prompt the time to be read again, and never ends a row. While a store fails, no
prompt waits for it; it is only checked whether it works again.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

from mlx_kv.prefixes.index import MIN_SHARED, packed
from mlx_kv.prefixes.memory import PromptMemory
from mlx_kv.prefixes.store import PromptStore, StoredPrompt
from mlx_kv.prefixes.store_index import PackedEntry

MAX_PENDING = 256 * 2**20  # bytes waiting to be written; further entries are dropped
RETRY_SECONDS = 10.0  # for which a disk that refused an entry gets no other
FULL = (errno.ENOSPC, errno.EDQUOT)
REFRESH_EVERY = 1.0  # seconds between two looks at entries of other processes
T = TypeVar("T")
log = logging.getLogger("mlx_kv.server")


class ReadOnlyPrefixes:
    """`Prefixes` for jobs that must not be cached: `find` only."""

    def __init__(self, prefixes: TieredPrefixes) -> None:
        self.bind, self.find = prefixes.bind, prefixes.find

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """Does nothing."""


class TieredPrefixes:
    """`Prefixes` for one thread.

    Args:
        store: None keeps prefixes in memory only.
        call: schedules a function in that thread; called from others.
        fingerprint: identifies model and policy; used if memory or store were made without a fingerprint.
    """

    def __init__(
        self,
        memory: PromptMemory,
        store: PromptStore | None,
        call: Callable[[Callable[[], None]], None],
        fingerprint: Callable[[], str],
    ) -> None:
        memory.bind(fingerprint)
        if store is not None:
            store.bind(fingerprint)
            if store.other_versions:
                log.warning("the prompt store has %d entries of other versions: left alone", store.other_versions)
        self.memory, self.store, self._call = memory, store, call
        self._disk = ThreadPoolExecutor(1, "mlx-kv disk")
        self._tasks: set[Future[Any]] = set()  # of the disk, not done
        self._pending = 0  # bytes waiting to be written
        self._refreshed = -REFRESH_EVERY  # time of the last look at entries of other processes
        self._refreshing = False
        self._failing = False  # the last look failed
        self._refused = False  # the last entry could not be written
        self._retry_at = 0.0  # time of the next attempt
        self._late = False  # a fetch has timed out, and is still running
        self._fetched: tuple[list[int], list[Any], int] | None = None  # for the prompt of the last `fetch`

    def bind(self, find: Callable[[], str]) -> None:
        """Does nothing: there is one fingerprint for all."""

    def serves(self, tokens: Sequence[int]) -> int:
        """Number of tokens of a prompt found in memory."""
        return self._attempt(lambda: self.memory.serves(tokens)) or 0

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        """Seconds that a prompt may wait for the store."""
        return 0.0 if self.store is None else self.store.deadline

    def on_disk(self, tokens: Sequence[int]) -> bool:
        """Whether the store may have much more of a prompt than memory has, so that `fetch` should be called first.

        True if it has not been looked at for a while: other processes may have added entries.
        """
        store = self.store
        if store is None or self._late:
            return False
        if self._failing:
            if not self._refreshing:
                self._on_disk(self._refresh_and(lambda: None, force=True), self._refresh_ended)
            return False
        wanted = self.serves(tokens) + MIN_SHARED
        if len(packed(tokens)) // 4 <= wanted:
            return False
        return self._refreshing or self._stale or (self._attempt(lambda: store.serves(tokens)) or 0) >= wanted

    @property
    def _stale(self) -> bool:
        return time.monotonic() - self._refreshed > REFRESH_EVERY

    def _refresh_and(self, work: Callable[[], T], force: bool = False) -> Callable[[], T]:
        """A task of the disk that looks at entries of other processes, unless just done, and then does other work."""
        store, refresh = self.store, force or self._stale
        assert store is not None
        self._refreshing = True
        if refresh:
            self._refreshed = time.monotonic()

        def task() -> T:
            try:
                with store.within():
                    if refresh:
                        store.refresh()
                    result = work()
            except BaseException:
                self._failing = True
                raise
            self._failing = False
            return result

        return task

    def _refresh_ended(self, result: object) -> None:
        self._refreshing = False

    def fetch(self, tokens: list[int], done: Callable[[], None], seconds: float | None = None) -> None:
        """Reads a prompt's prefix from the store. After `done` is called, the next `find` returns it.

        Args:
            seconds: timeout, after which nothing is found; None is the store's deadline.
        """
        assert self.store is not None
        store, patience = self.store, self.patience if seconds is None else seconds

        def arrived(fetched: StoredPrompt | None) -> None:
            self._refreshing = False
            late, self._late = self._late, False
            if late:
                return
            timer.cancel()
            if fetched is not None:
                self._attempt(lambda: self._restore(tokens, fetched))
            done()

        def timed_out() -> None:
            if not work.done():
                log.warning("the prompt store has not responded for %.3g seconds", patience)
                self._late = True
                done()

        work = self._on_disk(self._refresh_and(lambda: store.fetch(tokens)), arrived)
        timer = threading.Timer(patience, self._call, [timed_out])
        timer.daemon = True
        timer.start()

    def _restore(self, tokens: list[int], fetched: StoredPrompt) -> None:
        caches = None if self.store is None else self.store.restore(fetched)
        if caches is not None:
            self._fetched = tokens, caches, fetched.count
            self.memory.keep(tokens[: fetched.count], caches)

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """Caches of the longest cached prefix of a prompt, and its length; None if there is none."""
        fetched, self._fetched = self._fetched, None
        if fetched is not None and fetched[0] == tokens:
            return fetched[1:]
        return self._attempt(lambda: self.memory.find(tokens))

    # --- writing ------------------------------------------------------------------------------------------------------

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """Caches a prefix in memory, and in the store unless that has just refused an entry."""
        self._attempt(lambda: self.memory.keep(tokens, caches))
        if self.store is not None and time.monotonic() >= self._retry_at:
            self._attempt(lambda: self._store(tokens, caches))

    def _store(self, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        store = self.store
        assert store is not None
        new = store.pack(tokens, caches)
        if new is None:
            return
        if self._pending and self._pending + new.caches.nbytes > MAX_PENDING:
            log.warning("the prompt store cannot keep up: one prompt was not stored")
            store.discard(new)
            return
        self._pending += new.caches.nbytes
        self._on_disk(lambda: self._write(store, new), lambda stored: self._written(new))

    def _write(self, store: PromptStore, new: PackedEntry) -> None:
        """Writes an entry. If a local disk refuses it, none is written for a while, and that is logged once.

        A long prompt has an entry for each of many chunks, each of which would fail alike.
        """
        if time.monotonic() < self._retry_at:  # packed before the failure
            store.discard(new)
            return
        try:
            if store.write(new) and self._refused:
                self._refused = False
                log.warning("the prompt store can be written again")
        except OSError as error:
            if store.far:
                raise
            self._retry_at = time.monotonic() + RETRY_SECONDS
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

    # --- the disk's thread --------------------------------------------------------------------------------------------

    def _on_disk(self, task: Callable[[], T], then: Callable[[T | None], None]) -> Future[T | None]:
        """Runs a task in the disk's thread, then `then` in the worker's; with None if the task failed."""

        def ended(work: Future[T | None]) -> None:
            self._tasks.discard(work)
            if work.cancelled():  # by `close`
                return
            error = work.exception()  # such as SystemExit: `_attempt` catches the others
            if error is not None:
                log.warning("the prompt store could not be used: %r", error)
            result = None if error is not None else work.result()
            self._call(lambda: then(result))

        try:
            work = self._disk.submit(partial(self._attempt, task))
        except RuntimeError as error:  # closed, or no thread could be started
            work = Future()
            work.set_exception(error)
        self._tasks.add(work)
        work.add_done_callback(ended)
        return work

    def _attempt(self, function: Callable[[], T]) -> T | None:
        """The result of a function; None, and a warning, if it fails."""
        try:
            return function()
        except Exception as error:  # file systems raise errors of their own, and memory may be full
            log.warning("the prompt store could not be used: %s", " ".join(str(error).split()) or type(error).__name__)
            return None

    def close(self) -> bool:
        """Waits until all is written; returns whether it is. A remote store that does not answer is not waited for."""
        if self.store is not None:
            self.store.by_themselves()
        patience = self.store.deadline if self.store is not None and self.store.far else None
        left = set(self._tasks)
        while left:
            done, left = wait(left, patience, FIRST_COMPLETED)
            if not done:
                break
        self._disk.shutdown(wait=False, cancel_futures=True)
        return not left
