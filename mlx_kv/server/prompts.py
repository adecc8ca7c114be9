"""Processed prompts for the worker: in memory, and behind it in a store, whose disk nobody waits for.

Decides when the disk is asked, and what is too much for it. All that it does runs in a thread of its own, one thing
after the other, and only with bytes: arrays are made and read in the worker's thread. Knows nothing about jobs or rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlx_kv.prefixes import LEAST_SHARED
from mlx_kv.prompt_memory import PromptMemory
from mlx_kv.prompt_store import Fetched, PackedEntry, PromptStore

MOST_PENDING = 256 * 2**20  # bytes that wait for the disk; what comes on top is not stored
REFRESH_EVERY = 1.0  # seconds after which entries of other processes are looked for
log = logging.getLogger("mlx_kv.server")


class Prompts:
    """A `Prefixes` for one thread.

    Args:
        store: None keeps prompts in memory alone.
        call: runs something in that thread, soon; called from another.
    """

    def __init__(
        self, memory: PromptMemory, store: PromptStore | None, call: Callable[[Callable[[], None]], None]
    ) -> None:
        self.memory, self.store, self._call = memory, store, call
        self._disk = ThreadPoolExecutor(1, "mlx-kv disk")
        self._pending = 0  # bytes
        self._refreshed = -REFRESH_EVERY
        self._fetched: tuple[list[int], list[Any], int] | None = None  # for the prompt that was asked for last

    def serves(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt are in memory."""
        return self.memory.serves(tokens)

    def on_disk(self, tokens: Sequence[int]) -> bool:
        """Whether the store has much more of a prompt than memory has: then `fetch` it first."""
        if self.store is None:
            return False
        if time.monotonic() - self._refreshed > REFRESH_EVERY:
            self._refreshed = time.monotonic()
            self._disk.submit(self._attempt, self.store.refresh)
        return self.store.serves(tokens) >= self.serves(tokens) + LEAST_SHARED

    def fetch(self, tokens: list[int], done: Callable[[], None]) -> None:
        """Reads what the store has of a prompt. When `done` is called, the next `find` comes with it."""
        assert self.store is not None
        store = self.store

        def work() -> None:
            fetched = self._attempt(lambda: store.fetch(tokens))
            self._call(lambda: self._arrived(tokens, fetched, done))

        self._disk.submit(work)

    def _arrived(self, tokens: list[int], fetched: Fetched | None, done: Callable[[], None]) -> None:
        if fetched is not None:
            self._attempt(lambda: self._restored(tokens, fetched))
        done()

    def _restored(self, tokens: list[int], fetched: Fetched) -> None:
        caches = None if self.store is None else self.store.restore(fetched)
        if caches is not None:
            self._fetched = tokens, caches, fetched.count
            self.memory.keep(tokens[: fetched.count], caches)

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        fetched, self._fetched = self._fetched, None
        if fetched is not None and fetched[0] == tokens:
            return fetched[1:]
        return self.memory.find(tokens)

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        self.memory.keep(tokens, caches)
        new = None if self.store is None else self.store.pack(tokens, caches)
        if new is None:
            return
        if self._pending and self._pending + new.caches.nbytes > MOST_PENDING:
            log.warning("the prompt store is slower than prompts come: one was not stored")
            return
        self._pending += new.caches.nbytes
        self._disk.submit(self._write, new)

    def _write(self, new: PackedEntry) -> None:
        store = self.store
        assert store is not None
        self._attempt(lambda: store.write(new))
        self._call(lambda: self._written(new))

    def _written(self, new: PackedEntry) -> None:
        self._pending -= new.caches.nbytes

    def _attempt(self, what: Callable[[], Any]) -> Any:
        """A full disk costs later requests time, and this one nothing."""
        try:
            return what()
        except Exception as error:  # every file system has errors of its own
            log.warning("the prompt store could not be used: %s", error)
            return None

    def close(self) -> None:
        """Ends when all is written."""
        self._disk.shutdown()
