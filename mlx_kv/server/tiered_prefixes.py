"""Cached prefixes of the worker: in memory, and in a store on a disk.

Work of the disk runs one task after the other in its own thread, on bytes only: arrays are made and read in the
worker's thread. A failure costs a prompt the time to be read again, and never ends a row.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from mlx_kv.prefixes.index import MIN_SHARED, packed
from mlx_kv.prefixes.memory import PromptMemory
from mlx_kv.prefixes.store import PackedEntry, PromptStore, StoredPrompt

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
        self._fetching = False
        self._refused = False  # the last entry could not be written
        self._retry_at = 0.0  # time of the next attempt
        self._fetched: tuple[list[int], list[Any], int] | None = None  # for the prompt of the last `fetch`

    def bind(self, find: Callable[[], str]) -> None:
        """Does nothing: there is one fingerprint for all."""

    def serves(self, tokens: Sequence[int]) -> int:
        """Number of tokens of a prompt found in memory."""
        return self._attempt(lambda: self.memory.serves(tokens)) or 0

    # --- reading ------------------------------------------------------------------------------------------------------

    def on_disk(self, tokens: Sequence[int]) -> bool:
        """Whether the store may have much more of a prompt than memory has, so that `fetch` should be called first.

        True if it has not been looked at for a while: other processes may have added entries.
        """
        store, min_tokens = self.store, self.serves(tokens) + MIN_SHARED
        if store is None or len(packed(tokens)) // 4 <= min_tokens:
            return False
        return self._fetching or self._stale or (self._attempt(lambda: store.serves(tokens)) or 0) >= min_tokens

    @property
    def _stale(self) -> bool:
        return time.monotonic() - self._refreshed > REFRESH_EVERY

    def fetch(self, tokens: list[int], done: Callable[[], None]) -> None:
        """Reads a prompt's prefix from the store. After `done` is called, the next `find` returns it."""
        assert self.store is not None
        store, refresh, self._fetching = self.store, self._stale, True
        if refresh:
            self._refreshed = time.monotonic()

        def load() -> StoredPrompt | None:
            if refresh:
                store.refresh()
            return store.fetch(tokens)

        def arrived(fetched: StoredPrompt | None) -> None:
            self._fetching = False
            if fetched is not None:
                self._attempt(lambda: self._restore(tokens, fetched))
            done()

        self._on_disk(load, arrived)

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
            return
        self._pending += new.caches.nbytes
        self._on_disk(lambda: self._write(store, new), lambda stored: self._written(new))

    def _write(self, store: PromptStore, new: PackedEntry) -> None:
        """Writes an entry. If the disk refuses it, none is written for a while, and that is logged once.

        A long prompt has an entry for each of many chunks, each of which would fail alike.
        """
        if time.monotonic() < self._retry_at:  # packed before the failure
            return
        try:
            if store.write(new) and self._refused:
                self._refused = False
                log.warning("the prompt store can be written again")
        except OSError as error:
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
        """Waits until all is written; returns whether it is."""
        self._disk.shutdown()
        return True
