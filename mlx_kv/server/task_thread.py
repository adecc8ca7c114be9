"""A thread that does one thing after the other, and whose end nobody misses.

Decides what becomes of things that wait when the thread ends before its time: each ends with an error that says so, and
the next one gets a new thread. Knows nothing about what is done.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")
IDLE = 10.0  # seconds after which a thread that has nothing to do ends; the next task gets a new one
log = logging.getLogger("mlx_kv.server")


class TaskThreadError(RuntimeError):
    """Nobody is there to do a thing."""


class TaskThread:
    """Like an executor of one thread, but for one that has died: `concurrent.futures` would wait for it for ever.

    Args:
        name: of the thread, in errors too.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()  # the first is being done
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, what: Callable[[], T]) -> Future[T]:
        """What `what` returns or raises, or a TaskThreadError if the thread dies, or has been closed."""
        future: Future[T] = Future()
        with self._news:
            if self._closed:
                future.set_exception(TaskThreadError(f"the thread {self._name!r} has been closed"))
                return future
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads can be had
                    future.set_exception(TaskThreadError(f"the thread {self._name!r} cannot be started: {error}"))
                    return future
                self._thread = thread
            self._tasks.append((future, what))
            self._news.notify()
        return future

    def close(self, patience: float | None = None) -> None:
        """Takes nothing more, and ends when all is done, or when nothing has been done for so many seconds."""
        with self._news:
            self._closed, thread = True, self._thread
            self._news.notify()
        while thread is not None and thread.is_alive():
            left = len(self._tasks)
            thread.join(patience)
            if len(self._tasks) == left > 0:
                return

    def _run(self) -> None:
        try:
            self._work()
        except BaseException:
            log.exception("the thread %r has died", self._name)
            with self._news:
                left, self._tasks, self._thread = self._tasks, deque(), None
            for future, _ in left:
                with contextlib.suppress(InvalidStateError):  # it is done, or whoever waited has gone
                    future.set_exception(TaskThreadError(f"the thread {self._name!r} has died"))

    def _work(self) -> None:
        while True:
            with self._news:
                while not self._tasks:
                    if self._closed or not (self._news.wait(IDLE) or self._tasks):
                        self._thread = None
                        return
                future, what = self._tasks[0]
            if future.set_running_or_notify_cancel():
                try:
                    result = what()
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            with self._news:
                self._tasks.popleft()
